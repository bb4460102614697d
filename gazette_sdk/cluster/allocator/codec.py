"""Allocation: what the allocator asks of items and members (allocator sections 1 and 10).

Brokers and consumers each have one; all else of the allocator is the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from gazette_sdk.cluster.item_keyspace import AssignmentEntry, ItemEntry

__all__ = ["Allocation"]

I_contra = TypeVar("I_contra", contravariant=True)
M_contra = TypeVar("M_contra", contravariant=True)
A_contra = TypeVar("A_contra", contravariant=True)


class Allocation(ABC, Generic[I_contra, M_contra, A_contra]):
    """How the allocator sees the values of items, members and assignments.

    All methods are pure and fast: they are called for each item in each round.
    """

    @abstractmethod
    def desired_replication(self, item: I_contra) -> int:
        """Members the item wants, at least 0."""

    @abstractmethod
    def item_limit(self, member: M_contra) -> int:
        """Items the member may hold at most, at least 0."""

    @abstractmethod
    def is_exiting(self, member: M_contra) -> bool:
        """Whether the member wants to hold no items, so that it can leave."""

    @abstractmethod
    def is_consistent(
        self,
        item: ItemEntry[Any],
        assignment: AssignmentEntry[Any],
        assignments: Sequence[AssignmentEntry[Any]],
    ) -> bool:
        """Whether ``assignment`` is in sync, so that another one could safely be dropped.

        Args:
            item: the item.
            assignment: one assignment of it.
            assignments: all of them, in order of their keys.
        """
