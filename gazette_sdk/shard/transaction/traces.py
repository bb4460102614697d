"""Traces of a shard: spans of its transactions, and of the messages that they consume.

A transaction has a span from its first message whose trace is sampled, with an event for each step
of its commit. It ends when the output is acknowledged, and those of the messages end before.

A message that an earlier transaction may have processed, which was not committed, is *replayed*.
What a transaction of another process has read is in no store. So a message is taken for replayed if
this run of the shard has processed it, or if it was published before this run began, and the shard
has a position in its journal from an earlier run. The latter is true of messages, too, that no one
had read when the earlier run ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.uuid import Envelope, unix_100ns_of_clock
from gazette_sdk.shard.transaction.machine import CommitStep
from gazette_sdk.shard.transaction.transaction import DeferError, Transaction
from gazette_sdk.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Handler = Callable[[Transaction[Any], Any], Any]

_OF_PRIOR = frozenset({CommitStep.COMMITTED, CommitStep.FIRST_ACK, CommitStep.ACKNOWLEDGED})


class ShardTraces:
    """Spans of one shard. Its transactions follow each other, and at most one commits.

    Args:
        tracing: the traces of this process.
        application: name of the application.
        shard: id of the shard.
        on_step: called after each step of a commit.
    """

    def __init__(
        self,
        tracing: Tracing,
        application: str,
        shard: str,
        on_step: Callable[[CommitStep], None],
    ) -> None:
        self._tracing = tracing
        self._application = application
        self._shard = shard
        self._on_step = on_step
        self._current: Span | None = None
        self._prior: Span | None = None
        self._begun = 0  # units of 100 ns since 1970
        self._recovered: frozenset[str] = frozenset()
        self._processed: dict[str, int] = {}

    def begun(self, checkpoint: Checkpoint, now: float) -> None:
        """Note that a run of the shard begins.

        Args:
            checkpoint: what it has recovered.
            now: Unix seconds.
        """
        self._begun = round(now * 1e7)
        self._recovered = frozenset(checkpoint.offsets)

    def handler(self, consume: Handler) -> Handler:
        """Return a handler that calls another one within the span of its message."""

        def traced(txn: Transaction[Any], message: Any) -> None:
            envelope = txn.envelope
            if envelope is None or not envelope.traceparent:
                consume(txn, message)
                return
            with self._tracing.current_while(self._begin(envelope)):
                deferred = _deferral(consume, txn, message)
            if deferred is not None:
                raise deferred

        return traced

    def async_handler(self, consume: Handler) -> Handler:
        """Return the same for a handler that is a coroutine function."""

        async def traced(txn: Transaction[Any], message: Any) -> None:
            envelope = txn.envelope
            if envelope is None or not envelope.traceparent:
                await consume(txn, message)
                return
            with self._tracing.current_while(self._begin(envelope)):
                deferred = await _async_deferral(consume, txn, message)
            if deferred is not None:
                raise deferred

        return traced

    def on_step(self, step: CommitStep) -> None:
        """Add a step of a commit to the span of its transaction; the last one ends it."""
        span = self._prior if step in _OF_PRIOR else self._current
        if span is not None:
            span.add_event(step.name.lower())
        if step is CommitStep.LOG_SENT:
            self._prior, self._current = self._current, None
        elif step is CommitStep.ACKNOWLEDGED and span is not None:
            self._prior = None
            span.end()
        self._on_step(step)

    def abandoned(self, error: BaseException) -> None:
        """End the span of the open transaction, which is rolled back."""
        span, self._current = self._current, None
        if span is not None:
            self._tracing.fail(span, error)

    def commit_failed(self, error: BaseException) -> None:
        """End the span of the transaction that commits, which fails."""
        span, self._prior = self._prior, None
        if span is not None:
            self._tracing.fail(span, error)

    def _begin(self, envelope: Envelope[Any]) -> Span:
        if self._current is None:
            attributes = {"messaging.consumer.group.name": self._application}
            self._current = self._tracing.begin(f"transaction {self._shard}", **attributes)
        span = self._tracing.begin_process(
            envelope, self._application, self._current, is_replayed=self._is_replayed(envelope)
        )
        self._processed[envelope.journal] = envelope.end
        return span

    def _is_replayed(self, envelope: Envelope[Any]) -> bool:
        journal = envelope.journal
        if envelope.end <= self._processed.get(journal, 0):
            return True
        clock = envelope.clock if journal in self._recovered else 0
        return clock > 0 and unix_100ns_of_clock(clock) < self._begun


def _deferral(consume: Handler, txn: Transaction[Any], message: Any) -> DeferError | None:
    """Call a handler; return the error by which it leaves the message to a later transaction."""
    try:
        consume(txn, message)
    except DeferError as deferred:  # control flow, which is no error of the span
        return deferred
    return None


async def _async_deferral(
    consume: Callable[[Transaction[Any], Any], Awaitable[Any]], txn: Transaction[Any], message: Any
) -> DeferError | None:
    """Return the same for a handler that is a coroutine function."""
    try:
        await consume(txn, message)
    except DeferError as deferred:
        return deferred
    return None
