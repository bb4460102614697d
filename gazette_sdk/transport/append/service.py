"""Appends to many journals: one appender per journal, one lock, one bound of memory.

Client section 4. An append may wait for others, of other journals, to commit first, which is how
barriers are built.

    append = await service.start(request)
    append.write(b"content")
    append.release()
    response = await append          # of the whole batch that it became part of
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Generator
from functools import partial
from types import TracebackType
from typing import Any, Self

from gazette_sdk.errors import ClosedError, DeliveryTimeoutError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.transport.append.append import check_opening
from gazette_sdk.transport.append.appender import JournalAppender
from gazette_sdk.transport.append.pending import AnyFuture, PendingAppend, any_ended
from gazette_sdk.transport.append.queue import DependencyFailedError
from gazette_sdk.transport.backoff import Pause, pause_append
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import OwnedLock, guarded, is_running, new_lock, reentrant_call

__all__ = ["AppendService", "AsyncAppend", "DependencyFailedError", "PendingAppend"]

logger = logging.getLogger(__name__)

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
        for append in appends:
            self.pending_bytes -= append.length_bytes
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
            appender.expire(before, self._delivery_timeout(journal))
        with guarded(self.lock):
            queued_at = min((append.queued_at for append in self._oldest()), default=None)
        if queued_at is not None and self._expiry is None:
            wait_s = max(EXPIRY_PAUSE_S, queued_at - before)
            self._expiry = self.loop.call_later(wait_s, self._expire)

    def _delivery_timeout(self, journal: str) -> DeliveryTimeoutError:
        return DeliveryTimeoutError(
            f"{journal}: not acknowledged within delivery_timeout_s={self._delivery_timeout_s:g}"
            " seconds, and given up; it may be written nevertheless: check the brokers with"
            " `gazctl journals list`",
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


def _log_failure(prepared: asyncio.Future[None]) -> None:
    error = None if prepared.cancelled() else prepared.exception()
    if isinstance(error, GazetteError):
        logger.debug("no connection for inline appends: %s", error)
    elif error is not None:
        logger.error("a connection for inline appends could not be opened", exc_info=error)
