"""Journals over gRPC: the wire that every Gazette broker speaks.

Connections (:class:`Channels`) are opened on first use, waited for, and closed when unused. gRPC
only has streamed appends: one of content at hand is a task (:class:`StreamedPipeline`).

gRPC for asyncio has one poller per process, which several loops can share. But with grpcio 1.66,
which we support, loops then log thousands of ``BlockingIOError`` (a loop is woken for events that
another one has taken), and calls take longer; with 1.85 they do not. So calls from other loops hop
to the SDK's loop and back (:class:`SdkLoop`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from gazette_sdk.errors import (
    CallCancelledError,
    CallError,
    ClosedError,
    ConfigurationError,
    UnavailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import names as urls
from gazette_sdk.protocol.rules import ERROR_METADATA, Rpc
from gazette_sdk.transport.loop import on_loop, sdk_loop
from gazette_sdk.transport.router import CHUNK_BYTES_KEY, ROLLBACK_TIMEOUT_S, RoutedTransport
from gazette_sdk.transport.wire import (
    SERVICE,
    Action,
    Answered,
    AppendItem,
    AppendPipeline,
    Destination,
    Health,
    Marks,
    Peer,
    PreparedAppend,
    ReplicateItem,
    Tls,
    Wire,
    WireOptions,
    action_for,
    as_requests,
    call_error,
    decode_read_response,
    encode_append_item,
    end_task,
    where,
)

T = TypeVar("T")

SWEEP_INTERVAL_S = 30.0
"""A member's connection that one full interval did not use is closed."""

LOOKAHEAD_BYTES = 1 << 20
"""Bytes that a stream may receive before its reader asks for them. gRPC's own 64 KiB is half of one
of our chunks, and lets distant readers wait for a round trip per chunk until its estimate
adapts."""

KEEPALIVE_S = 600.0
"""A peer that died silently is noticed after this time. Other implementations' servers
hang up on clients that ask more often than every five minutes."""

KEEPALIVE_TIMEOUT_S = 20.0

OTHER_WAIT_S = 0.8
"""The service address is dialled again for so long where something listens that is no broker, or
has another TLS setting. Where nothing listens, its broker may just be starting."""

FIRST_RECONNECT_S = 0.1
"""Least wait before a lost connection is dialled again; doubles up to the transport's bound."""

_HEALTH: Final = {
    grpc.ChannelConnectivity.READY: Health.READY,
    grpc.ChannelConnectivity.CONNECTING: Health.CONNECTING,
    grpc.ChannelConnectivity.IDLE: Health.IDLE,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE: Health.FAILED,
    grpc.ChannelConnectivity.SHUTDOWN: Health.FAILED,
}
"""gRPC keeps reporting a failed connection as failed, also while it dials again, until it is
ready: just as a dispatcher should see it."""


class _Fork:
    """State of gRPC with respect to forks: a child of a process that used gRPC cannot use it.

    gRPC's asyncio threads do not exist in such a child, and every call would wait for ever.
    """

    grpc_was_used = False
    grpc_is_broken = False

    @classmethod
    def entered_child(cls) -> None:
        cls.grpc_is_broken = cls.grpc_was_used


os.register_at_fork(after_in_child=_Fork.entered_child)


def _credentials(tls: Tls) -> Any:
    return grpc.ssl_channel_credentials(
        tls.content(tls.trusted_ca_file),
        tls.content(tls.cert_key_file),
        tls.content(tls.cert_file),
    )


def dial(endpoint: str) -> str:
    """Return the gRPC target of an endpoint URL. ``unix:///path`` needs no host.

    Raises:
        ValidationError: it is not an endpoint.
    """
    if endpoint.startswith("unix:///"):
        return "unix:" + endpoint.removeprefix("unix://")
    urls.validate_endpoint(endpoint)
    return urls.dial_address(endpoint)


class Stubs:
    """Calls of services over one channel."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel

        def path(name: str) -> str:
            return f"/protocol.Journal/{name}"

        self.read = channel.unary_stream(
            path("Read"), pb.ReadRequest.SerializeToString, decode_read_response
        )
        # One response, read as a stream of one: its call object lets a response or refusal
        # that comes before all was sent be read beside the writes.
        self.append = channel.stream_stream(
            path("Append"), encode_append_item, pb.AppendResponse.FromString
        )
        self.replicate = channel.stream_stream(
            path("Replicate"),
            pb.ReplicateRequest.SerializeToString,
            pb.ReplicateResponse.FromString,
        )
        self._others: dict[str, Any] = {}

    def other(self, rpc: Rpc) -> Any:
        """Return a call of one request, and of one response or many, of any service."""
        stub = self._others.get(rpc.path)
        if stub is None:
            make = self.channel.unary_stream if rpc.server_streams else self.channel.unary_unary
            stub = self._others[rpc.path] = make(
                rpc.path, rpc.request_type.SerializeToString, rpc.response_type.FromString
            )
        return stub


class Channels:
    """Open connections of one transport, all on one event loop.

    Args:
        options: of the transport.
    """

    def __init__(self, options: WireOptions) -> None:
        dial(options.address)  # a bad address is reported where it was given
        self.address = options.address
        self._tls = options.tls
        self._connect_timeout_s = connect_timeout_s = options.connect_timeout_s
        self._channel_options = (
            ("grpc.max_receive_message_length", options.max_receive_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", int(FIRST_RECONNECT_S * 1000)),
            # Under this name gRPC keeps what a dial may take, the handshakes included.
            ("grpc.min_reconnect_backoff_ms", int(connect_timeout_s * 1000)),
            ("grpc.max_reconnect_backoff_ms", int(options.reconnect_backoff_max_s * 1000)),
            ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
            ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
            ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
            # Connections are this transport's own: closing it closes them, and another
            # transport's failing dials don't delay ours.
            ("grpc.use_local_subchannel_pool", 1),
        )
        self._stubs: dict[Peer, Stubs] = {}
        self._marks = Marks()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._steps: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        """True if :meth:`aclose` was called."""
        return self._closed

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._stubs

    def health(self, peer: Peer) -> Health:
        """Return the state of the connection to a peer; one that was never dialled is idle."""
        stubs = self._stubs.get(peer)
        return Health.IDLE if stubs is None else _HEALTH[stubs.channel.get_state()]

    @asynccontextmanager
    async def use(self, peer: Peer) -> AsyncIterator[Stubs]:
        """Return the calls of a peer, once it is connected; it stays open while they are in use.

        Raises:
            UnavailableError: it cannot be reached.
            ClosedError: the transport is closed, or belongs to another event loop.
            ConfigurationError: gRPC cannot be used in this process, or a certificate cannot.
        """
        stubs = self._open(peer)
        self._marks.begin(peer)
        try:
            match action_for(peer, _HEALTH[stubs.channel.get_state()]):
                case Action.FAIL:
                    raise UnavailableError(f"cannot connect to {self.where(peer)}")
                case Action.WAIT:
                    await self._connect(peer, stubs)
            yield stubs
        finally:
            self._marks.end(peer)

    def where(self, peer: Peer) -> str:
        """Return a peer in words, for messages of errors."""
        return where(peer, self.address)

    async def aclose(self) -> None:
        """Close every connection. Calls under way are cancelled."""
        self._closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for peer in list(self._stubs):
            self._close(peer)
        for step in self._steps:
            step.cancel()
        if self._closing:
            await asyncio.gather(*self._closing)

    async def until_closed(self, step: Coroutine[Any, Any, T]) -> T:
        """Await a step that grpcio does not end when its channel is closed.

        These are the wait for a connection, and the first write or the half-close of a call.

        Raises:
            ClosedError: the transport is closed, or was closed meanwhile.
        """
        if self._closed:
            step.close()
            raise _closed_error()
        task = asyncio.ensure_future(step)
        self._steps.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self._steps.discard(task)
            task.cancel()
        if task.cancelled() and self.closed:
            raise _closed_error()
        return task.result()

    def _open(self, peer: Peer) -> Stubs:
        if self._closed:
            raise _closed_error()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._sweep_timer = loop.call_later(SWEEP_INTERVAL_S, self._sweep)
        elif self._loop is not loop:
            raise ClosedError(
                "the transport is used on another event loop than the one it was first used on "
                "(or in a forked child); connect again there"
            )
        stubs = self._stubs.get(peer)
        if stubs is None:
            endpoint = self.address if peer == SERVICE else peer.endpoint
            target = dial(endpoint)
            if _Fork.grpc_is_broken:
                raise ConfigurationError(
                    "this process was forked from one that had already used gRPC, which does "
                    "not survive that; connect first in the child, or start it by `spawn` "
                    "(multiprocessing.set_start_method)"
                )
            _Fork.grpc_was_used = True
            channel = (
                grpc.aio.secure_channel(target, _credentials(self._tls), self._channel_options)
                if urls.is_tls(endpoint)
                else grpc.aio.insecure_channel(target, self._channel_options)
            )
            stubs = self._stubs[peer] = Stubs(channel)
        return stubs

    async def _connect(self, peer: Peer, stubs: Stubs) -> None:
        """Wait until the channel is ready, within the bound; for less if its server is another."""
        channel = stubs.channel
        state = channel.get_state(try_to_connect=True)
        is_other = False
        try:
            async with asyncio.timeout(self._connect_timeout_s) as bound:
                while action_for(peer, _HEALTH[state]) is Action.WAIT:
                    has_failed = state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
                    if has_failed and not is_other and await _listens(dial(self.address)):
                        is_other = True
                        ends_at = asyncio.get_running_loop().time() + OTHER_WAIT_S
                        bound.reschedule(min(ends_at, bound.when() or ends_at))
                    await self.until_closed(channel.wait_for_state_change(state))
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            if is_other or state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                return  # the call fails at once, with the cause
            raise UnavailableError(
                f"{self.where(peer)} did not answer within {self._connect_timeout_s:g} s"
            ) from None
        except grpc.aio.UsageError as error:
            raise _closed_error() from error

    def _sweep(self) -> None:
        for peer in self._marks.sweep(list(self._stubs)):
            self._close(peer)
        assert self._loop is not None
        self._sweep_timer = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)

    def _close(self, peer: Peer) -> None:
        closing = asyncio.ensure_future(self._stubs.pop(peer).channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def _listens(target: str) -> bool:
    """Return True if a server of whatever protocol listens at a target of gRPC."""
    host, _, port = target.rpartition(":")
    if target.startswith("unix:") or not port.isdigit():
        return False
    try:
        async with asyncio.timeout(OTHER_WAIT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:
        return False
    writer.close()
    return True


def _closed_error() -> ClosedError:
    return ClosedError("the transport was closed; connect again")


CHUNK_BYTES = 128 << 10
"""Content per message: far below the 4 MiB that brokers accept, and large enough that more
makes no difference (measured over loopback)."""


class StreamedPipeline(AppendPipeline):
    """Pipeline of one append, which a task makes.

    Args:
        peer: the broker.
        append: makes a streamed append; see :meth:`Wire.append`.
    """

    __slots__ = ("_append", "_ready", "_task", "peer")

    def __init__(
        self,
        peer: Peer,
        append: Callable[[PreparedAppend, AsyncIterator[AppendItem]], Awaitable[pb.AppendResponse]],
    ) -> None:
        self.peer = peer
        self._append = append
        self._task: asyncio.Task[None] | None = None
        self._ready: Callable[[], None] | None = None

    @property
    def in_flight(self) -> int:
        """See :class:`AppendPipeline`."""
        return int(self._task is not None)

    @property
    def can_begin(self) -> bool:
        """See :class:`AppendPipeline`."""
        return self._task is None

    def begin(self, append: PreparedAppend, content: Sequence[bytes], answered: Answered) -> None:
        """See :meth:`AppendPipeline.begin`."""
        assert self._task is None
        self._task = asyncio.create_task(self._run(append, content, answered))

    def when_ready(self, callback: Callable[[], None]) -> None:
        """See :meth:`AppendPipeline.when_ready`; it is called when the append has ended."""
        self._ready = callback

    def give_up(self) -> None:
        """See :meth:`AppendPipeline.give_up`."""
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """See :meth:`AppendPipeline.close`."""

    async def _run(
        self, append: PreparedAppend, content: Sequence[bytes], answered: Answered
    ) -> None:
        result: pb.AppendResponse | Exception
        try:
            result = await self._append(append, _requests(content))
        except Exception as error:  # noqa: BLE001 - handed to the caller
            result = error
        finally:
            self._task = None
        answered(result)
        callback, self._ready = self._ready, None
        if callback is not None:
            callback()


async def _requests(content: Sequence[bytes]) -> AsyncIterator[AppendItem]:
    """Yield what follows the opening request: chunks, and the commit."""
    for piece in content:
        for begin in range(0, len(piece), CHUNK_BYTES):
            yield piece[begin : begin + CHUNK_BYTES]
    yield pb.AppendRequest()


class SdkLoop:
    """Home loop of one transport's calls. On that loop nothing is added to them.

    It is the SDK's loop at the first call, and remains the same; a forked child has its own.
    """

    def __init__(self) -> None:
        self._home: asyncio.AbstractEventLoop | None = None
        self._process_id = 0

    @property
    def is_used(self) -> bool:
        """True if a call was made, so that there is a home loop."""
        return self._home is not None

    async def call(self, call: Coroutine[Any, Any, T]) -> T:
        """Make a call on the home loop."""
        home = self._elsewhere()
        return await call if home is None else await on_loop(home, call)

    def responses(self, responses: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Return an iterator for the running loop over responses of a call on the home loop."""
        home = self._elsewhere()
        return responses if home is None else _responses_of(home, responses)

    def requests(self, requests: AsyncIterator[T]) -> AsyncIterator[T]:
        """Return an iterator for the home loop over requests of the running one."""
        if self._elsewhere() is None:
            return requests
        return _requests_of(asyncio.get_running_loop(), requests)

    def _elsewhere(self) -> asyncio.AbstractEventLoop | None:
        """Return the home loop, if another one is running here and that one is not closed."""
        if self._home is None or self._process_id != os.getpid():
            self._home, self._process_id = sdk_loop(), os.getpid()
        is_here = self._home is asyncio.get_running_loop()
        return None if is_here or self._home.is_closed() else self._home


async def _requests_of(
    loop: asyncio.AbstractEventLoop, requests: AsyncIterator[T]
) -> AsyncIterator[T]:
    """Iterate over requests of another loop."""

    async def step() -> T | None:
        return await anext(requests, None)

    while (request := await on_loop(loop, step())) is not None:
        yield request


async def _responses_of(
    loop: asyncio.AbstractEventLoop, responses: AsyncGenerator[T]
) -> AsyncGenerator[T, None]:
    """Iterate over responses of another loop, and close their call in the end."""
    lock = asyncio.Lock()  # a step that was cancelled may still clean up when the end comes

    async def step() -> T | None:
        async with lock:
            return await anext(responses, None)

    async def close() -> None:
        async with lock:
            await responses.aclose()

    try:
        while (response := await on_loop(loop, step())) is not None:
            yield response
    finally:
        await on_loop(loop, close())


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

    async def call(self, to: Destination, request: Message) -> Any:
        """See :meth:`Wire.call`."""
        return await self._loop.call(self._unary(to, request))

    def stream(
        self,
        to: Destination,
        opening: Message,
        requests: AsyncIterator[ReplicateItem] | None = None,
    ) -> AsyncGenerator[Any]:
        """See :meth:`Wire.stream`."""
        loop = self._loop
        if requests is None:
            return loop.responses(self._stream(to, opening))
        return loop.responses(self._replicate(to, opening, loop.requests(requests)))

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

    async def aclose(self) -> None:
        """See :meth:`Wire.aclose`. One that was never used starts no event loop for it."""
        closing = self._channels.aclose()
        await (self._loop.call(closing) if self._loop.is_used else closing)

    # ------------------------------------------------------- on the SDK's loop

    async def _unary(self, to: Destination, request: Message) -> Any:
        async with self._begin(to) as call:
            stub = call.stubs.other(to.rpc)
            pending = stub(request, metadata=call.metadata, timeout=self._timeout_s)
            with self._errors_of(call, pending):
                return await pending

    async def _stream(self, to: Destination, request: Message) -> AsyncGenerator[Any, None]:
        async with self._begin(to) as call:
            is_read = isinstance(request, pb.ReadRequest)
            stub = call.stubs.read if is_read else call.stubs.other(to.rpc)
            metadata = call.metadata + (self._read_metadata if is_read else ())
            stream = stub(request, metadata=metadata)
            try:
                async for item in self._responses(call, stream):
                    yield item
            finally:
                stream.cancel()

    async def _replicate(
        self,
        to: Destination,
        opening: Message,
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
                await end_task(sending)

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
                await end_task(receiving)
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
        # A send that failed after an early answer overwrites its status, not the answer.
        if last is None or ended.code is not grpc.StatusCode.OK:
            raise
    return last


def _give_up_if_failed(sending: asyncio.Task[None], stream: Any) -> None:
    if not sending.cancelled() and sending.exception() is not None:
        stream.cancel()


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
