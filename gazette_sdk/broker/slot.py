"""Exclusive ownership of one thing, and the signal that ends the wait for it.

A replica has two slots: one holds its spool, the other its pipeline (broker sections 3 and 6).
The owner of a slot owns the thing until it puts it back. Waiting owners are served first come,
first served; taking a free slot costs no turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["InvalidatedError", "Signal", "Slot"]

T = TypeVar("T")


class InvalidatedError(Exception):
    """The signal fired before the slot could be taken: resolve again.

    It never leaves the broker: every waiter for a slot resolves again.
    """


class Signal:
    """Event that fires once. The next change needs a new signal."""

    __slots__ = ("_callbacks", "fired")

    def __init__(self) -> None:
        self.fired = False
        self._callbacks: dict[int, Callable[[], None]] = {}

    def fire(self) -> None:
        """Fire, and run the callbacks. Firing again does nothing."""
        if self.fired:
            return
        self.fired = True
        callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks.values():
            callback()

    def on_fire(self, callback: Callable[[], None]) -> int:
        """Run ``callback`` when it fires, now if it has. Returns a handle for :meth:`forget`."""
        if self.fired:
            callback()
            return 0
        handle = id(callback)
        self._callbacks[handle] = callback
        return handle

    def forget(self, handle: int) -> None:
        """Remove the callback of ``handle``."""
        self._callbacks.pop(handle, None)

    async def wait(self) -> None:
        """Return when it has fired."""
        if self.fired:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        handle = self.on_fire(wake)
        try:
            await done
        finally:
            self.forget(handle)


class Slot(Generic[T]):
    """Holder of one thing that has one owner at a time.

    Args:
        thing: the thing; the slot begins free. Without it the slot begins owned, by the code
            that will put the thing there.

    Attributes:
        free: True if nobody owns the thing.
    """

    __slots__ = ("_value", "_waiters", "free")

    def __init__(self, *thing: T) -> None:
        self.free = len(thing) == 1
        if self.free:
            (self._value,) = thing
        self._waiters: deque[asyncio.Future[T]] = deque()

    def take_now(self) -> T:
        """Take the thing of a free slot. Nobody waits for a free slot."""
        assert self.free, "a slot is taken when it is free"
        self.free = False
        return self._value

    async def take(self, signal: Signal | None = None) -> T:
        """Take the thing, after everybody who asked before.

        Args:
            signal: ends the waiting when it fires.

        Raises:
            InvalidatedError: ``signal`` fired first. It counts even where the slot became free
                in the same turn: what the caller resolved is old.
        """
        if signal is not None and signal.fired:
            raise InvalidatedError
        if self.free:
            self.free = False
            return self._value

        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)

        def give_up() -> None:
            if not waiter.done():
                waiter.set_exception(InvalidatedError())

        handle = signal.on_fire(give_up) if signal is not None else 0
        try:
            value = await waiter
        except asyncio.CancelledError:
            # Handed over and cancelled in the same turn: nobody else knows that it is ours.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.put(waiter.result())
            raise
        finally:
            if signal is not None:
                signal.forget(handle)
        if signal is not None and signal.fired:
            self.put(value)
            raise InvalidatedError
        return value

    def put(self, value: T) -> None:
        """Give the thing (or its successor) to the oldest waiter, or back to the slot."""
        assert not self.free, "a slot is put back by its owner"
        self._value = value
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(value)
                return
        self.free = True

    def peek(self) -> T:
        """Return the thing that was put last. The slot has held one."""
        return self._value
