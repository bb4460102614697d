"""Queue of the appends of one journal: what may be sent, and what follows from an answer. Pure.

Appends are sent in the order in which they were queued, several of them in flight. The first
failure closes the window: when all in flight have ended, sending starts again from the append that
failed, or all fail. A transport writes an append only if the one before it was written, so each of
the two series is in order; content may appear twice, as with every append whose answer was lost.

=========  ============================  =============================  =========
state      event                         effect                         next
=========  ============================  =============================  =========
OPEN       ACKNOWLEDGED                  SETTLE                         OPEN
OPEN       FAILED                        NOTHING                        DRAINING
DRAINING   ACKNOWLEDGED, FAILED          NOTHING                        DRAINING
DRAINING   DRAINED                       RETRY                          PAUSED
DRAINING   DRAINED_FOR_GOOD              FAIL                           FAILED
PAUSED     RESUMED                       SEND                           OPEN
any        CLOSED                        FAIL                           FAILED
=========  ============================  =============================  =========

Every other pair is a bug of the caller.

A :class:`PendingAppend` is the future of an append, for which threads and coroutines wait.
:class:`Linger` is the pause before a further append of a journal that is being streamed to.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, Protocol, TypeAlias

from prometheus_client import REGISTRY, Counter
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gazette_sdk.errors import GazetteError
from gazette_sdk.meters import Buckets
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import check_reentry, is_running, reentrant_call
from gazette_sdk.user_code import notify

LINGER_S = 0.002
"""Length of the pause, so that more writes share an append. A journal whose writes come one by one
never waits."""

STREAMING_COUNT_MIN = 16
"""An append of so many writes shows that its journal is being streamed to."""

LARGE_BYTES = 256 << 10
"""An append of this size costs little beside its content: it does not wait for more."""

APPEND_BYTES = Counter(
    "gazette_append_bytes", "Bytes written to appends; retries count again.", ["journal"]
)


class Linger:
    """Pause of one journal. Times are monotonic seconds."""

    __slots__ = ("_begun_at", "_last_count")

    def __init__(self) -> None:
        self._last_count = 0  # writes of the last append
        self._begun_at = 0.0

    def wait_s(self, now: float, length_bytes: int, *, is_in_flight: bool) -> float:
        """Return the seconds until the next append may begin; 0 if it may now.

        Args:
            now: the time.
            length_bytes: length of the next append.
            is_in_flight: True if appends before it have no answer yet.
        """
        if length_bytes >= LARGE_BYTES:
            return 0.0
        if self._last_count < STREAMING_COUNT_MIN and not is_in_flight:
            return 0.0
        return max(0.0, self._begun_at + LINGER_S - now)

    def begun(self, now: float, count: int) -> None:
        """Note that an append of ``count`` writes was sent."""
        self._last_count = count
        self._begun_at = now

    def ran_dry(self) -> None:
        """Note that nothing is queued: the next write is not waited with."""
        self._last_count = 0


AppendOutcome: TypeAlias = pb.AppendResponse | BaseException
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
        """Receive the answer of an inline append on the calling thread, if no one else does."""

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
        content: frames after ``parts``, while it takes writes.
        parts: content that is complete.
        length_bytes: length of ``parts`` and ``content``; 0 once it has ended.
        count: number of writes.
        context: object of whoever appends, to find it again when the append ends.
        traceparent: context of its span of OpenTelemetry; empty for none.
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
        "traceparent",
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
        self.traceparent = ""
        self.queued_at = 0.0
        self.last_error: Exception | None = None
        self.failure: Exception | None = None
        self.outcome: AppendOutcome | None = None
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

    def settle(self, outcome: AppendOutcome) -> None:
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
            longest_s = threading.TIMEOUT_MAX
            wait_s = -1 if timeout_s is None else min(max(timeout_s, 0.0), longest_s)
            if not ended.acquire(timeout=wait_s):
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


IN_FLIGHT_MAX = 8
"""Appends of a journal in flight at once; what queues after them shares one append."""

IN_FLIGHT_BYTES_MAX = 16 << 20
"""Content in flight after which no further append is sent."""


class DependencyFailedError(GazetteError):
    """An append was not sent, because a future that it waited for has failed."""


class QueueState(enum.IntEnum):
    """State of a queue."""

    OPEN = 0
    """Appends are sent as the window allows."""
    DRAINING = 1
    """An append failed; the others in flight are waited for."""
    PAUSED = 2
    """Nothing is in flight; the next attempt is waited for."""
    FAILED = 3
    """An append failed for good; further ones are refused."""


class QueueEvent(enum.IntEnum):
    """Input of a queue."""

    ACKNOWLEDGED = 0
    """The oldest append in flight was acknowledged."""
    FAILED = 1
    """An append in flight has failed."""
    DRAINED = 2
    """None is in flight any more, and another attempt may succeed."""
    DRAINED_FOR_GOOD = 3
    """None is in flight any more, and no attempt can succeed."""
    RESUMED = 4
    """The pause has ended."""
    CLOSED = 5
    """The appender was closed, or met an error of its own."""


class QueueEffect(enum.IntEnum):
    """Action that the driver of a queue performs."""

    NOTHING = 0
    SETTLE = 1
    """Settle the append."""
    RETRY = 2
    """Pause, then resume."""
    FAIL = 3
    """Fail all appends."""
    SEND = 4
    """Send what the window allows."""


TABLE: dict[tuple[QueueState, QueueEvent], tuple[QueueEffect, QueueState]] = {
    (QueueState.OPEN, QueueEvent.ACKNOWLEDGED): (QueueEffect.SETTLE, QueueState.OPEN),
    (QueueState.OPEN, QueueEvent.FAILED): (QueueEffect.NOTHING, QueueState.DRAINING),
    (QueueState.DRAINING, QueueEvent.ACKNOWLEDGED): (QueueEffect.NOTHING, QueueState.DRAINING),
    (QueueState.DRAINING, QueueEvent.FAILED): (QueueEffect.NOTHING, QueueState.DRAINING),
    (QueueState.DRAINING, QueueEvent.DRAINED): (QueueEffect.RETRY, QueueState.PAUSED),
    (QueueState.DRAINING, QueueEvent.DRAINED_FOR_GOOD): (QueueEffect.FAIL, QueueState.FAILED),
    (QueueState.PAUSED, QueueEvent.RESUMED): (QueueEffect.SEND, QueueState.OPEN),
    **{(state, QueueEvent.CLOSED): (QueueEffect.FAIL, QueueState.FAILED) for state in QueueState},
}


class AppendQueue:
    """Appends of one journal that are not acknowledged, oldest first.

    Args:
        journal: name of the journal, without metadata.
        batch_bytes_max: an append of this length takes no further writes.
        receiver: given to its appends.
        loop: given to its appends.

    Attributes:
        plain: request of an append without preconditions.
        state: of the machine.
        attempt: failed attempts since the last acknowledgement.
        error: first error of the attempt that failed.
        in_flight: appends without an answer, oldest first.
    """

    def __init__(
        self,
        journal: str,
        batch_bytes_max: int,
        receiver: Receiver | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.plain = pb.AppendRequest(journal=journal)
        self.state = QueueState.OPEN
        self.attempt = 0
        self.error: Exception | None = None
        self.in_flight: deque[PendingAppend] = deque()
        self._batch_bytes_max = batch_bytes_max
        self._receiver = receiver
        self._loop = loop
        self._is_terminal = False
        self._in_flight_bytes = 0
        self._unsettled: deque[PendingAppend] = deque()  # in flight when one of them failed
        self._queued: deque[PendingAppend] = deque()

    # ------------------------------------------------------------------ adding

    def tail(
        self, request: pb.AppendRequest | None = None, after: frozenset[AnyFuture] = frozenset()
    ) -> PendingAppend:
        """Return the append that takes the next write.

        A new one is queued by the first :meth:`push` only.

        Args:
            request: opening request; None for a plain one.
            after: futures that must succeed before it is sent.
        """
        if self._queued:
            newest = self._queued[-1]
            if (
                newest.length_bytes < self._batch_bytes_max
                and (newest.request is self.plain if request is None else newest.request == request)
                and after <= newest.after
            ):
                return newest
        request = self.plain if request is None else request
        return PendingAppend(request, after, self._receiver, self._loop)

    def push(self, append: PendingAppend, count: int = 1) -> None:
        """Count further writes of an append of :meth:`tail`."""
        if not append.count:
            append.queued_at = time.monotonic()
            self._queued.append(append)
        append.count += count

    def refused(self, request: pb.AppendRequest | None = None) -> PendingAppend:
        """Return an append that has failed like the queue, which is in state FAILED."""
        assert self.error is not None
        refused = PendingAppend(request or self.plain)
        refused.settle(self.error)
        return refused

    # ----------------------------------------------------------------- sending

    @property
    def next(self) -> PendingAppend | None:
        """The oldest append that is not in flight, if there is one."""
        return self._queued[0] if self._queued else None

    def begin(self) -> PendingAppend | None:
        """Take the next append into flight, if the window has room for it.

        An append with preconditions is alone in flight.

        Raises:
            DependencyFailedError: a future that it waits for has failed.
        """
        if self.state is not QueueState.OPEN or not self._queued:
            return None
        append = self._queued[0]
        in_flight = self.in_flight
        if in_flight and (
            len(in_flight) >= IN_FLIGHT_MAX
            or self._in_flight_bytes + append.length_bytes > IN_FLIGHT_BYTES_MAX
            or append.request is not self.plain
            or in_flight[-1].request is not self.plain
        ):
            return None
        if append.after:
            if (failure := self.failed_dependency()) is not None:
                if in_flight:
                    return None  # those ahead of it end first
                raise failure
            if self.waits_for() is not None:
                return None
        self._queued.popleft()
        in_flight.append(append)
        self._in_flight_bytes += append.length_bytes
        return append

    def put_back(self, append: PendingAppend) -> None:
        """Undo :meth:`begin` for an append that could not be sent yet."""
        assert self.in_flight[-1] is append
        self.in_flight.pop()
        self._in_flight_bytes -= append.length_bytes
        self._queued.appendleft(append)

    def waits_for(self) -> AnyFuture | None:
        """Return a future that the next append waits for, if there is one."""
        if self.state is not QueueState.OPEN or not self._queued:
            return None
        return next((each for each in self._queued[0].after if not each.done()), None)

    def failed_dependency(self) -> DependencyFailedError | None:
        """Return the error of the next append, if a future that it waits for has failed."""
        append = self.next
        for future in () if append is None else append.after:
            if not future.done():
                continue
            cause = None if future.cancelled() else future.exception()
            if cause is not None or future.cancelled():
                failure = DependencyFailedError(
                    f"{self.plain.journal}: not appended, because an append or future that it"
                    f" waited for has failed: {cause or 'it was cancelled'}",
                    journal=self.plain.journal,
                )
                failure.__cause__ = cause
                return failure
        return None

    # ----------------------------------------------------------------- answers

    def answered(
        self, append: PendingAppend, outcome: AppendOutcome, *, is_terminal: bool
    ) -> QueueEffect:
        """Take the answer of an append in flight.

        Args:
            append: the append.
            outcome: response of status OK, or the error.
            is_terminal: the error would be the same after another attempt.

        Returns:
            SETTLE, NOTHING, RETRY or FAIL.
        """
        if isinstance(outcome, pb.AppendResponse):
            effect = self._step(QueueEvent.ACKNOWLEDGED)
            if effect is QueueEffect.SETTLE:
                assert self.in_flight[0] is append, "answers come in the order of the appends"
                self.attempt = 0
        else:
            assert isinstance(outcome, Exception)
            if self.state is QueueState.OPEN:
                self.error, self._is_terminal = outcome, is_terminal
            effect = self._step(QueueEvent.FAILED)
        if self.in_flight[0] is append:
            self.in_flight.popleft()
        else:
            self.in_flight.remove(append)
        self._in_flight_bytes -= append.length_bytes
        if effect is QueueEffect.SETTLE:
            return effect
        self._unsettled.append(append)
        return effect if self.in_flight else self._drained()

    def _drained(self) -> QueueEffect:
        """Put back what was in flight when an append failed: none is in flight any more."""
        if not self._is_terminal:
            for each in self._unsettled:
                each.last_error = self.error
        self._queued.extendleft(reversed(self._unsettled))
        self._unsettled.clear()
        self.attempt += 1
        return self._step(QueueEvent.DRAINED_FOR_GOOD if self._is_terminal else QueueEvent.DRAINED)

    def resume(self) -> None:
        """End the pause before the next attempt."""
        self._step(QueueEvent.RESUMED)

    def expire(self, before: float) -> tuple[list[PendingAppend], QueueEffect]:
        """Remove appends that were queued before a time, from wherever they are.

        Args:
            before: monotonic seconds.

        Returns:
            The appends to settle, oldest first, and RETRY or FAIL if the last in flight of a
            failed attempt was among them.
        """
        expired = [append for append in self if append.queued_at < before]
        for append in expired:
            for each in (self._unsettled, self.in_flight, self._queued):
                if append in each:
                    each.remove(append)
                    self._in_flight_bytes -= append.length_bytes if each is self.in_flight else 0
        if expired and self.state is QueueState.DRAINING and not self.in_flight:
            return expired, self._drained()
        return expired, QueueEffect.NOTHING

    @property
    def oldest(self) -> PendingAppend | None:
        """The append that was queued first."""
        return next(iter(self), None)

    def fail(self, error: Exception, *, is_sticky: bool) -> list[PendingAppend]:
        """Give all appends up.

        Args:
            error: their error.
            is_sticky: refuse further appends, too.

        Returns:
            The appends to settle, oldest first.
        """
        self._step(QueueEvent.CLOSED)
        appends = list(self)
        for append in appends:
            append.failure = error
        for each in (self.in_flight, self._unsettled, self._queued):
            each.clear()
        self._in_flight_bytes = 0
        self.error = error
        self.attempt = 0
        if not is_sticky:
            self.state = QueueState.OPEN
        return appends

    def _step(self, event: QueueEvent) -> QueueEffect:
        effect, self.state = TABLE[self.state, event]
        return effect

    # --------------------------------------------------------------- its content

    def __iter__(self) -> Iterator[PendingAppend]:
        yield from self._unsettled
        yield from self.in_flight
        yield from self._queued

    def __bool__(self) -> bool:
        return bool(self._queued or self.in_flight or self._unsettled)


@lru_cache(maxsize=1024)
def _appended_to(journal: str) -> Counter:
    return APPEND_BYTES.labels(journal)


def count_appended(journal: str, length_bytes: int) -> None:
    """Count what is written to an append of a journal."""
    _appended_to(journal).inc(length_bytes)


class PublishMeters:
    """Numbers of the appends of one service. Its lock guards them.

    Args:
        pending_bytes: returns the bytes that are not acknowledged.

    Attributes:
        seconds: times from the first write of an append to its acknowledgement.
        failures: appends that have failed for good.
    """

    __slots__ = ("failures", "pending_bytes", "seconds")

    def __init__(self, pending_bytes: Callable[[], int]) -> None:
        self.pending_bytes = pending_bytes
        self.seconds = Buckets()
        self.failures = 0


class PublishMetrics(Collector):
    """Collector of the numbers of all services of this process."""

    def __init__(self) -> None:
        self._open: set[PublishMeters] = set()
        self._ended = PublishMeters(int)
        self.unlock()

    def unlock(self) -> None:
        """Make a new lock: in a forked child, another thread of the parent may have held it."""
        self._lock = threading.Lock()

    def open(self, pending_bytes: Callable[[], int]) -> PublishMeters:
        """Return the numbers of a new service. Any thread."""
        meters = PublishMeters(pending_bytes)
        with self._lock:
            self._open.add(meters)
        return meters

    def end(self, meters: PublishMeters) -> None:
        """Keep the numbers of a service that has ended, once. Any thread."""
        with self._lock:
            if meters in self._open:
                self._open.remove(meters)
                self._ended.seconds.add(meters.seconds)
                self._ended.failures += meters.failures

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        seconds = Buckets()
        with self._lock:
            every = [self._ended, *self._open]
        for meters in every:
            seconds.add(meters.seconds)
        yield GaugeMetricFamily(
            "gazette_publish_pending_bytes",
            "Content of appends of this process that is not acknowledged.",
            value=sum(meters.pending_bytes() for meters in every),
        )
        family = HistogramMetricFamily(
            "gazette_publish_seconds",
            "Time of appends of this process, from their first write to the acknowledgement.",
        )
        family.add_metric([], *seconds.exposed())
        yield family
        yield CounterMetricFamily(
            "gazette_publish_failures",
            "Appends of this process that have failed for good.",
            value=sum(meters.failures for meters in every),
        )


PUBLISH = PublishMetrics()
REGISTRY.register(PUBLISH)
os.register_at_fork(after_in_child=PUBLISH.unlock)
