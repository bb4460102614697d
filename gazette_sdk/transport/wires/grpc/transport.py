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
from gazette_sdk.protocol.rules import ERROR_METADATA
from gazette_sdk.transport.routing.dispatcher import Health
from gazette_sdk.transport.routing.routed import (
    CHUNK_BYTES_KEY,
    ROLLBACK_TIMEOUT_S,
    RoutedTransport,
)
from gazette_sdk.transport.target import AppendItem, Destination, Peer, ReplicateItem
from gazette_sdk.transport.wires.base import PreparedAppend, Wire, WireOptions
from gazette_sdk.transport.wires.call_status import call_error
from gazette_sdk.transport.wires.grpc.channels import Channels, Stubs
from gazette_sdk.transport.wires.grpc.codec import Chunk
from gazette_sdk.transport.wires.grpc.pipeline import StreamedPipeline
from gazette_sdk.transport.wires.grpc.sdk_loop import SdkLoop
from gazette_sdk.transport.wires.replicate_items import as_requests
from gazette_sdk.transport.wires.tls import Tls

__all__ = ["READ_CHUNK_BYTES", "GrpcTransport", "GrpcWire", "Tls"]

READ_CHUNK_BYTES = 512 << 10
"""Content per message that we ask of our own brokers; measured best on a loopback connection."""


class GrpcTransport(RoutedTransport):
    """Journals over gRPC. Calls from other event loops hop to the SDK's loop and back."""

    @staticmethod
    def _make_wire(options: WireOptions) -> GrpcWire:
        return GrpcWire(options)


_CORE_FAILURE = "Internal error from Core"
"""Details that grpcio reports of a send that failed because the call had already ended."""


class _Call(NamedTuple):
    """Call under way."""

    to: Destination
    metadata: tuple[tuple[str, str], ...]
    stubs: Stubs


class GrpcWire(Wire):
    """Calls to brokers over gRPC, made on the SDK's event loop.

    Args:
        options: of the transport.

    Raises:
        ValidationError: the address is not an endpoint URL.
    """

    def __init__(self, options: WireOptions) -> None:
        self._channels = Channels(options)
        self._loop = SdkLoop()
        self._timeout_s = options.call_timeout_s or None
        chunk_bytes = options.read_chunk_bytes or READ_CHUNK_BYTES
        self._read_metadata = ((CHUNK_BYTES_KEY, str(chunk_bytes)),)

    def health(self, peer: Peer) -> Health:
        """See :meth:`Wire.health`."""
        return self._channels.health(peer)

    async def unary(self, to: Destination, request: Message) -> Any:
        """See :meth:`Wire.unary`."""
        return await self._loop.call(self._unary(to, request))

    def list(self, to: Destination, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        """See :meth:`Wire.list`."""
        return self._loop.responses(self._list(to, request))

    def read(
        self, to: Destination, request: pb.ReadRequest
    ) -> AsyncGenerator[pb.ReadResponse | Chunk | bytes]:
        """See :meth:`Wire.read`."""
        return self._loop.responses(self._read(to, request))

    async def append(
        self, append: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        """See :meth:`Wire.append`."""
        return await self._loop.call(self._append(append, self._loop.requests(requests)))

    def try_pipeline(self, to: Destination) -> StreamedPipeline:
        """See :meth:`Wire.try_pipeline`. The append connects, where need be."""
        return StreamedPipeline(to.peer, self.append)

    async def open_pipeline(self, to: Destination) -> StreamedPipeline:
        """See :meth:`Wire.open_pipeline`."""
        return self.try_pipeline(to)

    def replicate(
        self,
        to: Destination,
        opening: pb.ReplicateRequest,
        requests: AsyncIterator[ReplicateItem],
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """See :meth:`Wire.replicate`."""
        loop = self._loop
        return loop.responses(self._replicate(to, opening, loop.requests(requests)))

    async def aclose(self) -> None:
        """See :meth:`Wire.aclose`."""
        await self._loop.call(self._channels.aclose())

    # ------------------------------------------------------- on the SDK's loop

    async def _unary(self, to: Destination, request: Message) -> Any:
        async with self._begin(to) as call:
            stub = call.stubs.unary(to.rpc)
            pending = stub(request, metadata=call.metadata, timeout=self._timeout_s)
            with self._errors_of(call, pending):
                return await pending

    async def _list(
        self, to: Destination, request: pb.ListRequest
    ) -> AsyncGenerator[pb.ListResponse, None]:
        async with self._begin(to) as call:
            stream = call.stubs.list(request, metadata=call.metadata)
            try:
                async for response in self._responses(call, stream):
                    yield response
            finally:
                stream.cancel()

    async def _read(
        self, to: Destination, request: pb.ReadRequest
    ) -> AsyncGenerator[pb.ReadResponse | Chunk | bytes, None]:
        async with self._begin(to) as call:
            stream = call.stubs.read(request, metadata=call.metadata + self._read_metadata)
            try:
                async for item in self._responses(call, stream):
                    yield item
            finally:
                stream.cancel()

    async def _replicate(
        self,
        to: Destination,
        opening: pb.ReplicateRequest,
        requests: AsyncIterator[ReplicateItem],
    ) -> AsyncGenerator[pb.ReplicateResponse, None]:
        async with self._begin(to) as call:
            stream = call.stubs.replicate(metadata=call.metadata)
            ended = _FirstStatus(stream)
            sending = asyncio.create_task(self._send(stream, opening, as_requests(requests)))
            sending.add_done_callback(lambda task: _give_up_if_failed(task, stream))
            try:
                async for response in self._responses(call, stream, ended, sending):
                    yield response
            finally:
                stream.cancel()
                await _ended(sending)

    @asynccontextmanager
    async def _begin(self, to: Destination) -> AsyncIterator[_Call]:
        """Connect to the broker."""
        async with self._channels.use(to.peer) as stubs:
            token = to.authorization
            signed = () if token is None else (("authorization", token),)
            yield _Call(to, signed + to.metadata, stubs)

    async def _append(
        self, append: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        to = append.to
        async with self._begin(to) as call:
            stream = call.stubs.append(metadata=call.metadata, timeout=self._timeout_s)
            ended = _FirstStatus(stream)
            receiving = asyncio.create_task(_only_response(stream, ended))
            try:
                with self._errors_of(call, stream, ended):
                    try:
                        await self._send(stream, append.request, requests)
                    except Exception:
                        await self._roll_back(stream, receiving)
                        raise
                    response: pb.AppendResponse | None = await receiving
            finally:
                stream.cancel()
                await _ended(receiving)
        if response is None:
            raise CallError(f"Append at {to.where}: ended without a response", journal=to.journal)
        return response

    async def _send(self, stream: Any, opening: Message, requests: AsyncIterator[Any]) -> None:
        """Send all requests and half-close; stop quietly once the other side has ended the call.

        A failed send carries no cause; the answer of the other side does.

        Raises:
            ClosedError: the transport was closed before the call had begun.
        """
        try:
            await self._channels.until_closed(stream.write(opening))
        except _ANSWERED:
            return
        async for request in requests:
            try:
                await stream.write(request)
            except _ANSWERED:
                return
        await _half_close(stream)

    async def _roll_back(self, stream: Any, receiving: asyncio.Task[Any]) -> None:
        """Half-close without commit, and wait for the broker to have seen it."""
        await self._channels.until_closed(_half_close(stream))
        await asyncio.wait([receiving], timeout=ROLLBACK_TIMEOUT_S)

    async def _responses(
        self,
        call: _Call,
        stream: Any,
        ended: _FirstStatus | None = None,
        sending: asyncio.Task[None] | None = None,
    ) -> AsyncIterator[Any]:
        """Yield the responses of a stream; its end becomes one of our errors."""
        with self._errors_of(call, stream, ended, sending):
            async for response in stream:
                yield response

    @contextlib.contextmanager
    def _errors_of(
        self,
        call: _Call,
        pending: Any,
        ended: _FirstStatus | None = None,
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
                kind=_error_kind(error),
                service=call.to.rpc.service,
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


def _error_kind(error: grpc.aio.AioRpcError) -> str:
    """Return the class of the broker's error, if it is in the metadata."""
    for name, value in error.trailing_metadata() or ():
        if name == ERROR_METADATA:
            return str(value)
    return ""


_ANSWERED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""Errors of a send when the other side has already ended the call."""


async def _half_close(stream: Any) -> None:
    # Unlike a write, grpcio leaves an internal error as it is where the connection was just lost.
    with contextlib.suppress(*_ANSWERED, grpc.aio.InternalError):
        await stream.done_writing()


async def _only_response(stream: Any, ended: _FirstStatus) -> Any:
    """Return the one response of a stream, read to its end; ``None`` if there was none."""
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


class _FirstStatus:
    """First status of a call: the one with which the *server* ended it.

    When a server refuses a streaming call before the client has finished sending, the refusal
    arrives, then the send under way fails, and grpcio overwrites the refusal with an error of
    its own (``Internal error from Core``). The callback that runs when the call ends sees the
    refusal first.

    Args:
        call: a call of ``grpc.aio``.
    """

    def __init__(self, call: Any) -> None:
        self.code: grpc.StatusCode | None = None
        self.details = ""
        call.add_done_callback(self._ended)

    def _ended(self, call: Any) -> None:
        details = _result_of(call.details()) or ""
        if self.code is None and details != _CORE_FAILURE:
            self.code, self.details = _result_of(call.code()), details


def _result_of(coroutine: Any) -> Any:
    """Return the result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    return None
