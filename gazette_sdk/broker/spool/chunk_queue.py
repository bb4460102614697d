"""Queue of large chunks which a thread writes, or hashes, while the event loop receives the next.

Writing and hashing 128 KiB takes some hundred microseconds without the interpreter: on a second
core they cost the event loop almost nothing. A small chunk is not worth the thread switch and is
written where it arrives. One thread writes for all spools of a broker, since they share a disk;
each spool's chunks keep their order. Two more threads compute the sums of fragments and appends.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

__all__ = ["LARGE_CHUNK_BYTES", "QUEUED_CHUNKS_MAX", "ChunkQueue", "ChunkThread"]

LARGE_CHUNK_BYTES: Final = 48 << 10
"""Chunks from this size on are worth the thread switch, which costs some 20 µs."""

QUEUED_CHUNKS_MAX: Final = 16
"""Queued chunks of one spool at which its client is no longer read: 2 MiB of our own clients."""


class ChunkThread:
    """Thread that works for many queues. It starts with the first work and ends with :meth:`close`.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queues: SimpleQueue[ChunkQueue | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, queue: ChunkQueue) -> None:
        """Run what a queue holds."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queues.put(queue)

    def close(self) -> None:
        """Finish what is queued, and end the thread."""
        if self._thread is not None:
            self._queues.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (queue := self._queues.get()) is not None:
            queue.run()


class ChunkQueue:
    """Work of one spool for one thread. All but :meth:`run` belong to the event loop.

    Args:
        thread: runs the work.

    Attributes:
        error: why the oldest work failed; nothing behind it runs then.
    """

    def __init__(self, thread: ChunkThread) -> None:
        self.error: OSError | None = None
        self._thread = thread
        self._lock = threading.Lock()
        self._work: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._wanted = 0
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Return the number of chunks queued."""
        return len(self._work)

    def add(self, work: Callable[[], None]) -> None:
        """Queue the work of one chunk. It may run again after an error."""
        with self._lock:
            self._work.append(work)
            if self._is_running or self.error is not None:
                return
            self._is_running = True
        self._thread.put(self)

    async def wait_below(self, count: int) -> None:
        """Wait until at most ``count`` chunks are queued, or one of them failed."""
        with self._lock:
            if not self._is_running or len(self._work) <= count:
                return
            self._wanted = count
            waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            with self._lock:
                self._waiter = None

    def retry(self) -> None:
        """Run what is queued in the caller's thread, after an error.

        Raises:
            OSError: it failed again.
        """
        assert not self._is_running, "the thread has stopped at the error"
        while self._work:
            self._work[0]()
            self._work.popleft()
        self.error = None

    def clear(self) -> None:
        """Remove what is queued, after an error."""
        assert not self._is_running, "the thread has stopped at the error"
        self._work.clear()
        self.error = None

    def run(self) -> None:
        """Run what is queued. The thread calls it."""
        while True:
            with self._lock:
                if self.error is not None or not self._work:
                    self._is_running = False
                    self._wake()
                    return
                work = self._work[0]
            try:
                work()
            except OSError as error:
                self.error = error
                continue
            with self._lock:
                self._work.popleft()
                if len(self._work) <= self._wanted and self._wanted:
                    self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.get_loop().call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
