"""Decisions of a primary about replicas that it does not reach, over every combination."""

from __future__ import annotations

import dataclasses
from itertools import chain, combinations, product

import pytest

from gazette_sdk.broker.failover.decision import (
    Action,
    Candidate,
    Decision,
    decide,
    hand_over,
    replace,
    unchanged,
)
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Put
from gazette_sdk.cluster.items import AssignmentEntry
from gazette_sdk.protocol import broker_pb2 as pb


def assignment(suffix: str, slot: int, zone: str = "z0") -> AssignmentEntry[pb.Route]:
    key = f"/assign/j#{zone}#{suffix}#{slot}".encode()
    raw = b"route"
    return AssignmentEntry(
        key, pb.Route(), 1, 10 + slot, 1, 100 + slot, raw, "j", zone, suffix, slot
    )


def subsets(of):
    return list(chain.from_iterable(combinations(of, count) for count in range(len(of) + 1)))


CANDIDATES = [Candidate("z1", "spare-1", 0.5), Candidate("z0", "spare-0", 0.1)]


@pytest.mark.parametrize(
    ("count", "desired", "candidates", "lost"),
    [
        (count, desired, candidates, lost)
        for count, desired, candidates in product((1, 2, 3, 4), (1, 2, 3), subsets(CANDIDATES))
        for lost in subsets(range(1, count))
    ],
)
def test_every_combination_has_its_action(count, desired, candidates, lost):
    assignments = [assignment(f"peer-{slot}", slot) for slot in range(count)]
    cut_off = {("z0", f"peer-{slot}") for slot in lost}
    found = decide(assignments, assignments[0], cut_off, candidates, desired=desired)
    has_room = bool(candidates) or count > desired
    if not lost:
        assert found.action is Action.NOTHING
    elif len(lost) == count - 1 and len(candidates) < min(count, desired) - 1 and has_room:
        assert (found.action, found.peer) == (Action.HAND_OVER, assignments[1])
        assert (found.substitute is None) == (count > desired)
    elif count > desired:
        assert (found.action, found.substitute) == (Action.REPLACE, None)
        assert found.peer is assignments[lost[0]]
    elif candidates:
        assert found.action is Action.REPLACE
        assert found.peer is assignments[lost[0]]
        # Only one zone remains: the second one is wanted.
        wanted = CANDIDATES[0] if CANDIDATES[0] in candidates else CANDIDATES[1]
        assert found.substitute is wanted
    else:
        assert found.action is Action.NOTHING
    assert found.peer is not assignments[0]


@pytest.mark.parametrize("lost", subsets((1, 2)))
@pytest.mark.parametrize("has_substitute", [False, True])
def test_a_journal_is_handed_over_where_nobody_is_reached_and_a_substitute_exists(
    lost, has_substitute
):
    assignments = [assignment(f"peer-{slot}", slot) for slot in range(3)]
    cut_off = {("z0", f"peer-{slot}") for slot in lost}
    candidates = [Candidate("z1", "spare", 0, is_reached=False)] if has_substitute else []
    found = decide(assignments, assignments[0], cut_off, candidates, desired=3)
    if has_substitute and len(lost) == 2:
        assert found == Decision(Action.HAND_OVER, assignments[1], candidates[0])
    else:
        assert found.action is Action.NOTHING


@pytest.mark.parametrize("is_spare_reached", [False, True])
@pytest.mark.parametrize("unreached", subsets((1, 2, 3)))
@pytest.mark.parametrize("lost", subsets((1, 2, 3)))
def test_one_link_that_is_cut_suffices_where_no_replica_and_too_few_others_are_reached(
    lost, unreached, is_spare_reached
):
    assignments = [assignment(f"peer-{slot}", slot) for slot in range(4)]
    spare = Candidate("z1", "spare", 0, is_reached=is_spare_reached)
    found = decide(
        assignments,
        assignments[0],
        {("z0", f"peer-{slot}") for slot in lost},
        [spare],
        desired=4,
        unreached={("z0", f"peer-{slot}") for slot in unreached},
    )
    if not lost:
        assert found.action is Action.NOTHING
    elif {*lost, *unreached} == {1, 2, 3}:
        successor = next((slot for slot in (1, 2, 3) if slot not in lost), 1)
        assert found == Decision(Action.HAND_OVER, assignments[successor], spare)
    elif is_spare_reached:
        assert found == Decision(Action.REPLACE, assignments[lost[0]], spare)
    else:
        assert found.action is Action.NOTHING


@pytest.mark.parametrize("silent", subsets(("peer-1", "peer-2", "spare")))
@pytest.mark.parametrize("count", [3, 4])
def test_nothing_is_handed_over_to_the_dead(silent, count):
    """A broker whose peers have all died keeps its places, and so does a lone one."""
    assignments = [assignment(f"peer-{slot}", slot) for slot in range(count)]
    everyone = {("z0", f"peer-{slot}") for slot in range(1, count)}
    spare = Candidate("z1", "spare", 0, is_reached=False)
    dead = {("z1" if name == "spare" else "z0", name) for name in silent}
    found = decide(
        assignments,
        assignments[0],
        everyone,
        [spare],
        desired=3,
        silent=dead if count == 3 else dead | {("z0", "peer-3")},
    )
    living = [slot for slot in (1, 2) if f"peer-{slot}" not in silent]
    if living and count == 4:
        assert found == Decision(Action.HAND_OVER, assignments[living[0]])
    elif living and "spare" not in silent:
        assert found == Decision(Action.HAND_OVER, assignments[living[0]], spare)
    elif count == 4:
        assert found == Decision(Action.REPLACE, assignments[1])
    else:
        assert found.action is Action.NOTHING


@pytest.mark.parametrize("joined", subsets((1, 2)))
def test_only_a_replica_that_is_synchronized_becomes_the_primary(joined):
    """One that joined lately has nothing of the journal, and may know where others continue it."""
    assignments = [assignment(f"peer-{slot}", slot) for slot in range(3)]
    for slot in joined:
        assignments[slot] = dataclasses.replace(assignments[slot], raw=b"")
    everyone = {("z0", "peer-1"), ("z0", "peer-2")}
    spare = [Candidate("z1", "spare", 0, is_reached=False)]
    found = decide(assignments, assignments[0], everyone, spare, desired=3)
    synchronized = [slot for slot in (1, 2) if slot not in joined]
    if synchronized:
        assert (found.action, found.peer) == (Action.HAND_OVER, assignments[synchronized[0]])
    else:
        assert found.action is Action.NOTHING


def test_the_least_loaded_takes_the_place_where_two_zones_remain():
    assignments = [assignment("p0", 0), assignment("p1", 1, "z1"), assignment("p2", 2, "z1")]
    found = decide(assignments, assignments[0], {("z1", "p1")}, CANDIDATES, desired=3)
    assert found.substitute is CANDIDATES[1]


def test_a_primary_that_others_removed_decides_about_the_order_of_slots():
    assignments = [assignment("p2", 2), assignment("p1", 1), assignment("p0", 0)]
    cut_off = {("z0", "p1"), ("z0", "p2")}
    spare = [Candidate("z1", "spare", 0, is_reached=False)]
    found = decide(assignments, assignments[2], cut_off, spare, desired=3)
    assert (found.action, found.peer) == (Action.HAND_OVER, assignments[1])


def test_operations_of_a_replacement_and_of_a_hand_over():
    primary, peer = assignment("p0", 0), assignment("p1", 1)
    assert unchanged([primary, peer]) == [
        Compare.mod_revision(primary.key, 10),
        Compare.mod_revision(peer.key, 11),
    ]
    assert replace(peer, None, 0) == [Delete(peer.key)]
    assert replace(peer, b"new", 7) == [Delete(peer.key), Put(b"new", b"", 7)]
    assert hand_over(primary, peer, b"p1-in-0", b"new-in-1", 7) == [
        Delete(primary.key),
        Delete(peer.key),
        Put(b"p1-in-0", b"route", 101),
        Put(b"new-in-1", b"", 7),
    ]
    assert hand_over(primary, peer, b"p1-in-0", None, 0) == [
        Delete(primary.key),
        Delete(peer.key),
        Put(b"p1-in-0", b"route", 101),
    ]
