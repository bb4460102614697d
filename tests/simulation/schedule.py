"""Faults of a run: what a seed does to a cluster, and when."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from gazette_sdk.broker.spool.directory import Durability, accept_etcd
from simulation.cluster import Cluster, Host
from simulation.etcd_channel import ETCD_HOST
from simulation.loop import VirtualLoop
from simulation.store import StoreFault
from simulation.threads import CLOCK_ERRORS_S
from simulation.workload import Workload

__all__ = ["FAULTS", "FAULTS_OF_MACHINES", "FURTHER_FAULTS", "Faults"]

KILL_BAR_S = 2.0
"""Longest stall of appends after the kill of one broker."""

_log = logging.getLogger(__name__)

Fault: TypeAlias = Callable[["Faults"], Awaitable[None]]


class Faults:
    """Schedule of faults of one run.

    Args:
        cluster: suffers them.
        workload: of its clients. Many faults begin shortly after an append.
        latency_s: of the network.
        rng: decides on the faults.
        apply_specs: creates the journals again in an Etcd that does not know them.

    Attributes:
        backup_without_routes: of Etcd, see :meth:`journals_are_created`.
    """

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        latency_s: float,
        rng: random.Random,
        apply_specs: Callable[[], Awaitable[None]],
    ) -> None:
        self.cluster = cluster
        self._workload = workload
        self._latency_s = latency_s
        self.rng = rng
        self.ttl_s = cluster.settings.lease_ttl_s
        self._apply_specs = apply_specs
        self._first_backup = cluster.etcd.model.snapshot()
        self.backup_without_routes = self._first_backup
        self._is_restored = self._lacks_journals = False
        self._cuts: list[tuple[str, str]] = []
        self._closing: list[tuple[str, str]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, duration_s: float, names: list[str]) -> None:
        """Let faults begin at random times, and end all of them after the duration."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + duration_s
        self.begin(duration_s, names)
        await asyncio.sleep(ends_at - loop.time())
        await self.end()

    def begin(self, duration_s: float, names: list[str]) -> None:
        """Let faults begin at random times within the duration."""
        for name in names:
            begins_in_s = self.rng.random() * duration_s
            self._tasks.append(asyncio.create_task(self._one(name, begins_in_s)))

    async def end(self) -> None:
        """End all faults that were begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.end_all()
        if self._is_restored:
            await self._accept_etcd()

    def journals_are_created(self) -> None:
        """Save Etcd as it is before the first routes, so that it can be restored."""
        self.backup_without_routes = self.cluster.etcd.model.snapshot()

    def end_all(self) -> None:
        """End all faults, and start all brokers."""
        _log.warning("all faults end")
        cluster = self.cluster
        while self._cuts:
            cluster.network.heal(*self._cuts.pop())
        while self._closing:
            cluster.network.open_link(*self._closing.pop())
        cluster.network.proxied.clear()
        CLOCK_ERRORS_S.clear()
        if not cluster.etcd.is_up:
            cluster.etcd.start()
        cluster.store.fault, cluster.store.list_lag_s = StoreFault.NONE, 0.0
        cluster.store.tears = cluster.store.stale_s = 0.0
        _set_lag(0.0005)
        for host in cluster.hosts:
            if host.node is not None:
                host.node.proceed()
            cluster.start(host)

    def restore_etcd(self, backup: dict[str, Any] | None) -> None:
        """Restore Etcd from a backup; by default from one of before the journals' creation."""
        etcd = self.cluster.etcd
        if etcd.is_up:
            etcd.stop()
        etcd.restore(backup or self._first_backup)
        self._is_restored, self._lacks_journals = True, backup is None
        etcd.start()

    async def _accept_etcd(self) -> None:
        """Do what an operator does with a restored Etcd."""
        cluster = self.cluster
        for _ in range(600):
            if all(host.broker is not None and host.broker._is_composed for host in cluster.hosts):
                break
            await asyncio.sleep(0.1)
        _log.warning("an operator accepts Etcd")
        if self._lacks_journals:
            await self._apply_specs()
        for host in cluster.hosts:
            accept_etcd(host.directory / "spools")

    async def suspend(self, duration_s: float) -> None:
        """Suspend machines at a random time: that of a primary, or those of all its replicas.

        Clients mostly reach a machine that proceeds before Etcd does, which has tried in vain and
        tries again after ever longer pauses.
        """
        await asyncio.sleep(self.rng.random() * duration_s)
        await self.amid_append()
        hosts = [self.some_host()]
        routes = self.cluster.routes()
        if routes and self.rng.random() < 0.5:
            hosts = self.rng.choice(routes)
        nodes = [host.node for host in hosts if host.node is not None]
        length_s, counts = self.outage_s(), self.rng.random() < 0.5
        _log.warning("%s are suspended for %.1f s", [node.name for node in nodes], length_s)
        links = [(ETCD_HOST, node.name) for node in nodes]
        lag_s = self.rng.choice((0.0, 1.0, 4.0)) * self.rng.random()
        self._tasks.append(asyncio.create_task(self.cut(links, length_s + lag_s)))
        for node in nodes:
            node.suspend()
        await asyncio.sleep(length_s)
        for node in nodes:
            if not node.is_dead:
                _log.warning("%s proceeds, and its clock since boot is %s", node.name, counts)
                node.proceed(counts_suspension=counts)

    async def _one(self, name: str, begins_in_s: float) -> None:
        await asyncio.sleep(begins_in_s)
        await self.amid_append()
        await (FAULTS | FURTHER_FAULTS | FAULTS_OF_MACHINES)[name](self)

    async def lose(self, host: Host) -> tuple[str, float]:
        """Kill a broker behind a proxy, or cut it off from all others, without another fault.

        Return the kind, and the time within which appends have to go on.
        """
        links = self.links_to_peers(host.name)
        kind = self.rng.choice(("kill", "cut", "close"))
        if kind == "kill":
            self.cluster.network.proxied.update(self.cluster.names)
            self.kill(host)
            return "kill behind a proxy", KILL_BAR_S
        work = self.cut if kind == "cut" else self.close
        self._tasks.append(asyncio.create_task(work(links, 6 * self.ttl_s)))
        return f"{kind} from its peers", self.ttl_s + 1.0

    # ------------------------------------------------------------- building

    async def amid_append(self) -> None:
        """Wait until an append is under way, mostly."""
        if self.rng.random() < 0.7:
            await self._workload.next_append()
            await asyncio.sleep(8 * self.rng.random() * self._latency_s)

    def some_host(self) -> Host:
        """Return a host, preferably that of a primary."""
        if self.rng.random() < 0.5:
            routes = self.cluster.routes()
            if routes:
                return self.rng.choice(routes)[0]
        return self.rng.choice(self.cluster.hosts)

    def some_link(self) -> tuple[str, str]:
        """Return two hosts, preferably those of a primary and its peer."""
        routes = [route for route in self.cluster.routes() if len(route) > 1]
        if routes and self.rng.random() < 0.6:
            primary, *peers = self.rng.choice(routes)
            return primary.name, self.rng.choice(peers).name
        a, b = self.rng.sample(self.cluster.names, 2)
        return a, b

    def kill(self, host: Host) -> None:
        """Kill a broker."""
        if host.node is not None:
            _log.warning("%s is killed", host.name)
        self.cluster.kill(host)

    async def kill_and_start(self, hosts: list[Host]) -> None:
        """Kill brokers at once, and start each again after a while."""
        for host in hosts:
            self.kill(host)
        await asyncio.gather(*(self.start_later(host) for host in hosts))

    async def start_later(self, host: Host) -> None:
        """Start a broker after a while: before its lease ends, or long after."""
        await asyncio.sleep(self.rng.choice((0.3, 1.0, 1.0, 3.0)) * self.rng.random() * self.ttl_s)
        self.cluster.start(host)

    async def cut(self, links: list[tuple[str, str]], duration_s: float) -> None:
        """Cut directions of links for some time."""
        _log.warning("cut for %.1f s: %s", duration_s, ", ".join(f"{a}>{b}" for a, b in links))
        for link in links:
            self.cluster.network.cut(*link)
            self._cuts.append(link)
        await asyncio.sleep(duration_s)
        for link in links:
            if link in self._cuts:
                self._cuts.remove(link)
                self.cluster.network.heal(*link)
        _log.warning("healed: %s", ", ".join(f"{a}>{b}" for a, b in links))

    def links_to_peers(self, host: str) -> list[tuple[str, str]]:
        """Return the links between a broker and all others, both ways."""
        others = [name for name in self.cluster.names if name != host]
        return [link for other in others for link in ((host, other), (other, host))]

    async def close(self, links: list[tuple[str, str]], duration_s: float) -> None:
        """Let links break their connections, and close new ones, for some time."""
        _log.warning("%.1f s are closed: %s", duration_s, ", ".join(f"{a}>{b}" for a, b in links))
        for link in links:
            self.cluster.network.close_link(*link)
            self._closing.append(link)
        await asyncio.sleep(duration_s)
        for link in links:
            if link in self._closing:
                self._closing.remove(link)
                self.cluster.network.open_link(*link)
        _log.warning("open: %s", ", ".join(f"{a}>{b}" for a, b in links))

    def outage_s(self) -> float:
        """Return the length of an outage: sometimes shorter than a lease, sometimes longer."""
        return self.rng.choice((0.3, 1.0, 2.5)) * (0.3 + self.rng.random()) * self.ttl_s


# ------------------------------------------------------------------------ faults


async def _kill_one(faults: Faults) -> None:
    await faults.kill_and_start([faults.some_host()])


async def _kill_two(faults: Faults) -> None:
    await faults.kill_and_start(faults.rng.sample(faults.cluster.hosts, 2))


async def _kill_all(faults: Faults) -> None:
    await faults.kill_and_start(list(faults.cluster.hosts))


async def _kill_zone(faults: Faults) -> None:
    zone = faults.some_host().zone
    await faults.kill_and_start([host for host in faults.cluster.hosts if host.zone == zone])


async def _power_fails(faults: Faults) -> None:
    """All machines lose their power, or one does. Appends must have been forced to disk."""
    cluster = faults.cluster
    if cluster.settings.durability is not Durability.PERSISTED:
        return
    hosts = [faults.some_host()] if faults.rng.random() < 0.4 else list(cluster.hosts)
    for host in hosts:
        _log.warning("the power of %s fails", host.name)
        cluster.kill(host)
        cluster.disks.fail(host.directory / "spools")
    await asyncio.gather(*(faults.start_later(host) for host in hosts))


async def _kill_in_succession(faults: Faults) -> None:
    for _ in range(faults.rng.randint(2, 5)):
        host = faults.some_host()
        faults.kill(host)
        await asyncio.sleep(faults.rng.random() * faults.ttl_s / 2)
        faults.cluster.start(host)
        await asyncio.sleep(faults.rng.random() * faults.ttl_s / 2)


async def _pause(faults: Faults) -> None:
    host = faults.some_host()
    node, duration_s = host.node, faults.outage_s()
    if node is None:
        return
    _log.warning("%s is paused for %.1f s", host.name, duration_s)
    node.pause()
    await asyncio.sleep(duration_s)
    if not node.is_dead:
        _log.warning("%s proceeds", host.name)
        node.proceed()


async def _cut_pair(faults: Faults) -> None:
    a, b = faults.some_link()
    await faults.cut([(a, b), (b, a)], faults.outage_s())


async def _cut_one_way(faults: Faults) -> None:
    a, b = faults.some_link()
    await faults.cut([faults.rng.choice([(a, b), (b, a)])], faults.outage_s())


async def _cut_and_kill(faults: Faults) -> None:
    """Cut a primary from a peer, and kill the primary while it waits for that peer."""
    a, b = faults.some_link()
    cutting = asyncio.ensure_future(faults.cut([(a, b)], faults.outage_s()))
    await faults.amid_append()
    await faults.kill_and_start([host for host in faults.cluster.hosts if host.name == a])
    await cutting


async def _cut_from_etcd(faults: Faults) -> None:
    host = faults.some_host().name
    links = [(host, ETCD_HOST), (ETCD_HOST, host)]
    if faults.rng.random() < 0.4:
        links = [faults.rng.choice(links)]
    await faults.cut(links, faults.outage_s())


async def _isolate(faults: Faults) -> None:
    host = faults.some_host().name
    others = [*(name for name in faults.cluster.names if name != host), ETCD_HOST]
    links = [link for other in others for link in ((host, other), (other, host))]
    await faults.cut(links, faults.outage_s())


async def _etcd_outage(faults: Faults) -> None:
    etcd, duration_s = faults.cluster.etcd, faults.rng.choice((0.5, 1.0, faults.outage_s()))
    if not etcd.is_up:
        return
    _log.warning("Etcd is down for %.1f s", duration_s)
    etcd.stop()
    await asyncio.sleep(duration_s)
    if not etcd.is_up:
        etcd.start()
        _log.warning("Etcd is up")


async def _compact(faults: Faults) -> None:
    model = faults.cluster.etcd.model
    if model.revision > model.compacted + 1:
        revision = faults.rng.randint(model.compacted + 1, model.revision)
        _log.warning("Etcd is compacted at %d of %d", revision, model.revision)
        model.compact(revision)


async def _store_fails(faults: Faults) -> None:
    store = faults.cluster.store
    store.fault = faults.rng.choice([fault for fault in StoreFault if fault is not StoreFault.NONE])
    _log.warning("the store %s", store.fault.value)
    await asyncio.sleep(3 + 15 * faults.rng.random())
    store.fault = StoreFault.NONE
    _log.warning("the store works again")


async def _store_lags(faults: Faults) -> None:
    faults.cluster.store.list_lag_s = 5 * faults.rng.random()
    lag_s = faults.rng.choice((0.05, 0.5, 2.0))
    _log.warning("disks and the store lag %.2f s", lag_s)
    _set_lag(lag_s)
    await asyncio.sleep(2 + 10 * faults.rng.random())
    _set_lag(0.0005)
    faults.cluster.store.list_lag_s = 0.0
    _log.warning("disks and the store lag no more")


async def _store_tears(faults: Faults) -> None:
    """The store keeps parts of what it takes, and brokers may end meanwhile."""
    store, rng = faults.cluster.store, faults.rng
    store.tears = rng.choice((0.3, 0.9))
    _log.warning("the store tears uploads")
    await asyncio.sleep(3 + 10 * rng.random())
    if rng.random() < 0.5:
        await faults.kill_and_start([faults.some_host()])
    store.tears = 0.0
    _log.warning("the store tears no more")


async def _all_leave(faults: Faults) -> None:
    """All brokers leave, and the next ones get listings of before."""
    cluster, rng = faults.cluster, faults.rng
    _log.warning("all brokers are to leave")
    for host in cluster.hosts:
        cluster.drain(host)
    for _ in range(100):
        if all(host.node is None for host in cluster.hosts):
            break
        await asyncio.sleep(0.2)
    for host in cluster.hosts:
        faults.kill(host)
    cluster.store.stale_s = rng.choice((0.0, 10.0, 60.0))
    _log.warning("all start, and listings are up to %.0f s old", cluster.store.stale_s)
    for host in cluster.hosts:
        cluster.start(host)
    await asyncio.sleep(5 + 10 * rng.random())
    cluster.store.stale_s = 0.0
    _log.warning("listings are new")


async def _etcd_goes_back(faults: Faults) -> None:
    """All brokers are killed, and Etcd is restored from a backup.

    It has no journals, or none of their routes, or is a bit older than what follows. One of the
    brokers may have been away while others continued: the greatest heads are theirs.
    """
    cluster, rng = faults.cluster, faults.rng
    backup = rng.choice((None, faults.backup_without_routes, cluster.etcd.model.snapshot()))
    if rng.random() < 0.5:
        faults.kill(faults.some_host())
        await asyncio.sleep(faults.ttl_s + 2.0)
    await asyncio.sleep(5 * rng.random())
    await faults.amid_append()
    hosts = list(cluster.hosts)
    for host in hosts:
        faults.kill(host)
    _log.warning("Etcd is restored from %s", "a backup" if backup else "one without journals")
    faults.restore_etcd(backup)
    for host in rng.sample(hosts, len(hosts)):
        cluster.start(host)
        await asyncio.sleep(rng.choice((0.0, 0.0, 2.0)) * rng.random())


async def _drain(faults: Faults) -> None:
    host = faults.some_host()
    _log.warning("%s is to leave", host.name)
    await _restart(faults, host)


async def _rolling_restart(faults: Faults) -> None:
    _log.warning("rolling restart")
    for host in list(faults.cluster.hosts):
        await _restart(faults, host)


async def _restart(faults: Faults, host: Host) -> None:
    faults.cluster.drain(host)
    for _ in range(100):
        if host.node is None:
            break
        await asyncio.sleep(0.2)
    else:
        faults.kill(host)
    await asyncio.sleep(faults.rng.random())
    faults.cluster.start(host)


async def _cut_from_peers(faults: Faults) -> None:
    """Cut a broker from all others. Clients and Etcd reach it."""
    links = faults.links_to_peers(faults.some_host().name)
    await faults.cut(links, faults.outage_s())


async def _close_from_peers(faults: Faults) -> None:
    """Let proxies between a broker and all others, or some, accept and close."""
    links = faults.links_to_peers(faults.some_host().name)
    if faults.rng.random() < 0.3:
        links = faults.rng.sample(links, faults.rng.randint(1, len(links)))
    await faults.close(links, faults.outage_s())


async def _kill_behind_proxies(faults: Faults) -> None:
    """Kill brokers behind proxies that accept and close while nothing listens."""
    faults.cluster.network.proxied.update(faults.cluster.names)
    await faults.kill_and_start(faults.rng.sample(faults.cluster.hosts, faults.rng.randint(1, 2)))


async def _wrong_clock(faults: Faults) -> None:
    """Set the wall clock of a machine forward or back, by seconds or years."""
    host = faults.some_host()
    magnitude_s = faults.rng.choice((2.0, 3600.0, 3 * 86400.0, 10 * 365 * 86400.0))
    error_s = (faults.rng.random() + 0.5) * magnitude_s * faults.rng.choice((-1, 1))
    _log.warning("the clock of %s is wrong by %.0f s", host.name, error_s)
    CLOCK_ERRORS_S[host.name] = error_s
    if faults.rng.random() < 0.5:
        await asyncio.sleep(faults.outage_s())
        CLOCK_ERRORS_S.pop(host.name, None)


FAULTS: dict[str, Fault] = {
    "kill": _kill_one,
    "kill-two": _kill_two,
    "kill-all": _kill_all,
    "kill-zone": _kill_zone,
    "power": _power_fails,
    "kill-in-succession": _kill_in_succession,
    "pause": _pause,
    "cut": _cut_pair,
    "cut-one-way": _cut_one_way,
    "cut-and-kill": _cut_and_kill,
    "cut-from-etcd": _cut_from_etcd,
    "isolate": _isolate,
    "etcd-outage": _etcd_outage,
    "compact": _compact,
    "store-fails": _store_fails,
    "store-lags": _store_lags,
    "drain": _drain,
    "rolling-restart": _rolling_restart,
}
"""Faults that the plan of a seed is made of, by name."""

FAULTS_OF_MACHINES: dict[str, Fault] = {
    "cut-from-peers": _cut_from_peers,
    "close-from-peers": _close_from_peers,
    "kill-behind-proxies": _kill_behind_proxies,
    "wrong-clock": _wrong_clock,
}
"""Faults of proxies, links and clocks, which have random numbers of their own, too."""

FURTHER_FAULTS: dict[str, Fault] = {
    "store-tears": _store_tears,
    "all-leave": _all_leave,
    "etcd-goes-back": _etcd_goes_back,
}
"""Faults that other random numbers choose, so that seeds without them stay the same runs."""


def _set_lag(delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.work_delay_s = lambda: delay_s
