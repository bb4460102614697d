"""Content of one append, from its client to all replicas, and its rates (broker sections 5.3, 8).

:class:`FlowControl` bounds the rate of appends to one journal, from below and above. It is pure
integer arithmetic over milliseconds: the caller reports chunks and ticks, and gets a verdict. The
state belongs to the replica, so that the next append can use the credit left by the last.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from gazette_sdk.broker.append.machine import (
    ContentEffect,
    ContentInput,
    ContentState,
    ContentStep,
    content_step,
)
from gazette_sdk.broker.replication.pipeline import Pipeline, Signal
from gazette_sdk.errors import CallError, GazetteError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import set_sum
from gazette_sdk.protocol.rules import validate
from gazette_sdk.transport.wire import AppendItem

TICK_MS: Final = 50
"""Milliseconds between ticks while content streams."""

_MS: Final = 1000
_BALANCE_CAP_S: Final = 10


class Credit(enum.Enum):
    """Credit for a chunk, or at a tick."""

    GO = enum.auto()
    """There is credit for the current chunk, or no chunk."""
    HOLD = enum.auto()
    """The current chunk has to wait for credit."""
    UNDERFLOW = enum.auto()
    """The client sends less than the minimum rate: abort its append."""


class FlowControl:
    """Flow control of one journal's appends.

    Args:
        min_rate: bytes per second which a client must send at least; 0 for no minimum.
        global_max_rate: bound of the process on every journal's rate; 0 for none.

    Attributes:
        max_rate: bytes per second which the current append may send; 0 for no bound.
        balance: credit, in bytes.
        spent: bytes the client is ahead of the minimum rate.
        charge: bytes of the current chunk for which there is no credit yet.
        total_chunks: chunks of this append.
        delayed_chunks: chunks of this append which had to wait.
    """

    def __init__(self, *, min_rate: int, global_max_rate: int = 0) -> None:
        self.min_rate = min_rate
        self._global_max_rate = global_max_rate
        self.max_rate = 0
        self.balance = 0
        self.spent = 0
        self.charge = 0
        self.total_chunks = 0
        self.delayed_chunks = 0
        self._last_ms: int | None = None
        self._is_used = False

    def reset(self, max_append_rate: int, now_ms: int) -> None:
        """Begin an append.

        Args:
            max_append_rate: the journal's, in bytes per second; 0 for no bound, in which case the
                process's bound does not count either.
            now_ms: of any clock that does not go back, in milliseconds.
        """
        self.max_rate = max_append_rate
        if 0 < self._global_max_rate < max_append_rate:
            self.max_rate = self._global_max_rate
        self.spent = self.min_rate
        self.charge = self.total_chunks = self.delayed_chunks = 0
        if self._is_used:
            self._accrue(now_ms)  # credit of the pause between appends; it costs no spent
        else:
            # Appends of no bytes, such as pulses, are no use: a new journal saves up nothing.
            self.balance = self.max_rate
            self._last_ms = now_ms

    def chunk(self, length_bytes: int, messages: int = 1) -> Credit:
        """Account for a chunk. No other may follow before there is credit for it.

        Args:
            length_bytes: of its content.
            messages: as how many it counts: empty ones may be charged with one that is not.

        Returns:
            GO, or HOLD: ask :meth:`tick` until it says GO.
        """
        assert self.charge == 0, "the chunk before is held"
        self._is_used = self._is_used or length_bytes > 0
        self.total_chunks += messages
        if not self.max_rate and not self.balance:
            self.spent = min(self.spent + length_bytes, self.min_rate)
            return Credit.GO
        self.charge = length_bytes
        self._debit()
        if self.charge:
            self.delayed_chunks += 1
            return Credit.HOLD
        return Credit.GO

    def tick(self, now_ms: int) -> Credit:
        """Account for the time since the last tick.

        Credit accrues before the minimum rate is checked: a late tick does not end an append
        which was itself held back.
        """
        elapsed_ms = self._accrue(now_ms)
        if elapsed_ms < 0:
            return Credit.HOLD if self.charge else Credit.GO
        if self.min_rate:
            self.spent = max(0, self.spent - self.min_rate * elapsed_ms // _MS)
        self._debit()
        if self.min_rate and self.spent <= 0:
            return Credit.UNDERFLOW
        return Credit.HOLD if self.charge else Credit.GO

    def excuse(self, now_ms: int) -> None:
        """Account for time in which the client waited for us. The minimum rate ignores it."""
        self._accrue(now_ms)
        self._debit()

    def invalidate(self) -> None:
        """Lift the maximum rate for the rest of this append: its route has changed."""
        self.max_rate = 0
        self._debit()

    def _accrue(self, now_ms: int) -> int:
        """Add credit since the last tick. Returns the milliseconds since, negative for none."""
        assert self._last_ms is not None, "ticks come between reset and the append's end"
        elapsed_ms = now_ms - self._last_ms
        if elapsed_ms < 0:
            return elapsed_ms
        self._last_ms = now_ms
        if self.max_rate:
            self.balance = min(
                self.balance + self.max_rate * elapsed_ms // _MS, self.max_rate * _BALANCE_CAP_S
            )
        return elapsed_ms

    def _debit(self) -> None:
        credit = min(self.balance, self.charge)
        paid = credit if self.max_rate else self.charge
        self.balance -= credit
        self.charge -= paid
        self.spent = min(self.spent + paid, self.min_rate)


TICK_S = TICK_MS / 1000
"""Period at which the rates of a stream are checked."""

_DIGEST_OF_NOTHING = hashlib.sha1(usedforsecurity=False).digest()
"""Sum in the response to a zero-byte append: unlike an empty fragment's, it is not zero."""

_TOO_SLOW = "the client's stream did not sustain the minimum append rate"


class Pace:
    """Flow control of one stream, on the loop's clock.

    The rates are checked each :data:`TICK_S`. The minimum rate counts only while we wait for the
    client: the time that we take to write its content does not count.

    Args:
        flow: the replica's flow control, already reset for this append.
        invalidated: lifts the maximum rate, as the route's convergence matters more.

    Attributes:
        on_client: True while we wait for the client.
    """

    __slots__ = ("_flow", "_handle", "_invalidated", "_loop", "_paid", "_scope", "_timer",
                 "on_client")  # fmt: skip

    def __init__(self, flow: FlowControl, invalidated: Signal) -> None:
        self.on_client = True
        self._flow = flow
        self._invalidated = invalidated
        self._loop = asyncio.get_running_loop()
        self._paid: asyncio.Future[None] | None = None
        self._scope: asyncio.Timeout
        self._timer: asyncio.TimerHandle
        self._handle = 0

    def start(self, scope: asyncio.Timeout) -> None:
        """Begin to tick. ``scope`` expires if the client is too slow."""
        self._scope = scope
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._handle = self._invalidated.on_fire(self._lift)

    def stop(self) -> None:
        """Stop to tick."""
        self._timer.cancel()
        self._invalidated.forget(self._handle)

    def charge(self, length_bytes: int) -> bool:
        """Account for a message with content. Return True if :meth:`held` must be awaited."""
        return self._flow.chunk(length_bytes) is Credit.HOLD

    async def held(self) -> None:
        """Wait until there is credit for the current message."""
        self._paid = self._loop.create_future()
        await self._paid
        self._paid = None

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        now_ms = int(self._loop.time() * 1000)
        if not self.on_client and self._paid is None:
            self._flow.excuse(now_ms)
            return
        verdict = self._flow.tick(now_ms)
        if verdict is Credit.UNDERFLOW:
            self._timer.cancel()
            self._scope.reschedule(self._loop.time())
        elif verdict is Credit.GO:
            self._release()

    def _lift(self) -> None:
        self._flow.invalidate()
        self._release()

    def _release(self) -> None:
        if self._paid is not None and not self._paid.done():
            self._paid.set_result(None)


class ClientContent:
    """Outcome of a client's stream.

    Args:
        may_have_content: True if the journal's flags and the request's mode allow content.

    Attributes:
        effect: COMMIT, ROLL_BACK or DENY.
        error: reason of a rollback.
        begin: offset of the append.
        length: bytes of content.
    """

    effect = ContentEffect.ROLL_BACK
    error: BaseException | None = None
    begin = 0
    length = 0
    _sha1: Any = None  # hashlib gives its objects no public type
    _state = ContentState.OPEN

    def __init__(self, *, may_have_content: bool) -> None:
        self._may_have_content = may_have_content

    async def receive(
        self,
        items: AsyncIterator[AppendItem],
        pipeline: Pipeline,
        flow: FlowControl,
        invalidated: Signal,
        before_first: Callable[[], Awaitable[None]],
    ) -> None:
        """Send the client's content to every replica until its stream is decided.

        Errors of the stream or of a replica, and cancellation, are kept in :attr:`error`: the
        content sent so far has to be rolled back first.

        Args:
            items: the client's stream, after the opening request.
            pipeline: where content goes.
            flow: the replica's flow control, reset for this append.
            invalidated: of the resolution.
            before_first: awaited at the client's first message; it may roll the spool.
        """
        pace = Pace(flow, invalidated)
        try:
            async with asyncio.timeout(None) as scope:
                pace.start(scope)
                try:
                    await self._received(items, pipeline, pace, before_first)
                finally:
                    pace.stop()
        except TimeoutError:
            self._decide(content_step(self._state, ContentInput.BROKEN), _TOO_SLOW)
        except (GazetteError, asyncio.CancelledError) as broken:
            self.error = broken

    async def _received(
        self,
        items: AsyncIterator[AppendItem],
        pipeline: Pipeline,
        pace: Pace,
        before_first: Callable[[], Awaitable[None]],
    ) -> None:
        """Take the client's messages until they are decided."""
        is_first = True
        async for item in items:
            pace.on_client = False
            if is_first:
                is_first = False
                await before_first()
                self._begin_at(pipeline.spool.fragment)
            given, content, reason = self._classify(item)
            effect, after, _ = decided = content_step(self._state, given)
            if pace.charge(len(content)):
                await pace.held()
            if effect is ContentEffect.SCATTER:
                await pipeline.scatter_content(content, self.length, self._sha1)
                self.length += len(content)
                if pipeline.streams and pipeline.error is not None:
                    raise pipeline.error
            elif effect is not ContentEffect.WAIT:
                self._decide(decided, reason)
                return
            self._state = after
            pace.on_client = True
        if is_first:
            self._begin_at(pipeline.spool.fragment)
        self._decide(content_step(self._state, ContentInput.END))

    def commit(self, spool: pb.Fragment) -> pb.Fragment:
        """Return span and sum of an append whose commit made ``spool`` of the fragment."""
        commit = pb.Fragment()
        commit.CopyFrom(spool)
        commit.begin, commit.end = self.begin, self.begin + self.length
        if self._sha1 is not None:
            set_sum(commit.sum, self._sha1.digest())
        elif not self.length:
            set_sum(commit.sum, _DIGEST_OF_NOTHING)
        return commit

    def _begin_at(self, spool: pb.Fragment) -> None:
        self.begin = spool.end
        # Content which begins a fragment has the fragment's own sum: it is hashed once.
        is_first = spool.begin == spool.end
        self._sha1 = None if is_first else hashlib.sha1(usedforsecurity=False)

    def _classify(self, item: AppendItem) -> tuple[ContentInput, bytes, str]:
        """Return the kind of a client's message, its content, and the reason why it is invalid."""
        if isinstance(item, pb.AppendRequest):
            if item.ByteSize() == 0:
                return ContentInput.EMPTY, b"", ""
            try:
                validate(item)
            except ValidationError as error:
                return ContentInput.INVALID, b"", str(error)
            if item.journal:
                return ContentInput.INVALID, b"", "it names a journal"
            content = item.content
        else:
            content = item
        if not content:
            return ContentInput.EMPTY, b"", ""
        if not self._may_have_content:
            return ContentInput.FORBIDDEN, content, ""
        return ContentInput.CHUNK, content, ""

    def _decide(self, decided: ContentStep, reason: str = "") -> None:
        self.effect = decided.effect
        if decided.effect is ContentEffect.ROLL_BACK:
            detail = f"{decided.reason} ({reason})" if reason else decided.reason
            self.error = CallError(f"append stream: {detail}")
