"""Balance of primaries among the members that hold an item anyway. Pure.

Convergence never moves a primary that is in its place, so that a new member would get standbys
only. Where the work is at the primary, as with shards, a primary changes places with a standby that
is in sync, whose member leads at least two items less. Each exchange makes the loads more even, so
that there is an end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gazette_sdk.cluster import keys
from gazette_sdk.cluster.allocator import metrics
from gazette_sdk.cluster.allocator.converge import Checkpoint
from gazette_sdk.cluster.allocator.state import State
from gazette_sdk.cluster.etcd import Compare, Delete, Put
from gazette_sdk.cluster.item_keyspace import AssignmentEntry

__all__ = ["EXCHANGES_MAX", "balance_primaries"]

EXCHANGES_MAX = 16
"""Exchanges of one round: a demoted member has to catch up again."""


def balance_primaries(state: State) -> Iterator[Checkpoint]:
    """Build the exchanges of one round. It updates the state's counts.

    Only items whose replicas are all there and in sync take part, and members that are not exiting.

    Args:
        state: the cluster, with nothing left to converge.

    Yields:
        A checkpoint for each exchange.
    """
    exchanges = 0
    for index, item in enumerate(state.items):
        current = state.item_assignments[index]
        if len(current) < 2 or len(current) != state.replication[index]:
            continue
        found = _exchange(state, current)
        if found is None or not all(state.is_consistent(item, each, current) for each in current):
            continue
        yield _checkpoint(state, *found)
        exchanges += 1
        if exchanges == EXCHANGES_MAX:
            return


def _exchange(
    state: State, current: Sequence[AssignmentEntry[Any]]
) -> tuple[AssignmentEntry[Any], AssignmentEntry[Any]] | None:
    """Return the primary, and the standby whose member leads the least; None to leave them."""
    primary = next((each for each in current if each.slot == 0), None)
    leads = {each.key: _leads(state, each) for each in current}
    if primary is None or (most := leads[primary.key]) is None:
        return None
    standbys = [
        (count, each.key, each)
        for each in current
        if each is not primary and (count := leads[each.key]) is not None
    ]
    if not standbys:
        return None
    least, _, standby = min(standbys)
    return (primary, standby) if most - least >= 2 else None


def _leads(state: State, assignment: AssignmentEntry[Any]) -> int | None:
    """Return the number of items that a member leads; None if it is gone or exiting."""
    member = state.member_index(assignment.zone, assignment.suffix)
    if member is None or state.allocation.is_exiting(state.members[member].value):
        return None
    return state.primary_count[member]


def _checkpoint(
    state: State, primary: AssignmentEntry[Any], standby: AssignmentEntry[Any]
) -> Checkpoint:
    """Exchange slots. The standby keeps its value; the primary begins again as a standby."""
    checkpoint = Checkpoint()
    for assignment in (primary, standby):
        checkpoint.compares.append(Compare.mod_revision(assignment.key, assignment.mod_revision))
        checkpoint.operations.append(Delete(assignment.key))
        state.count(assignment, -1)
    for assignment, slot, value in ((primary, standby.slot, b""), (standby, 0, standby.raw)):
        key = keys.assignment_key(
            state.root, assignment.item, assignment.zone, assignment.suffix, slot
        )
        checkpoint.operations.append(Put(key, value, assignment.lease))
        member = state.member_index(assignment.zone, assignment.suffix)
        assert member is not None, "members that are gone take no part"
        state.total_count[member] += 1
        if slot == 0:
            state.primary_count[member] += 1
    metrics.ASSIGNMENT_PACKED.inc()
    return checkpoint
