"""Snapshot of the mirror, with values that the allocator derives from it (allocator section 3).

The mirror may change later, the state does not. Convergence updates the counts while it builds a
round, so that they include the changes of earlier items.

:class:`Allocation` is the interface to values of items and members (allocator sections 1 and 10).
Brokers and consumers each implement it; the rest of the allocator is the same for both. Its metrics
are here, too (allocator section 12).
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from prometheus_client import Counter, Gauge, Histogram

from gazette_sdk.cluster.items import AssignmentEntry, ItemEntry, ItemKeySpace, MemberEntry

ASSIGNMENT_ADDED = Counter(
    "gazette_allocator_assignment_added_total",
    "Assignments that a round wanted to add, whether or not its transaction succeeded.",
)
ASSIGNMENT_REMOVED = Counter(
    "gazette_allocator_assignment_removed_total",
    "Assignments that a round wanted to remove, whether or not its transaction succeeded.",
)
ASSIGNMENT_PACKED = Counter(
    "gazette_allocator_assignment_packed_total",
    "Assignments that a round wanted to give another slot, promotions included.",
)
CONVERGE = Counter("gazette_allocator_converge_total", "Rounds that succeeded.")
MAX_FLOW_RUNTIME_SECONDS = Histogram(
    "gazette_allocator_max_flow_runtime_seconds",
    "Time it took to solve for assignments.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
ITEMS = Gauge("gazette_allocator_items", "Items, as last seen by this process as the leader.")
MEMBERS = Gauge("gazette_allocator_members", "Members, as last seen by this process as the leader.")
DESIRED_REPLICATION_SLOTS = Gauge(
    "gazette_allocator_desired_replication_slots",
    "Assignments that all items want, as last seen by this process as the leader.",
)


LOAD_RATIO_MAX: float = struct.unpack("f", struct.pack("I", 0x7F7FFFFF))[0]
"""Load ratio of a member that does not exist: the largest number of single precision."""


class State:
    """Snapshot of the cluster at one revision.

    Args:
        keyspace: the mirror.
        allocation: rules for its values.

    Attributes:
        revision: revision of the mirror.
        items, members, assignments: its entries, in order of their keys.
        item_assignments: for each item its assignments.
        holders: for each item the ascending indices of the members that it is assigned to; of
            those that exist.
        dead_assignments: assignments of items that do not exist.
        replication: for each item its desired number of members.
        limits: for each member the number of items it offers to hold.
        shed: for each member the part of its limit that it loses because it is exiting.
        zones: sorted names of the zones of members whose limit is not 0.
        zone_slots: sum of limits of each of them.
        member_slots: sum of all limits, minus those in ``shed``.
        item_slots: sum of ``replication``.
        total_count, primary_count: assignments of existing items to each member; with slot 0.
        network: input of a solution, without the current assignments. A solution stays valid
            while this is equal.
    """

    def __init__(
        self, keyspace: ItemKeySpace[Any, Any, Any], allocation: Allocation[Any, Any, Any]
    ) -> None:
        self.root = keyspace.root
        self.revision = keyspace.revision
        self.allocation = allocation
        self.items = keyspace.items()
        self.members = keyspace.members()
        self.assignments = keyspace.all_assignments()

        self.replication = [allocation.desired_replication(item.value) for item in self.items]
        self.limits = [allocation.item_limit(member.value) for member in self.members]
        self.item_slots = sum(self.replication)
        self.member_slots = sum(self.limits)
        by_zone: dict[str, int] = {}
        for member, limit in zip(self.members, self.limits, strict=True):
            if limit > 0:
                by_zone[member.zone] = by_zone.get(member.zone, 0) + limit
        self.zones = sorted(by_zone)
        self.zone_slots = [by_zone[zone] for zone in self.zones]

        exiting = [index for index, m in enumerate(self.members) if allocation.is_exiting(m.value)]
        exiting.sort(key=lambda m: (self.members[m].create_revision, self.members[m].key))
        self.shed = shed_capacity(
            exiting,
            self.limits,
            item_slots=self.item_slots,
            max_replication=max(self.replication, default=0),
        )
        self.member_slots -= sum(self.shed)
        self.network = (
            tuple(member.key for member in self.members),
            tuple(self.limits),
            tuple(item.key for item in self.items),
            tuple(self.replication),
            tuple(self.shed),
        )

        self._member_index = {(m.zone, m.suffix): index for index, m in enumerate(self.members)}
        self.total_count = [0] * len(self.members)
        self.primary_count = [0] * len(self.members)
        self.item_assignments: list[list[AssignmentEntry[Any]]] = [[] for _ in self.items]
        self.holders: list[list[int]] = [[] for _ in self.items]
        self.dead_assignments: list[AssignmentEntry[Any]] = []
        self._join()

    def _join(self) -> None:
        """Group the assignments by item, and count those of each member."""
        index = {item.id: number for number, item in enumerate(self.items)}
        member_index = self._member_index
        for assignment in self.assignments:
            item = index.get(assignment.item)
            if item is None:
                self.dead_assignments.append(assignment)
                continue
            self.item_assignments[item].append(assignment)
            member = member_index.get((assignment.zone, assignment.suffix))
            if member is not None:
                holders = self.holders[item]
                if not holders or holders[-1] != member:
                    holders.append(member)
                self.total_count[member] += 1
                if assignment.slot == 0:
                    self.primary_count[member] += 1

    def effective_limit(self, member: int) -> int:
        """Return the number of items that the member of that index may hold."""
        return self.limits[member] - self.shed[member]

    def member_index(self, zone: str, suffix: str) -> int | None:
        """Return the index of a member in ``members``."""
        return self._member_index.get((zone, suffix))

    def count(self, assignment: AssignmentEntry[Any], change: int) -> None:
        """Count an assignment of an existing item in (1) or out (-1)."""
        member = self._member_index.get((assignment.zone, assignment.suffix))
        if member is not None:
            self.total_count[member] += change
            if assignment.slot == 0:
                self.primary_count[member] += change

    def load_ratio(self, assignment: AssignmentEntry[Any], counts: Sequence[int]) -> float:
        """Return the load of an assignment's member: its count in ``counts`` per effective limit.

        It has single precision, and follows IEEE 754 where the limit is 0, as in other
        implementations.
        """
        member = self._member_index.get((assignment.zone, assignment.suffix))
        if member is None:
            return LOAD_RATIO_MAX
        count, limit = counts[member], self.effective_limit(member)
        if limit == 0:
            return float("inf") if count else float("nan")
        ratio: float = struct.unpack("f", struct.pack("f", count / limit))[0]
        return ratio

    def is_consistent(
        self,
        item: ItemEntry[Any],
        assignment: AssignmentEntry[Any],
        assignments: Sequence[AssignmentEntry[Any]],
    ) -> bool:
        """Return True if an assignment is in sync."""
        return self.allocation.is_consistent(item, assignment, assignments)


def leader_of(members: Sequence[MemberEntry[Any]]) -> MemberEntry[Any] | None:
    """Return the leader, which is the member announced first (allocator section 5)."""
    return min(members, key=lambda m: (m.create_revision, m.key), default=None)


def shed_capacity(
    exiting: Sequence[int], limits: Sequence[int], *, item_slots: int, max_replication: int
) -> list[int]:
    """Return the part of its limit that each exiting member loses, so that it drains.

    Only spare slots of the cluster are removed: the oldest exiting members drain first and
    fully, the last one perhaps in part, and at least ``max_replication`` members keep all.

    Args:
        exiting: indices of the exiting members, the oldest first.
        limits: number of items that each member offers to hold.
        item_slots: desired number of assignments of all items.
        max_replication: greatest replication of an item.

    Returns:
        For each member the part of its limit that it loses.
    """
    shed = [0] * len(limits)
    excess = max(0, sum(limits) - item_slots)
    for member in exiting[: max(0, len(limits) - max_replication)]:
        shed[member] = min(limits[member], excess)
        excess -= shed[member]
    return shed


class Leaving(Protocol):
    """Value of a member that can leave."""

    @property
    def exiting(self) -> bool:
        """True if the member is leaving, and should hold no items."""


I_contra = TypeVar("I_contra", contravariant=True)
M_contra = TypeVar("M_contra", bound=Leaving, contravariant=True)
A_contra = TypeVar("A_contra", contravariant=True)


class Allocation(ABC, Generic[I_contra, M_contra, A_contra]):
    """Rules for the values of items, members and assignments.

    All methods are pure and fast: they are called for each item in each round.

    Attributes:
        balances_primaries: a primary changes places with a standby in sync whose member leads less.
        needs_all_replicas: an item is not served with fewer members than it should have. Else those
            after the first are spare.
    """

    balances_primaries: ClassVar[bool] = False
    needs_all_replicas: ClassVar[bool] = True

    @abstractmethod
    def desired_replication(self, item: I_contra) -> int:
        """Return the number of members that the item should have, at least 0."""

    @abstractmethod
    def item_limit(self, member: M_contra) -> int:
        """Return the greatest number of items that the member may hold, at least 0."""

    def demoted_value(self, assignment: AssignmentEntry[Any]) -> bytes:  # noqa: ARG002 -- for others
        """Return the value of a primary's assignment once it has another slot.

        By default the replica begins again as a standby.
        """
        return b""

    def is_exiting(self, member: M_contra) -> bool:
        """Return True if the member is leaving, and should hold no items."""
        return member.exiting

    @abstractmethod
    def is_consistent(
        self,
        item: ItemEntry[Any],
        assignment: AssignmentEntry[Any],
        assignments: Sequence[AssignmentEntry[Any]],
    ) -> bool:
        """Return True if ``assignment`` is in sync, so that another one can be removed safely.

        Args:
            item: the item.
            assignment: one assignment of it.
            assignments: all of them, in order of their keys.
        """
