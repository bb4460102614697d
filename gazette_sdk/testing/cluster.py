"""Cluster of real processes, for tests of what happens when brokers die.

::

    with gazette_cluster(3, zones=2) as cluster:
        cluster.apply(JOURNALS)
        cluster.broker("broker-1").kill()
        ...
        cluster.broker("broker-1").start()
        cluster.wait_until_ready()

:class:`EtcdFixture` is a real Etcd for tests.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.errors import ConfigurationError, LeaseLostError
from gazette_sdk.local_cluster import LocalBroker, LocalCluster
from gazette_sdk.testing.tcp_proxy import TcpProxy


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
                with contextlib.suppress(LeaseLostError):  # it has just run out
                    await client.revoke(lease)
            await client.delete(b"\x00", b"\x00")


STORE = "store"
"""Directory of the store that can fail, below the file root."""

LEASE_TTL_S = 5.0
"""Default lifetime of leases, short for tests of lost leases."""


class TemporaryCluster(LocalCluster):
    """A :class:`~gazette_sdk.local_cluster.LocalCluster` whose end is quick, whatever happened.

    Brokers are killed at the end. A temporary directory is deleted then; after an exception it is
    kept with its logs, and the exception names it.

    Attributes:
        store: URL of a fragment store that :meth:`fail_store` makes unusable.
    """

    store = f"file:///{STORE}/"
    _is_temporary = False
    _proxies: Sequence[TcpProxy] = ()  # of the members of Etcd, then of the brokers

    def start(self) -> Self:
        """Start Etcd and all brokers; see :meth:`LocalCluster.start`."""
        if not (self.fragments / STORE).is_symlink():
            (self.fragments / STORE).mkdir(parents=True, exist_ok=True)
        for proxy in self._proxies:
            proxy.start()
        return super().start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Heal the store, and end all brokers and Etcd; see :meth:`LocalCluster.stop`."""
        self.heal_store()
        try:
            super().stop(timeout_s)
        finally:
            for proxy in self._proxies:
                proxy.stop()

    def fail_store(self) -> None:
        """Make the store :attr:`store` unusable: writes, reads and listings fail.

        Other stores below ``fragments`` are not affected.
        """
        store = self.fragments / STORE
        if not store.is_symlink():
            store.rename(self._healthy_store)
            # A link to itself. A missing directory would be listed as an empty one.
            store.symlink_to(STORE)

    def heal_store(self) -> None:
        """Make the store usable again, with all its content."""
        store = self.fragments / STORE
        if store.is_symlink():
            store.unlink()
            self._healthy_store.rename(store)

    def cut(
        self, broker: LocalBroker, others: Iterable[LocalBroker], *, closes: bool = False
    ) -> None:
        """Cut a broker from others, both ways. Connections stay open, and nothing arrives.

        A process that is started later is not cut.

        Args:
            broker: a broker that runs.
            others: brokers that run.
            closes: True to reset connections instead, and to accept and close new ones.

        Raises:
            ConfigurationError: the cluster was made without ``cuts``.
        """
        for other in others:
            self.cut_calls(broker, other, closes=closes)
            self.cut_calls(other, broker, closes=closes)

    def cut_calls(self, caller: LocalBroker, callee: LocalBroker, *, closes: bool = False) -> None:
        """Cut a broker's calls to another, which can still call it. See :meth:`cut`."""
        proxy = self._proxy_of(callee)
        if closes:
            proxy.hang_up(pid=caller.pid)
        else:
            proxy.cut(pid=caller.pid)

    def accept_for_dead(self, broker: LocalBroker) -> None:
        """Accept and close connections to a broker while it refuses them, until links are healed.

        Load balancers, service meshes and port proxies do so.
        """
        self._proxy_of(broker).accept_for_dead()

    def cut_from_etcd(self, broker: LocalBroker) -> None:
        """Cut a broker from all members of Etcd. Other connections of it work. See :meth:`cut`."""
        self._require_proxies()
        for proxy in self._proxies[: len(self.etcd)]:
            proxy.cut(pid=broker.pid)

    def heal_links(self) -> None:
        """Undo all cuts. What was sent meanwhile is delivered."""
        for proxy in self._proxies:
            proxy.heal()

    def _proxy_of(self, broker: LocalBroker) -> TcpProxy:
        self._require_proxies()
        return self._proxies[len(self.etcd) + self.brokers.index(broker)]

    def _require_proxies(self) -> None:
        if not self._proxies:
            raise ConfigurationError(
                "this cluster has no proxies: give cuts=True to gazette_cluster()"
            )

    @property
    def _healthy_store(self) -> Path:
        return self.fragments / f"{STORE}.unreachable"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kill everything."""
        try:
            self.stop(0)
        finally:
            if error is not None:
                error.add_note(f"the logs of the brokers are in {self.data / 'logs'}")
            elif self._is_temporary:
                shutil.rmtree(self.data, ignore_errors=True)


def gazette_cluster(
    brokers: int = 3,
    *,
    zones: int | Sequence[str] = 1,
    etcd_members: int = 1,
    lease_ttl_s: float = LEASE_TTL_S,
    cuts: bool = False,
    data: Path | str | None = None,
    log_level: str = "info",
    arguments: Sequence[str] = (),
) -> TemporaryCluster:
    """Return a cluster of ``gazette serve`` processes, to be used by ``with`` or ``async with``.

    Args:
        brokers: number of brokers, with the ids ``broker-0`` and so on.
        zones: names of zones, which are given to the brokers in turn; or how many.
        etcd_members: number of members of Etcd.
        lease_ttl_s: lifetime of the brokers' leases in Etcd, in seconds, at least 1.
        cuts: True if connections between brokers, and to Etcd, shall be cut by
            :meth:`TemporaryCluster.cut` and :meth:`TemporaryCluster.cut_from_etcd`. On Linux only.
        data: directory of all data; by default a temporary one.
        log_level: least level of the brokers' log records, which are in ``logs`` below the data.
        arguments: further arguments of each ``gazette serve``.

    Raises:
        ConfigurationError: a number is wrong.
    """
    directory = Path(tempfile.mkdtemp(prefix="gazette-cluster-") if data is None else data)
    proxies: list[TcpProxy] = []

    def advertise(port: int) -> int:
        if cuts:
            proxies.append(TcpProxy(port, port=reserve_port()))
        return proxies[-1].port if cuts else port

    cluster = TemporaryCluster(
        directory,
        advertise=advertise,
        brokers=brokers,
        zones=zones,
        etcd_members=etcd_members,
        lease_ttl_s=lease_ttl_s,
        sync_etcd=False,  # the directory is deleted afterwards
        log_level=log_level,
        logs=directory.absolute() / "logs",
        arguments=arguments,
    )
    cluster._is_temporary = data is None  # noqa: SLF001 - this module's own class
    cluster._proxies = proxies  # noqa: SLF001 - as above
    return cluster
