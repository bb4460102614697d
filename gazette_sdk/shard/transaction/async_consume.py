"""Consumption with ``async def`` hooks, on the event loop."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gazette_sdk.shard.transaction.consume import Consumer, PreparedCommit, Slice
from gazette_sdk.shard.transaction.failure import HandlerFailedError, HookFailedError
from gazette_sdk.shard.transaction.machine import Action, Current
from gazette_sdk.shard.transaction.steps import CommitStep
from gazette_sdk.shard.transaction.transaction import DeferError
from gazette_sdk.user_code import acontained, is_cancellation

__all__ = ["LOOP_SLICE_S", "AsyncConsumer", "OnWorker"]

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

    def __init__(self, consumer: Consumer, on_worker: OnWorker) -> None:
        self._consumer = consumer
        self._on_worker = on_worker

    async def turn(self) -> PreparedCommit | None:
        """Do what the machine decides, once. See :meth:`Consumer.turn`.

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
        """Consume messages that have arrived. See :meth:`Consumer.consume`.

        Raises:
            HandlerFailedError: the handler raised for a message.
            HookFailedError: the hook ``begin`` raised.
            GazetteError: the input or the store failed.
        """
        consumer = self._consumer
        while True:
            if consumer.machine.current is Current.EMPTY and consumer.left_count:
                await self._begin()
                deadline = min(deadline, consumer.machine.max_at)
            done = await self._consume_rest(deadline)
            if done is not None:
                return done
            if consumer.is_full:
                return Slice(more=True, closes=True)
            assert consumer.input is not None, "an input is opened first"
            batch = await self._on_worker(consumer.input.poll)
            if consumer.bad.has_undecodable:
                if consumer.machine.current is Current.EMPTY:
                    await self._begin()
                consumer.txn.envelope = None
                consumer.bad.publish_undecodable(consumer.txn)
            if batch is None:
                return Slice(more=False)
            consumer.take(batch)

    async def prepare(self) -> PreparedCommit:
        """Finalize the transaction, and commit it locally. See :meth:`Consumer.prepare`.

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

    async def _consume_rest(self, deadline: float) -> Slice | None:
        """Consume what is left of a batch; None if nothing is."""
        consumer = self._consumer
        txn, bad, handle = consumer.txn, consumer.bad, consumer.application.consume
        for envelope in consumer.rest:
            txn.envelope = envelope
            try:
                if bad and bad.holds(envelope):
                    bad.leave_out(txn, envelope)
                    return Slice(more=True, closes=True)
                await handle(txn, envelope.message)
                if bad.validates_each:
                    await self._on_worker(consumer.validate_state)
            except DeferError:
                return consumer.deferred(envelope)
            except BaseException as error:
                if is_cancellation(error):
                    raise
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
