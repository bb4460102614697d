"""The suite that every transport passes, over a real broker: in process, and over gRPC."""

from __future__ import annotations

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.testing.transports import CHECKS, TransportContract
from gazette_sdk.transport import loop
from gazette_sdk.transport.grpc import GrpcTransport


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with EmbeddedCluster(tmp_path_factory.mktemp("gazette"), sync_etcd=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def transports(cluster):
    cached = GrpcTransport(cluster.address)
    proxied = GrpcTransport(cluster.address, cache_size=0)
    yield {"in process": cluster.transport, "grpc": cached, "grpc without routes": proxied}
    loop.run(cached.aclose(), timeout=10)
    loop.run(proxied.aclose(), timeout=10)


@pytest.mark.parametrize("kind", ["in process", "grpc", "grpc without routes"])
@pytest.mark.parametrize("check", CHECKS)
def test_transports_keep_their_promises(check, kind, transports):
    contract = TransportContract(transports[kind], store="file:///")
    loop.run(contract.run(check), timeout=60)
