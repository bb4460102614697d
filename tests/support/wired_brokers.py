"""Brokers of one process which reach each other through their ports, over a wire of choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from gazette_sdk.broker.api.fronts import journal_methods, stream_methods
from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.broker.process import RECONNECT_BACKOFF_MAX_S, Broker
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.process import Server
from gazette_sdk.testing.tcp_proxy import TcpProxy
from gazette_sdk.transport.connect import connect
from support.brokers import ZONE, Client, HandBroker, HandCluster, config_for
from support.etcd import EtcdFixture

__all__ = ["WiredCluster"]


class WiredCluster(HandCluster):
    """Brokers without allocator, each behind a port of its own.

    Args:
        etcd: the cluster's.
        directory: of their files.
        wire: what they speak to each other: ``auto``, which is what a broker does by itself,
            ``stream`` or ``grpc``.
        grpc_only: members whose port speaks gRPC only, as other implementations do.

    Attributes:
        servers: the ports.
        proxies: what stands before each port; connections can be broken and stalled there.
    """

    broker_type: type[Broker] = HandBroker
    """:class:`Broker` for brokers with allocator, which assign the journals themselves."""

    def __init__(
        self,
        etcd: EtcdFixture,
        directory: Path,
        wire: str = "auto",
        *,
        grpc_only: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(etcd, directory)
        self.servers: dict[str, Server] = {}
        self.proxies: dict[str, TcpProxy] = {}
        self._wire = wire
        self._grpc_only = grpc_only

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        for proxy in self.proxies.values():
            proxy.heal()
        await super().__aexit__(*error)
        for server in self.servers.values():
            await server.stop(0)
        for proxy in self.proxies.values():
            proxy.stop()

    async def start(self, suffix: str = "broker-1", **changes: Any) -> Client:
        """Start a broker behind its port, and give a client of it."""
        server = self.servers[suffix] = Server(host="127.0.0.1")
        proxy = TcpProxy(int(server.bind().rpartition(":")[2])).start()
        self.proxies[suffix] = proxy
        endpoint = f"http://127.0.0.1:{proxy.port}"
        config = config_for(self.etcd_fixture, self.directory, suffix)
        config = replace(config, endpoint=endpoint, **changes)
        peers = None
        if self._wire != "auto":
            peers = connect(
                endpoint,
                wire=self._wire,
                zone=ZONE,
                cache_size=0,
                auth_keys=config.auth_keys,
                reconnect_backoff_max_s=RECONNECT_BACKOFF_MAX_S,
            )
        broker = self.brokers[suffix] = self.broker_type(config, peers)
        await broker.start()
        server.grpc.add(journal_methods(broker.service))
        if suffix not in self._grpc_only:
            server.stream.add(stream_methods(broker.service))
        await server.start()
        return Client(InProcessTransport(broker.service))

    def streams_at(self, suffix: str) -> int:
        """How many connections of the stream wire a member has."""
        return len(self.servers[suffix].stream)

    async def listed(self, suffix: str, endpoint: str) -> None:
        """A member which is only a key, at an endpoint of the test."""
        spec = pb.BrokerSpec(journal_limit=10)
        spec.process_spec.id.zone, spec.process_spec.id.suffix = ZONE, suffix
        spec.process_spec.endpoint = endpoint
        await self.etcd.put(self._keyspace.member_key(ZONE, suffix), spec.SerializeToString())
