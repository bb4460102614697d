"""Input of an append: a file or a pipe, block by block as it comes."""

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
"""Greatest size of a block. From pipes, less comes as soon as it is there."""

BLOCKS_AHEAD = 4
"""Blocks that are read while earlier ones wait."""


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """The file of an option; ``-`` is standard input."""
    if path == "-":
        yield sys.stdin.buffer
        return
    with Path(path).open("rb") as file:
        yield file


def length_of(file: BinaryIO) -> int | None:
    """Bytes of a regular file; ``None`` of a pipe or terminal, whose length nobody knows."""
    status = os.fstat(file.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None


async def blocks(file: BinaryIO) -> AsyncIterator[bytes]:
    """The content of a file, as it comes.

    It is read by a thread of its own that nobody waits for: a read of a terminal or a pipe cannot
    be cancelled.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(BLOCKS_AHEAD)
    is_wanted = True
    descriptor = os.dup(file.fileno())  # the thread may outlive the caller's file

    def pump() -> None:
        item: bytes | OSError = b"more"
        try:
            while item and not isinstance(item, OSError) and room.acquire() and is_wanted:
                try:
                    item = os.read(descriptor, BLOCK_BYTES)
                except OSError as error:
                    item = error
                loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:
            return  # the loop has ended: nobody wants the input any more
        finally:
            os.close(descriptor)

    threading.Thread(target=pump, name="input", daemon=True).start()
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
