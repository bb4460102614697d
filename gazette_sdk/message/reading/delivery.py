"""Which messages of runs are delivered, and when: all as they come, or those that are committed.

A :class:`Delivery` is what a :class:`~gazette_sdk.message.reading.pump.Pump` asks: runs go in,
batches come out, and at any time it knows where a reader stands that has taken so many items of
the last batch. Pure.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import ClosedError, ConfigurationError
from gazette_sdk.message.flags import ACK_TXN
from gazette_sdk.message.reading.handed_out import Guard, Plain
from gazette_sdk.message.sequencing.checkpoint import Checkpoint
from gazette_sdk.message.sequencing.run import Run, ShortRun
from gazette_sdk.message.sequencing.sequencer import ReplayRange, Sequencer

__all__ = ["HORIZON_S", "RING_BYTES_MAX", "Batch", "Committed", "Delivery", "Select", "Uncommitted"]

T = TypeVar("T")

Batch: TypeAlias = Sequence[T] | Iterator[T]
"""What is delivered next: a sequence, of messages of one journal, or an iterator, which works on
each message as it is taken."""

Select: TypeAlias = Callable[[Sequence[T], npt.NDArray[np.intp]], Sequence[T]]
"""The items at these indices, of a run's items."""

HORIZON_S = 24 * 3600.0
"""State of a producer is forgotten when it was silent for so long, while others were not."""

RING_BYTES_MAX = 32 << 20
"""Frames of open transactions which are kept in memory. What is longer is read again."""

_PRUNE_EVERY = 1 << 16
"""Messages after which producers are looked through for those that are silent too long."""

_PLAIN_MIN = 16
"""Fewer plain messages than this are sequenced one by one."""

_STRETCH_MIN = 1
"""Messages to sequence one by one where a run was found not to be plain, before its rest is looked
at again. Doubled as long as that finds little, so that looking costs little."""

_STRETCH_MAX = 4096

_BLOCK = 256
"""Messages which are made at once, to be sequenced one by one."""


class Delivery(abc.ABC, Generic[T]):
    """Decides which messages are delivered, and knows where a reader stands."""

    @property
    @abc.abstractmethod
    def advice(self) -> str:
        """How to go on with another reader, for errors."""

    @abc.abstractmethod
    def add(self, run: Run[T]) -> None:
        """A journal's next messages, once :meth:`next` has nothing left."""

    @abc.abstractmethod
    def next(self) -> Batch[T] | None:
        """The next batch, once the one before was taken entirely.

        Returns:
            None if there is none before something is added.
        """

    @property
    def replay(self) -> ReplayRange | None:
        """What is to be read again before :meth:`next` goes on."""
        return None

    @abc.abstractmethod
    def add_replayed(self, run: Run[T]) -> None:
        """Messages of the range to be read again."""

    @abc.abstractmethod
    def end_replay(self) -> None:
        """All of that range was added, and delivered."""

    @abc.abstractmethod
    def open(self, journal: str, offset: int, *, is_new: bool) -> None:
        """A journal is read from ``offset`` on.

        Args:
            journal: its name.
            offset: where; -1 for the write head.
            is_new: the journal was created anew since it was read before.
        """

    @abc.abstractmethod
    def forget(self, journal: str) -> None:
        """A journal is gone, with all that was open in it."""

    @abc.abstractmethod
    def passed(self, journal: str, offset: int) -> None:
        """Reading has passed over content up to ``offset`` which holds no messages."""

    @abc.abstractmethod
    def checkpoint(self, left: int, horizon_s: float) -> Checkpoint:
        """Where a committed reader stands, see :meth:`Pump.checkpoint`."""

    @abc.abstractmethod
    def offsets(self, left: int) -> dict[str, int]:
        """From where on to read, see :meth:`Pump.offsets`."""

    @abc.abstractmethod
    def positions(self) -> dict[str, int]:
        """From where on this very delivery needs content, when nothing is left in it."""

    def finish(self) -> None:
        """Nothing more comes for now."""

    def lose(self) -> None:
        """Work was interrupted, and is in no known state any more."""


class Uncommitted(Delivery[T]):
    """Everything is delivered, as it stands in the journals.

    Args:
        offsets: where journals are begun, as far as it is known.
    """

    def __init__(self, offsets: Mapping[str, int]) -> None:
        self._offsets = dict(offsets)
        self._added: Run[T] | None = None
        self._given: Run[T] | None = None

    @property
    def advice(self) -> str:  # noqa: D102 - inherited
        return "with offsets=reader.offsets"

    def add(self, run: Run[T]) -> None:  # noqa: D102 - inherited
        self._added = run if len(run) else None

    def next(self) -> Batch[T] | None:  # noqa: D102
        given = self._given
        if given is not None:
            self._offsets[given.journal] = int(given.ends[-1])
        self._given, self._added = self._added, None
        return self._given.items if self._given is not None else None

    def add_replayed(self, run: Run[T]) -> None:  # noqa: ARG002, D102
        raise AssertionError("nothing is read again")

    def end_replay(self) -> None:  # noqa: D102
        raise AssertionError("nothing is read again")

    def open(self, journal: str, offset: int, *, is_new: bool) -> None:  # noqa: D102
        del is_new
        self._offsets[journal] = offset

    def forget(self, journal: str) -> None:  # noqa: D102
        self._offsets.pop(journal, None)

    def passed(self, journal: str, offset: int) -> None:  # noqa: D102
        self._offsets[journal] = offset

    def checkpoint(self, left: int, horizon_s: float) -> Checkpoint:  # noqa: ARG002, D102
        raise ConfigurationError(
            "an uncommitted reader has no checkpoint: use reader.offsets, or read with"
            " isolation='committed'"
        )

    def offsets(self, left: int) -> dict[str, int]:  # noqa: D102
        offsets = dict(self._offsets)
        if self._given is not None and len(self._given) > left:
            offsets[self._given.journal] = int(self._given.ends[len(self._given) - left - 1])
        return offsets

    def positions(self) -> dict[str, int]:  # noqa: D102
        return self.offsets(0)


def _at(items: Sequence[T], indices: npt.NDArray[np.intp]) -> Sequence[T]:
    return list(map(items.__getitem__, indices.tolist()))


class Committed(Delivery[T]):
    """What is committed is delivered, once, by a Sequencer.

    Plain parts of runs are delivered in bulk; others message by message, as they are taken.

    Args:
        sequencer: what says which messages are committed.
        offsets: where journals are begun, as far as it is known.
        acknowledgements: deliver acknowledgements, too.
        select: picks items out of a run's; for items that are no list.
    """

    def __init__(
        self,
        sequencer: Sequencer[T],
        *,
        offsets: Mapping[str, int] | None = None,
        acknowledgements: bool = False,
        select: Select[T] = _at,
    ) -> None:
        self._sequencer = sequencer
        self._acknowledgements = acknowledgements
        self._select = select
        for journal, offset in (offsets or {}).items():
            sequencer.offsets.setdefault(journal, offset)
        self._positions = dict(sequencer.offsets)
        self._run: Run[T] | None = None
        self._begun = 0
        self._plain: Plain | None = None
        self._replayed: deque[Run[T]] = deque()
        self._stretches: dict[str, int] = {}
        self._unpruned = 0
        self._is_lost = False
        self._failure: Exception | None = None

    @property
    def advice(self) -> str:  # noqa: D102
        if self._is_lost:
            return "with a checkpoint that was taken before"
        return "with checkpoint=reader.checkpoint()"

    # ------------------------------------------------------------------ input

    def add(self, run: Run[T]) -> None:  # noqa: D102
        if len(run):
            self._run, self._begun = run, 0
            self._unpruned += len(run)
            self._positions[run.journal] = run.end

    def add_replayed(self, run: Run[T]) -> None:  # noqa: D102
        self._replayed.append(run)

    def end_replay(self) -> None:  # noqa: D102
        self._sequencer.end_replay()

    def open(self, journal: str, offset: int, *, is_new: bool) -> None:  # noqa: D102
        if is_new:
            self._sequencer.forget(journal)
            self._sequencer.offsets[journal] = offset
        self._sequencer.offsets.setdefault(journal, offset)
        self._positions[journal] = offset

    def forget(self, journal: str) -> None:  # noqa: D102
        self._sequencer.forget(journal)
        self._sequencer.offsets[journal] = self._positions[journal]
        self._replayed.clear()

    def passed(self, journal: str, offset: int) -> None:  # noqa: D102
        self._sequencer.offsets[journal] = offset
        self._positions[journal] = offset

    @property
    def replay(self) -> ReplayRange | None:  # noqa: D102
        return self._sequencer.replay

    # ----------------------------------------------------------------- output

    def next(self) -> Batch[T] | None:  # noqa: D102
        if self._failure is not None:
            raise self._failure
        if self._plain is not None:
            assert self._run is not None
            self._sequencer.commit_run(self._run, self._begun, self._plain.stop)
            self._begun = self._plain.stop
            self._plain = None
        if self._replayed:
            # An iterator of this kind, unlike a generator, survives a consumer that breaks off.
            return chain(self._offered(self._replayed.popleft()))
        if self._sequencer.replay is not None:
            return None
        if self._sequencer.delivering:
            return chain(self._dequeued())
        if self._run is not None and self._begun >= len(self._run):
            self._run = None
        return None if self._run is None else self._next_of(self._run)

    def _next_of(self, run: Run[T]) -> Batch[T]:
        """What is delivered of a run of which some is left."""
        if self._unpruned >= _PRUNE_EVERY:
            self._unpruned = 0
            self._sequencer.checkpoint(HORIZON_S)
        if isinstance(run, ShortRun) and len(run) < _PLAIN_MIN:
            return chain(self._sequenced(run, len(run)))
        count = self._sequencer.plain_count(run, self._begun)
        stretch = self._stretches.get(run.journal, _STRETCH_MIN)
        if count >= min(_PLAIN_MIN, len(run) - self._begun):
            self._stretches.pop(run.journal, None)
            return self._plain_part(run, self._begun + count)
        # Little is gained by bulk work on so few.
        self._stretches[run.journal] = min(2 * stretch, _STRETCH_MAX)
        return chain(self._sequenced(run, stretch))

    def _plain_part(self, run: Run[T], stop: int) -> Sequence[T]:
        begin = self._begun
        visible: npt.NDArray[np.intp] | None = None
        if not self._acknowledgements:
            acknowledges = run.flags[begin:stop] == ACK_TXN
            if acknowledges.any():
                visible = np.flatnonzero(~acknowledges) + begin
        self._plain = Plain(begin, stop, visible)
        if visible is not None:
            return self._select(run.items, visible)
        return run.items if stop - begin == len(run) else run.items[begin:stop]

    def _sequenced(self, run: Run[T], stretch: int) -> Iterator[T]:
        """Sequence messages: at least ``stretch``, and up to where a transaction ends."""
        sequencer, hidden = self._sequencer, self._hidden
        queue, step = sequencer.queue, sequencer.step
        until = self._begun + stretch
        with Guard(self._fail):
            while self._begun < len(run):
                for message in run.messages(self._begun, self._begun + _BLOCK):
                    self._begun += 1
                    queue(message)
                    if sequencer.delivering:
                        if sequencer.replay is not None:
                            return
                        while (delivered := step()) is not None:
                            if delivered.flags != hidden:
                                yield delivered.item
                        if self._begun >= until:
                            return

    def _dequeued(self) -> Iterator[T]:
        """What of an ended sequence is still in memory."""
        step, hidden = self._sequencer.step, self._hidden
        with Guard(self._fail):
            while (message := step()) is not None:
                if message.flags != hidden:
                    yield message.item

    def _offered(self, run: Run[T]) -> Iterator[T]:
        """Messages which were read again."""
        offer, hidden = self._sequencer.offer, self._hidden
        with Guard(self._fail):
            for message in run.messages():
                if offer(message) and message.flags != hidden:
                    yield message.item

    @property
    def _hidden(self) -> int:
        """The flags of messages that are not delivered; -1 if there are none such."""
        return -1 if self._acknowledgements else ACK_TXN

    # --------------------------------------------------------- where it stands

    def offsets(self, left: int) -> dict[str, int]:  # noqa: D102
        checkpoint = self.checkpoint(left, 0)
        offsets = checkpoint.offsets
        for producer in checkpoint.producers:
            if producer.begin >= 0:
                offset = offsets.get(producer.journal, producer.begin)
                offsets[producer.journal] = min(offset, producer.begin)
        return offsets

    def finish(self) -> None:  # noqa: D102
        self._sequencer.flush_metrics()

    def positions(self) -> dict[str, int]:  # noqa: D102
        return dict(self._positions)

    def checkpoint(self, left: int, horizon_s: float) -> Checkpoint:  # noqa: D102
        if self._is_lost:
            assert self._failure is not None
            raise self._failure
        if self._plain is not None:
            assert self._run is not None
            taken = self._plain.taken(left)
            return self._sequencer.checkpoint_within(self._run, self._begun, taken, horizon_s)
        return self._sequencer.checkpoint(horizon_s, outstanding_is_processed=True)

    def _fail(self, error: BaseException) -> None:
        """An iterator which was handed out failed, or was interrupted at work."""
        if isinstance(error, Exception):
            self._failure = error
        else:
            self.lose()

    def lose(self) -> None:  # noqa: D102
        self._is_lost = True
        self._failure = ClosedError(
            "reading was interrupted within a message, and where it stood is not known; make"
            f" another reader {self.advice}"
        )
