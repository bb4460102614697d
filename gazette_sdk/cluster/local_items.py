"""LocalItems: what this process runs for the items that are assigned to it (shard section 5).

After each batch of changes of the mirror, it makes, continues, replaces and stops the local objects
of items: the replicas of a broker, the shards of a consumer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gazette_sdk.cluster.item_keyspace import AssignmentEntry, ItemEntry, ItemKeySpace
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["LocalItem", "LocalItems"]

_log = logging.getLogger(__name__)

I_contra = TypeVar("I_contra", contravariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
I = TypeVar("I")  # noqa: E741 - the value of an item
A = TypeVar("A")


class LocalItem(Protocol[I_contra, A_contra]):
    """Object that this process runs for an assigned item."""

    @property
    def create_revision(self) -> int:
        """Revision of Etcd at which the item was created."""

    @property
    def is_primary(self) -> bool:
        """True if this process is the item's primary."""

    def continues(
        self,
        item: ItemEntry[I_contra],
        assignment: AssignmentEntry[A_contra],
        *,
        is_primary: bool,
    ) -> bool:
        """Return True if it goes on as the object of ``item``, else it is replaced."""

    def update(
        self,
        item: ItemEntry[I_contra],
        assignments: Sequence[AssignmentEntry[A_contra]],
        *,
        is_primary: bool,
    ) -> None:
        """Note the current keys of the item. It is called before :meth:`start`, too."""

    def start(self) -> None:
        """Begin to run."""

    def stopping(self) -> None:
        """Make all waiters of it resolve again, before its shutdown begins."""


T = TypeVar("T", bound=LocalItem[Any, Any])


class LocalItems(Generic[I, A, T]):
    """Objects of the items that are assigned to this process.

    Args:
        keyspace: mirror of Etcd. The owner calls :meth:`refresh` after each batch of its changes.
        local_id: this process.
        make: makes the object of an item that was assigned to us, from the item and our object of
            the very same item that is still shutting down, if there is one.
        shut_down: shuts an object down, given the item's id and the object.
        removed: called with the id of an item that is not assigned to us any more.
        kind: what the objects are called in the log.
    """

    def __init__(
        self,
        keyspace: ItemKeySpace[I, Any, A],
        local_id: pb.ProcessSpec.ID,
        *,
        make: Callable[[ItemEntry[I], T | None], T],
        shut_down: Callable[[str, T], Coroutine[Any, Any, None]],
        removed: Callable[[str], None],
        kind: str,
    ) -> None:
        self._keyspace = keyspace
        self._local_id = local_id
        self._make = make
        self._shut_down_item = shut_down
        self._removed = removed
        self._kind = kind
        self._items: dict[str, T] = {}
        self._ending: dict[asyncio.Task[None], tuple[str, T]] = {}
        self._stopped = False

    @property
    def is_stopped(self) -> bool:
        """True once :meth:`stop` was called: nothing is local any more."""
        return self._stopped

    def get(self, item: str) -> T | None:
        """Return our object of an item."""
        return self._items.get(item)

    def all(self) -> Sequence[T]:
        """Return all objects, in order of their items' ids."""
        return [local for _, local in sorted(self._items.items())]

    def refresh(self) -> None:
        """Update the objects after a batch of changes of the mirror."""
        if self._stopped:
            return
        started: list[T] = []
        gone: list[tuple[str, T]] = []
        for item in self._touched():
            before = self._items.get(item)
            after = self._reconcile(item, before)
            if after is before:
                continue
            if before is not None:
                gone.append((item, before))
                del self._items[item]
            if after is not None:
                started.append(after)
                self._items[item] = after
            else:
                self._removed(item)
        self._shut_down(gone)
        for local in started:
            local.start()

    def _touched(self) -> Iterable[str]:
        """Return the items of the last changes of the mirror."""
        touched: dict[str, None] = {}
        for change in self._keyspace.changes:
            match change.new or change.old:
                case AssignmentEntry(item=item) | ItemEntry(id=item):
                    touched[item] = None
        return touched

    def _reconcile(self, name: str, local: T | None) -> T | None:
        """Return the object that an item's keys require: the current one, a new one, none."""
        item = self._keyspace.item(name)
        assignments = self._keyspace.assignments(name)
        # The first one of several assignments to us is used.
        assignment = next(
            (
                entry
                for entry in assignments
                if entry.zone == self._local_id.zone and entry.suffix == self._local_id.suffix
            ),
            None,
        )
        if item is None or assignment is None:
            return None
        is_primary = assignment.slot == 0
        if local is None or not local.continues(item, assignment, is_primary=is_primary):
            local = self._make(item, self._predecessor(item, local))
        local.update(item, assignments, is_primary=is_primary)
        return local

    def _predecessor(self, item: ItemEntry[I], local: T | None) -> T | None:
        """Return our object of the very same item that a new one has to wait for."""
        if local is not None and local.create_revision == item.create_revision:
            return local
        for name, candidate in reversed(self._ending.values()):
            if name == item.id and candidate.create_revision == item.create_revision:
                return candidate
        return None

    # ---------------------------------------------------------------- end

    def stop(self) -> None:
        """Stop all objects in the background. Nothing is local any more."""
        self._stopped = True
        gone, self._items = list(self._items.items()), {}
        self._shut_down(gone)

    def ending(self) -> list[T]:
        """Return the objects that were stopped, and have not shut down yet."""
        return [local for _, local in self._ending.values()]

    async def shutdowns(self, *, primaries: bool = False) -> None:
        """Wait until the objects that were stopped have shut down.

        Args:
            primaries: only those of items whose primary we were.
        """
        while ending := [
            task for task, (_, local) in self._ending.items() if local.is_primary or not primaries
        ]:
            await asyncio.wait(ending)

    def _shut_down(self, gone: Sequence[tuple[str, T]]) -> None:
        """Shut objects down in the background."""
        # First make all waiters resolve again, so that they do not race with the shutdown.
        for _, local in gone:
            local.stopping()
        for item, local in gone:
            _log.info("stopping the %s of %s", self._kind, item)
            task = asyncio.get_running_loop().create_task(
                self._shut_down_item(item, local), name=f"shut down {item}"
            )
            self._ending[task] = item, local
            task.add_done_callback(self._shut_down_ended)

    def _shut_down_ended(self, task: asyncio.Task[None]) -> None:
        del self._ending[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)
