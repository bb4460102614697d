"""Calls of functions on the worker threads of a process' shards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from gazette_sdk.user_code import contained

__all__ = ["on_worker"]

T = TypeVar("T")


async def on_worker(workers: Executor | None, function: Callable[..., T], *arguments: object) -> T:
    """Call a function on a worker thread, and wait until it has returned, also if cancelled.

    A thread cannot be cancelled, and what it works on must not be closed under it.

    Args:
        workers: threads; None for those of the event loop.
        function: function to call.
        arguments: its arguments.

    Raises:
        UserCodeError: it raised what would end an iteration, a task, or the process.
        Exception: whatever else it raises, unless the wait was cancelled.
    """
    loop = asyncio.get_running_loop()
    call = loop.run_in_executor(workers, partial(contained, function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        while not call.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([call])
        if not call.cancelled():
            call.exception()  # retrieved: nobody waits for it any more
        raise
