"""Etcd of a local cluster, of one member or several."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.cluster.etcd_server import EtcdServer, Peers
from gazette_sdk.errors import ConfigurationError, EtcdError

HEARTBEAT_MS = 50
"""Raft tick of several members, which answer each other within a millisecond."""

ELECTION_MS = 500
"""Election time-out of several members. A busy machine holds them up."""


class EtcdMembers:
    """Etcd of one member or several, each a child process.

    A killed member is started again over its directory and at its port.

    Args:
        data: directory of their files.
        count: number of members, at least 1. An odd number is usual: most of them must run.
        sync_writes: False if writes need not be forced to disk, for tests with temporary data.
        advertise: returns the port to advertise for a port that is served, which a proxy maps.

    Raises:
        ConfigurationError: the number is wrong.
    """

    def __init__(
        self,
        data: Path,
        count: int = 1,
        *,
        sync_writes: bool = True,
        advertise: Callable[[int], int] = int,
    ) -> None:
        if count < 1:
            raise ConfigurationError(f"an Etcd needs at least one member, not {count}")
        ports = [reserve_port() for _ in range(count)]
        self._advertised = [advertise(port) for port in ports]
        if count == 1:
            # At this path EmbeddedCluster has its Etcd, too.
            self.servers = [
                EtcdServer(
                    data,
                    sync_writes=sync_writes,
                    port=ports[0],
                    advertise_port=self._advertised[0],
                )
            ]
            return
        urls = tuple(
            (f"member-{index}", f"http://127.0.0.1:{reserve_port()}") for index in range(count)
        )
        self.servers = [
            EtcdServer(
                data / name,
                peers=Peers(name, urls, heartbeat_ms=HEARTBEAT_MS, election_ms=ELECTION_MS),
                sync_writes=sync_writes,
                port=port,
                advertise_port=advertised,
            )
            for (name, _), port, advertised in zip(urls, ports, self._advertised, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.servers)

    @property
    def endpoints(self) -> list[str]:
        """URLs of the members that run."""
        return [server.endpoint for server in self.servers if server.pid is not None]

    @property
    def address(self) -> str:
        """URLs of the members that run, separated by commas: the address for a client."""
        return ",".join(self.endpoints)

    def advertised_address(self, first: int = 0) -> str:
        """Return the advertised URLs of all members, separated by commas.

        Args:
            first: number of the member that comes first.
        """
        ports = self._advertised[first:] + self._advertised[:first]
        return ",".join(f"http://127.0.0.1:{port}" for port in ports)

    def endpoint(self, index: int = 0) -> str:
        """Return the URL of a member that runs, if possible that with this number.

        Raises:
            EtcdError: none runs.
        """
        count = len(self.servers)
        for offset in range(count):
            server = self.servers[(index + offset) % count]
            if server.pid is not None:
                return server.endpoint
        raise EtcdError("no member of the local Etcd runs; start one first")

    def start(self) -> None:
        """Start all members that do not run.

        Raises:
            ConfigurationError: no usable etcd was found, or the directory is in use.
            EtcdError: a member ended, or was not ready in time.
        """
        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(EtcdServer.start_blocking, self.servers))

    def start_member(self, index: int) -> None:
        """Start one member again. Other members must run.

        Raises:
            EtcdError: it ended, or was not ready in time.
        """
        self.servers[index].start_blocking()

    def kill(self, index: int) -> None:
        """End a member with SIGKILL."""
        self.servers[index].kill()

    def stop(self) -> None:
        """Stop all members at the same time."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(EtcdServer.stop_blocking, self.servers))
