"""Consumption of a transaction's messages by hooks that are coroutine functions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gazette_sdk.message.uuid import Envelope
from gazette_sdk.shard.transaction.consume import (
    Due,
    FullError,
    LeftOutError,
    MessageConsumer,
    PreparedCommit,
    Slice,
    check_consumed,
    timer_failed,
)
from gazette_sdk.shard.transaction.failure import HandlerFailedError, HookFailedError
from gazette_sdk.shard.transaction.machine import Action, CommitStep, Current
from gazette_sdk.shard.transaction.transaction import DeferError
from gazette_sdk.user_code import check_done, is_cancellation

AnyCall = Callable[..., Awaitable[Any]]
"""Function that calls another one, and returns its result."""

LOOP_SLICE_S = 0.005
"""Time for which messages are consumed before others get the event loop, in seconds."""


class AsyncConsumer:
    """Consumer of a shard's messages whose hooks are coroutine functions.

    Messages are read, and transactions prepared, on a worker thread.

    Args:
        consumer: state and steps that both forms share.
        on_worker: calls a function on a worker thread.
        call_store: calls a method of the store, where it has to be called.
    """

    def __init__(self, consumer: MessageConsumer, on_worker: AnyCall, call_store: AnyCall) -> None:
        self._consumer = consumer
        self._on_worker = on_worker
        self._call_store = call_store

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
            batch = await self._on_worker(consumer.poll)
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
        changes = await self._call_store("start_commit", checkpoint)
        prepared: PreparedCommit = await self._on_worker(consumer.record, checkpoint, changes)
        consumer.preparing_s += time.monotonic() - began
        return prepared

    async def _fire_timers(self, deadline: float) -> Slice | None:
        """Fire timers that are due; return None if none is left."""
        consumer = self._consumer
        while (due := consumer.next_timer()) is not None:
            await self._fire(due)
            if (done := consumer.timer_fired(deadline)) is not None:
                return done
        return None

    async def _fire_event_timers(self) -> None:
        """Fire timers of event time that are due. See the consumer's method."""
        consumer = self._consumer
        while (due := consumer.next_event_timer()) is not None:
            await self._fire(due)
            consumer.check_full()

    async def _fire(self, due: Due) -> None:
        try:
            called = due.hook(self._consumer.txn, due.argument)
            if called is not None:  # the base's hook is no coroutine function
                check_done(await called, due.hook)
        except BaseException as error:
            if is_cancellation(error):
                raise
            raise timer_failed(due, error) from error

    async def _consume_rest(self, deadline: float) -> Slice | None:
        """Consume what is left of a batch; None if nothing is."""
        consumer = self._consumer
        envelope: Envelope[Any]
        try:
            for envelope in consumer.rest:
                await self._consume_or_leave_out(envelope)
                if time.monotonic() >= deadline:
                    return Slice(more=True, closes=consumer.is_full)
        except DeferError:
            return consumer.deferred(envelope)
        except LeftOutError:
            return Slice(more=True, closes=True)
        except FullError:
            return consumer.put_back()
        except HookFailedError:
            raise
        except BaseException as error:
            if is_cancellation(error):
                raise
            raise HandlerFailedError(envelope, error) from error
        return None

    async def _consume_or_leave_out(self, envelope: Envelope[Any]) -> None:
        """Fire timers of event time that are due, and consume a message or leave it out."""
        consumer = self._consumer
        txn = consumer.txn
        table = consumer.table
        if txn.times is not None and table is None:
            consumer.reach(envelope)
            await self._fire_event_timers()
        txn.envelope = envelope
        consumer.begin_record()
        try:
            if table is not None:
                consumer.put_into(table, envelope.message)
                return
            event_us = consumer.event_us(envelope)
            returned = await consumer.handler(txn, envelope.message)
            check_consumed(returned, consumer.handler)
            for window in consumer.late_windows():
                late = consumer.application.on_late
                called = late(txn, envelope.message, window)
                if called is not None:
                    check_consumed(await called, late)
            if consumer.bad.validates_each:
                await self._on_worker(consumer.validate_state)
        except BaseException as error:
            if is_cancellation(error) or not consumer.undoes_record(error):
                raise
        else:
            if txn.times is not None:
                txn.times.consumed(envelope.journal, event_us)

    async def _begin(self) -> None:
        self._consumer.begin()
        await self._call_store("begin")
        await self._call_hook("begin")
        self._consumer.machine.consumed(time.monotonic())

    async def _call_hook(self, name: str) -> None:
        try:
            hook = getattr(self._consumer.application, name)
            called = hook(self._consumer.txn)
            if called is not None:  # the base's hook is no coroutine function
                check_done(await called, hook)
        except BaseException as error:
            if is_cancellation(error):
                raise
            raise HookFailedError(name, error) from error
