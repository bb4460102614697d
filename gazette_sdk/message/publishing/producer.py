"""A producer of transactions, and what it has open in each journal.

A publisher's transactions have producers of their own, one for each that is open at a time: a
message outside of transactions discards what its producer has open in the journal (message
section 11), and so would the acknowledgement of another transaction commit it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gazette_sdk.errors import ClosedError
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN
from gazette_sdk.message.publishing.batch import Batch
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.uuid import PRODUCER_BYTES, Stamp, new_producer_id

__all__ = ["Part", "Producer", "Sequences"]


class Producer:
    """A producer id with its clock, used by one transaction after the other.

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
    """What a transaction published to one journal.

    Attributes:
        outbox: the journal's.
        acknowledgement: the message that will end it.
        first_clock: clock of the first message.
        batches: what carries the messages, but for those that are known to be acknowledged.
        was_retried: whether any of those was written after a failed attempt.
    """

    outbox: Outbox
    acknowledgement: Any
    first_clock: int
    batches: list[Batch] = field(default_factory=list)
    was_retried: bool = False

    def note(self, batch: Batch) -> None:
        """Note a batch that carries messages, or the acknowledgement."""
        if self.batches and self.batches[-1] is batch:
            return
        self.forget_acknowledged()
        self.batches.append(batch)

    def forget_acknowledged(self) -> None:
        """Forget batches of which nothing has to be known any more."""
        kept = []
        for batch in self.batches:
            if batch.is_done and not batch.has_failed:
                self.was_retried |= batch.was_retried
            else:
                kept.append(batch)
        self.batches = kept

    @property
    def failed(self) -> Batch | None:
        """The first batch that was given up, if any was."""
        return next((batch for batch in self.batches if batch.has_failed), None)


class Sequences:
    """The sequences of messages which a transaction has open, one in each journal.

    Its methods are called under the publisher's lock, unless they say otherwise.

    Args:
        producer: whose they are.

    Attributes:
        producer: whose they are.
        parts: by journal, in the order of first use.
        clocks: the clock of each journal's acknowledgement, once they are built.
        is_ended: whether messages are refused.
    """

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.parts: dict[str, Part] = {}
        self.clocks: dict[str, int] = {}
        self.is_ended = False
        self._acknowledgements: dict[str, Any] = {}

    @property
    def stamp(self) -> Stamp:
        """Stamps the next message.

        Raises:
            ClosedError: the transaction has ended.
        """
        if self.is_ended:
            raise ended_error()
        return self.producer.stamp

    def expect(self, outbox: Outbox, message: Any) -> None:
        """A message will be added: have what will acknowledge it. Needs no lock.

        Raises:
            GazetteError: what went before it in the journal has failed, and why.
            Exception: whatever the message's own ``new_acknowledgement`` raises.
        """
        part = self.parts.get(outbox.journal)
        if part is not None:
            if part.batches and part.batches[-1].has_failed:
                part.batches[-1].done.result(_SETTLED_WITHIN_S)
            return
        if outbox.journal not in self._acknowledgements:
            kind = outbox.kind(type(message))
            acknowledgement = kind.new_acknowledgement(message, outbox.journal)
            outbox.frame(acknowledgement, Stamp(bytes(PRODUCER_BYTES)))  # or now is the time to say
            self._acknowledgements.setdefault(outbox.journal, acknowledgement)

    def note(self, outbox: Outbox, batch: Batch, clock: int) -> None:
        """A message was added."""
        part = self.parts.get(outbox.journal)
        if part is None:
            acknowledgement = self._acknowledgements[outbox.journal]
            part = self.parts[outbox.journal] = Part(outbox, acknowledgement, clock)
        part.note(batch)

    def acknowledging_frame(self, part: Part, clock: int) -> bytes:
        """The frame that ends the sequence of one journal."""
        stamp = self.producer.stamp
        stamp.flags, stamp.clock, before = ACK_TXN, clock, stamp.clock
        try:
            return part.outbox.frame(part.acknowledgement, stamp)
        finally:
            stamp.flags, stamp.clock = CONTINUE_TXN, before

    def rolling_back_frame(self, part: Part) -> bytes:
        """The frame that discards the sequence of one journal: of the last acknowledged clock."""
        acknowledged = self.producer.acknowledged
        clock = acknowledged.setdefault(part.outbox.journal, part.first_clock - 1)
        return self.acknowledging_frame(part, clock)


_SETTLED_WITHIN_S = 10.0
"""A batch that was given up says why within a moment."""


def ended_error() -> ClosedError:
    """What a transaction says that has ended."""
    return ClosedError("the transaction has ended: begin another with publisher.transaction()")
