"""Content of one append, from its client to every replica (broker sections 5.3 and 8)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from gazette_sdk.broker.append.flow_control import TICK_MS, Credit, FlowControl
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
