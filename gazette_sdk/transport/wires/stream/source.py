"""The requests of an append, as far as they are there without waiting.

What an iterator gives without suspending belongs into one write with what came before. So it is
driven by hand, one step at a time: when a step suspends, what is gathered can be sent before the
suspension is handed on to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncIterator, Generator
from typing import Any, Final

from gazette_sdk.transport.target import AppendItem

__all__ = ["END", "PENDING", "Source"]


class _Mark:
    """What stands for no item."""


END: Final = _Mark()
"""The iterator ended."""

PENDING: Final = _Mark()
"""The next item is not there yet."""


class Source:
    """An iterator of requests that can be asked whether its next item is there.

    Args:
        items: the iterator. Nobody else uses it meanwhile.
    """

    __slots__ = ("_items", "_step", "_suspended_on")

    def __init__(self, items: AsyncIterator[AppendItem]) -> None:
        self._items = items
        self._step: Any = None
        self._suspended_on: Any = None

    def poll(self) -> AppendItem | _Mark:
        """The next item, :data:`END`, or :data:`PENDING`: then call :meth:`next`.

        Raises:
            Exception: whatever the iterator raises.
        """
        assert self._step is None
        step = self._items.__anext__().__await__()
        try:
            self._suspended_on = next(step)
        except StopIteration as stop:
            item: AppendItem = stop.value
            return item
        except StopAsyncIteration:
            return END
        self._step = step
        return PENDING

    async def next(self) -> AppendItem | _Mark:
        """Wait for the item that was pending: the item or :data:`END`."""
        step, suspended_on = self._step, self._suspended_on
        self._step = self._suspended_on = None
        try:
            item: AppendItem = await _resume(step, suspended_on)
        except StopAsyncIteration:
            return END
        return item

    async def cancel(self) -> None:
        """Give up an item that was pending, if there is one."""
        step, self._step = self._step, None
        if step is None:
            return
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await _resume(step, step.throw(asyncio.CancelledError()))


@types.coroutine
def _resume(step: Generator[Any, Any, Any], suspended_on: Any) -> Generator[Any, Any, Any]:
    """Go on with a step that has suspended already."""
    while True:
        try:
            sent = yield suspended_on
        except GeneratorExit:
            step.close()
            raise
        except BaseException as error:  # noqa: BLE001 - handed on to the step
            try:
                suspended_on = step.throw(error)
            except StopIteration as stop:
                return stop.value
        else:
            try:
                suspended_on = step.send(sent)
            except StopIteration as stop:
                return stop.value
