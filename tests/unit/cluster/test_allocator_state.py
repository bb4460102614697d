from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cluster.allocator.state import (
    LOAD_RATIO_MAX,
    State,
    leader_of,
    shed_capacity,
)
from support.allocation import VectorAllocation, filled, item_value, member_value
from support.vectors import group

FIXTURE = list(group("allocator", "keys")["decode_fixture"]["etcd"].items())
VECTORS = {case["source"].rpartition(":")[2]: case for case in group("allocator", "state")}


def state_of(entries):
    return State(filled(entries), VectorAllocation())


def ratio(text):
    if text == "MAX_FLOAT32":
        return LOAD_RATIO_MAX
    return math.inf if text == "+Inf" else pytest.approx(float(Fraction(text)), rel=1e-6)


def test_extraction_over_the_fixture():
    vector = VECTORS["TestExtractOverFixture"]
    keyspace = filled(FIXTURE)
    state = State(keyspace, VectorAllocation())
    assert state.zones == vector["zones"]
    assert state.zone_slots == vector["zone_slots"]
    assert state.member_slots == vector["member_slots"]
    assert state.item_slots == vector["item_slots"]
    assert state.total_count == vector["member_total_count"]
    assert state.primary_count == vector["member_primary_count"]
    for view in vector["local_views"]:
        zone, _, suffix = view["local_key"].removeprefix("/root/members/").partition("#")
        index = state.member_index(zone, suffix)
        assert (-1 if index is None else index) == view["member_index"]
        local = keyspace.local_assignments(zone, suffix)
        known = [a for a in local if keyspace.item(a.item)]
        assert [a.item for a in known] == [i["item"] for i in view["local_items"]]
        for held, expect in zip(known, view["local_items"], strict=True):
            begin, end = expect["assignments"]
            assert keyspace.assignments(held.item) == state.assignments[begin:end]
            assert state.assignments[begin:end][expect["index"]] is held


@given(st.permutations([entry for entry in FIXTURE if "/members/" in entry[0]]))
def test_exactly_one_member_leads_whatever_the_order_of_announcements(members):
    keyspace = filled(members)
    leader = leader_of(keyspace.members())
    assert leader is min(keyspace.members(), key=lambda m: m.create_revision)
    assert leader_of([]) is None


def test_load_ratios():
    vector = VECTORS["TestLoadRatio"]
    state = state_of(FIXTURE)
    for counts, expected in (
        (state.total_count, vector["by_assignment_index_total"]),
        (state.primary_count, vector["by_assignment_index_primary"]),
    ):
        found = [state.load_ratio(a, counts) for a in state.assignments]
        assert found == [ratio(text) for text in expected]


def test_load_ratios_of_a_draining_member():
    vector = VECTORS["TestLoadRatioWithShedding"]
    state = state_of(vector["etcd_in_order"])
    assert state.shed == vector["shed"]
    found = [state.load_ratio(a, state.total_count) for a in state.assignments]
    assert found == [ratio(text) for text in vector["load_ratio_total_by_assignment"]]
    assert found[0] > LOAD_RATIO_MAX
    assert math.isnan(state.load_ratio(state.assignments[0], [0, 0]))


@pytest.mark.parametrize(
    "name", ["TestShedCapacityReplicationConstrained", "TestShedCapacityExcessConstrained"]
)
def test_shed_capacity(name):
    vector = VECTORS[name]
    state = state_of(
        [
            *(
                (f"/root/members/{key}", member_value(limit, exiting=exiting))
                for key, limit, exiting in vector["members_in_create_order"]
            ),
            *(
                (f"/root/items/item-{number}", item_value(replication))
                for number, replication in enumerate(vector["item_replication"])
            ),
        ]
    )
    assert state.shed == vector["shed"]
    limits = [limit for _, limit, _ in vector["members_in_create_order"]]
    assert state.member_slots == sum(limits) - sum(vector["shed"])


def test_nobody_sheds_unless_exiting():
    assert state_of(FIXTURE).shed == VECTORS["TestShedCapacityNoExiting"]["shed"]


def test_the_oldest_exiting_member_drains_first():
    members = [("b", 3), ("a", 3), ("c", 3)]  # in order of announcement
    state = state_of(
        [(f"/root/members/z#{m}", member_value(limit, exiting=m != "c")) for m, limit in members]
        + [("/root/items/i", item_value(1)), ("/root/items/j", item_value(1))]
    )
    assert [m.suffix for m in state.members] == ["a", "b", "c"]
    assert state.shed == [3, 3, 0]
    state = state_of(
        [(f"/root/members/z#{m}", member_value(limit, exiting=m != "c")) for m, limit in members]
        + [(f"/root/items/{n}", item_value(1)) for n in range(5)]
    )
    assert state.shed == [1, 3, 0]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=6),
    st.integers(0, 60),
    st.integers(0, 4),
)
def test_only_what_is_spare_is_shed(members, item_slots, max_replication):
    limits = [limit for limit, _ in members]
    exiting = [index for index, (_, leaves) in enumerate(members) if leaves]
    shed = shed_capacity(exiting, limits, item_slots=item_slots, max_replication=max_replication)
    assert all(0 <= s <= limit for s, limit in zip(shed, limits, strict=True))
    assert all(shed[m] == 0 for m in range(len(members)) if m not in exiting)
    assert sum(limits) - sum(shed) >= min(sum(limits), item_slots)
    assert sum(s == 0 for s in shed) >= min(len(members), max_replication)


def test_assignments_do_not_change_what_was_solved_and_all_else_does():
    network = state_of(FIXTURE).network
    assert state_of([e for e in FIXTURE if "/assign/" not in e[0]]).network == network
    for entry in (
        ("/root/items/item-3", item_value(1)),
        ("/root/members/us-west#new", member_value(1)),
        ("/root/members/us-east#foo", member_value(3)),
        ("/root/items/item-1", item_value(1)),
        ("/root/members/us-east#foo", member_value(2, exiting=True)),
    ):
        replaced = dict(FIXTURE) | dict([entry])
        assert state_of(replaced.items()).network != network


def test_a_cluster_without_members_or_items_has_a_state():
    state = state_of([("/root/assign/gone#a#member#0", "")])
    assert (state.zones, state.member_slots, state.item_slots) == ([], 0, 0)
    assert [a.item for a in state.dead_assignments] == ["gone"]


def test_holders_are_the_members_that_exist_each_of_them_once():
    state = state_of(
        [
            ("/root/items/item", item_value(3)),
            ("/root/items/other", item_value(1)),
            ("/root/members/a#member", member_value(2)),
            ("/root/members/b#member", member_value(2)),
            ("/root/assign/item#a#member#1", ""),
            ("/root/assign/item#a#member#2", ""),
            ("/root/assign/item#a#gone#0", ""),
            ("/root/assign/item#b#member#3", ""),
        ]
    )
    assert state.holders == [[0, 1], []]
    assert state.total_count == [2, 1]
