"""Content of a stored fragment for coroutines: read in threads, one piece ahead of its reader."""

from __future__ import annotations

import asyncio
from collections import deque

from gazette_sdk.fragment.content import FragmentReader

__all__ = ["ReadAhead"]

TURN_BYTES = 1 << 20
"""What one turn in a thread reads at least: a hop to a thread costs some 50 µs, which this makes
small beside decompression."""


class ReadAhead:
    """Pieces of a fragment's content, up to an offset.

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
        self._pieces: deque[bytes] = deque()
        self._turn: asyncio.Task[list[bytes]] | None = None
        self._failure: Exception | None = None

    async def read(self) -> bytes:
        """The next piece; empty at the end.

        Raises:
            StoreError: the store failed, or its content is not what the fragment promises.
        """
        if not self._pieces:
            if self._turn is None:
                self._begin_turn()
            assert self._turn is not None
            self._pieces.extend(await asyncio.shield(self._turn))
            if not self._pieces:
                return b""
            self._begin_turn()
        return self._pieces.popleft()

    async def aclose(self) -> None:
        """Close the fragment; after the turn that reads it, where one is under way."""
        if self._turn is None or self._turn.done():
            await asyncio.to_thread(self._reader.close)
        else:
            self._turn.add_done_callback(self._close_behind)

    def _begin_turn(self) -> None:
        self._turn = asyncio.create_task(asyncio.to_thread(self._read_turn))
        self._turn.add_done_callback(_mark_as_seen)

    def _read_turn(self) -> list[bytes]:
        """In a thread, and one turn at a time."""
        if self._failure is not None:
            raise self._failure
        if self._left == 0 and self._checks_end:
            self._checks_end = False
            self._reader.read(1)
        pieces: list[bytes] = []
        turn_left = TURN_BYTES
        while self._left > 0 and turn_left > 0:
            try:
                piece = self._reader.read(min(self._left, TURN_BYTES))
            except Exception as error:
                if not pieces:
                    raise
                self._failure = error  # what came before it is delivered first
                break
            if not piece:
                break
            pieces.append(piece)
            self._left -= len(piece)
            turn_left -= len(piece)
        return pieces

    def _close_behind(self, turn: asyncio.Task[list[bytes]]) -> None:
        turn.get_loop().run_in_executor(None, self._reader.close)


def _mark_as_seen(turn: asyncio.Task[list[bytes]]) -> None:
    """A failure of a piece that nobody wants any more is no news."""
    if not turn.cancelled():
        turn.exception()
