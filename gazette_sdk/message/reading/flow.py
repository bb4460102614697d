"""What travels from the SDK's event loop to the consumer of a read, and how much of it waits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from dataclasses import dataclass
from typing import TypeAlias

from gazette_sdk.message.reading.mailbox import Mailbox
from gazette_sdk.transport.loop import sdk_loop

__all__ = [
    "CONTENT_BYTES_MAX",
    "Content",
    "Ended",
    "Failed",
    "Finished",
    "Flow",
    "Item",
    "Jumped",
    "Opened",
    "Vanished",
]

CONTENT_BYTES_MAX = 512 << 10
"""Content which is handed over as one piece, unless a single read brings more; for consumers
that don't say otherwise."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A journal is about to be read.

    Attributes:
        journal: its name, as content is to be known under.
        content_type: its ``content-type`` label.
        offset: where reading begins; -1 for the write head.
        continues: content goes on where it ended before the journal vanished for a while.
        create_revision: Etcd revision at which the journal was created.
    """

    journal: str
    content_type: str
    offset: int
    continues: bool
    create_revision: int

    def at(self, offset: int) -> Opened:
        """The same journal, read from another offset."""
        return dataclasses.replace(self, offset=offset, continues=False)


class Content:
    """Content which continues where the journal's last item ended.

    As long as it waits, what comes behind it joins it: large pieces cost less than many small
    ones.
    """

    __slots__ = ("_is_taken", "_lock", "_parts", "journal", "length_bytes")

    def __init__(self, journal: str, content: bytes) -> None:
        self.journal = journal
        self.length_bytes = len(content)
        self._parts = [content]
        self._is_taken = False
        self._lock = threading.Lock()

    def join(self, content: bytes, bytes_max: int) -> bool:
        """Add what continues it; False if it is too late, or would be too much."""
        if self.length_bytes + len(content) > bytes_max:
            return False
        with self._lock:
            if self._is_taken:
                return False
            self._parts.append(content)
            self.length_bytes += len(content)
            return True

    def take(self) -> bytes:
        """All of it, for its consumer, once."""
        with self._lock:
            self._is_taken = True
            parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True, slots=True)
class Jumped:
    """The journal's next content begins at this offset."""

    journal: str
    offset: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The journal was read to its write head or the wanted end, at this offset."""

    journal: str
    offset: int


@dataclass(frozen=True, slots=True)
class Vanished:
    """The journal was deleted, or does not match the selector any more."""

    journal: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Reading failed. Without a journal, all of it."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more comes."""


Item: TypeAlias = Opened | Content | Jumped | Ended | Vanished | Failed | Finished
"""What the consumer takes from the mailbox."""


class Flow:
    """Items on their way to one consumer, and a bound of the content among them.

    Args:
        bytes_max: content that may wait for the consumer.
        piece_bytes_max: content which is handed over as one piece, unless a single read brings
            more.
    """

    def __init__(self, bytes_max: int, piece_bytes_max: int = CONTENT_BYTES_MAX) -> None:
        self.mailbox: Mailbox[Item] = Mailbox()
        self._bytes_max = bytes_max
        self._piece_bytes_max = piece_bytes_max
        self._resume_bytes = bytes_max - bytes_max // 4
        # Each is written by one side only: the loop's, and the consumer's.
        self._put_bytes = 0
        self._dropped_bytes = 0
        self._is_full = False
        self._has_room = asyncio.Event()
        self._loop = sdk_loop()
        self._last: dict[str, Content] = {}

    @property
    def queued_bytes(self) -> int:
        """Content that waits for the consumer, or is being worked on."""
        return self._put_bytes - self._dropped_bytes

    def drop(self, item: Item) -> None:
        """The consumer is done with the mailbox's first item."""
        self.mailbox.drop()
        if isinstance(item, Content):
            self._dropped_bytes += item.length_bytes
            # Waking the loop costs more than most else here: only where it waits for that.
            if self._is_full and self.queued_bytes <= self._resume_bytes:
                self._is_full = False
                with contextlib.suppress(RuntimeError):  # the loop has ended, and reading with it
                    self._loop.call_soon_threadsafe(self._has_room.set)

    async def room(self) -> None:
        """Wait until more content may be put. On the loop."""
        while self.queued_bytes >= self._bytes_max:
            self._has_room.clear()
            self._is_full = True
            if self.queued_bytes >= self._bytes_max:  # else it was dropped before we were seen
                await self._has_room.wait()

    def put(self, item: Item) -> None:
        """Add an item. On the loop."""
        if isinstance(item, Content):
            self._last[item.journal] = item
        elif not isinstance(item, Failed | Finished):
            self._last.pop(item.journal, None)
        self.mailbox.put(item)

    def put_content(self, journal: str, content: bytes) -> None:
        """Add content, to what waits of the journal or behind everything else. On the loop."""
        self._put_bytes += len(content)
        last = self._last.get(journal)
        if last is None or not last.join(content, self._piece_bytes_max):
            self.put(Content(journal, content))
