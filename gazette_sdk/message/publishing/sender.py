"""Stamps and encodes the messages of a publisher, and hands them to the journals' appenders.

A publisher is one producer for messages outside of transactions, and as many others as it has
had transactions open at once: of one producer, at most one sequence of messages can be open in
a journal, and a message outside of it would discard that. Their messages to a journal share its
outbox, and so its appends.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from gazette_sdk.errors import BackPressureError, ClosedError, FramingError
from gazette_sdk.framing import framing_for
from gazette_sdk.message.clock import TICK, Clock
from gazette_sdk.message.flags import OUTSIDE_TXN
from gazette_sdk.message.publishing.bulk import Slice
from gazette_sdk.message.publishing.connection import PublisherConnection
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.publishing.producer import Added, Producers, Sequences
from gazette_sdk.message.publishing.receipt import BatchReceipt, Receipt
from gazette_sdk.message.uuid import Stamp, new_producer_id
from gazette_sdk.transport.append.pending import PendingAppend
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import home_loop, is_on_sdk_loop, is_running, on_loop, run

__all__ = ["Sender", "closed_error", "left_behind"]


class Sender:
    """Producer of messages: its id, its clock, and what is not acknowledged yet.

    Any thread may add messages. One lock guards stamping, encoding and the queues of all journals.

    Args:
        transport: how to reach the cluster; None connects to ``GAZETTE_ADDRESS``.
        clock: a shared clock; None follows the wall clock.
        pending_bytes_max: bound of encoded messages which are not acknowledged.
        blocks: a thread waits for room; else it gets an error.
        mapping_timeout_s: bound of waits for listings.

    Attributes:
        outboxes: by journal.
        producers: of transactions.
        is_closed: messages are refused.
        is_forked: it belongs to the parent of this process.
    """

    def __init__(
        self,
        transport: Transport | None,
        clock: Clock | None,
        *,
        pending_bytes_max: int,
        blocks: bool,
        mapping_timeout_s: float,
    ) -> None:
        self.outboxes: dict[str, Outbox] = {}
        self.is_closed = self.is_forked = False
        self._transport = transport
        self._clock = clock
        self._pending_bytes_max = pending_bytes_max
        self._blocks = blocks
        self._mapping_timeout_s = mapping_timeout_s
        self._stamp = Stamp(new_producer_id())
        self._stamp.flags = OUTSIDE_TXN
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._room_waiters = 0
        self.producers = Producers(self._lock, clock, self._add_frames)
        self._failure: Exception | None = None
        self._closed_error: ClosedError | None = None
        self._is_background = False
        self._connection: PublisherConnection | None = None
        self._abandoned: weakref.finalize[..., Sender] | None = None
        _senders.add(self)

    @property
    def producer(self) -> bytes:
        """The producer id, six bytes."""
        return self._stamp.producer

    # ------------------------------------------------------------------ adding

    def add(self, outbox: Outbox, message: Any, sequences: Sequences | None = None) -> Receipt:
        """Stamp and encode a message behind what waits for its journal.

        Args:
            outbox: of its journal.
            message: the message.
            sequences: of its transaction; None outside of transactions.

        Raises:
            ValidationError: the message cannot be encoded.
            BackPressureError: too much is pending, and waiting is not wanted or not possible.
            ClosedError: the publisher is closed.
        """
        appender = outbox.appender
        try:
            with self._lock:
                if appender.service.pending_bytes >= self._pending_bytes_max:
                    self._wait_for_room()
                if self.is_closed:
                    raise self.closed_error()  # noqa: TRY301 - one way to end for all errors
                stamp = self._stamp if sequences is None else sequences.stamp
                if self._clock is None:
                    stamp.tick_now()
                else:
                    stamp.clock = self._clock.tick()
                receipt = outbox.encode(message, stamp)
                append = receipt.append
                must_send = appender.push(append, receipt.last - receipt.first)
                if sequences is None:
                    append.context = self
                else:
                    sequences.note(outbox, append, stamp.clock)
            if must_send:
                appender.send()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._interrupted(error)
            raise
        return receipt

    def _interrupted(self, error: BaseException) -> None:
        """Fail the publisher, whose thread was interrupted at work."""
        doubt = "what that call published"
        if journals := sorted({each.journal for each in self.pending()}):
            doubt += f", and messages to {', '.join(journals)} whose receipts have no result"
        self._closed_error = ClosedError(
            f"the publisher was interrupted within publish() ({type(error).__name__}) and takes no"
            f" further messages; in doubt: {doubt}; make another Publisher"
        )
        self.note_failure(self._closed_error)
        self.refuse_more()

    def add_slice(self, part: Slice, receipt: BatchReceipt, sequences: Sequences | None) -> None:
        """Stamp messages in bulk, and add them behind what waits for their journals.

        Args:
            part: the messages.
            receipt: notes where they went.
            sequences: of their transaction; None outside of transactions.

        Raises:
            ClosedError: the publisher is closed.
        """
        try:
            self._add_slice(part, receipt, sequences)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._interrupted(error)
            raise

    def _add_slice(self, part: Slice, receipt: BatchReceipt, sequences: Sequences | None) -> None:
        must_send = []
        with self._lock:
            if self._blocks and not self.is_on_loop:
                self._wait_for_room()
            if self.is_closed:
                raise self.closed_error()
            stamp = self._stamp if sequences is None else sequences.stamp
            if self._clock is None:
                first = stamp.reserve(part.count)
            else:
                first = self._clock.tick(part.count)
                stamp.clock = first + (part.count - 1) * TICK
            for outbox, first_index, frames, count in part.frames(stamp, first):
                append, begin = outbox.add_frames(frames)
                if sequences is None:
                    append.context = self
                else:
                    sequences.note(outbox, append, first + first_index * TICK)
                receipt.add(append, begin, begin + len(frames), count)
                if outbox.appender.push(append, len(frames), count):
                    must_send.append(outbox)
        for outbox in must_send:
            outbox.appender.send()

    def add_frames(
        self, frames: list[tuple[Outbox, bytes]]
    ) -> list[tuple[PendingAppend, int, bytes]]:
        """Write frames as they are, one to each outbox. They do not wait for room.

        Returns:
            For each its append, its position in it, and the frame.

        Raises:
            ClosedError: the publisher is closed.
        """
        with self._lock:
            added, send = self._add_frames(frames)
            for append, _, _ in added:
                append.context = self
        send()
        return added

    def _add_frames(
        self, frames: list[tuple[Outbox, bytes]]
    ) -> tuple[list[Added], Callable[[], None]]:
        """Add frames under the lock; returns them, and what to call without the lock."""
        if self.is_closed:
            raise self.closed_error()
        added = []
        must_send = []
        for outbox, frame in frames:
            append, begin = outbox.add_frames(frame)
            added.append((append, begin, frame))
            if outbox.appender.push(append, len(frame)):
                must_send.append(outbox.appender)

        def send() -> None:
            for appender in must_send:
                appender.send()

        return added, send

    def begin(self) -> Sequences:
        """Lend a producer to a transaction.

        Raises:
            ClosedError: the publisher is closed.
        """
        if self.is_closed:
            raise self.closed_error()
        return self.producers.lend()

    # -------------------------------------------------------------------- room

    def check_room(self, length_bytes: int) -> None:
        """Refuse a batch where its caller must not wait, and there is no room.

        Raises:
            BackPressureError: too much is pending, or the batch is too large by itself.
        """
        if self._blocks and not self.is_on_loop:
            return
        if length_bytes > self._pending_bytes_max:
            raise BackPressureError(
                f"the batch has {length_bytes} bytes of messages, and at most"
                f" {self._pending_bytes_max} may be pending; publish smaller batches, or raise"
                " pending_bytes_max"
            )
        with self._lock:
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        appends = None if self._connection is None else self._connection.appends
        if appends is None or appends.pending_bytes < self._pending_bytes_max:
            return
        if not self._blocks or self.is_on_loop:
            raise BackPressureError(
                f"{appends.pending_bytes} bytes of messages are not acknowledged yet, of at most"
                f" {self._pending_bytes_max}; wait for receipts, `await publisher.room()`, or"
                " raise pending_bytes_max"
            )
        self._room_waiters += 1
        try:
            while appends.pending_bytes >= self._pending_bytes_max and not self.is_closed:
                self._has_room.wait()
        finally:
            self._room_waiters -= 1

    async def room(self) -> None:
        """Wait until less is pending than the bound."""
        if self._connection is not None:
            await self._connection.appends.room()

    def _settled(self, appends: list[PendingAppend], error: Exception | None) -> None:
        """Remember the failure of appends that end. The lock is held."""
        if error is not None and any(append.context is self for append in appends):
            self._failure = self._failure or error
        if self._room_waiters:
            self._has_room.notify_all()

    # -------------------------------------------------------------- connection

    def open(self, journal: str, content_type: str) -> Outbox:
        """Return the outbox of a journal, by the content type of its label.

        Raises:
            FramingError: the content type has no framing.
        """
        try:
            framing = framing_for(content_type)
        except FramingError as error:
            raise FramingError(
                f"{journal}: {error}; give the journal a content-type label which has a framing,"
                " or register one",
                journal=journal,
            ) from error
        appender = self.connection().appends.appender(journal)
        with self._lock:
            return self.outboxes.setdefault(journal, Outbox(appender, framing))

    def open_in_background(self) -> None:
        """Work on the SDK's background loop, also where a loop runs (notebooks)."""
        self._is_background = True

    def connection(self) -> PublisherConnection:
        """Return the connection, which the first message opens.

        Raises:
            ClosedError: the publisher is closed.
        """
        connection = self._connection
        if connection is None:
            with self._lock:
                if self.is_closed:
                    raise self.closed_error()
                connection = self._connection
                if connection is None:
                    connection = self._connection = PublisherConnection(
                        self._transport,
                        self._lock,
                        is_background=self._is_background,
                        pending_bytes_max=self._pending_bytes_max,
                        mapping_timeout_s=self._mapping_timeout_s,
                        on_settled=_settled_of(weakref.ref(self)),
                    )
                    self._abandoned = weakref.finalize(self, connection.abandon)
                    self._abandoned.atexit = False
        connection.appends.check_loop()
        connection.appends.check_open()
        return connection

    @property
    def is_on_loop(self) -> bool:
        """The calling code runs on the publisher's event loop, which must not be blocked."""
        if self._connection is not None:
            return is_running(self._connection.loop)
        if self._is_background:
            return is_on_sdk_loop()
        fixed = None if self._transport is None else self._transport.loop
        return is_running(home_loop(fixed))

    # ------------------------------------------------------------------ its end

    def pending(self) -> list[PendingAppend]:
        """Return all appends that are not acknowledged."""
        return [] if self._connection is None else self._connection.appends.pending()

    def raise_failure(self) -> None:
        """Raise the first failure since this was last called."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def note_failure(self, error: Exception) -> None:
        """Remember a failure, unless there is an earlier one."""
        with self._lock:
            self._failure = self._failure or error

    def refuse_more(self) -> None:
        """Refuse messages from now on; threads that wait for room get an error."""
        with self._lock:
            self.is_closed = True
            self._has_room.notify_all()

    def closed_error(self) -> ClosedError:
        """Return the error of a message that a closed publisher refuses."""
        return self._closed_error or closed_error()

    @property
    def can_send(self) -> bool:
        """Its event loop runs."""
        return self._connection is not None and self._connection.loop.is_running()

    def close(self, before: Callable[[], Coroutine[None, None, None]]) -> None:
        """Give up what is pending, and close the connection, from plain code.

        Args:
            before: awaited first, on the loop.
        """
        connection = self._detach()
        if connection is None:
            return
        if connection.loop.is_running():
            run(self._shut(connection, before), loop=connection.loop)
        else:
            connection.appends.abandon()

    async def aclose(self, before: Callable[[], Coroutine[None, None, None]]) -> None:
        """As :meth:`close`, in a coroutine."""
        connection = self._detach()
        if connection is None:
            return
        if connection.loop.is_running():
            await on_loop(connection.loop, self._shut(connection, before))
        else:
            connection.appends.abandon()

    async def _shut(
        self, connection: PublisherConnection, before: Callable[[], Coroutine[None, None, None]]
    ) -> None:
        await before()
        await connection.aclose()

    def _detach(self) -> PublisherConnection | None:
        if self._abandoned is not None:
            self._abandoned.detach()
        connection, self._connection = self._connection, None
        return connection

    def forked(self) -> None:
        """In a forked child: refuse everything. The parent sends what it was given."""
        error = ClosedError(
            "the publisher belongs to the process that was forked, which sends what it was given;"
            " make another Publisher in the child"
        )
        self._closed_error = error
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._has_room = threading.Condition(self._lock)
        self.is_closed = self.is_forked = True
        self.producers = Producers(self._lock, self._clock, self._add_frames)
        if self._clock is not None:
            self._clock.unlock()
        connection = self._detach()
        if connection is not None:
            connection.appends.forked(self._lock, error)


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def left_behind() -> list[Sender]:
    """Return all senders that were not closed."""
    return [sender for sender in list(_senders) if not sender.is_closed]


def closed_error() -> ClosedError:
    """Return the error of messages that a closed publisher refuses or gives up."""
    return ClosedError("the publisher is closed; messages which it had not sent are given up")


def _settled_of(
    sender: weakref.ref[Sender],
) -> Callable[[list[PendingAppend], Exception | None], None]:
    """Return a callback that does not keep the sender, which its connection must not."""

    def settled(appends: list[PendingAppend], error: Exception | None) -> None:
        found = sender()
        if found is not None:
            found._settled(appends, error)  # noqa: SLF001 - of this module

    return settled


def _forked() -> None:
    for sender in list(_senders):
        sender.forked()


os.register_at_fork(after_in_child=_forked)
