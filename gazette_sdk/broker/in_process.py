"""A transport to the broker in this very process: no port, no serialization."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar

from google.protobuf.message import Message

from gazette_sdk.broker.fronts import Chunk, Journals, chunks
from gazette_sdk.errors import ClosedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authorizer, wanted_for
from gazette_sdk.server.call import Call
from gazette_sdk.transport.base import ANYWHERE, AppendItem, ReadItem, Target, Transport

__all__ = ["CHUNK_BYTES", "InProcessTransport"]

CHUNK_BYTES = 256 << 10
"""Content of one item: it is copied once, so that bigger ones gain little."""


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
        self._closed = False

    async def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        """See :meth:`Transport.list`."""
        async with aclosing(self._service.list(request, self._call(request))) as responses:
            async for response in responses:
                yield response

    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:
        """See :meth:`Transport.apply`."""
        return await self._service.apply(request, self._call(request))

    async def read(
        self, request: pb.ReadRequest, target: Target = ANYWHERE
    ) -> AsyncGenerator[ReadItem]:
        """See :meth:`Transport.read`."""
        del target
        items = chunks(self._service.read(request, self._call(request)), CHUNK_BYTES)
        async with aclosing(items):
            async for item in items:
                yield item.content if isinstance(item, Chunk) else item

    async def append(
        self, requests: AsyncIterator[AppendItem], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        """See :meth:`Transport.append`."""
        del target
        opening = await anext(requests, None)
        if opening is None:
            return await self._service.append(requests, self._call(pb.AppendRequest()))
        named = opening if isinstance(opening, pb.AppendRequest) else pb.AppendRequest()
        return await self._service.append(_after(opening, requests), self._call(named))

    async def replicate(
        self, requests: AsyncIterator[pb.ReplicateRequest], target: Target
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """See :meth:`Transport.replicate`."""
        del target
        opening = await anext(requests, None)
        if opening is None:
            return
        stream = self._service.replicate(_after(opening, requests), self._call(opening))
        async with aclosing(stream) as responses:
            async for response in responses:
                yield response

    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        """See :meth:`Transport.list_fragments`."""
        del target
        return await self._service.list_fragments(request, self._call(request))

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest
    ) -> pb.FragmentStoreHealthResponse:
        """See :meth:`Transport.fragment_store_health`."""
        return await self._service.fragment_store_health(request, self._call(request))

    async def aclose(self) -> None:
        """Refuse further calls; the broker goes on."""
        self._closed = True

    def _call(self, opening: Message) -> Call:
        if self._closed:
            raise ClosedError("the transport was closed")
        authorization: str | None = None
        if self._authorizer is not None:
            wanted = wanted_for(opening)
            authorization = self._authorizer.header(
                wanted.capability, wanted.selector, wanted.ttl_s, time.time()
            )
        return Call(authorization=authorization, chunk_bytes=CHUNK_BYTES)


async def _after(opening: T, requests: AsyncIterator[T]) -> AsyncIterator[T]:
    yield opening
    async for request in requests:
        yield request
