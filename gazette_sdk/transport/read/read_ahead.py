"""Content of a stored fragment for coroutines: decompressed in a thread, ahead of its reader."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from gazette_sdk.fragment.content import FragmentReader

__all__ = ["AHEAD_BYTES_MAX", "ReadAhead"]

AHEAD_BYTES_MAX = 2 << 20
"""Bytes which may wait for the reader. The thread ends its turn when there is as much, and begins
the next one when half of it is taken: a fast reader never stops it, a slow one holds no thread."""

PIECE_BYTES = 1 << 20
"""Bytes to ask for at once; the codec may give less."""


class ReadAhead:
    """Queue of pieces of a fragment's content, up to an offset. Belongs to the running event loop.

    Args:
        reader: content of the fragment from ``begin`` on; closed with this object.
        begin: journal offset at which the reader stands.
        end: journal offset at which to stop. At the fragment's own end, the reader is asked
            once more, so that it checks that its content ends there as well.
    """

    def __init__(self, reader: FragmentReader, begin: int, end: int) -> None:
        self.end = end
        self._reader = reader
        self._left = end - begin
        self._checks_end = end == reader.fragment.end
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._turn: asyncio.Task[None] | None = None
        # Shared with the thread, under the lock.
        self._lock = threading.Lock()
        self._pieces: deque[bytes] = deque()
        self._ahead_bytes = 0
        self._failure: Exception | None = None
        self._is_finished = False
        self._is_closed = False

    async def read(self) -> bytes:
        """Return the next piece; empty at the end.

        Raises:
            StoreError: the store failed, or its content is not what the fragment promises.
        """
        while True:
            with self._lock:
                piece = self._pieces.popleft() if self._pieces else b""
                self._ahead_bytes -= len(piece)
                is_finished, failure = self._is_finished, self._failure
                self._arrived.clear()
            if not is_finished and self._ahead_bytes <= AHEAD_BYTES_MAX // 2:
                self._begin_turn()
            if piece:
                return piece
            if failure is not None:  # what came before it was delivered first
                raise failure
            if is_finished:
                return b""
            await self._arrived.wait()

    async def aclose(self) -> None:
        """Close the fragment; after the turn that reads it, where one is under way."""
        with self._lock:
            self._is_closed = True
        if self._turn is None or self._turn.done():
            await asyncio.to_thread(self._reader.close)
        else:
            self._turn.add_done_callback(self._close_behind)

    def _begin_turn(self) -> None:
        if self._turn is None or self._turn.done():
            self._turn = asyncio.create_task(asyncio.to_thread(self._read_turn))
            # A reader who found nothing while the turn was ending begins the next one then.
            self._turn.add_done_callback(lambda _: self._arrived.set())

    def _read_turn(self) -> None:
        """In a thread, and one turn at a time: read until enough is ahead."""
        while True:
            with self._lock:
                if self._is_closed or self._is_finished or self._ahead_bytes >= AHEAD_BYTES_MAX:
                    return
            piece, failure = b"", None
            try:
                piece = self._read_piece()
            except Exception as error:  # noqa: BLE001 - handed to the reader, behind the pieces
                failure = error
            with self._lock:
                was_empty = not self._pieces
                if piece:
                    self._pieces.append(piece)
                    self._ahead_bytes += len(piece)
                else:
                    self._is_finished, self._failure = True, failure
            if was_empty:
                self._loop.call_soon_threadsafe(self._arrived.set)

    def _read_piece(self) -> bytes:
        if self._left > 0:
            piece = self._reader.read(min(self._left, PIECE_BYTES))
            self._left -= len(piece)
            return piece
        if self._checks_end:
            self._reader.read(1)
        return b""

    def _close_behind(self, turn: asyncio.Task[None]) -> None:
        turn.get_loop().run_in_executor(None, self._reader.close)
