"""Exclusive ownership of one thing, and the signal that ends waiting for it.

A replica has two slots: one holds its spool, the other its pipeline (broker sections 3 and 6).
Who takes a slot owns the thing until it is put back. Owners follow one another in the order in
which they asked; taking a free slot costs no turn of the event loop.
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

    It never leaves the broker: every waiter for a slot answers it by another resolution.
    """


class Signal:
    """Fires once, for ever. Whoever wants to know of the next change asks for the next signal."""

    __slots__ = ("_callbacks", "fired")

    def __init__(self) -> None:
        self.fired = False
        self._callbacks: dict[int, Callable[[], None]] = {}

    def fire(self) -> None:
        """Fire, and call everybody who asked for it. Firing again does nothing."""
        if self.fired:
            return
        self.fired = True
        callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks.values():
            callback()

    def on_fire(self, callback: Callable[[], None]) -> int:
        """Call ``callback`` when it fires, at once if it has. Returns a handle to forget it."""
        if self.fired:
            callback()
            return 0
        handle = id(callback)
        self._callbacks[handle] = callback
        return handle

    def forget(self, handle: int) -> None:
        """Do not call the callback of ``handle`` any more."""
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
    """One thing which has one owner at a time.

    Args:
        thing: the thing; the slot begins free. Without it the slot begins owned, by whoever is
            going to put the thing there.
    """

    __slots__ = ("_free", "_value", "_waiters")

    def __init__(self, *thing: T) -> None:
        self._free = len(thing) == 1
        if self._free:
            (self._value,) = thing
        self._waiters: deque[asyncio.Future[T]] = deque()

    @property
    def free(self) -> bool:
        """Whether nobody owns it."""
        return self._free

    def take_now(self) -> T:
        """Own the thing of a slot that is free; nobody waits for it then."""
        assert self._free, "a slot is taken when it is free"
        self._free = False
        return self._value

    async def take(self, signal: Signal | None = None) -> T:
        """Own the thing, after everybody who asked before.

        Args:
            signal: ends the waiting when it fires.

        Raises:
            InvalidatedError: ``signal`` fired first. It counts even where the slot became free
                in the same turn: what the caller resolved is old.
        """
        if signal is not None and signal.fired:
            raise InvalidatedError
        if self._free:
            self._free = False
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
        """Give the thing (or its successor) to whoever waits longest, or back to the slot."""
        assert not self._free, "a slot is put back by its owner"
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(value)
                return
        self._value = value
        self._free = True

    def peek(self) -> T:
        """What a free slot holds, or what it held when it was last taken."""
        return self._value
