"""The messages of a batch are mapped to the journals that each of them is mapped to alone."""

from __future__ import annotations

from operator import itemgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk import Publisher, mapping
from gazette_sdk.errors import (
    MappingError,
)
from gazette_sdk.message.mapping import Partitions, fnv1a32, fnv1a32_many
from gazette_sdk.protocol import broker_pb2 as pb
from support.published import WAIT_S


@given(st.lists(st.binary(max_size=40), max_size=50))
def test_many_hashes_are_those_of_each(contents):
    assert fnv1a32_many(contents).tolist() == [fnv1a32(each) for each in contents]


class Subclass(str):
    __slots__ = ()


_KEYS = st.one_of(
    st.text(max_size=5), st.binary(max_size=5), st.integers(0, 9), st.just(Subclass("x"))
)


@given(st.lists(_KEYS, min_size=1, max_size=30), st.integers(1, 9), st.data())
def test_many_messages_are_mapped_as_each_is(keys, count, data):
    partitions = [
        Partitions([pb.JournalSpec(name=f"part/{index:03d}") for index in range(n)])
        for n in (count, count + 1)
    ]
    for make in (mapping.modulo, mapping.rendezvous):
        fresh = make("topic=x", key=itemgetter("k"))
        messages = [{"k": key} for key in keys]
        for _ in range(3):
            listed = data.draw(st.sampled_from(partitions))
            found = [listed.names[index] for index in fresh.pick_many(messages, listed)]
            assert found == [make("topic=x", key=itemgetter("k")).pick(m, listed) for m in messages]
            assert found == [fresh.pick(m, listed) for m in messages]


@pytest.mark.parametrize("key", [True, 1.0, None])
def test_keys_which_equal_others_but_are_none_are_refused_after_those(key):
    by_key = mapping.modulo("topic=x", key=itemgetter("k"))
    partitions = Partitions([pb.JournalSpec(name="part/000")])
    by_key.pick_many([{"k": 1}], partitions)
    with pytest.raises(MappingError, match="no agreed bytes"):
        by_key.pick_many([{"k": 1}, {"k": key}], partitions)
    with pytest.raises(MappingError, match="no agreed bytes"):
        by_key.pick({"k": key}, partitions)


def test_not_all_keys_are_kept(monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.mapping._KEYS_KNOWN_MAX", 10)
    by_key = mapping.modulo("topic=x", key=itemgetter("k"))
    partitions = Partitions([pb.JournalSpec(name=f"part/{index:03d}") for index in range(3)])
    messages = [{"k": str(n)} for n in range(30)]
    for count in (8, 16, 4, 30):
        found = by_key.pick_many(messages[:count], partitions)
        assert list(found) == [fnv1a32(m["k"].encode()) % 3 for m in messages[:count]]
        assert len(by_key._known[1]) <= max(16, count)


def test_any_mapping_maps_batches(orders, transport):
    transport.create("a/journal")
    with Publisher(transport=orders) as publisher:
        messages = [{"n": n} for n in range(200)]
        random = publisher.publish_batch(messages, mapping=mapping.random("topic=orders"))
        assert len(random.result(WAIT_S).journals) == 4
        named = publisher.publish_batch(messages, mapping=lambda m: f"orders/part-{m['n'] % 2}")
        assert named.result(WAIT_S).journals == ("orders/part-0", "orders/part-1")
        with pytest.raises(MappingError, match="no journal matches"):
            publisher.publish_batch(messages, mapping=mapping.random("topic=none"))
