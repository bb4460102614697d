"""Delivery: which messages of a reader are delivered, and when. Pure.

Runs of messages go in, batches of them come out. At any time a delivery returns the position of a
reader that has taken a part of the last batch. A :class:`Delivery` delivers all messages as they
are read, a :class:`CommittedDelivery` those that are committed, in lists with exact positions
within each list.

A reader's iterators sequence each message as it is taken. A shard takes messages in whole lists,
and may end a transaction after any of them: the sequencer then stands at the begin of the list, and
a checkpoint is computed for the messages that were taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import ClosedError, ConfigurationError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.runs import Message, Run, ShortRun
from gazette_sdk.message.sequencer import Position, ReplayRange, Sequencer
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN

T = TypeVar("T")

Batch: TypeAlias = Sequence[T] | Iterator[T]
"""Messages to deliver next: a sequence, of messages of one journal, or an iterator, which
sequences each message as it is taken."""

Select: TypeAlias = Callable[[Sequence[T], npt.NDArray[np.intp]], Sequence[T]]
"""Returns the items of a run at these indices."""

HORIZON_S = 24 * 3600.0
"""The state of a producer is forgotten when it was silent for so long, while others were not."""

RING_BYTES_MAX = 32 << 20
"""Limit of the frames of open transactions that are kept in memory. Others are read again."""

_PRUNE_EVERY = 1 << 16
"""Number of messages after which producers that are silent for too long are forgotten."""

_PLAIN_MIN = 16
"""Fewer plain messages than this are sequenced one by one."""

_BLOCK = 256
"""Number of messages to sequence one by one where a run is not plain, before its rest is checked
again, so that checks cost little."""


class Delivery(Generic[T]):
    """Delivery of all messages, as they are written in the journals.

    Args:
        offsets: offset at which each journal is read, as far as it is known.
    """

    def __init__(self, offsets: Mapping[str, int] | None = None) -> None:
        # By journal: the offset after all runs that were added.
        self._positions = dict(offsets or {})
        self._run: Run[T] | None = None
        self._delivered: Run[T] | None = None

    @property
    def advice(self) -> str:
        """Arguments with which another reader can read on, for errors."""
        return "with offsets=reader.offsets"

    @property
    def replay(self) -> ReplayRange | None:
        """Range that must be read again before :meth:`next` delivers more."""
        return None

    def open(self, journal: str, offset: int, *, is_new: bool) -> None:
        """Begin a journal.

        Args:
            journal: its name.
            offset: offset at which it is read; -1 for the write head.
            is_new: the journal was created anew since it was read before.
        """
        del is_new
        self._positions[journal] = offset

    def add(self, run: Run[T]) -> None:
        """Add a journal's next messages, once :meth:`next` has returned None."""
        if len(run):
            self._run = run

    def passed(self, journal: str, offset: int) -> None:
        """Record that content up to ``offset`` holds no messages."""
        self._positions[journal] = offset

    def leave_out(self, message: Message[None]) -> bool:
        """Take a message that cannot be decoded, if its transaction is not acknowledged yet.

        Returns:
            False if it is to be delivered now. Else it is read again if it is to be delivered.
        """
        del message
        return False

    def is_due(self, message: Message[None]) -> bool:
        """Return True if a message of the range :attr:`replay` is to be delivered now."""
        raise NotImplementedError

    def pass_replayed(self, message: Message[None]) -> None:
        """Take a message of the range :attr:`replay` that cannot be decoded, and that was due."""
        raise NotImplementedError

    def next(self) -> Batch[T] | None:
        """Return the next batch, once the one before was taken entirely.

        Returns:
            None if there is none before another run is added.
        """
        if self._delivered is not None:
            self._positions[self._delivered.journal] = self._delivered.end
        self._delivered, self._run = self._run, None
        return None if self._delivered is None else self._delivered.items

    def add_replayed(self, run: Run[T]) -> None:
        """Add messages of the range :attr:`replay`."""
        raise NotImplementedError

    def end_replay(self) -> None:
        """Continue after the range :attr:`replay`: all of it was added, and delivered."""
        raise NotImplementedError

    def forget(self, journal: str) -> None:
        """Forget a journal that was deleted, with its open transactions."""
        raise NotImplementedError

    def finish(self) -> None:
        """Record that no more runs come for now."""

    def lose(self) -> None:
        """Record that work was interrupted, so that the position is unknown."""

    def checkpoint(self, left: int, horizon_s: float) -> Checkpoint:
        """Return the position of a committed reader, see :meth:`BatchReader.checkpoint`."""
        del left, horizon_s
        raise ConfigurationError(
            "an uncommitted reader has no checkpoint: use reader.offsets, or read with"
            " isolation='committed'"
        )

    def offsets(self, left: int) -> dict[str, int]:
        """Return the offsets to read on from, see :meth:`BatchReader.offsets`."""
        offsets = dict(self._positions)
        run = self._delivered
        if run is not None and len(run) > left:
            offsets[run.journal] = int(run.ends[len(run) - left - 1])
        return offsets

    def positions(self) -> dict[str, int]:
        """Return the offsets at which this very delivery needs more content, by journal."""
        return self.offsets(0)


def chosen(items: Sequence[T], indices: npt.NDArray[np.intp]) -> Sequence[T]:
    """Return the items of a list at indices."""
    return list(map(items.__getitem__, indices.tolist()))


class _PlainPart(NamedTuple):
    """Plain part of a run that was delivered as one sequence.

    Attributes:
        stop: index after its last message in the run.
        visible: indices of the messages that were delivered; None for all.
    """

    stop: int
    visible: npt.NDArray[np.intp] | None

    def taken(self, left: int) -> int:
        """Return the index after the last message taken, and the hidden ones after that."""
        if self.visible is None:
            return self.stop - left
        return self.stop if left == 0 else int(self.visible[len(self.visible) - left])


class CommittedDelivery(Delivery[T]):
    """Delivery of committed messages, each once, by a Sequencer.

    Plain parts of runs are delivered in bulk; others message by message, as they are taken.

    Args:
        sequencer: decides which messages are committed.
        offsets: offset at which each journal is read, as far as it is known.
        acknowledgements: deliver acknowledgements, too.
        select: returns chosen items of a run; for items that are no list.
    """

    def __init__(
        self,
        sequencer: Sequencer[T],
        *,
        offsets: Mapping[str, int] | None = None,
        acknowledgements: bool = False,
        select: Select[T] = chosen,
    ) -> None:
        for journal, offset in (offsets or {}).items():
            sequencer.offsets.setdefault(journal, offset)
        super().__init__(sequencer.offsets)
        self._sequencer = sequencer
        self._acknowledgements = acknowledgements
        # Flags of the messages that are not delivered; -1 if there are none such.
        self._hidden = -1 if acknowledgements else ACK_TXN
        self._select = select
        # Of the run: its length, and the number of messages that were sequenced or committed.
        self._length = 0
        self._begun = 0
        self._plain: _PlainPart | None = None
        self._replayed: deque[Run[T]] = deque()
        self._unpruned = 0
        self._is_lost = False
        self._failure: Exception | None = None

    @property
    def advice(self) -> str:  # noqa: D102 - inherited, as others below
        if self._is_lost:
            return "with a checkpoint that was taken before"
        return "with checkpoint=reader.checkpoint()"

    @property
    def replay(self) -> ReplayRange | None:  # noqa: D102
        return self._sequencer.replay

    # ------------------------------------------------------------------ input

    def open(self, journal: str, offset: int, *, is_new: bool) -> None:  # noqa: D102
        if is_new:
            self._sequencer.forget(journal)
            self._sequencer.offsets[journal] = offset
        self._sequencer.offsets.setdefault(journal, offset)
        self._positions[journal] = offset

    def add(self, run: Run[T]) -> None:  # noqa: D102
        length = len(run)
        if length:
            self._run, self._length, self._begun = run, length, 0
            self._unpruned += length
            self._positions[run.journal] = run.end

    def passed(self, journal: str, offset: int) -> None:  # noqa: D102
        self._sequencer.offsets[journal] = offset
        self._positions[journal] = offset

    def leave_out(self, message: Message[None]) -> bool:  # noqa: D102
        if message.flags != CONTINUE_TXN or not message.clock:
            return False
        self._sequencer.leave_out(message)
        return True

    def is_due(self, message: Message[None]) -> bool:  # noqa: D102
        return self._sequencer.is_due(message)

    def pass_replayed(self, message: Message[None]) -> None:  # noqa: D102
        self._sequencer.offer(message)

    def add_replayed(self, run: Run[T]) -> None:  # noqa: D102
        self._replayed.append(run)

    def end_replay(self) -> None:  # noqa: D102
        self._sequencer.end_replay()

    def forget(self, journal: str) -> None:  # noqa: D102
        self._sequencer.forget(journal)
        self._sequencer.offsets[journal] = self._positions[journal]
        self._replayed.clear()

    def finish(self) -> None:  # noqa: D102
        self._sequencer.flush_metrics()

    # ----------------------------------------------------------------- output

    def next(self) -> Batch[T] | None:  # noqa: D102
        if self._failure is not None:
            raise self._failure
        run = self._run
        if self._plain is not None:
            assert run is not None
            self._sequencer.commit_run(run, self._begun, self._plain.stop)
            self._begun = self._plain.stop
            self._plain = None
        if self._replayed:
            return self._guarded(self._offered(self._replayed.popleft()))
        if self._sequencer.replay is not None:
            return None
        if self._sequencer.delivering is not None:
            return self._guarded(self._dequeued())
        if run is None:
            return None
        if self._begun >= self._length:
            self._run = None
            return None
        return self._next_of(run)

    def _next_of(self, run: Run[T]) -> Batch[T]:
        """Return the next batch of a run of which some is left."""
        if self._unpruned >= _PRUNE_EVERY:
            self._unpruned = 0
            self._sequencer.prune(HORIZON_S)
        if type(run) is ShortRun and self._length < _PLAIN_MIN:
            return self._sequence(run, self._length)
        count = self._sequencer.plain_count(run, self._begun)
        if count >= min(_PLAIN_MIN, self._length - self._begun):
            return self._plain_part(run, self._begun + count)
        # Bulk operations on so few messages gain little.
        return self._sequence(run, _BLOCK)

    def _sequence(self, run: Run[T], count: int) -> Batch[T]:
        """Return the next batch of a run whose next messages are sequenced one by one."""
        return self._guarded(self._sequenced(run, count))

    def _plain_part(self, run: Run[T], stop: int) -> Sequence[T]:
        begin = self._begun
        visible: npt.NDArray[np.intp] | None = None
        if not self._acknowledgements:
            acknowledges = run.flags[begin:stop] == ACK_TXN
            if acknowledges.any():
                visible = np.flatnonzero(~acknowledges) + begin
        self._plain = _PlainPart(stop, visible)
        if visible is not None:
            return self._select(run.items, visible)
        return run.items if stop - begin == self._length else run.items[begin:stop]

    def _guarded(self, messages: Iterator[Message[T]]) -> Iterator[T]:
        """Yield the items of messages that are not hidden; record an error, or an interrupt."""
        hidden = self._hidden
        try:
            for message in messages:
                if message.flags != hidden:
                    yield message.item
        except GeneratorExit:
            raise
        except Exception as error:
            self._failure = error
            raise
        except BaseException:
            self.lose()
            raise

    def _sequenced(self, run: Run[T], count: int) -> Iterator[Message[T]]:
        """Sequence at least ``count`` messages, and up to the end of a transaction."""
        sequencer = self._sequencer
        queue, step = sequencer.queue, sequencer.step
        until = self._begun + count
        while self._begun < self._length:
            for message in run.messages(self._begun, self._begun + _BLOCK):
                self._begun += 1
                queue(message)
                if sequencer.delivering is not None:
                    if sequencer.replay is not None:
                        return
                    while (delivered := step()) is not None:
                        yield delivered
                    if self._begun >= until:
                        return

    def _dequeued(self) -> Iterator[Message[T]]:
        """Yield the messages of an ended sequence that are still in memory."""
        return iter(self._sequencer.step, None)

    def _offered(self, run: Run[T]) -> Iterator[Message[T]]:
        """Yield messages that were read again."""
        return filter(self._sequencer.offer, run.messages())

    # --------------------------------------------------------------- position

    def checkpoint(self, left: int, horizon_s: float) -> Checkpoint:  # noqa: D102
        if self._is_lost:
            assert self._failure is not None
            raise self._failure
        if self._plain is not None:
            assert self._run is not None
            taken = self._plain.taken(left)
            return self._sequencer.checkpoint_within(self._run, self._begun, taken, horizon_s)
        return self._sequencer.checkpoint(horizon_s, outstanding_is_processed=True)

    def offsets(self, left: int) -> dict[str, int]:  # noqa: D102
        checkpoint = self.checkpoint(left, 0)
        offsets = checkpoint.offsets
        for producer in checkpoint.producers:
            if producer.begin >= 0:
                offset = offsets.get(producer.journal, producer.begin)
                offsets[producer.journal] = min(offset, producer.begin)
        return offsets

    def positions(self) -> dict[str, int]:  # noqa: D102
        return dict(self._positions)

    def lose(self) -> None:  # noqa: D102
        self._is_lost = True
        self._failure = ClosedError(
            "reading was interrupted within a message, and where it stood is not known; make"
            f" another reader {self.advice}"
        )


class ListDelivery(CommittedDelivery[T]):
    """Delivery of committed messages in lists: plain messages in bulk, other sequences one by one.

    A list may be empty. Its messages are processed when the next one is asked for.

    Args:
        sequencer: decides which messages are committed.
        offsets: offset at which each journal is read, as far as it is known.
        acknowledgements: deliver acknowledgements, too.
    """

    def __init__(
        self,
        sequencer: Sequencer[T],
        *,
        offsets: Mapping[str, int] | None = None,
        acknowledgements: bool = False,
    ) -> None:
        super().__init__(sequencer, offsets=offsets, acknowledgements=acknowledgements)
        # Messages of a run that are sequenced one by one.
        self._block: Iterator[Message[T]] = iter(())
        # Messages of the last list, if they are of one sequence.
        self._part: list[Message[T]] = []
        # Where their producer stood before them; None if it stands there still.
        self._before: Position | None = None

    @property
    def has_pending(self) -> bool:
        """A sequence is open that began since the last checkpoint."""
        return self._sequencer.has_pending

    def has_open(self, journal: str) -> bool:
        """Return True if a sequence of a journal is open."""
        return self._sequencer.has_open(journal)

    @property
    def read_through(self) -> dict[str, int]:
        """Offsets read through, by journal, without what the last list passes."""
        return dict(self._sequencer.offsets)

    # ----------------------------------------------------------------- output

    def next(self) -> Batch[T] | None:  # noqa: D102 - inherited, as others below
        sequencer = self._sequencer
        if self._part and self._before is None:
            sequencer.finish(self._part)
        self._part = []
        self._before = None
        if self._replayed:
            return self._read_again(self._replayed.popleft())
        if sequencer.replay is None and sequencer.delivering is not None:
            return self._upcoming()
        return super().next()

    def _next_of(self, run: Run[T]) -> Batch[T]:
        if length_hint(self._block):
            return self._next_sequence()
        return super()._next_of(run)

    def _sequence(self, run: Run[T], count: int) -> list[T]:
        self._block = iter(run.messages(self._begun, self._begun + count))
        return self._next_sequence()

    def _next_sequence(self) -> list[T]:
        """Queue messages up to the end of a sequence that is delivered then."""
        sequencer = self._sequencer
        for message in self._block:
            self._begun += 1
            sequencer.queue(message)
            if sequencer.delivering is not None:
                return [] if sequencer.replay is not None else self._upcoming()
        return []

    def _upcoming(self) -> list[T]:
        """Return the messages of the sequence that is delivered; it is passed by the next call."""
        self._part = self._sequencer.upcoming()
        if not self._part:  # duplicates, after which only its end is left
            self._sequencer.finish([])
        return self._visible(self._part)

    def _read_again(self, run: Run[T]) -> list[T]:
        """Return messages of the sequence that were read again."""
        self._before = self._sequencer.position
        self._part = [message for message in run.messages() if self._sequencer.offer(message)]
        return self._visible(self._part)

    def _visible(self, part: list[Message[T]]) -> list[T]:
        hidden = self._hidden
        return [message.item for message in part if message.flags != hidden]

    # --------------------------------------------------------------- position

    def checkpoint(self, left: int, horizon_s: float) -> Checkpoint:  # noqa: D102
        taken = self._taken(left)
        if taken is None:
            return super().checkpoint(left, horizon_s)
        sequencer = self._sequencer
        position = sequencer.position if self._before is None else self._before
        if taken:
            position = sequencer.position_behind(self._part[taken - 1])
        return sequencer.checkpoint_at(position, horizon_s)

    def _taken(self, left: int) -> int | None:
        """Return how many messages of a part are processed; None if there is no part."""
        part = self._part
        if not part:
            return None
        if left == 0:
            return len(part)
        visible = [at for at, message in enumerate(part) if message.flags != self._hidden]
        return visible[len(visible) - left]
