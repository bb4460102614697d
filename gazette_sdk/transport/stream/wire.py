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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
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
    WireOptions,
    end_task,
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
        blocking: connections for plain code.
        pools: connections of each event loop.

    Raises:
        ValidationError: the address is not an endpoint URL.
    """

    def __init__(self, options: WireOptions, hello_timeout_s: float) -> None:
        if not options.address.startswith("unix:///"):
            urls.validate_endpoint(options.address)  # a bad one is reported where it was given
        self._max_receive_bytes = options.max_receive_bytes
        self._call_timeout_s = call_timeout_s = options.call_timeout_s
        tls = TlsContext(options.tls)
        self.blocking = BlockingClient(tls, call_timeout_s=call_timeout_s)
        self.append_blocking = self.blocking.append
        self.prepare_blocking = self.blocking.prepare
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
        self.blocking.close()
        await self.pools.aclose()

    # ------------------------------------------------------------------ calls

    async def call(self, to: Destination, request: Message) -> Any:
        """See :meth:`Wire.call`."""
        connection = await self._connection(to, exclusive=False)
        call = self._begin(connection, to, request.SerializeToString(), self._short_head)
        self.bound(call)
        try:
            await call.end()
        finally:
            call.give_up()  # if the caller is cancelled
        return self.only_response(to, call)

    async def stream(
        self,
        to: Destination,
        opening: Message,
        requests: AsyncIterator[ReplicateItem] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """See :meth:`Wire.stream`."""
        is_read = isinstance(opening, pb.ReadRequest)
        connection = await self._connection(to, exclusive=True)
        head = self._read_head if is_read else self._long_head
        call = self._begin(connection, to, opening.SerializeToString(), head)
        kind = to.rpc.response_type
        sending = None if requests is None else asyncio.create_task(_send_items(call, requests))
        try:
            if sending is not None:
                sending.add_done_callback(partial(_fail, call))
            while await call.more():
                while (item := call.take()) is not None:
                    if item.kind == _CONTENT:
                        yield item.payload
                    else:
                        yield self._decoded(to, kind, item.payload)
            if sending is not None and call.ended is EndReason.FAILED:
                await sending
            call.raise_failure(to)
        finally:
            call.give_up()
            if sending is not None:
                await end_task(sending)

    async def append(
        self, append: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        """See :meth:`Wire.append`."""
        to = append.to
        connection = await self._connection(to, exclusive=True)
        call = self._begin(connection, to, append.encoded, self._short_head)
        self.bound(call)
        sending = asyncio.create_task(_send_append(call, requests))
        sending.add_done_callback(partial(_roll_back, call))
        try:
            await call.end()
            if sending.done() and not sending.cancelled() and not sending.result():
                if call.status is None or CODE_NAMES[call.status.code] not in {"OK", "CANCELLED"}:
                    call.raise_failure(to)
                raise CallError(
                    f"Append at {to.where}: the append ended without commit", journal=to.journal
                )
            response: pb.AppendResponse = self.only_response(to, call)
            return response
        finally:
            call.give_up()
            await end_task(sending)

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

    # -------------------------------------------------------- for its pipelines

    def append_head(self, to: Destination, *, after_success: bool) -> bytes:
        """Return the encoded head of an append."""
        head = self._next_append_head if after_success else self._short_head
        return head.encoded(to)

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
            return connection.begin(to.rpc.number, request, head.encoded(to))
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


async def _send_items(call: OpenCall, items: AsyncIterator[ReplicateItem]) -> None:
    """Send the items of a replication."""
    async for item in items:
        if call.over:
            return
        if isinstance(item, bytes):
            call.send_content(item)
        else:
            call.send_message(item.SerializeToString())
        await call.drained()
    call.send_end()


def _fail(call: OpenCall, sending: asyncio.Task[None]) -> None:
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


class ChosenWire(Wire):
    """The wire that each broker speaks.

    Args:
        address: endpoint URL of the service address.
        stream: calls over the stream transport.
        make_grpc: makes the other wire, when it is first needed.

    Attributes:
        over_stream: calls over the stream transport.
        grpc: the other wire, once there is one.
        remembered: endpoints which speak gRPC only.
    """

    def __init__(self, address: str, stream: StreamWire, make_grpc: Callable[[], Wire]) -> None:
        self.over_stream = stream
        self.append_blocking = stream.append_blocking
        self.prepare_blocking = self._prepare_blocking
        self.grpc: Wire | None = None
        self.remembered = RememberedWires()
        self._address = address
        self._make_grpc = make_grpc
        self._closed = False
        self._attempts: dict[
            tuple[asyncio.AbstractEventLoop, Peer], asyncio.Future[UnavailableError | None]
        ] = {}

    def health(self, peer: Peer) -> Health:
        """See :meth:`Wire.health`."""
        return self._of(peer).health(peer)

    async def reach(self, peer: Peer) -> None:
        """See :meth:`Wire.reach`. Finds out which wire the broker speaks, if it is not known."""
        while self._known(peer) is None:
            key = asyncio.get_running_loop(), peer
            attempt = self._attempts.get(key)
            if attempt is None:
                await self._try(key)
                return
            failure = await asyncio.shield(attempt)
            if failure is not None:
                raise UnavailableError(str(failure))

    def unavailable(self, peer: Peer) -> None:
        """See :meth:`Wire.unavailable`: the broker that comes back may speak either."""
        self.remembered.forget(self._endpoint(peer))

    async def call(self, to: Destination, request: Message) -> Any:
        """See :meth:`Wire.call`. Calls that are not served on the stream transport use gRPC."""
        wire = self._of(to.peer) if to.rpc.number else self._with_grpc()
        return await wire.call(to, request)

    def stream(
        self,
        to: Destination,
        opening: Message,
        requests: AsyncIterator[ReplicateItem] | None = None,
    ) -> AsyncGenerator[Any]:
        """See :meth:`Wire.stream`."""
        wire = self._of(to.peer)
        if wire is self.over_stream and self._is_crowded():
            wire = self._with_grpc()
        return wire.stream(to, opening, requests)

    async def append(
        self, append: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        """See :meth:`Wire.append`."""
        return await self._of(append.to.peer).append(append, requests)

    def try_pipeline(self, to: Destination) -> AppendPipeline | None:
        """See :meth:`Wire.try_pipeline`."""
        pipeline = self.over_stream.try_pipeline(to)
        if pipeline is None:
            wire = self._known(to.peer)
            if wire is not None and wire is not self.over_stream:
                return wire.try_pipeline(to)
        return pipeline

    async def open_pipeline(self, to: Destination) -> AppendPipeline:
        """See :meth:`Wire.open_pipeline`."""
        return await self._of(to.peer).open_pipeline(to)

    async def aclose(self) -> None:
        """See :meth:`Wire.aclose`."""
        self._closed = True
        await self.over_stream.aclose()
        if self.grpc is not None:
            await self.grpc.aclose()

    # -------------------------------------------------------------------- parts

    def _prepare_blocking(self, to: Destination) -> None:
        """Open a connection for plain code. A broker that speaks gRPC only is not dialled."""
        if self._endpoint(to.peer) not in self.remembered:
            self.over_stream.prepare_blocking(to)

    def _of(self, peer: Peer) -> Wire:
        """Return the wire of a broker; the stream transport's if it is not known."""
        return self._known(peer) or self.over_stream

    def _known(self, peer: Peer) -> Wire | None:
        """Return the wire of a broker, if it is known."""
        if self.over_stream.health(peer) is Health.READY:
            return self.over_stream
        grpc = self.grpc
        if grpc is not None and self.remembered.only_grpc(self._endpoint(peer), grpc.health(peer)):
            return grpc
        return None

    async def _try(self, key: tuple[asyncio.AbstractEventLoop, Peer]) -> None:
        """Find out which wire a broker speaks. Other calls on this loop wait for the result."""
        loop, peer = key
        attempt = self._attempts[key] = loop.create_future()
        failure: UnavailableError | None = None
        try:
            await self.over_stream.pools.here().reach(peer)
        except NotStreamError:
            self.remembered.remember(self._endpoint(peer))
            self._with_grpc()
        except UnavailableError as error:
            failure = error
            raise
        finally:
            del self._attempts[key]
            attempt.set_result(failure)

    def _is_crowded(self) -> bool:
        return self.over_stream.pools.here().exclusive_count >= LASTING_MAX

    def _with_grpc(self) -> Wire:
        if self.grpc is None:
            if self._closed:
                raise ClosedError("the transport was closed; connect again")
            self.grpc = self._make_grpc()
        return self.grpc

    def _endpoint(self, peer: Peer) -> str:
        return self._address if peer == SERVICE else peer.endpoint
