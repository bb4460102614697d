"""Credentials of driver and executors come from their environment."""

import time
from pathlib import Path

import pytest

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.transport import loop
from gazette_sdk.transport.listing import list_journals
from gazette_spark.options import open_transport

KEYS = "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3I="


def list_with(url: str) -> list[str]:
    async def work() -> list[str]:
        async with open_transport(url) as transport:
            listing = await list_journals(transport, parse_selector("topic=orders"))
            return [journal.spec.name for journal in listing.journals]

    return loop.run(work())


def test_brokers_with_keys_get_the_credentials_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("BROKER_AUTH_KEYS", "BROKER_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with EmbeddedCluster(tmp_path, sync_etcd=False, auth_keys=KEYS) as cluster:
        with pytest.raises(UnauthenticatedError):
            list_with(cluster.address)
        monkeypatch.setenv("BROKER_AUTH_KEYS", KEYS)
        assert list_with(cluster.address) == []
        monkeypatch.delenv("BROKER_AUTH_KEYS")
        token = Authority(KEYS).sign(Capability.LIST, pb.LabelSelector(), 60, time.time())
        monkeypatch.setenv("BROKER_AUTH_TOKEN", token)
        assert list_with(cluster.address) == []


def test_a_store_gets_no_credentials_of_brokers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROKER_AUTH_KEYS", KEYS)
    loop.run(open_transport(tmp_path.as_uri()).aclose())
