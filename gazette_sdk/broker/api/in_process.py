"""Transport to a broker in the same process: no port, no serialization."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import TypeVar

from google.protobuf.message import Message

from gazette_sdk.broker.api.fronts import Chunk, Journals, chunks
from gazette_sdk.errors import ClosedError, GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authorizer, claims_for
from gazette_sdk.server.authorization import Call
from gazette_sdk.tracing import caller
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import ANYWHERE, AppendItem, ReadItem, ReplicateItem, Target

CHUNK_BYTES = 256 << 10
"""Content of one item: it is copied once, so that bigger ones gain little."""

_CLOSED = "the transport was closed; connect again"

_SUSPENDED = "the broker joins its cluster again after it lost its lease; try again"

T = TypeVar("T")


class InProcessTransport(Transport):
    """Reaches journals through a broker's service object, on its event loop.

    Targets do not matter: the broker proxies what it does not serve itself.

    Args:
        service: the broker's.
        authorizer: signs each call where the broker has keys.
    """

    def __init__(self, service: Journals, authorizer: Authorizer | None = None) -> None:
        self._service = service
        self._authorizer = authorizer
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._is_suspended = False
        self._calls: set[_WaitingCall] = set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """See :meth:`Transport.loop`: the broker's."""
        return self._loop

    def suspend(self) -> None:
        """End running calls and refuse new ones with UnavailableError, until :meth:`resume`."""
        self._is_suspended = True
        for call in tuple(self._calls):
            call.end(UnavailableError(_SUSPENDED))

    def resume(self, service: Journals) -> None:
        """Reach journals through ``service`` from now on."""
        self._service = service
        self._is_suspended = False

    async def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        """See :meth:`Transport.list`."""
        async with aclosing(self._service.list(request, self._call(request))) as responses:
            while (response := await self._next(responses)) is not None:
                yield response

    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:
        """See :meth:`Transport.apply`."""
        call = self._call(request)
        with _WaitingCall(self._calls):
            return await self._service.apply(request, call)

    async def read(
        self, request: pb.ReadRequest, target: Target = ANYWHERE
    ) -> AsyncGenerator[ReadItem]:
        """See :meth:`Transport.read`."""
        del target
        items = chunks(self._service.read(request, self._call(request)), CHUNK_BYTES)
        async with aclosing(items):
            while (item := await self._next(items)) is not None:
                yield item.content if isinstance(item, Chunk) else item

    async def append(
        self, requests: AsyncIterator[AppendItem], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        """See :meth:`Transport.append`."""
        del target
        opening = await anext(requests, None)
        named = opening if isinstance(opening, pb.AppendRequest) else pb.AppendRequest()
        call = self._call(named, caller())
        if opening is not None:
            requests = _after(opening, requests)
        with _WaitingCall(self._calls):
            return await self._service.append(requests, call)

    async def replicate(
        self, requests: AsyncIterator[ReplicateItem], target: Target
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """See :meth:`Transport.replicate`."""
        del target
        opening = await anext(requests, None)
        if opening is None:
            return
        named = opening if isinstance(opening, pb.ReplicateRequest) else pb.ReplicateRequest()
        stream = self._service.replicate(_after(opening, requests), self._call(named))
        async with aclosing(stream) as responses:
            while (response := await self._next(responses)) is not None:
                yield response

    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        """See :meth:`Transport.list_fragments`."""
        del target
        call = self._call(request)
        with _WaitingCall(self._calls):
            return await self._service.list_fragments(request, call)

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, target: Target = ANYWHERE
    ) -> pb.FragmentStoreHealthResponse:
        """See :meth:`Transport.fragment_store_health`."""
        del target
        call = self._call(request)
        with _WaitingCall(self._calls):
            return await self._service.fragment_store_health(request, call)

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`. The broker continues."""
        self._closed = True
        for call in tuple(self._calls):
            call.end(ClosedError(_CLOSED))

    async def _next(self, items: AsyncGenerator[T]) -> T | None:
        """Return the next item of a call; ``None`` at its end."""
        self._require_open()
        with _WaitingCall(self._calls):
            return await anext(items, None)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(_CLOSED)
        if self._is_suspended:
            raise UnavailableError(_SUSPENDED)

    def _call(self, opening: Message, traceparent: str = "") -> Call:
        self._require_open()
        authorization: str | None = None
        if self._authorizer is not None:
            wanted = claims_for(opening)
            authorization = self._authorizer.header(
                wanted.capability, wanted.selector, wanted.ttl_s, time.time()
            )
        return Call(authorization=authorization, chunk_bytes=CHUNK_BYTES, traceparent=traceparent)


class _WaitingCall:
    """Scope of a call that waits for the broker. Closing or suspending the transport ends it."""

    __slots__ = ("_calls", "_cancelling", "_error", "_task")

    def __init__(self, calls: set[_WaitingCall]) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "calls are made by coroutines"
        self._task = task
        self._cancelling = task.cancelling()
        self._error: GazetteError | None = None
        self._calls.add(self)

    def end(self, error: GazetteError) -> None:
        """End it by ``error``."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._calls.discard(self)
        if self._error is None:
            return
        others_cancel = self._task.uncancel() > self._cancelling
        if isinstance(error, asyncio.CancelledError) and not others_cancel:
            raise self._error from None


async def _after(opening: T, requests: AsyncIterator[T]) -> AsyncIterator[T]:
    yield opening
    async for request in requests:
        yield request
