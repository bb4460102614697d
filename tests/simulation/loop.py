"""Event loop on a virtual clock, for many nodes in one process.

A :class:`Node` is a process of the simulated cluster. Its tasks, timers and callbacks run in a
context of its own, which they inherit from each other. So the loop knows the node of everything
that it runs: callbacks of a node that was killed are dropped, and those of a node that is paused
are held back until it continues, as SIGKILL and SIGSTOP have it.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["Node", "StuckError", "VirtualLoop", "current_node", "running_loop"]

EPOCH_S = 1_700_000_000.0
"""Unix time at which every run begins."""

_ROUNDING_S = 1e-9
"""A timer that is due is not early by the clock of its node, whatever sums are rounded to."""

_NODE: contextvars.ContextVar[Node | None] = contextvars.ContextVar("node", default=None)


class StuckError(Exception):
    """Nothing can happen any more, and the run is not over."""


class Node:
    """Process of the simulated cluster, from its start to its end.

    Attributes:
        name: of the machine; a restarted process is a new node of the same name.
        is_dead: True once it was killed.
        behind_s: time by which its monotonic clock is late: it was suspended for so long.
        boot_behind_s: the same of its clock since boot, which counts some suspensions.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.behind_s = self.boot_behind_s = 0.0
        self._suspended_at_s: float | None = None
        self.context = contextvars.copy_context()
        self.context.run(_NODE.set, self)
        self._held: list[Handle] | None = None

    def __repr__(self) -> str:
        return f"Node({self.name!r})"

    @property
    def is_paused(self) -> bool:
        """True while nothing of it runs."""
        return self._held is not None

    def kill(self) -> None:
        """Drop all that it does, now and later. None of its clean-up runs."""
        self.is_dead = True
        self._held = None

    def pause(self) -> None:
        """Stop running its callbacks. Time goes on for it, as for a stopped process."""
        if self._held is None:
            self._held = []

    def suspend(self) -> None:
        """Stop running its callbacks, and its monotonic clock, as a machine that is suspended."""
        self.pause()
        self._suspended_at_s = running_loop().world_s

    def proceed(self, *, counts_suspension: bool = False) -> None:
        """Run what became due meanwhile, in its order.

        Args:
            counts_suspension: of a machine that was suspended: its clock since boot has counted the
                time. That of one which moved to another host has not.
        """
        held, self._held = self._held, None
        loop = running_loop()
        since_s, self._suspended_at_s = self._suspended_at_s, None
        if since_s is not None:
            suspended_s = loop.world_s - since_s
            self.behind_s += suspended_s
            self.boot_behind_s += 0.0 if counts_suspension else suspended_s
            held = loop.postpone(self, held or [], since_s, suspended_s)
        if held:
            loop.ready.extend(held)

    def task(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        """Start a task of this node, from outside of it."""
        return asyncio.get_running_loop().create_task(work, name=name, context=self.context)

    def call(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Call a function of this node after a delay, from outside of it."""
        asyncio.get_running_loop().call_later(delay_s, callback, *args, context=self.context)


class Handle(asyncio.TimerHandle):
    """Callback that the loop runs. Lighter than asyncio's, of which it needs only the interface.

    Attributes:
        is_own_timer: True for a timer that a node has set for itself, by its own clock.
    """

    __slots__ = ("is_own_timer",)

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        when: float = 0.0,
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False
        self._when = when
        self.is_own_timer = False

    def __repr__(self) -> str:
        return f"Handle({self._callback!r})"

    def cancel(self) -> None:
        """See the base class."""
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]


def current_node() -> Node | None:
    """Return the node whose code runs; None for the simulation itself."""
    return _NODE.get()


def running_loop() -> VirtualLoop:
    """Return the loop of this simulation."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


_serials = itertools.count(1)


class _Future(asyncio.Future[Any]):
    """Future with a hash that is the same in every run: sets of futures have one order."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.serial = next(_serials)

    def __hash__(self) -> int:
        return self.serial


class _Task(asyncio.Task[Any]):
    """Task with such a hash, which knows its node."""

    def __init__(
        self, work: Any, *, loop: asyncio.AbstractEventLoop, context: contextvars.Context | None
    ) -> None:
        self.serial = next(_serials)
        self.node = _NODE.get() if context is None else context.get(_NODE)
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.serial


class VirtualLoop(asyncio.BaseEventLoop):
    """Event loop whose time jumps to the next timer when nothing is ready.

    Attributes:
        ready: callbacks to run, in order.
        graveyard: tasks and objects of killed nodes. They must not be collected: closing their
            coroutines would run their clean-up.
        work_delay_s: returns the virtual time that work in a thread takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ready: deque[Handle] = deque()
        self.graveyard: list[object] = []
        self.work_delay_s: Callable[[], float] = lambda: 0.0005
        self._now = 0.0
        self._timers: list[tuple[float, int, Handle]] = []
        self._timer_numbers = itertools.count()
        self.set_task_factory(_make_task)

    # ---------------------------------------------------------------- clock

    def time(self) -> float:
        """Return virtual seconds since the beginning of the run, by the clock of the node."""
        node = _NODE.get()
        if node is None or not node.behind_s:
            return self._now
        return self._now - node.behind_s + _ROUNDING_S

    @property
    def world_s(self) -> float:
        """Virtual seconds since the beginning of the run, whoever asks."""
        return self._now

    def boot_time(self) -> float:
        """Return the node's clock since boot."""
        node = _NODE.get()
        return self._now - (node.boot_behind_s if node is not None else 0.0)

    def unix_time(self) -> float:
        """Return virtual Unix time."""
        return EPOCH_S + self._now

    def create_future(self) -> asyncio.Future[Any]:
        """See the base class."""
        return _Future(loop=self)

    def call_soon(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """See the base class."""
        handle = Handle(callback, args, context)
        self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # there are no other threads

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """See the base class. Timers of one moment run in the order of their calls."""
        node = _NODE.get()
        if node is not None and node.behind_s:
            when += node.behind_s
        return self.call_at_world(when, callback, *args, context=context)

    def call_at_world(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Call a function at a time of :attr:`world_s`."""
        timer = Handle(callback, args, context, when)
        node = _NODE.get()
        timer.is_own_timer = node is not None and timer._context.get(_NODE) is node
        heapq.heappush(self._timers, (when, next(self._timer_numbers), timer))
        return timer

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """See the base class."""
        return self.call_at_world(self._now + delay, callback, *args, context=context)

    def postpone(
        self, node: Node, held: list[Handle], since_s: float, suspended_s: float
    ) -> list[Handle]:
        """Postpone the timers that a node has set before it was suspended.

        Args:
            node: it was suspended.
            held: callbacks that became due meanwhile.
            since_s: begin of the suspension.
            suspended_s: its length.

        Returns:
            those of ``held`` that are due.
        """

        def is_late(timer: Handle) -> bool:
            is_set = timer.is_own_timer and timer._context.get(_NODE) is node
            return is_set and timer._when > since_s

        late = [timer for timer in held if is_late(timer)]
        kept: list[tuple[float, int, Handle]] = []
        for _, number, timer in self._timers:
            if is_late(timer):
                timer._when += suspended_s
            kept.append((timer._when, number, timer))
        for timer in late:
            timer._when += suspended_s
            kept.append((timer._when, next(self._timer_numbers), timer))
        heapq.heapify(kept)
        self._timers = kept
        return [timer for timer in held if timer not in late]

    def _run_once(self) -> None:
        ready, timers = self.ready, self._timers
        pop = heapq.heappop
        if not ready:
            while timers and timers[0][2]._cancelled:
                pop(timers)
            if not timers:
                raise StuckError("all tasks wait for something that nothing will do")
            self._now = max(self._now, timers[0][0])
        now = self._now
        while timers and timers[0][0] <= now:
            ready.append(pop(timers)[2])
        while ready and not self._stopping:  # type: ignore[attr-defined]
            handle = ready.popleft()
            if handle._cancelled:
                continue
            context = handle._context
            node = context.get(_NODE)
            if node is not None:
                if node.is_dead:
                    self.graveyard.append(handle)
                    continue
                if node._held is not None:
                    node._held.append(handle)
                    continue
            try:
                context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as a loop does
                self.call_exception_handler(
                    {"message": f"error in {handle!r}", "exception": error, "handle": handle}
                )

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list, "there are no sockets"

    def _write_to_self(self) -> None:
        """Wake the loop: there is nothing that sleeps."""

    # -------------------------------------------------------------- threads

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run work on the loop instead, between two delays: an executor has no virtual clock."""
        del executor
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - the future's
                self.call_later(self.work_delay_s(), _fail, future, error)
            else:
                self.call_later(self.work_delay_s(), _resolve, future, result)

        self.call_later(self.work_delay_s(), work)
        return future

    # ---------------------------------------------------------------- kills

    def bury(self, node: Node) -> None:
        """Kill a node, and keep what it leaves from being collected."""
        node.kill()
        for task in asyncio.all_tasks(self):
            if isinstance(task, _Task) and task.node is node:
                task._log_destroy_pending = False
                self.graveyard.append(task)


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, context: Any = None) -> _Task:
    return _Task(work, loop=loop, context=context)


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
