"""Consumption of a transaction's messages and timers: the calls of its hooks.

``def`` hooks are called on a worker thread, ``async def`` hooks on the event loop
(`async_consume`). The loop of :meth:`MessageConsumer.consume` is the hot path: per message no lock,
no ``await``, and no new object but the envelope.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gazette_sdk.errors import UserCodeError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.uuid import Envelope, parse_raw_uuid, unix_100ns_of_clock
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.stores.base import ExpiringStore, UndoingStore, ValidatingStore
from gazette_sdk.shard.transaction.failure import (
    BadRecords,
    HandlerFailedError,
    HookFailedError,
    is_of_record,
)
from gazette_sdk.shard.transaction.machine import Action, CommitStep, Current, TransactionMachine
from gazette_sdk.shard.transaction.tables import Table
from gazette_sdk.shard.transaction.timers import (
    CLOCK_CHECK_S,
    SECOND_US,
    ExpiryTimer,
    Timer,
    WindowTimer,
)
from gazette_sdk.shard.transaction.transaction import (
    DeferError,
    InputLike,
    OutputLike,
    RecorderLike,
    Transaction,
)
from gazette_sdk.shard.transaction.windows import Window
from gazette_sdk.user_code import check_done

LOOK_PERIOD_S = 0.2
"""Time between two looks at the write heads of sources, for timers of event time."""

LOOK_MIN_S = 0.001
"""Least wait for such a look."""

FULL_CHECK_COUNT = 100
"""Timers that fire between two looks at the fullness of the store."""


class Counts(NamedTuple):
    """Numbers of what a shard has consumed.

    Attributes:
        messages: messages consumed, also those that were left out.
        timers: timers fired.
        left_out: records that were left out.
        letters: dead letters published.
        late: messages that came too late for a window, for each window.
    """

    messages: int = 0
    timers: int = 0
    left_out: int = 0
    letters: int = 0
    late: int = 0

    def since(self, earlier: Counts) -> Counts:
        """Return what was consumed since an earlier time."""
        return Counts(*map(operator.sub, self, earlier))


OnStep = Callable[[CommitStep], None]
"""Function that is called at each step of a commit, on the thread that does the step."""


@dataclass(frozen=True, slots=True)
class Slice:
    """End of a stretch of consuming.

    Attributes:
        more: messages are left, or the next look at the input may find some.
        closes: the transaction is to consume nothing more.
        more_timers: it has timers to fire.
    """

    more: bool
    closes: bool = False
    more_timers: bool = False


class Due(NamedTuple):
    """Hook that a timer calls.

    Attributes:
        name: of the hook.
        hook: the hook.
        argument: what it gets besides the transaction.
    """

    name: str
    hook: Callable[[Transaction[Any], Any], Any]
    argument: Timer | Window[Any] | ExpiryTimer


@dataclass(frozen=True, slots=True)
class PreparedCommit:
    """Transaction that is committed locally, and not yet durable.

    Attributes:
        checkpoint: position after it, with its acknowledgements.
        contents: appends to the recovery log, in order.
    """

    checkpoint: Checkpoint
    contents: Sequence[bytes]


class MessageConsumer:
    """Consumer of a shard's messages, for one transaction after the other.

    Args:
        application: the hooks.
        txn: the transaction that they get.
        output: where it publishes.
        machine: the machine, which gets what was consumed.
        recorder: recorder of the store's file changes; None without a recovery log.
        bad: records that are left out.
        on_step: called at each step of a commit.
        handler: called for each message; None for the application's.
        wall_clock: returns Unix seconds.

    Attributes:
        handler: called for each message.
        input: where messages come from.
        rest: messages of the last batch that are not consumed.
        table: table that is made of the last batch; None if the handler consumes it.
        has_timers: the application has timers, or an entry of the store may expire.
        ends_input: read nothing more of the input: it has ended once the last batch is consumed.
        polled_count: messages that the input has returned so far.
        fired_count: timers that fired so far.
        late_count: messages that came too late for a window so far, for each window.
        preparing_s: time that commits took to prepare, in seconds, since it was set to 0.
    """

    def __init__(
        self,
        application: Application[Any, Any],
        txn: Transaction[Any],
        output: OutputLike,
        machine: TransactionMachine,
        *,
        recorder: RecorderLike | None,
        bad: BadRecords,
        on_step: OnStep,
        handler: Callable[[Transaction[Any], Any], Any] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.application = application
        self.handler = handler or application.consume
        self._wall_clock = wall_clock
        self.has_timers = application.has_timers
        self._windows = txn.all_windows
        self._tables = txn.all_tables
        self._undoes = bad.passes_over and isinstance(txn.store, UndoingStore)
        self.txn = txn
        self.output = output
        self.machine = machine
        self.recorder = recorder
        self.bad = bad
        self.on_step = on_step
        self.input: InputLike | None = None
        self._reset = ""
        self.ends_input = False
        self.polled_count = 0
        self.fired_count = self.late_count = 0
        self.preparing_s = 0.0
        self._batch: list[Envelope[Any]] = []
        self.rest: Iterator[Envelope[Any]] = iter(self._batch)
        self.table: Table[Any] | None = None
        self._first: Envelope[Any] | None = None
        self._next_look = 0.0  # at write heads, in monotonic seconds

    def read(self, source: InputLike) -> None:
        """Consume from another input, and forget what is left of the last one."""
        self.input = source
        self._reset = self.txn.shard.reset
        self.take([])

    def take(self, batch: list[Envelope[Any]]) -> None:
        """Take a batch of messages."""
        self._batch = batch
        self.rest = iter(batch)
        if self._tables is not None:
            self.table = self._tables.of(batch[0].journal) if batch else None
        self.polled_count += len(batch)

    def poll(self) -> list[Envelope[Any]] | None:
        """Return the next messages of the input; None if there are none, or it is to end.

        Raises:
            GazetteError: a source cannot be read or decoded.
        """
        assert self.input is not None, "an input is opened first"
        return None if self.ends_input else self.input.poll()

    @property
    def left_count(self) -> int:
        """Number of messages of the last batch that are not consumed."""
        return operator.length_hint(self.rest)

    @property
    def counts(self) -> Counts:
        """Numbers of what was consumed so far by transactions that have ended, or are open."""
        bad = self.bad
        messages = self.polled_count - self.left_count
        counts = messages, self.fired_count, bad.left_out_count, bad.letter_count, self.late_count
        return Counts(*counts)

    @property
    def is_full(self) -> bool:
        """Store or output take no further message or timer in the open transaction."""
        if self.machine.current is Current.EMPTY:
            return False
        txn = self.txn
        is_full = txn.store.is_full or self.output.is_full
        is_full = is_full or (self.has_timers and txn.timers.is_full)
        is_full = is_full or (self._tables is not None and self._tables.is_full)
        return bool(is_full or (self._windows is not None and self._windows.is_full))

    # ------------------------------------------------------------ on a worker

    def turn(self) -> PreparedCommit | None:
        """Do what the machine decides, as long as it is consuming and committing.

        Returns:
            The transaction that has been committed locally, if one was.

        Raises:
            HandlerFailedError: the handler raised for a message.
            HookFailedError: another hook raised.
            GazetteError: the input, the output or the store failed.
        """
        while True:
            decision = self.machine.decide(time.monotonic())
            if decision.action is Action.CONSUME:
                assert decision.until is not None, "consuming has an end"
                if self.note(self.consume(decision.until)):
                    return None
            elif decision.action is Action.START_COMMIT:
                return self.prepare()
            else:
                return None

    def consume(self, deadline: float) -> Slice:
        """Fire timers that are due, and consume messages that have arrived.

        Args:
            deadline: time at which to stop, in monotonic seconds.

        Raises:
            HandlerFailedError: the handler raised for a message.
            HookFailedError: the hook ``begin`` or ``on_timer`` raised.
            GazetteError: the input or the store failed.
        """
        assert self.input is not None, "an input is opened first"
        while True:
            if self.is_to_begin():
                self._begin()
                deadline = min(deadline, self.machine.max_at)
            done = self._fire_timers(deadline) or self._consume_rest(deadline)
            done = done or self.batch_end()
            if done is not None:
                return done
            batch = self.poll()
            self._publish_undecodable()
            if (done := self.taken(batch, deadline)) is not None:
                return done

    def _consume_rest(self, deadline: float) -> Slice | None:
        """Consume what is left of a batch; return None if nothing is."""
        txn, now = self.txn, time.monotonic
        is_plain = not (self._undoes or self.bad or txn.times or self.table)
        handle = self.handler if is_plain else self._consume_or_leave_out
        envelope: Envelope[Any]
        try:
            for envelope in self.rest:
                txn.envelope = envelope
                if (returned := handle(txn, envelope.message)) is not None:
                    check_consumed(returned, self.handler)
                if now() >= deadline:
                    return Slice(more=True, closes=self.is_full)
        except DeferError:
            return self.deferred(envelope)
        except LeftOutError:
            return Slice(more=True, closes=True)
        except FullError:
            return self.put_back()
        except HookFailedError:
            raise
        except BaseException as error:
            raise HandlerFailedError(envelope, error) from error
        return None

    def prepare(self) -> PreparedCommit:
        """Finalize the transaction, and commit it to the store's local files.

        Raises:
            HookFailedError: the hook ``finalize`` raised.
            GazetteError: the output, the store or the recorder failed.
        """
        began = time.monotonic()
        self.on_step(CommitStep.CONSUMED)
        txn = self.txn
        txn.envelope = None
        try:
            check_done(self.application.finalize(txn), self.application.finalize)
        except BaseException as error:
            raise HookFailedError("finalize", error) from error
        self.validate_state()
        checkpoint = self.close_transaction()
        changes = txn.store.start_commit(checkpoint)
        prepared = self.record(checkpoint, changes)
        self.preparing_s += time.monotonic() - began
        return prepared

    # ------------------------------------------------------------------ parts

    def validate_state(self) -> None:
        """Check that the state of the open transaction can be read again, once committed.

        Raises:
            UnreadableStateError: it could not.
        """
        store = self.txn.store
        if isinstance(store, ValidatingStore):
            store.validate_state()
        if self._windows is not None:
            self._windows.encode()

    def close_transaction(self) -> Checkpoint:
        """Refuse further messages of the transaction, and return the checkpoint after it."""
        assert self.input is not None, "an input is opened first"
        self.on_step(CommitStep.FINALIZED)
        self.txn.is_open = False
        self.bad.transaction_ended()
        checkpoint = self.input.checkpoint(self.left_count)
        checkpoint.ack_intents = dict(self.output.end())
        checkpoint.reset = self._reset
        if self.bad.skipped:
            self.bad.skipped = self.txn.shard.skipped(checkpoint)
        if self.has_timers:
            self.txn.timers.put()
        rows: dict[bytes, bytes | None] = {}
        for each in (self._windows, self._tables):
            if each is not None:
                rows |= each.changes
        if rows:
            self.txn.store.put_rows(rows)
        if self.txn.times is not None:
            checkpoint.times = self.txn.times.times
        self.on_step(CommitStep.CHECKPOINTED)
        return checkpoint

    def record(self, checkpoint: Checkpoint, changes: Any) -> PreparedCommit:
        """Return the commit, with the changes of the store's files as contents of appends."""
        self.on_step(CommitStep.LOCALLY_COMMITTED)
        if self._tables is not None:
            self._tables.committed()
        if self.has_timers:
            self.txn.timers.committed()
            if self._windows is not None:
                self._windows.committed()
            self.wait_for_timers()
        recorder = self.recorder
        if recorder is None:
            return PreparedCommit(checkpoint, ())
        contents = recorder.record(changes)
        while (path := recorder.rerecord_due()) is not None:
            changes = self.txn.store.rerecord(path)
            if not changes:
                break  # the file is gone, which the next commit records
            contents += recorder.record(changes, continues=True)
        return PreparedCommit(checkpoint, contents)

    def begin(self) -> None:
        """Open a transaction, without its hook."""
        left = self.left_count
        self._first = self._batch[len(self._batch) - left] if left else None
        txn = self.txn
        txn.envelope = None
        txn.now = self._wall_clock()
        if self.has_timers:
            txn.timers.begin(txn.now)
        txn.is_open = True

    def begin_record(self) -> None:
        """Begin a message, whose changes may be undone.

        Raises:
            LeftOutError: it failed before, and is left out; its transaction ends.
            GazetteError: the journal of dead letters cannot be written.
        """
        txn = self.txn
        assert txn.envelope is not None, "a message has an envelope"
        if self.bad.holds(txn.envelope):
            self.bad.leave_out(txn, txn.envelope)
            raise LeftOutError
        if self._undoes:
            txn.store.begin_record()
            txn.timers.begin_record()

    def undoes_record(self, error: BaseException) -> bool:
        """Undo a message for which the handler raised, and leave it out, if that can be done.

        Returns:
            False if not: the transaction is to be aborted.

        Raises:
            GazetteError: the journal of dead letters cannot be written.
        """
        txn = self.txn
        assert txn.envelope is not None, "a message has an envelope"
        may_undo = self._undoes and not txn.has_published and not self.bad.holds(txn.envelope)
        if self._windows is not None and self._windows.is_touched:
            may_undo = False  # states of windows are changed in place
        if not may_undo or isinstance(error, DeferError) or not is_of_record(error):
            return False
        if not txn.store.undo_record():
            return False
        txn.timers.undo_record()
        self.bad.leave_out(txn, txn.envelope, error)
        return True

    def put_into(self, table: Table[Any], message: Any) -> None:
        """Put a message into its table.

        Raises:
            ValidationError: its key cannot be the key of a table.
            UnreadableStateError: it would not be read again as it is.
            BaseException: that of the application's functions.
        """
        assert self._tables is not None, "there is a table"
        clock = 0
        if table.is_broadcast:
            assert self.txn.envelope is not None, "a message has an envelope"
            _, clock, _ = parse_raw_uuid(self.txn.envelope.raw_uuid)
        self._tables.put(table, message, clock)

    # ----------------------------------------------------------------- timers

    def open_expiry(self, store: ExpiringStore) -> None:
        """Let entries of the store expire, which was just restored.

        Raises:
            ShardStoreError: the store failed.
        """
        self.has_timers |= store.open_expiry(self._set_expiry)

    def _set_expiry(self, entry: bytes, after_s: float | None) -> None:
        """Set the time to live of an entry: the first one has the shard look for timers."""
        timers = self.txn.timers
        if not self.has_timers:
            self.has_timers = True
            self.restore_timers()
            timers.begin(self.txn.now)
            if self._undoes:
                timers.begin_record()
        timers.set_expiry(entry, after_s)

    def restore_timers(self) -> None:
        """Read the timers of the store, which was just restored, as event time was.

        Raises:
            ConfigurationError: the store keeps no timers.
            ShardStoreError: the store failed.
        """
        timers, windows = self.txn.timers, self._windows
        timers.restore(
            is_settable=self.application.has_on_timer,
            has_event_time=self.txn.times is not None,
            has_windows=windows is not None,
        )
        if windows is not None:
            windows.restore()
        self.wait_for_timers()

    def is_to_begin(self) -> bool:
        """Return True if no transaction is open, and a message is left or a timer is due."""
        machine = self.machine
        if machine.current is not Current.EMPTY:
            return False
        if self.left_count:
            return True
        return machine.timer_at <= time.monotonic() and self.wait_for_timers() <= 0

    def clock_was_set(self) -> None:
        """Look for timers that are due by now, of event time without the wait between two looks."""
        self._next_look = 0.0
        self.wait_for_timers()

    def wait_for_timers(self) -> float:
        """Tell the machine when the next timer is due; return the seconds until then."""
        now = self._wall_clock()
        wait_s = min(self.txn.timers.wait_s(now), self._event_wait_s(now))
        self.machine.timer_at = time.monotonic() + wait_s
        return wait_s

    @property
    def next_timer_at(self) -> float:
        """Time at which the next timer may be due, in Unix seconds; infinity for none.

        Only while no transaction is open.
        """
        now, timers, times = self._wall_clock(), self.txn.timers, self.txn.times
        due_us = None if times is None else timers.next_event_us
        if due_us is None or times is None:
            return timers.next_at
        is_due = due_us <= times.watermark_us
        return min(timers.next_at, now if is_due else times.quiet_at_us(due_us) / SECOND_US)

    def _event_wait_s(self, now: float) -> float:
        """Return the seconds until a timer of event time may be due: 0 if one is."""
        times = self.txn.times
        due_us = None if times is None else self.txn.timers.next_event_us
        if due_us is None or times is None:
            return math.inf
        if due_us <= times.watermark_us:
            return 0.0
        quiet_s = times.quiet_at_us(due_us) / SECOND_US - now
        # It is not due, as long as the write heads were not asked for.
        return min(max(quiet_s, self._next_look - time.monotonic(), LOOK_MIN_S), CLOCK_CHECK_S)

    def quiet_sources(self) -> Sequence[str]:
        """Return the sources whose present is wanted, so that a timer of event time is due."""
        times = self.txn.times
        due_us = None if times is None else self.txn.timers.next_event_us
        if due_us is None or times is None or due_us <= times.watermark_us:
            return ()
        is_early = times.quiet_at_us(due_us) > self._wall_clock() * SECOND_US
        return () if is_early or time.monotonic() < self._next_look else times.quiet_sources(due_us)

    async def look_at_heads(self, journals: Sequence[str]) -> None:
        """Note the present of the sources that are read through to their write heads.

        Raises:
            GazetteError: no broker answered.
        """
        assert self.input is not None, "an input is opened first"
        times = self.txn.times
        assert times is not None, "only event time needs the present"
        self._next_look = time.monotonic() + LOOK_PERIOD_S
        for journal in journals:
            now = self._wall_clock()
            if await self.input.is_at_write_head(journal):
                times.present(journal, round(now * SECOND_US))
        if self.machine.current is Current.EMPTY:
            self.wait_for_timers()

    def next_timer(self) -> Due | None:
        """Return the hook of the next timer that the open transaction fires; None for none.

        Raises:
            ShardStoreError: the store failed.
        """
        if self.machine.timer_at == math.inf or self.machine.current is Current.EMPTY:
            return None
        timers = self.txn.timers
        while (timer := timers.next_due()) is not None:
            if (due := self._due(timer)) is not None:
                return due
        due = None if self.txn.times is None else self.next_event_timer()
        if due is None:
            self.machine.timer_at = math.inf
        return due

    def next_event_timer(self) -> Due | None:
        """Return the hook of the next timer of event time that is due; None for none.

        Raises:
            ShardStoreError: the store failed.
        """
        txn = self.txn
        assert txn.times is not None, "only event time has such timers"
        txn.envelope = None
        while (timer := txn.timers.next_of_event_time(txn.times.watermark_us)) is not None:
            if (due := self._due(timer)) is not None:
                return due
        return None

    def check_full(self) -> None:
        """Look if the transaction is full, after a timer of event time.

        Raises:
            FullError: it is.
        """
        if self.fired_count % FULL_CHECK_COUNT == 0 and self.is_full:
            raise FullError

    def _due(self, timer: Timer | WindowTimer | ExpiryTimer) -> Due | None:
        """Return the hook of a timer that fires; None if it has none to call."""
        self._first = None  # the transaction is not empty
        self.fired_count += 1
        application = self.application
        if isinstance(timer, Timer):
            return Due("on_timer", application.on_timer, timer)
        if isinstance(timer, ExpiryTimer):
            return Due("the end", _end_entry, timer)
        assert self._windows is not None, "timers of windows wait for an application with windows"
        window = self._windows.take(timer)
        if window is None:
            return None
        if timer.closes:
            return Due("on_closed", application.on_closed, window)
        return Due("on_updated", application.on_updated, window)

    def reach(self, envelope: Envelope[Any]) -> None:
        """Note that a message is to be consumed, in event time."""
        if self.txn.times is not None:
            _, clock, _ = parse_raw_uuid(envelope.raw_uuid)
            # Without a UUID, as in tests, it is published when it is consumed.
            published_us = (
                unix_100ns_of_clock(clock) // 10 if clock else round(self._wall_clock() * SECOND_US)
            )
            self.txn.times.read(envelope.journal, published_us)

    def event_us(self, envelope: Envelope[Any]) -> int:
        """Return the event time of a message that is consumed, in microseconds since 1970.

        Raises:
            ValidationError: it is no time.
            BaseException: that of the application's function.
        """
        times = self.txn.times
        if times is None:
            return 0
        event_us = times.event_us(envelope.journal, envelope.message)
        if self._windows is not None:
            self._windows.begin_message(envelope.journal, event_us)
        return event_us

    def late_windows(self) -> Sequence[Window[Any]]:
        """Return the windows for which the message that was consumed was late."""
        if self._windows is None:
            return ()
        self._windows.end_message()
        late = self._windows.late
        self.late_count += len(late)
        return late

    def timer_fired(self, deadline: float) -> Slice | None:
        """Return the end of a stretch after a timer; None if the next one may fire."""
        is_full = self.fired_count % FULL_CHECK_COUNT == 0 and self.is_full
        if time.monotonic() < deadline and not is_full:
            return None
        return Slice(more=self.machine.available, closes=self.is_full, more_timers=True)

    def batch_end(self) -> Slice | None:
        """Return the end of a stretch after a batch; None if the input is to be polled."""
        if self.is_full:
            return Slice(more=True, closes=True)
        return None if self.machine.available else Slice(more=False)

    def taken(self, batch: list[Envelope[Any]] | None, deadline: float) -> Slice | None:
        """Take what the input returned; return the end of a stretch if there is nothing."""
        if batch is None:
            return Slice(more=False)
        self.take(batch)
        return Slice(more=True) if not batch and time.monotonic() >= deadline else None

    def _fire_timers(self, deadline: float) -> Slice | None:
        """Fire timers that are due; return None if none is left."""
        while (due := self.next_timer()) is not None:
            try:
                check_done(due.hook(self.txn, due.argument), due.hook)
            except BaseException as error:
                raise timer_failed(due, error) from error
            if (done := self.timer_fired(deadline)) is not None:
                return done
        return None

    # ------------------------------------------------------------------ notes

    def deferred(self, envelope: Envelope[Any]) -> Slice:
        """Put a message back, as the first of the next transaction.

        Raises:
            HookFailedError: it is the first message of its transaction.
        """
        if envelope is self._first:
            error = RuntimeError("the transaction is empty, but its first message was deferred")
            raise HookFailedError("consume", error)
        return self.put_back()

    def put_back(self) -> Slice:
        """Put a message back, as the first of the next transaction."""
        left = self.left_count + 1
        self.rest = iter(self._batch[len(self._batch) - left :])
        return Slice(more=True, closes=True)

    def note(self, done: Slice) -> bool:
        """Tell the machine what was consumed; return True if the loop is to look at the rest."""
        assert self.input is not None, "an input is opened first"
        machine = self.machine
        machine.available = done.more
        machine.has_pending = self.input.has_pending
        machine.ended = not done.more and (self.input.ended or self.ends_input)
        if done.closes:
            machine.close()
        return (done.more or done.more_timers) and not done.closes

    def _begin(self) -> None:
        self.begin()
        self.txn.store.begin()
        try:
            check_done(self.application.begin(self.txn), self.application.begin)
        except BaseException as error:
            raise HookFailedError("begin", error) from error
        self.machine.consumed(time.monotonic())

    def _publish_undecodable(self) -> None:
        if not self.bad.has_undecodable:
            return
        if self.machine.current is Current.EMPTY:
            self._begin()
        self.txn.envelope = None
        self.bad.publish_undecodable(self.txn)

    def _consume_or_leave_out(self, txn: Transaction[Any], message: Any) -> None:
        """Fire timers of event time that are due, and consume a message or leave it out."""
        envelope, table = txn.envelope, self.table
        assert envelope is not None, "a message has an envelope"
        if table is None:
            self._fire_before(envelope)
        if self._undoes or self.bad:
            self.begin_record()
        try:
            if table is not None:
                self.put_into(table, message)
                return
            event_us = self.event_us(envelope)
            check_consumed(self.handler(txn, message), self.handler)
            for window in self.late_windows():
                late = self.application.on_late
                check_consumed(late(txn, message, window), late)
            if self.bad.validates_each:
                self.validate_state()
        except BaseException as error:
            if not self.undoes_record(error):
                raise
        else:
            if txn.times is not None:
                txn.times.consumed(envelope.journal, event_us)

    def _fire_before(self, envelope: Envelope[Any]) -> None:
        """Fire timers of event time that are due before a message."""
        if self.txn.times is None:
            return
        self.reach(envelope)
        if self.txn.timers.has_event_timers:
            self._fire_event_timers()
            self.txn.envelope = envelope

    def _fire_event_timers(self) -> None:
        """Fire timers of event time that are due.

        Raises:
            FullError: some are left, which the next transaction fires.
            HookFailedError: the hook of one raised.
        """
        while (due := self.next_event_timer()) is not None:
            try:
                check_done(due.hook(self.txn, due.argument), due.hook)
            except BaseException as error:
                raise timer_failed(due, error) from error
            self.check_full()


def _end_entry(txn: Transaction[Any], timer: ExpiryTimer) -> None:
    txn.store.end_entry(timer.entry)


def check_consumed(returned: object, hook: Callable[..., Any]) -> None:
    """Check what the hook of a message returned. Another record would do no better.

    Raises:
        HookFailedError: nothing of it has run.
    """
    try:
        check_done(returned, hook)
    except UserCodeError as error:
        raise HookFailedError("consume", error) from error


def timer_failed(due: Due, error: BaseException) -> HookFailedError:
    """Return the error of a timer whose hook raised."""
    argument = due.argument
    what = repr(argument.key if isinstance(argument, Timer) else argument)
    return HookFailedError(f"{due.name} of {what}", error)


class FullError(Exception):
    """Control flow: the transaction is full before a message, which is left to the next one."""


class LeftOutError(Exception):
    """Control flow: a record that failed before was left out, and ends its transaction."""
