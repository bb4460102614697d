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
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue(BLOCKS_AHEAD)

    def put(item: bytes | OSError) -> None:
        asyncio.run_coroutine_threadsafe(queue.put(item), loop).result()

    def pump() -> None:
        try:
            while block := os.read(file.fileno(), BLOCK_BYTES):
                put(block)
            put(b"")
        except OSError as error:
            put(error)
        except RuntimeError:
            return  # the loop has ended: nobody wants the input any more

    threading.Thread(target=pump, name="input", daemon=True).start()
    while True:
        item = await queue.get()
        if isinstance(item, OSError):
            raise item
        if not item:
            return
        yield item
