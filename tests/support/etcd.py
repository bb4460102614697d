"""A real etcd for tests.

Load the fixtures in a ``conftest.py`` with ``from support.etcd import *``. Tests of asynchronous
code run a coroutine with :func:`run`::

    def test_something(etcd):
        async def scenario():
            async with etcd.client() as client:
                ...

        run(scenario())
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from gazette_sdk.cluster._etcd3 import rpc
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_cluster import EtcdCluster
from gazette_sdk.cluster.etcd_server import EtcdServer

__all__ = [
    "EtcdFixture",
    "etcd",
    "etcd_cluster",
    "etcd_server",
    "leader_of",
    "run",
    "within",
]

T = TypeVar("T")

TIMEOUT_S = 30.0


def run(scenario: Coroutine[Any, Any, T], *, timeout_s: float = TIMEOUT_S) -> T:
    """Run a coroutine on a loop of its own, for a bounded time."""
    return asyncio.run(within(scenario, timeout_s=timeout_s))


async def within(awaitable: Awaitable[T], *, timeout_s: float = TIMEOUT_S) -> T:
    """Await something for a bounded time."""
    async with asyncio.timeout(timeout_s):
        return await awaitable


@dataclass(frozen=True)
class EtcdFixture:
    """An etcd whose keyspace is empty at the start of the test."""

    server: EtcdServer

    @property
    def address(self) -> str:
        return self.server.endpoint

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Etcd]:
        client = await Etcd.connect(self.address)
        try:
            yield client
        finally:
            await client.aclose()


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests of the session."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), sync_writes=False)
    server.start_blocking()
    yield server
    server.stop_blocking()


@pytest.fixture
def etcd(etcd_server: EtcdServer) -> Iterator[EtcdFixture]:
    """The session's etcd, with an empty keyspace; what the test leaves is deleted."""
    fixture = EtcdFixture(etcd_server)
    leftovers = run(_keys(fixture))
    assert not leftovers, f"an earlier test left keys behind: {leftovers}"
    yield fixture
    run(_clean(fixture))


@pytest.fixture
def etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A cluster of three etcd members, which the test may kill and start again."""
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd-cluster"))
    cluster.start_blocking()
    yield cluster
    for member in cluster.members:  # without a majority, a graceful end takes long
        member.kill()


async def leader_of(cluster: EtcdCluster) -> EtcdServer:
    """Return the running member of a cluster that leads it."""
    while True:
        for member in cluster.members:
            if member.pid is None:
                continue
            async with contextlib.aclosing(await Etcd.connect(member.endpoint)) as client:
                status = await client._call(client._maintenance.Status, rpc.StatusRequest())
                if status.leader == status.header.member_id:
                    return member
        await asyncio.sleep(0.1)  # an election


async def _keys(fixture: EtcdFixture) -> list[bytes]:
    async with fixture.client() as client:
        return [kv.key for kv in (await client.range(b"\x00", b"\x00")).entries]


async def _clean(fixture: EtcdFixture) -> None:
    async with fixture.client() as client:
        for lease in await client.leases():
            await client.revoke(lease)
        await client.delete(b"\x00", b"\x00")
