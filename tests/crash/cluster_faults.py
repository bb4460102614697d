"""Faults of a cluster, and the longest stall of appends that each may cause."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from crash.cluster_load import Load, Span, StalledError
from gazette_sdk.local_cluster import BrokerState, LocalBroker
from gazette_sdk.testing import check_journals, gazette_cluster, raise_violations
from gazette_sdk.testing.cluster import TemporaryCluster
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.listing import get_journal

__all__ = [
    "FAULTS",
    "STALLS",
    "TTL_S",
    "Fault",
    "Outcome",
    "Stage",
    "running_stage",
    "suffer",
    "summary",
]

TTL_S = 5.0

KILL_BAR_S = 2.0
FROZEN_BAR_S = TTL_S + 1.0
LONE_KILL_BAR_S = TTL_S + 1.0
DRAIN_BAR_S = 0.5
ETCD_BAR_S = 0.75
STORE_BAR_S = 6.0

SERVES_AGAIN_S = 60.0
"""Limit of the recovery from a fault, for a busy machine. A stall has bars of its own."""

SETTLE_S = 60.0
"""Limit of the time until all replicas and the store have what was acknowledged."""


@dataclass
class Stage:
    """A cluster under load, and the spans in which too few brokers could serve its journals.

    Attributes:
        journals: those whose primaries faults are aimed at.
        replication: of the journals: fewer brokers cannot serve them.
        store_fails_s: how long the store fails, at least.
        excused: spans in which fewer ran.
        is_broken: a fault broke a promise, or appends did not go on: nothing more is learned.
    """

    cluster: TemporaryCluster
    load: Load
    journals: Sequence[str]
    replication: int
    store_fails_s: float
    excused: list[Span] = field(default_factory=list)
    is_broken: bool = False
    _lacking_since: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def running(self) -> list[LocalBroker]:
        return [each for each in self.cluster.brokers if each.state is BrokerState.RUNNING]

    def kill(self, brokers: Sequence[LocalBroker]) -> None:
        """Kill brokers at the same time."""
        self._at_once(LocalBroker.kill, brokers)

    def start(self, brokers: Sequence[LocalBroker]) -> None:
        """Start brokers at the same time, and wait until they serve."""
        self._at_once(LocalBroker.start, brokers)

    def start_all(self) -> None:
        """Start every broker that has ended."""
        self.start([each for each in self.cluster.brokers if each.state is BrokerState.ENDED])

    def wait_for_progress(self, timeout_s: float = SERVES_AGAIN_S) -> None:
        """Wait until every client goes on, if there are brokers enough. Bounded.

        If they do not, the stall is long, and :meth:`restore` fails if nothing goes on then.
        """
        if len(self.running) >= self.replication:
            with contextlib.suppress(StalledError):
                self.load.wait_for_progress(timeout_s)

    def primary_of(self, journal: str) -> LocalBroker:
        """Return the broker that leads a journal."""

        async def primary() -> str:
            async with aclosing(self.cluster.connect()) as transport:
                route = (await get_journal(transport, journal)).route
                return route.members[route.primary].suffix

        return self.cluster.broker(sdk_loop.run(primary(), SERVES_AGAIN_S))

    def restore(self) -> None:
        """Undo what a fault left, and wait until everything is as before."""
        self.restore_brokers()
        self.load.wait_for_progress(SERVES_AGAIN_S)

    def restore_brokers(self) -> None:
        """Heal Etcd, links and store, and wait until all brokers serve."""
        cluster = self.cluster
        cluster.heal_store()
        cluster.heal_links()
        for index, server in enumerate(cluster.etcd.servers):
            if server.pid is None:
                cluster.start_etcd(index)
        deadline = time.monotonic() + 4 * SERVES_AGAIN_S
        while True:
            self.start_all()
            try:
                cluster.wait_until_ready(SERVES_AGAIN_S / 2)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
            else:
                if len(self.running) == len(cluster.brokers):  # none lost its lease meanwhile
                    break

    def check(self) -> None:
        """Compare what all brokers and the store have with all that is known, without load."""

        async def violations() -> list:
            async with aclosing(self.cluster.connect()) as transport:
                return await check_journals(
                    self.load.checker,
                    transport,
                    file_root=self.cluster.fragments,
                    settle_s=SETTLE_S,
                )

        self.load.pause()
        raise_violations(sdk_loop.run(violations(), 4 * SETTLE_S))
        self.load.resume()

    def outcome(self, fault: Fault, begin: float, took_s: float) -> Outcome:
        """Return what a fault did that began at a time of the monotonic clock."""
        stall = self.load.longest_stall(begin, self.excused)
        stall_s = stall.span.end - stall.span.begin
        return Outcome(fault, stall_s, took_s, f"{stall.client}, {stall.attempts} attempts")

    def _at_once(self, call: Callable[[LocalBroker], None], brokers: Sequence[LocalBroker]) -> None:
        def call_and_note(broker: LocalBroker) -> None:
            call(broker)
            self._note_capacity()

        if brokers:
            with ThreadPoolExecutor(len(brokers)) as pool:
                list(pool.map(call_and_note, brokers))

    def _note_capacity(self) -> None:
        with self._lock:
            now = time.monotonic()
            if len(self.running) < self.replication:
                self._lacking_since = self._lacking_since or now
            elif self._lacking_since is not None:
                self.excused.append(Span(self._lacking_since, now))
                self._lacking_since = None


JOURNALS = """
name: crash/
replication: {replication}
fragment:
  length: 65536
  compression_codec: SNAPPY
  stores: ["file:///store/"]
  refresh_interval: 2s
children:
  - name: crash/one
  - name: crash/two
  - name: crash/three
"""
NAMES = ["crash/one", "crash/two", "crash/three"]


@contextlib.contextmanager
def running_stage(
    *, seed: int, store_fails_s: float, replication: int = 3, data: Path | None = None
) -> Iterator[Stage]:
    """Yield four brokers in two zones and an Etcd of three members, under load.

    Args:
        replication: of the journals.
        seed: of what is appended.
        store_fails_s: how long the store fails, at least.
        data: directory of the cluster; by default a temporary one.
    """
    with gazette_cluster(
        4, zones=2, etcd_members=3, lease_ttl_s=TTL_S, cuts=True, data=data
    ) as cluster:
        cluster.apply(JOURNALS.format(replication=replication))
        addresses = [broker.address for broker in cluster.brokers]
        with Load(addresses, NAMES, appenders=2, seed=seed) as load:
            yield Stage(cluster, load, NAMES, replication, store_fails_s)


# ------------------------------------------------------------------ the faults


def kill_one(stage: Stage, chance: random.Random) -> None:
    stage.kill([stage.primary_of(chance.choice(stage.journals))])
    stage.wait_for_progress()


def kill_behind_proxy(stage: Stage, chance: random.Random) -> None:
    broker = stage.primary_of(chance.choice(stage.journals))
    stage.cluster.accept_for_dead(broker)
    stage.kill([broker])
    stage.wait_for_progress()


def kill_two(stage: Stage, chance: random.Random) -> None:
    stage.kill(chance.sample(stage.running, 2))


def kill_all(stage: Stage, _: random.Random) -> None:
    stage.kill(stage.running)


def kill_only_replica(stage: Stage, chance: random.Random) -> None:
    broker = stage.primary_of(chance.choice(stage.journals))
    begin = time.monotonic()
    stage.kill([broker])
    time.sleep(TTL_S + 2.0)  # others are assigned, who have nothing of it
    stage.start([broker])
    # Nobody else has what was acknowledged.
    stage.excused.append(Span(begin, time.monotonic()))


def kill_in_succession(stage: Stage, chance: random.Random) -> None:
    brokers = chance.sample(stage.running, len(stage.running))
    with ThreadPoolExecutor(len(brokers)) as pool:
        starts = []
        for broker in brokers:
            stage.kill([broker])
            starts.append(pool.submit(stage.start, [broker]))
            time.sleep(chance.uniform(0.5, 3.0))
        for start in starts:
            start.result()


def lose_zone(stage: Stage, chance: random.Random) -> None:
    zone = chance.choice(sorted({each.zone for each in stage.running}))
    stage.kill([each for each in stage.running if each.zone == zone])


def freeze(stage: Stage, chance: random.Random) -> None:
    broker = stage.primary_of(chance.choice(stage.journals))
    broker.pause()
    time.sleep(TTL_S + 2.0)
    broker.resume()
    with contextlib.suppress(TimeoutError):  # it may have kept its lease
        broker.wait_until_ended(TTL_S)
    stage.wait_for_progress()


def cut_from_etcd(stage: Stage, chance: random.Random) -> None:
    stage.cluster.cut_from_etcd(stage.primary_of(chance.choice(stage.journals)))
    time.sleep(TTL_S + 2.0)
    stage.wait_for_progress()


def cut_from_peers(stage: Stage, chance: random.Random) -> None:
    broker = stage.primary_of(chance.choice(stage.journals))
    stage.cluster.cut(broker, [each for each in stage.running if each is not broker])
    time.sleep(TTL_S + 2.0)
    stage.wait_for_progress()


def reset_from_peers(stage: Stage, chance: random.Random) -> None:
    broker = stage.primary_of(chance.choice(stage.journals))
    others = [each for each in stage.running if each is not broker]
    stage.cluster.cut(broker, others, closes=True)
    stage.wait_for_progress()


def cut_one_way(stage: Stage, chance: random.Random) -> None:
    broker = stage.primary_of(chance.choice(stage.journals))
    other = chance.choice([each for each in stage.running if each is not broker])
    stage.cluster.cut_calls(broker, other)
    time.sleep(TTL_S + 2.0)
    stage.wait_for_progress()


def fail_store(stage: Stage, chance: random.Random) -> None:
    begin = time.monotonic()
    stage.cluster.fail_store()
    for broker in chance.sample(stage.running, 2):
        stage.kill([broker])
        stage.wait_for_progress(2 * STORE_BAR_S)
        stage.start([broker])
    time.sleep(max(0.0, begin + stage.store_fails_s - time.monotonic()))
    stage.cluster.heal_store()


def kill_etcd(stage: Stage, chance: random.Random) -> None:
    stage.cluster.kill_etcd(chance.randrange(len(stage.cluster.etcd)))
    time.sleep(TTL_S)  # leases have to be renewed without it
    stage.wait_for_progress()


def drain_one(stage: Stage, chance: random.Random) -> None:
    broker = stage.primary_of(chance.choice(stage.journals))
    broker.drain(timeout_s=SERVES_AGAIN_S)
    stage.wait_for_progress()


def restart_in_turn(stage: Stage, _: random.Random) -> None:
    for broker in stage.cluster.brokers:
        broker.drain(timeout_s=SERVES_AGAIN_S)
        stage.start([broker])
        stage.cluster.wait_until_ready(SERVES_AGAIN_S)


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: for the summary.
        bar_s: longest stall of a client, at the lease of `TTL_S`.
        run: causes it.
        replication: of the journals.
    """

    name: str
    bar_s: float
    run: Callable[[Stage, random.Random], None]
    replication: int = 3


FAULTS = (
    Fault("drain one", DRAIN_BAR_S, drain_one),
    Fault("rolling restart", DRAIN_BAR_S, restart_in_turn),
    Fault("kill one", KILL_BAR_S, kill_one),
    Fault("kill one behind a proxy", KILL_BAR_S, kill_behind_proxy),
    Fault("kill two at once", KILL_BAR_S, kill_two),
    Fault("kill all", KILL_BAR_S, kill_all),
    Fault("kills in quick succession", KILL_BAR_S, kill_in_succession),
    Fault("lose a zone", KILL_BAR_S, lose_zone),
    Fault("freeze one", FROZEN_BAR_S, freeze),
    Fault("cut one from etcd", FROZEN_BAR_S, cut_from_etcd),
    Fault("cut one from its peers", FROZEN_BAR_S, cut_from_peers),
    Fault("peers reset one's connections", FROZEN_BAR_S, reset_from_peers),
    Fault("cut a link one way", FROZEN_BAR_S, cut_one_way),
    Fault("store fails, with kills", STORE_BAR_S, fail_store),
    Fault("kill a member of etcd", ETCD_BAR_S, kill_etcd),
    Fault("kill the only replica", LONE_KILL_BAR_S, kill_only_replica, replication=1),
)


# -------------------------------------------------------------- what comes out


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault.

    Attributes:
        stall_s: longest stall of a client, without the time in which too few brokers ran.
        took_s: time from the fault until everything was as before.
        client: whose stall it was, and more about it.
    """

    fault: Fault
    stall_s: float
    took_s: float
    client: str

    @property
    def is_within_bar(self) -> bool:
        return self.stall_s <= self.fault.bar_s


STALLS = pytest.StashKey[list[Outcome]]()
"""Key under which a run of pytest keeps the outcomes of faults, for its summary."""


def suffer(stage: Stage, fault: Fault, chance: random.Random) -> Outcome:
    """Cause a fault, recover from it, and check every promise.

    Raises:
        AssertionError: a promise is broken, or appends do not go on by themselves.
    """
    stage.is_broken = True
    stage.load.wait_for_progress(SERVES_AGAIN_S)
    begin = time.monotonic()
    try:
        fault.run(stage, chance)
    finally:
        stage.cluster.heal_store()
        stage.cluster.heal_links()
    stage.restore()
    outcome = stage.outcome(fault, begin, time.monotonic() - begin)
    stage.check()
    stage.is_broken = False
    return outcome


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table of what faults did, the longest stall of each."""
    lines = [f"{'fault':28}{'runs':>5}{'longest stall':>15}{'bar':>9}   whose"]
    for fault in dict.fromkeys(each.fault for each in outcomes):
        found = [each for each in outcomes if each.fault is fault]
        worst = max(found, key=lambda each: each.stall_s)
        mark = "" if worst.is_within_bar else "  OVER"
        lines.append(
            f"{fault.name:28}{len(found):5}{worst.stall_s:13.2f} s{fault.bar_s:7.2f} s   "
            f"{worst.client}{mark}"
        )
    return lines
