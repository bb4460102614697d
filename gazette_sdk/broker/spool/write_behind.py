"""Large chunks are written and hashed in a thread, in order, while the loop receives the next.

Writing and hashing 128 KiB takes some hundred microseconds, in which the interpreter is not
needed: on a second core they cost the event loop almost nothing. Small chunks are not worth the
hop and are written where they arrive. One thread writes for all spools of a broker: they share a
disk, and each of them keeps its order. Two more make the sums of fragments, and of appends.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

__all__ = ["BEHIND_CHUNKS_MAX", "LARGE_CHUNK_BYTES", "Behind", "Writer"]

LARGE_CHUNK_BYTES: Final = 48 << 10
"""Chunks from this size on are worth the hop to another thread, which costs some 20 µs."""

BEHIND_CHUNKS_MAX: Final = 16
"""Chunks of one spool that may wait for the disk, before its client is no longer read: of our own
clients' size these are 2 MiB."""


class Writer:
    """A thread. It starts with the first work, and ends with :meth:`close`.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "spool writer") -> None:
        self._name = name
        self._queue: SimpleQueue[Behind | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, behind: Behind) -> None:
        """Have a spool's chunks written."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(behind)

    def close(self) -> None:
        """Finish what is queued, and end."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (behind := self._queue.get()) is not None:
            behind.run()


class Behind:
    """Chunks of one spool which are not written yet. All but :meth:`run` belong to the loop.

    Args:
        writer: the thread that writes them.

    Attributes:
        error: why the first of them could not be written; nothing behind it is tried then.
    """

    def __init__(self, writer: Writer) -> None:
        self.error: OSError | None = None
        self._writer = writer
        self._lock = threading.Lock()
        self._chunks: deque[Callable[[], None]] = deque()
        self._is_queued = False
        self._wanted = 0
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """How many there are."""
        return len(self._chunks)

    def add(self, write: Callable[[], None]) -> None:
        """Have one more written, behind those before it. It may be tried again after an error."""
        with self._lock:
            self._chunks.append(write)
            if self._is_queued or self.error is not None:
                return
            self._is_queued = True
        self._writer.put(self)

    async def below(self, count: int) -> None:
        """Wait until at most ``count`` chunks are left, or one of them failed."""
        with self._lock:
            if not self._is_queued or len(self._chunks) <= count:
                return
            self._wanted = count
            waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            with self._lock:
                self._waiter = None

    def retry(self) -> None:
        """Write what is left, here and now, after an error.

        Raises:
            OSError: it failed again.
        """
        assert not self._is_queued, "the thread has stopped at the error"
        while self._chunks:
            self._chunks[0]()
            self._chunks.popleft()
        self.error = None

    def drop(self) -> None:
        """Forget what is left after an error."""
        assert not self._is_queued, "nothing is dropped while it may be written"
        self._chunks.clear()
        self.error = None

    def run(self) -> None:
        """Write what there is. In the writer's thread."""
        while True:
            with self._lock:
                if self.error is not None or not self._chunks:
                    self._is_queued = False
                    self._wake()
                    return
                write = self._chunks[0]
            try:
                write()
            except OSError as error:
                self.error = error
                continue
            with self._lock:
                self._chunks.popleft()
                if len(self._chunks) <= self._wanted and self._wanted:
                    self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.get_loop().call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
