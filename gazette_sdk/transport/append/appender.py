"""Appender of one journal: sends what its queue holds, in order, until it is acknowledged.

Small appends of plain threads are sent *inline*, by the thread that makes them: if the journal is
idle, send now; else queue; whoever receives the answer sends what queued. The answer of an inline
append is received by the thread that waits for it, or by the next one that appends. If neither
comes soon, the event loop receives it. Everything else is sent by the event loop.

=========  ==========  =============================================  =========
sender     event       action                                         next
=========  ==========  =============================================  =========
NOBODY     queued      send inline                                    INLINE
NOBODY     queued      no connection for that: wake the event loop    LOOP
INLINE     queued      take the answer, if there, and send inline     INLINE
INLINE     queued      no answer yet: leave it to the event loop      LOOP
INLINE     waited for  receive the answer on this thread              RECEIVER
INLINE     overdue     leave it to the event loop                     LOOP
RECEIVER   queued      nothing: the receiver sends it                 RECEIVER
RECEIVER   answered    send inline what has queued                    INLINE
RECEIVER   answered    nothing has queued                             NOBODY
LOOP       queued      nothing: the event loop sends it               LOOP
LOOP       idle        nothing                                        NOBODY
=========  ==========  =============================================  =========

:class:`AppendService`: appends to many journals, with one appender per journal, one lock and one
bound of memory (client section 4). An append may wait for others, of other journals, to commit
first, which is how barriers are built::

    append = await service.start(request)
    append.write(b"content")
    append.release()
    response = await append          # of the whole batch that it became part of
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Coroutine, Generator
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

from gazette_sdk.errors import (
    ClosedError,
    DeliveryTimeoutError,
    GazetteError,
    ReentrantCallError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.retries import Outage, Pause, pause_append
from gazette_sdk.transport.append.append import (
    check_opening,
    is_terminal,
    is_transient,
    status_error,
)
from gazette_sdk.transport.append.queue import (
    LARGE_BYTES,
    PUBLISH,
    AnyFuture,
    AppendOutcome,
    AppendQueue,
    DependencyFailedError,
    Linger,
    PendingAppend,
    QueueEffect,
    QueueState,
    any_ended,
    count_appended,
)
from gazette_sdk.transport.base import AppendRoute, Transport, as_error
from gazette_sdk.transport.loop import OwnedLock, guarded, is_running, new_lock, reentrant_call
from gazette_sdk.transport.wire import BlockingCall
from gazette_sdk.user_code import notify

logger = logging.getLogger(__name__)

INLINE_BYTES_MAX = 32 << 10
"""Longest inline append: the buffer of an idle socket takes it without blocking the thread."""

PREPARE_S = 0.1
"""Least time between two attempts to open a blocking connection for inline appends."""


class AppendSender(enum.Enum):
    """Owner of the right to send the appends of a journal."""

    NOBODY = "the journal is idle"
    INLINE = "an inline append is in flight"
    RECEIVER = "a thread waits for the answer of an inline append"
    LOOP = "the event loop"


class InlineAppend(NamedTuple):
    """Inline append in flight, sent at ``sent_at``, in monotonic seconds."""

    append: PendingAppend
    call: BlockingCall
    sent_at: float


class JournalAppender:
    """Appender of one journal. Any thread may append.

    Args:
        service: owner of the lock, the transport and the event loop.
        journal: name of the journal, without metadata.

    Attributes:
        service: owner of the lock, the transport and the event loop.
        journal: name of the journal.
        queue: appends that are not acknowledged. Guarded by the service's lock.
    """

    def __init__(self, service: AppendService, journal: str) -> None:
        self.journal = journal
        self.queue = AppendQueue(journal, service.batch_bytes_max, self, service.loop)
        self.service = service
        self._lock = service.lock
        self._sender = AppendSender.NOBODY
        self._route: AppendRoute | None = None
        self._inline: InlineAppend | None = None
        self._prepare_at = 0.0
        self._receiver_thread = 0
        self._notes: list[Callable[[], object]] = []  # log calls, made without the lock
        self._task: asyncio.Task[None] | None = None  # connects, pauses, or awaits `_inline`
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for: AnyFuture | None = None
        self._linger = Linger()
        self._outage = Outage(logger, f"append to {journal}")
        self._is_awaiting_more = False  # the loop does nothing before the next write or answer

    # ------------------------------------------------------------------ adding

    def append(
        self,
        content: bytes,
        *,
        after: Collection[AnyFuture] = (),
        check: pb.LabelSelector | None = None,
        union: pb.LabelSet | None = None,
    ) -> PendingAppend:
        """Queue an append, after all before it, whatever these wait for.

        Args:
            content: whole frames; without any, the response has the write head.
            after: futures that must succeed before it is sent. All after it waits with it, and
                if one of them fails, it fails, and all after it.
            check: selector that the journal's registers must match; a mismatch is terminal.
            union: labels to add to the journal's registers.

        Returns:
            The future of the append, which writes after it may share. It has failed already if
            the journal has failed for good.

        Raises:
            ValidationError: it changes registers, which needs content.
            ClosedError: the service is closed.
        """
        if union is not None and not content:
            raise ValidationError(
                f"{self.journal}: an append that changes registers needs content",
                kind="empty",
                path="content",
            )
        request = None
        if check is not None or union is not None:
            request = pb.AppendRequest(
                journal=self.journal, check_registers=check, union_registers=union
            )
        return self.append_request(request, content, frozenset(after))

    def append_request(
        self, request: pb.AppendRequest | None, content: bytes, after: frozenset[AnyFuture]
    ) -> PendingAppend:
        """Queue an append with any preconditions. See :meth:`append`.

        Args:
            request: valid, of this journal; None for one without preconditions.
            content: whole frames.
            after: futures that must succeed before it is sent.
        """
        if request == self.queue.plain:
            request = None
        for future in after:
            if isinstance(future, PendingAppend):
                future.call_in()  # no one else may receive its answer soon
        with guarded(self._lock):
            self.service.check_open()
            if self.queue.state is QueueState.FAILED:
                return self.queue.refused(request)
            append = self.queue.tail(request, after)
            if content:
                append.add_part(content)
            must_send = self.push(append, len(content))
        if must_send:
            self.send()
        return append

    def push(self, append: PendingAppend, length_bytes: int, count: int = 1) -> bool:
        """Queue writes of ``queue.tail()``. The lock is held.

        Returns:
            True if the caller must call :meth:`send`, without the lock.
        """
        self.queue.push(append, count)
        self.service.pending_bytes += length_bytes
        if self._sender is AppendSender.LOOP:
            large = append.length_bytes - LARGE_BYTES
            return self._is_awaiting_more or 0 <= large < length_bytes
        return self._sender is not AppendSender.RECEIVER

    def newest(self) -> PendingAppend | None:
        """Return the newest append, or a failed one of a failed journal. The lock is held."""
        if self.queue.state is QueueState.FAILED:
            return self.queue.refused()
        return next(reversed(tuple(self.queue)), None)

    def pending(self) -> set[AnyFuture]:
        """Return futures of all appends that are not acknowledged."""
        with guarded(self._lock):
            return set(self.queue)

    # ----------------------------------------------------------------- sending

    def send(self) -> None:
        """Send what is queued, unless somebody else does. Any thread; without the lock."""
        self.service.check_loop()
        settled: list[PendingAppend] = []
        outcome: AppendOutcome | None = None
        with guarded(self._lock):
            if self._sender is AppendSender.INLINE:
                assert self._inline is not None
                if self._inline.call.wait(0):
                    settled, outcome = self._received()
                else:
                    self._to_loop()
            if self._sender is AppendSender.NOBODY:
                self._send_queued()
            elif self._sender is AppendSender.LOOP:
                self._to_loop()
        self._settle(settled, outcome)

    def _send_queued(self) -> None:
        """Send what is queued, inline if possible. The lock is held, and no one else sends."""
        append = self.queue.next
        if append is None:
            self._sender = AppendSender.NOBODY
            return
        if (
            not 0 < append.length_bytes <= INLINE_BYTES_MAX
            or append.request is not self.queue.plain
            or append.after
            or self.service.is_on_loop
            or not self._send_inline()
        ):
            self._to_loop()

    def _send_inline(self) -> bool:
        """Send the next append on the calling thread. The lock is held."""
        append = self.queue.begin()
        if append is None:
            return False
        route = self._open_route()
        try:
            parts = append.seal()
            content = parts[0] if len(parts) == 1 else b"".join(parts)
            call = route.send_inline(content, append.traceparent)
        except BaseException as error:
            if isinstance(error, ReentrantCallError) or not isinstance(error, GazetteError):
                # An interrupt, perhaps when it was sent: it is sent again.
                self.queue.put_back(append)
                self._to_loop()
                raise
            append.last_error = error
            route.failed(error)
            call = None
        if call is None:
            self.queue.put_back(append)
            self._prepare_inline(route)
            return False
        count_appended(self.journal, append.length_bytes)
        self._inline = InlineAppend(append, call, time.monotonic())
        self._sender = AppendSender.INLINE
        self.service.watch(self)
        return True

    def _prepare_inline(self, route: AppendRoute) -> None:
        now = time.monotonic()
        if now >= self._prepare_at:
            self._prepare_at = now + PREPARE_S
            self.service.in_thread(route.prepare_inline)

    def _open_route(self) -> AppendRoute:
        if self._route is None:
            self._route = self.service.transport.append_route(self.journal, self._pump)
        return self._route

    # --------------------------------------------------- answers of inline appends

    def receive(self, append: PendingAppend, timeout_s: float | None) -> None:
        """See :class:`~gazette_sdk.transport.append.queue.Receiver`."""
        if self._lock._is_owned():  # noqa: SLF001 - as guarded(); who waits is refused there
            return
        self.service.check_loop()
        with self._lock:
            inline = self._inline
            if (
                self._sender is not AppendSender.INLINE
                or inline is None
                or inline.append is not append
            ):
                return
            self._sender = AppendSender.RECEIVER
            self._receiver_thread = threading.get_ident()
        try:
            is_over = inline.call.wait(self.service.bounded(timeout_s, append))
        except BaseException:
            with guarded(self._lock):
                self._to_loop()
            raise
        settled: list[PendingAppend] = []
        outcome: AppendOutcome | None = None
        with guarded(self._lock):
            if self._inline is not inline:  # the service was closed meanwhile
                return
            if is_over:
                settled, outcome = self._received()
                if not self._is_at_loop:
                    self._send_queued()
            elif self.queue.next is None:
                self._sender = AppendSender.INLINE
            else:
                self._to_loop()
        self._settle(settled, outcome)

    def leave_to_loop(self) -> None:
        """See :class:`~gazette_sdk.transport.append.queue.Receiver`."""
        self.service.check_loop()
        with guarded(self._lock):
            if self._sender is AppendSender.INLINE:
                self._to_loop()

    def is_overdue(self, now: float, after_s: float) -> bool:
        """Return True if an inline answer is not received since ``after_s``. The lock is held."""
        inline = self._inline
        return (
            self._sender is AppendSender.INLINE
            and inline is not None
            and now - inline.sent_at >= after_s
        )

    @property
    def is_receiving_here(self) -> bool:
        """See :class:`~gazette_sdk.transport.append.queue.Receiver`."""
        is_here = self._receiver_thread == threading.get_ident()
        return is_here and self._sender is AppendSender.RECEIVER

    @property
    def is_inline(self) -> bool:
        """An inline append is in flight."""
        return self._inline is not None

    @property
    def _is_at_loop(self) -> bool:
        return self._sender is AppendSender.LOOP

    def _received(self) -> tuple[list[PendingAppend], AppendOutcome | None]:
        """Take the answer of the inline append, which is over. The lock is held."""
        inline, route = self._inline, self._route
        assert inline is not None
        assert route is not None
        outcome: pb.AppendResponse | Exception
        try:
            outcome = inline.call.response()
            route.accept(outcome)
        except BaseException as error:
            if isinstance(error, ReentrantCallError) or not isinstance(error, GazetteError):
                # An interrupt: the event loop takes the answer again.
                self._to_loop()
                raise
            route.failed(error)
            outcome = error
        self._inline = None
        self._sender = AppendSender.NOBODY
        return self._answer(inline.append, outcome)

    # --------------------------------------------------------------- on the loop

    def _to_loop(self) -> None:
        """Leave sending to the event loop. The lock is held."""
        self._sender = AppendSender.LOOP
        self._is_awaiting_more = False
        self.service.call_soon(self._pump)

    def _pump(self) -> None:
        """Begin what the window allows. On the loop, without the lock."""
        self._is_awaiting_more = False
        self.service.watch_delivery()
        while self._task is None:
            append = failure = None
            with guarded(self._lock):
                if self._sender is not AppendSender.LOOP:
                    return
                if self._inline is not None:
                    self._start(self._await_inline(self._inline))
                    return
                if self.queue.state is QueueState.PAUSED:
                    self._start(self._pause())
                    return
                try:
                    append = self._next()
                except DependencyFailedError as error:
                    failure = error
            if failure is not None:
                self.fail(failure)
            elif append is None or not self._begin(append):
                return

    def _next(self) -> PendingAppend | None:
        """Take the next append into flight, if it is time. The lock is held."""
        queue = self.queue
        append = queue.next
        length_bytes = 0 if append is None else append.length_bytes
        wait_s = self._linger.wait_s(
            time.monotonic(), length_bytes, is_in_flight=bool(queue.in_flight)
        )
        if wait_s > 0:
            if self._timer is None:
                self._timer = self.service.loop.call_later(wait_s, self._lingered)
            return None
        if append is None:
            self._linger.ran_dry()
            if queue:
                self._is_awaiting_more = True
            else:
                self._sender = AppendSender.NOBODY
            return None
        begun = queue.begin()
        future = queue.waits_for() if begun is None else None
        if future is not self._waits_for:
            self._waits_for = future
            if future is not None:
                future.add_done_callback(lambda _ended: self.service.call_soon(self._pump))
        return begun

    def _lingered(self) -> None:
        self._timer = None
        self._pump()

    def _begin(self, append: PendingAppend) -> bool:
        """Hand an append to the route; return False if the route cannot send now."""
        assert append.request is not None
        route = self._open_route()
        try:
            is_begun = route.try_begin(
                append.request, append.seal(), partial(self._answered, append), append.traceparent
            )
        except Exception as error:  # noqa: BLE001 - it is an answer
            self._answered(append, error)
            return False
        if is_begun:
            self._linger.begun(time.monotonic(), append.count)
            count_appended(self.journal, append.length_bytes)
            return True
        with guarded(self._lock):
            self.queue.put_back(append)
            if not self.queue.in_flight:
                self._start(self._open(route, append.request))
        return False

    def _answered(self, append: PendingAppend, outcome: pb.AppendResponse | Exception) -> None:
        """Take the answer of an append in flight. A callback of the loop."""
        with guarded(self._lock):
            settled, result = self._answer(append, outcome)
        self._settle(settled, result)
        self._pump()

    def _answer(
        self, append: PendingAppend, outcome: pb.AppendResponse | Exception
    ) -> tuple[list[PendingAppend], AppendOutcome | None]:
        """Feed the queue. The lock is held. Returns what is to be settled, without the lock."""
        assert append.request is not None
        if append.failure is not None:  # it was given up
            return [], None
        if isinstance(outcome, pb.AppendResponse) and outcome.status != pb.OK:
            outcome = status_error(append.request, outcome)
        if isinstance(outcome, Exception) and not isinstance(outcome, GazetteError | OSError):
            self._notes.append(
                partial(logger.error, "appending to %s failed", self.journal, exc_info=outcome)
            )
            outcome = as_error(self.journal, outcome)
            terminal = True
        else:
            terminal = isinstance(outcome, Exception) and is_terminal(outcome)
        effect = self.queue.answered(append, outcome, is_terminal=terminal)
        if effect is QueueEffect.SETTLE:
            if self._outage.is_open:
                self._notes.append(self._outage.ended)
            self.service.settled([append], None)
            return [append], outcome
        return self._drained(effect)

    def _drained(self, effect: QueueEffect) -> tuple[list[PendingAppend], AppendOutcome | None]:
        """Perform what follows once no append of a failed attempt is in flight. The lock is held.

        Returns:
            The appends to settle, without the lock, and their outcome.
        """
        error = self.queue.error
        if effect is QueueEffect.RETRY:
            if self.queue.attempt > 1 or not is_transient(error):
                self._notes.append(partial(self._outage.failed, error))
            self._to_loop()
        elif effect is QueueEffect.FAIL:
            assert error is not None
            return self._fail(error), error
        return [], None

    def _settle(self, appends: list[PendingAppend], outcome: AppendOutcome | None) -> None:
        """Settle appends, and log what was noted under the lock, without it.

        A log handler may publish.
        """
        for append in appends:
            assert outcome is not None
            append.settle(outcome)
        if self._notes:
            notes, self._notes = self._notes, []
            for note in notes:
                notify(note)

    # ------------------------------------------------------------------- tasks

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        self._task = self.service.loop.create_task(coroutine, name=f"appender of {self.journal}")
        self._task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Exception):
            logger.error("appending to %s failed", self.journal, exc_info=error)
            self.fail(as_error(self.journal, error))
        self._pump()

    async def _pause(self) -> None:
        """Wait before the next attempt."""
        await self.service.pause(self.queue.attempt - 1)
        with guarded(self._lock):
            if self.queue.state is QueueState.PAUSED:
                self.queue.resume()

    async def _open(self, route: AppendRoute, request: pb.AppendRequest) -> None:
        """Connect to the journal's broker; a failure is the answer of the next append."""
        try:
            await route.open(request)
        except GazetteError as error:
            with guarded(self._lock):
                append = self.queue.begin()
            if append is not None:
                self._answered(append, error)

    async def _await_inline(self, inline: InlineAppend) -> None:
        """Receive the answer of an inline append that no thread received."""
        await inline.call.finish()
        with guarded(self._lock):
            if self._inline is not inline:
                return
            settled, outcome = self._received()
            self._sender = AppendSender.LOOP
        self._settle(settled, outcome)

    # ------------------------------------------------------------------ its end

    def fail(self, error: GazetteError) -> None:
        """Give up all appends. On the loop."""
        with guarded(self._lock):
            appends = self._fail(error)
        self._settle(appends, error)

    def _fail(self, error: Exception) -> list[PendingAppend]:
        """Give up all appends. The lock is held."""
        if self.queue.in_flight and self._route is not None:
            self._route.give_up()
        appends = self.queue.fail(error, is_sticky=self.service.is_sticky)
        self.service.settled(appends, error)
        return appends

    def expire(self, before: float, late: Callable[[Exception | None], GazetteError]) -> None:
        """Give up appends that were queued before a time. On the loop.

        Args:
            before: the time, in monotonic seconds.
            late: returns their error, given why the last attempt failed, if it did.
        """
        with guarded(self._lock):
            had_in_flight = bool(self.queue.in_flight)
            cause = self.queue.error
            expired, effect = self.queue.expire(before)
            if not expired:
                return
            last = expired[0].last_error or cause
            error = late(last)
            error.__cause__ = last
            for append in expired:
                append.failure = error
            self.service.settled(expired, error)
            if had_in_flight and not self.queue.in_flight and self._route is not None:
                self._route.give_up()
            settled, outcome = self._drained(effect)
        self._settle(expired, error)
        self._settle(settled, outcome)
        self._pump()

    def abandon(self, error: GazetteError) -> None:
        """Give up all appends, of a loop that has ended or belongs to a parent process."""
        with guarded(self._lock):
            inline = None if self._sender is AppendSender.RECEIVER else self._inline
            self._route = self._inline = None
            self._sender = AppendSender.LOOP  # no one sends from now on
            appends = self._fail(error)
        if inline is not None:
            inline.call.give_up("the event loop has ended")
        self._settle(appends, error)

    def forked(self, lock: OwnedLock) -> None:
        """In a forked child: take the new lock; the inline append is the parent's."""
        self._lock = lock
        self._inline = None

    async def aclose(self) -> None:
        """Give up all appends. On the loop."""
        with guarded(self._lock):
            has_receiver = self._sender is AppendSender.RECEIVER
            self._sender = AppendSender.LOOP  # no one sends from now on
            inline, self._inline = self._inline, None
            task, timer = self._task, self._timer
        if inline is not None:
            if has_receiver:
                inline.call.interrupt()
            else:
                inline.call.give_up("the appender was closed")
        if timer is not None:
            timer.cancel()
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self.fail(
            self.queue.failed_dependency()
            or ClosedError(
                f"{self.journal}: the append is given up, because it was closed before the"
                " acknowledgement came; it may have been written",
                journal=self.journal,
            )
        )


BATCH_BYTES_MAX = 64 << 20
"""An append of this length takes no further writes: a retry sends all of it again."""

PENDING_BYTES_MAX = 256 << 20
"""Content that is not acknowledged, of all journals together."""

EXPIRY_PAUSE_S = 0.01
"""Least time between two searches for appends that were not acknowledged in time."""

SWEEP_S = 0.02
"""Period in which answers of inline appends that no thread receives are left to the loop."""


class AppendService:
    """Appenders of the journals that one program writes to.

    Args:
        transport: how to reach journals.
        loop: event loop that sends; the running one unless given.
        lock: guards all queues; one of its own unless given.
        batch_bytes_max: an append of this length takes no further writes.
        pending_bytes_max: bound of content that is not acknowledged. :meth:`start` waits for room.
        delivery_timeout_s: an append that is not acknowledged by then, in seconds, fails with
            :class:`~gazette_sdk.errors.DeliveryTimeoutError`; None tries without end.
        is_sticky: an append that fails for good makes its journal refuse further ones.
        on_settled: called with appends that end and their error, under the lock.
        pause: waits between attempts.

    Attributes:
        pending_bytes: content that is not acknowledged.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        lock: OwnedLock | None = None,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        pending_bytes_max: int = PENDING_BYTES_MAX,
        delivery_timeout_s: float | None = None,
        is_sticky: bool = True,
        on_settled: Callable[[list[PendingAppend], Exception | None], None] | None = None,
        pause: Pause = pause_append,
    ) -> None:
        self.transport = transport
        self.loop = loop or asyncio.get_running_loop()
        self.lock = lock or new_lock()
        self.batch_bytes_max = batch_bytes_max
        self.is_sticky = is_sticky
        self.pause = pause
        self.pending_bytes = 0
        self._pending_bytes_max = pending_bytes_max
        self._delivery_timeout_s = delivery_timeout_s
        self._expiry: asyncio.TimerHandle | None = None
        self._on_settled = on_settled
        self._appenders: dict[str, JournalAppender] = {}
        self._starts: dict[str, asyncio.Lock] = {}
        self._closed_error: GazetteError | None = None
        self._thread = 0
        self._inline: set[JournalAppender] = set()
        self._is_sweeping = False
        self._meters = PUBLISH.open(_pending_bytes_of(self))
        if is_running(self.loop):
            self._note_thread()
        else:
            self.call_soon(self._note_thread)

    # ------------------------------------------------------------------ appends

    def appender(self, journal: str) -> JournalAppender:
        """Return the appender of a journal, by its name without metadata."""
        appender = self._appenders.get(journal)
        if appender is None:
            with guarded(self.lock):
                appender = self._appenders.setdefault(journal, JournalAppender(self, journal))
        return appender

    async def append(
        self,
        request: pb.AppendRequest,
        content: bytes,
        after: Collection[AnyFuture] = (),
    ) -> PendingAppend:
        """Wait for room, then queue an append.

        Args:
            request: names the journal, and preconditions. Appends with different requests, or
                with futures the batch does not wait for, never share a batch.
            content: its content.
            after: futures that must succeed before it is sent.

        Raises:
            ValidationError: the request is malformed.
            ClosedError: the service was closed.
        """
        append = await self.start(request, after)
        append.write(content)
        return append.release()

    async def start(
        self, request: pb.AppendRequest, after: Collection[AnyFuture] = ()
    ) -> AsyncAppend:
        """Hold the journal, in the order of the calls, to write one append. See :meth:`append`."""
        check_opening(request)
        journal = strip_meta(request.journal)
        if journal != request.journal:
            stripped = pb.AppendRequest()
            stripped.CopyFrom(request)
            stripped.journal = journal
            request = stripped
        await self.room()
        self.check_open()
        held = self._starts.setdefault(journal, asyncio.Lock())
        await held.acquire()
        if self._closed_error is not None:
            held.release()
            raise self._closed_error
        return AsyncAppend(self, self.appender(journal), request, frozenset(after), held)

    def pending_except(self, journal: str) -> set[AnyFuture]:
        """Return what is pending of every journal but one, to be waited for by an append.

        Args:
            journal: the one to leave out; empty for none.

        Returns:
            The newest append of each journal, and a failed one of each that failed for good.
        """
        found: set[AnyFuture] = set()
        with guarded(self.lock):
            for name, appender in self._appenders.items():
                if name != journal and (newest := appender.newest()) is not None:
                    found.add(newest)
        return found

    def pending(self) -> list[PendingAppend]:
        """Return all appends that are not acknowledged, oldest first for each journal."""
        with guarded(self.lock):
            return [append for each in self._appenders.values() for append in each.queue]

    def check_reentry(self) -> None:
        """Refuse to wait for appends within a call of the same thread that they wait for.

        Raises:
            ReentrantCallError: the thread holds the lock, or receives an answer, below this call.
        """
        with guarded(self.lock):
            if any(each.is_receiving_here for each in self._appenders.values()):
                raise reentrant_call()

    async def flush(self) -> None:
        """Wait until all that is pending has committed.

        Raises:
            GazetteError: the first failure.
        """
        for append in self.pending():
            await append
        for failed in self.pending_except(""):
            if failed.done() and (error := failed.exception()) is not None:
                raise error

    # --------------------------------------------------------------------- room

    @property
    def is_full(self) -> bool:
        """No more content may be pending."""
        return self.pending_bytes >= self._pending_bytes_max

    async def room(self) -> None:
        """Wait until less content is pending than the bound."""
        while self.is_full:
            with guarded(self.lock):
                oldest = self._oldest()
            await any_ended(oldest)

    def _oldest(self) -> list[PendingAppend]:
        """Return the oldest pending append of each journal. The lock is held."""
        found = (appender.queue.oldest for appender in self._appenders.values())
        return [append for append in found if append is not None]

    # ---------------------------------------------------------------------- end

    def check_open(self) -> None:
        """Refuse use after the end.

        Raises:
            ClosedError: the service was closed.
        """
        if self._closed_error is not None:
            raise self._closed_error

    async def aclose(self) -> None:
        """Give up what is pending; :meth:`flush` first to see it through. On the loop."""
        self._closed_error = ClosedError("the append service was closed: make another one")
        if self._expiry is not None:
            self._expiry.cancel()
        with guarded(self.lock):
            appenders = list(self._appenders.values())
        for appender in appenders:
            await appender.aclose()
        PUBLISH.end(self._meters)

    def check_loop(self) -> None:
        """Give up what is pending if the loop was closed. Any thread; without the lock."""
        if self.loop.is_closed():
            self.abandon()

    def abandon(self, error: GazetteError | None = None) -> None:
        """Give up what is pending of a loop that has ended. Any thread."""
        error = error or ClosedError(
            "the event loop that sends the appends has ended; those that are not acknowledged are"
            " in doubt: close publishers and append services before their loop ends (`async with`)"
        )
        self._closed_error = error
        for appender in list(self._appenders.values()):
            appender.abandon(error)
        PUBLISH.end(self._meters)

    def forked(self, lock: OwnedLock, error: GazetteError) -> None:
        """In a forked child: give up everything, which the parent sends.

        Args:
            lock: the new lock; another thread of the parent may have held the old one.
            error: of the appends.
        """
        self.lock = lock
        for appender in self._appenders.values():
            appender.forked(lock)
        self.abandon(error)

    # ---------------------------------------------------------- of its appenders

    @property
    def is_on_loop(self) -> bool:
        """The calling thread runs the service's event loop."""
        return threading.get_ident() == self._thread

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call back on the loop, from any thread. No effect once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            if self.is_on_loop:
                self.loop.call_soon(callback)
            else:
                self.loop.call_soon_threadsafe(callback)

    def settled(self, appends: list[PendingAppend], error: Exception | None) -> None:
        """Count appends that are about to end. The lock is held."""
        meters, now = self._meters, time.monotonic()
        seconds = meters.seconds
        if error is not None:
            meters.failures += len(appends)
        for append in appends:
            self.pending_bytes -= append.length_bytes
            if error is None:
                # What observe() does, without the call: this is done for each append.
                waited_s = now - append.queued_at
                seconds.counts[bisect_left(seconds.bounds, waited_s)] += 1
                seconds.sum += waited_s
        if self._on_settled is not None:
            self._on_settled(appends, error)

    def watch(self, appender: JournalAppender) -> None:
        """Bound the time in which an inline answer is received by a thread. The lock is held."""
        self._inline.add(appender)
        if not self._is_sweeping:
            self._is_sweeping = True
            self.call_soon(self._sweep_later)

    def bounded(self, timeout_s: float | None, append: PendingAppend) -> float | None:
        """Return the time to wait for an append, which ends with its delivery time-out."""
        if self._delivery_timeout_s is None:
            return timeout_s
        left_s = max(0.0, append.queued_at + self._delivery_timeout_s - time.monotonic())
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def watch_delivery(self) -> None:
        """Have appends fail that are not acknowledged in time. On the loop."""
        if self._expiry is None and self._delivery_timeout_s is not None:
            self._expiry = self.loop.call_later(self._delivery_timeout_s, self._expire)

    def _expire(self) -> None:
        assert self._delivery_timeout_s is not None
        self._expiry = None
        before = time.monotonic() - self._delivery_timeout_s
        for journal, appender in list(self._appenders.items()):
            appender.expire(before, partial(self._delivery_timeout, journal))
        with guarded(self.lock):
            queued_at = min((append.queued_at for append in self._oldest()), default=None)
        if queued_at is not None and self._expiry is None:
            wait_s = max(EXPIRY_PAUSE_S, queued_at - before)
            self._expiry = self.loop.call_later(wait_s, self._expire)

    def _delivery_timeout(self, journal: str, cause: Exception | None) -> DeliveryTimeoutError:
        why = f"; the last attempt failed: {cause}" if cause is not None else ""
        return DeliveryTimeoutError(
            f"{journal}: not acknowledged within delivery_timeout_s={self._delivery_timeout_s:g}"
            " seconds, and given up; it may be written nevertheless: check the brokers with"
            f" `gazctl journals list`{why}",
            journal=journal,
        )

    def in_thread(self, prepare: Callable[[], None]) -> None:
        """Call a function that blocks in a worker thread. From any thread."""
        self.call_soon(partial(self._in_thread, prepare))

    def _in_thread(self, prepare: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the program ends
            started = self.loop.run_in_executor(None, prepare)
            started.add_done_callback(_log_failure)

    def _note_thread(self) -> None:
        self._thread = threading.get_ident()

    def _sweep_later(self) -> None:
        self.watch_delivery()
        self.loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        now = time.monotonic()
        with guarded(self.lock):
            overdue = [each for each in self._inline if each.is_overdue(now, SWEEP_S)]
            self._inline = {each for each in self._inline if each.is_inline}
            self._is_sweeping = bool(self._inline)
        for appender in overdue:
            appender.leave_to_loop()
        if self._is_sweeping:
            self._sweep_later()


class AsyncAppend:
    """Writes of one append, held back until :meth:`release`. Made by :meth:`AppendService.start`.

    Await it for the response, which is that of all writes that share the append.
    """

    def __init__(
        self,
        service: AppendService,
        appender: JournalAppender,
        request: pb.AppendRequest,
        after: frozenset[AnyFuture],
        held: asyncio.Lock,
    ) -> None:
        self._service = service
        self._appender = appender
        self._request = request
        self._after = after
        self._held = held
        self._content: list[bytes] = []
        self._required: Exception | None = None
        self._append: PendingAppend | None = None

    def __await__(self) -> Generator[Any, None, pb.AppendResponse]:
        assert self._append is not None, "it was released"
        return self._append.__await__()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release; an error of the block drops what was written."""
        if error is None:
            self.release()
        else:
            self._held.release()

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Add content.

        Raises:
            TypeError: it is not bytes-like; the release will raise it, too.
        """
        try:
            self._content.append(bytes(memoryview(content)))
        except TypeError as error:
            self.require(error)
            raise

    def require(self, error: Exception | None) -> Self:
        """Remember the first error: the release raises it, and drops what was written."""
        self._required = self._required or error
        return self

    def release(self) -> PendingAppend:
        """Queue what was written, and let others start.

        Returns:
            The append, which other writes may share.

        Raises:
            Exception: the error that was required, or that a write raised.
            ClosedError: the service was closed.
        """
        self._held.release()
        if self._required is not None:
            raise self._required
        self._append = self._appender.append_request(
            self._request, b"".join(self._content), self._after
        )
        return self._append


def _pending_bytes_of(service: AppendService) -> Callable[[], int]:
    """Return a function of the bytes that a service has pending, which does not keep it alive."""
    known = weakref.ref(service)

    def pending_bytes() -> int:
        alive = known()
        return 0 if alive is None else alive.pending_bytes

    return pending_bytes


def _log_failure(prepared: asyncio.Future[None]) -> None:
    error = None if prepared.cancelled() else prepared.exception()
    if isinstance(error, GazetteError):
        logger.debug("no connection for inline appends: %s", error)
    elif error is not None:
        logger.error("a connection for inline appends could not be opened", exc_info=error)
