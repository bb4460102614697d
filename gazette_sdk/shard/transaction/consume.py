"""Consumption with ``def`` hooks, on a worker thread.

The loop of :meth:`Consumer.consume` is the hot path: per message no lock, no ``await``, and no new
object but the envelope.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.stores.base import ValidatingStore
from gazette_sdk.shard.transaction.base import InputLike, OutputLike, RecorderLike
from gazette_sdk.shard.transaction.failure import BadRecords, HandlerFailedError, HookFailedError
from gazette_sdk.shard.transaction.machine import Action, Current, TransactionMachine
from gazette_sdk.shard.transaction.steps import CommitStep
from gazette_sdk.shard.transaction.transaction import DeferError, Transaction

__all__ = ["Consumer", "OnStep", "PreparedCommit", "Slice"]

OnStep = Callable[[CommitStep], None]
"""Function that is called at each step of a commit, on the thread that does the step."""


@dataclass(frozen=True, slots=True)
class Slice:
    """End of a stretch of consuming.

    Attributes:
        more: messages are left, or the next look at the input may find some.
        closes: the transaction is to consume nothing more.
    """

    more: bool
    closes: bool = False


@dataclass(frozen=True, slots=True)
class PreparedCommit:
    """Transaction that is committed locally, and not yet durable.

    Attributes:
        checkpoint: position behind it, with its acknowledgements.
        contents: appends to the recovery log, in order.
    """

    checkpoint: Checkpoint
    contents: Sequence[bytes]


class Consumer:
    """Consumer of a shard's messages, for one transaction after the other.

    Args:
        application: the hooks.
        txn: the transaction that they get.
        output: where it publishes.
        machine: the machine, which is told what was consumed.
        recorder: recorder of the store's file changes; None without a recovery log.
        bad: records that are left out.
        on_step: called at each step of a commit.

    Attributes:
        input: where messages come from.
        rest: messages of the last batch that are not consumed.
        polled_count: messages that the input has returned so far.
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
    ) -> None:
        self.application = application
        self.txn = txn
        self.output = output
        self.machine = machine
        self.recorder = recorder
        self.bad = bad
        self.on_step = on_step
        self.input: InputLike | None = None
        self.polled_count = 0
        self.preparing_s = 0.0
        self._batch: list[Envelope[Any]] = []
        self.rest: Iterator[Envelope[Any]] = iter(self._batch)
        self._first: Envelope[Any] | None = None

    def read(self, source: InputLike) -> None:
        """Consume from another input, and forget what is left of the last one."""
        self.input = source
        self.take([])

    def take(self, batch: list[Envelope[Any]]) -> Iterator[Envelope[Any]]:
        """Take a batch of messages, and return those that are left of it."""
        self._batch = batch
        self.rest = iter(batch)
        self.polled_count += len(batch)
        return self.rest

    @property
    def left_count(self) -> int:
        """Number of messages of the last batch that are not consumed."""
        return operator.length_hint(self.rest)

    @property
    def is_full(self) -> bool:
        """Store or output take no further message in the open transaction."""
        is_empty = self.machine.current is Current.EMPTY
        return not is_empty and bool(self.txn.store.is_full or self.output.is_full)

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
        """Consume messages that have arrived.

        Args:
            deadline: time at which to stop, in monotonic seconds.

        Raises:
            HandlerFailedError: the handler raised for a message.
            HookFailedError: the hook ``begin`` raised.
            GazetteError: the input or the store failed.
        """
        assert self.input is not None, "an input is opened first"
        txn, poll, now, rest = self.txn, self.input.poll, time.monotonic, self.rest
        handle = self._consume_or_leave_out if self.bad else self.application.consume
        envelope: Envelope[Any]
        while True:
            if self.machine.current is Current.EMPTY and self.left_count:
                self._begin()
                deadline = min(deadline, self.machine.max_at)
            try:
                for envelope in rest:
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
            if self.is_full:
                return Slice(more=True, closes=True)
            batch = poll()
            self._publish_undecodable()
            if batch is None:
                return Slice(more=False)
            rest = self.take(batch)

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
        """Refuse further messages of the transaction, and return the checkpoint behind it."""
        assert self.input is not None, "an input is opened first"
        self.on_step(CommitStep.FINALIZED)
        self.txn.is_open = False
        self.bad.transaction_ended()
        checkpoint = self.input.checkpoint(self.left_count)
        checkpoint.ack_intents = dict(self.output.end())
        self.on_step(CommitStep.CHECKPOINTED)
        return checkpoint

    def record(self, checkpoint: Checkpoint, changes: Any) -> PreparedCommit:
        """Return the commit, with the changes of the store's files as contents of appends."""
        self.on_step(CommitStep.LOCALLY_COMMITTED)
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
        self.txn.envelope = None
        self.txn.is_open = True

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
        return done.more and not done.closes

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
        """Consume a message, or leave a bad record out and end the slice."""
        assert txn.envelope is not None, "a message has an envelope"
        if not self.bad.holds(txn.envelope):
            self.application.consume(txn, message)
            if self.bad.validates_each:
                self.validate_state()
            return
        self.bad.leave_out(txn, txn.envelope)
        raise LeftOutError


class LeftOutError(Exception):
    """Control flow: a bad record was left out, and ends its transaction."""
