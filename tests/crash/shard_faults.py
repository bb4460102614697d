"""Faults of brokers and consumers under stream_sum, and how long its shards take to fail over."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from crash.cluster_faults import (
    SERVES_AGAIN_S,
    TTL_S,
    Fault,
    Outcome,
    Stage,
    drain_one,
    freeze,
    kill_one,
    kill_two,
)
from crash.shard_watch import FailOver, ShardWatch, watching
from crash.sum_load import LATEST_S, SumLoad
from examples.stream_sum.summer import summer
from gazette_sdk.cluster.consumer_keys import CONSUMERS_PREFIX
from gazette_sdk.testing import TcpProxy, gazette_cluster
from gazette_sdk.testing.cluster import TemporaryCluster
from gazette_sdk.testing.shards import RunningShards, ShardProcess, run_shards
from support import stream_sum

__all__ = [
    "SHARD_FAULTS",
    "ShardOutcome",
    "ShardStage",
    "fail_over_summary",
    "running_shard_stage",
]

BROKERS = 4
CONSUMERS = 3
CHUNKERS = 3
REPLICATION = 3

FAIL_OVER_BAR_S = TTL_S + 1.0
"""Longest fail-over to a hot standby. Without one, the time of the recovery is added."""

KILLED_FAIL_OVER_BAR_S = 2.0
"""The same, from a process that was killed."""

STORM_STEPS = 3
"""Faults of brokers, and at the same time of consumers, in a storm."""

END_TIMEOUT_S = 30.0
"""Limit of the end of a consumer that has lost its lease."""


@dataclass(kw_only=True)
class ShardStage(Stage):
    """A cluster with consumers of stream_sum.

    Attributes:
        shards: the consumers.
        watch: what their keys in Etcd say.
        fail_overs: fail-overs of the fault that is under way.
    """

    load: SumLoad
    shards: RunningShards
    watch: ShardWatch
    fail_overs: list[FailOver] = field(default_factory=list)

    def leader(self, chance: random.Random) -> ShardProcess:
        """Return the process that leads a random shard."""
        names = [self.watch.leader(shard) for shard in self.watch.shards()]
        return self.process(chance.choice([each for each in names if each is not None]))

    def process(self, name: str) -> ShardProcess:
        """Return a consumer by its name."""
        return next(each for each in self.shards.processes if each.name == name)

    def lose(self, call: Callable[[ShardProcess], None], processes: Sequence[ShardProcess]) -> None:
        """Kill or stop consumers at the same time. Their shards have to fail over."""
        self.fail_overs += self.watch.lose({each.name for each in processes})
        for each in processes:
            call(each)

    def start_consumers(self) -> None:
        """Start the consumers that have ended."""
        for process in self.shards.processes:
            if not process.is_running:
                process.start()

    def wait_for_standbys(self) -> None:
        """Start consumers until all run, and each shard has a primary and a standby."""
        deadline = time.monotonic() + 2 * SERVES_AGAIN_S
        names = [each.name for each in self.shards.processes]
        while not self.watch.is_ready(names):
            self.load.raise_failure()
            assert time.monotonic() < deadline, f"the shards are not ready: {self.watch.summary()}"
            self.start_consumers()  # also one that ended meanwhile, without its lease
            time.sleep(0.05)

    def restore(self) -> None:
        """Undo what a fault left, and wait until each shard has its standby, and sums."""
        self.start_consumers()
        self.restore_brokers()
        self.wait_for_standbys()
        self.load.wait_for_progress(SERVES_AGAIN_S)

    def check(self) -> None:
        """Compare all published sums with those that were verified; no shard may have failed."""
        self.load.check(self.cluster.address)
        assert not self.watch.failures, f"shards failed: {self.watch.failures}"

    def outcome(self, fault: Fault, begin: float, took_s: float) -> Outcome:
        """Return what a fault did that began at a time of the monotonic clock."""
        latest = self.load.latest(begin)
        found, self.fail_overs = tuple(self.fail_overs), []
        client = "; ".join([f"sum of shard {latest.shard}", *_described(found)])
        return ShardOutcome(fault, latest.took_s, took_s, client, found)


@dataclass(frozen=True)
class ShardOutcome(Outcome):
    """Outcome of a fault under stream_sum.

    Attributes:
        fail_overs: of the shards whose primary was killed or stopped.
    """

    fail_overs: tuple[FailOver, ...] = ()

    @property
    def fail_over_s(self) -> float:
        """Longest fail-over, without the recovery of shards that had no standby."""
        return max((each.bounded_s for each in self.fail_overs), default=0.0)

    @property
    def fail_over_bar_s(self) -> float:
        """Bar of the longest fail-over."""
        return KILLED_FAIL_OVER_BAR_S if self.fault in KILLS else FAIL_OVER_BAR_S

    @property
    def is_within_bar(self) -> bool:
        """No sum was late, and no fail-over that waited for nothing else."""
        is_bounded = self.fault not in UNBOUNDED
        return super().is_within_bar and not (
            is_bounded and self.fail_over_s > self.fail_over_bar_s
        )


@contextlib.contextmanager
def running_shard_stage(
    *, timeout_s: float = LATEST_S, data: Path | None = None
) -> Iterator[ShardStage]:
    """Yield four brokers in two zones behind one address, three consumers and three chunkers.

    Args:
        timeout_s: a chunker fails if a sum takes longer.
        data: directory of the cluster; by default a temporary one.
    """
    with (
        gazette_cluster(BROKERS, zones=2, lease_ttl_s=TTL_S, data=data) as cluster,
        TcpProxy(_balancer(cluster)) as proxy,
        run_shards(
            summer,
            processes=CONSUMERS,
            cluster=_Service(proxy.address, cluster.etcd_endpoint),
            lease_ttl_s=TTL_S,
        ) as shards,
        watching(cluster.etcd_endpoint, f"{CONSUMERS_PREFIX}/{summer.full_name}") as watch,
    ):
        cluster.apply(stream_sum.journals(REPLICATION))
        stream_sum.create_shards(shards)
        journals = stream_sum.sources()
        load = SumLoad([proxy.address] * CHUNKERS, len(journals), timeout_s)
        stage = ShardStage(
            cluster=cluster,
            load=load,
            journals=journals,
            replication=REPLICATION,
            store_fails_s=0.0,
            shards=shards,
            watch=watch,
        )
        stage.wait_for_standbys()
        with load:
            yield stage


@dataclass(frozen=True)
class _Service:
    """Cluster behind one address, which leads to brokers that run."""

    address: str
    etcd_endpoint: str


def _balancer(cluster: TemporaryCluster) -> Callable[[], int]:
    """Return a function that returns the ports of running brokers in turn."""
    numbers = itertools.count()

    def port() -> int:
        addresses = cluster.addresses
        found = urlsplit(addresses[next(numbers) % len(addresses)]).port
        assert found is not None, "an address of a broker has a port"
        return found

    return port


# ------------------------------------------------------------------ the faults


def kill_consumer(stage: ShardStage, chance: random.Random) -> None:
    stage.lose(ShardProcess.crash, [stage.leader(chance)])
    stage.wait_for_progress()


def freeze_consumer(stage: ShardStage, chance: random.Random) -> None:
    process = stage.leader(chance)
    stage.lose(ShardProcess.pause, [process])
    time.sleep(TTL_S + 2.0)
    process.resume()
    status = process.wait_until_ended(END_TIMEOUT_S)
    assert status == 1, f"{process.name} lost its lease, and ended with status {status}"
    stage.wait_for_progress()


def drain_consumer(stage: ShardStage, chance: random.Random) -> None:
    stage.leader(chance).drain()
    stage.wait_for_progress()


def kill_primary_and_standby(stage: ShardStage, chance: random.Random) -> None:
    shard = chance.choice(stage.watch.shards())
    names = [stage.watch.leader(shard), *stage.watch.standbys(shard)]
    stage.lose(ShardProcess.crash, [stage.process(each) for each in names if each is not None])
    stage.wait_for_progress()


def kill_all_consumers(stage: ShardStage, _: random.Random) -> None:
    stage.lose(ShardProcess.crash, stage.shards.processes)


def restart_consumers_in_turn(stage: ShardStage, _: random.Random) -> None:
    for process in stage.shards.processes:
        process.drain()
        process.start()
        stage.wait_for_standbys()


def kill_broker_and_consumer(stage: ShardStage, chance: random.Random) -> None:
    stage.lose(ShardProcess.crash, [stage.leader(chance)])
    kill_one(stage, chance)


def freeze_broker_kill_consumer(stage: ShardStage, chance: random.Random) -> None:
    stage.lose(ShardProcess.crash, [stage.leader(chance)])
    freeze(stage, chance)


def storm(stage: ShardStage, chance: random.Random) -> None:
    """Cause faults of brokers, and others of consumers, one after the other and overlapping."""

    def suffer_brokers(chance: random.Random) -> None:
        for _ in range(STORM_STEPS):
            chance.choice((kill_one, freeze, drain_one))(stage, chance)
            stage.start_all()

    def suffer_consumers(chance: random.Random) -> None:
        for _ in range(STORM_STEPS):
            chance.choice((kill_consumer, freeze_consumer, drain_consumer))(stage, chance)
            stage.start_consumers()

    with ThreadPoolExecutor(2) as pool:
        for each in [
            pool.submit(suffer, random.Random(chance.random()))
            for suffer in (suffer_brokers, suffer_consumers)
        ]:
            each.result()


UNBOUNDED = (
    Fault("kill all consumers", LATEST_S, kill_all_consumers),
    Fault("drain a broker", LATEST_S, drain_one),
    Fault("kill a broker", LATEST_S, kill_one),
    Fault("kill two brokers", LATEST_S, kill_two),
    Fault("freeze a broker", LATEST_S, freeze),
    Fault("kill broker and consumer", LATEST_S, kill_broker_and_consumer),
    Fault("freeze broker, kill consumer", LATEST_S, freeze_broker_kill_consumer),
    Fault("storm", LATEST_S, storm),
)
"""Faults in which a fail-over waits for brokers, or for the start of a process."""

KILLS = (
    Fault("kill a consumer", LATEST_S, kill_consumer),
    Fault("kill primary and standby", LATEST_S, kill_primary_and_standby),
)
"""Faults of processes that others find dead at once."""

SHARD_FAULTS = (
    *KILLS,
    Fault("freeze a consumer", LATEST_S, freeze_consumer),
    Fault("drain a consumer", LATEST_S, drain_consumer),
    Fault("restart consumers in turn", LATEST_S, restart_consumers_in_turn),
    *UNBOUNDED,
)
"""Faults under stream_sum. No sum may be later than the bar."""


def fail_over_summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table of fail-overs by fault."""
    lines = []
    for fault in dict.fromkeys(each.fault for each in outcomes):
        found = [
            fail_over
            for each in outcomes
            if each.fault is fault and isinstance(each, ShardOutcome)
            for fail_over in each.fail_overs
        ]
        lines += [f"{fault.name:30}{text}" for text in _described(found)]
    return lines


def _described(fail_overs: Sequence[FailOver]) -> list[str]:
    """Return the number and the longest of fail-overs, with and without hot standby."""
    texts = []
    for kind, was_hot in (("hot", True), ("cold", False)):
        found = [each for each in fail_overs if each.was_hot is was_hot]
        if found:
            slowest = max(found, key=lambda each: each.lasts_s)
            text = f"{len(found)} {kind} fail-overs, the longest {slowest.lasts_s:.2f} s"
            texts.append(text + f" (recovery {slowest.recovery_s:.2f} s)")
    return texts
