"""Sequencer of messages: selects those that are committed, each once (message section 13).

A pure machine: it reads nothing. Its caller queues the messages of any number of journals, each
journal's in order, and takes after each one the messages to deliver now::

    sequencer.queue(message)
    if sequencer.replay is not None:          # some are too old to be in memory
        for older in read(sequencer.replay):  # an empty range needs no reading
            if sequencer.offer(older):
                deliver(older.item)
        sequencer.end_replay()
    while (ready := sequencer.step()) is not None:
        deliver(ready.item)

The call for the next message records that the one before is processed: in a checkpoint taken
meanwhile it is not processed, unless the caller asks for that.

A producer has the clock up to which its messages are delivered (``min``), the greatest clock that
was queued (``max``), and perhaps an open sequence. Decision for its next message, by its clock:

===========  ==============  ====================  =======================================
message      clock           nothing open          a sequence is open
===========  ==============  ====================  =======================================
outside      up to min       outsideAlreadyAcked   outsideAlreadyAcked
outside      after min       outsideCommit         outsideCommit, discards the sequence
continue     up to min       continueAlreadyAcked  continueAlreadyAcked
continue     min to max      -                     continueRingClockLarger
continue     after max       continueBeginSpan     continueExtendSpan
acknowledge  up to min       ackRollback           ackRollback, discards the sequence
acknowledge  after min       ackEmpty              ackCommitRing or ackCommitReplay
===========  ==============  ====================  =======================================

A sequence is replayed if its first messages are not in the ring any more. The first message of a
producer is after its min, and a message with unknown flags is one outside of transactions. A
message of a transaction that cannot be decoded is left out of the ring, so that its sequence is
replayed (:meth:`Sequencer.leave_out`): the error is one only if the transaction is acknowledged.

Messages that need no sequencing (outside of transactions in the order of their clocks, and whole
transactions without messages of other producers between) are found by operations on arrays, and
committed in bulk: see :meth:`Sequencer.plain_count`. See message sections 13.1 to 13.5.
"""

from __future__ import annotations

import enum
import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter

from gazette_sdk.errors import FramingError
from gazette_sdk.message.checkpoint import Checkpoint, ProducerState
from gazette_sdk.message.runs import Message, Run
from gazette_sdk.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    PRODUCER_BYTES,
    clock_of_unix_ns,
    flags_text,
)
from gazette_sdk.protocol.names import strip_meta

T = TypeVar("T")

PRODUCERS_MAX = 1 << 16
"""Limit of a journal's producers without an open transaction, beside those with one."""

CLOCK_AHEAD_MAX_S = 300
"""Seconds by which a producer's clock may be ahead of this machine's, and age the others."""


class Outcome(enum.StrEnum):
    """Outcome of a queued message (message section 13.2)."""

    OUTSIDE_ALREADY_ACKED = "outsideAlreadyAcked"
    OUTSIDE_COMMIT = "outsideCommit"
    CONTINUE_ALREADY_ACKED = "continueAlreadyAcked"
    CONTINUE_RING_CLOCK_LARGER = "continueRingClockLarger"
    CONTINUE_BEGIN_SPAN = "continueBeginSpan"
    CONTINUE_EXTEND_SPAN = "continueExtendSpan"
    ACK_ROLLBACK = "ackRollback"
    ACK_EMPTY = "ackEmpty"
    ACK_COMMIT_REPLAY = "ackCommitReplay"
    ACK_COMMIT_RING = "ackCommitRing"


class ReplayRange(NamedTuple):
    """Range of a journal that is to be read again.

    Attributes:
        journal: the journal.
        begin: offset of its first byte.
        end: offset after its last byte. If it equals ``begin``, there is nothing to read.
    """

    journal: str
    begin: int
    end: int


class Producer(Generic[T]):
    """State of one producer in one journal.

    Attributes:
        id: its id, as a number.
        min: clock up to which all messages are delivered, or rolled back.
        max: largest clock queued of the open sequence; ``min`` if there is none.
        begin: offset of the open sequence's first undelivered message; -1 if there is none.
        span: the open sequence's messages that are still in the ring.
        assumed: ``min`` of a producer of which nothing is delivered yet: before its first message.
    """

    __slots__ = ("assumed", "begin", "id", "max", "min", "span")

    def __init__(self, producer: int, clock: int, begin: int = -1) -> None:
        self.id = producer
        self.min = clock
        self.max = clock
        self.begin = begin
        self.span: deque[Message[T]] | None = None
        self.assumed = -1


class Journal(Generic[T]):
    """State of one journal: its producers, and counts that metrics lack.

    Attributes:
        name: its name.
        label: its name without metadata, for metrics.
        producers: by id.
        counts: by outcome, messages with known flags.
        unknown: by flags and outcome, messages with unknown flags.
        uncounted: number of these messages.
        replayed: number of messages read again.
    """

    __slots__ = ("counts", "label", "name", "producers", "replayed", "uncounted", "unknown")

    def __init__(self, name: str) -> None:
        self.name = name
        self.label = strip_meta(name)
        self.producers: dict[int, Producer[T]] = {}
        self.counts: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.unknown: dict[tuple[int, Outcome], int] = {}
        self.uncounted = 0
        self.replayed = 0

    def flush_counts(self) -> None:
        """Add the counts to the metrics."""
        if self.uncounted:
            for outcome, count in self.counts.items():
                if count:
                    _count_queued(self.label, _LABELS[outcome[0]], outcome, count)
                    self.counts[outcome] = 0
            for (flags, outcome), count in self.unknown.items():
                _count_queued(self.label, _label_of(flags), outcome, count)
            self.unknown.clear()
            self.uncounted = 0
        if self.replayed:
            _count_replayed(self.label, self.replayed)
            self.replayed = 0


_QUEUED = Counter(
    "gazette_sequencer_queued",
    "Messages sequenced, by their flags and by what became of them.",
    ["journal", "flag", "outcome"],
)
_REPLAYED = Counter(
    "gazette_sequencer_replay", "Messages read again to deliver a sequence.", ["journal"]
)

_UNKNOWN_FLAGS_MAX = 16
"""Limit of unknown flags with a label of their own: journals may hold any flags."""

_unknown_flags: set[int] = set()


def _label_of(flags: int) -> str:
    """Return the label of unknown flags."""
    label = flags_text(flags)
    if label.startswith("Flags("):
        if len(_unknown_flags) < _UNKNOWN_FLAGS_MAX:
            _unknown_flags.add(flags)
        if flags not in _unknown_flags:
            return "Flags(other)"
    return label


def _count_queued(journal: str, label: str, outcome: str, count: int) -> None:
    """Count messages that were sequenced."""
    _QUEUED.labels(journal, label, outcome).inc(count)


def _count_replayed(journal: str, count: int) -> None:
    """Count messages that were read again."""
    _REPLAYED.labels(journal).inc(count)


_LABELS = {
    "o": flags_text(OUTSIDE_TXN),
    "c": flags_text(CONTINUE_TXN),
    "a": flags_text(ACK_TXN),
}
"""Labels of flags by the first letter of outcomes."""


class Position(NamedTuple):
    """Position of a producer: ``min``, ``max`` and ``begin`` as in :class:`Producer`."""

    min: int
    max: int
    begin: int


Changes: TypeAlias = Mapping[str, Mapping[int, Position]]
"""By journal and producer: positions that differ from those the sequencer holds."""


def restore(producers: Iterable[ProducerState]) -> dict[str, Journal[T]]:
    """Return the journals of a checkpoint. The messages of open sequences are not in memory."""
    journals: dict[str, Journal[T]] = {}
    for name, producer, last_ack, begin in producers:
        number = int.from_bytes(producer, "big")
        if name not in journals:
            journals[name] = Journal(name)
        journals[name].producers[number] = Producer(number, last_ack, begin)
    return journals


def checkpoint_of(
    journals: Mapping[str, Journal[T]],
    offsets: Mapping[str, int],
    changes: Changes,
    *,
    horizon_s: float,
    unix_ns: int,
    keep: Producer[T] | None,
) -> tuple[Checkpoint, list[tuple[Journal[T], Producer[T]]]]:
    """Return a checkpoint, and the producers that it drops.

    Producers with an open transaction are never dropped: it would be lost. Of the others a journal
    keeps those that are not older than the horizon, and :data:`PRODUCERS_MAX` at most. The horizon
    counts from the journal's newest clock, but not from one that is ahead of this machine's.

    Args:
        journals: all journals.
        offsets: by journal, the offset read through.
        changes: positions of producers that replace theirs.
        horizon_s: seconds of a journal's newest producer after which a producer is dropped; 0 for
            never.
        unix_ns: time of this machine, in nanoseconds since 1970.
        keep: a producer that is not dropped: its sequence is being delivered.
    """
    states: list[ProducerState] = []
    dropped: list[tuple[Journal[T], Producer[T]]] = []
    for name in {**journals, **changes}:
        journal: Journal[T] = journals.get(name) or Journal(name)
        changed = changes.get(name, {})
        positions = {
            number: Position(known.min, known.max, known.begin)
            for number, known in journal.producers.items()
        }
        positions.update(changed)
        closed = {
            number: position.min
            for number, position in positions.items()
            if position.begin == -1 and (keep is None or journal.producers.get(number) is not keep)
        }
        threshold = 0
        if horizon_s > 0 and positions:
            newest = max(position.min for position in positions.values())
            threshold = age_threshold(newest, horizon_s, unix_ns)
        forgotten = _forgotten(closed, threshold, _clock_max(unix_ns))
        for number, position in positions.items():
            if number not in forgotten:
                states.append(
                    ProducerState(
                        name, number.to_bytes(PRODUCER_BYTES, "big"), position.min, position.begin
                    )
                )
            elif number not in changed:
                dropped.append((journal, journal.producers[number]))
    return Checkpoint(dict(offsets), states), dropped


def age_threshold(newest: int, horizon_s: float, unix_ns: int) -> int:
    """Return the least clock that is not too old.

    Args:
        newest: newest clock of the journal.
        horizon_s: age above which a clock is too old, in seconds.
        unix_ns: time of this machine, in nanoseconds since 1970.
    """
    # Saturating: the subtraction has no 64 bits to wrap around in.
    return min(newest, _clock_max(unix_ns)) - ((round(horizon_s * 1_000_000_000) // 100) << 4)


def _clock_max(unix_ns: int) -> int:
    """Return the limit of clocks that are not ahead of this machine's."""
    return clock_of_unix_ns(unix_ns + CLOCK_AHEAD_MAX_S * 1_000_000_000)


def _forgotten(closed: Mapping[int, int], threshold: int, clock_max: int) -> set[int]:
    """Return the producers of a journal to drop.

    Args:
        closed: clocks of the producers without an open transaction.
        threshold: least clock of those that are not too old.
        clock_max: limit of clocks that are not ahead of this machine's.
    """
    forgotten = {number for number, clock in closed.items() if clock < threshold}
    excess = len(closed) - len(forgotten) - PRODUCERS_MAX
    if excess > 0:
        # Clocks that are ahead never age, so they are dropped first.
        forgotten.update(
            heapq.nsmallest(
                excess,
                closed.keys() - forgotten,
                key=lambda number: (closed[number] <= clock_max, closed[number]),
            )
        )
    return forgotten


Producers = npt.NDArray[np.uint64]
Clocks = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]

BLOCKED = 1 << 64
"""Floor of a producer none of whose messages is plain: clocks have 64 bits."""


def plain_prefix(
    producers: Producers,
    clocks: Clocks,
    flags: Flags,
    floor_of: Callable[[int], int],
    *,
    more: bool = False,
) -> int:
    """Return the number of messages, from the first on, that are plain.

    Plain are messages without UUID and messages outside of transactions (unknown flags count as
    such), and complete transactions without messages of other producers between; each producer's
    clocks must ascend.

    Args:
        producers: their producers.
        clocks: their clocks; 0 where a message has no UUID.
        flags: their flags.
        floor_of: returns the clock that a producer's next message must exceed; -1 if there is
            none, :data:`BLOCKED` if it has an open sequence.
        more: other messages follow. All are counted if only the end of a transaction is missing.

    Returns:
        The number of messages up to a boundary: never within a transaction.
    """
    count = len(clocks)
    if not count:
        return 0
    if not flags.any():
        return _ascending_prefix(producers, clocks, floor_of)
    named = clocks != 0
    continues = (flags == CONTINUE_TXN) & named
    # A message of a transaction must be followed by one of the same transaction.
    joined = (continues | ((flags == ACK_TXN) & named))[1:] & (producers[1:] == producers[:-1])
    torn = continues.copy()
    torn[:-1] &= ~joined
    torn[-1] &= not more
    cut = _first(torn)
    cut = min(cut, _ascending_prefix(producers[:cut], clocks[:cut], floor_of))
    return cut if cut == count else _begin_of_transaction(continues, cut)


def last_clocks(producers: Producers, clocks: Clocks) -> list[tuple[int, int]]:
    """Return each producer and its last clock, of messages whose clocks ascend per producer.

    Messages without UUID are ignored.
    """
    if not clocks.all():
        named = clocks.nonzero()[0]
        producers, clocks = producers[named], clocks[named]
    if not len(clocks):
        return []
    if _is_single(producers):
        return [(int(producers[0]), int(clocks[-1]))]
    order = producers.argsort(kind="stable")
    grouped = producers[order]
    last = np.append((grouped[1:] != grouped[:-1]).nonzero()[0], len(order) - 1)
    found = order[last]
    return list(zip(producers[found].tolist(), clocks[found].tolist(), strict=True))


def count_outcomes(clocks: Clocks, flags: Flags) -> list[tuple[int, Outcome, int]]:
    """Return the outcomes of plain messages: flags, outcome, and number of messages."""
    if not flags.any():
        return [(OUTSIDE_TXN, Outcome.OUTSIDE_COMMIT, len(flags))]
    flags = np.where(clocks == 0, np.uint16(OUTSIDE_TXN), flags)
    continues = flags == CONTINUE_TXN
    acknowledges = flags == ACK_TXN
    extends = int((continues[1:] & continues[:-1]).sum())
    commits = int((acknowledges[1:] & continues[:-1]).sum())
    counted = [
        (CONTINUE_TXN, Outcome.CONTINUE_BEGIN_SPAN, int(continues.sum()) - extends),
        (CONTINUE_TXN, Outcome.CONTINUE_EXTEND_SPAN, extends),
        (ACK_TXN, Outcome.ACK_COMMIT_RING, commits),
        (ACK_TXN, Outcome.ACK_EMPTY, int(acknowledges.sum()) - commits),
    ]
    values, counts = np.unique(flags[~(continues | acknowledges)], return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        counted.append((value, Outcome.OUTSIDE_COMMIT, count))
    return [row for row in counted if row[2]]


def _ascending_prefix(producers: Producers, clocks: Clocks, floor_of: Callable[[int], int]) -> int:
    """Return the number of messages, from the first on, whose clocks ascend per producer."""
    if not clocks.all():
        named = clocks.nonzero()[0]
        cut = _ascending_prefix(producers[named], clocks[named], floor_of) if len(named) else 0
        return int(named[cut]) if cut < len(named) else len(clocks)
    if not len(clocks):
        return 0
    if _is_single(producers):
        if int(clocks[0]) <= floor_of(int(producers[0])):
            return 0
        return _first(clocks[1:] <= clocks[:-1]) + 1
    order = producers.argsort(kind="stable")
    producers, clocks = producers[order], clocks[order]
    heads = np.empty(len(order), np.bool_)
    heads[0] = True
    np.not_equal(producers[1:], producers[:-1], out=heads[1:])
    bad = np.zeros(len(order), np.bool_)
    np.less_equal(clocks[1:], clocks[:-1], out=bad[1:])
    bad &= ~heads
    at = heads.nonzero()[0]
    for position, producer, clock in zip(
        at.tolist(), producers[at].tolist(), clocks[at].tolist(), strict=True
    ):
        if clock <= floor_of(producer):
            bad[position] = True
    return int(order[bad].min()) if bad.any() else len(order)


def _begin_of_transaction(continues: Mask, index: int) -> int:
    """Return the begin of the transaction to which the message at ``index`` would belong."""
    others = (~continues[:index]).nonzero()[0]
    return int(others[-1]) + 1 if len(others) else 0


def _first(mask: Mask) -> int:
    """Return the index of the first that is true; the length, if none is."""
    if not len(mask):
        return 0
    index = int(mask.argmax())
    return index if mask[index] else len(mask)


def _is_single(producers: Producers) -> bool:
    return bool(producers[0] == producers[-1] and (producers == producers[0]).all())


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


class RareLog:
    """Rate-limited log of conditions that every message may have.

    Args:
        log: the logger.
        interval_s: seconds between two lines of one kind. The next line has the number of those
            that were left out.
    """

    def __init__(self, log: logging.Logger, interval_s: float = 10.0) -> None:
        self._log = log
        self._interval_s = interval_s
        self._silent: dict[str, tuple[float, int]] = {}

    def __call__(self, level: int, text: str, *args: object) -> None:
        """Log a line of the kind ``text``, filled with ``args``."""
        now = time.monotonic()
        until, left_out = self._silent.get(text, (now, 0))
        if now < until:
            self._silent[text] = until, left_out + 1
            return
        self._silent[text] = now + self._interval_s, 0
        if left_out:
            self._log.log(level, text + " (and %d more like this)", *args, left_out)
        else:
            self._log.log(level, text, *args)


_PROBE = 256
"""Number of messages that are checked before a whole run is."""


class Sequencer(Generic[T]):
    """Sequencer: delivers each message once, and of transactions only acknowledged ones.

    Not synchronised: belongs to one reader.

    Args:
        ring_size: number of messages that are kept, over all journals and producers. Sequences
            that began longer ago are read again when they are acknowledged. At least 1.
        ring_bytes_max: limit of the frames that are kept, beside the newest; None for no limit
            but ``ring_size``.
        checkpoint: position to continue from.
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

    def leave_out(self, message: Message[Any]) -> None:
        """Take the next message of a journal without its item. It is one of an open transaction.

        If the transaction is acknowledged, it is read again from its begin, with this message.
        """
        if self.delivering is not None:
            self._refuse_while_delivering()
        name, begin, _, producer, clock, _, _ = message
        journal = self._journals.get(name) or self._begin_journal(name, begin)
        state = journal.producers.get(producer) or self._begin_producer(journal, producer, clock)
        if clock <= state.max:
            return  # a duplicate
        self._drop_span(state)
        state.max = clock
        if state.begin == -1:
            state.begin = begin
            self._pending.add(state)

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
            if clock < state.min != state.assumed:  # else reading began within what is rolled back
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
            "%s: a message after offset %d has unknown flags %#x; it is read as one outside of"
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
        state.assumed = state.min
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

    def is_due(self, message: Message[Any]) -> bool:
        """Return True if :meth:`offer` would deliver a message with a UUID; records nothing."""
        state = self.delivering
        if state is None:
            return False
        least = state.min if self._outstanding is None else self._outstanding[4]
        return message.producer == state.id and least < message.clock <= state.max

    def offer(self, message: Message[Any]) -> bool:
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
        """Continue with :meth:`step`, after the range :attr:`replay`.

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

    # ------------------------------------------------------------- checkpoints

    @property
    def has_pending(self) -> bool:
        """True if a sequence is open that began since the last checkpoint."""
        return bool(self._pending)

    def has_open(self, journal: str) -> bool:
        """Return True if a sequence of a journal is open."""
        known = self._journals.get(journal)
        return known is not None and any(each.begin != -1 for each in known.producers.values())

    def checkpoint(
        self, horizon_s: float = 0, *, outstanding_is_processed: bool = False
    ) -> Checkpoint:
        """Return the position: which messages were read and processed.

        Producers that have been silent for long are forgotten, and those above
        :data:`~gazette_sdk.message.sequencer.PRODUCERS_MAX` of a journal: old duplicates of
        theirs would be delivered again. Those with an open transaction are kept, and the producer
        whose sequence is being delivered.

        Args:
            horizon_s: age at which a producer is forgotten, in seconds; 0 for never. It counts
                from the newest clock of its journal, or from this machine's where that is ahead.
            outstanding_is_processed: True if the message that was delivered last is processed.
        """
        if outstanding_is_processed and self.delivering is not None:
            return self.checkpoint_at(self.position, horizon_s)
        return self._checkpoint(self.offsets, {}, horizon_s)

    def checkpoint_at(self, position: Position, horizon_s: float = 0) -> Checkpoint:
        """Return the position within the sequence that is being delivered.

        Args:
            position: where its producer stands, see :meth:`position_behind`.
            horizon_s: as of :meth:`checkpoint`.
        """
        state, last = self.delivering, self._last
        assert state is not None, "a sequence is being delivered"
        assert last is not None, "a sequence has an end"
        changes: Changes = {last.journal: {state.id: position}} if last.clock else {}
        offsets = self.offsets
        if position.begin == -1:
            offsets = {**offsets, last.journal: last.end}
        return self._checkpoint(offsets, changes, horizon_s)

    @property
    def position(self) -> Position:
        """Position of the producer whose sequence is being delivered, after the last message."""
        state, out = self.delivering, self._outstanding
        assert state is not None, "a sequence is being delivered"
        if out is None:
            return Position(state.min, state.max, state.begin)
        return self.position_behind(out)

    def position_behind(self, out: Message[T]) -> Position:
        """Return the same as :attr:`position`, once a message of the sequence is processed."""
        state = self.delivering
        assert state is not None, "a sequence is being delivered"
        if self.replay is not None:
            return Position(out.clock, state.max, out.end)
        for message in self._rest:
            if out.clock < message.clock <= state.max:
                return Position(out.clock, state.max, message.begin)
        return Position(out.clock, out.clock, -1)

    def _checkpoint(
        self, offsets: dict[str, int], changes: Changes, horizon_s: float
    ) -> Checkpoint:
        found = self._forget_old(offsets, changes, horizon_s)
        self._pending.clear()
        return found

    def prune(self, horizon_s: float) -> None:
        """Forget producers as :meth:`checkpoint` does. Sequences that are open stay pending."""
        self._forget_old(self.offsets, {}, horizon_s)

    def _forget_old(
        self, offsets: dict[str, int], changes: Changes, horizon_s: float
    ) -> Checkpoint:
        found, dropped = checkpoint_of(
            self._journals,
            offsets,
            changes,
            horizon_s=horizon_s,
            unix_ns=self._time_ns(),
            keep=self.delivering,
        )
        for journal, producer in dropped:
            del journal.producers[producer.id]
        for journal in self._journals.values():
            if len(journal.producers) > 2 * PRODUCERS_MAX:
                self._rarely(
                    logging.WARNING,
                    "%s: more than %d producers have an open transaction, and a reader remembers"
                    " each until it is acknowledged; find the publishers that die within"
                    " transactions",
                    journal.name,
                    PRODUCERS_MAX,
                )
        self.flush_metrics()
        return found

    def flush_metrics(self) -> None:
        """Update the metrics, which are updated once in a while only."""
        for journal in self._journals.values():
            journal.flush_counts()

    def forget(self, journal: str) -> None:
        """Forget a journal that is read no more. A sequence of it that is being delivered ends."""
        if self._last is not None and self._last.journal == journal:
            self.delivering = self._last = self._outstanding = self.replay = None
            self._single.clear()
        self.offsets.pop(journal, None)
        known = self._journals.pop(journal, None)
        if known is not None:
            known.flush_counts()
            for producer in known.producers.values():
                self._drop_span(producer)
                self._pending.discard(producer)

    # -------------------------------------------------------------- plain runs

    def plain_count(self, run: Run[T], start: int = 0) -> int:
        """Return the number of messages of a run, from ``start`` on, that are plain.

        All of these are delivered, in their order, without keeping any: no sequence of their
        producers is open, see
        :func:`~gazette_sdk.message.sequencer.plain_prefix`. A call that finds few has
        checked a few hundred; queue some messages before the next one.

        Returns:
            The number of messages up to a boundary: none of them belongs to a transaction that
            continues after. 0 while a sequence is being delivered.
        """
        if self.delivering is not None or start >= len(run):
            return 0
        journal = self._journals.get(run.journal)
        known: dict[int, Producer[T]] = {} if journal is None else journal.producers
        clock = int(run.clocks[start])
        producer = known.get(int(run.producers[start])) if clock else None
        if producer is not None and (producer.begin != -1 or clock <= producer.min):
            return 0

        def floor_of(number: int) -> int:
            producer = known.get(number)
            if producer is None:
                return -1
            return BLOCKED if producer.begin != -1 else producer.min

        def count_to(stop: int) -> int:
            part = slice(start, stop)
            producers, clocks, flags = run.producers[part], run.clocks[part], run.flags[part]
            return plain_prefix(producers, clocks, flags, floor_of, more=stop < len(run))

        # A run that is far from plain is recognised by its beginning.
        probe = min(start + _PROBE, len(run))
        count = count_to(probe)
        return count_to(len(run)) if start + count == probe < len(run) else count

    def commit_run(self, run: Run[T], start: int, stop: int) -> None:
        """Commit plain messages, as if each was queued and taken by :meth:`step`.

        Args:
            run: the run.
            start: index of the first.
            stop: index after the last, at a boundary that :meth:`plain_count` found.

        Raises:
            RuntimeError: a sequence is being delivered.
        """
        if self.delivering is not None:
            self._refuse_while_delivering()
        if start >= stop:
            return
        part = slice(start, stop)
        journal = self._journals.get(run.journal)
        if journal is None:
            journal = self._begin_journal(run.journal, int(run.begins[start]))
        for number, clock in last_clocks(run.producers[part], run.clocks[part]):
            producer = journal.producers.get(number)
            if producer is None:
                journal.producers[number] = Producer(number, clock)
            else:
                assert producer.begin == -1, "producers of plain runs have no open sequence"
                producer.min = producer.max = clock
        self.offsets[run.journal] = int(run.ends[stop - 1])
        for flags, outcome, count in count_outcomes(run.clocks[part], run.flags[part]):
            if flags > ACK_TXN:
                self._count_unknown(journal, int(run.begins[start]), flags, outcome, count)
            else:
                journal.counts[outcome] += count
                journal.uncounted += count
        if journal.uncounted >= COUNTS_MAX:
            journal.flush_counts()

    def checkpoint_within(
        self, run: Run[T], start: int, taken: int, horizon_s: float = 0
    ) -> Checkpoint:
        """Return the position as :meth:`checkpoint`, where part of a plain run was processed.

        Args:
            run: the run.
            start: index of the first of its messages that was not committed yet.
            taken: index after the last that is processed; anywhere in a plain part, also within
                a transaction.
            horizon_s: as of :meth:`checkpoint`.

        Raises:
            RuntimeError: a sequence is being delivered.
        """
        if self.delivering is not None:
            self._refuse_while_delivering()
        offsets = dict(self.offsets)
        if start >= taken:
            if start < len(run) and offsets.get(run.journal, -1) < 0:
                offsets[run.journal] = int(run.begins[start])
            return self._checkpoint(offsets, {}, horizon_s)
        positions = {
            number: Position(clock, clock, -1)
            for number, clock in last_clocks(run.producers[start:taken], run.clocks[start:taken])
        }
        passed = taken - 1
        if run.flags[passed] == CONTINUE_TXN and run.clocks[passed]:
            # The acknowledgement must be read again, and the messages before it.
            acknowledgement = taken + int((run.flags[taken:] == ACK_TXN).argmax())
            positions[int(run.producers[passed])] = Position(
                int(run.clocks[passed]), int(run.clocks[acknowledgement]), int(run.begins[taken])
            )
            passed = acknowledgement - 1
        offsets[run.journal] = int(run.ends[passed])
        return self._checkpoint(offsets, {run.journal: positions}, horizon_s)
