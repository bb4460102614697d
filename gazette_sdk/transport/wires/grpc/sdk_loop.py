"""Hops to the SDK's event loop and back, for calls over gRPC from other loops.

gRPC for asyncio has one poller per process, which several loops can share. But with grpcio 1.66,
which we support, loops then log thousands of ``BlockingIOError`` (a loop is woken for events that
another one has taken), and calls take longer; with 1.85 they do not. So calls from other loops hop
to the SDK's loop and back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from gazette_sdk.transport.loop import on_loop, sdk_loop

__all__ = ["SdkLoop"]

T = TypeVar("T")


class SdkLoop:
    """Home loop of one transport's calls. On that loop nothing is added to them.

    It is the SDK's loop at the first call, and remains the same; a forked child has its own.
    """

    def __init__(self) -> None:
        self._home: asyncio.AbstractEventLoop | None = None
        self._process_id = 0

    async def call(self, call: Coroutine[Any, Any, T]) -> T:
        """Make a call on the home loop."""
        home = self._elsewhere()
        return await call if home is None else await on_loop(home, call)

    def responses(self, responses: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Return an iterator for the running loop over responses of a call on the home loop."""
        home = self._elsewhere()
        return responses if home is None else _responses_of(home, responses)

    def requests(self, requests: AsyncIterator[T]) -> AsyncIterator[T]:
        """Return an iterator for the home loop over requests of the running one."""
        if self._elsewhere() is None:
            return requests
        return _requests_of(asyncio.get_running_loop(), requests)

    def _elsewhere(self) -> asyncio.AbstractEventLoop | None:
        """Return the home loop, if another one is running here and that one is not closed."""
        if self._home is None or self._process_id != os.getpid():
            self._home, self._process_id = sdk_loop(), os.getpid()
        is_here = self._home is asyncio.get_running_loop()
        return None if is_here or self._home.is_closed() else self._home


async def _requests_of(
    loop: asyncio.AbstractEventLoop, requests: AsyncIterator[T]
) -> AsyncIterator[T]:
    """Iterate over requests of another loop."""

    async def step() -> T | None:
        return await anext(requests, None)

    while (request := await on_loop(loop, step())) is not None:
        yield request


async def _responses_of(
    loop: asyncio.AbstractEventLoop, responses: AsyncGenerator[T]
) -> AsyncGenerator[T, None]:
    """Iterate over responses of another loop, and close their call in the end."""
    lock = asyncio.Lock()  # a step that was cancelled may still clean up when the end comes

    async def step() -> T | None:
        async with lock:
            return await anext(responses, None)

    async def close() -> None:
        async with lock:
            await responses.aclose()

    try:
        while (response := await on_loop(loop, step())) is not None:
            yield response
    finally:
        await on_loop(loop, close())
