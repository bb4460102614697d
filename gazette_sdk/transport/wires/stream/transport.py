"""Journals over the stream transport: each call of the journal service as frames.

Content never goes through protobuf. A small append is one write and one read. Calls that stream
their requests have a task which sends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from gazette_sdk.errors import CallError, StreamProtocolError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import names as urls
from gazette_sdk.protocol.rules import CODE_NAMES
from gazette_sdk.protocol.stream_frames import CONTENT_BYTES_MAX, Kind
from gazette_sdk.transport.routing.dispatcher import Health
from gazette_sdk.transport.routing.routed import (
    CHUNK_BYTES_KEY,
    ROLLBACK_TIMEOUT_S,
    RoutedTransport,
)
from gazette_sdk.transport.target import AppendItem, Destination, Peer, ReplicateItem
from gazette_sdk.transport.wires.base import PreparedAppend, Wire, WireOptions
from gazette_sdk.transport.wires.stream.blocking import BlockingClient
from gazette_sdk.transport.wires.stream.call import (
    Ended,
    Head,
    malformed,
    no_response,
    too_long,
)
from gazette_sdk.transport.wires.stream.connection import Connection
from gazette_sdk.transport.wires.stream.dialing import TlsContext
from gazette_sdk.transport.wires.stream.open_call import OpenCall
from gazette_sdk.transport.wires.stream.pipeline import PIPELINES_MAX, StreamPipeline, send_piece
from gazette_sdk.transport.wires.stream.pool import Pool
from gazette_sdk.transport.wires.stream.pools import Pools

__all__ = ["READ_CHUNK_BYTES", "StreamTransport", "StreamWire"]

T = TypeVar("T", bound=Message)

READ_CHUNK_BYTES = 256 << 10
"""Content per frame that we ask for; measured best on a loopback connection."""

_CONTENT = int(Kind.CONTENT)


class StreamTransport(RoutedTransport):
    """Journals over the stream transport."""

    @staticmethod
    def _make_wire(options: WireOptions) -> StreamWire:
        return StreamWire(options, options.connect_timeout_s)


class StreamWire(Wire):
    """Calls to brokers over the stream transport.

    Args:
        options: of the transport.
        hello_timeout_s: time within which a connected server must say HELLO.

    Attributes:
        inline: connections for plain code.
        pools: connections of each event loop.

    Raises:
        ValidationError: the address is not an endpoint URL.
    """

    inline: BlockingClient

    def __init__(self, options: WireOptions, hello_timeout_s: float) -> None:
        if not options.address.startswith("unix:///"):
            urls.validate_endpoint(options.address)  # a bad one is reported where it was given
        self._max_receive_bytes = options.max_receive_bytes
        self._call_timeout_s = call_timeout_s = options.call_timeout_s
        tls = TlsContext(options.tls)
        self.inline = BlockingClient(tls, call_timeout_s=call_timeout_s)
        self.pools = Pools(partial(Pool, options, tls, hello_timeout_s))
        self._short_head = Head(timeout_s=call_timeout_s)
        self._next_append_head = Head(timeout_s=call_timeout_s, after_success=True)
        self._long_head = Head()
        chunk_bytes = min(options.read_chunk_bytes or READ_CHUNK_BYTES, CONTENT_BYTES_MAX)
        self._read_head = Head(metadata={CHUNK_BYTES_KEY: str(chunk_bytes)})

    def health(self, peer: Peer) -> Health:
        """See :meth:`Wire.health`."""
        return self.pools.here().health(peer)

    async def aclose(self) -> None:
        """See :meth:`Wire.aclose`."""
        self.inline.close()
        await self.pools.aclose()

    # ------------------------------------------------------------------ calls

    async def unary(self, to: Destination, request: Message) -> Any:
        """See :meth:`Wire.unary`."""
        connection = await self._connection(to, exclusive=False)
        call = self._begin(connection, to, request.SerializeToString(), self._short_head)
        self.bound(call)
        try:
            await call.end()
        finally:
            call.give_up()  # if the caller is cancelled
        return self.only_response(to, call)

    async def list(
        self, to: Destination, request: pb.ListRequest
    ) -> AsyncGenerator[pb.ListResponse, None]:
        """See :meth:`Wire.list`."""
        connection = await self._connection(to, exclusive=True)
        call = self._begin(connection, to, request.SerializeToString(), self._long_head)
        try:
            while await call.more():
                while (item := call.take()) is not None:
                    yield self._decoded(to, pb.ListResponse, item.payload)
            call.raise_failure(to)
        finally:
            call.give_up()

    async def read(
        self, to: Destination, request: pb.ReadRequest
    ) -> AsyncGenerator[pb.ReadResponse | bytes, None]:
        """See :meth:`Wire.read`."""
        connection = await self._connection(to, exclusive=True)
        call = self._begin(connection, to, request.SerializeToString(), self._read_head)
        try:
            while await call.more():
                while (item := call.take()) is not None:
                    if item.kind == _CONTENT:
                        yield item.payload
                    else:
                        yield self._decoded(to, pb.ReadResponse, item.payload)
            call.raise_failure(to)
        finally:
            call.give_up()

    async def append(
        self, append: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        """See :meth:`Wire.append`."""
        to = append.to
        connection = await self._connection(to, exclusive=True)
        call = self._begin(connection, to, append.encoded, self._short_head)
        self.bound(call)
        async with _sending(call, _send_append(call, requests)) as sending:
            sending.add_done_callback(partial(_roll_back, call))
            await call.end()
            if sending.done() and not sending.cancelled() and not sending.result():
                if call.status is None or CODE_NAMES[call.status.code] not in {"OK", "CANCELLED"}:
                    call.raise_failure(to)
                raise CallError(
                    f"Append at {to.where}: the append ended without commit", journal=to.journal
                )
            response: pb.AppendResponse = self.only_response(to, call)
            return response

    def try_pipeline(self, to: Destination) -> StreamPipeline | None:
        """See :meth:`Wire.try_pipeline`."""
        pool = self.pools.here()
        connection = pool.try_take(to.peer, exclusive=pool.pipelines < PIPELINES_MAX)
        if connection is None:
            return None
        return StreamPipeline(self, to.peer, pool, connection)

    async def open_pipeline(self, to: Destination) -> StreamPipeline:
        """See :meth:`Wire.open_pipeline`."""
        pool = self.pools.here()
        exclusive = pool.pipelines < PIPELINES_MAX
        pool.pipelines += exclusive
        try:
            connection = await pool.take(to.peer, exclusive=exclusive)
        finally:
            pool.pipelines -= exclusive
        return StreamPipeline(self, to.peer, pool, connection)

    async def replicate(
        self,
        to: Destination,
        opening: pb.ReplicateRequest,
        requests: AsyncIterator[ReplicateItem],
    ) -> AsyncGenerator[pb.ReplicateResponse, None]:
        """See :meth:`Wire.replicate`."""
        connection = await self._connection(to, exclusive=True)
        call = self._begin(connection, to, opening.SerializeToString(), self._long_head)
        async with _sending(call, _send_replicate(call, requests)) as sending:
            sending.add_done_callback(partial(_fail, call))
            while await call.more():
                while (item := call.take()) is not None:
                    yield self._decoded(to, pb.ReplicateResponse, item.payload)
            if call.ended is Ended.FAILED:
                await sending
            call.raise_failure(to)

    # -------------------------------------------------------- for its pipelines

    def append_head(self, to: Destination, *, after_success: bool) -> bytes:
        """Return the encoded head of an append."""
        head = self._next_append_head if after_success else self._short_head
        return head.encoded(to.authorization)

    def bound(self, call: OpenCall) -> None:
        """Bound the time of an append or a unary call."""
        if self._call_timeout_s:
            call.expire_after(self._call_timeout_s)

    def only_response(self, to: Destination, call: OpenCall) -> Any:
        """Return the response of a call that is over and has one only.

        Raises:
            GazetteError: the error with which it ended.
        """
        call.raise_failure(to)
        item = call.take()
        if item is None:
            raise no_response(to)
        return self._decoded(to, to.rpc.response_type, item.payload)

    # -------------------------------------------------------------------- parts

    async def _connection(self, to: Destination, *, exclusive: bool) -> Connection:
        pool = self.pools.here()
        connection = pool.try_take(to.peer, exclusive=exclusive)
        if connection is None:
            connection = await pool.take(to.peer, exclusive=exclusive)
        return connection

    def _begin(
        self, connection: Connection, to: Destination, request: bytes, head: Head
    ) -> OpenCall:
        try:
            return connection.begin(to.rpc.number, request, head.encoded(to.authorization))
        except StreamProtocolError as error:
            connection.unused()
            raise too_long(to, error) from error

    def _decoded(self, to: Destination, kind: type[T], payload: bytes) -> T:
        if len(payload) > self._max_receive_bytes:
            raise CallError(
                f"{to.rpc.name} at {to.where}: a response of {len(payload)} bytes exceeds "
                f"{self._max_receive_bytes} bytes; raise max_receive_bytes",
                code="RESOURCE_EXHAUSTED",
                journal=to.journal,
            )
        try:
            return kind.FromString(payload)
        except DecodeError as error:
            raise malformed(to, error) from error


@asynccontextmanager
async def _sending(
    call: OpenCall, send: Coroutine[Any, Any, bool]
) -> AsyncIterator[asyncio.Task[bool]]:
    """Run a task which sends the requests of a call; its end is the end of both."""
    sending = asyncio.create_task(send)
    try:
        yield sending
    finally:
        call.give_up()
        sending.cancel()
        await asyncio.wait([sending])
        if not sending.cancelled():
            sending.exception()  # it was raised, or the call ended before


async def _send_append(call: OpenCall, requests: AsyncIterator[AppendItem]) -> bool:
    """Send the requests of an append. Return True if it needs no rollback.

    END commits, and says that nothing follows. So it is sent when the requests have ended.

    Raises:
        CallError: something follows the empty message, which means to commit.
    """
    committed = False
    async for item in requests:
        if call.over:
            return True
        if committed:
            raise CallError("append: expected the end of the stream after the empty message")
        if isinstance(item, bytes):
            await send_piece(call, item)
        elif item.ByteSize():
            call.send_message(item.SerializeToString())
            await call.drained()
        else:
            committed = True
    if committed:
        call.send_end()
    return committed or call.over


def _roll_back(call: OpenCall, sending: asyncio.Task[bool]) -> None:
    """Abort an append whose requests failed or ended without commit, within a bound."""
    if not sending.cancelled() and (sending.exception() or not sending.result()):
        call.give_up()
        call.expire_after(ROLLBACK_TIMEOUT_S)


async def _send_replicate(call: OpenCall, items: AsyncIterator[ReplicateItem]) -> bool:
    """Send the items of a replication."""
    async for item in items:
        if call.over:
            return True
        if isinstance(item, bytes):
            call.send_content(item)
        else:
            call.send_message(item.SerializeToString())
        await call.drained()
    call.send_end()
    return True


def _fail(call: OpenCall, sending: asyncio.Task[bool]) -> None:
    """End a replication whose requests failed."""
    if not sending.cancelled() and sending.exception() is not None:
        call.give_up()
        call.fail(Ended.FAILED, "")
