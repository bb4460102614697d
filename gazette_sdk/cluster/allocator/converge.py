"""One round of convergence: from current towards desired assignments (allocator section 8).

Pure: it reads a :class:`State` and yields checkpoints, each with the comparisons and operations of
one item. An item always keeps its number of consistent replicas, no member gets more items than its
limit, and later rounds perform the steps that are not possible now.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from gazette_sdk.cluster import keys
from gazette_sdk.cluster.allocator import metrics
from gazette_sdk.cluster.allocator.state import State
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Operation, Put
from gazette_sdk.cluster.item_keyspace import AssignmentEntry, ItemEntry

__all__ = ["Addition", "Checkpoint", "ItemState", "converge", "remove_dead"]


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
    checkpoint.compares.append(Compare.create_revision(keys.item_key(root, assignments[0].item), 0))
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
            key = keys.assignment_key(state.root, self._item.id, member.zone, member.suffix, slot)
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
        key = keys.assignment_key(
            state.root, assignment.item, assignment.zone, assignment.suffix, slot
        )
        checkpoint.compares.append(_unchanged(assignment))
        checkpoint.operations.append(Delete(assignment.key))
        checkpoint.operations.append(Put(key, assignment.raw, assignment.lease))
        member = state.member_index(assignment.zone, assignment.suffix)
        if slot == 0 and member is not None:
            state.primary_count[member] += 1
        metrics.ASSIGNMENT_PACKED.inc()


def _unchanged(assignment: AssignmentEntry[Any]) -> Compare:
    return Compare.mod_revision(assignment.key, assignment.mod_revision)
