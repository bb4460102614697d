"""Hands items from the SDK's event loop to whoever consumes them, a thread or a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue with one consumer, which is plain code or a coroutine of any loop.

    An item stays until the consumer is done with it, so that an interrupt loses nothing. It is
    not bounded: who puts items bounds them.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._arrived = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def put(self, item: T) -> None:
        """Add an item and wake the consumer. From any thread."""
        with self._arrived:
            self._items.append(item)
            self._arrived.notify()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            # A loop that was closed has no consumer any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, future)

    def first(self) -> T:
        """Wait for the first item, in plain code; it stays until :meth:`drop`."""
        with self._arrived:
            while not self._items:
                self._arrived.wait()
            return self._items[0]

    async def afirst(self) -> T:
        """As :meth:`first`, in a coroutine. Lets other coroutines run at least once."""
        await asyncio.sleep(0)
        while True:
            loop = asyncio.get_running_loop()
            with self._arrived:
                if self._items:
                    return self._items[0]
                future = loop.create_future()
                self._waiter = (loop, future)
            await future

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it just now."""
        return not self._items

    def drop(self) -> None:
        """Remove the first item: the consumer is done with it."""
        with self._arrived:
            self._items.popleft()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
