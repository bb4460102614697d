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

Messages that need no sequencing are committed in bulk, see :meth:`Sequencer.plain_count`.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN
from gazette_sdk.message.sequencing.checkpoint import Checkpoint
from gazette_sdk.message.sequencing.machine import COUNTS_MAX, RING_SIZE, SequencerMachine
from gazette_sdk.message.sequencing.plain_runs import (
    BLOCKED,
    count_outcomes,
    last_clocks,
    plain_prefix,
)
from gazette_sdk.message.sequencing.run import Message, Run
from gazette_sdk.message.sequencing.state import (
    PRODUCERS_MAX,
    Changes,
    Outcome,
    Position,
    Producer,
    ReplayRange,
    checkpoint_of,
)

__all__ = ["RING_SIZE", "Message", "Outcome", "ReplayRange", "Sequencer"]

T = TypeVar("T")

_PROBE = 256
"""Number of messages that are checked before a whole run is."""


class Sequencer(SequencerMachine[T]):
    """Sequencer: delivers each message once, and of transactions only acknowledged ones.

    Not synchronised: belongs to one reader. Arguments and attributes are those of
    :class:`~gazette_sdk.message.sequencing.machine.SequencerMachine`.
    """

    # ------------------------------------------------------------- checkpoints

    @property
    def has_pending(self) -> bool:
        """True if a sequence is open that began since the last checkpoint."""
        return bool(self._pending)

    def checkpoint(
        self, horizon_s: float = 0, *, outstanding_is_processed: bool = False
    ) -> Checkpoint:
        """Return the position: which messages were read and processed.

        Producers that have been silent for long are forgotten, and those above
        :data:`~gazette_sdk.message.sequencing.state.PRODUCERS_MAX` of a journal: old duplicates of
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
        """Position of the producer whose sequence is being delivered, behind the last message."""
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
        :func:`~gazette_sdk.message.sequencing.plain_runs.plain_prefix`. A call that finds few has
        checked a few hundred; queue some messages before the next one.

        Returns:
            The number of messages up to a boundary: none of them belongs to a transaction that
            goes on behind. 0 while a sequence is being delivered.
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
            stop: index behind the last, at a boundary that :meth:`plain_count` found.

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
            taken: index behind the last that is processed; anywhere in a plain part, also within
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
