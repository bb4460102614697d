"""Core of the sequencer: queueing and delivery, one message at a time.

See message sections 13.2 and 13.3, and
:class:`~gazette_sdk.message.sequencing.sequencer.Sequencer`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from gazette_sdk.errors import FramingError
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from gazette_sdk.message.sequencing.checkpoint import Checkpoint
from gazette_sdk.message.sequencing.metrics import RareLog
from gazette_sdk.message.sequencing.run import Message
from gazette_sdk.message.sequencing.state import Journal, Outcome, Producer, ReplayRange, restore

__all__ = ["COUNTS_MAX", "RING_SIZE", "SequencerMachine"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

RING_SIZE = 8192
"""Default number of messages that are kept."""

COUNTS_MAX = 4096
"""Number of messages of a journal that are counted at once."""

# Access to a member of an enum takes a tenth of the time of a message.
_ACK_COMMIT_REPLAY = Outcome.ACK_COMMIT_REPLAY
_ACK_COMMIT_RING = Outcome.ACK_COMMIT_RING
_ACK_EMPTY = Outcome.ACK_EMPTY
_ACK_ROLLBACK = Outcome.ACK_ROLLBACK
_CONTINUE_ALREADY_ACKED = Outcome.CONTINUE_ALREADY_ACKED
_CONTINUE_BEGIN_SPAN = Outcome.CONTINUE_BEGIN_SPAN
_CONTINUE_EXTEND_SPAN = Outcome.CONTINUE_EXTEND_SPAN
_CONTINUE_RING_CLOCK_LARGER = Outcome.CONTINUE_RING_CLOCK_LARGER
_OUTSIDE_ALREADY_ACKED = Outcome.OUTSIDE_ALREADY_ACKED
_OUTSIDE_COMMIT = Outcome.OUTSIDE_COMMIT


class SequencerMachine(Generic[T]):
    """Queueing and delivery; see :class:`~gazette_sdk.message.sequencing.sequencer.Sequencer`.

    Args:
        ring_size: number of messages that are kept, over all journals and producers. Sequences
            that began longer ago are read again when they are acknowledged. At least 1.
        ring_bytes_max: limit of the frames that are kept, beside the newest; None for no limit
            but ``ring_size``.
        checkpoint: position to go on from.
        time_ns: clock of this machine, in nanoseconds since 1970.

    Attributes:
        offsets: by journal, the offset read through: content before it need not be read again,
            once producers' states are known.
        delivering: producer of the sequence that is being delivered; None if there is none.
        replay: range that must be read again before :meth:`step`; None if there is none.
    """

    def __init__(
        self,
        ring_size: int = RING_SIZE,
        *,
        ring_bytes_max: int | None = None,
        checkpoint: Checkpoint | None = None,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._time_ns = time_ns
        self.offsets: dict[str, int] = {}
        self._journals: dict[str, Journal[T]] = {}
        # Slots, oldest first: the span of a slot's message, None where the message was delivered
        # at once. Each span loses its first message when its first slot is removed. A span that
        # is dropped is emptied and never filled again.
        self._ring: deque[deque[Message[T]] | None] = deque()
        self._ring_size = max(ring_size, 1)
        self._ring_bytes = 0
        self._ring_bytes_max: float = float("inf") if ring_bytes_max is None else ring_bytes_max
        self._pending: set[Producer[T]] = set()
        self.delivering: Producer[T] | None = None
        self.replay: ReplayRange | None = None
        # Of the sequence that is being delivered: the last message, the messages still to be
        # delivered, and the message that was delivered but not processed yet.
        self._last: Message[T] | None = None
        self._single: deque[Message[T]] = deque()
        self._rest = self._single
        self._outstanding: Message[T] | None = None
        self._rarely = RareLog(_log)
        if checkpoint is not None:
            self.offsets.update(checkpoint.offsets)
            self._journals.update(restore(checkpoint.producers))

    # ---------------------------------------------------------------- queueing

    def queue(self, message: Message[T]) -> Outcome:
        """Take the next message of a journal.

        Returns:
            Its outcome. If :attr:`delivering` is set, all of the sequence must be taken next, by
            :meth:`step`, after the range :attr:`replay`, if there is one.

        Raises:
            RuntimeError: a sequence is still being delivered.
        """
        if self.delivering is not None:
            self._refuse_while_delivering()
        ring = self._ring
        if len(ring) >= self._ring_size or self._ring_bytes > self._ring_bytes_max:
            self._make_room()
        name, begin, end, producer, clock, flags, _ = message
        journal = self._journals.get(name)
        if journal is None:
            journal = self._begin_journal(name, begin)
        state = journal.producers.get(producer)
        if state is None or clock == 0:
            state = self._begin_producer(journal, producer, clock)
            # A message without UUID is outside of transactions, whatever its flags.
            flags = flags if clock else OUTSIDE_TXN
        if flags == CONTINUE_TXN:
            outcome = self._continue(state, message)
        elif flags == ACK_TXN:
            outcome = self._acknowledge(state, message)
        else:
            outcome = self._outside(state, message)
        # A sequence that is delivered is passed at its end.
        if self.delivering is None:
            self.offsets[name] = end
        if flags <= ACK_TXN:
            journal.counts[outcome] += 1
            journal.uncounted += 1
        else:
            self._count_unknown(journal, begin, flags, outcome)
        if journal.uncounted >= COUNTS_MAX:
            journal.flush_counts()
        return outcome

    def _outside(self, state: Producer[T], message: Message[T]) -> Outcome:
        if message[4] <= state.min:
            return _OUTSIDE_ALREADY_ACKED
        if state.begin != -1:
            self._discard_open(state, message)
        self._deliver_alone(state, message)
        return _OUTSIDE_COMMIT

    def _continue(self, state: Producer[T], message: Message[T]) -> Outcome:
        clock = message[4]
        if clock <= state.min:
            return _CONTINUE_ALREADY_ACKED
        if clock <= state.max:
            return _CONTINUE_RING_CLOCK_LARGER
        self._keep(state, message)
        state.max = clock
        if state.begin == -1:
            state.begin = message[1]
            self._pending.add(state)
            return _CONTINUE_BEGIN_SPAN
        return _CONTINUE_EXTEND_SPAN

    def _acknowledge(self, state: Producer[T], message: Message[T]) -> Outcome:
        clock = message[4]
        if clock <= state.min:
            if clock < state.min:
                self._rarely(
                    logging.ERROR,
                    "%s: producer %012x acknowledges clock %d at offset %d, but has acknowledged"
                    " %d before: its store has gone back to an earlier checkpoint",
                    message.journal,
                    state.id,
                    clock,
                    message.begin,
                    state.min,
                )
            self._drop_span(state)
            self._pending.discard(state)
            state.min = state.max = clock
            state.begin = -1
            return _ACK_ROLLBACK
        if state.begin == -1:
            self._deliver_alone(state, message)
            return _ACK_EMPTY
        self._keep(state, message)
        span = state.span
        assert span, "the acknowledgement itself is in the ring"
        state.max = clock
        self.delivering = state
        self._last = message
        self._rest = span
        first = span[0]
        if first.begin == state.begin and first is not message:
            return _ACK_COMMIT_RING
        self.replay = ReplayRange(message.journal, state.begin, first.begin)
        return _ACK_COMMIT_REPLAY

    def _deliver_alone(self, state: Producer[T], message: Message[T]) -> None:
        """Deliver a sequence of one message."""
        self._ring.append(None)
        state.begin = message[1]
        state.max = message[4]
        self.delivering = state
        self._last = message
        self._rest = self._single
        self._single.append(message)

    def _discard_open(self, state: Producer[T], message: Message[T]) -> None:
        if state.begin != message.begin:  # else a checkpoint was taken while it was delivered
            self._rarely(
                logging.ERROR,
                "%s: producer %012x mixes messages in and outside of transactions: its open"
                " sequence, which began at offset %d, is discarded at offset %d",
                message.journal,
                state.id,
                state.begin,
                message.begin,
            )
        self._drop_span(state)

    def _count_unknown(
        self, journal: Journal[T], begin: int, flags: int, outcome: Outcome, count: int = 1
    ) -> None:
        self._rarely(
            logging.WARNING,
            "%s: a message behind offset %d has unknown flags %#x; it is read as one outside of"
            " transactions",
            journal.name,
            begin,
            flags,
        )
        journal.unknown[flags, outcome] = journal.unknown.get((flags, outcome), 0) + count
        journal.uncounted += count

    def _begin_journal(self, name: str, begin: int) -> Journal[T]:
        journal: Journal[T] = Journal(name)
        self._journals[name] = journal
        # A checkpoint must not lose its first message, if that is being delivered.
        if self.offsets.get(name, -1) < 0:
            self.offsets[name] = begin
        return journal

    def _begin_producer(self, journal: Journal[T], producer: int, clock: int) -> Producer[T]:
        """Return a producer that was not seen before: all of its messages are accepted.

        Each message without UUID, whose clock is 0, has a producer of its own.
        """
        state: Producer[T] = Producer(producer, clock - 1)
        if clock:
            journal.producers[producer] = state
        return state

    def _refuse_while_delivering(self) -> None:
        raise RuntimeError("a sequence is being delivered; take all of it by step() first")

    # ---------------------------------------------------------------- the ring

    def _keep(self, state: Producer[T], message: Message[T]) -> None:
        span = state.span
        if span is None:
            state.span = span = deque()
        span.append(message)
        self._ring.append(span)
        self._ring_bytes += message[2] - message[1]

    def _make_room(self) -> None:
        """Remove the slot that is needed next, and the oldest while they hold too much."""
        ring = self._ring
        if len(ring) >= self._ring_size:
            self._evict(ring.popleft())
        while self._ring_bytes > self._ring_bytes_max and len(ring) > 1:
            self._evict(ring.popleft())

    def _evict(self, span: deque[Message[T]] | None) -> None:
        if span:
            evicted = span.popleft()
            self._ring_bytes -= evicted[2] - evicted[1]

    def _drop_span(self, state: Producer[T]) -> None:
        """Forget a producer's messages; their slots stay until they are the oldest."""
        span = state.span
        if span is not None:
            self._ring_bytes -= sum(message[2] - message[1] for message in span)
            span.clear()
            state.span = None

    # ---------------------------------------------------------------- delivery

    def offer(self, message: Message[T]) -> bool:
        """Take the next message of the range :attr:`replay`.

        Returns:
            True if it is delivered now.

        Raises:
            FramingError: it is not in the range.
            RuntimeError: there is no such range.
        """
        replay = self.replay
        state = self.delivering
        if replay is None or state is None:
            raise RuntimeError("offer() takes messages that are read again; there are none")
        if self._outstanding is not None:
            state.min = self._outstanding[4]
            self._outstanding = None
        name, begin, end, producer, clock, _, _ = message
        if name != replay.journal:
            raise FramingError(
                f"replay of wrong journal ({name}; expected {replay.journal})",
                journal=replay.journal,
                offset=begin,
            )
        if begin < state.begin:
            raise FramingError(
                f"replay has wrong Begin ({begin}; expected >= {state.begin})",
                journal=name,
                offset=begin,
            )
        if end > replay.end:
            raise FramingError(
                f"replay has wrong End ({end}; expected <= {replay.end})",
                journal=name,
                offset=begin,
            )
        self._journals[name].replayed += 1
        # A message without UUID was delivered when it was read first.
        if clock == 0 or producer != state.id or not state.min < clock <= state.max:
            return False
        state.begin = begin
        self._outstanding = message
        return True

    def end_replay(self) -> None:
        """Go on with :meth:`step`, behind the range :attr:`replay`.

        Raises:
            RuntimeError: there is no such range.
        """
        if self.replay is None:
            raise RuntimeError("end_replay() ends a range that is read again; there is none")
        self.replay = None

    def upcoming(self) -> list[Message[T]]:
        """Return the messages that :meth:`step` will return, without recording anything.

        Raises:
            RuntimeError: a range must be read again first, see :attr:`replay`.
        """
        state = self.delivering
        if state is None:
            return []
        if self.replay is not None:
            raise RuntimeError(f"{self.replay} must be read again first; see offer()")
        clock = state.min if self._outstanding is None else self._outstanding[4]
        found = []
        for message in self._rest:
            if clock < message[4] <= state.max:
                clock = message[4]
                found.append(message)
        return found

    def finish(self, processed: list[Message[T]]) -> None:
        """Record that the messages of :meth:`upcoming` are processed, as calls of :meth:`step` do.

        Args:
            processed: these messages.
        """
        state = self.delivering
        assert state is not None, "a sequence is being delivered"
        if self._outstanding is not None:
            state.min = self._outstanding[4]
            self._outstanding = None
        if processed:
            state.min = processed[-1][4]
        rest = self._rest
        if state.span is not None:
            self._ring_bytes -= sum(message[2] - message[1] for message in rest)
        rest.clear()
        self._end_delivery(state)

    def step(self) -> Message[T] | None:
        """Return the next message of the sequence that is being delivered.

        The call records that the message before is processed.

        Returns:
            None at its end, and if there is no such sequence.

        Raises:
            RuntimeError: a range must be read again first, see :attr:`replay`.
        """
        state = self.delivering
        if state is None:
            return None
        if self.replay is not None:
            raise RuntimeError(f"{self.replay} must be read again first; see offer()")
        if self._outstanding is not None:
            state.min = self._outstanding[4]
            self._outstanding = None
        rest = self._rest
        while rest:
            message = rest.popleft()
            if state.span is not None:
                self._ring_bytes -= message[2] - message[1]
            if state.min < message[4] <= state.max:
                state.begin = message[1]
                self._outstanding = message
                return message
        self._end_delivery(state)
        return None

    def _end_delivery(self, state: Producer[T]) -> None:
        last = self._last
        assert last is not None, "a sequence has an end"
        self.offsets[last[0]] = last[2]
        state.max = state.min
        state.begin = -1
        state.span = None
        self._pending.discard(state)
        self.delivering = self._last = None
