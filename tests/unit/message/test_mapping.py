"""Mappings send a key to the journal that other implementations send it to."""

from __future__ import annotations

from operator import itemgetter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import ConfigurationError, MappingError, ValidationError
from gazette_sdk.message import mapping
from gazette_sdk.message.mapping import Partitions, fnv1a32, key_bytes
from gazette_sdk.protocol import broker_pb2 as pb
from support.vectors import golden, group

VECTORS = group("message", "mapping")
GOLDEN = golden("consumer/messages/mapping.json")


def partitions(names) -> Partitions:
    return Partitions([pb.JournalSpec(name=name) for name in names])


def numbered(count: int) -> Partitions:
    return partitions(f"a/topic/part-{index:03d}" for index in range(count))


def identity(message):
    return message


MODULO = mapping.modulo("topic=x", key=identity)
RENDEZVOUS = mapping.rendezvous("topic=x", key=identity)


@pytest.mark.parametrize("case", VECTORS["fnv1a32"])
def test_hashes_are_those_of_the_vectors(case):
    assert fnv1a32(case["key_utf8"].encode()) == case["hash"]


def test_golden_hashes_are_met():
    assert [fnv1a32(bytes.fromhex(key)) for key in GOLDEN["keys_hex"]] == GOLDEN["fnv1a32"]


@pytest.mark.parametrize("case", VECTORS["modulo"]["cases"])
def test_modulo_meets_its_regression_set(case):
    listed = numbered(VECTORS["modulo"]["partitions"])
    assert MODULO.pick(case["key_utf8"], listed) == listed.names[case["expect_index"]]


@pytest.mark.parametrize("case", VECTORS["small_modulo"])
def test_modulo_meets_small_sets(case):
    listed = numbered(case["partitions"])
    assert MODULO.pick(case["key_utf8"], listed) == listed.names[case["expect_index"]]


@pytest.mark.parametrize("count", VECTORS["rendezvous"]["partition_counts"])
@pytest.mark.parametrize("case", VECTORS["rendezvous"]["cases"])
def test_rendezvous_meets_its_regression_set(case, count):
    listed = numbered(count)
    assert RENDEZVOUS.pick(case["key_utf8"], listed) == listed.names[case["expect_index"]]


@pytest.mark.parametrize("case", GOLDEN["partitions"], ids=lambda c: c["journals"][0])
def test_golden_choices_are_met(case):
    listed = partitions(case["journals"])
    keys = [bytes.fromhex(key) for key in GOLDEN["keys_hex"]]
    for made, name in ((MODULO, "modulo"), (RENDEZVOUS, "rendezvous")):
        chosen = [case["journals"].index(made.pick(key, listed)) for key in keys]
        assert chosen == case[name]


def test_random_draws_more_than_one():
    case = VECTORS["random"]
    listed = numbered(case["partitions"])
    made = mapping.random("topic=x", source=Random(7))
    assert len({made.pick(None, listed) for _ in range(case["draws"])}) > 1


@pytest.mark.parametrize("made", [MODULO, RENDEZVOUS, mapping.random("topic=x")])
def test_without_partitions_nothing_maps(made):
    with pytest.raises(MappingError, match="empty ListResponse") as caught:
        made.pick("key", partitions([]))
    assert "topic=x" in str(caught.value)


@pytest.mark.parametrize("made", [mapping.modulo, mapping.rendezvous])
def test_the_name_of_a_field_is_no_key(made):
    with pytest.raises(ConfigurationError, match=r"attrgetter\('customer'\)"):
        made("topic=x", key="customer")


def test_a_word_without_partitions_may_be_meant_as_a_topic():
    with pytest.raises(MappingError, match=r"selected by 'topic=shop/orders'$"):
        mapping.random("shop/orders").pick(None, partitions([]))
    with pytest.raises(MappingError, match=r"or check its labels$"):
        mapping.random("shop/orders/part-000").pick(None, partitions([]))


def test_partitions_are_sorted_by_the_bytes_of_their_names():
    assert partitions(["b/é", "b/z", "a/x", "b/Z"]).names == ("a/x", "b/Z", "b/z", "b/é")


def test_ties_of_rendezvous_go_to_the_lowest_index():
    listed = numbered(3)
    listed.hashes = np.array([5, 5, 5], dtype=np.uint32)
    assert RENDEZVOUS.pick("anything", listed) == listed.names[0]
    listed.hashes = np.array([fnv1a32(b"k")] * 3, dtype=np.uint32)  # all weights are zero
    assert RENDEZVOUS.pick("k", listed) == listed.names[0]


@given(st.text(max_size=20), st.integers(min_value=1, max_value=40))
def test_rendezvous_is_the_plain_rule(key, count):
    listed = numbered(count)
    best, chosen = 0, 0
    for index, name in enumerate(listed.names):
        weight = fnv1a32(key.encode()) ^ fnv1a32(name.encode())
        if weight > best:
            best, chosen = weight, index
    assert RENDEZVOUS.pick(key, listed) == listed.names[chosen]


@pytest.mark.parametrize(
    ("key", "raw"),
    [("é", b"\xc3\xa9"), (b"\x00\xff", b"\x00\xff"), (-7, b"-7"), (bytearray(b"ab"), b"ab")],
)
def test_keys_have_the_bytes_other_implementations_give_them(key, raw):
    assert key_bytes(key) == raw
    listed = numbered(7)
    assert MODULO.pick(key, listed) == listed.names[fnv1a32(raw) % 7]


@pytest.mark.parametrize("key", [1.5, True, None, ("a",), ["a"]])
def test_keys_without_agreed_bytes_are_refused(key):
    with pytest.raises(MappingError, match="str, bytes or int"):
        MODULO.pick(key, numbered(2))


def test_direct_maps_everything_to_one_journal():
    made = mapping.direct("a/journal")
    assert made({"any": "thing"}) == "a/journal"
    with pytest.raises(ValidationError):
        mapping.direct("/not/clean/")


def test_a_malformed_selector_is_refused_when_the_mapping_is_made():
    with pytest.raises(ValidationError):
        mapping.modulo("topic in (", key=itemgetter("k"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: mapping.random(None), "a label selector is a text"),
        (lambda: mapping.modulo(7, key=str), "a label selector is a text"),
        (lambda: mapping.direct(None), "a journal's name is a text"),
    ],
)
def test_a_selector_or_a_journal_that_is_no_text_is_refused(make, text):
    with pytest.raises(ValidationError, match=text):
        make()


def test_content_types_are_known_from_the_listing():
    spec = pb.JournalSpec(name="a/journal")
    spec.labels.labels.add(name="content-type", value="application/x-ndjson")
    listed = Partitions([spec, pb.JournalSpec(name="b/journal")])
    assert listed.content_types == {"a/journal": "application/x-ndjson", "b/journal": ""}


def test_a_key_that_utf8_cannot_hold_is_refused():
    with pytest.raises(MappingError, match=r"key '\\udcff' has no bytes: .*surrogates"):
        key_bytes("\udcff")
