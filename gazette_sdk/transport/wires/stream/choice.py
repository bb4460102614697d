"""Choice of the wire for each broker.

The stream transport is tried first: a server that speaks it says so within a round trip. One that
closes, answers HTTP or says nothing within a second gets gRPC. That is remembered for ten minutes,
or until a connection to it fails: the server that comes back may speak the stream transport.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.routing.dispatcher import Health
from gazette_sdk.transport.target import SERVICE, AppendItem, Destination, Peer
from gazette_sdk.transport.wires.base import AppendPipeline, BlockingCall, PreparedAppend, Wire
from gazette_sdk.transport.wires.grpc.codec import Chunk
from gazette_sdk.transport.wires.grpc.pipeline import StreamedPipeline
from gazette_sdk.transport.wires.stream.calls import StreamWire
from gazette_sdk.transport.wires.stream.dialing import NotStreamError

__all__ = ["HELLO_TIMEOUT_S", "REMEMBERED_S", "ChosenWire", "RememberedWires"]

T = TypeVar("T")

HELLO_TIMEOUT_S = 1.0
"""A server that sends no HELLO for so long after the preface does not know it."""

LASTING_MAX = 256
"""Reads, watches and replications on one event loop which have a connection of their own. Further
ones share a connection of gRPC: a program that follows thousands of journals, or a broker that
replicates them, needs no descriptor for each."""

REMEMBERED_S = 600.0
"""Time for which it is remembered that a server speaks gRPC only."""


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
    """Wire that hands each call to the wire of its broker.

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
        self.grpc: Wire | None = None
        self.remembered = RememberedWires()
        self._address = address
        self._make_grpc = make_grpc
        self._attempts: dict[
            tuple[asyncio.AbstractEventLoop, Peer], asyncio.Future[UnavailableError | None]
        ] = {}

    def health(self, peer: Peer) -> Health:
        """See :meth:`Wire.health`."""
        wire = self._known(peer) or self.stream
        return wire.health(peer)

    async def unary(self, to: Destination, request: Message) -> Any:
        """See :meth:`Wire.unary`."""
        return await self._call(to.peer, lambda wire: wire.unary(to, request))

    def list(self, to: Destination, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        """See :meth:`Wire.list`."""
        return self._iterate(to.peer, lambda wire: wire.list(to, request))

    def read(
        self, to: Destination, request: pb.ReadRequest
    ) -> AsyncGenerator[pb.ReadResponse | Chunk | bytes]:
        """See :meth:`Wire.read`."""
        return self._iterate(to.peer, lambda wire: wire.read(to, request))

    async def append(
        self, append: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        """See :meth:`Wire.append`."""
        return await self._call(append.to.peer, lambda wire: wire.append(append, requests))

    def try_pipeline(self, to: Destination) -> AppendPipeline | None:
        """See :meth:`Wire.try_pipeline`."""
        wire = self._known(to.peer)
        if wire is None:
            return None
        if wire is self.stream:
            return wire.try_pipeline(to)
        return StreamedPipeline(to.peer, self.append)

    async def open_pipeline(self, to: Destination) -> AppendPipeline:
        """See :meth:`Wire.open_pipeline`."""
        wire = await self._choose(to.peer)
        if wire is self.stream:
            return await wire.open_pipeline(to)
        return StreamedPipeline(to.peer, self.append)

    def replicate(
        self,
        to: Destination,
        opening: pb.ReplicateRequest,
        requests: AsyncIterator[pb.ReplicateRequest],
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """See :meth:`Wire.replicate`."""
        return self._iterate(to.peer, lambda wire: wire.replicate(to, opening, requests))

    def send_inline(self, append: PreparedAppend, content: bytes) -> BlockingCall | None:
        """See :meth:`Wire.send_inline`."""
        return self.stream.send_inline(append, content)

    def prepare_inline(self, to: Destination) -> None:
        """See :meth:`Wire.prepare_inline`."""
        self.stream.prepare_inline(to)

    async def aclose(self) -> None:
        """See :meth:`Wire.aclose`."""
        await self.stream.aclose()
        if self.grpc is not None:
            await self.grpc.aclose()

    # -------------------------------------------------------------------- parts

    async def _call(self, peer: Peer, make: Callable[[Wire], Awaitable[T]]) -> T:
        """Make a call over the wire of a broker."""
        wire = await self._choose(peer)
        try:
            return await make(wire)
        except UnavailableError:
            self.remembered.forget(self._endpoint(peer))
            raise

    def _iterate(self, peer: Peer, make: Callable[[Wire], AsyncGenerator[T]]) -> AsyncGenerator[T]:
        """Make a call of many responses. Where the wire is known, its generator is handed out."""
        if self._known(peer) is self.stream and not self._is_crowded():
            return make(self.stream)
        return self._iterate_chosen(peer, make)

    async def _iterate_chosen(
        self, peer: Peer, make: Callable[[Wire], AsyncGenerator[T]]
    ) -> AsyncGenerator[T, None]:
        wire = await self._choose(peer)
        if wire is self.stream and self._is_crowded():
            wire = self._with_grpc()
        try:
            async with aclosing(make(wire)) as items:
                async for item in items:
                    yield item
        except UnavailableError:
            self.remembered.forget(self._endpoint(peer))
            raise

    async def _choose(self, peer: Peer) -> Wire:
        """Return the wire that a broker speaks; find it out where that is not known."""
        while True:
            wire = self._known(peer)
            if wire is not None:
                return wire
            key = asyncio.get_running_loop(), peer
            attempt = self._attempts.get(key)
            if attempt is None:
                return await self._try(key)
            failure = await asyncio.shield(attempt)
            if failure is not None:
                raise UnavailableError(str(failure))

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
            self.grpc = self._make_grpc()
        return self.grpc

    def _endpoint(self, peer: Peer) -> str:
        return self._address if peer == SERVICE else peer.endpoint
