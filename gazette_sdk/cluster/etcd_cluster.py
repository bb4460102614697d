"""Etcd cluster of several members: child processes on loopback, for tests and to try things out.

::

    async with EtcdCluster(directory) as cluster:
        etcd = await Etcd.connect(cluster.address)
        cluster.members[0].kill()
        await cluster.members[0].start()
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from gazette_sdk.cluster.etcd_server import EtcdServer, Peers, free_port
from gazette_sdk.errors import EtcdError

__all__ = ["EtcdCluster"]

HEARTBEAT_MS = 50
"""Raft tick. Etcd's default is 100 ms; members on one machine answer within a millisecond."""

ELECTION_MS = 500
"""Election time-out. It also bounds the shortest lease: 1 s."""

START_ATTEMPTS = 3
"""Number of attempts to start: another process may take a port that was free before."""


class EtcdCluster:
    """Members of one Etcd cluster, each over a directory of its own.

    Args:
        directory: parent of the members' directories.
        size: number of members.
        sync_writes: False if writes need not be forced to disk, for tests.
        heartbeat_ms: Raft tick.
        election_ms: election time-out.

    Attributes:
        members: the servers. Each can be killed and started again on its own, at its address.
        address: client URLs of all members, separated by commas; empty before the start.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        size: int = 3,
        sync_writes: bool = False,
        heartbeat_ms: int = HEARTBEAT_MS,
        election_ms: int = ELECTION_MS,
    ) -> None:
        self.members: list[EtcdServer] = []
        self.address = ""
        self._directory = Path(directory)
        self._size = size
        self._sync_writes = sync_writes
        self._heartbeat_ms = heartbeat_ms
        self._election_ms = election_ms

    async def start(self) -> None:
        """Start all members, and wait until they serve.

        Raises:
            ConfigurationError: no usable etcd was found, or a directory is in use.
            EtcdError: a member ended, or was not ready in time.
        """
        await asyncio.shield(asyncio.to_thread(self.start_blocking))

    async def stop(self) -> None:
        """Stop all members."""
        await asyncio.shield(asyncio.to_thread(self.stop_blocking))

    def start_blocking(self) -> None:
        """Start the cluster from blocking code; see :meth:`start`."""
        for attempt in range(1, START_ATTEMPTS + 1):
            self.members = self._make_members()
            try:
                # A member is ready when the cluster has a leader, so all are started at once.
                with ThreadPoolExecutor(self._size) as pool:
                    list(pool.map(EtcdServer.start_blocking, self.members))
            except EtcdError as error:
                self.stop_blocking()
                if "address already in use" not in str(error) or attempt == START_ATTEMPTS:
                    raise
            else:
                self.address = ",".join(member.endpoint for member in self.members)
                return

    def stop_blocking(self) -> None:
        """Stop the cluster from blocking code; see :meth:`stop`."""
        with ThreadPoolExecutor(self._size) as pool:
            list(pool.map(EtcdServer.stop_blocking, self.members))

    def _make_members(self) -> list[EtcdServer]:
        names = [f"etcd-{index}" for index in range(self._size)]
        urls = tuple((name, f"http://127.0.0.1:{free_port()}") for name in names)
        return [
            EtcdServer(
                self._directory / name,
                peers=Peers(name, urls, self._heartbeat_ms, self._election_ms),
                sync_writes=self._sync_writes,
            )
            for name in names
        ]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self.stop()
