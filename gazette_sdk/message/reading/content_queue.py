"""The bounded queue between the coroutines that fetch journals and their one consumer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from gazette_sdk.protocol import broker_pb2 as pb

__all__ = [
    "CONTENT_BYTES_MAX",
    "Content",
    "ContentQueue",
    "Ended",
    "Failed",
    "Finished",
    "Item",
    "Jumped",
    "Opened",
]

CONTENT_BYTES_MAX = 512 << 10
"""Default limit of content that is delivered as one item, unless a single read returns more."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Begin of the read of a journal.

    Attributes:
        journal: name of the journal, as the user gave it.
        content_type: its ``content-type`` label.
        offset: offset at which the read begins; -1 for the write head.
        continues: True if the read goes on where an earlier read of this reader ended, because
            the journal left the listing for a while.
        create_revision: Etcd revision at which the journal was created; 0 if it is not known.
        is_new: True if the position that was given is not of this journal: the states of its
            producers are not, either.
        spec: the journal as it was listed; None if it was not.
    """

    journal: str
    content_type: str
    offset: int
    continues: bool
    create_revision: int
    is_new: bool = False
    spec: pb.JournalSpec | None = field(default=None, compare=False, repr=False)

    def at(self, offset: int) -> Opened:
        """Return the same journal, read from another offset."""
        return dataclasses.replace(self, offset=offset, continues=False)


class Content:
    """Content that continues where the journal's last item ended."""

    __slots__ = ("journal", "length_bytes", "pieces")

    def __init__(self, journal: str, content: bytes) -> None:
        self.journal = journal
        self.length_bytes = len(content)
        self.pieces = [content]


@dataclass(frozen=True, slots=True)
class Jumped:
    """Gap in a journal: its next content begins at this offset."""

    journal: str
    offset: int


@dataclass(frozen=True, slots=True)
class Ended:
    """End of the read of a journal, at its write head or at the end offset."""

    journal: str
    offset: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Error that ends all reads."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Finished:
    """End of the queue."""


Item: TypeAlias = Opened | Content | Jumped | Ended | Failed | Finished
"""An item of the queue."""


class ContentQueue:
    """Queue of items, with a bound of the content among them.

    Coroutines of one event loop put items. One consumer takes them: a thread, or a coroutine of
    any loop. The consumer first waits and then pops, so that an interrupt of the wait loses
    nothing.

    Args:
        loop: event loop of the coroutines that put items.
        bytes_max: limit of the content in the queue. One item more may be put.
        item_bytes_max: content up to this length is joined to the last item of its journal that
            is still in the queue: large items cost less than many small ones.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bytes_max: int,
        item_bytes_max: int = CONTENT_BYTES_MAX,
    ) -> None:
        self.loop = loop
        self.queued_bytes = 0
        self._bytes_max = bytes_max
        self._resume_bytes = bytes_max - bytes_max // 4
        self._item_bytes_max = item_bytes_max
        self._items: deque[Item] = deque()
        # Content in the queue that may grow, by journal.
        self._growing: dict[str, Content] = {}
        # Held while content is joined, or removed.
        self._lock = threading.RLock()
        self._has_room = asyncio.Event()
        self._room_awaited = False
        # A thread that waits acquires its gate twice; put() releases it. This wakes a thread
        # faster than a condition variable does.
        self._gate: threading.Lock | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---------------------------------------------------- coroutines of the loop

    @property
    def is_full(self) -> bool:
        """True if :meth:`room` would wait."""
        return self.queued_bytes >= self._bytes_max

    async def room(self) -> None:
        """Wait while the queue is full."""
        while self.is_full:
            self._has_room.clear()
            self._room_awaited = True
            if self.is_full:  # else the consumer popped an item before the flag was set
                await self._has_room.wait()

    def put(self, item: Item) -> None:
        """Add an item, and wake the consumer."""
        if not isinstance(item, Failed | Finished):
            self._growing.pop(item.journal, None)
        self._items.append(item)
        self._wake()

    def put_content(self, journal: str, content: bytes) -> None:
        """Add content, to the journal's last item or as a new one, and wake the consumer."""
        length = len(content)
        with self._lock:
            self.queued_bytes += length
            last = self._growing.get(journal)
            if last is not None and last.length_bytes + length <= self._item_bytes_max:
                last.pieces.append(content)
                last.length_bytes += length
                return
            self._growing[journal] = item = Content(journal, content)
        self._items.append(item)
        self._wake()

    def _wake(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.release()
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            return
        loop = waiter.get_loop()
        if loop is self.loop:
            _resolve(waiter)
        else:
            with contextlib.suppress(RuntimeError):  # the consumer's loop is closed
                loop.call_soon_threadsafe(_resolve, waiter)

    # --------------------------------------------------------------- the consumer

    @property
    def is_empty(self) -> bool:
        """True if :meth:`pop` has nothing to remove."""
        return not self._items

    def wait(self) -> None:
        """Block until the queue has an item."""
        while not self._items:
            gate = threading.Lock()
            gate.acquire()
            self._gate = gate
            if self._items:  # put before the gate was set
                return
            gate.acquire()

    async def wait_async(self) -> None:
        """Wait until the queue has an item. Other coroutines run at least once meanwhile."""
        if self._items:
            await asyncio.sleep(0)
        while not self._items:
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            if self._items:  # put before the waiter was set
                return
            await waiter

    def pop(self) -> Item:
        """Remove the first item. Only after :meth:`wait` or :meth:`wait_async`."""
        with self._lock:
            item = self._items.popleft()
            if not isinstance(item, Content):
                return item
            if self._growing.get(item.journal) is item:
                self._growing.pop(item.journal, None)  # put() holds no lock
            self.queued_bytes -= item.length_bytes
        # To wake the loop is expensive: it is done only where a coroutine waits for room.
        if self._room_awaited and self.queued_bytes <= self._resume_bytes:
            self._room_awaited = False
            with contextlib.suppress(RuntimeError):  # the loop is closed, and ended the reads
                self.loop.call_soon_threadsafe(self._has_room.set)
        return item


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
