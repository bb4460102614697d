"""Queue of the appends of one journal: what may be sent, and what follows from an answer. Pure.

Appends are sent in the order in which they were queued, several of them in flight. The first
failure closes the window: when all in flight have ended, sending starts again from the append
that failed, or all fail. A transport writes an append only if the one before it was written, so
each of the two series is in order; content may appear twice, as with every append whose answer
was lost.

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
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Iterator

from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.pending import AnyFuture, Outcome, PendingAppend, Receiver

__all__ = [
    "IN_FLIGHT_BYTES_MAX",
    "IN_FLIGHT_MAX",
    "TABLE",
    "AppendQueue",
    "DependencyFailedError",
    "QueueEffect",
    "QueueEvent",
    "QueueState",
]

IN_FLIGHT_MAX = 8
"""Appends of a journal in flight at once; what queues behind them shares one append."""

IN_FLIGHT_BYTES_MAX = 16 << 20
"""Content in flight behind which no further append is sent."""


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
        self, append: PendingAppend, outcome: Outcome, *, is_terminal: bool
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
