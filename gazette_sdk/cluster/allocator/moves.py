"""Placements of items on members, and the moves from the current to the desired one.

A placement lists for each item the indices of the members that hold it. Its shortfall is measured,
and it is completed, by the guarantees of allocator section 6.

Push/relabel is greedy (guarantee G5). To place a replica of one item it may displace another item,
which then takes the place that was free: two moves where one does. Such moves are undone here where
nothing is worse for it.

A round of convergence goes from current towards desired assignments (allocator section 8). It is
pure: it reads a :class:`State` and yields checkpoints, each with the comparisons and operations of
one item. An item always keeps its number of consistent replicas, no member gets more items than its
limit, and later rounds perform the steps that are not possible now.

Primaries are balanced among the members that hold an item anyway. Convergence never moves a primary
that is in its place: the first member of each new item leads it, and a new member gets standbys
only. Here a primary changes places with a standby that is in sync. No replica moves. Where no
member of an item leads less by itself, a chain of exchanges leads to one that does: one item goes
from the first member to the second, another one from there to the third. Each chain takes an item
from a member, and gives one to a member that leads at least two less, so that there is an end, and
loads are as even as the replicas allow.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from gazette_sdk.cluster.allocator import state as metrics
from gazette_sdk.cluster.allocator.state import State
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Operation, Put
from gazette_sdk.cluster.items import AssignmentEntry, ItemEntry, assignment_key, item_key


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


@dataclass(slots=True)
class Checkpoint:
    """Comparisons and operations that must be in one transaction."""

    compares: list[Compare] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)


class Addition(NamedTuple):
    """A new assignment: index of the member, and slot."""

    member: int
    slot: int


def converge(state: State, desired: Sequence[Sequence[int]]) -> Iterator[Checkpoint]:
    """Build one round. It updates the state's counts, so use a state for one round only.

    Args:
        state: the cluster.
        desired: for each item the indices of its desired members, ascending.

    Yields:
        The checkpoints, in order of items.
    """
    dead = [
        (item, list(group)) for item, group in groupby(state.dead_assignments, lambda a: a.item)
    ]
    dead.reverse()
    for index, item in enumerate(state.items):
        while dead and dead[-1][0] < item.id:
            yield remove_dead(state.root, dead.pop()[1])
        if _is_settled(state, index, desired[index]):
            continue
        checkpoint = ItemState(state, index, desired[index]).checkpoint()
        if checkpoint.operations:
            yield checkpoint
    while dead:
        yield remove_dead(state.root, dead.pop()[1])


def remove_dead(root: str, assignments: Sequence[AssignmentEntry[Any]]) -> Checkpoint:
    """Remove the assignments of an item that does not exist.

    The first comparison fails the transaction if the item was created again meanwhile.
    """
    checkpoint = Checkpoint()
    checkpoint.compares.append(Compare.create_revision(item_key(root, assignments[0].item), 0))
    for assignment in assignments:
        checkpoint.compares.append(_unchanged(assignment))
        checkpoint.operations.append(Delete(assignment.key))
        metrics.ASSIGNMENT_REMOVED.inc()
    return checkpoint


def _is_settled(state: State, index: int, desired: Sequence[int]) -> bool:
    """Return True if an item has exactly the desired members, in slots 0 and up."""
    current = state.item_assignments[index]
    if len(current) != len(desired) or state.holders[index] != desired:
        return False
    return {assignment.slot for assignment in current} == _packed_slots(len(current))


@functools.cache
def _packed_slots(count: int) -> frozenset[int]:
    return frozenset(range(count))


class ItemState:
    """Current and desired assignments of one item.

    Args:
        state: the cluster; :meth:`build` updates its counts.
        index: index of the item in ``state.items``.
        desired: indices of its desired members, ascending.

    Attributes:
        add: assignments to be added.
        remove: assignments to be removed.
        keep: assignments to be kept; the first one becomes the primary, in slot 0.
    """

    def __init__(self, state: State, index: int, desired: Sequence[int]) -> None:
        self._state = state
        self._item: ItemEntry[Any] = state.items[index]
        self._replication = state.replication[index]
        self._current = state.item_assignments[index]
        self._consistent = {
            a.key for a in self._current if state.is_consistent(self._item, a, self._current)
        }
        self.add: list[Addition] = []
        self.remove: list[AssignmentEntry[Any]] = []
        self.keep: list[AssignmentEntry[Any]] = []
        self._repeated: list[AssignmentEntry[Any]] = []  # second ones of a member, removed at once

        wanted = set(desired)
        held: set[int | None] = set()
        for assignment in self._current:
            member = state.member_index(assignment.zone, assignment.suffix)
            if member in held:
                self._repeated.append(assignment)
            elif member in wanted:
                held.add(member)
                self.keep.append(assignment)
            else:
                self.remove.append(assignment)
        slot = max((a.slot for a in self._current), default=-1)
        for member in desired:
            if member not in held:
                slot += 1
                self.add.append(Addition(member, slot))

    def checkpoint(self) -> Checkpoint:
        """Return this round's comparisons and operations for the item."""
        self.constrain_removals()
        self.constrain_order()
        self.constrain_additions()
        return self.build()

    def constrain_removals(self) -> None:
        """Remove only while the desired number of consistent replicas remains."""
        state = self._state
        loads = {a.key: state.load_ratio(a, state.total_count) for a in self.remove}
        candidates = sorted(self.remove, key=lambda a: loads[a.key], reverse=True)
        consistent = len(self._consistent)
        accepted = 0
        for candidate in candidates:
            if consistent < self._replication:
                break
            if candidate.key in self._consistent:
                if consistent == self._replication:
                    break
                consistent -= 1
            accepted += 1
        self.remove = [*candidates[:accepted], *self._repeated]
        self.keep += candidates[accepted:]

    def constrain_order(self) -> None:
        """Sort by slot, and choose a primary where there is none."""
        self.keep.sort(key=lambda a: a.slot)
        if not self.keep or self.keep[0].slot == 0:
            return
        state = self._state
        best = self.keep[0]
        for other in self.keep[1:]:
            is_consistent, best_is = other.key in self._consistent, best.key in self._consistent
            if is_consistent != best_is:
                if is_consistent:
                    best = other
            elif state.load_ratio(other, state.primary_count) < state.load_ratio(
                best, state.primary_count
            ):
                best = other
        self.keep.remove(best)
        self.keep.insert(0, best)

    def constrain_additions(self) -> None:
        """Add only to members below their limit."""
        state = self._state
        self.add = [
            addition
            for addition in self.add
            if state.effective_limit(addition.member) > state.total_count[addition.member]
        ]

    def build(self) -> Checkpoint:
        """Return the comparisons and operations of the additions, removals and moves."""
        checkpoint = Checkpoint()
        self._build_additions(checkpoint)
        self._build_removals(checkpoint)
        if self.keep and self.keep[0].slot != 0:
            self._build_move(checkpoint, self.keep[0], 0)
        if not self.add and not self.remove:
            for slot, assignment in enumerate(self.keep):
                if slot > 0 and assignment.slot != slot:
                    self._build_move(checkpoint, assignment, slot)
                    break
        return checkpoint

    def _build_additions(self, checkpoint: Checkpoint) -> None:
        state = self._state
        for index, slot in self.add:
            member = state.members[index]
            key = assignment_key(state.root, self._item.id, member.zone, member.suffix, slot)
            # The member's limit may have been lowered.
            checkpoint.compares.append(Compare.mod_revision(member.key, member.mod_revision))
            checkpoint.operations.append(Put(key, b"", member.lease))
            state.total_count[index] += 1
            if slot == 0:
                state.primary_count[index] += 1
            metrics.ASSIGNMENT_ADDED.inc()

    def _build_removals(self, checkpoint: Checkpoint) -> None:
        if self.remove:
            # The item's replication may have been raised.
            checkpoint.compares.append(
                Compare.mod_revision(self._item.key, self._item.mod_revision)
            )
        for assignment in self.remove:
            checkpoint.compares.append(_unchanged(assignment))
            checkpoint.operations.append(Delete(assignment.key))
            self._state.count(assignment, -1)
            metrics.ASSIGNMENT_REMOVED.inc()

    def _build_move(
        self, checkpoint: Checkpoint, assignment: AssignmentEntry[Any], slot: int
    ) -> None:
        """Move an assignment to another slot. It keeps its value and lease."""
        state = self._state
        key = assignment_key(state.root, assignment.item, assignment.zone, assignment.suffix, slot)
        checkpoint.compares.append(_unchanged(assignment))
        checkpoint.operations.append(Delete(assignment.key))
        checkpoint.operations.append(Put(key, assignment.raw, assignment.lease))
        member = state.member_index(assignment.zone, assignment.suffix)
        if slot == 0 and member is not None:
            state.primary_count[member] += 1
        metrics.ASSIGNMENT_PACKED.inc()


def _unchanged(assignment: AssignmentEntry[Any]) -> Compare:
    return Compare.mod_revision(assignment.key, assignment.mod_revision)


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
        key = assignment_key(state.root, assignment.item, assignment.zone, assignment.suffix, slot)
        checkpoint.operations.append(Put(key, value, assignment.lease))
        member = state.member_index(assignment.zone, assignment.suffix)
        assert member is not None, "members that are gone take no part"
        state.total_count[member] += 1
        if slot == 0:
            state.primary_count[member] += 1
    metrics.ASSIGNMENT_PACKED.inc()
    return checkpoint
