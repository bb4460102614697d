"""Cluster of the simulation: brokers on hosts, and what may happen to them."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from gazette_sdk.broker.process import Broker, BrokerConfig
from gazette_sdk.broker.spool.directory import Durability
from gazette_sdk.cluster.membership import EtcdConfig
from gazette_sdk.errors import GazetteError
from simulation.disk import Disks
from simulation.etcd_channel import ETCD_ADDRESS, EtcdHost
from simulation.loop import Node, VirtualLoop
from simulation.network import Network
from simulation.store import StoredState
from simulation.wire import endpoint_of, serve, transport

__all__ = ["Cluster", "Host", "Settings"]

SUPERVISOR_PAUSE_S = 0.5
"""Pause before a broker that ended by itself is started again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a cluster.

    Attributes:
        brokers: their number.
        zones: their number; brokers are spread over them.
        lease_ttl_s: of members.
        durability: of appends.
    """

    brokers: int
    zones: int
    lease_ttl_s: int
    durability: Durability


@dataclass(slots=True, eq=False)
class Host:
    """Machine of one broker.

    Attributes:
        name: host name, and the broker's id.
        zone: its zone.
        directory: of its spools.
        node: the process; ``None`` while there is none.
        broker: of the process.
        wanted: True if a supervisor starts the broker again when it ends.
        starts: number of processes so far.
    """

    name: str
    zone: str
    directory: Path
    node: Node | None = None
    broker: Broker | None = None
    wanted: bool = False
    starts: int = 0
    running: asyncio.Task[None] | None = None
    draining: asyncio.Event | None = field(default=None)

    @property
    def is_leaving(self) -> bool:
        """True if the process was asked to leave, and could not yet."""
        return self.draining is not None and self.draining.is_set()


class Cluster:
    """Brokers, their network, Etcd and store.

    Args:
        root: directory of all disks.
        settings: of the cluster.
        rng: decides on all that is left open.

    Attributes:
        hosts: the brokers' machines.
        network: between all of them.
        etcd: their Etcd.
        store: their store.
        disks: their disks.
    """

    def __init__(
        self,
        root: Path,
        settings: Settings,
        rng: random.Random,
        *,
        network: Network,
        etcd: EtcdHost,
        store: StoredState,
        disks: Disks,
    ) -> None:
        self.settings = settings
        self.network = network
        self.etcd = etcd
        self.store = store
        self.disks = disks
        self._rng = rng
        self.hosts: list[Host] = []
        for number in range(settings.brokers):
            name = f"broker-{number}"
            directory = root / name
            directory.mkdir(parents=True)
            self.hosts.append(Host(name, f"zone-{number % settings.zones}", directory))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts."""
        return tuple(host.name for host in self.hosts)

    def routes(self) -> list[list[Host]]:
        """Return the brokers of each journal, its primary first, as one of the brokers knows it."""
        for host in self.hosts:
            broker = host.broker
            if broker is None or not broker.keyspace.items():
                continue
            found = []
            for item in broker.keyspace.items():
                held = sorted(broker.keyspace.assignments(item.id), key=lambda entry: entry.slot)
                if held and held[0].slot == 0:
                    names = [entry.suffix for entry in held]
                    found.append([next(h for h in self.hosts if h.name == name) for name in names])
            return found
        return []

    def start(self, host: Host) -> None:
        """Start the broker of a host, unless it runs."""
        host.wanted = True
        if host.node is not None:
            return
        host.starts += 1
        node = host.node = Node(host.name)
        host.draining = asyncio.Event()
        _log.warning("%s starts", host.name)
        host.running = node.task(self._run(host, node), f"run {host.name}")

    def kill(self, host: Host) -> None:
        """Kill the process of a host."""
        host.wanted = False
        node, host.node = host.node, None
        if node is None:
            return
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.bury(node)
        loop.graveyard += [host.broker, host.running, node]
        host.broker = None
        _unlock(host.directory / "spools" / "lock")
        self.network.killed(node)

    def drain(self, host: Host) -> None:
        """Ask the broker of a host to leave, and to end."""
        host.wanted = False
        if host.node is not None and host.draining is not None:
            host.node.call(0.0, host.draining.set)

    async def _run(self, host: Host, node: Node) -> None:
        """Run one process of a broker, as the program `gazette serve` does."""
        config = BrokerConfig(
            suffix=host.name,
            zone=host.zone,
            endpoint=endpoint_of(host.name),
            spool_dir=host.directory / "spools",
            etcd=EtcdConfig(endpoint=ETCD_ADDRESS, lease_ttl_s=self.settings.lease_ttl_s),
            durability=self.settings.durability,
            min_append_rate=0,
        )
        assert host.draining is not None
        peers = transport(self.network, host.name, self._rng, zone=host.zone)
        broker = host.broker = Broker(config, peers)
        try:
            starting = asyncio.ensure_future(broker.start())
            stopping = asyncio.ensure_future(host.draining.wait())
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                serve(self.network, host.name, node, broker.service)
                await asyncio.wait([broker.ended, stopping], return_when=asyncio.FIRST_COMPLETED)
                if not broker.ended.done():
                    await broker.drain()
                await asyncio.shield(broker.ended)
            else:
                starting.cancel()
                await asyncio.wait([starting])
        except GazetteError as error:
            _log.warning("%s ends: %s", host.name, error)
        self.network.close(host.name, node)
        await broker.stop()
        asyncio.get_running_loop().call_soon(self._ended, host, node, context=self.network.context)

    def _ended(self, host: Host, node: Node) -> None:
        """Note that a process has ended by itself."""
        if host.node is not node:
            return
        _log.warning("%s has ended", host.name)
        host.node = host.broker = None
        self.network.killed(node)
        node.kill()
        _unlock(host.directory / "spools" / "lock")
        if host.wanted:
            asyncio.get_running_loop().call_later(
                SUPERVISOR_PAUSE_S, self._start_again, host, context=self.network.context
            )

    def _start_again(self, host: Host) -> None:
        if host.wanted:
            self.start(host)


def _unlock(lock: Path) -> None:
    """Unlock a spool directory, as the kernel does when a process ends.

    The broker may not know of its lock yet: a thread was just opening the directory.
    """
    for opened in list(Path("/proc/self/fd").iterdir()):
        if opened.is_symlink() and opened.readlink() == lock:
            os.close(int(opened.name))
