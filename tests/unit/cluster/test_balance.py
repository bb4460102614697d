from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cluster.allocator.moves import (
    EXCHANGES_MAX,
    ITEM_EXCHANGES_MAX,
    Exchanges,
    balance_primaries,
)
from gazette_sdk.cluster.allocator.state import State
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalAllocation, route_value
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Put
from gazette_sdk.cluster.items import assignment_key, member_key
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import route_of
from support.allocation import VectorAllocation, fill, filled, item_value, member_value

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


def test_a_chain_of_exchanges_leads_to_a_member_that_shares_no_item_with_the_first():
    # Loads are 3, 2 and 1: no two members of an item differ by two.
    keyspace = cluster(["ab", "ab", "ab", "bc", "bc", "cb"])
    assert moved(exchanges(keyspace)) == [
        ["item-3#zone#b#1", "item-3#zone#c#0"],
        ["item-0#zone#a#1", "item-0#zone#b#0"],
    ]


def test_items_that_are_not_in_sync_again_count_for_the_bound():
    keyspace = cluster(["ab"] * 40 + ["bA"], members=("a", "b"))
    made = Exchanges(in_flight={"item-0", "item-40"})
    found = list(balance_primaries(State(keyspace, VectorAllocation()), made))
    # The first one is in sync again.
    assert len(found) == EXCHANGES_MAX - 1
    assert len(made.in_flight) == EXCHANGES_MAX
    assert "item-40" in made.in_flight


def test_items_that_never_sync_do_not_stop_the_others():
    keyspace = cluster(["aB"] * EXCHANGES_MAX + ["ab", "ab"], members=("a", "b"))
    made = Exchanges(in_flight={f"item-{number}" for number in range(EXCHANGES_MAX)})
    assert len(list(balance_primaries(State(keyspace, VectorAllocation()), made))) == 1


def test_what_another_process_undoes_is_not_repeated_for_ever():
    made = Exchanges()
    keyspace = cluster(["ab", "ab"], members=("a", "b"))
    rounds = [list(balance_primaries(State(keyspace, VectorAllocation()), made)) for _ in range(9)]
    assert [len(found) for found in rounds] == [1] * (2 * ITEM_EXCHANGES_MAX) + [0] * 3
    made.restart()
    assert len(list(balance_primaries(State(keyspace, VectorAllocation()), made))) == 1


def test_a_journal_keeps_the_route_that_its_replicas_have():
    route = route_value(route_of([("zone", "broker-a", 0), ("zone", "broker-b", 1)]))
    suffixes = ("broker-a", "broker-b")
    keyspace = BrokerKeySpace("/root")
    spec = pb.JournalSpec(name="journal/one", replication=2)
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.GZIP
    spec.fragment.refresh_interval.FromSeconds(300)
    entries = []
    for name in ("journal/one", "journal/two"):
        spec.name = name
        entries.append((keyspace.item_key(name), spec.SerializeToString()))
        entries += [
            (assignment_key("/root", name, "zone", suffix, slot), route)
            for slot, suffix in enumerate(suffixes)
        ]
    for suffix in suffixes:
        broker = pb.BrokerSpec(journal_limit=9)
        broker.process_spec.id.zone, broker.process_spec.id.suffix = "zone", suffix
        broker.process_spec.endpoint = "http://localhost:8080"
        entries.append((member_key("/root", "zone", suffix), broker.SerializeToString()))
    fill(keyspace, [(key.decode(), value) for key, value in sorted(entries)])
    (checkpoint,) = balance_primaries(State(keyspace, JournalAllocation()))
    puts = [each for each in checkpoint.operations if isinstance(each, Put)]
    assert [(each.key, each.value) for each in puts] == [
        (b"/root/assign/journal/one#zone#broker-a#1", route),
        (b"/root/assign/journal/one#zone#broker-b#0", route),
    ]


@given(st.lists(st.permutations("abcd").map(lambda held: "".join(held[:2])), max_size=8))
def test_rounds_end_with_loads_as_even_as_the_replicas_allow(placed):
    placed = list(placed)
    best = min(sum(map(square, Counter(leads).values())) for leads in itertools.product(*placed))
    for _ in range(len(placed) + 1):
        evenness = sum(map(square, Counter(held[0] for held in placed).values()))
        checkpoints = exchanges(cluster(placed, members="abcd"))
        if not checkpoints:
            assert evenness == best
            return
        for (_, promoted), checkpoint in zip(moved(checkpoints), checkpoints, strict=True):
            number = int(promoted.split("#")[0].removeprefix("item-"))
            before, after = placed[number]
            assert promoted == f"item-{number}#zone#{after}#0"
            placed[number] = after + before
            assert len(checkpoint.operations) == 4
        assert sum(map(square, Counter(held[0] for held in placed).values())) < evenness
    raise AssertionError("there is no end")


def square(number):
    return number * number
