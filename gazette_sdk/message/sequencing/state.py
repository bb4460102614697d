"""State of a sequencer: journals and their producers, and checkpoints of them.

See message sections 13.1 and 13.5.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from gazette_sdk.message.clock import clock_of_unix_ns
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from gazette_sdk.message.sequencing.checkpoint import Checkpoint, ProducerState
from gazette_sdk.message.sequencing.metrics import count_queued, count_replayed
from gazette_sdk.message.sequencing.run import Message
from gazette_sdk.message.uuid import PRODUCER_BYTES

__all__ = [
    "PRODUCERS_MAX",
    "Changes",
    "Journal",
    "Outcome",
    "Position",
    "Producer",
    "ReplayRange",
    "age_threshold",
    "checkpoint_of",
    "restore",
]

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
        end: offset behind its last byte. If it equals ``begin``, there is nothing to read.
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
    """

    __slots__ = ("begin", "id", "max", "min", "span")

    def __init__(self, producer: int, clock: int, begin: int = -1) -> None:
        self.id = producer
        self.min = clock
        self.max = clock
        self.begin = begin
        self.span: deque[Message[T]] | None = None


class Journal(Generic[T]):
    """State of one journal: its producers, and counts that metrics lack.

    Attributes:
        name: its name.
        producers: by id.
        counts: by outcome, messages with known flags.
        unknown: by flags and outcome, messages with unknown flags.
        uncounted: number of these messages.
        replayed: number of messages read again.
    """

    __slots__ = ("counts", "name", "producers", "replayed", "uncounted", "unknown")

    def __init__(self, name: str) -> None:
        self.name = name
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
                    count_queued(self.name, _FLAGS[outcome[0]], outcome, count)
                    self.counts[outcome] = 0
            for (flags, outcome), count in self.unknown.items():
                count_queued(self.name, flags, outcome, count)
            self.unknown.clear()
            self.uncounted = 0
        if self.replayed:
            count_replayed(self.name, self.replayed)
            self.replayed = 0


_FLAGS = {"o": OUTSIDE_TXN, "c": CONTINUE_TXN, "a": ACK_TXN}
"""Flags by the first letter of outcomes."""


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
