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
        # Of a thread that waits: whoever puts an item takes it, and opens it. A lock by itself
        # wakes a thread sooner than a condition or a future does, and there is one consumer.
        self._gates: list[threading.Lock] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Add an item and wake the consumer. From any thread."""
        self._items.append(item)
        if self._gates:
            # Taking one is atomic: of several threads that put, one opens it.
            with contextlib.suppress(IndexError):
                while True:
                    self._gates.pop().release()
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            # A loop that was closed has no consumer any more.
            with contextlib.suppress(RuntimeError):
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter)

    def first(self) -> T:
        """Wait for the first item, in plain code; it stays until :meth:`drop`."""
        while not self._items:
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
            if self._items:  # put before the gate was seen
                break
            gate.acquire()
        return self._items[0]

    async def afirst(self) -> T:
        """As :meth:`first`, in a coroutine. Lets other coroutines run at least once."""
        if self._items:
            await asyncio.sleep(0)
        while not self._items:
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            if self._items:  # put before the waiter was seen
                self._waiter = None
                await asyncio.sleep(0)
                break
            await waiter
        return self._items[0]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it just now."""
        return not self._items

    def drop(self) -> None:
        """Remove the first item: the consumer is done with it."""
        self._items.popleft()


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # the consumer may have been cancelled
        waiter.set_result(None)
