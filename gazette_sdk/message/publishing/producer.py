"""Producers of transactions, and what each has open in its journals.

A publisher's transactions have producers of their own, one for each that is open at a time: a
message outside of transactions discards what its producer has open in the journal (message
section 11), and so would the acknowledgement of another transaction commit it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gazette_sdk.errors import ClosedError
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN
from gazette_sdk.message.publishing.intents import AckIntents
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.uuid import PRODUCER_BYTES, Stamp, new_producer_id
from gazette_sdk.transport.append.queue import AnyFuture, PendingAppend
from gazette_sdk.transport.loop import guarded

if TYPE_CHECKING:
    from gazette_sdk.message.publishing.sender import Sender

__all__ = ["Part", "Producer", "Sequences", "ended_error"]


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
    def is_in_doubt(self) -> bool:
        """A failed attempt may yet write messages, also behind what ends their sequence."""
        self.forget_acknowledged()
        return bool(self.appends) or self.was_retried

    @property
    def failed(self) -> PendingAppend | None:
        """The first append that failed for good, if any did."""
        return next((append for append in self.appends if append.failure is not None), None)


class Sequences:
    """Sequences of messages that a transaction has open, one in each journal.

    Args:
        sender: the publisher's, whose producers are reused.
        producer: the producer of the messages, of which nothing else is open and not ended;
            without one, any of the sender's.

    Attributes:
        parts: by journal, in the order of first use.
        deferred: futures of calls that wait for a first listing.
        is_ended: messages are refused.

    Raises:
        ClosedError: the publisher is closed.
    """

    def __init__(self, sender: Sender, producer: Producer | None = None) -> None:
        self.parts: dict[str, Part] = {}
        self.deferred: list[PendingAppend] = []
        self.is_ended = False
        self._sender = sender
        self._acknowledgements: dict[str, Any] = {}
        self._clocks: dict[str, int] = {}  # of the acknowledgements, once they are built
        with guarded(sender.lock):
            if sender.is_closed:
                raise sender.closed_error()
            idle = sender.idle_producers
            self._producer = producer or (idle.pop() if idle else Producer())

    @property
    def stamp(self) -> Stamp:
        """Stamp of the next message. The lock is held.

        Raises:
            ClosedError: the transaction has ended.
        """
        if self.is_ended:
            raise ended_error()
        return self._producer.stamp

    def expect(self, outbox: Outbox, message: Any) -> None:
        """Prepare the acknowledgement of a message that will be added.

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
        """Note a message that was added. The lock is held."""
        part = self.parts.get(outbox.journal)
        if part is None:
            acknowledgement = self._acknowledgements[outbox.journal]
            part = self.parts[outbox.journal] = Part(outbox, acknowledgement, clock)
        part.note(append)

    # --------------------------------------------------------------- their end

    def end(self) -> AckIntents:
        """Refuse further messages, and build the acknowledgement of each journal.

        Raises:
            ClosedError: the transaction has ended.
        """
        clock = self._sender.clock
        with guarded(self._sender.lock):
            stamp = self.stamp
            self.is_ended = True
            frames = {}
            for journal, part in self.parts.items():
                if clock is None:
                    stamp.tick_now()
                else:
                    stamp.clock = clock.tick()
                frames[journal] = self._acknowledging_frame(part, stamp.clock)
                self._clocks[journal] = stamp.clock
            return AckIntents(frames)

    def acknowledge(
        self, intents: Mapping[str, bytes], after: frozenset[AnyFuture] = frozenset()
    ) -> list[PendingAppend] | None:
        """Write the acknowledgements behind all messages.

        Args:
            intents: what :meth:`end` returned.
            after: futures that must succeed before. What is published later waits for them, too.

        Returns:
            Their appends; None if an append of the messages has failed.

        Raises:
            ClosedError: the publisher is closed.
        """
        with guarded(self._sender.lock):
            if any(part.failed for part in self.parts.values()):
                return None
            frames = [(part.outbox, intents[name]) for name, part in self.parts.items()]
            added, must_send = self._sender.add_frames(frames, after)
        for appender in must_send:
            appender.send()
        return [append for append, _, _ in added]

    def roll_back(self) -> list[PendingAppend]:
        """Refuse further messages, and write the frames that discard those of each journal.

        Such a frame repeats the last acknowledged clock.

        Raises:
            ClosedError: the publisher is closed.
        """
        acknowledged = self._producer.acknowledged
        with guarded(self._sender.lock):
            self.is_ended = True
            frames = []
            for journal, part in self.parts.items():
                clock = acknowledged.setdefault(journal, part.first_clock - 1)
                frames.append((part.outbox, self._acknowledging_frame(part, clock)))
            added, must_send = self._sender.add_frames(frames)
        for appender in must_send:
            appender.send()
        return [append for append, _, _ in added]

    def reuse_producer(self, *, is_acknowledged: bool) -> None:
        """Give the producer to later transactions, as nothing of this one can be written any more.

        Args:
            is_acknowledged: the transaction was acknowledged in all journals; else rolled back.
        """
        if is_acknowledged:
            self.note_acknowledged()
        with guarded(self._sender.lock):
            self._sender.idle_producers.append(self._producer)

    def note_acknowledged(self) -> None:
        """Have later roll-backs of the producer keep what is acknowledged here.

        The acknowledgements may be queued still: a roll-back is written behind them.
        """
        self._producer.acknowledged.update(self._clocks)

    def _acknowledging_frame(self, part: Part, clock: int) -> bytes:
        """Return the frame that ends the sequence of one journal."""
        stamp = self._producer.stamp
        stamp.flags, stamp.clock, before = ACK_TXN, clock, stamp.clock
        try:
            return part.outbox.frame(part.acknowledgement, stamp)
        finally:
            stamp.flags, stamp.clock = CONTINUE_TXN, before


def ended_error() -> ClosedError:
    """Return the error of use of a transaction that has ended."""
    return ClosedError("the transaction has ended: begin another with publisher.transaction()")
