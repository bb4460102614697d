"""Concurrent calls with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

__all__ = ["for_each"]

CALLS_MAX = 64
"""Default number of concurrent calls of a command that calls brokers for each journal."""

T = TypeVar("T")
R = TypeVar("R")


async def for_each(
    items: Iterable[T], call: Callable[[T], Awaitable[R]], calls_max: int = CALLS_MAX
) -> list[R]:
    """Call a coroutine function with each item, and return the results in order.

    Raises:
        ExceptionGroup: errors of calls. The first one cancels the other calls.
    """
    slots = asyncio.Semaphore(calls_max)

    async def limited(item: T) -> R:
        async with slots:
            return await call(item)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(limited(item)) for item in items]
    return [task.result() for task in tasks]
