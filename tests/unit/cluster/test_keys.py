from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cluster.items import (
    AssignmentEntry,
    ItemEntry,
    MemberEntry,
    assignment_key,
    assignments_prefix,
    item_assignments_prefix,
    item_key,
    member_key,
    parse_assignment,
)
from support.allocation import filled
from support.vectors import group

VECTORS = group("allocator", "keys")
FIXTURE = VECTORS["decode_fixture"]

PARTS = st.text(st.characters(min_codepoint=0x24, codec="utf-8"), min_size=1, max_size=6)
SLOTS = st.integers(0, 20)


@pytest.mark.parametrize("case", VECTORS["build"], ids=lambda case: case["kind"])
def test_keys_are_built(case):
    root = case["root"]
    match case["kind"]:
        case "member":
            built = member_key(root, case["zone"], case["suffix"])
        case "item":
            built = item_key(root, case["id"])
        case "item_assignments_prefix":
            built = item_assignments_prefix(root, case["id"])
        case "assignment":
            built = assignment_key(root, case["id"], case["zone"], case["suffix"], case["slot"])
    assert built == case["key"].encode()


@pytest.mark.parametrize("ordered", VECTORS["ordering"]["each_list_is_strictly_ascending_bytewise"])
def test_keys_are_ordered_as_their_parts(ordered):
    assert all(a < b for a, b in pairwise([key.encode() for key in ordered]))


@pytest.mark.parametrize("case", VECTORS["rejected"]["components_each_alone_invalid"])
def test_parts_that_break_the_order_are_refused(case):
    match case:
        case {"member": {"zone": zone, "suffix": suffix}}:
            build = partial(member_key, "/root", zone, suffix)
        case {"item": item}:
            build = partial(item_key, "/root", item)
        case {"assignment": {"id": item, "zone": zone, "suffix": suffix}}:
            build = partial(assignment_key, "/root", item, zone, suffix, 0)
    with pytest.raises(ValueError, match="can not be a part of a key"):
        build()


def test_the_fixture_decodes_in_order_and_all_else_is_dropped(caplog):
    keyspace = filled(FIXTURE["etcd"].items())
    expected = FIXTURE["expect_in_order"]
    assert [entry.key.decode() for entry in keyspace.entries] == [e["key"] for e in expected]
    for entry, expect in zip(keyspace.entries, expected, strict=True):
        match entry:
            case AssignmentEntry():
                found = [entry.item, entry.zone, entry.suffix, entry.slot]
                assert found == expect["assignment"]
                assert entry.value == expect["consistent"]
            case ItemEntry():
                assert [entry.id, entry.value] == expect["item"]
            case MemberEntry():
                assert [entry.zone, entry.suffix, entry.value.limit] == expect["member"]
    dropped = set(FIXTURE["etcd"]) - {e["key"] for e in expected}
    logged = [record.getMessage() for record in caplog.records]
    assert all(any(text.startswith(key) for text in logged) for key in dropped)


@pytest.mark.parametrize("case", VECTORS["lookups_on_fixture"]["cases"])
def test_lookups_on_the_fixture(case):
    keyspace = filled(FIXTURE["etcd"].items())
    if "prefixed" in case:
        begin, end = case["indices"]
        assert list(keyspace.prefixed(case["prefixed"].encode())) == keyspace.entries[begin:end]
    else:
        assert keyspace.search(case["search"].encode())[1] == case["found"]


def test_lookups_by_item_and_member():
    keyspace = filled(FIXTURE["etcd"].items())
    assert keyspace.item("item-two").value == 1
    assert keyspace.item("item-tw") is None
    assert keyspace.member("us-west", "baz").value.limit == 3
    assert [(a.suffix, a.slot) for a in keyspace.assignments("item-two")] == [
        ("member", 2),
        ("bar", 0),
        ("baz", 1),
    ]
    assert keyspace.assignments("item-tw") == []
    local = keyspace.local_assignments("us-west", "baz")
    assert [a.item for a in local] == ["item-1", "item-missing", "item-two"]
    assert [item.id for item in keyspace.items()] == ["item-1", "item-two"]
    assert [member.suffix for member in keyspace.members()] == ["bar", "foo", "baz"]
    assert len(keyspace.all_assignments()) == 6


@given(st.lists(st.tuples(PARTS, PARTS, PARTS, SLOTS), min_size=2, max_size=8))
def test_built_keys_parse_back_and_sort_as_tuples(tuples):
    prefix = assignments_prefix("/r")
    built = {assignment_key("/r", *parts): parts for parts in tuples}
    for key, parts in built.items():
        assert parse_assignment(key[len(prefix) :].decode()) == parts
    ordered = [built[key][:3] for key in sorted(built)]
    assert ordered == sorted(ordered)


@pytest.mark.parametrize("section", ["a#b", "", "#", "a#b#c#x", "a#b#c#1.0", "a#b#c#", "a#b#c#1#2"])
def test_other_shapes_of_assignments_are_refused(section):
    with pytest.raises(ValueError, match=r"expected 4 parts|is no number"):
        parse_assignment(section)
