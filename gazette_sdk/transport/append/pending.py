"""Appends that are not acknowledged yet, and waiting for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Generator
from functools import partial
from typing import Any, Protocol, TypeAlias

from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import check_reentry, is_running, reentrant_call
from gazette_sdk.user_code import notify

__all__ = ["AnyFuture", "Outcome", "PendingAppend", "all_ended", "any_ended"]

Outcome: TypeAlias = pb.AppendResponse | BaseException
"""The response, of status OK, or the error of an append that failed for good."""


class AnyFuture(Protocol):
    """A future of asyncio, of ``concurrent.futures``, or a :class:`PendingAppend`."""

    def done(self) -> bool:
        """Return True if it has ended."""

    def cancelled(self) -> bool:
        """Return True if it was cancelled."""

    def exception(self) -> BaseException | None:
        """Return the error of one that has failed."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """Call back once when it has ended, from any thread."""


class Receiver(Protocol):
    """The appender of a pending append, as far as it takes part in waiting."""

    def receive(self, append: PendingAppend, timeout_s: float | None) -> None:
        """Receive the answer of an inline append on the calling thread, if nobody else does."""

    @property
    def is_receiving_here(self) -> bool:
        """The calling thread receives an inline answer, below this call."""

    def leave_to_loop(self) -> None:
        """Let the event loop receive the answer of an inline append."""


class PendingAppend:
    """Future of one append: content that is appended to a journal atomically.

    Any thread may wait for it, and coroutines of any event loop. Several writes may share it:
    the response is that of all of them together.

    Args:
        request: opening request; None for a placeholder that is no append.
        after: futures that must succeed before it is sent.
        receiver: its appender.
        loop: event loop that receives its answer, and must not be blocked by waiting for it.

    Attributes:
        request: opening request.
        after: futures that must succeed before it is sent.
        content: frames behind ``parts``, while it takes writes.
        parts: content that is complete.
        length_bytes: length of ``parts`` and ``content``; 0 once it has ended.
        count: number of writes.
        context: object of whoever appends, to find it again when the append ends.
        queued_at: time of the first write, in monotonic seconds.
        last_error: error of the last attempt that failed.
        failure: error with which it was given up; set under the appender's lock, and so before
            ``outcome``.
        outcome: response or error; None before it has ended.
    """

    __slots__ = (
        "_callbacks",
        "_loop",
        "_receiver",
        "after",
        "content",
        "context",
        "count",
        "failure",
        "last_error",
        "length_bytes",
        "outcome",
        "parts",
        "queued_at",
        "request",
    )

    def __init__(
        self,
        request: pb.AppendRequest | None = None,
        after: frozenset[AnyFuture] = frozenset(),
        receiver: Receiver | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.request = request
        self.after = after
        self.content = bytearray()
        self.parts: list[bytes] = []
        self.length_bytes = 0
        self.count = 0
        self.context: Any = None
        self.queued_at = 0.0
        self.last_error: Exception | None = None
        self.failure: Exception | None = None
        self.outcome: Outcome | None = None
        self._receiver = receiver
        self._loop = loop
        self._callbacks: list[Callable[[PendingAppend], object]] = []

    @property
    def journal(self) -> str:
        """Name of the journal; empty for a placeholder."""
        return "" if self.request is None else self.request.journal

    # ------------------------------------------------------------------ content

    def add_part(self, content: bytes) -> None:
        """Add content without copying it."""
        self.seal()
        self.parts.append(content)
        self.length_bytes += len(content)

    def seal(self) -> list[bytes]:
        """Return the whole content, in parts."""
        if self.content:
            self.parts.append(bytes(self.content))
            self.content = bytearray()
        return self.parts

    # ---------------------------------------------------------------- its end

    def settle(self, outcome: Outcome) -> None:
        """End it, once, and call back everybody who waits. Drops the content."""
        assert self.outcome is None
        self.content = bytearray()
        self.parts = []
        self.length_bytes = 0
        self.outcome = outcome
        self._receiver = None
        callbacks = self._callbacks
        while callbacks:
            notify(callbacks.pop(), self)

    def done(self) -> bool:
        """Return True if it was acknowledged, or has failed for good."""
        return self.outcome is not None

    def cancelled(self) -> bool:
        """Return False: it cannot be cancelled."""
        return False

    def exception(self) -> BaseException | None:
        """Return the error of an append that has failed; None for one that was acknowledged."""
        return self.outcome if isinstance(self.outcome, BaseException) else None

    def result(self) -> pb.AppendResponse:
        """Return the response of an append that has ended.

        Raises:
            GazetteError: it failed, or has not ended yet.
        """
        outcome = self.outcome
        if outcome is None:
            raise GazetteError(f"{self.journal}: the append is not acknowledged yet: wait for it")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    # ---------------------------------------------------------------- waiting

    def add_done_callback(self, callback: Callable[[PendingAppend], object], /) -> None:
        """Call ``callback(self)`` once when it has ended, from whichever thread ends it."""
        callbacks = self._callbacks
        callbacks.append(callback)
        if self.outcome is not None:
            with contextlib.suppress(ValueError):  # it was called by `settle`
                callbacks.remove(callback)
                notify(callback, self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended.

        Args:
            timeout_s: seconds; None for any time.

        Returns:
            True if it has ended.

        Raises:
            GazetteError: called on the event loop that receives the answer.
            ReentrantCallError: called within a call of the same thread that it waits for.
        """
        if self.outcome is None and self._loop is not None and is_running(self._loop):
            raise GazetteError(
                "waiting here would block the event loop that receives the answer: `await receipt`"
            )
        receiver = self._receiver
        if self.outcome is None and receiver is not None:
            receiver.receive(self, timeout_s)
        if self.outcome is None:
            check_reentry()
            if receiver is not None and receiver.is_receiving_here:
                raise reentrant_call()
            ended = threading.Lock()
            ended.acquire()

            def release(_append: PendingAppend) -> None:
                ended.release()

            self.add_done_callback(release)
            if not ended.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
                self.forget(release)
        return self.outcome is not None

    def poll(self) -> bool:
        """Return :meth:`done`, after a look at the answer of an inline append."""
        receiver = self._receiver
        if self.outcome is None and receiver is not None:
            receiver.receive(self, 0.0)
        return self.outcome is not None

    def __await__(self) -> Generator[Any, None, pb.AppendResponse]:
        yield from self.ended().__await__()
        return self.result()

    def call_in(self) -> None:
        """Let the event loop receive the answer of an inline append."""
        receiver = self._receiver
        if receiver is not None:
            receiver.leave_to_loop()

    async def ended(self) -> None:
        """Wait until it has ended, well or badly. A waiter that is cancelled cancels nothing."""
        if self.outcome is not None:
            return
        self.call_in()
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        wake = partial(_wake, loop, threading.get_ident(), waiter)
        self.add_done_callback(wake)
        try:
            await waiter
        finally:
            if self.outcome is None:
                self.forget(wake)

    def forget(self, callback: Callable[[PendingAppend], object]) -> None:
        """Drop a callback that was not called yet."""
        with contextlib.suppress(ValueError):  # it ends at this moment
            self._callbacks.remove(callback)


async def all_ended(appends: Collection[PendingAppend], timeout_s: float | None = None) -> bool:
    """Wait until all have ended, well or badly; return False if the time ran out."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for append in appends:
                await append.ended()
    return all(append.done() for append in appends)


async def any_ended(appends: Collection[PendingAppend]) -> None:
    """Wait until one of several has ended, well or badly."""
    if not appends or any(append.done() for append in appends):
        return
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    wake = partial(_wake, loop, threading.get_ident(), waiter)
    for append in appends:
        append.call_in()
        append.add_done_callback(wake)
    try:
        await waiter
    finally:
        for append in appends:
            append.forget(wake)


def _wake(
    loop: asyncio.AbstractEventLoop,
    thread: int,
    waiter: asyncio.Future[None],
    _append: PendingAppend,
) -> None:
    if threading.get_ident() == thread:
        _resolve(waiter)
    else:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it who waits
            loop.call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
