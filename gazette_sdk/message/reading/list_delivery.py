"""Delivery of committed messages in lists, with exact positions within each list. Pure.

A reader's iterators sequence each message as it is taken. A shard takes messages in whole lists,
and may end a transaction behind any of them: the sequencer then stands at the begin of the list,
and a checkpoint is computed for the messages that were taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import length_hint
from typing import TypeVar

from gazette_sdk.message.reading.delivery import Batch, CommittedDelivery
from gazette_sdk.message.sequencing.checkpoint import Checkpoint
from gazette_sdk.message.sequencing.run import Message, Run
from gazette_sdk.message.sequencing.sequencer import Sequencer
from gazette_sdk.message.sequencing.state import Position

__all__ = ["ListDelivery"]

T = TypeVar("T")


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
        if not self._part:  # duplicates, behind which only its end is left
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
