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

from gazette_sdk.errors import BackPressureError, FramingError
from gazette_sdk.framing import framing_for
from gazette_sdk.message.clock import TICK, Clock
from gazette_sdk.message.flags import OUTSIDE_TXN
from gazette_sdk.message.publishing.appends import see_through
from gazette_sdk.message.publishing.batch import Batch, any_ended, closed_error, on_loop
from gazette_sdk.message.publishing.bulk import Slice
from gazette_sdk.message.publishing.intents import AckIntents
from gazette_sdk.message.publishing.link import Link
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.publishing.producer import Producer, Sequences
from gazette_sdk.message.publishing.receipt import BatchReceipt, Receipt
from gazette_sdk.message.uuid import Stamp, new_producer_id
from gazette_sdk.transport.base import Transport

__all__ = ["Sender", "closed_error", "left_behind", "on_loop"]


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
        self._producers: list[Producer] = []
        self._failure: Exception | None = None
        self._link: Link | None = None
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
        with self._lock:
            if self._pending_bytes >= self._pending_bytes_max:
                self._wait_for_room()
            if self.is_closed:
                raise closed_error()
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
            if outbox.is_sending:
                return receipt
            outbox.is_sending = True
        self._wake([outbox])
        return receipt

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
                if not outbox.is_sending:
                    outbox.is_sending = True
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

    # ---------------------------------------------------------- transactions

    def begin(self) -> Sequences:
        """Lend a producer to a transaction."""
        with self._lock:
            if self.is_closed:
                raise closed_error()
            return Sequences(self._producers.pop() if self._producers else Producer())

    def take_back(self, producer: Producer) -> None:
        """Of a transaction that ended well: nothing of it can be written any more."""
        with self._lock:
            self._producers.append(producer)

    def end(self, sequences: Sequences) -> AckIntents:
        """Refuse further messages, and build the acknowledgement of each journal.

        Raises:
            ClosedError: the transaction has ended.
        """
        with self._lock:
            stamp = sequences.stamp
            sequences.is_ended = True
            frames = {}
            for journal, part in sequences.parts.items():
                if self._clock is None:
                    stamp.tick_now()
                else:
                    stamp.clock = self._clock.tick()
                frames[journal] = sequences.acknowledging_frame(part, stamp.clock)
                sequences.clocks[journal] = stamp.clock
            return AckIntents(frames)

    def acknowledge(self, sequences: Sequences, intents: AckIntents) -> list[Batch] | None:
        """Write the acknowledgements behind all messages; None if one of those has failed.

        Raises:
            ClosedError: the publisher is closed.
        """
        with self._lock:
            parts = sequences.parts
            if any(part.failed for part in parts.values()):
                return None
            added = self._add_frames([(parts[name].outbox, intents[name]) for name in parts])
            return [batch for batch, _, _ in added]

    def roll_back(self, sequences: Sequences) -> list[Batch]:
        """Refuse further messages, and write what discards those of each journal.

        Raises:
            ClosedError: the publisher is closed.
        """
        with self._lock:
            sequences.is_ended = True
            parts = sequences.parts.values()
            frames = [(part.outbox, sequences.rolling_back_frame(part)) for part in parts]
            return [batch for batch, _, _ in self._add_frames(frames)]

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
        if self.is_closed:
            raise closed_error()
        added = []
        idle = []
        for outbox, frame in frames:
            batch, begin = outbox.add_frames(frame, 1)
            added.append((batch, begin, frame))
            self._pending_bytes += len(frame)
            if not outbox.is_sending:
                outbox.is_sending = True
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
        """All that is not acknowledged now."""
        with self._lock:
            batches = [batch for box in self.outboxes.values() for batch in box.pending()]
        return [batch for batch in batches if not batch.done.done()]

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
            tasks = [box.sender for box in self.outboxes.values() if box.sender is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for box in self.outboxes.values():
            for batch in box.drop():
                batch.drop_content()
                batch.done.set_exception(closed_error())
        if self._abandoned is not None:
            self._abandoned.detach()
        if self._link is not None:
            await self._link.aclose()

    # ------------------------------------------------------------- the loop

    def _start_senders(self, outboxes: list[Outbox]) -> None:
        loop = asyncio.get_running_loop()
        for outbox in outboxes:
            outbox.sender = loop.create_task(
                see_through(outbox, self.link(), self._lock, self._settle),
                name=f"publisher of {outbox.journal}",
            )

    def _settle(self, batches: list[Batch], outcome: int | Exception) -> None:
        """Tell receipts how an append ended. What stood behind a failed one fails with it."""
        with self._lock:
            self._pending_bytes -= sum(batch.length_bytes for batch in batches)
            if isinstance(outcome, Exception) and not all(batch.is_told for batch in batches):
                self._failure = self._failure or outcome
            self._has_room.notify_all()
        for batch in batches:
            batch.drop_content()
            if isinstance(outcome, Exception):
                batch.done.set_exception(outcome)
            else:
                batch.done.set_result(outcome)


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()

os.register_at_fork(after_in_child=_senders.clear)  # what the parent has is the parent's to send


def left_behind() -> list[Sender]:
    """All senders which were not closed."""
    return [sender for sender in list(_senders) if not sender.is_closed]
