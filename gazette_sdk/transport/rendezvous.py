"""What one coroutine waits for, which a protocol's callback resumes at once."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Generator
from typing import Any

__all__ = ["Rendezvous"]


class Rendezvous:
    """Stands for a future where whoever waits is resumed by the very call of :meth:`meet`.

    A future resumes its waiter in the loop's next turn, behind everything that is ready by then:
    that is most of what a small answer's way through the loop takes. ``asyncio`` takes anything
    for a future that has these methods.

    Only one coroutine may wait, once. :meth:`meet` may only be called by a callback of the loop,
    where no task is running.
    """

    __slots__ = ("_asyncio_future_blocking", "_context", "_is_cancelled", "_loop", "_resume")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._resume: Callable[[Rendezvous], object] | None = None
        self._context: contextvars.Context | None = None
        self._is_cancelled = False

    def meet(self) -> None:
        """Resume who waits; it runs until it waits again. No effect the second time."""
        resume, context, self._resume = self._resume, self._context, None
        if resume is not None:
            assert context is not None
            context.run(resume, self)

    def meet_soon(self) -> None:
        """As :meth:`meet`, in the loop's next turn; for callers which may be tasks."""
        resume, self._resume = self._resume, None
        if resume is not None:
            self._loop.call_soon(resume, self, context=self._context)

    # ------------------------------------------------------- as a task sees it

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """See ``asyncio.Future``."""
        return self._loop

    def add_done_callback(
        self, resume: Callable[[Rendezvous], object], *, context: contextvars.Context
    ) -> None:
        """See ``asyncio.Future``: the task's step."""
        self._resume, self._context = resume, context

    def cancel(self, msg: object = None) -> bool:
        """See ``asyncio.Future``: the task is cancelled."""
        del msg
        if self._resume is None:
            return False
        self._is_cancelled = True
        self.meet_soon()
        return True

    def result(self) -> None:
        """See ``asyncio.Future``."""
        if self._is_cancelled:
            raise asyncio.CancelledError

    def __await__(self) -> Generator[Any, None, None]:
        self._asyncio_future_blocking = True
        yield self
        self.result()
