"""Undoing of needless moves of a placement (guarantee G5 of allocator section 6).

Push/relabel is greedy. To place a replica of one item it may displace another item, which then
takes the place that was free: two moves where one does. Such moves are undone here where nothing is
worse for it.
"""

from __future__ import annotations

from typing import NamedTuple

from gazette_sdk.cluster.allocator.placement import fair_share
from gazette_sdk.cluster.allocator.state import State

__all__ = ["undo_needless_moves"]

PROBES_PER_REPLICA = 10
"""Bound of the search, for each replica of the cluster. It keeps the search shorter than
push/relabel: 10,000 journals need 1,400 probes in all if one of 60 brokers is lost, and all of
300,000 if one of three zones returns."""


def undo_needless_moves(state: State, placement: list[list[int]]) -> None:
    """Return items to members that hold them now, where the placement stays as good.

    An item that would move from one member to another stays if its member has room, or if items
    that are new to its member can go to the other one instead, perhaps by way of further members.
    The number of replicas, their spread over zones, and what members hold above their fair share
    get no worse.

    Args:
        state: the cluster.
        placement: for each item the ascending indices of members; changed in place.
    """
    _Moves(state, placement).undo()


class _Step(NamedTuple):
    """Part of a chain: ``item``, new to ``source``, goes to ``target`` instead."""

    item: int
    source: int
    target: int


class _Moves:
    """Differences of a placement from the current assignments.

    Args:
        state: the cluster.
        placement: the placement; changed in place.
    """

    def __init__(self, state: State, placement: list[list[int]]) -> None:
        self._state = state
        self._placement = placement
        self._zone_share = max(len(state.zones), 1)
        self._room = [fair_share(state, member) for member in range(len(state.members))]
        # For each member the items that are new to it, in order of items.
        self._new_items: list[dict[int, None]] = [{} for _ in state.members]
        self._moved: list[int] = []
        self._probes = PROBES_PER_REPLICA * max(state.item_slots, 1)
        for item, members in enumerate(placement):
            held = state.holders[item]
            for member in members:
                self._room[member] -= 1
            if members != held:
                self._moved.append(item)
                for member in members:
                    if member not in held:
                        self._new_items[member][item] = None

    def undo(self) -> None:
        """Undo moves: first those for which one new item goes elsewhere, then those for several."""
        for length_max in (1, len(self._room)):
            for item in self._moved:
                members, held = self._placement[item], self._state.holders[item]
                for left in [member for member in held if member not in members]:
                    for gained in [member for member in members if member not in held]:
                        if self._stay(item, left, gained, length_max):
                            break
                members.sort()

    def _stay(self, item: int, left: int, gained: int, length_max: int) -> bool:
        """Let ``item`` stay on the member it would leave, if possible. Return True if it does."""
        single_zone, crowding = self._spread_change(item, gained, left)
        # A crowded zone is no reason to move what is there already.
        change = (single_zone, min(crowding, 0))
        has_room = self._room[left] > 0 and change <= (0, 0)
        chain: list[_Step] = []
        if not has_room and self._probes > 0:
            chain = self._chain(item, left, gained, change, length_max)
        if not chain and not has_room:
            return False
        for step in chain:
            self._replace(step.item, step.source, step.target)
            self._placement[step.item].sort()
        self._replace(item, gained, left)
        self._room[chain[-1].target if chain else left] -= 1
        self._room[gained] += 1
        return True

    def _chain(
        self, staying: int, left: int, gained: int, change: tuple[int, int], length_max: int
    ) -> list[_Step]:
        """Return the shortest chain of new items that go elsewhere, so that a member gets room.

        Args:
            staying: the item that needs it. Each other item is in the chain once at most, so that
                changes of the spread add up.
            left: the member that needs room.
            gained: a member that gets room in exchange.
            change: change of the spread over zones so far; with the chain it is not worse.
            length_max: bound of the chain's length. A chain of one leads to ``gained``.

        Returns:
            The chain; empty if there is none, or if the search takes too long.
        """
        others = [] if length_max == 1 else [m for m in range(len(self._room)) if m != gained]
        reached: dict[int, _Step] = {}
        queue = [(left, change, 1)]
        for source, so_far, length in queue:
            targets = [m for m in (gained, *others) if m not in reached and m != left]
            for item in self._new_items[source]:
                self._probes -= len(targets)
                if self._probes < 0:
                    return []
                for target in targets:
                    if target in reached or target in self._placement[item]:
                        continue
                    if item == staying or any(s.item == item for s in _path(reached, left, source)):
                        break
                    single_zone, crowding = self._spread_change(item, source, target)
                    total = (so_far[0] + single_zone, so_far[1] + crowding)
                    if total > (0, 0):
                        continue
                    reached[target] = _Step(item, source, target)
                    if target == gained or self._room[target] > 0:
                        return _path(reached, left, target)
                    if length < length_max:
                        queue.append((target, total, length + 1))
        return []

    def _replace(self, item: int, old: int, new: int) -> None:
        members, held = self._placement[item], self._state.holders[item]
        members[members.index(old)] = new
        if old not in held:
            del self._new_items[old][item]
        if new not in held:
            self._new_items[new][item] = None

    def _spread_change(self, item: int, old: int, new: int) -> tuple[int, int]:
        """Return how the item's spread over zones gets worse with another member.

        Returns:
            Change of the number of items in a single zone, and of the replicas beyond an even
            share of a zone.
        """
        state, members = self._state, self._placement[item]
        old_zone, new_zone = state.members[old].zone, state.members[new].zone
        if old_zone == new_zone:
            return 0, 0
        zones = [state.members[member].zone for member in members]
        in_old, in_new, count = zones.count(old_zone), zones.count(new_zone), len(zones)
        even = -(-state.replication[item] // self._zone_share)
        single_zone = (in_new + 1 == count > 1) - (in_old == count > 1)
        return single_zone, (in_new >= even) - (in_old > even)


def _path(reached: dict[int, _Step], begin: int, end: int) -> list[_Step]:
    """Return the steps from ``begin`` to ``end``."""
    path: list[_Step] = []
    while end != begin:
        step = reached[end]
        path.append(step)
        end = step.source
    return path[::-1]
