"""gRPC channel to the model of Etcd, over the virtual network.

The product's Etcd client runs as it is: only its channel is another one. gRPC's own cannot run on a
virtual clock, since its threads wait on sockets.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from gazette_sdk.cluster import etcd
from gazette_sdk.cluster.etcd_messages import rpc
from simulation.etcd_model import MEMBER_ID, EtcdModel, EtcdRefusalError, Lease, Watcher
from simulation.loop import Node, current_node, running_loop
from simulation.network import Connection, End, Network

__all__ = ["ETCD_ADDRESS", "ETCD_HOST", "EtcdHost", "SimulatedChannel", "use_channels"]

ETCD_HOST = "etcd"
ETCD_ADDRESS = f"http://{ETCD_HOST}:2379"
VERSION = "3.5.17"

_REDIAL_S = 0.2
_EXPIRY_CHECK_S = 0.5  # Etcd looks for leases that ran out twice a second


class EtcdHost:
    """Etcd's process: serves the model, and ends leases on the virtual clock.

    Args:
        network: it listens there.
        rng: decides how late leases end.

    Attributes:
        model: its state, which survives outages.
        is_up: False during an outage.
    """

    def __init__(self, network: Network, rng: random.Random) -> None:
        self.model = EtcdModel()
        self.model.on_grant = self._granted
        self.is_up = False
        self._network = network
        self._rng = rng
        self._ends_at: dict[int, float] = {}
        self._node = Node(ETCD_HOST)
        self.start()

    def start(self) -> None:
        """Begin to serve. All leases live on for their whole time, as after an election."""
        self.is_up = True
        self._node = Node(ETCD_HOST)
        self._network.listen(ETCD_HOST, self._node, self._accept)
        self.model.raft_term += 1
        for lease in list(self.model.leases.values()):
            self._granted(lease)

    def members(self) -> frozenset[str]:
        """Return the suffixes of the members whose leases are alive."""
        return frozenset(
            key.decode().rpartition("#")[2]
            for lease in self.model.leases.values()
            for key in lease.keys
            if b"/members/" in key
        )

    def stop(self) -> None:
        """End all connections. The state is kept; no lease ends meanwhile."""
        self.is_up = False
        self._node.kill()
        self._network.killed(self._node)

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go back to a snapshot during an outage."""
        assert not self.is_up, "it is stopped first"
        self.model.restore(snapshot)
        self._ends_at.clear()

    def _granted(self, lease: Lease) -> None:
        loop = running_loop()
        known = lease.id in self._ends_at
        self._ends_at[lease.id] = loop.world_s + lease.ttl_s
        if not known:
            loop.call_later(lease.ttl_s, self._expire, lease, context=self._network.context)

    def _expire(self, lease: Lease) -> None:
        loop = running_loop()
        if self.model.leases.get(lease.id) is not lease:
            if lease.id not in self.model.leases:  # one of a backup may have its id
                self._ends_at.pop(lease.id, None)
            return
        left_s = self._ends_at[lease.id] - loop.world_s
        if left_s <= 0 and self.is_up:
            del self._ends_at[lease.id]
            self.model.end_lease(lease)
            return
        pause_s = max(left_s, 0.0) + self._rng.random() * _EXPIRY_CHECK_S
        loop.call_later(pause_s, self._expire, lease, context=self._network.context)

    def _accept(self, connection: Connection, end: End) -> None:
        watchers: list[Watcher] = []

        def broken(_: Exception) -> None:
            for watcher in watchers:
                self.model.unwatch(watcher)

        def message(item: tuple[str, Any]) -> None:
            path, request = item
            if path == "Watch":
                watcher = Watcher(
                    request.create_request, lambda sent: connection.send(end, _copy(sent))
                )
                watchers.append(watcher)
                self.model.watch(watcher)
                return
            try:
                answer = self._answer(path, request)
            except EtcdRefusalError as refusal:
                connection.send(end, refusal)
            else:
                connection.send(end, answer)

        end.on_message, end.on_broken = message, broken

    def _answer(self, path: str, request: Any) -> Any:  # noqa: PLR0911 - one per call
        model = self.model
        match path:
            case "Range":
                return model.range(request)
            case "Txn":
                return model.txn(request)
            case "Compact":
                model.compact(request.revision)
                return rpc.CompactionResponse(header=model.header())
            case "LeaseGrant":
                return model.grant(request)
            case "LeaseKeepAlive":
                return model.keep_alive(request)
            case "LeaseRevoke":
                return model.revoke(request)
            case "LeaseLeases":
                return model.list_leases()
            case "LeaseTimeToLive":
                return self._time_to_live(request)
            case "Status":
                return rpc.StatusResponse(
                    header=model.header(), version=VERSION, leader=MEMBER_ID,
                    raftTerm=model.raft_term,
                )  # fmt: skip
            case "MemberList":
                return rpc.MemberListResponse(
                    header=model.header(),
                    members=[rpc.Member(ID=MEMBER_ID, name=ETCD_HOST, clientURLs=[ETCD_ADDRESS])],
                )
        raise EtcdRefusalError(grpc.StatusCode.UNIMPLEMENTED, f"the model has no {path}")

    def _time_to_live(self, request: Any) -> Any:
        lease = self.model.leases.get(request.ID)
        if lease is None:
            return rpc.LeaseTimeToLiveResponse(header=self.model.header(), ID=request.ID, TTL=-1)
        left_s = self._ends_at[lease.id] - running_loop().world_s
        return rpc.LeaseTimeToLiveResponse(
            header=self.model.header(),
            ID=lease.id,
            TTL=int(left_s),
            grantedTTL=lease.ttl_s,
            keys=list(lease.keys) if request.keys else [],
        )


def _copy(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


# ---------------------------------------------------------------------- client


class SimulatedChannel:
    """Channel of one client, as :func:`gazette_sdk.cluster.etcd_connections.open_channel` makes.

    Args:
        network: carries its calls.
        source: host of the client.
    """

    def __init__(self, network: Network, source: str) -> None:
        self._network = network
        self._source = source
        self._server: Node | None = None  # to which it is connected
        self._calls: set[Any] = set()

    def unary_unary(self, path: str, **_: Any) -> Callable[..., asyncio.Task[Any]]:
        """Return a function that makes a call of one request and one response."""
        name = path.rpartition("/")[2]

        def call(
            request: Any,
            *,
            timeout: float | None = None,
            metadata: Any = None,
            wait_for_ready: bool = False,
        ) -> asyncio.Task[Any]:
            del metadata
            work = self._unary(name, _copy(request), timeout, wait_for_ready)
            return asyncio.get_running_loop().create_task(work)

        return call

    def stream_stream(self, path: str, **_: Any) -> Callable[..., _Stream]:
        """Return a function that opens a stream."""
        name = path.rpartition("/")[2]
        return lambda timeout=None, **_: _Stream(name, self, timeout)

    def unary_stream(self, path: str, **_: Any) -> Callable[..., Any]:
        """Return a function for calls that the client does not make."""

        def call(*_: Any, **__: Any) -> Any:
            raise _error(grpc.StatusCode.UNIMPLEMENTED, f"the model has no {path}")

        return call

    def get_state(self, *, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return READY while it is connected, as far as known."""
        del try_to_connect
        is_ready = self._server is not None
        return grpc.ChannelConnectivity.READY if is_ready else grpc.ChannelConnectivity.IDLE

    async def close(self, grace: float | None = None) -> None:
        """Close the channel. Its calls were cancelled by the client."""
        del grace

    async def connection(self, *, wait_for_ready: bool) -> Connection:
        """Return a connection for one call."""
        while True:
            if self._server is not None:
                connection = self._network.open(self._source, ETCD_HOST, self._server)
                if connection is not None:
                    return connection
            try:
                connection = await self._network.dial(self._source, ETCD_HOST)
            except ConnectionRefusedError as error:
                if not wait_for_ready:
                    raise _error(grpc.StatusCode.UNAVAILABLE, str(error)) from error
                await asyncio.sleep(_REDIAL_S)
            else:
                self._server = connection.server.node
                return connection

    def lost(self) -> None:
        """Dial anew for the next call."""
        self._server = None

    async def _unary(
        self, name: str, request: Any, timeout_s: float | None, wait_for_ready: bool
    ) -> Any:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self.connection(wait_for_ready=wait_for_ready)
                answered: asyncio.Future[Any] = loop.create_future()
                end = connection.client

                def message(answer: Any) -> None:
                    if not answered.done():
                        answered.set_result(answer)

                def broken(error: Exception) -> None:
                    self.lost()
                    if not answered.done():
                        answered.set_exception(_error(grpc.StatusCode.UNAVAILABLE, str(error)))

                end.on_message, end.on_broken = message, broken
                connection.send(end, (name, request))
                try:
                    answer = await answered
                finally:
                    connection.over()
        except TimeoutError:
            self.lost()
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        if isinstance(answer, EtcdRefusalError):
            raise _error(answer.code, answer.text)
        return answer


class _Stream:
    """Stream of a watch."""

    def __init__(self, name: str, channel: SimulatedChannel, timeout_s: float | None) -> None:
        self._name = name
        self._channel = channel
        self._connection: Connection | None = None
        self._received: deque[Any] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._expire)

    async def write(self, request: Any) -> None:
        """Send a request."""
        if self._connection is None and self._error is None:
            self._connection = await self._channel.connection(wait_for_ready=True)
            end = self._connection.client
            end.on_message, end.on_broken = self._message, self._broken
        if self._error is not None:
            raise self._error
        assert self._connection is not None
        self._connection.send(self._connection.client, (self._name, _copy(request)))

    async def read(self) -> Any:
        """Return the next response."""
        while not self._received:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._received.popleft()

    def cancel(self) -> None:
        """End the stream."""
        if self._connection is not None:
            self._connection.close(self._connection.client, ConnectionResetError("cancelled"))
        if self._error is None:
            self._error = _error(grpc.StatusCode.CANCELLED, "cancelled")
        self._wake()

    def _expire(self) -> None:
        if self._error is None:
            self.cancel()
            self._error = _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _message(self, response: Any) -> None:
        self._received.append(response)
        self._wake()

    def _broken(self, error: Exception) -> None:
        self._channel.lost()
        if self._error is None:
            self._error = _error(grpc.StatusCode.UNAVAILABLE, str(error))
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def use_channels(network: Network) -> None:
    """Make the Etcd clients of this process use simulated channels."""

    def open_channel(address: str, **_: Any) -> SimulatedChannel:
        assert address == ETCD_ADDRESS
        node = current_node()
        return SimulatedChannel(network, node.name if node is not None else "client")

    etcd.open_channel = open_channel  # type: ignore[assignment]
    etcd.open_thread_channel = open_channel  # type: ignore[assignment]
    etcd.run_beside = _run_on_the_loop  # type: ignore[assignment]


async def _run_on_the_loop(work: Coroutine[Any, Any, None], *_: Any, **__: Any) -> None:
    await work


def _error(code: grpc.StatusCode, text: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details=text)
