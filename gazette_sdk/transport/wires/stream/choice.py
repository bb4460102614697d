"""The automatic choice of the wire, for each broker by itself.

The stream transport is tried first: a server that speaks it says so within a round trip. One
that closes, answers HTTP or says nothing within a second gets gRPC, and that is remembered for
ten minutes, or until a connection to it fails: perhaps what comes back there is newer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.routing.dispatcher import Health
from gazette_sdk.transport.routing.route_cache import DEFAULT_SIZE, DEFAULT_TTL_S
from gazette_sdk.transport.routing.routed import (
    CONNECT_TIMEOUT_S,
    MAX_RECEIVE_BYTES,
    RECONNECT_BACKOFF_MAX_S,
    RoutedTransport,
)
from gazette_sdk.transport.target import SERVICE, AppendItem, Destination, Peer
from gazette_sdk.transport.wires.base import (
    AppendPipeline,
    BlockingCall,
    PreparedAppend,
    Wire,
)
from gazette_sdk.transport.wires.grpc.codec import Chunk
from gazette_sdk.transport.wires.grpc.pipeline import StreamedPipeline
from gazette_sdk.transport.wires.stream.blocking import BlockingClient
from gazette_sdk.transport.wires.stream.blocking_connection import BlockingDialer
from gazette_sdk.transport.wires.stream.calls import READ_CHUNK_BYTES, StreamWire
from gazette_sdk.transport.wires.stream.dialing import Dialer, NotStreamError
from gazette_sdk.transport.wires.stream.pool import Pool
from gazette_sdk.transport.wires.tls import Tls

__all__ = ["HELLO_TIMEOUT_S", "MEMORY_S", "ChosenTransport", "ChosenWire", "Memory"]

HELLO_TIMEOUT_S = 1.0
"""A server that says nothing for so long after the preface doesn't know it."""

LASTING_MAX = 256
"""Each read, and each replication, has a connection of its own. Where so many are under way,
further ones share one of gRPC's: a program that follows thousands of journals, or a broker that
replicates them, needs no descriptor for each."""

MEMORY_S = 600.0
"""How long it is remembered that a server speaks gRPC only."""


class Memory:
    """Which endpoints speak gRPC only, as far as is known. Pure.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self._was_ready: set[str] = set()

    def remember(self, endpoint: str) -> None:
        """The endpoint doesn't speak the stream transport."""
        self._until[endpoint] = self._clock() + MEMORY_S
        self._was_ready.discard(endpoint)

    def forget(self, endpoint: str) -> None:
        """A connection to it failed."""
        self._until.pop(endpoint, None)
        self._was_ready.discard(endpoint)

    def only_grpc(self, endpoint: str, health: Health) -> bool:
        """Whether to use gRPC for the next call.

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


class ChosenTransport(RoutedTransport):
    """Journals over whatever wire each broker speaks best.

    Args are those of :class:`~gazette_sdk.transport.wires.stream.transport.StreamTransport`, except
    that nothing bounds calls as a whole, and ``read_chunk_bytes`` are by default what suits the
    wire.

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
        read_chunk_bytes: int | None = None,
    ) -> None:
        tls = tls or Tls()
        pool = Pool(
            address,
            Dialer(tls, HELLO_TIMEOUT_S),
            connect_timeout_s=connect_timeout_s,
            redial_max_s=reconnect_backoff_max_s,
        )
        stream = StreamWire(
            pool,
            blocking=BlockingClient(BlockingDialer(tls)),
            max_receive_bytes=max_receive_bytes,
            read_chunk_bytes=read_chunk_bytes or READ_CHUNK_BYTES,
        )

        def make_grpc() -> Wire:
            # Costs a tenth of a second, and is often not needed.
            from gazette_sdk.transport.wires.grpc import transport as grpc  # noqa: PLC0415
            from gazette_sdk.transport.wires.grpc.channels import Channels  # noqa: PLC0415

            channels = Channels(
                address,
                tls=tls,
                max_receive_bytes=max_receive_bytes,
                reconnect_backoff_max_s=reconnect_backoff_max_s,
                connect_timeout_s=connect_timeout_s,
            )
            return grpc.GrpcWire(
                channels, read_chunk_bytes=read_chunk_bytes or grpc.READ_CHUNK_BYTES
            )

        wire = ChosenWire(address, pool, stream, make_grpc)
        super().__init__(
            address,
            wire,
            zone=zone,
            cache_size=cache_size,
            cache_ttl_s=cache_ttl_s,
            auth_keys=auth_keys,
            auth_token=auth_token,
        )
        self.memory = wire.memory


class ChosenWire(Wire):
    """Hands each call to the wire of its broker.

    Args:
        address: endpoint URL of the service address.
        pool: connections of the stream transport.
        stream: calls over them.
        make_grpc: makes the other wire, when it is first needed.
    """

    def __init__(
        self, address: str, pool: Pool, stream: Wire, make_grpc: Callable[[], Wire]
    ) -> None:
        self.memory = Memory()
        self._address = address
        self._pool = pool
        self._stream = stream
        self._make_grpc = make_grpc
        self._grpc: Wire | None = None
        self._lasting = 0
        self._trying: dict[Peer, asyncio.Future[UnavailableError | None]] = {}

    def health(self, peer: Peer) -> Health:
        """See :meth:`Wire.health`."""
        if self._grpc is not None:
            health = self._grpc.health(peer)
            if self.memory.only_grpc(self._endpoint(peer), health):
                return health
        return self._stream.health(peer)

    async def unary(self, to: Destination, request: Message) -> Any:
        """See :meth:`Wire.unary`."""
        wire = await self._choose(to.peer)
        with self._noting(to.peer):
            return await wire.unary(to, request)

    async def list(
        self, to: Destination, request: pb.ListRequest
    ) -> AsyncGenerator[pb.ListResponse, None]:
        """See :meth:`Wire.list`."""
        wire = await self._choose(to.peer)
        with self._noting(to.peer):
            async with aclosing(wire.list(to, request)) as responses:
                async for response in responses:
                    yield response

    async def read(
        self, to: Destination, request: pb.ReadRequest
    ) -> AsyncGenerator[pb.ReadResponse | Chunk | bytes, None]:
        """See :meth:`Wire.read`."""
        with self._counting():
            wire = await self._choose_lasting(to.peer)
            with self._noting(to.peer):
                async with aclosing(wire.read(to, request)) as items:
                    async for item in items:
                        yield item

    async def append(
        self, append: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        """See :meth:`Wire.append`."""
        peer = append.to.peer
        wire = await self._choose(peer)
        with self._noting(peer):
            return await wire.append(append, requests)

    def try_pipeline(self, to: Destination) -> AppendPipeline | None:
        """See :meth:`Wire.try_pipeline`."""
        if self._stream.health(to.peer) is Health.READY:
            return self._stream.try_pipeline(to)
        if self._remembered(to.peer) is not None:
            return StreamedPipeline(to.peer, self.append)
        return None

    async def open_pipeline(self, to: Destination) -> AppendPipeline:
        """See :meth:`Wire.open_pipeline`."""
        wire = await self._choose(to.peer)
        if wire is not self._stream:
            return StreamedPipeline(to.peer, self.append)
        with self._noting(to.peer):
            return await wire.open_pipeline(to)

    async def replicate(
        self,
        to: Destination,
        opening: pb.ReplicateRequest,
        requests: AsyncIterator[pb.ReplicateRequest],
    ) -> AsyncGenerator[pb.ReplicateResponse, None]:
        """See :meth:`Wire.replicate`."""
        with self._counting():
            wire = await self._choose_lasting(to.peer)
            with self._noting(to.peer):
                async with aclosing(wire.replicate(to, opening, requests)) as responses:
                    async for response in responses:
                        yield response

    def can_inline(self, peer: Peer) -> bool:
        """See :meth:`Wire.can_inline`."""
        return self._stream.can_inline(peer)

    def send_inline(self, append: PreparedAppend, content: bytes) -> BlockingCall | None:
        """See :meth:`Wire.send_inline`."""
        return self._stream.send_inline(append, content)

    def prepare_inline(self, to: Destination) -> None:
        """See :meth:`Wire.prepare_inline`."""
        self._stream.prepare_inline(to)

    async def aclose(self) -> None:
        """See :meth:`Wire.aclose`."""
        await self._stream.aclose()
        if self._grpc is not None:
            await self._grpc.aclose()

    # -------------------------------------------------------------------- parts

    def _endpoint(self, peer: Peer) -> str:
        return self._address if peer == SERVICE else peer.endpoint

    async def _choose(self, peer: Peer) -> Wire:
        """The wire that a broker speaks; finds out where that isn't known."""
        while True:
            if self._pool.health(peer) is Health.READY:
                return self._stream
            if (grpc := self._remembered(peer)) is not None:
                return grpc
            trying = self._trying.get(peer)
            if trying is None:
                return await self._try(peer)
            failure = await asyncio.shield(trying)  # one tries, others learn from it
            if failure is not None:
                raise UnavailableError(str(failure))

    async def _choose_lasting(self, peer: Peer) -> Wire:
        """The same, for a call which holds a connection while it lasts, and is counted."""
        wire = await self._choose(peer)
        if wire is self._stream and self._lasting > LASTING_MAX:
            return self._with_grpc()
        return wire

    async def _try(self, peer: Peer) -> Wire:
        """Find out which wire a broker speaks."""
        trying = self._trying[peer] = asyncio.get_running_loop().create_future()
        failure: UnavailableError | None = None
        try:
            await self._pool.reach(peer)
        except NotStreamError:
            self.memory.remember(self._endpoint(peer))
            return self._with_grpc()
        except UnavailableError as error:
            failure = error
            raise
        finally:
            del self._trying[peer]
            trying.set_result(failure)
        return self._stream

    def _with_grpc(self) -> Wire:
        if self._grpc is None:
            self._grpc = self._make_grpc()
        return self._grpc

    def _remembered(self, peer: Peer) -> Wire | None:
        if self._grpc is None:
            return None
        health = self._grpc.health(peer)
        return self._grpc if self.memory.only_grpc(self._endpoint(peer), health) else None

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """One more of the calls that last."""
        self._lasting += 1
        try:
            yield
        finally:
            self._lasting -= 1

    @contextmanager
    def _noting(self, peer: Peer) -> Iterator[None]:
        """A call that finds its broker unavailable ends what is remembered of it."""
        try:
            yield
        except UnavailableError:
            self.memory.forget(self._endpoint(peer))
            raise
