"""Wire of the simulation: calls of a transport to service objects, over the virtual network.

It takes the place of the stream wire and of the fronts of a broker, which work on sockets. Messages
are serialized: nobody sees another process's objects. A call whose client goes away is cancelled at
the broker, as the fronts do.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.message import Message

from gazette_sdk.broker.api.fronts import Chunk, Journals, chunks
from gazette_sdk.broker.failover import failover
from gazette_sdk.cluster.verification import DIAL_TIMEOUT_S, Input
from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import complete
from gazette_sdk.server.authorization import Call
from gazette_sdk.server.metrics import SUCCESS, CallStatus, outcome_of
from gazette_sdk.transport.grpc import StreamedPipeline
from gazette_sdk.transport.router import RoutedTransport
from gazette_sdk.transport.wire import (
    SERVICE,
    AppendItem,
    AppendPipeline,
    Destination,
    Health,
    Peer,
    PreparedAppend,
    ReplicateItem,
    Wire,
    WireOptions,
    as_requests,
    call_error,
)
from simulation.loop import Node, current_node
from simulation.network import Connection, End, Network

__all__ = ["endpoint_of", "serve", "transport", "use_dials"]

_REQUESTS: dict[str, type[Message]] = {
    "List": pb.ListRequest,
    "Apply": pb.ApplyRequest,
    "Read": pb.ReadRequest,
    "Replicate": pb.ReplicateRequest,
    "ListFragments": pb.FragmentsRequest,
    "FragmentStoreHealth": pb.FragmentStoreHealthRequest,
}
_COMMIT = pb.AppendRequest()
_WHOLE = "whole append"


def endpoint_of(host: str) -> str:
    """Return the endpoint of a broker."""
    return f"http://{host}:8080"


def transport(
    network: Network,
    host: str,
    rng: random.Random,
    *,
    services: tuple[str, ...] = (),
    zone: str = "",
    cache_size: int = 0,
) -> RoutedTransport:
    """Return a transport of a process on a host.

    Args:
        network: carries its calls.
        host: of the process.
        rng: chooses among equal things.
        services: hosts behind the service address; a client's.
        zone: of the process.
        cache_size: journals whose routes are remembered.
    """

    class SimulatedTransport(RoutedTransport):
        @staticmethod
        def _make_wire(options: WireOptions) -> Wire:
            return SimulatedWire(network, host, rng, services, options.connect_timeout_s)

    return SimulatedTransport(endpoint_of(host), zone=zone, cache_size=cache_size)


# ---------------------------------------------------------------------- client


class SimulatedWire(Wire):
    """Client's side; see :func:`transport`."""

    def __init__(
        self,
        network: Network,
        host: str,
        rng: random.Random,
        services: tuple[str, ...],
        connect_timeout_s: float,
    ) -> None:
        self._network = network
        self._host = host
        self._rng = rng
        self._services = services
        self._connect_timeout_s = connect_timeout_s
        self._connected: dict[str, Node] = {}

    def health(self, peer: Peer) -> Health:
        """See :meth:`Wire.health`."""
        return Health.READY if self._host_of(peer) in self._connected else Health.IDLE

    async def reach(self, peer: Peer) -> None:
        """See :meth:`Wire.reach`. Dials, unless there is a connection."""
        if peer != SERVICE and self._host_of(peer) not in self._connected:
            (await self._dial(self._host_of(peer))).over()

    async def _dial(self, host: str) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                connection = await self._network.dial(self._host, host)
        except ConnectionError as error:
            raise UnavailableError(f"{host} refuses connections: {error}") from error
        except TimeoutError:
            raise UnavailableError(
                f"{host} did not answer within {self._connect_timeout_s:g} s"
            ) from None
        assert connection.server.node is not None
        self._connected[host] = connection.server.node
        return connection

    async def _open(self, to: Destination, what: str, opening: bytes) -> _ClientCall:
        is_service = to.peer == SERVICE
        host = self._rng.choice(self._services) if is_service else self._host_of(to.peer)
        connection: Connection | None = None
        if (server := self._connected.get(host)) is not None:
            connection = self._network.open(self._host, host, server)
        if connection is None:
            self._connected.pop(host, None)
            connection = await self._dial(host)
        return _ClientCall(to, connection, what, opening, lambda: self._connected.pop(host, None))

    def _host_of(self, peer: Peer) -> str:
        return urlsplit(peer.endpoint).hostname or ""

    async def call(self, to: Destination, request: Message) -> Any:
        """See :meth:`Wire.call`."""
        call = await self._open(to, to.rpc.name, request.SerializeToString())
        try:
            payload = await call.receive()
            assert payload is not None, "a response, or an error"
            return to.rpc.response_type.FromString(payload)
        finally:
            call.give_up()

    async def stream(
        self,
        to: Destination,
        opening: Message,
        requests: AsyncIterator[ReplicateItem] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """See :meth:`Wire.stream`."""
        call = await self._open(to, to.rpc.name, opening.SerializeToString())
        sending = None if requests is None else asyncio.create_task(_send(call, requests))
        try:
            while (payload := await call.receive()) is not None:
                is_chunk = isinstance(payload, Chunk)
                yield payload if is_chunk else to.rpc.response_type.FromString(payload)
        finally:
            call.give_up()
            if sending is not None:
                sending.cancel()
                await asyncio.wait([sending])

    async def append(
        self, append: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        """See :meth:`Wire.append`. A client sends some appends as a whole."""
        to = append.to
        if self._services and self._rng.random() < 0.5:
            items = [item async for item in requests]
            content = b"".join(item for item in items if isinstance(item, bytes))
            assert items[-1] == _COMMIT, "the workload commits what it sends"
            call = await self._open(to, _WHOLE, append.encoded)
            call.send(content)
        else:
            call = await self._open(to, "Append", append.encoded)
            try:
                async for item in requests:
                    call.send(item if isinstance(item, bytes) else item.SerializeToString())
            except BaseException:
                call.give_up()
                raise
            call.send(None)
        try:
            payload = await call.receive()
            assert payload is not None, "a response, or an error"
            return pb.AppendResponse.FromString(payload)
        finally:
            call.give_up()

    def try_pipeline(self, to: Destination) -> AppendPipeline | None:
        """See :meth:`Wire.try_pipeline`."""
        if self._host_of(to.peer) not in self._connected:
            return None
        return StreamedPipeline(to.peer, self.append)

    async def open_pipeline(self, to: Destination) -> AppendPipeline:
        """See :meth:`Wire.open_pipeline`."""
        return StreamedPipeline(to.peer, self.append)

    async def aclose(self) -> None:
        """See :meth:`Wire.aclose`. Calls are ended by those who made them."""


async def _send(call: _ClientCall, requests: AsyncIterator[ReplicateItem]) -> None:
    async for request in as_requests(requests):
        call.send(request.SerializeToString())
    call.send(None)


class _ClientCall:
    """Client's end of a call."""

    def __init__(
        self,
        to: Destination,
        connection: Connection,
        what: str,
        opening: bytes,
        lost: Callable[[], object],
    ) -> None:
        self._to = to
        self._connection = connection
        self._end = connection.client
        self._lost = lost
        self._received: deque[bytes | Chunk | CallStatus] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._end.on_message, self._end.on_broken = self._message, self._broken
        connection.send(self._end, (what, opening))

    def send(self, item: bytes | None) -> None:
        """Send an item, or the end of the requests."""
        self._connection.send(self._end, item)

    async def receive(self) -> Any:
        """Return the next item; ``None`` at the end of a call that succeeded.

        Raises:
            GazetteError: the call failed.
        """
        while not self._received:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._received[0]
        if not isinstance(item, CallStatus):
            return self._received.popleft()
        if item.code == "OK":
            return None
        to = self._to
        raise call_error(
            item.code, item.text, method=to.rpc.name, where=to.where, journal=to.journal,
            kind=item.kind,
        )  # fmt: skip

    def give_up(self) -> None:
        """End the call: the broker cancels it, unless it has ended."""
        if any(isinstance(item, CallStatus) for item in self._received):
            self._connection.over()
        else:
            self._connection.close(self._end, ConnectionResetError("the call was cancelled"))

    def _message(self, item: bytes | Chunk | CallStatus) -> None:
        self._received.append(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _broken(self, error: Exception) -> None:
        self._lost()
        self._message(CallStatus("UNAVAILABLE", f"the connection broke: {error}"))


# ---------------------------------------------------------------------- broker


def serve(network: Network, host: str, node: Node, service: Journals) -> None:
    """Serve the calls to a host by a service object of a node."""

    def accept(connection: Connection, end: End) -> None:
        _ServerCall(connection, end, service)

    network.listen(host, node, accept)


class _ServerCall:
    """Broker's end of a call."""

    def __init__(self, connection: Connection, end: End, service: Journals) -> None:
        self._connection = connection
        self._end = end
        self._service = service
        self._items: deque[bytes | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        end.on_message, end.on_broken = self._message, self._broken

    def _message(self, item: Any) -> None:
        if self._task is None:
            what, opening = item
            self._task = asyncio.create_task(self._run(what, opening), name=f"serve {what}")
            return
        self._items.append(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _broken(self, error: Exception) -> None:
        del error
        if self._task is not None:
            self._task.cancel()

    async def _run(self, what: str, opening: bytes) -> None:
        try:
            await self._serve(what, opening)
        except Exception as error:  # noqa: BLE001 - the call's outermost boundary
            self._send(outcome_of(error, what))
        else:
            self._send(SUCCESS)

    def _send(self, item: bytes | Chunk | CallStatus) -> None:
        self._connection.send(self._end, item)

    async def _serve(self, what: str, opening: bytes) -> None:
        service, call = self._service, Call(chunk_bytes=1 << 20)
        if what == _WHOLE:
            await self._whole_append(opening, call)
        elif what == "Append":
            async with aclosing(self._append_items(opening)) as items:
                response = await service.append(items, call)
            self._send(_encoded(response))
        elif what == "Read":
            request = pb.ReadRequest.FromString(opening)
            async with aclosing(chunks(service.read(request, call), call.chunk_bytes)) as answers:
                async for answer in answers:
                    self._send(answer if isinstance(answer, Chunk) else _encoded(answer))
        elif what == "Replicate":
            async with aclosing(service.replicate(self._replications(opening), call)) as responses:
                async for response in responses:
                    self._send(_encoded(response))
        elif what == "List":
            async with aclosing(service.list(pb.ListRequest.FromString(opening), call)) as lists:
                async for part in lists:
                    self._send(_encoded(part))
        else:
            serves: dict[str, Callable[[Any, Call], Any]] = {
                "Apply": service.apply,
                "ListFragments": service.list_fragments,
                "FragmentStoreHealth": service.fragment_store_health,
            }
            self._send(_encoded(await serves[what](_REQUESTS[what].FromString(opening), call)))

    async def _whole_append(self, opening: bytes, call: Call) -> None:
        content = await self._next()
        assert content is not None
        started = self._service.append_now(opening, content, call, None)
        if started is not None:
            if started.answers:
                self._send(await self._service.append_acknowledged(started))
            else:
                self._send(started.response)
            return

        async def items() -> AsyncGenerator[AppendItem]:
            yield pb.AppendRequest.FromString(opening)
            yield content
            yield _COMMIT

        self._send(_encoded(await self._service.append(items(), call)))

    async def _append_items(self, opening: bytes) -> AsyncGenerator[AppendItem]:
        yield pb.AppendRequest.FromString(opening)
        while (item := await self._next()) is not None:
            yield item or _COMMIT

    async def _replications(self, opening: bytes) -> AsyncIterator[pb.ReplicateRequest]:
        yield pb.ReplicateRequest.FromString(opening)
        while (item := await self._next()) is not None:
            yield pb.ReplicateRequest.FromString(item)

    async def _next(self) -> bytes | None:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


def _encoded(message: Message) -> bytes:
    return complete(message).SerializeToString()


def use_dials(network: Network) -> None:
    """Make brokers look over the virtual network whether others listen."""

    async def dial(endpoint: str, *, timeout_s: float = DIAL_TIMEOUT_S) -> Input:
        node = current_node()
        assert node is not None
        try:
            async with asyncio.timeout(timeout_s):
                (await network.dial(node.name, urlsplit(endpoint).hostname or "")).over()
        except ConnectionRefusedError:
            return Input.REFUSED
        except ConnectionAbortedError:
            return Input.CLOSED
        except TimeoutError:
            return Input.UNCLEAR
        return Input.REACHED

    failover.dial = dial  # type: ignore[assignment]
