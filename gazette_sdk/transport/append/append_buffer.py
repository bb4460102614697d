"""Content of appends that wait to be sent: in memory, and in temporary files beyond a bound.

Writes never touch a disk. What lies in memory is bounded for all buffers of a service together:
beyond half of the bound the greatest buffers are moved to unlinked temporary files, in threads,
and beyond the bound new appends wait. A disk that fails costs nothing but that wait, as content
leaves memory only once the file has it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import BinaryIO

from gazette_sdk.transport.append.pieces import CHUNK_BYTES
from gazette_sdk.transport.backoff import Pause

__all__ = ["AppendBuffer", "MemoryBudget"]

logger = logging.getLogger(__name__)

COPY_BYTES = 1 << 20
"""What one turn in a thread reads of a temporary file."""


class AppendBuffer:
    """Bytes of one append, written at the end, and rolled back to checkpoints.

    Args:
        budget: counts the bytes in memory.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._parts: list[bytes] = []
        self._parts_kept = 0
        self._file: BinaryIO | None = None
        self._file_bytes = 0
        self._is_spilling = False
        self.written_bytes = 0
        self.kept_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """What of it lies in memory."""
        return self.written_bytes - self._file_bytes

    def write(self, content: bytes) -> None:
        """Add content at the end."""
        if content:
            self._parts.append(content)
            self.written_bytes += len(content)
            self._budget.add(len(content))

    def checkpoint(self) -> None:
        """Keep what was written so far."""
        self._parts_kept = len(self._parts)
        self.kept_bytes = self.written_bytes

    def roll_back(self) -> None:
        """Drop what was written since the last checkpoint."""
        del self._parts[self._parts_kept :]
        self._budget.add(self.kept_bytes - self.written_bytes)
        self.written_bytes = self.kept_bytes

    async def spill(self) -> None:
        """Move what is kept from memory to a temporary file.

        Raises:
            OSError: the disk failed; the content is still in memory.
        """
        count, size = self._parts_kept, self.kept_bytes - self._file_bytes
        if self._is_spilling or not size:
            return
        self._is_spilling = True
        writing = asyncio.ensure_future(
            asyncio.to_thread(_append_to_file, self._file, self._file_bytes, self._parts[:count])
        )
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # a thread can't be stopped, and may have made a file
            if writing.exception() is None:
                self._file = writing.result()
            if self._parts_kept < count:
                self._close_file()
            raise
        finally:
            self._is_spilling = False
        self._file = writing.result()
        if self._parts_kept < count:  # released while its thread wrote
            self._close_file()
            return
        del self._parts[:count]
        self._parts_kept -= count
        self._file_bytes += size
        self._budget.add(-size)

    def whole(self) -> list[bytes] | None:
        """What is kept, in few pieces of any length, unless some of it lies in a file."""
        if self._file_bytes:
            return None
        return list(_joined(self._parts[: self._parts_kept]))

    async def chunks(self) -> AsyncIterator[bytes]:
        """What is kept, in chunks fit to be sent. May be read again from its start."""
        position = 0
        while position < self._file_bytes:
            assert self._file is not None
            size = min(COPY_BYTES, self._file_bytes - position)
            piece = await asyncio.to_thread(_read_file, self._file, position, size)
            position += size
            for begin in range(0, size, CHUNK_BYTES):
                yield piece[begin : begin + CHUNK_BYTES]
        # Nothing awaits between the end of the file and this copy of what follows it.
        for chunk in _coalesced(self._parts[: self._parts_kept]):
            yield chunk

    def release(self) -> None:
        """Give back its memory and its file."""
        self._budget.add(-self.memory_bytes)
        self._parts = []
        self._parts_kept = self.written_bytes = self.kept_bytes = self._file_bytes = 0
        if not self._is_spilling:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class MemoryBudget:
    """Bounds the bytes that buffers hold in memory.

    Args:
        limit_bytes: bound of all buffers together.
        pause: waits between attempts to write to a failing disk.
    """

    def __init__(self, limit_bytes: int, pause: Pause) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._pause = pause
        self._has_room = asyncio.Event()
        self._has_room.set()

    def add(self, size: int) -> None:
        """Count bytes that came to memory or, negative, left it."""
        self.used_bytes += size
        assert self.used_bytes >= 0
        if self.used_bytes < self.limit_bytes:
            self._has_room.set()
        else:
            self._has_room.clear()

    @property
    def is_short(self) -> bool:
        """Whether buffers should be moved to files."""
        return self.used_bytes > self.limit_bytes // 2

    async def room(self) -> None:
        """Wait until less than the bound is used."""
        await self._has_room.wait()

    async def spill(self, buffers: list[AppendBuffer]) -> None:
        """Move the greatest buffers to files, until half of the bound is free."""
        attempt = 0
        for buffer in sorted(buffers, key=lambda buffer: -buffer.memory_bytes):
            while self.is_short:
                try:
                    await buffer.spill()
                except OSError as error:
                    logger.warning("cannot buffer appends in a temporary file: %s", error)
                    await self._pause(attempt)
                    attempt += 1
                else:
                    break


def _append_to_file(file: BinaryIO | None, position: int, parts: list[bytes]) -> BinaryIO:
    """Write parts at a position of a temporary file, made if there is none yet."""
    made = tempfile.TemporaryFile(prefix="gazette-append-") if file is None else file  # noqa: SIM115
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                written = os.pwrite(made.fileno(), rest, position)
                position += written
                rest = rest[written:]
    except BaseException:
        if file is None:
            made.close()
        raise
    return made


def _read_file(file: BinaryIO, position: int, size: int) -> bytes:
    content = os.pread(file.fileno(), size, position)
    if len(content) != size:
        raise OSError(f"a temporary file of appends lost its content behind {position}")
    return content


def _coalesced(parts: list[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks of ``CHUNK_BYTES`` at most, few of them much smaller."""
    for piece in _joined(parts):
        if len(piece) <= CHUNK_BYTES:
            yield piece
        else:
            for begin in range(0, len(piece), CHUNK_BYTES):
                yield piece[begin : begin + CHUNK_BYTES]


def _joined(parts: list[bytes]) -> Iterator[bytes]:
    """The same bytes, small parts joined to pieces of ``CHUNK_BYTES`` at most."""
    small: list[bytes] = []
    small_bytes = 0
    for part in parts:
        if small and small_bytes + len(part) > CHUNK_BYTES:
            yield small[0] if len(small) == 1 else b"".join(small)
            small, small_bytes = [], 0
        if len(part) > CHUNK_BYTES:
            yield part
        else:
            small.append(part)
            small_bytes += len(part)
    if small:
        yield small[0] if len(small) == 1 else b"".join(small)
