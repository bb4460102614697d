"""Balance of primaries among the members that hold an item anyway. Pure.

Convergence never moves a primary that is in its place: the first member of each new item leads it,
and a new member gets standbys only. Here a primary changes places with a standby that is in sync.
No replica moves. Where no member of an item leads less by itself, a chain of exchanges leads to one
that does: one item goes from the first member to the second, another one from there to the third.
Each chain takes an item from a member, and gives one to a member that leads at least two less, so
that there is an end, and loads are as even as the replicas allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gazette_sdk.cluster import keys
from gazette_sdk.cluster.allocator import metrics
from gazette_sdk.cluster.allocator.converge import Checkpoint
from gazette_sdk.cluster.allocator.state import State
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Put
from gazette_sdk.cluster.item_keyspace import AssignmentEntry

__all__ = ["EXCHANGES_MAX", "ITEM_EXCHANGES_MAX", "Exchanges", "balance_primaries"]

EXCHANGES_MAX = 8
"""Items whose primaries change at a time: each of them rests until its members are in sync."""

ITEM_EXCHANGES_MAX = 3
"""Exchanges of one item while members and items stay the same. A process of another implementation
may undo them: then the allocator must not repeat them for ever."""


@dataclass(slots=True)
class Exchanges:
    """Exchanges that a leader has made since items or members last changed.

    Attributes:
        counts: number of exchanges of each item, by its id.
        in_flight: ids of the items that were not in sync after their last exchange.
    """

    counts: Counter[str] = field(default_factory=Counter)
    in_flight: set[str] = field(default_factory=set)

    def restart(self) -> None:
        """Forget the exchanges: items or members have changed."""
        self.counts.clear()
        self.in_flight.clear()


def balance_primaries(state: State, made: Exchanges | None = None) -> Iterator[Checkpoint]:
    """Build the exchanges of one round. It updates the state's counts.

    Only items whose replicas are all there and in sync take part, and members that are not exiting.

    Args:
        state: the cluster, with nothing left to converge.
        made: earlier exchanges; those of this round are added.

    Yields:
        A checkpoint for each exchange.
    """
    balance = _Balance(state, Exchanges() if made is None else made)
    while (chain := balance.next_chain()) is not None:
        yield from chain


class _Balance:
    """Search of chains in one round.

    Args:
        state: the cluster.
        made: earlier exchanges.
    """

    def __init__(self, state: State, made: Exchanges) -> None:
        self._state = state
        self._made = made
        self._members = [
            index
            for index, member in enumerate(state.members)
            if not state.allocation.is_exiting(member.value)
        ]
        self._left = 0  # exchanges that this round may still make
        self._consistent: dict[int, bool] = {}
        # For each pair of members the items that the first leads, and the second may lead.
        self._items: dict[int, dict[int, list[int]]] = {}
        if self._is_even():
            return
        for index, item in enumerate(state.items):
            if item.id in made.in_flight and self._is_consistent(index):
                made.in_flight.discard(item.id)
        # One that stays out of sync for long does not stop the others.
        self._left = max(1, EXCHANGES_MAX - len(made.in_flight))
        self._find_items()

    def next_chain(self) -> list[Checkpoint] | None:
        """Return the exchanges that take an item from the member with the most; None at the end."""
        counts = self._state.primary_count
        sources = sorted(self._members, key=lambda member: -counts[member])
        fruitless: set[int] = set()
        for source in sources:
            if self._left <= 0 or self._is_even():
                return None
            # A member that one with more reaches in vain reaches no one else than that.
            if source in fruitless:
                continue
            came_from = self._reachable(source)
            fruitless.update(came_from)
            target = min(came_from, key=lambda member: (counts[member], member))
            if counts[source] - counts[target] >= 2:
                return self._exchange(came_from, target)
        return None

    def _is_even(self) -> bool:
        counts = [self._state.primary_count[member] for member in self._members]
        return not counts or max(counts) - min(counts) < 2

    def _find_items(self) -> None:
        state, taking_part = self._state, set(self._members)
        for index, current in enumerate(state.item_assignments):
            holders = state.holders[index]
            if not 2 <= len(current) == len(holders) == state.replication[index]:
                continue
            if self._made.counts[state.items[index].id] >= ITEM_EXCHANGES_MAX:
                continue
            primary = next((each for each in current if each.slot == 0), None)
            leader = primary and state.member_index(primary.zone, primary.suffix)
            if leader in taking_part and leader is not None:
                of_leader = self._items.setdefault(leader, {})
                for holder in holders:
                    if holder != leader and holder in taking_part:
                        of_leader.setdefault(holder, []).append(index)
        for of_leader in self._items.values():
            for items in of_leader.values():
                items.reverse()  # the first one is taken from the end

    def _reachable(self, source: int) -> dict[int, int]:
        """Return the members that chains from a member lead to, each with the one before it."""
        came_from = {source: source}
        queue = [source]
        for member in queue:
            for other in sorted(self._items.get(member, ())):
                if other not in came_from and self._item_of(member, other) is not None:
                    came_from[other] = member
                    queue.append(other)
        return came_from

    def _item_of(self, member: int, other: int) -> int | None:
        """Return the first item that a member can give to another one; None if there is none."""
        items = self._items[member][other]
        while items and not self._is_consistent(items[-1]):
            items.pop()
        return items[-1] if items else None

    def _is_consistent(self, index: int) -> bool:
        known = self._consistent.get(index)
        if known is None:
            state, current = self._state, self._state.item_assignments[index]
            known = all(state.is_consistent(state.items[index], each, current) for each in current)
            self._consistent[index] = known
        return known

    def _exchange(self, came_from: dict[int, int], target: int) -> list[Checkpoint]:
        chain = []
        while (source := came_from[target]) != target:
            item = self._item_of(source, target)
            assert item is not None, "the search has found one"
            for items in self._items[source].values():
                if item in items:
                    items.remove(item)
            chain.append(self._checkpoint(item, target))
            target = source
        return chain

    def _checkpoint(self, index: int, successor: int) -> Checkpoint:
        """Exchange the slots of an item's primary and of the standby of a member."""
        state, current = self._state, self._state.item_assignments[index]
        primary = next(each for each in current if each.slot == 0)
        standby = next(
            each for each in current if state.member_index(each.zone, each.suffix) == successor
        )
        item = state.items[index].id
        self._left -= 1
        self._made.counts[item] += 1
        self._made.in_flight.add(item)
        return _checkpoint(state, primary, standby)


def _checkpoint(
    state: State, primary: AssignmentEntry[Any], standby: AssignmentEntry[Any]
) -> Checkpoint:
    """Exchange slots. The standby keeps its value."""
    checkpoint = Checkpoint()
    for assignment in (primary, standby):
        checkpoint.compares.append(Compare.mod_revision(assignment.key, assignment.mod_revision))
        checkpoint.operations.append(Delete(assignment.key))
        state.count(assignment, -1)
    demoted = state.allocation.demoted_value(primary)
    for assignment, slot, value in ((primary, standby.slot, demoted), (standby, 0, standby.raw)):
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
