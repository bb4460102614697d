"""Simulations of the allocator over described clusters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cluster.allocator import simulation as module
from gazette_sdk.cluster.allocator.simulation import (
    ClusterChange,
    ClusterDescription,
    DescribedItem,
    DescribedMember,
    Load,
    MemberId,
    describe,
    dump_description,
    parse_description,
    simulate,
)
from gazette_sdk.errors import ConfigurationError, ValidationError
from support.allocation import VectorAllocation, filled, item_value, member_value

ONE, TWO = MemberId("a", "one-"), MemberId("a", "two-")
THREE, FOUR = MemberId("b", "three"), MemberId("b", "four")
FOUR_IN_TWO_ZONES = (ONE, TWO, THREE, FOUR)


def cluster(*items, members=FOUR_IN_TWO_ZONES, limit=100):
    """A cluster of ``(replication, *members)``, named item-0 and so on."""
    return ClusterDescription(
        tuple(DescribedMember(member, limit) for member in members),
        tuple(
            DescribedItem(f"item-{number}", replication, holders)
            for number, (replication, *holders) in enumerate(items)
            for holders in [tuple(holders)]
        ),
    )


def settled(count, replication=3, members=FOUR_IN_TWO_ZONES, limit=100):
    """A cluster of so many items, as the allocator places them."""
    return simulate(
        cluster(*[(replication,)] * count, members=members, limit=limit), ClusterChange()
    ).after


def test_a_settled_cluster_stays_as_it_is():
    description = settled(8)
    found = simulate(description, ClusterChange())
    assert found.after == found.before == description
    assert (found.moves, found.moves_min, found.rounds, found.changed) == (0, 0, 0, ())
    assert found.is_settled


def test_without_a_change_it_is_what_the_allocator_would_do_now():
    found = simulate(cluster((2,), (3, ONE, THREE)), ClusterChange())
    assert (found.moves, found.moves_min) == (3, 3)
    assert [len(item.holders) for item in found.after.items] == [2, 3]
    assert {ONE, THREE} < set(found.after.items[1].holders)
    assert found.pending == ()


def test_what_is_pending_is_told_apart_from_the_change():
    found = simulate(cluster((2, ONE), (2, TWO, THREE)), ClusterChange(removed=(TWO,)))
    assert [each.name for each in found.pending] == ["item-0"]
    assert found.before.items[0].holders == (ONE, FOUR)
    assert [each.name for each in found.changed] == ["item-1"]
    assert found.moves == 1


def test_a_lost_member_moves_what_it_held():
    description = settled(8)
    held = [item.name for item in description.items if ONE in item.holders]
    primaries = sum(item.holders[0] == ONE for item in description.items)
    found = simulate(description, ClusterChange(removed=(ONE,)))
    assert found.moves == found.moves_min == len(held) == 6
    assert [each.name for each in found.changed if each.added] == held
    assert found.primaries_changed >= primaries
    loads = {each.id: each for each in found.members}
    assert loads[ONE].before == Load(primaries, 6, 0.06)
    assert loads[ONE].after is None
    assert all(loads[member].after.replicas == 8 for member in (TWO, THREE, FOUR))
    assert sorted(loads[member].after.primaries for member in (TWO, THREE, FOUR)) == [2, 3, 3]


@pytest.mark.parametrize("lost", FOUR_IN_TWO_ZONES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 20])
def test_a_broker_that_is_lost_and_comes_back_gets_only_what_balance_requires(lost, count):
    degraded = simulate(settled(count), ClusterChange(removed=(lost,))).after
    back = simulate(degraded, ClusterChange(added=(DescribedMember(lost, 100),)))
    share = -(-count * 3 // 4)
    assert back.moves == back.moves_min == 3 * (count - share)
    assert simulate(back.after, ClusterChange()).changed == ()


def test_a_lost_zone_leaves_replicas_without_a_place():
    found = simulate(settled(2), ClusterChange(removed_zones=("a",)))
    assert {each.id for each in found.members if each.after} == {THREE, FOUR}
    assert [each.missing for each in found.unplaced] == [1, 1]
    assert found.unplaced[0].reason == "R = 3 needs as many members, and 2 can hold any"
    assert found.single_zone == ("item-0", "item-1")


def test_members_that_are_full_leave_replicas_without_a_place():
    found = simulate(settled(4, limit=3), ClusterChange(removed=(ONE,)))
    assert sum(each.missing for each in found.unplaced) == 3
    assert {each.reason for each in found.unplaced} == {"no other member has room; 3 of 3 are full"}


def test_a_drained_member_leaves_when_others_hold_its_items():
    description = settled(8)
    held = sum(ONE in item.holders for item in description.items)
    found = simulate(description, ClusterChange(drained=(ONE,)))
    assert [member.id for member in found.after.members] == [TWO, THREE, FOUR]
    assert found.staying == ()
    assert found.moves == held
    # First replicas are added, then others removed, then the member leaves.
    assert found.rounds >= 3


def test_a_drained_member_stays_where_no_other_has_room():
    description = settled(2, members=(ONE, TWO, THREE))
    found = simulate(description, ClusterChange(drained=(ONE,)))
    assert found.staying == (ONE,)
    assert found.moves == 0


def test_members_drain_one_after_the_other_while_others_join():
    five, six = MemberId("a", "five"), MemberId("b", "six-")
    joining = (DescribedMember(five, 100), DescribedMember(six, 100))
    found = simulate(settled(8), ClusterChange(drained=FOUR_IN_TWO_ZONES[1:3], added=joining))
    assert {member.id for member in found.after.members} == {ONE, FOUR, five, six}
    assert all(len(item.holders) == 3 for item in found.after.items)


@pytest.mark.parametrize("lost", [{"removed": (ONE,)}, {"removed_zones": ("a",)}])
def test_a_lost_member_can_join_again_at_once(lost):
    found = simulate(settled(2), ClusterChange(added=(DescribedMember(ONE, 9),), **lost))
    loads = {each.id: each for each in found.members}
    assert loads[ONE].limit == 9
    assert loads[ONE].after.replicas > 0
    # It is the last one to have joined.
    assert found.after.members[-1].id == ONE


def test_replication_changes_for_one_item_and_for_all_below_a_name():
    members = tuple(DescribedMember(member, 100) for member in FOUR_IN_TWO_ZONES)
    names = ("left/a", "left/b", "right/a")
    description = ClusterDescription(members, tuple(DescribedItem(n, 1, (ONE,)) for n in names))
    found = simulate(description, ClusterChange(replication={"left/": 2, "right/a": 0}))
    assert {item.name: len(item.holders) for item in found.after.items} == {
        "left/a": 2,
        "left/b": 2,
        "right/a": 0,
    }


def test_specs_create_change_and_delete_items():
    description = settled(3, replication=1)
    change = ClusterChange(upserted={"item-0": 2, "made": 3}, deleted=("item-2",))
    found = simulate(description, change)
    assert {item.name: len(item.holders) for item in found.after.items} == {
        "item-0": 2,
        "item-1": 1,
        "made": 3,
    }
    assert {each.name: each.added for each in found.changed} == {
        "item-0": 1,
        "item-2": 0,
        "made": 3,
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (ClusterChange(removed=(MemberId("a", "nine"),)), "there is no member a/nine; there are a"),
        (ClusterChange(drained=(MemberId("a", "nine"),)), "there is no member a/nine"),
        (ClusterChange(removed_zones=("c",)), "there is no zone c; there are a, b"),
        (ClusterChange(added=(DescribedMember(ONE, 1),)), "a/one- is in the cluster already"),
        (ClusterChange(replication={"item-7": 1}), "there is no journal item-7"),
        (ClusterChange(replication={"items/": 1}), "there is no journal items/"),
        (ClusterChange(deleted=("item-7",)), "there is no journal item-7"),
    ],
)
def test_a_change_of_what_is_not_there_is_refused(change, problem):
    with pytest.raises(ConfigurationError, match=problem):
        simulate(settled(2), change)


def test_rounds_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "ROUNDS_MAX", 1)
    found = simulate(settled(8), ClusterChange(drained=(ONE,)))
    assert (found.rounds, found.is_settled) == (1, False)


MEMBERS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=6)


@given(MEMBERS, st.lists(st.integers(0, 4), max_size=8), st.data())
def test_the_outcome_is_a_cluster_that_stays(members, replications, data):
    ids = [MemberId(zone, f"member-{n}") for n, (zone, _) in enumerate(members)]
    description = ClusterDescription(
        tuple(DescribedMember(i, limit) for i, (_, limit) in zip(ids, members, strict=True)),
        tuple(DescribedItem(f"item-{n}", r) for n, r in enumerate(replications)),
    )
    some = st.sets(st.sampled_from(ids), max_size=2) if ids else st.just(set())
    found = simulate(description, ClusterChange(removed=tuple(data.draw(some))))
    assert found.is_settled
    assert found.moves >= found.moves_min >= 0
    assert {each.name for each in found.unplaced} == {
        item.name for item in found.after.items if len(item.holders) < item.replication
    }
    again = simulate(found.after, ClusterChange())
    assert again.changed == ()
    assert parse_description(dump_description(found.after)) == found.after if ids else True


# ------------------------------------------------------------- descriptions

TWICE = """
members: [{zone: a, id: one-, limit: 5}]
journals: [{name: item, replication: 1, assignments: [a/one-, a/one-]}]
"""


def test_a_description_is_read_as_it_was_written():
    description = ClusterDescription(
        (
            DescribedMember(MemberId("eu/west", "broker-1"), 7),
            DescribedMember(MemberId("b", "broker-2"), 0, exiting=True),
        ),
        (
            DescribedItem("topic=ä/part-000", 2, (MemberId("b", "broker-2"),)),
            DescribedItem("unassigned", 0, (MemberId("eu/west", "broker-1"),)),
        ),
    )
    assert parse_description(dump_description(description)) == description


def test_a_mirror_is_described_without_what_is_about_to_go():
    keyspace = filled(
        [
            ("/root/members/b#two-", member_value(5, exiting=True)),
            ("/root/members/a#one-", member_value(7)),
            ("/root/items/item", item_value(2)),
            ("/root/assign/item#a#one-#1", "consistent"),
            ("/root/assign/item#a#one-#3", ""),
            ("/root/assign/item#a#gone#2", ""),
            ("/root/assign/item#b#two-#0", ""),
            ("/root/assign/deleted#b#two-#0", ""),
        ]
    )
    two = MemberId("b", "two-")
    assert describe(keyspace, VectorAllocation()) == ClusterDescription(
        (DescribedMember(two, 5, exiting=True), DescribedMember(ONE, 7)),
        (DescribedItem("item", 2, (two, ONE)),),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[", "not YAML"),
        ("", "malformed: it: Input should be"),
        ("journals: []", "malformed: members: Field required"),
        ("members: [{zone: a, id: one-, limit: -1}]", "members.0.limit: Input should be greater"),
        ("members: [{zone: a, id: one-, limit: '5'}]", "members.0.limit: Input should be a valid"),
        ("members: [{zone: a, id: one-, limit: 5, x: 1}]", "members.0.x: Extra inputs"),
        ("members: [{zone: a, id: 'o#e-', limit: 5}]", "not a valid token"),
        ("members: [{zone: a, id: x, limit: 5}]", "invalid length"),
        (
            "members: [{zone: a, id: one-, limit: 5}, {zone: a, id: one-, limit: 5}]",
            "member a/one- is there twice",
        ),
        ("members: []\njournals: [{name: /one, replication: 1}]", "must not begin with"),
        ("members: []\njournals: [{name: item, replication: -1}]", "replication: Input should"),
        (
            "members: []\njournals: [{name: item, replication: 1, assignments: [a/one-]}]",
            "item is assigned to a/one-, which is no member",
        ),
        (
            "members: []\njournals: [{name: item, replication: 1, assignments: [one-]}]",
            "'one-' names no member: write ZONE/ID",
        ),
        (
            TWICE,
            "item: assignment to a/one- is there twice",
        ),
        (
            "members: []\njournals: [{name: item, replication: 1}, {name: item, replication: 1}]",
            "journal item is there twice",
        ),
    ],
)
def test_a_malformed_description_is_refused_with_its_place(text, problem):
    with pytest.raises(ValidationError, match=problem) as caught:
        parse_description(text)
    assert str(caught.value).startswith("the description is ")
