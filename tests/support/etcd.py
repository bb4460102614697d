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

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_server import EtcdServer

__all__ = ["EtcdFixture", "etcd", "etcd_server", "run", "within"]

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


async def _keys(fixture: EtcdFixture) -> list[bytes]:
    async with fixture.client() as client:
        return [kv.key for kv in (await client.range(b"\x00", b"\x00")).entries]


async def _clean(fixture: EtcdFixture) -> None:
    async with fixture.client() as client:
        for lease in await client.leases():
            await client.revoke(lease)
        await client.delete(b"\x00", b"\x00")
