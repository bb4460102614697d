"""Event loops on which the SDK's asynchronous code runs.

What a coroutine opens works on its own loop. Plain programs never see a loop: the first call that
needs one starts the SDK's background loop in a daemon thread, and plain code posts coroutines to
it. A server process makes its loop the SDK's (:func:`adopt_running_loop`), so that it has one only,
which is what gRPC for asyncio is good at. A forked child begins without a loop; transports of its
parent are dead there and say so.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast

from gazette_sdk.contexts import Startable
from gazette_sdk.errors import GazetteError, ReentrantCallError
from gazette_sdk.retries import run_together
from gazette_sdk.user_code import described

S = TypeVar("S")
T = TypeVar("T")

CALLS_MAX = 64
"""Default number of concurrent calls, where brokers are called for each journal."""

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
"""A thread that has not begun to run its loop after this time is starved beyond use."""

SLICE_S = 0.002
"""Time of an event loop after which long work lets other tasks run."""

STOP_TIMEOUT_S = 2.0
"""Bound of the wait for cancelled tasks at the end of the process."""


class LoopSlices:
    """Slices of long work on an event loop, between which other tasks run."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._begun_s = time.perf_counter()

    @property
    def taken_s(self) -> float:
        """Time of all slices, in seconds, without that of other tasks between them."""
        return self._before_s + time.perf_counter() - self._begun_s

    async def rest(self) -> None:
        """Let other tasks run, if the slice is over."""
        slice_s = time.perf_counter() - self._begun_s
        if slice_s >= SLICE_S:
            self._before_s += slice_s
            await asyncio.sleep(0)
            self._begun_s = time.perf_counter()


class OwnedLock(Protocol):
    """Lock that knows the thread which holds it, as ``threading.RLock``."""

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take it; return False if another thread has it, and waiting is not wanted."""

    def release(self) -> None:
        """Release it."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *_: object) -> None: ...

    def _is_owned(self) -> bool:
        """Return True if the calling thread holds it."""


_locks: weakref.WeakSet[OwnedLock] = weakref.WeakSet()


def new_lock() -> OwnedLock:
    """Return a lock that an event loop takes, too. Take it as ``with guarded(lock)``.

    A signal handler, a finalizer or a log handler may run between any two steps of a thread that
    holds it. What it does would wait for that thread, or see what is half changed.
    """
    lock = cast("OwnedLock", threading.RLock())
    _locks.add(lock)
    return lock


def guarded(lock: OwnedLock) -> OwnedLock:
    """Return a lock to take.

    Raises:
        ReentrantCallError: the calling thread holds it already.
    """
    if lock._is_owned():  # noqa: SLF001 - of threading.RLock, which Condition calls, too
        raise reentrant_call()
    return lock


def check_reentry() -> None:
    """Refuse to block a thread that holds a lock for which an event loop may wait.

    Raises:
        ReentrantCallError: it does, below the calling code.
    """
    for lock in _known_locks():
        guarded(lock)


def _known_locks() -> list[OwnedLock]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread adds one
            return list(_locks)


def reentrant_call() -> ReentrantCallError:
    """Return the error of a call within another one of the same thread."""
    return ReentrantCallError(
        "this call was made within another call of the same thread, as by a signal handler, a"
        " finalizer (`__del__`) or a log handler, and would wait for it for ever; set a flag there,"
        " and make the call in the main code, or hand it to another thread"
    )


class _Loops:
    """Which loop is the SDK's; one instance per process."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.adopted: asyncio.AbstractEventLoop | None = None
        self.background: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self.posted: set[concurrent.futures.Future[Any]] = set()

    def current(self) -> asyncio.AbstractEventLoop:
        with guarded(self.lock):
            if self.adopted is not None and not self.adopted.is_closed():
                return self.adopted
            if self.background is None or self.background.is_closed():
                self._start()
            assert self.background is not None
            return self.background

    def _start(self) -> None:
        loop = asyncio.new_event_loop()
        running = threading.Event()

        def serve() -> None:
            asyncio.set_event_loop(loop)
            loop.call_soon(running.set)
            while True:
                try:
                    loop.run_forever()
                except (KeyboardInterrupt, SystemExit) as error:
                    # Of a task that user code began here. Everything else waits for this loop.
                    _log.error(
                        "a task on the SDK's event loop raised %s, which ends that task only",
                        described(error),
                        exc_info=error,
                    )
                else:
                    break
            loop.close()

        thread = threading.Thread(target=serve, name="gazette-sdk-loop", daemon=True)
        thread.start()
        if not running.wait(START_TIMEOUT_S):
            raise GazetteError(
                f"the SDK's event loop did not start within {START_TIMEOUT_S:g} s; "
                "the machine is overloaded or out of threads"
            )
        self.background, self.thread = loop, thread

    def stop(self) -> None:
        """End the background loop: cancel what runs on it, then wait for it within a bound."""
        with guarded(self.lock):
            loop, thread = self.background, self.thread
            self.background = self.thread = None
        if loop is None or thread is None or not thread.is_alive():
            return

        async def wind_down() -> None:
            tasks = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
            await loop.shutdown_asyncgens()

        ending = asyncio.run_coroutine_threadsafe(wind_down(), loop)
        concurrent.futures.wait([ending], timeout=2 * STOP_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STOP_TIMEOUT_S)


_loops = _Loops()


def _forget_parent() -> None:
    """In a forked child: the parent's threads and loops do not exist here."""
    global _loops  # noqa: PLW0603 - one per process, and this is a new process
    _loops = _Loops()


os.register_at_fork(after_in_child=_forget_parent)


def _stop() -> None:
    _loops.stop()  # whichever it is by then


atexit.register(_stop)


def sdk_loop() -> asyncio.AbstractEventLoop:
    """The SDK's loop: the adopted one, or the background thread's (started by the first call)."""
    return _loops.current()


def adopt_running_loop() -> None:
    """Make the running loop the SDK's; for server processes, before they open any transport.

    Transports opened earlier stay on the loop they were opened on. Once the adopted loop is
    closed, the background loop serves again.
    """
    loop = asyncio.get_running_loop()
    with guarded(_loops.lock):
        _loops.adopted = loop


def is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Return True if the calling code runs on this event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def is_in_coroutine() -> bool:
    """Return True if an event loop runs on the calling thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_on_sdk_loop() -> bool:
    """Return True if the calling code runs on the SDK's event loop."""
    return is_running(sdk_loop())


def post(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on the SDK's loop, from any thread. Cancelling the future cancels it.

    It runs to its end though no one keeps the future: an event loop refers to its tasks weakly.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, sdk_loop())
    posted = _loops.posted
    posted.add(future)
    future.add_done_callback(posted.discard)
    return future


def run(
    coroutine: Coroutine[Any, Any, T],
    timeout: float | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> T:
    """Run a coroutine on an event loop of another thread and wait for its result.

    Args:
        coroutine: what to run.
        timeout: seconds to wait; ``None`` waits until it ends. An interrupt cancels it.
        loop: the loop; the SDK's unless given.

    Raises:
        TimeoutError: it did not end in time, and was cancelled.
        GazetteError: called from that loop, which would wait for itself for ever.
        ReentrantCallError: called within another call, for which the loop may wait.
    """
    loop = loop or sdk_loop()
    if is_running(loop):
        coroutine.close()
        raise GazetteError(
            "a blocking call was made on the SDK's own event loop and would wait for itself; "
            "inside of a coroutine `await` the asynchronous form instead"
        )
    try:
        check_reentry()
    except ReentrantCallError:
        coroutine.close()
        raise
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        # Not the time-out of result(): a signal handler may raise a TimeoutError, too.
        if timeout is not None and not concurrent.futures.wait([future], timeout).done:
            raise TimeoutError(f"no result within {timeout:g} s")
        return future.result()
    finally:
        future.cancel()  # no effect once it is done


async def on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that belongs to one event loop, from a coroutine of any."""
    if is_running(loop):
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


async def on_sdk_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that belongs to the SDK's loop, from a coroutine of any loop."""
    return await on_loop(sdk_loop(), coroutine)


async def for_each(
    items: Iterable[S], call: Callable[[S], Awaitable[T]], calls_max: int = CALLS_MAX
) -> list[T]:
    """Call a coroutine function with each item, and return the results in order.

    Raises:
        Exception: the first error of a call. The other calls are cancelled.
    """
    slots = asyncio.Semaphore(calls_max)

    async def limited(item: S) -> T:
        async with slots:
            return await call(item)

    return await run_together(*map(limited, items))


def home_loop(fixed: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop:
    """Return the event loop for what is opened now.

    Args:
        fixed: the only loop that will do, if there is one.

    Returns:
        ``fixed``; else the running loop, so that coroutines pay no hop between threads; else the
        SDK's background loop.
    """
    if fixed is not None:
        return fixed
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return sdk_loop()


class LoopStartable(Startable):
    """Context manager whose asynchronous form starts and stops on the SDK's event loop."""

    @abstractmethod
    async def astart(self) -> None:
        """Start it, on the SDK's event loop."""

    @abstractmethod
    async def astop(self) -> None:
        """Stop it, on the SDK's event loop."""

    async def __aenter__(self) -> Self:
        await on_sdk_loop(self.astart())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await on_sdk_loop(self.astop())
