"""Placements: their shortfall and their completion (guarantees of allocator section 6).

A placement lists for each item the indices of the members that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gazette_sdk.cluster.allocator.state import State

__all__ = ["Shortfall", "complete", "current_placement", "scaled", "shortfall"]


class Shortfall(NamedTuple):
    """Shortfall of a placement, the most important first; all 0 if it is complete.

    ``unplaced``: replicas without a member. ``single_zone``: items with several replicas, all in
    one zone though there are more. ``above_share``: items that members hold above their fair
    share, summed.
    """

    unplaced: int
    single_zone: int
    above_share: int


def current_placement(state: State) -> list[list[int]] | None:
    """Return the current placement; ``None`` if a limit or a replication forbids to keep it."""
    for assignments, holders, replication in zip(
        state.item_assignments, state.holders, state.replication, strict=True
    ):
        # Fewer holders than assignments: a member is gone, or holds two slots.
        if not len(holders) == len(assignments) <= replication:
            return None
    if any(count > state.effective_limit(m) for m, count in enumerate(state.total_count)):
        return None
    return [list(holders) for holders in state.holders]


def shortfall(state: State, placement: Sequence[Sequence[int]]) -> Shortfall:
    """Return the shortfall of a placement."""
    counts = [0] * len(state.members)
    unplaced = single_zone = 0
    for holders, replication in zip(placement, state.replication, strict=True):
        unplaced += replication - len(holders)
        for member in holders:
            counts[member] += 1
        if len(holders) > 1 and len(state.zones) > 1:
            first = state.members[holders[0]].zone
            single_zone += all(state.members[member].zone == first for member in holders)
    above = sum(max(0, count - fair_share(state, m)) for m, count in enumerate(counts))
    return Shortfall(unplaced, single_zone, above)


def fair_share(state: State, member: int) -> int:
    """Return the greatest number of items of a member when all members are loaded alike."""
    return scaled(state.effective_limit(member), state.item_slots, state.member_slots)


def scaled(value: int, numerator: int, denominator: int) -> int:
    """Return ``value`` times a fraction, rounded up; ``value`` if the fraction is above 1."""
    if numerator > denominator:
        return value
    return -(-value * numerator // denominator) if denominator else value


def complete(state: State, placement: list[list[int]]) -> None:
    """Place replicas without a member where limits allow it, in order of items.

    A replica is placed on a member with room, or replaces another item's, which moves on in turn:
    the shortest augmenting path of a maximum matching. Only limits bound this: fair share and
    zones have lower priority.

    Args:
        state: the cluster.
        placement: completed in place.
    """
    room = [state.effective_limit(member) for member in range(len(state.members))]
    items_of: list[set[int]] = [set() for _ in state.members]
    for item, holders in enumerate(placement):
        for member in holders:
            room[member] -= 1
            items_of[member].add(item)
    # Members without a path to one with room. They never get one, and are not tried again.
    dead: set[int] = set()
    for item, replication in enumerate(state.replication):
        while len(items_of) - len(dead) > 0 and len(placement[item]) < replication:
            path = _augmenting_path(item, placement, items_of, room, dead)
            if not path:
                break
            room[path[-1][1]] -= 1
            for mover, member in reversed(path):
                placement[mover].append(member)
                items_of[member].add(mover)
            for (_, member), (mover, _) in pairwise(path):
                placement[mover].remove(member)
                items_of[member].discard(mover)
    for holders in placement:
        holders.sort()


def _augmenting_path(
    item: int,
    placement: Sequence[Sequence[int]],
    items_of: Sequence[set[int]],
    room: Sequence[int],
    dead: set[int],
) -> list[tuple[int, int]]:
    """Return the shortest chain of moves that gives ``item`` one more member.

    Returns:
        Pairs of an item and the member it moves to. Each item but the first leaves the member of
        the pair before it. Empty if there is no path; the members tried are dead then.
    """
    came_from: dict[int, tuple[int, int | None]] = {}
    queue: list[tuple[int, int | None]] = [(item, None)]
    moved = {item}
    for mover, left in queue:
        for member in range(len(room)):
            if member in came_from or member in dead or member in placement[mover]:
                continue
            came_from[member] = (mover, left)
            if room[member] > 0:
                path = []
                at: int | None = member
                while at is not None:
                    moving, previous = came_from[at]
                    path.append((moving, at))
                    at = previous
                return path[::-1]
            for other in sorted(items_of[member] - moved):
                moved.add(other)
                queue.append((other, member))
    dead.update(came_from)
    return []
