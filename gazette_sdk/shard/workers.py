"""Calls of functions on the worker threads of a process' shards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from gazette_sdk.user_code import contained, notify

T = TypeVar("T")

REPEAT_S = 0.05
"""Pause before a function that is to end is interrupted again. It doubles each time."""

REPEAT_MAX_S = 1.0


async def on_worker(
    workers: Executor | None,
    function: Callable[..., T],
    *arguments: object,
    on_cancelled: Callable[[], None] | None = None,
) -> T:
    """Call a function on a worker thread, and wait until it has returned, also if cancelled.

    A thread cannot be cancelled, and what it works on must not be closed under it.

    Args:
        workers: threads; None for those of the event loop.
        function: function to call.
        arguments: its arguments.
        on_cancelled: called on another thread if the wait is cancelled, to end the function; again
            and again, until it has returned.

    Raises:
        UserCodeError: it raised what would end an iteration, a task, or the process.
        Exception: whatever else it raises, unless the wait was cancelled.
    """
    loop = asyncio.get_running_loop()
    call = loop.run_in_executor(workers, partial(contained, function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        pause_s = REPEAT_S
        while not call.done():
            if on_cancelled is not None:
                with contextlib.suppress(RuntimeError):  # the program ends
                    loop.run_in_executor(None, partial(notify, on_cancelled))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([call], timeout=None if on_cancelled is None else pause_s)
            pause_s = min(2 * pause_s, REPEAT_MAX_S)
        if not call.cancelled():
            call.exception()  # retrieved: no one waits for it any more
        raise
