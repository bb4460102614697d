"""Choice of the wire for each broker.

The stream transport is tried first: a server that speaks it says so within a round trip. One that
closes, answers HTTP or says nothing within a second gets gRPC. That is remembered for ten minutes,
or until a connection to it fails: the server that comes back may speak the stream transport. One
that has spoken the stream transport and says nothing now is frozen, and unavailable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gazette_sdk.errors import ClosedError, UnavailableError
from gazette_sdk.transport.routing.dispatcher import Health
from gazette_sdk.transport.routing.routed import RoutedTransport
from gazette_sdk.transport.target import SERVICE, Destination, Peer
from gazette_sdk.transport.wires.base import AppendPipeline, Wire, WireChoice, WireOptions
from gazette_sdk.transport.wires.stream.dialing import NotStreamError
from gazette_sdk.transport.wires.stream.transport import StreamWire

__all__ = [
    "HELLO_TIMEOUT_S",
    "REMEMBERED_S",
    "ChosenTransport",
    "ChosenWire",
    "RememberedWires",
]

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
            from gazette_sdk.transport.wires.grpc.transport import GrpcWire  # noqa: PLC0415

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
