"""Journals over gRPC: the wire that every Gazette broker speaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.message import Message

from gazette_sdk.errors import CallCancelledError, CallError, ClosedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.service import ERROR_METADATA
from gazette_sdk.transport.routing.dispatcher import Health
from gazette_sdk.transport.routing.route_cache import DEFAULT_SIZE, DEFAULT_TTL_S
from gazette_sdk.transport.routing.routed import (
    CHUNK_BYTES_KEY,
    CONNECT_TIMEOUT_S,
    MAX_RECEIVE_BYTES,
    RECONNECT_BACKOFF_MAX_S,
    ROLLBACK_TIMEOUT_S,
    RoutedTransport,
)
from gazette_sdk.transport.target import AppendItem, Destination, Peer
from gazette_sdk.transport.wires.base import PreparedAppend, Wire
from gazette_sdk.transport.wires.call_status import call_error
from gazette_sdk.transport.wires.grpc.channels import Channels, Stubs
from gazette_sdk.transport.wires.grpc.codec import Chunk
from gazette_sdk.transport.wires.grpc.pipeline import StreamedPipeline
from gazette_sdk.transport.wires.grpc.status import FirstStatus
from gazette_sdk.transport.wires.tls import Tls

__all__ = ["READ_CHUNK_BYTES", "GrpcTransport", "GrpcWire", "Tls"]

READ_CHUNK_BYTES = 512 << 10
"""Content per message that we ask of our own brokers; measured best on a loopback connection."""


class GrpcTransport(RoutedTransport):
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
        reconnect_backoff_max_s: float = RECONNECT_BACKOFF_MAX_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_chunk_bytes: int = READ_CHUNK_BYTES,
    ) -> None:
        channels = Channels(
            address,
            tls=tls or Tls(),
            max_receive_bytes=max_receive_bytes,
            reconnect_backoff_max_s=reconnect_backoff_max_s,
            connect_timeout_s=connect_timeout_s,
        )
        super().__init__(
            address,
            GrpcWire(channels, read_chunk_bytes=read_chunk_bytes),
            zone=zone,
            cache_size=cache_size,
            cache_ttl_s=cache_ttl_s,
            auth_keys=auth_keys,
            auth_token=auth_token,
        )
        self._channels = channels


class _Call(NamedTuple):
    """What is known of one call while it runs."""

    to: Destination
    metadata: tuple[tuple[str, str], ...]
    stubs: Stubs


class GrpcWire(Wire):
    """Calls to brokers over gRPC.

    Args:
        channels: its connections, which it closes.
        read_chunk_bytes: content per message to ask of brokers that can choose.
    """

    def __init__(self, channels: Channels, *, read_chunk_bytes: int = READ_CHUNK_BYTES) -> None:
        self._channels = channels
        self._read_metadata = ((CHUNK_BYTES_KEY, str(read_chunk_bytes)),)

    def health(self, peer: Peer) -> Health:
        """See :meth:`Wire.health`."""
        return self._channels.health(peer)

    async def unary(self, to: Destination, request: Message) -> Any:
        """See :meth:`Wire.unary`."""
        async with self._begin(to) as call:
            pending = call.stubs.unary(to.rpc.name)(request, metadata=call.metadata)
            with self._errors_of(call, pending):
                return await pending

    async def list(
        self, to: Destination, request: pb.ListRequest
    ) -> AsyncGenerator[pb.ListResponse, None]:
        """See :meth:`Wire.list`."""
        async with self._begin(to) as call:
            stream = call.stubs.list(request, metadata=call.metadata)
            try:
                async for response in self._responses(call, stream):
                    yield response
            finally:
                stream.cancel()

    async def read(
        self, to: Destination, request: pb.ReadRequest
    ) -> AsyncGenerator[pb.ReadResponse | Chunk | bytes, None]:
        """See :meth:`Wire.read`."""
        async with self._begin(to) as call:
            stream = call.stubs.read(request, metadata=call.metadata + self._read_metadata)
            try:
                async for item in self._responses(call, stream):
                    yield item
            finally:
                stream.cancel()

    async def append(
        self, append: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        """See :meth:`Wire.append`."""
        async with self._begin(append.to) as call:
            return await self._append(call, append.request, requests)

    def try_pipeline(self, to: Destination) -> StreamedPipeline:
        """See :meth:`Wire.try_pipeline`. The append connects, where need be."""
        return StreamedPipeline(to.peer, self.append)

    async def open_pipeline(self, to: Destination) -> StreamedPipeline:
        """See :meth:`Wire.open_pipeline`."""
        return self.try_pipeline(to)

    async def replicate(
        self,
        to: Destination,
        opening: pb.ReplicateRequest,
        requests: AsyncIterator[pb.ReplicateRequest],
    ) -> AsyncGenerator[pb.ReplicateResponse, None]:
        """See :meth:`Wire.replicate`."""
        async with self._begin(to) as call:
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

    async def aclose(self) -> None:
        """See :meth:`Wire.aclose`."""
        await self._channels.aclose()

    # ------------------------------------------------------------- their parts

    @asynccontextmanager
    async def _begin(self, to: Destination) -> AsyncIterator[_Call]:
        """Connect to the broker."""
        async with self._channels.use(to.peer) as stubs:
            told = to.authorization
            yield _Call(to, () if told is None else (("authorization", told),), stubs)

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
                f"Append at {call.to.where}: ended without a response", journal=call.to.journal
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
                code.name,
                details,
                method=call.to.rpc.name,
                where=call.to.where,
                journal=call.to.journal,
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
                    f"{call.to.rpc.name}: the transport was closed during the call",
                    journal=call.to.journal,
                ) from None
            if not pending.cancelled():
                raise
            raise CallCancelledError(
                f"{call.to.rpc.name} at {call.to.where}: cancelled", journal=call.to.journal
            ) from None


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
    # Unlike a write, grpcio leaves an internal error as it is where the connection was just lost.
    with contextlib.suppress(*_ANSWERED, grpc.aio.InternalError):
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
