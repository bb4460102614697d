"""Wire of the stream transport, and the choice between it and gRPC for each broker.

The stream transport is tried first: a server that speaks it says so within a round trip. One that
closes, answers HTTP or says nothing within a second gets gRPC. That is remembered for ten minutes,
or until a connection to it fails: the server that comes back may speak the stream transport. One
that has spoken the stream transport and says nothing now is frozen, and unavailable.

A :class:`StreamPipeline` has several appends in flight on one connection. Each append that is begun
while another is in flight asks to run only after the success of the call before it on the
connection. That call is the append begun before: no one else uses the connection meanwhile. A
pipeline on a shared connection has one append in flight and asks for nothing.

Content never goes through protobuf. A small append is one write and one read. Calls that stream
their requests have a task which sends them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from gazette_sdk.errors import (
    CallError,
    ClosedError,
    GazetteError,
    StreamProtocolError,
    UnavailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import names as urls
from gazette_sdk.protocol.rules import CODE_NAMES
from gazette_sdk.protocol.stream_calls import PIPELINE_MAX
from gazette_sdk.protocol.stream_frames import CONTENT_BYTES_MAX, Kind
from gazette_sdk.transport.router import CHUNK_BYTES_KEY, ROLLBACK_TIMEOUT_S, RoutedTransport
from gazette_sdk.transport.stream.blocking import BlockingClient, NotStreamError, TlsContext
from gazette_sdk.transport.stream.connection import (
    Connection,
    EndReason,
    Head,
    OpenCall,
    malformed,
    no_response,
    too_long,
)
from gazette_sdk.transport.stream.pool import Pool, Pools
from gazette_sdk.transport.wire import (
    SERVICE,
    Answered,
    AppendItem,
    AppendPipeline,
    Destination,
    Health,
    Peer,
    PreparedAppend,
    ReplicateItem,
    Wire,
    WireChoice,
    WireOptions,
)

PIPELINES_MAX = 16
"""Pipelines on one event loop with a connection of their own. Further ones share connections: a
program that writes to thousands of journals needs no connection for each."""

JOINED_BYTES = 64 << 10
"""An append of up to so much content is one write."""

FRAME_BYTES = 512 << 10
"""Content of one frame, where there is more. Fewer frames cost less. Longer frames wait longer, and
are copied where the server is slow."""


class StreamPipeline(AppendPipeline):
    """Appends to one broker on one connection.

    Args:
        wire: makes heads of calls, and decodes responses.
        peer: the broker.
        pool: counts the pipelines that have a connection of their own.
        connection: taken for this pipeline.
    """

    __slots__ = (
        "_calls",
        "_capacity",
        "_connection",
        "_is_exclusive",
        "_pool",
        "_ready",
        "_sending",
        "_wire",
        "peer",
    )

    def __init__(self, wire: StreamWire, peer: Peer, pool: Pool, connection: Connection) -> None:
        self.peer = peer
        self._wire = wire
        self._pool = pool
        self._connection = connection
        self._is_exclusive = connection.exclusive
        self._capacity = PIPELINE_MAX if self._is_exclusive else 1
        self._calls: deque[OpenCall] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._ready: Callable[[], None] | None = None
        pool.pipelines += self._is_exclusive

    @property
    def in_flight(self) -> int:
        """See :class:`AppendPipeline`."""
        return len(self._calls)

    @property
    def can_begin(self) -> bool:
        """See :class:`AppendPipeline`."""
        connection = self._connection
        if self._calls and not connection.open_count:
            return False  # all were answered at once: the connection went back to its pool
        return self._sending is None and len(self._calls) < self._capacity and connection.usable

    def begin(self, append: PreparedAppend, content: Sequence[bytes], answered: Answered) -> None:
        """See :meth:`AppendPipeline.begin`."""
        to, connection, wire = append.to, self._connection, self._wire
        head = wire.append_head(to, after_success=bool(self._calls))
        is_small = sum(map(len, content)) <= JOINED_BYTES
        try:
            if is_small:
                joined = content[0] if len(content) == 1 else b"".join(content)
                call = connection.append(append.encoded, joined, head)
            else:
                call = connection.begin(to.rpc.number, append.encoded, head)
        except StreamProtocolError as error:
            if not self._calls:
                self.close()
            raise too_long(to, error) from error
        self._calls.append(call)
        call.when_over(partial(self._answered, to, answered))
        wire.bound(call)
        if not is_small:
            self._sending = asyncio.create_task(_send_content(call, content))
            self._sending.add_done_callback(self._sent)

    def when_ready(self, callback: Callable[[], None]) -> None:
        """See :meth:`AppendPipeline.when_ready`."""
        self._ready = callback

    def give_up(self) -> None:
        """See :meth:`AppendPipeline.give_up`."""
        self._ready = None
        if self._sending is not None:
            self._sending.cancel()
        for call in reversed(tuple(self._calls)):
            call.when_over(self._remove)
            call.give_up()

    def close(self) -> None:
        """See :meth:`AppendPipeline.close`."""
        assert not self._calls
        self._connection.unused()
        self._end()

    # ------------------------------------------------------------------- parts

    def _sent(self, sending: asyncio.Task[None]) -> None:
        self._sending = None
        if not sending.cancelled():
            sending.result()
        callback, self._ready = self._ready, None
        if callback is not None:
            callback()

    def _answered(self, to: Destination, answered: Answered, call: OpenCall) -> None:
        self._remove(call)
        result: pb.AppendResponse | Exception
        try:
            result = self._wire.only_response(to, call)
        except GazetteError as error:
            result = error
        answered(result)

    def _remove(self, call: OpenCall) -> None:
        self._calls.remove(call)
        if not self._calls:
            self._end()

    def _end(self) -> None:
        self._pool.pipelines -= self._is_exclusive


async def _send_content(call: OpenCall, content: Sequence[bytes]) -> None:
    """Send the content of an append, and its end, unless it is answered before that."""
    for piece in content:
        if not await send_piece(call, piece):
            return
    call.send_end()


async def send_piece(call: OpenCall, piece: bytes) -> bool:
    """Send a piece of content in frames, and wait while too much is unsent.

    Returns:
        False if the call is over.
    """
    if len(piece) <= FRAME_BYTES:
        call.send_content(piece)
        await call.drained()
        return not call.over
    view = memoryview(piece)
    for begin in range(0, len(piece), FRAME_BYTES):
        call.send_content(view[begin : begin + FRAME_BYTES])
        await call.drained()
        if call.over:
            return False
    return True


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
            if call.ended is EndReason.FAILED:
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
        call.fail(EndReason.FAILED, "")


HELLO_TIMEOUT_S = 1.0
"""A server that sends no HELLO for so long after the preface does not know it."""

LASTING_MAX = 256
"""Reads, watches and replications on one event loop which have a connection of their own. Further
ones share a connection of gRPC: a program that follows thousands of journals, or a broker that
replicates them, needs no descriptor for each."""

REMEMBERED_S = 600.0
"""Time for which it is remembered that a server speaks gRPC only."""


class ChosenTransport(RoutedTransport):
    """Journals over the stream transport where a broker speaks it, else over gRPC."""

    @staticmethod
    def _make_wire(options: WireOptions) -> ChosenWire:
        def make_grpc() -> Wire:
            # The import costs a tenth of a second, and is often not needed.
            from gazette_sdk.transport.grpc import GrpcWire  # noqa: PLC0415

            return GrpcWire(options)

        return ChosenWire(options.address, StreamWire(options, HELLO_TIMEOUT_S), make_grpc)


class RememberedWires:
    """Endpoints which are known to speak gRPC only. Pure.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self._was_ready: set[str] = set()

    def remember(self, endpoint: str) -> None:
        """Note that an endpoint does not speak the stream transport."""
        self._until[endpoint] = self._clock() + REMEMBERED_S
        self._was_ready.discard(endpoint)

    def forget(self, endpoint: str) -> None:
        """Note that a connection to an endpoint failed."""
        self._until.pop(endpoint, None)
        self._was_ready.discard(endpoint)

    def __contains__(self, endpoint: str) -> bool:
        """Return True if an endpoint is known to speak gRPC only. Any thread may call."""
        until = self._until.get(endpoint)
        return until is not None and self._clock() < until

    def only_grpc(self, endpoint: str, health: Health) -> bool:
        """Return True if the next call is to use gRPC.

        Args:
            endpoint: URL of the server.
            health: of the gRPC connection to it. One that was ready and isn't has failed.
        """
        until = self._until.get(endpoint)
        if until is None:
            return False
        if health is Health.READY:
            self._was_ready.add(endpoint)
        elif endpoint in self._was_ready:
            self.forget(endpoint)
            return False
        if self._clock() >= until:
            self.forget(endpoint)
            return False
        return True


class ChosenWire(WireChoice):
    """Choice of the wire that each broker speaks.

    Args:
        address: endpoint URL of the service address.
        stream: calls over the stream transport.
        make_grpc: makes the other wire, when it is first needed.

    Attributes:
        stream: the same.
        grpc: the other wire, once there is one.
        remembered: endpoints which speak gRPC only.
    """

    def __init__(self, address: str, stream: StreamWire, make_grpc: Callable[[], Wire]) -> None:
        self.stream = stream
        self.inline = stream.inline
        self.grpc: Wire | None = None
        self.remembered = RememberedWires()
        self._address = address
        self._make_grpc = make_grpc
        self._closed = False
        self._attempts: dict[
            tuple[asyncio.AbstractEventLoop, Peer], asyncio.Future[UnavailableError | None]
        ] = {}

    def health(self, peer: Peer) -> Health:
        """See :meth:`WireChoice.health`."""
        wire = self._known(peer) or self.stream
        return wire.health(peer)

    async def choose(self, peer: Peer, *, is_lasting: bool = False) -> Wire:
        """See :meth:`WireChoice.choose`. Finds out what the broker speaks, if it is not known."""
        wire = self._known(peer)
        while wire is None:
            key = asyncio.get_running_loop(), peer
            attempt = self._attempts.get(key)
            if attempt is None:
                wire = await self._try(key)
                break
            failure = await asyncio.shield(attempt)
            if failure is not None:
                raise UnavailableError(str(failure))
            wire = self._known(peer)
        if is_lasting and wire is self.stream and self._is_crowded():
            return self._with_grpc()
        return wire

    def try_pipeline(self, to: Destination) -> AppendPipeline | None:
        """See :meth:`WireChoice.try_pipeline`."""
        pipeline = self.stream.try_pipeline(to)
        if pipeline is None:
            wire = self._known(to.peer)
            if wire is not None and wire is not self.stream:
                return wire.try_pipeline(to)
        return pipeline

    def unavailable(self, peer: Peer) -> None:
        """See :meth:`WireChoice.unavailable`: the broker that comes back may speak either."""
        self.remembered.forget(self._endpoint(peer))

    def prepare_inline(self, to: Destination) -> None:
        """See :meth:`WireChoice.prepare_inline`. A broker that speaks gRPC only is not dialled."""
        if self._endpoint(to.peer) not in self.remembered:
            super().prepare_inline(to)

    async def aclose(self) -> None:
        """See :meth:`WireChoice.aclose`."""
        self._closed = True
        await self.stream.aclose()
        if self.grpc is not None:
            await self.grpc.aclose()

    # -------------------------------------------------------------------- parts

    def _known(self, peer: Peer) -> Wire | None:
        """Return the wire of a broker, if it is known."""
        if self.stream.health(peer) is Health.READY:
            return self.stream
        grpc = self.grpc
        if grpc is not None and self.remembered.only_grpc(self._endpoint(peer), grpc.health(peer)):
            return grpc
        return None

    async def _try(self, key: tuple[asyncio.AbstractEventLoop, Peer]) -> Wire:
        """Find out which wire a broker speaks. Other calls on this loop wait for the result."""
        loop, peer = key
        attempt = self._attempts[key] = loop.create_future()
        failure: UnavailableError | None = None
        try:
            await self.stream.pools.here().reach(peer)
        except NotStreamError:
            self.remembered.remember(self._endpoint(peer))
            return self._with_grpc()
        except UnavailableError as error:
            failure = error
            raise
        finally:
            del self._attempts[key]
            attempt.set_result(failure)
        return self.stream

    def _is_crowded(self) -> bool:
        return self.stream.pools.here().exclusive_count >= LASTING_MAX

    def _with_grpc(self) -> Wire:
        if self.grpc is None:
            if self._closed:
                raise ClosedError("the transport was closed; connect again")
            self.grpc = self._make_grpc()
        return self.grpc

    def _endpoint(self, peer: Peer) -> str:
        return self._address if peer == SERVICE else peer.endpoint
