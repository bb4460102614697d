"""Producers of transactions, and what each has open in its journals.

A publisher's transactions have producers of their own, one for each that is open at a time: a
message outside of transactions discards what its producer has open in the journal (message
section 11), and so would the acknowledgement of another transaction commit it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gazette_sdk.errors import ClosedError
from gazette_sdk.message.clock import Clock
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN
from gazette_sdk.message.publishing.intents import AckIntents
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.uuid import PRODUCER_BYTES, Stamp, new_producer_id
from gazette_sdk.transport.append.pending import PendingAppend

__all__ = ["AddFrames", "Added", "Part", "Producer", "Producers", "Sequences"]

Added: TypeAlias = tuple[PendingAppend, int, bytes]
"""Frame that was added: its append, its position there, and the frame."""

AddFrames: TypeAlias = Callable[
    [list[tuple[Outbox, bytes]]], tuple[list[Added], Callable[[], None]]
]
"""Adds frames, one to each outbox, under the lock; returns them, and what sends them without it."""


class Producer:
    """Producer id with its clock, used by one transaction after the other.

    Attributes:
        stamp: writes its UUIDs.
        acknowledged: the clock of its last acknowledgement, by journal.
    """

    def __init__(self) -> None:
        self.stamp = Stamp(new_producer_id())
        self.stamp.flags = CONTINUE_TXN
        self.acknowledged: dict[str, int] = {}


@dataclass(slots=True)
class Part:
    """Messages of a transaction to one journal.

    Attributes:
        outbox: the journal's.
        acknowledgement: the message that will end it.
        first_clock: clock of the first message.
        appends: appends of the messages, without those that are known to be acknowledged.
        was_retried: one of those was written after a failed attempt.
    """

    outbox: Outbox
    acknowledgement: Any
    first_clock: int
    appends: list[PendingAppend] = field(default_factory=list)
    was_retried: bool = False

    def note(self, append: PendingAppend) -> None:
        """Note an append that carries messages, or the acknowledgement."""
        if self.appends and self.appends[-1] is append:
            return
        self.forget_acknowledged()
        self.appends.append(append)

    def forget_acknowledged(self) -> None:
        """Forget appends that were acknowledged."""
        kept = []
        for append in self.appends:
            if append.done() and append.failure is None:
                self.was_retried |= append.last_error is not None
            else:
                kept.append(append)
        self.appends = kept

    @property
    def failed(self) -> PendingAppend | None:
        """The first append that failed for good, if any did."""
        return next((append for append in self.appends if append.failure is not None), None)


class Sequences:
    """Sequences of messages that a transaction has open, one in each journal.

    Its methods are called under the publisher's lock, unless they say otherwise.

    Args:
        producer: of the transaction.

    Attributes:
        producer: of the transaction.
        parts: by journal, in the order of first use.
        clocks: the clock of each journal's acknowledgement, once they are built.
        is_ended: messages are refused.
    """

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.parts: dict[str, Part] = {}
        self.clocks: dict[str, int] = {}
        self.is_ended = False
        self._acknowledgements: dict[str, Any] = {}

    @property
    def stamp(self) -> Stamp:
        """Stamp of the next message.

        Raises:
            ClosedError: the transaction has ended.
        """
        if self.is_ended:
            raise ended_error()
        return self.producer.stamp

    def expect(self, outbox: Outbox, message: Any) -> None:
        """Prepare the acknowledgement of a message that will be added. Needs no lock.

        Raises:
            GazetteError: an earlier append of the transaction to the journal has failed.
            Exception: whatever the message's own ``new_acknowledgement`` raises.
        """
        part = self.parts.get(outbox.journal)
        if part is not None:
            if part.appends and (failure := part.appends[-1].failure) is not None:
                raise failure
            return
        if outbox.journal not in self._acknowledgements:
            kind = outbox.kind(type(message))
            acknowledgement = kind.new_acknowledgement(message, outbox.journal)
            outbox.frame(acknowledgement, Stamp(bytes(PRODUCER_BYTES)))  # an error is raised now
            self._acknowledgements.setdefault(outbox.journal, acknowledgement)

    def note(self, outbox: Outbox, append: PendingAppend, clock: int) -> None:
        """Note a message that was added."""
        part = self.parts.get(outbox.journal)
        if part is None:
            acknowledgement = self._acknowledgements[outbox.journal]
            part = self.parts[outbox.journal] = Part(outbox, acknowledgement, clock)
        part.note(append)

    def acknowledging_frame(self, part: Part, clock: int) -> bytes:
        """Return the frame that ends the sequence of one journal."""
        stamp = self.producer.stamp
        stamp.flags, stamp.clock, before = ACK_TXN, clock, stamp.clock
        try:
            return part.outbox.frame(part.acknowledgement, stamp)
        finally:
            stamp.flags, stamp.clock = CONTINUE_TXN, before

    def rolling_back_frame(self, part: Part) -> bytes:
        """Return the frame that discards the sequence of one journal.

        It repeats the last acknowledged clock.
        """
        acknowledged = self.producer.acknowledged
        clock = acknowledged.setdefault(part.outbox.journal, part.first_clock - 1)
        return self.acknowledging_frame(part, clock)


class Producers:
    """Producers of one publisher's transactions.

    Args:
        lock: the publisher's.
        clock: a shared clock; None follows the wall clock.
        add_frames: adds frames to outboxes.
    """

    def __init__(
        self,
        lock: threading.Lock,
        clock: Clock | None,
        add_frames: AddFrames,
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._add_frames = add_frames
        self._idle: list[Producer] = []

    def lend(self) -> Sequences:
        """Lend a producer to a transaction."""
        with self._lock:
            return Sequences(self._idle.pop() if self._idle else Producer())

    def take_back(self, producer: Producer) -> None:
        """Keep the producer of a transaction of which nothing can be written any more."""
        with self._lock:
            self._idle.append(producer)

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

    def acknowledge(self, sequences: Sequences, intents: AckIntents) -> list[PendingAppend] | None:
        """Write the acknowledgements behind all messages.

        Returns:
            Their appends; None if an append of the messages has failed.

        Raises:
            ClosedError: the publisher is closed.
        """
        with self._lock:
            parts = sequences.parts
            if any(part.failed for part in parts.values()):
                return None
            frames = [(parts[name].outbox, intents[name]) for name in parts]
            added, send = self._add_frames(frames)
        send()
        return [append for append, _, _ in added]

    def roll_back(self, sequences: Sequences) -> list[PendingAppend]:
        """Refuse further messages, and write the frames that discard those of each journal.

        Raises:
            ClosedError: the publisher is closed.
        """
        with self._lock:
            sequences.is_ended = True
            parts = sequences.parts.values()
            frames = [(part.outbox, sequences.rolling_back_frame(part)) for part in parts]
            added, send = self._add_frames(frames)
        send()
        return [append for append, _, _ in added]


def ended_error() -> ClosedError:
    """Return the error of use of a transaction that has ended."""
    return ClosedError("the transaction has ended: begin another with publisher.transaction()")
