"""The suite that every transport passes, over a real broker: in process, and over each wire.

Over TLS, calls are proxied by a further port of the broker, whose own endpoint is a plain one.
"""

from __future__ import annotations

import pytest

from gazette_sdk.broker.api.fronts import journal_methods, stream_methods
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.server.process import Server
from gazette_sdk.server.tls import server_context
from gazette_sdk.testing.transport_faults import FaultyTransport
from gazette_sdk.testing.transports import CHECKS, TransportContract
from gazette_sdk.transport import loop
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.stream.wire import ChosenTransport, StreamTransport
from gazette_sdk.transport.wire import Tls
from support.certificates import Authority

PLAIN = {
    "grpc": GrpcTransport,
    "grpc without routes": lambda address: GrpcTransport(address, cache_size=0),
    "stream": StreamTransport,
    "stream without routes": lambda address: StreamTransport(address, cache_size=0),
    "chosen": ChosenTransport,
}
TLS = {
    "grpc over TLS": GrpcTransport,
    "stream over TLS": StreamTransport,
    "chosen over TLS": ChosenTransport,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with EmbeddedCluster(tmp_path_factory.mktemp("gazette"), sync_etcd=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tls_server(cluster, tmp_path_factory):
    """A further port of the broker, and what clients of it need."""
    certifier = Authority(tmp_path_factory.mktemp("certificates"))
    files = certifier.issue()
    server = Server(tls=server_context(str(files.cert_file), str(files.key_file)))
    service = cluster.brokers[0].broker.service
    server.grpc.add(journal_methods(service))
    server.stream.add(stream_methods(service))
    loop.run(server.start(), timeout=10)
    yield server.endpoint, Tls(trusted_ca_file=str(certifier.ca_file))
    loop.run(server.stop(1.0), timeout=10)


@pytest.fixture(scope="module")
def transports(cluster, tls_server):
    address, tls = tls_server
    made = {kind: make(cluster.address) for kind, make in PLAIN.items()}
    made |= {kind: make(address, tls=tls, cache_size=0) for kind, make in TLS.items()}
    faultless = FaultyTransport(cluster.transport)
    yield made | {"in process": cluster.transport, "without faults": faultless}
    for transport in made.values():
        loop.run(transport.aclose(), timeout=10)


@pytest.mark.parametrize("kind", ["in process", "without faults", *PLAIN, *TLS])
@pytest.mark.parametrize("check", CHECKS)
def test_transports_keep_their_promises(check, kind, transports):
    contract = TransportContract(transports[kind], store="file:///")
    loop.run(contract.run(check), timeout=60)
