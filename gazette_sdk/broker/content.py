"""The client's stream of one append, on its way to every replica (broker sections 5.3 and 8)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from gazette_sdk.broker.append_machine import (
    ContentEffect,
    ContentInput,
    ContentState,
    ContentStep,
    content_step,
)
from gazette_sdk.broker.flow_control import TICK_MS, FlowControl, Verdict
from gazette_sdk.broker.pipeline import Pipeline
from gazette_sdk.broker.slot import Signal
from gazette_sdk.errors import CallError, GazetteError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import sum_of
from gazette_sdk.protocol.rpc import validate
from gazette_sdk.transport.base import AppendItem

__all__ = ["TICK_S", "Content", "Pace"]

TICK_S = TICK_MS / 1000
"""Period at which the rates of a stream are looked at."""

_SUM_OF_NOTHING = sum_of(hashlib.sha1(usedforsecurity=False).digest())
"""What a zero-byte append answers: unlike an empty fragment's, its sum is not zero."""

_TOO_SLOW = "the client's stream did not sustain the minimum append rate"


class Pace:
    """Flow control of one stream, on the loop's clock.

    The rates are looked at each :data:`TICK_S`. A client is held to the minimum rate only while
    we wait for the client: the time it takes to write what it sent is not counted.

    Args:
        flow: the replica's flow control, already reset for this append.
        invalidated: lifts the maximum rate, as the route's convergence matters more.

    Attributes:
        on_client: whether the client is what we wait for.
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
        """Begin to tick. ``scope`` is ended when the client is too slow."""
        self._scope = scope
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._handle = self._invalidated.on_fire(self._lift)

    def stop(self) -> None:
        """Tick no more."""
        self._timer.cancel()
        self._invalidated.forget(self._handle)

    async def charge(self, length_bytes: int) -> None:
        """Account for a message of so many bytes of content, and hold it while it is too early."""
        if self._flow.chunk(length_bytes) is Verdict.HOLD:
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
        if verdict is Verdict.UNDERFLOW:
            self._timer.cancel()
            self._scope.reschedule(self._loop.time())
        elif verdict is Verdict.GO:
            self._release()

    def _lift(self) -> None:
        self._flow.invalidate()
        self._release()

    def _release(self) -> None:
        if self._paid is not None and not self._paid.done():
            self._paid.set_result(None)


class Content:
    """What came of a client's stream.

    Args:
        may_have_content: whether the journal's flags and the request's mode allow any.

    Attributes:
        effect: COMMIT, ROLL_BACK or DENY.
        error: why it is rolled back.
        begin: offset of the append.
        length: bytes of content.
    """

    def __init__(self, *, may_have_content: bool) -> None:
        self.effect = ContentEffect.ROLL_BACK
        self.error: BaseException | None = None
        self.begin = 0
        self.length = 0
        self._may_have_content = may_have_content
        self._sha1: Any = None  # hashlib gives its objects no public type

    async def receive(
        self,
        items: AsyncIterator[AppendItem],
        pipeline: Pipeline,
        pace: Pace,
        before_first: Callable[[], Awaitable[None]],
    ) -> None:
        """Scatter the client's content until its stream is decided.

        Errors of the stream or of a replica, and cancellation, are kept in :attr:`error`: what
        was scattered has to be rolled back first.

        Args:
            items: the client's stream, after the opening request.
            pipeline: where content goes.
            pace: of this stream.
            before_first: awaited at the client's first message; it may roll the spool.
        """
        state = ContentState.OPEN
        self._begin_at(pipeline.spool.fragment)
        begun = False
        try:
            async with asyncio.timeout(None) as scope:
                pace.start(scope)
                async for item in items:
                    pace.on_client = False
                    if not begun:
                        begun = True
                        await before_first()
                        self._begin_at(pipeline.spool.fragment)
                    given, content, reason = self._classify(item)
                    decided = content_step(state, given)
                    await pace.charge(len(content))
                    if decided.effect is ContentEffect.SCATTER:
                        await self._scatter(pipeline, content)
                    elif decided.effect is not ContentEffect.WAIT:
                        self._decide(decided, reason)
                        return
                    state = decided.next
                    pace.on_client = True
                self._decide(content_step(state, ContentInput.END))
        except TimeoutError:
            self._decide(content_step(state, ContentInput.BROKEN), _TOO_SLOW)
        except (GazetteError, asyncio.CancelledError) as broken:
            self.error = broken
        finally:
            pace.stop()

    def sum(self, spool: pb.Fragment) -> pb.SHA1Sum:
        """SHA-1 of the append's content, after its commit made ``spool`` of the fragment."""
        if self._sha1 is not None:
            return sum_of(self._sha1.digest())
        return spool.sum if self.length else _SUM_OF_NOTHING

    def _begin_at(self, spool: pb.Fragment) -> None:
        self.begin = spool.end
        # Content which begins a fragment has the fragment's own sum: it is hashed once.
        is_first = spool.begin == spool.end
        self._sha1 = None if is_first else hashlib.sha1(usedforsecurity=False)

    async def _scatter(self, pipeline: Pipeline, content: bytes) -> None:
        await pipeline.scatter_content(content, self.length, self._sha1)
        self.length += len(content)
        if pipeline.error is not None:
            raise pipeline.error

    def _classify(self, item: AppendItem) -> tuple[ContentInput, bytes, str]:
        """What a message of the client is, its content, and what is wrong with it."""
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
