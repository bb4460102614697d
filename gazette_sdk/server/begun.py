"""Coroutines that run at once, and are awaited only where they have to wait.

Most calls never wait: what they need is there already. A timer, a scope or a turn of the event
loop around each of them would cost more than they do. So they are begun first, and get these
only when it turns out that they wait.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, Generic, TypeVar

__all__ = ["Begun"]

T = TypeVar("T")


class Begun(Generic[T]):
    """A coroutine that was run to its first wait, or to its end.

    To be made where :func:`asyncio.current_task` is the task that awaits it, unless it is done.
    Awaiting it goes on where it waits, and raises what it raised; that is done once.

    Args:
        coroutine: not begun yet.

    Attributes:
        done: whether it has ended well. If not, it must be awaited.
        result: what it returned then.
        interrupt: raised where it waits, as soon as it is awaited: for whoever was cancelled on
            the way to it.
    """

    __slots__ = ("_coroutine", "_error", "_waits_for", "done", "interrupt", "result")

    result: T
    _waits_for: Any

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._error: BaseException | None = None
        self.interrupt: BaseException | None = None
        self.done = False
        try:
            self._waits_for = coroutine.send(None)
        except StopIteration as end:
            self.done = True
            self.result = end.value
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            self._error = error

    @classmethod
    def next_of(cls, items: AsyncGenerator[T]) -> Begun[T]:
        """The next item of a generator; awaiting raises ``StopAsyncIteration`` at its end."""
        return cls(items.__anext__())

    def __await__(self) -> Generator[Any, Any, T]:
        """Go on."""
        if self.done:
            return self.result
        if self._error is not None:
            raise self._error
        coroutine, waits_for = self._coroutine, self._waits_for
        try:
            if self.interrupt is not None:
                waits_for = coroutine.throw(self.interrupt)
            while True:
                try:
                    sent = yield waits_for
                except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                    waits_for = coroutine.throw(error)
                else:
                    waits_for = coroutine.send(sent)
        except StopIteration as end:
            result: T = end.value
            return result
