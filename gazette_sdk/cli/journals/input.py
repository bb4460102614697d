"""Input of an append: blocks of a file or a pipe."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["blocks", "length_of", "open_input"]

BLOCK_BYTES = 1 << 20
"""Greatest size of a block. Blocks of a pipe are smaller if less is available."""

BLOCKS_AHEAD = 4
"""Number of blocks that are read ahead."""


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Open the file of an option; ``-`` is standard input."""
    if path == "-":
        yield sys.stdin.buffer
        return
    with Path(path).open("rb") as file:
        yield file


def length_of(file: BinaryIO) -> int | None:
    """Return the length of a regular file, or None of a pipe or terminal."""
    status = os.fstat(file.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None


async def blocks(file: BinaryIO) -> AsyncIterator[bytes]:
    """Yield the content of a file as it arrives.

    A daemon thread reads it, because a read of a terminal or a pipe cannot be cancelled.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(BLOCKS_AHEAD)
    is_wanted = True
    descriptor = os.dup(file.fileno())  # the thread may outlive the caller's file

    def read_ahead() -> None:
        item: bytes | OSError = b"more"
        try:
            while item and not isinstance(item, OSError) and room.acquire() and is_wanted:
                try:
                    item = os.read(descriptor, BLOCK_BYTES)
                except OSError as error:
                    item = error
                loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:
            return  # the loop has ended
        finally:
            os.close(descriptor)

    threading.Thread(target=read_ahead, name="input", daemon=True).start()
    try:
        while True:
            item = await queue.get()
            room.release()
            if isinstance(item, OSError):
                raise item
            if not item:
                return
            yield item
    finally:
        is_wanted = False
        room.release()
