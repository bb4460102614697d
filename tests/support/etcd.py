"""Asynchronous tests with the fixture ``etcd`` of the pytest plugin.

They run a coroutine with :func:`run`::

    def test_something(etcd):
        async def scenario():
            async with etcd.client() as client:
                ...

        run(scenario())
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import rpc
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.local_cluster import EtcdMembers
from gazette_sdk.testing.cluster import EtcdFixture
from gazette_sdk.testing.plugin import etcd, etcd_server

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


@pytest.fixture
def etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdMembers]:
    """Three etcd members, which the test may kill and start again."""
    members = EtcdMembers(tmp_path_factory.mktemp("etcd-cluster"), 3, sync_writes=False)
    members.start()
    yield members
    for server in members.servers:  # without a majority, a graceful end takes long
        server.kill()


async def leader_of(members: EtcdMembers) -> EtcdServer:
    """Return the running member that leads the others."""
    while True:
        for server in members.servers:
            if server.pid is None:
                continue
            async with contextlib.aclosing(await Etcd.connect(server.endpoint)) as client:
                status = await client._call(client._maintenance.Status, rpc.StatusRequest())
                if status.leader == status.header.member_id:
                    return server
        await asyncio.sleep(0.1)  # an election
