"""Interface of the allocator to values of items and members (allocator sections 1 and 10).

Brokers and consumers each implement it; the rest of the allocator is the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from gazette_sdk.cluster.item_keyspace import AssignmentEntry, ItemEntry

__all__ = ["Allocation"]


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
            behind the first are spare.
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
