"""Journals over gRPC: the wire that every Gazette broker speaks.

Requests go to the broker that a journal's route names, where it is known (client section 7),
with a token signed for just that call where keys are configured (protocol section 12).
Responses are validated where they arrive; an invalid one never changes a route.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from gazette_sdk.errors import (
    CallCancelledError,
    CallError,
    ClosedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rpc
from gazette_sdk.protocol.authorization import Authorizer, FixedToken, authority_for, wanted_for
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.service import ERROR_METADATA
from gazette_sdk.transport.base import ANYWHERE, AppendItem, ReadItem, Target, Transport
from gazette_sdk.transport.channels import Channels, Stubs, Tls
from gazette_sdk.transport.dispatcher import (
    SERVICE,
    Peer,
    candidates,
    choose,
)
from gazette_sdk.transport.grpc_status import FirstStatus, call_error
from gazette_sdk.transport.route_cache import DEFAULT_SIZE, DEFAULT_TTL_S, RouteCache

__all__ = ["CHUNK_BYTES_KEY", "GrpcTransport", "Tls"]

MAX_RECEIVE_BYTES = 16 << 20
"""Greatest message a client accepts (client section 1)."""

READ_CHUNK_BYTES = 128 << 10
"""Content per message that we ask of our own brokers; measured best on a loopback connection."""

CHUNK_BYTES_KEY = "gazette-chunk-bytes"
"""Metadata that tells our own brokers what content per message this client takes. Brokers that
don't know it send at most 32 KiB, as they always do."""

CONNECT_TIMEOUT_S = 10.0
"""What a call waits for its broker to be reachable: enough for one that is just starting."""

ROLLBACK_TIMEOUT_S = 10.0
"""What an append that was given up waits for the broker to say that it rolled back."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What is known of one call while it runs."""

    method: str
    journal: str | None
    peer: Peer
    where: str
    metadata: tuple[tuple[str, str], ...]
    stubs: Stubs


class GrpcTransport(Transport):
    """Journals over gRPC.

    Args:
        address: endpoint URL of the service: ``http://host:port``, ``https://host:port`` or
            ``unix:///path``.
        zone: the client's own zone; reads prefer brokers in it.
        cache_size: journals whose routes are remembered; 0 lets brokers proxy every call.
        cache_ttl_s: age in seconds from which a remembered route is not used any more.
        tls: certificates, for ``https``.
        auth_keys: base64 keys of the cluster; the first signs a token for each call.
        auth_token: a ready-made bearer token; used only where no keys are given.
        max_receive_bytes: greatest message to accept.
        reconnect_backoff_max_s: longest wait between two dials of a lost connection; brokers
            among themselves use 0.5.
        connect_timeout_s: what a call waits for a broker to be reachable.
        read_chunk_bytes: content per message to ask of brokers that can choose.

    Raises:
        ValidationError: the address is not an endpoint URL.
        ConfigurationError: the keys are malformed.
    """

    def __init__(
        self,
        address: str,
        *,
        zone: str = "",
        cache_size: int = DEFAULT_SIZE,
        cache_ttl_s: float = DEFAULT_TTL_S,
        tls: Tls | None = None,
        auth_keys: str = "",
        auth_token: str = "",
        max_receive_bytes: int = MAX_RECEIVE_BYTES,
        reconnect_backoff_max_s: float = 5.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_chunk_bytes: int = READ_CHUNK_BYTES,
    ) -> None:
        self.address = address
        self.routes = RouteCache(cache_size, cache_ttl_s)
        self.knows_routes = cache_size > 0
        self._zone = zone
        self._authorizer: Authorizer = authority_for(auth_keys)
        if auth_token and not auth_keys.strip():
            self._authorizer = FixedToken(auth_token)
        self._read_metadata = ((CHUNK_BYTES_KEY, str(read_chunk_bytes)),)
        self._channels = Channels(
            address,
            tls=tls or Tls(),
            max_receive_bytes=max_receive_bytes,
            reconnect_backoff_max_s=reconnect_backoff_max_s,
            connect_timeout_s=connect_timeout_s,
        )

    def __repr__(self) -> str:
        return f"GrpcTransport({self.address!r})"

    # ------------------------------------------------------------------ calls

    async def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse, None]:
        """See :meth:`Transport.list`. Routes of a listing that ends are remembered."""
        rpc.validate(request)
        async with self._begin("List", None, ANYWHERE, request) as call:
            stream = call.stubs.list(request, metadata=call.metadata)
            starts_snapshot = True
            try:
                async for response in self._responses(call, stream):
                    if starts_snapshot:  # only its first message has status and header
                        rpc.validate(response)
                        starts_snapshot = False
                    elif request.watch and not response.journals:
                        starts_snapshot = True
                    if not request.watch:
                        for journal in response.journals:
                            self.routes.update(journal.spec.name, journal.route)
                    yield response
            finally:
                stream.cancel()

    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:
        """See :meth:`Transport.apply`."""
        rpc.validate(request)
        async with self._begin("Apply", None, ANYWHERE, request) as call:
            response: pb.ApplyResponse = await self._unary(call, call.stubs.apply, request)
        return response

    async def read(
        self, request: pb.ReadRequest, target: Target = ANYWHERE
    ) -> AsyncGenerator[ReadItem, None]:
        """See :meth:`Transport.read`."""
        rpc.validate(request)
        async with self._begin("Read", request.journal, target, request) as call:
            stream = call.stubs.read(request, metadata=call.metadata + self._read_metadata)
            expected = -1
            try:
                async for item in self._responses(call, stream):
                    if isinstance(item, tuple):
                        offset, content = item
                        if offset == expected:
                            expected += len(content)
                            yield content
                            continue
                        item = pb.ReadResponse(offset=offset, content=content)  # noqa: PLW2901
                    rpc.validate(item)
                    if item.HasField("header"):
                        self.routes.update(request.journal, item.header.route)
                    expected = item.offset + len(item.content)
                    yield item
            finally:
                stream.cancel()

    async def append(
        self, requests: AsyncIterator[AppendItem], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        """See :meth:`Transport.append`. No call is opened before there is a first request.

        The name's metadata is stripped, unless the caller names an exact broker: other
        implementations' brokers cannot proxy an append with metadata.
        """
        opening = await anext(requests, None)
        if not isinstance(opening, pb.AppendRequest):
            raise ValidationError("an append begins with the request that names its journal")
        journal = opening.journal
        if target.member is None and strip_meta(journal) != journal:
            stripped = pb.AppendRequest()
            stripped.CopyFrom(opening)
            stripped.journal = strip_meta(journal)
            opening = stripped
        rpc.validate(opening)
        async with self._begin("Append", journal, target, opening, needs_primary=True) as call:
            response = await self._append(call, opening, requests)
            rpc.validate(response)
            self.routes.update(journal, response.header.route)
        return response

    async def replicate(
        self, requests: AsyncIterator[pb.ReplicateRequest], target: Target
    ) -> AsyncGenerator[pb.ReplicateResponse, None]:
        """See :meth:`Transport.replicate`. No call is opened before there is a first request."""
        opening = await anext(requests, None)
        if opening is None:
            return
        journal = opening.proposal.journal
        async with self._begin("Replicate", journal, target, opening) as call:
            stream = call.stubs.replicate(metadata=call.metadata)
            ended = FirstStatus(stream)
            sending = asyncio.create_task(_send(stream, opening, requests))
            sending.add_done_callback(lambda task: _give_up_if_failed(task, stream))
            try:
                async for response in self._responses(call, stream, ended, sending):
                    yield response
            finally:
                stream.cancel()
                await _ended(sending)

    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        """See :meth:`Transport.list_fragments`."""
        rpc.validate(request)
        async with self._begin("ListFragments", request.journal, target, request) as call:
            response: pb.FragmentsResponse = await self._unary(
                call, call.stubs.list_fragments, request
            )
        return response

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest
    ) -> pb.FragmentStoreHealthResponse:
        """See :meth:`Transport.fragment_store_health`."""
        rpc.validate(request)
        async with self._begin("FragmentStoreHealth", None, ANYWHERE, request) as call:
            response: pb.FragmentStoreHealthResponse = await self._unary(
                call, call.stubs.fragment_store_health, request
            )
        return response

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`."""
        await self._channels.aclose()

    # ------------------------------------------------------------- their parts

    @asynccontextmanager
    async def _begin(
        self,
        method: str,
        journal: str | None,
        target: Target,
        opening: Message,
        *,
        needs_primary: bool = False,
    ) -> AsyncIterator[_Call]:
        """Choose a broker, connect to it; forget the route if the call ends as unavailable."""
        if journal is not None and target.route is None and target.member is None:
            target = Target(self.routes.route(journal))
        peer = SERVICE
        try:
            peers = candidates(target, needs_primary=needs_primary)
            peer = choose(peers, self._zone, self._channels.health)
            where = self._channels.where(peer)
            async with self._channels.use(peer) as stubs:
                yield _Call(method, journal, peer, where, self._metadata(opening), stubs)
        except UnavailableError as error:
            if journal is not None:
                self.routes.invalidate(journal)
            if peer == SERVICE and target.member is None:
                raise UnavailableError(
                    f"{error}; check that a broker runs at {self.address}, or set GAZETTE_ADDRESS "
                    "to the address of one",
                    journal=journal,
                ) from error
            raise

    async def _unary(self, call: _Call, stub: Any, request: Message) -> Any:
        pending = stub(request, metadata=call.metadata)
        with self._errors_of(call, pending):
            response = await pending
        rpc.validate(response)
        return response

    async def _append(
        self, call: _Call, opening: pb.AppendRequest, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        stream = call.stubs.append(metadata=call.metadata)
        ended = FirstStatus(stream)
        receiving = asyncio.create_task(_only_response(stream, ended))
        try:
            with self._errors_of(call, stream, ended):
                try:
                    await _send(stream, opening, requests)
                except Exception:
                    await self._roll_back(stream, receiving)
                    raise
                response: pb.AppendResponse | None = await receiving
        finally:
            stream.cancel()
            await _ended(receiving)
        if response is None:
            raise CallError(
                f"Append at {call.where}: ended without a response", journal=call.journal
            )
        return response

    async def _roll_back(self, stream: Any, receiving: asyncio.Task[Any]) -> None:
        """Half-close without commit, and wait for the broker to have seen it."""
        await _half_close(stream)
        await asyncio.wait([receiving], timeout=ROLLBACK_TIMEOUT_S)

    async def _responses(
        self,
        call: _Call,
        stream: Any,
        ended: FirstStatus | None = None,
        sending: asyncio.Task[None] | None = None,
    ) -> AsyncIterator[Any]:
        """The responses of a stream; its end becomes one of our errors."""
        with self._errors_of(call, stream, ended, sending):
            async for response in stream:
                yield response

    @contextlib.contextmanager
    def _errors_of(
        self,
        call: _Call,
        pending: Any,
        ended: FirstStatus | None = None,
        sending: asyncio.Task[None] | None = None,
    ) -> Iterator[None]:
        """Turn the end of a gRPC call into one of our errors."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
            if ended is not None and ended.code is not None:
                code, details = ended.code, ended.details
            raise call_error(
                code,
                details,
                method=call.method,
                where=call.where,
                journal=call.journal,
                kind=_told_kind(error),
            ) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the caller gives up
            if sending is not None and sending.done() and not sending.cancelled():
                failure = sending.exception()
                if failure is not None:
                    raise failure from None
            if self._channels.closed:
                raise ClosedError(
                    f"{call.method}: the transport was closed during the call", journal=call.journal
                ) from None
            if not pending.cancelled():
                raise
            raise CallCancelledError(
                f"{call.method} at {call.where}: cancelled", journal=call.journal
            ) from None

    def _metadata(self, opening: Message) -> tuple[tuple[str, str], ...]:
        """Metadata of a call, with a token that is good for just this call."""
        wanted = wanted_for(opening)
        header = self._authorizer.header(
            wanted.capability, wanted.selector, wanted.ttl_s, time.time()
        )
        return () if header is None else (("authorization", header),)


def _told_kind(error: grpc.aio.AioRpcError) -> str:
    """The class of the broker's error, if it tells."""
    for name, value in error.trailing_metadata() or ():
        if name == ERROR_METADATA:
            return str(value)
    return ""


_ANSWERED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""What a send fails with when the other side has already ended the call."""


async def _send(stream: Any, opening: Message, requests: AsyncIterator[Any]) -> None:
    """Send all requests and half-close; stop quietly once the other side has ended the call.

    A failed send carries no cause: what the other side answered tells it.
    """
    try:
        await stream.write(opening)
    except _ANSWERED:
        return
    async for request in requests:
        try:
            await stream.write(request)
        except _ANSWERED:
            return
    await _half_close(stream)


async def _half_close(stream: Any) -> None:
    with contextlib.suppress(*_ANSWERED):
        await stream.done_writing()


async def _only_response(stream: Any, ended: FirstStatus) -> Any:
    """The one response of a stream, read to its end; ``None`` if there was none."""
    last = None
    try:
        async for response in stream:
            last = response
    except grpc.aio.AioRpcError:
        # A send that failed behind an early answer overwrites its status, not the answer.
        if last is None or ended.code is not grpc.StatusCode.OK:
            raise
    return last


def _give_up_if_failed(sending: asyncio.Task[None], stream: Any) -> None:
    if not sending.cancelled() and sending.exception() is not None:
        stream.cancel()


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; what it raised was reported elsewhere."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
