"""A real Etcd for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_server import EtcdServer

__all__ = ["EtcdFixture"]


@dataclass(frozen=True)
class EtcdFixture:
    """An Etcd whose keyspace is empty at the start of the test.

    Attributes:
        server: its process.
    """

    server: EtcdServer

    @property
    def address(self) -> str:
        """URL of the Etcd."""
        return self.server.endpoint

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Etcd]:
        """Connect a client, on the running event loop."""
        client = await Etcd.connect(self.address)
        try:
            yield client
        finally:
            await client.aclose()

    async def keys(self) -> list[bytes]:
        """Return all keys."""
        async with self.client() as client:
            return [kv.key for kv in (await client.range(b"\x00", b"\x00")).entries]

    async def clear(self) -> None:
        """Delete all keys, and revoke all leases."""
        async with self.client() as client:
            for lease in await client.leases():
                await client.revoke(lease)
            await client.delete(b"\x00", b"\x00")
