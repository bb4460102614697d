"""Sees the messages of a publisher through: stamps, batches, appends, settles receipts.

A publisher is one producer for messages outside of transactions, and as many others as it has
had transactions open at once: of one producer, at most one sequence of messages can be open in
a journal, and a message outside of it would discard that. Their messages to a journal share its
outbox, and so its appends.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from typing import Any

from gazette_sdk.errors import BackPressureError, FramingError, GazetteError
from gazette_sdk.framing import framing_for
from gazette_sdk.message.clock import TICK, Clock
from gazette_sdk.message.flags import OUTSIDE_TXN
from gazette_sdk.message.publishing.appends import see_through
from gazette_sdk.message.publishing.batch import (
    Batch,
    any_ended,
    closed_error,
    on_loop,
    resolve,
)
from gazette_sdk.message.publishing.bulk import Slice
from gazette_sdk.message.publishing.direct import Directs
from gazette_sdk.message.publishing.handover import Effect, Holder, Input
from gazette_sdk.message.publishing.link import Link
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.publishing.producer import Sequences
from gazette_sdk.message.publishing.producers import Producers
from gazette_sdk.message.publishing.receipt import BatchReceipt, Receipt
from gazette_sdk.message.uuid import Stamp, new_producer_id
from gazette_sdk.transport.base import Transport

__all__ = ["Sender", "closed_error", "left_behind", "on_loop"]


_AT_WORK = int(Holder.LOOP)
"""From here on somebody appends already, and an added message changes nothing."""


class Sender:
    """A producer: its id, its clock, and what it has not had acknowledged yet.

    Any thread may add messages; one task for each journal appends them on the SDK's event loop.

    Args:
        transport: how to reach the cluster; None connects to ``GAZETTE_ADDRESS``.
        clock: a shared clock; None follows the wall clock.
        pending_bytes_max: bound of encoded messages which are not acknowledged.
        blocks: whether a thread waits for room, or is told that there is none.
        mapping_timeout_s: bound of waits for listings.

    Attributes:
        outboxes: by journal.
        producers: of transactions.
        is_closed: whether messages are refused.
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
        self.is_closed = False
        self._transport = transport
        self._clock = clock
        self._pending_bytes_max = pending_bytes_max
        self._blocks = blocks
        self._mapping_timeout_s = mapping_timeout_s
        self._stamp = Stamp(new_producer_id())
        self._stamp.flags = OUTSIDE_TXN
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._pending_bytes = 0
        self.producers = Producers(self._lock, clock, self._add_frames)
        self._failure: Exception | None = None
        self._link: Link | None = None
        self._is_shut = False
        self._directs = Directs(self._lock, self._settle, self._wake)
        self._abandoned: weakref.finalize[..., Sender] | None = None
        _senders.add(self)

    @property
    def producer(self) -> bytes:
        """The producer id, six bytes."""
        return self._stamp.producer

    def renewed(self) -> Sender:
        """In a forked child: another producer, with the same settings and nothing pending.

        The parent sends what it was given. Another of its threads may have held any lock.
        """
        for batch in [batch for box in self.outboxes.values() for batch in box.pending()]:
            batch.disown()
        if self._abandoned is not None:
            self._abandoned.detach()
        if self._clock is not None:
            self._clock.unlock()
        fresh = Sender(
            self._transport,
            self._clock,
            pending_bytes_max=self._pending_bytes_max,
            blocks=self._blocks,
            mapping_timeout_s=self._mapping_timeout_s,
        )
        fresh.is_closed = self.is_closed
        return fresh

    def add(  # noqa: C901, PLR0912 - it runs for every message, and a further call costs a tenth
        self, outbox: Outbox, message: Any, sequences: Sequences | None = None
    ) -> Receipt:
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
        caller = None
        try:
            with self._lock:
                if self._pending_bytes >= self._pending_bytes_max:
                    self._wait_for_room()
                if self.is_closed:
                    raise closed_error()  # noqa: TRY301 - one way to end for all that goes wrong
                stamp = self._stamp if sequences is None else sequences.stamp
                if self._clock is None:
                    stamp.tick_now()
                else:
                    stamp.clock = self._clock.tick()
                receipt = outbox.add(message, stamp)
                if sequences is None:
                    receipt.batch.is_told = False
                else:
                    sequences.note(outbox, receipt.batch, stamp.clock)
                self._pending_bytes += receipt.last - receipt.first
                if outbox.holder >= _AT_WORK:  # as the machine says, without asking it each time
                    return receipt
                if outbox.habit.is_formed and sequences is None:
                    caller = self._directs.take(outbox, receipt, self._link)
                if caller is None:
                    outbox.step(Input.ADDED)
            if caller is None:
                self._wake([outbox])
            else:
                caller.send()
        except BaseException as error:
            if caller is not None or not isinstance(error, GazetteError):
                self._interrupted(outbox, error)
            raise
        return receipt

    def _interrupted(self, outbox: Outbox, error: BaseException) -> None:
        """A caller was interrupted: nothing is left lying."""
        with self._lock:
            is_left = outbox.has_waiting and outbox.holder < _AT_WORK
            if is_left:
                outbox.step(Input.ADDED)
        if is_left:
            self._wake([outbox])
        else:
            self._directs.interrupted(outbox, error)

    def add_slice(self, part: Slice, receipt: BatchReceipt, sequences: Sequences | None) -> None:
        """Stamp messages in bulk, and add them behind what waits for their journals.

        Args:
            part: the messages.
            receipt: notes where they went.
            sequences: of their transaction; None outside of transactions.

        Raises:
            ClosedError: the publisher is closed.
        """
        with self._lock:
            if self._blocks and not on_loop():
                self._wait_for_room()
            if self.is_closed:
                raise closed_error()
            stamp = self._stamp if sequences is None else sequences.stamp
            if self._clock is None:
                first = stamp.reserve(part.count)
            else:
                first = self._clock.tick(part.count)
                stamp.clock = first + (part.count - 1) * TICK
            idle = []
            for outbox, first_index, frames, count in part.frames(stamp, first):
                batch, begin = outbox.add_frames(frames, count)
                if sequences is None:
                    batch.is_told = False
                else:
                    sequences.note(outbox, batch, first + first_index * TICK)
                receipt.add(batch, begin, begin + len(frames), count)
                self._pending_bytes += len(frames)
                if outbox.step(Input.ADDED) is Effect.WAKE:
                    idle.append(outbox)
        self._wake(idle)

    def check_room(self, length_bytes: int) -> None:
        """Refuse a batch where its caller must not wait, and there is no room.

        Raises:
            BackPressureError: too much is pending, or the batch is too large by itself.
        """
        if self._blocks and not on_loop():
            return
        if length_bytes > self._pending_bytes_max:
            raise BackPressureError(
                f"the batch has {length_bytes} bytes of messages, and at most"
                f" {self._pending_bytes_max} may be pending; publish smaller batches, or raise"
                " pending_bytes_max"
            )
        with self._lock:
            self._wait_for_room()

    def begin(self) -> Sequences:
        """Lend a producer to a transaction.

        Raises:
            ClosedError: the publisher is closed.
        """
        if self.is_closed:
            raise closed_error()
        return self.producers.lend()

    def add_frames(
        self, frames: list[tuple[Outbox, bytes]], *, is_told: bool
    ) -> list[tuple[Batch, int, bytes]]:
        """Write frames as they are, one to each outbox. They do not wait for room.

        Args:
            frames: the frames.
            is_told: somebody else than ``flush`` tells if that fails.

        Returns:
            For each its batch, and where it begins there.

        Raises:
            ClosedError: the publisher is closed.
        """
        with self._lock:
            added = self._add_frames(frames)
            for batch, _, _ in added:
                batch.is_told &= is_told
            return added

    def _add_frames(self, frames: list[tuple[Outbox, bytes]]) -> list[tuple[Batch, int, bytes]]:
        """The same, under the lock, and those of transactions."""
        if self.is_closed:
            raise closed_error()
        added = []
        idle = []
        for outbox, frame in frames:
            batch, begin = outbox.add_frames(frame, 1)
            added.append((batch, begin, frame))
            self._pending_bytes += len(frame)
            if outbox.step(Input.ADDED) is Effect.WAKE:
                idle.append(outbox)
        if idle:
            assert self._link is not None
            self._link.loop.call_soon_threadsafe(self._start_senders, idle)
        return added

    def _wake(self, outboxes: list[Outbox]) -> None:
        if outboxes:
            self.link().loop.call_soon_threadsafe(self._start_senders, outboxes)

    def _wait_for_room(self) -> None:
        if self._pending_bytes < self._pending_bytes_max:
            return
        self._call_in()
        if not self._blocks or on_loop():
            raise BackPressureError(
                f"{self._pending_bytes} bytes of messages are not acknowledged yet, of at most"
                f" {self._pending_bytes_max}; wait for receipts, `await publisher.room()`, or"
                " raise pending_bytes_max"
            )
        while self._pending_bytes >= self._pending_bytes_max and not self.is_closed:
            self._has_room.wait()

    async def room(self) -> None:
        """Wait until no more is pending than may be."""
        while True:
            with self._lock:
                if self._pending_bytes < self._pending_bytes_max:
                    return
                self._call_in()
                oldest = [box.pending()[:1] for box in self.outboxes.values()]
            await any_ended(*(batch.done for first in oldest for batch in first))

    def open(self, journal: str, content_type: str) -> Outbox:
        """The outbox of a journal, by the content type of its label.

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
        with self._lock:
            return self.outboxes.setdefault(journal, Outbox(journal, framing))

    def link(self) -> Link:
        """The connection, opened by the first message.

        Raises:
            ClosedError: the publisher is closed.
        """
        link = self._link
        if link is None:
            with self._lock:
                if self.is_closed:
                    raise closed_error()
                link = self._link
                if link is None:
                    link = self._link = Link(self._transport, self._mapping_timeout_s)
                    self._abandoned = weakref.finalize(self, link.abandon)
                    self._abandoned.atexit = False
        return link

    def pending(self) -> list[Batch]:
        """All that is not acknowledged now, and that the event loop looks after from now on."""
        with self._lock:
            batches = [batch for box in self.outboxes.values() for batch in box.pending()]
            self._call_in()
        return [batch for batch in batches if not batch.is_done]

    def _call_in(self) -> None:
        """Nobody is to wait until somebody looks for what is away. Under the lock."""
        away = [box for box in self.outboxes.values() if box.step(Input.CALLED_IN) is Effect.WAKE]
        self._wake(away)

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
        """Refuse messages from now on; who waits for room is told so."""
        with self._lock:
            self.is_closed = True
            self._has_room.notify_all()

    @property
    def can_send(self) -> bool:
        """Whether its event loop runs."""
        return self._link is not None and self._link.loop.is_running()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to be closed."""
        return self._link is not None

    async def aclose(self) -> None:
        """Give up what is pending, and close the connection."""
        with self._lock:
            self._is_shut = self._directs.is_shut = True
            boxes = list(self.outboxes.values())
            calls = [box.call for box in boxes if box.call is not None]
            tasks = [box.sender for box in boxes if box.sender is not None]
        for call in calls:
            call.interrupt()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for box in boxes:
            self._give_up(box)
        if self._abandoned is not None:
            self._abandoned.detach()
        if self._link is not None:
            await self._link.aclose()

    # ------------------------------------------------------------- the loop

    def _start_senders(self, outboxes: list[Outbox]) -> None:
        loop = asyncio.get_running_loop()
        for outbox in outboxes:
            if self._is_shut:
                self._give_up(outbox)
                continue
            if outbox.sender is not None or outbox.holder != Holder.LOOP:
                continue  # it was asked for twice
            outbox.sender = loop.create_task(
                see_through(outbox, self.link(), self._lock, self._settle),
                name=f"publisher of {outbox.journal}",
            )

    def _give_up(self, outbox: Outbox) -> None:
        """It is closed: fail what waits in an outbox, but for what a caller is appending."""
        with self._lock:
            outbox.step(Input.CALLED_IN)  # nobody can claim it any more
            given_up = outbox.drop()
            if outbox.handed is not None:
                given_up.insert(0, outbox.handed.batch)
                outbox.handed.give_up()
                outbox.handed = None
        if given_up:
            self._settle(given_up, closed_error())

    def _settle(
        self, batches: list[Batch], outcome: int | Exception, outbox: Outbox | None = None, /
    ) -> bool:
        """Tell receipts how an append ended. See :class:`Settle`."""
        with self._lock:
            futures = []
            was_full = self._pending_bytes >= self._pending_bytes_max
            for batch in batches:
                self._pending_bytes -= batch.length_bytes
                future = batch.end(outcome)
                if future is not None:
                    futures.append(future)
            if isinstance(outcome, Exception) and not all(batch.is_told for batch in batches):
                self._failure = self._failure or outcome
            is_resting = outbox is not None and outbox.rest()
            if was_full:  # else nobody waits for room
                self._has_room.notify_all()
        for future in futures:
            resolve(future, outcome)
        return is_resting


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()

os.register_at_fork(after_in_child=_senders.clear)  # what the parent has is the parent's to send


def left_behind() -> list[Sender]:
    """All senders which were not closed."""
    return [sender for sender in list(_senders) if not sender.is_closed]
