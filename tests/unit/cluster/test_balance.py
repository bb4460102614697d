from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cluster.allocator.balance import EXCHANGES_MAX, balance_primaries
from gazette_sdk.cluster.allocator.state import State
from gazette_sdk.cluster.etcd import Compare, Delete, Put
from support.allocation import VectorAllocation, filled, item_value, member_value

SYNCED, LAGGING = "consistent", ""


def cluster(placed, *, replication=2, members=("a", "b", "c"), exiting=()):
    """A cluster from the members of each item, the primary first; a small letter is in sync."""
    entries = [
        (f"/root/items/item-{number}", item_value(replication)) for number in range(len(placed))
    ]
    entries += [
        (f"/root/members/zone#{name}", member_value(100, exiting=name in exiting))
        for name in members
    ]
    for number, held in enumerate(placed):
        entries += [
            (
                f"/root/assign/item-{number}#zone#{name.lower()}#{slot}",
                SYNCED if name.islower() else LAGGING,
            )
            for slot, name in enumerate(held)
        ]
    return filled(entries)


def exchanges(keyspace):
    return list(balance_primaries(State(keyspace, VectorAllocation())))


def moved(checkpoints):
    """Keys that each checkpoint writes."""
    return [
        [
            each.key.decode().removeprefix("/root/assign/")
            for each in checkpoint.operations
            if isinstance(each, Put)
        ]
        for checkpoint in checkpoints
    ]


def test_a_primary_changes_places_with_a_standby_that_leads_two_less():
    keyspace = cluster(["ab", "ab"], members=("a", "b"))
    (checkpoint,) = exchanges(keyspace)
    primary, standby = keyspace.assignments("item-0")
    assert checkpoint.compares == [
        Compare.mod_revision(primary.key, primary.mod_revision),
        Compare.mod_revision(standby.key, standby.mod_revision),
    ]
    deletes = [each.key for each in checkpoint.operations if isinstance(each, Delete)]
    puts = [each for each in checkpoint.operations if isinstance(each, Put)]
    assert deletes == [primary.key, standby.key]
    assert [(each.key.decode(), each.value, each.lease) for each in puts] == [
        ("/root/assign/item-0#zone#a#1", b"", primary.lease),
        ("/root/assign/item-0#zone#b#0", standby.raw, standby.lease),
    ]


def test_nothing_is_exchanged_where_loads_differ_by_one():
    assert exchanges(cluster(["ab", "ab", "ba"])) == []


def test_replicas_that_lag_and_missing_ones_take_no_part():
    assert exchanges(cluster(["aB", "aB"])) == []
    assert exchanges(cluster(["Ab", "Ab"])) == []
    assert exchanges(cluster(["a", "a"])) == []
    assert exchanges(cluster(["ab", "ab"], replication=3)) == []


def test_members_that_leave_or_are_gone_take_no_part():
    assert exchanges(cluster(["ab", "ab"], exiting=("b",))) == []
    assert exchanges(cluster(["ab", "ab"], exiting=("a",))) == []
    assert exchanges(cluster(["ab", "ab"], members=("a",))) == []


def test_the_standby_that_leads_the_least_is_chosen():
    keyspace = cluster(["abc", "abc", "abc", "bca"], replication=3)
    assert moved(exchanges(keyspace)) == [["item-0#zone#a#2", "item-0#zone#c#0"]]


def test_a_round_is_bounded():
    assert len(exchanges(cluster(["ab"] * 50, members=("a", "b")))) == EXCHANGES_MAX


@given(st.lists(st.permutations("abc").map(lambda held: "".join(held[:2])), max_size=30))
def test_rounds_end_and_each_exchange_makes_loads_more_even(placed):
    placed = list(placed)
    for _ in range(len(placed) + 1):
        counts = {name: sum(held[0] == name for held in placed) for name in "abc"}
        checkpoints = exchanges(cluster(placed))
        if not checkpoints:
            assert all(counts[held[0]] - counts[held[1]] < 2 for held in placed)
            return
        for (_, promoted), checkpoint in zip(moved(checkpoints), checkpoints, strict=True):
            number = int(promoted.split("#")[0].removeprefix("item-"))
            before, after = placed[number]
            assert promoted == f"item-{number}#zone#{after}#0"
            assert counts[before] - counts[after] >= 2
            counts[before] -= 1
            counts[after] += 1
            placed[number] = after + before
            assert len(checkpoint.operations) == 4
    raise AssertionError("there is no end")
