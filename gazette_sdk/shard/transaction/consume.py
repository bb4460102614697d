"""Consumption of a transaction's messages: its input, and the calls of its hooks.

``def`` hooks are called on a worker thread, ``async def`` hooks on the event loop
(:class:`AsyncConsumer`). The loop of :meth:`MessageConsumer.consume` is the hot path: per message
no lock, no ``await``, and no new object but the envelope.

The :class:`Input` of a shard is the committed messages of its sources, from a checkpoint on.
Content is fetched ahead on the event loop. A worker thread takes what has arrived, and cuts,
decodes and sequences it in the same call: one list of messages at a time. Between two lists, and
within one, :meth:`Input.checkpoint` has exactly which messages are processed (message section 13.5,
shard section 7).
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import operator
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.message.batch_reader import BatchReader, JournalDecoder, journal_decoder
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.delivery import HORIZON_S, RING_BYTES_MAX, ListDelivery
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.fetcher import Opened, Plan
from gazette_sdk.message.sequencer import RING_SIZE, Sequencer
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.stores.base import UndoingStore, ValidatingStore
from gazette_sdk.shard.transaction.failure import (
    BadRecords,
    HandlerFailedError,
    HookFailedError,
    is_of_record,
)
from gazette_sdk.shard.transaction.machine import Action, CommitStep, Current, TransactionMachine
from gazette_sdk.shard.transaction.timers import Timer
from gazette_sdk.shard.transaction.transaction import (
    DeferError,
    InputLike,
    OutputLike,
    RecorderLike,
    Transaction,
)
from gazette_sdk.transport.base import Transport
from gazette_sdk.user_code import acontained, call, is_cancellation

MessageType = Callable[[pb.JournalSpec], type]
"""Function that returns the class of a journal's messages. It may look at the journal's labels."""


class Input:
    """Committed messages of several journals. Made on the event loop that fetches them.

    One thread or coroutine uses it at a time. A source that does not exist, or is deleted, is an
    error of :meth:`poll`.

    Args:
        transport: how to reach the journals.
        sources: by journal, the least offset to read. A name may have metadata, which envelopes
            and checkpoints keep.
        checkpoint: position to continue from; it is not changed.
        message: returns the class of a journal's messages, whose name has the metadata.
        acknowledgements: return acknowledgements of committed messages, too.
        ring_size: number of messages of open transactions that are kept in memory.
        follows: read on at the write heads; else reading ends there.

    Attributes:
        on_undecodable: called by :meth:`poll` with the error of content that is no message, once
            all messages before it are processed: it is passed over. None: `poll` raises the error.

    Raises:
        ConfigurationError: there is no source.
        ValidationError: a name is malformed.
    """

    def __init__(
        self,
        transport: Transport,
        sources: Mapping[str, int],
        checkpoint: Checkpoint,
        message: MessageType,
        *,
        acknowledgements: bool = False,
        ring_size: int = RING_SIZE,
        follows: bool = True,
    ) -> None:
        if not sources:
            raise ConfigurationError(
                "a shard without sources reads nothing: name journals in its spec"
            )
        for journal in sources:
            validate_journal(journal)
        offsets = {
            journal: max(least, checkpoint.offsets.get(journal, 0))
            for journal, least in sources.items()
        }
        plan = Plan(
            selector=None,
            names=tuple(sources),
            text=", ".join(sources),
            block=follows,
            begin=0,
            offsets=offsets,
            end_offsets={},
            revisions=checkpoint.create_revisions,
            is_fixed=True,
        )
        restored = dataclasses.replace(checkpoint, offsets={**checkpoint.offsets, **offsets})
        sequencer = Sequencer[Envelope[Any]](
            ring_size, ring_bytes_max=RING_BYTES_MAX, checkpoint=restored
        )
        self.on_undecodable: Callable[[GazetteError], object] | None = None
        self._has_passed_over = False
        self._delivery = ListDelivery(sequencer, acknowledgements=acknowledgements)
        self._reader: BatchReader[Envelope[Any]] = BatchReader(
            plan,
            transport,
            _decoders(message),
            self._delivery,
            on_error=self._pass_over,
            returns_after_errors=True,
        )
        self._reader.begin()

    @property
    def has_pending(self) -> bool:
        """A sequence is open that began since the last checkpoint was taken."""
        return self._delivery.has_pending

    @property
    def write_heads(self) -> Mapping[str, int]:
        """By journal, the last write head that a broker reported."""
        return self._reader.write_heads

    @property
    def ended(self) -> bool:
        """All sources were read to their ends; never while the input follows them."""
        return self._reader.has_ended

    def poll(self) -> list[Envelope[Any]] | None:
        """Return the next messages of what has arrived, without waiting; on any thread.

        The messages of the list before are processed then: another checkpoint is after them.

        Returns:
            Messages of one journal, at least one except after content that was passed over; None
            if there are none yet, or no more.

        Raises:
            GazetteError: a source cannot be read or decoded. Every later call raises it, too.
        """
        self._has_passed_over = False
        while (batch := self._reader.poll()) is not None:
            if batch:
                assert isinstance(batch, list), "a ListDelivery returns lists"
                return batch
            if self._has_passed_over:
                return []
        return None

    def _pass_over(self, error: GazetteError) -> None:
        if self.on_undecodable is None:
            raise error
        self.on_undecodable(error)
        self._has_passed_over = True

    async def arrived(self) -> None:
        """Wait until :meth:`poll` may return something, or raise, or the input has ended.

        Only after it returned None, and on the event loop.
        """
        await self._reader.arrived()

    def checkpoint(self, left: int = 0) -> Checkpoint:
        """Return the position, and forget producers that were silent for a day.

        Args:
            left: number of messages at the end of the last list that are not processed.
        """
        return self._reader.checkpoint(left, horizon_s=HORIZON_S)

    def passed(self) -> dict[str, int]:
        """Return the offsets that are read through, by journal, without those of the last list.

        Exact once :meth:`poll` has returned None. Messages that start nothing pass offsets, too.
        """
        return self._delivery.read_through

    async def aclose(self) -> None:
        """Stop reading."""
        await self._reader.aclose()


def _decoders(message: MessageType) -> Callable[[Opened], JournalDecoder[Any]]:
    """Return a function that makes the decoder of a journal."""

    def new_decoder(opened: Opened) -> JournalDecoder[Any]:
        spec = pb.JournalSpec()
        if opened.spec is not None:
            spec.CopyFrom(opened.spec)
        spec.name = opened.journal
        return journal_decoder(call(message, spec), opened, sequenced=True)

    return new_decoder


FULL_CHECK_COUNT = 100
"""Timers that fire between two looks at the fullness of the store."""


class Counts(NamedTuple):
    """Numbers of what a shard has consumed.

    Attributes:
        messages: messages consumed, also those that were left out.
        timers: timers fired.
        left_out: records that were left out.
        letters: dead letters published.
    """

    messages: int = 0
    timers: int = 0
    left_out: int = 0
    letters: int = 0

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
        wall_clock: returns Unix seconds.

    Attributes:
        input: where messages come from.
        rest: messages of the last batch that are not consumed.
        polled_count: messages that the input has returned so far.
        fired_count: timers that fired so far.
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
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.application = application
        self._wall_clock = wall_clock
        self._has_timers = application.has_timers
        self._undoes = bad.passes_over and isinstance(txn.store, UndoingStore)
        self.txn = txn
        self.output = output
        self.machine = machine
        self.recorder = recorder
        self.bad = bad
        self.on_step = on_step
        self.input: InputLike | None = None
        self.polled_count = 0
        self.fired_count = 0
        self.preparing_s = 0.0
        self._batch: list[Envelope[Any]] = []
        self.rest: Iterator[Envelope[Any]] = iter(self._batch)
        self._first: Envelope[Any] | None = None

    def read(self, source: InputLike) -> None:
        """Consume from another input, and forget what is left of the last one."""
        self.input = source
        self.take([])

    def take(self, batch: list[Envelope[Any]]) -> None:
        """Take a batch of messages."""
        self._batch = batch
        self.rest = iter(batch)
        self.polled_count += len(batch)

    @property
    def left_count(self) -> int:
        """Number of messages of the last batch that are not consumed."""
        return operator.length_hint(self.rest)

    @property
    def counts(self) -> Counts:
        """Numbers of what was consumed so far by transactions that have ended, or are open."""
        bad = self.bad
        messages = self.polled_count - self.left_count
        return Counts(messages, self.fired_count, bad.left_out_count, bad.letter_count)

    @property
    def is_full(self) -> bool:
        """Store or output take no further message or timer in the open transaction."""
        if self.machine.current is Current.EMPTY:
            return False
        txn = self.txn
        is_full = txn.store.is_full or self.output.is_full
        return bool(is_full or (self._has_timers and txn.timers.is_full))

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
            batch = self.input.poll()
            self._publish_undecodable()
            if (done := self.taken(batch, deadline)) is not None:
                return done

    def _consume_rest(self, deadline: float) -> Slice | None:
        """Consume what is left of a batch; return None if nothing is."""
        txn, now = self.txn, time.monotonic
        is_plain = not (self._undoes or self.bad)
        handle = self.application.consume if is_plain else self._consume_or_leave_out
        envelope: Envelope[Any]
        try:
            for envelope in self.rest:
                txn.envelope = envelope
                handle(txn, envelope.message)
                if now() >= deadline:
                    return Slice(more=True, closes=self.is_full)
        except DeferError:
            return self.deferred(envelope)
        except LeftOutError:
            return Slice(more=True, closes=True)
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
            self.application.finalize(txn)
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

    def close_transaction(self) -> Checkpoint:
        """Refuse further messages of the transaction, and return the checkpoint after it."""
        assert self.input is not None, "an input is opened first"
        self.on_step(CommitStep.FINALIZED)
        self.txn.is_open = False
        self.bad.transaction_ended()
        checkpoint = self.input.checkpoint(self.left_count)
        checkpoint.ack_intents = dict(self.output.end())
        if self._has_timers:
            self.txn.timers.put()
        self.on_step(CommitStep.CHECKPOINTED)
        return checkpoint

    def record(self, checkpoint: Checkpoint, changes: Any) -> PreparedCommit:
        """Return the commit, with the changes of the store's files as contents of appends."""
        self.on_step(CommitStep.LOCALLY_COMMITTED)
        if self._has_timers:
            self.txn.timers.committed()
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
        if self._has_timers:
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
        if not may_undo or isinstance(error, DeferError) or not is_of_record(error):
            return False
        if not txn.store.undo_record():
            return False
        txn.timers.undo_record()
        self.bad.leave_out(txn, txn.envelope, error)
        return True

    # ----------------------------------------------------------------- timers

    def restore_timers(self) -> None:
        """Read the timers of the store, which was just restored.

        Raises:
            ConfigurationError: the store keeps no timers.
            ShardStoreError: the store failed.
        """
        self.txn.timers.restore()
        self.wait_for_timers()

    def is_to_begin(self) -> bool:
        """Return True if no transaction is open, and a message is left or a timer is due."""
        machine = self.machine
        if machine.current is not Current.EMPTY:
            return False
        if self.left_count:
            return True
        return machine.timer_at <= time.monotonic() and self.wait_for_timers() <= 0

    def wait_for_timers(self) -> float:
        """Tell the machine when the next timer is due; return the seconds until then."""
        wait_s = self.txn.timers.wait_s(self._wall_clock())
        self.machine.timer_at = time.monotonic() + wait_s
        return wait_s

    def next_timer(self) -> Timer | None:
        """Return the next timer that the open transaction fires; None if there is none.

        Raises:
            ShardStoreError: the store failed.
        """
        if self.machine.timer_at == math.inf or self.machine.current is Current.EMPTY:
            return None
        timer = self.txn.timers.next_due()
        if timer is None:
            self.machine.timer_at = math.inf
        else:
            self._first = None  # the transaction is not empty
            self.fired_count += 1
        return timer

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
        while (timer := self.next_timer()) is not None:
            try:
                self.application.on_timer(self.txn, timer)
            except BaseException as error:
                raise timer_failed(timer, error) from error
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
        left = self.left_count + 1
        self.rest = iter(self._batch[len(self._batch) - left :])
        return Slice(more=True, closes=True)

    def note(self, done: Slice) -> bool:
        """Tell the machine what was consumed; return True if the loop is to look at the rest."""
        assert self.input is not None, "an input is opened first"
        machine = self.machine
        machine.available = done.more
        machine.has_pending = self.input.has_pending
        machine.ended = not done.more and self.input.ended
        if done.closes:
            machine.close()
        return (done.more or done.more_timers) and not done.closes

    def _begin(self) -> None:
        self.begin()
        self.txn.store.begin()
        try:
            self.application.begin(self.txn)
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
        """Consume a message, or leave a bad record out."""
        self.begin_record()
        try:
            self.application.consume(txn, message)
            if self.bad.validates_each:
                self.validate_state()
        except BaseException as error:
            if not self.undoes_record(error):
                raise


def timer_failed(timer: Timer, error: BaseException) -> HookFailedError:
    """Return the error of a timer whose hook raised."""
    return HookFailedError(f"on_timer of {timer.key!r}", error)


class LeftOutError(Exception):
    """Control flow: a record that failed before was left out, and ends its transaction."""


OnWorker = Callable[..., Awaitable[Any]]
"""Function that calls another one on a worker thread."""

LOOP_SLICE_S = 0.005
"""Time for which messages are consumed before others get the event loop, in seconds."""


class AsyncConsumer:
    """Consumer of a shard's messages whose hooks are coroutine functions.

    Messages are read, and transactions prepared, on a worker thread. A store of coroutine
    functions is called on the event loop.

    Args:
        consumer: state and steps that both forms share.
        on_worker: calls a function on a worker thread.
    """

    def __init__(self, consumer: MessageConsumer, on_worker: OnWorker) -> None:
        self._consumer = consumer
        self._on_worker = on_worker

    async def turn(self) -> PreparedCommit | None:
        """Do what the machine decides, once. See :meth:`MessageConsumer.turn`.

        Raises:
            HandlerFailedError: the handler raised for a message.
            HookFailedError: another hook raised.
            GazetteError: the input, the output or the store failed.
        """
        consumer = self._consumer
        while True:
            decision = consumer.machine.decide(time.monotonic())
            if decision.action is Action.CONSUME:
                assert decision.until is not None, "consuming has an end"
                deadline = min(decision.until, time.monotonic() + LOOP_SLICE_S)
                if consumer.note(await self.consume(deadline)):
                    await asyncio.sleep(0)  # hooks that never wait would keep the event loop
                    return None
            elif decision.action is Action.START_COMMIT:
                return await self.prepare()
            else:
                return None

    async def consume(self, deadline: float) -> Slice:
        """Consume messages that have arrived. See :meth:`MessageConsumer.consume`.

        Raises:
            HandlerFailedError: the handler raised for a message.
            HookFailedError: the hook ``begin`` or ``on_timer`` raised.
            GazetteError: the input or the store failed.
        """
        consumer = self._consumer
        while True:
            if consumer.is_to_begin():
                await self._begin()
                deadline = min(deadline, consumer.machine.max_at)
            done = await self._fire_timers(deadline) or await self._consume_rest(deadline)
            done = done or consumer.batch_end()
            if done is not None:
                return done
            assert consumer.input is not None, "an input is opened first"
            batch = await self._on_worker(consumer.input.poll)
            if consumer.bad.has_undecodable:
                if consumer.machine.current is Current.EMPTY:
                    await self._begin()
                consumer.txn.envelope = None
                consumer.bad.publish_undecodable(consumer.txn)
            if (done := consumer.taken(batch, deadline)) is not None:
                return done

    async def prepare(self) -> PreparedCommit:
        """Finalize the transaction, and commit it locally. See :meth:`MessageConsumer.prepare`.

        Raises:
            HookFailedError: the hook ``finalize`` raised.
            GazetteError: the output, the store or the recorder failed.
        """
        consumer = self._consumer
        began = time.monotonic()
        consumer.on_step(CommitStep.CONSUMED)
        consumer.txn.envelope = None
        await self._call_hook("finalize")
        await self._on_worker(consumer.validate_state)
        checkpoint = await self._on_worker(consumer.close_transaction)
        changes = await self.call_store("start_commit", checkpoint)
        prepared: PreparedCommit = await self._on_worker(consumer.record, checkpoint, changes)
        consumer.preparing_s += time.monotonic() - began
        return prepared

    async def call_store(self, name: str, *arguments: object) -> Any:
        """Call the store: on the loop where it is a coroutine function, else on a worker."""
        function = getattr(self._consumer.txn.store, name)
        if inspect.iscoroutinefunction(function):
            return await acontained(function, *arguments)
        return await self._on_worker(function, *arguments)

    async def _fire_timers(self, deadline: float) -> Slice | None:
        """Fire timers that are due; return None if none is left."""
        consumer = self._consumer
        while (timer := consumer.next_timer()) is not None:
            try:
                await consumer.application.on_timer(consumer.txn, timer)
            except BaseException as error:
                if is_cancellation(error):
                    raise
                raise timer_failed(timer, error) from error
            if (done := consumer.timer_fired(deadline)) is not None:
                return done
        return None

    async def _consume_rest(self, deadline: float) -> Slice | None:
        """Consume what is left of a batch; None if nothing is."""
        consumer = self._consumer
        txn, handle = consumer.txn, consumer.application.consume
        for envelope in consumer.rest:
            txn.envelope = envelope
            try:
                consumer.begin_record()
                await handle(txn, envelope.message)
                if consumer.bad.validates_each:
                    await self._on_worker(consumer.validate_state)
            except DeferError:
                return consumer.deferred(envelope)
            except LeftOutError:
                return Slice(more=True, closes=True)
            except BaseException as error:
                if is_cancellation(error):
                    raise
                if not consumer.undoes_record(error):
                    raise HandlerFailedError(envelope, error) from error
            if time.monotonic() >= deadline:
                return Slice(more=True, closes=consumer.is_full)
        return None

    async def _begin(self) -> None:
        self._consumer.begin()
        await self.call_store("begin")
        await self._call_hook("begin")
        self._consumer.machine.consumed(time.monotonic())

    async def _call_hook(self, name: str) -> None:
        try:
            called = getattr(self._consumer.application, name)(self._consumer.txn)
            if called is not None:  # the base's hook is no coroutine function
                await called
        except BaseException as error:
            if is_cancellation(error):
                raise
            raise HookFailedError(name, error) from error
