"""Connections to brokers over gRPC: opened on first use, waited for, closed when unused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from gazette_sdk.errors import ClosedError, ConfigurationError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import names as urls
from gazette_sdk.protocol.rules import Rpc
from gazette_sdk.transport.routing.dispatcher import Action, Health, Marks, action_for, where
from gazette_sdk.transport.target import SERVICE, Peer
from gazette_sdk.transport.wires.base import WireOptions
from gazette_sdk.transport.wires.grpc.codec import decode_read_response, encode_append_item
from gazette_sdk.transport.wires.tls import Tls

__all__ = ["Channels", "Stubs", "dial"]

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

        self.list = channel.unary_stream(
            path("List"), pb.ListRequest.SerializeToString, pb.ListResponse.FromString
        )
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
        self._unary: dict[str, Any] = {}

    def unary(self, rpc: Rpc) -> Any:
        """Return a call of one request and one response, of any service."""
        stub = self._unary.get(rpc.path)
        if stub is None:
            stub = self._unary[rpc.path] = self.channel.unary_unary(
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
        """Wait until the channel is ready, within the bound."""
        channel = stubs.channel
        state = channel.get_state(try_to_connect=True)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                while action_for(peer, _HEALTH[state]) is Action.WAIT:
                    await self.until_closed(channel.wait_for_state_change(state))
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
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


def _closed_error() -> ClosedError:
    return ClosedError("the transport was closed; connect again")
