"""Each call of the journal service as frames.

Content never goes through protobuf, a small append is one write and one read, and no call has a
task of its own but a replication, which sends and receives at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from gazette_sdk.errors import CallError, StreamProtocolError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.status_codes import CODE_NAMES
from gazette_sdk.protocol.stream_frames import CONTENT_BYTES_MAX, CallHead, Kind
from gazette_sdk.transport.routing.dispatcher import Health
from gazette_sdk.transport.routing.routed import (
    CHUNK_BYTES_KEY,
    MAX_RECEIVE_BYTES,
    ROLLBACK_TIMEOUT_S,
)
from gazette_sdk.transport.target import AppendItem, Destination, Peer
from gazette_sdk.transport.wires.base import BlockingCall, PreparedAppend, Wire
from gazette_sdk.transport.wires.grpc.codec import Chunk, decode_read_response
from gazette_sdk.transport.wires.stream.blocking import BlockingClient
from gazette_sdk.transport.wires.stream.connection import Connection
from gazette_sdk.transport.wires.stream.open_call import Ended, OpenCall
from gazette_sdk.transport.wires.stream.outcome import malformed, raise_failure, too_long
from gazette_sdk.transport.wires.stream.pipeline import (
    JOINED_BYTES,
    PIPELINES_MAX,
    StreamPipeline,
    send_piece,
)
from gazette_sdk.transport.wires.stream.pool import Pool
from gazette_sdk.transport.wires.stream.replication import end_if_failed, send_requests
from gazette_sdk.transport.wires.stream.source import END, PENDING, Source

__all__ = ["READ_CHUNK_BYTES", "StreamWire"]

T = TypeVar("T", bound=Message)

READ_CHUNK_BYTES = 256 << 10
"""Content per frame that we ask for; measured best on a loopback connection."""

_CONTENT = int(Kind.CONTENT)


class StreamWire(Wire):
    """Calls to brokers over the stream transport.

    Args:
        pool: its connections, which it closes.
        max_receive_bytes: greatest message to accept.
        read_chunk_bytes: content per frame to ask for.
        call_timeout_s: what appends and unary calls may take; 0 for any time.
        blocking: connections for plain code, which it closes.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        blocking: BlockingClient,
        max_receive_bytes: int = MAX_RECEIVE_BYTES,
        read_chunk_bytes: int = READ_CHUNK_BYTES,
        call_timeout_s: float = 0.0,
    ) -> None:
        self._pool = pool
        self._blocking = blocking
        self._max_receive_bytes = max_receive_bytes
        self._call_timeout_s = call_timeout_s
        self._short_head = CallHead(timeout_ms=_milliseconds(call_timeout_s))
        self._next_head = CallHead(timeout_ms=_milliseconds(call_timeout_s), after_success=True)
        self._long_head = CallHead()
        self._read_head = CallHead(
            metadata={CHUNK_BYTES_KEY: str(min(read_chunk_bytes, CONTENT_BYTES_MAX))}
        )
        self._encoded = {
            id(head): head.SerializeToString()
            for head in (self._short_head, self._next_head, self._long_head, self._read_head)
        }
        self._pipelines = 0  # that have a connection of their own

    def health(self, peer: Peer) -> Health:
        """See :meth:`Wire.health`."""
        return self._pool.health(peer)

    def can_inline(self, peer: Peer) -> bool:
        """See :meth:`Wire.can_inline`."""
        blocking = self._blocking
        return blocking.takes(peer.endpoint) and (
            blocking.is_connected(peer.endpoint) or self._pool.health(peer) is Health.READY
        )

    def send_inline(self, append: PreparedAppend, content: bytes) -> BlockingCall | None:
        """See :meth:`Wire.send_inline`."""
        return self._blocking.append(append.to, append.encoded, content)

    def prepare_inline(self, to: Destination) -> None:
        """See :meth:`Wire.prepare_inline`."""
        self._blocking.prepare(to)

    async def aclose(self) -> None:
        """See :meth:`Wire.aclose`."""
        self._blocking.close()
        await self._pool.aclose()

    # ------------------------------------------------------------------ calls

    async def unary(self, to: Destination, request: Message) -> Any:
        """See :meth:`Wire.unary`."""
        connection = await self._connection(to, exclusive=False)
        call = self._begin(connection, to, request, self._short_head)
        return await self._only_response(to, call)

    async def list(
        self, to: Destination, request: pb.ListRequest
    ) -> AsyncGenerator[pb.ListResponse, None]:
        """See :meth:`Wire.list`."""
        connection = await self._connection(to, exclusive=True)
        call = self._begin(connection, to, request, self._long_head)
        try:
            while await call.more():
                while (item := call.take()) is not None:
                    yield self._decoded(to, pb.ListResponse, item.payload)
            raise_failure(to, call)
        finally:
            call.give_up()

    async def read(
        self, to: Destination, request: pb.ReadRequest
    ) -> AsyncGenerator[pb.ReadResponse | Chunk | bytes, None]:
        """See :meth:`Wire.read`."""
        connection = await self._connection(to, exclusive=True)
        call = self._begin(connection, to, request, self._read_head)
        try:
            while await call.more():
                while (item := call.take()) is not None:
                    if item.kind == _CONTENT:
                        yield item.payload
                    else:
                        yield self._read_response(to, item.payload)
            raise_failure(to, call)
        finally:
            call.give_up()

    async def append(
        self, append: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        """See :meth:`Wire.append`."""
        to, opening = append.to, append.request
        source = Source(requests)
        try:
            pieces, item = _gather(source)
            if _is_commit(item):
                return await self._append_whole(to, opening, b"".join(pieces), source)
            return await self._append_streamed(to, opening, pieces, item, source)
        finally:
            await source.cancel()

    def try_pipeline(self, to: Destination) -> StreamPipeline | None:
        """See :meth:`Wire.try_pipeline`."""
        exclusive = self._pipelines < PIPELINES_MAX
        connection = self._pool.try_take(to.peer, exclusive=exclusive)
        return None if connection is None else self._pipeline(to, connection)

    async def open_pipeline(self, to: Destination) -> StreamPipeline:
        """See :meth:`Wire.open_pipeline`."""
        exclusive = self._pipelines < PIPELINES_MAX
        self._pipelines += exclusive
        try:
            connection = await self._connection(to, exclusive=exclusive)
        finally:
            self._pipelines -= exclusive
        return self._pipeline(to, connection)

    async def replicate(
        self,
        to: Destination,
        opening: pb.ReplicateRequest,
        requests: AsyncIterator[pb.ReplicateRequest],
    ) -> AsyncGenerator[pb.ReplicateResponse, None]:
        """See :meth:`Wire.replicate`."""
        connection = await self._connection(to, exclusive=True)
        call = self._begin(connection, to, opening, self._long_head)
        sending = asyncio.create_task(send_requests(call, requests))
        sending.add_done_callback(lambda task: end_if_failed(task, call))
        try:
            while await call.more():
                while (item := call.take()) is not None:
                    yield self._decoded(to, pb.ReplicateResponse, item.payload)
            if call.ended is Ended.FAILED:
                await sending
            raise_failure(to, call)
        finally:
            call.give_up()
            sending.cancel()
            await asyncio.wait([sending])
            if not sending.cancelled():
                sending.exception()

    # ----------------------------------------------------------------- appends

    async def _append_whole(
        self, to: Destination, opening: pb.AppendRequest, content: bytes, source: Source
    ) -> pb.AppendResponse:
        """An append whose content is there."""
        call = await self._begin_whole(to, opening.SerializeToString(), content)
        return await self._answer(to, call, source)

    async def _begin_whole(self, to: Destination, opening: bytes, content: bytes) -> OpenCall:
        """Send an append of little content, by one write."""
        connection = await self._connection(to, exclusive=False)
        try:
            call = connection.append(opening, content, self._head(to, self._short_head))
        except StreamProtocolError as error:
            connection.unused()
            raise too_long(to, error) from error
        self._bound(call)
        return call

    def _append_head(self, to: Destination, after_success: bool) -> bytes:  # noqa: FBT001 - a callback
        return self._head(to, self._next_head if after_success else self._short_head)

    def _appended(self, to: Destination, payload: bytes) -> pb.AppendResponse:
        return self._decoded(to, pb.AppendResponse, payload)

    def _pipeline(self, to: Destination, connection: Connection) -> StreamPipeline:
        exclusive = connection.exclusive
        self._pipelines += exclusive

        def over() -> None:
            self._pipelines -= exclusive

        return StreamPipeline(
            to.peer,
            connection,
            head=self._append_head,
            bound=self._bound,
            decode=self._appended,
            over=over,
        )

    async def _append_streamed(
        self,
        to: Destination,
        opening: pb.AppendRequest,
        pieces: Sequence[bytes],
        item: object,
        source: Source,
    ) -> pb.AppendResponse:
        """An append whose content is sent as it comes."""
        connection = await self._connection(to, exclusive=True)
        call = self._begin(connection, to, opening, self._short_head)
        try:
            for piece in pieces:
                call.send_content(piece)
            while not _is_commit(item):
                if item is END:
                    return await self._uncommitted(to, call)
                if item is PENDING:
                    item = await source.next()
                    continue
                if isinstance(item, bytes):
                    await send_piece(call, item)
                else:
                    assert isinstance(item, pb.AppendRequest)
                    call.send_message(item.SerializeToString())
                    await call.drained()
                if call.over:
                    break
                item = source.poll()
            call.send_end()
        except Exception:
            await self._roll_back(call)
            raise
        except BaseException:
            call.give_up()
            raise
        return await self._answer(to, call, source)

    async def _answer(self, to: Destination, call: OpenCall, source: Source) -> pb.AppendResponse:
        """The response of an append that was sent, or answered early."""
        try:
            if not call.over and source.poll() is PENDING:
                await source.next()
        except BaseException:
            call.give_up()
            raise
        response: pb.AppendResponse = await self._only_response(to, call)
        return response

    async def _roll_back(self, call: OpenCall) -> None:
        """Give an append up, and wait for the broker to have seen it."""
        call.give_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROLLBACK_TIMEOUT_S):
                await call.end()

    async def _uncommitted(self, to: Destination, call: OpenCall) -> pb.AppendResponse:
        """The requests ended without a commit."""
        await self._roll_back(call)
        if call.status is None or CODE_NAMES[call.status.code] not in {"OK", "CANCELLED"}:
            raise_failure(to, call)
        raise CallError(
            f"Append at {to.where}: the append ended without commit", journal=to.journal
        )

    # -------------------------------------------------------------------- parts

    async def _connection(self, to: Destination, *, exclusive: bool) -> Connection:
        connection = self._pool.try_take(to.peer, exclusive=exclusive)
        if connection is None:
            connection = await self._pool.take(to.peer, exclusive=exclusive)
        return connection

    def _begin(
        self, connection: Connection, to: Destination, request: Message, head: CallHead
    ) -> OpenCall:
        try:
            encoded = request.SerializeToString()
            call = connection.begin(to.rpc.number, encoded, self._head(to, head))
        except StreamProtocolError as error:
            connection.unused()
            raise too_long(to, error) from error
        if head is self._short_head:
            self._bound(call)
        return call

    def _bound(self, call: OpenCall) -> None:
        if self._call_timeout_s:
            call.expire_after(self._call_timeout_s)

    def _head(self, to: Destination, head: CallHead) -> bytes:
        """What a call says of itself, with its token."""
        if to.authorization is None:
            return self._encoded[id(head)]
        told = CallHead()
        told.CopyFrom(head)
        told.metadata["authorization"] = to.authorization
        return told.SerializeToString()

    async def _only_response(self, to: Destination, call: OpenCall) -> Any:
        try:
            await call.end()
        finally:
            call.give_up()  # of a caller who is cancelled
        raise_failure(to, call)
        item = call.take()
        if item is None:
            raise CallError(
                f"{to.rpc.name} at {to.where}: ended without a response", journal=to.journal
            )
        return self._decoded(to, to.rpc.response_type, item.payload)

    def _read_response(self, to: Destination, payload: bytes) -> pb.ReadResponse | Chunk:
        self._check_length(to, payload)
        try:
            return decode_read_response(payload)
        except DecodeError as error:
            raise malformed(to, error) from error

    def _decoded(self, to: Destination, kind: type[T], payload: bytes) -> T:
        self._check_length(to, payload)
        try:
            return kind.FromString(payload)
        except DecodeError as error:
            raise malformed(to, error) from error

    def _check_length(self, to: Destination, payload: bytes) -> None:
        if len(payload) > self._max_receive_bytes:
            raise CallError(
                f"{to.rpc.name} at {to.where}: a response of {len(payload)} bytes exceeds "
                f"{self._max_receive_bytes}; raise max_receive_bytes",
                code="RESOURCE_EXHAUSTED",
                journal=to.journal,
            )


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000)) if seconds else 0


def _is_commit(item: object) -> bool:
    return isinstance(item, pb.AppendRequest) and not item.ByteSize()


def _gather(source: Source) -> tuple[list[bytes], object]:
    """Content that is there without waiting, up to a bound, and what stopped the gathering."""
    pieces: list[bytes] = []
    size = 0
    while size <= JOINED_BYTES:
        item = source.poll()
        if not isinstance(item, bytes):
            return pieces, item
        size += len(item)
        pieces.append(item)
    return pieces[:-1], pieces[-1]
