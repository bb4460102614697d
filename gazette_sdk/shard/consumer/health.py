"""Health of a consumer process: metrics of its shards' lag and recovery, and checks of them.

The lag in time needs calls of brokers, so it is measured when someone scrapes. Numbers of all
shards of the application are shown by the process that leads its allocator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from gazette_sdk.cluster.allocator.state import leader_of
from gazette_sdk.meters import Reading, ReadMetric
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.shard_spec import recovery_log
from gazette_sdk.server.health import Check
from gazette_sdk.shard.consumer.process import Consumer

READ_LAG_SECONDS = ReadMetric(
    "gazette_shard_read_lag_seconds",
    "Age of the first message that a shard has not read; 0 if there is none.",
    ("shard",),
    combine=max,
)
RECOVERY_BYTES = ReadMetric(
    "gazette_shard_recovery_bytes",
    "Bytes of the recovery log that are read, and an estimate of all; 0 unless the shard recovers.",
    ("shard", "kind"),
    combine=max,
)
WITHOUT_PRIMARY = ReadMetric(
    "gazette_shards_without_primary",
    "Shards of an application, without disabled ones, that no process leads; shown by the process "
    "that leads the allocator.",
    ("application",),
    combine=max,
)


class ConsumerHealth:
    """Metrics and checks of a consumer process, which has started.

    Args:
        consumer: the process.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._application = consumer.application.full_name
        self._lags: dict[tuple[str, ...], float] = {}
        self._refreshing = asyncio.Lock()
        self._shown = ExitStack()

    def begin(self) -> None:
        """Show the metrics, until :meth:`end`."""
        readings: Sequence[tuple[ReadMetric, Callable[[], Reading]]] = (
            (READ_LAG_SECONDS, lambda: self._lags),
            (RECOVERY_BYTES, self._recovery),
            (WITHOUT_PRIMARY, self._without_primary),
        )
        for metric, read in readings:
            self._shown.callback(metric.add(read))

    def end(self) -> None:
        """Show the metrics no more."""
        self._shown.close()

    async def refresh(self) -> None:
        """Measure the lags. A scrape awaits it."""
        keyspace = self._consumer.keyspace
        async with self._refreshing:
            lags = await self._consumer.pages.lags()
        self._lags = {
            (keyspace.item_key(shard).decode(),): lag.seconds
            for shard, lag in lags.items()
            if lag.seconds is not None
        }

    def _recovery(self) -> Reading:
        found: dict[tuple[str, ...], float] = {}
        for shard in self._consumer.resolver.local.all():
            if recovery_log(shard.spec):
                name = self._consumer.keyspace.item_key(shard.id).decode()
                read, total = shard.recovery
                found[name, "read"], found[name, "total"] = float(read), float(total)
        return found

    def _without_primary(self) -> Reading:
        config, keyspace = self._consumer.config, self._consumer.keyspace
        leader = leader_of(keyspace.members())
        if leader is None or (leader.zone, leader.suffix) != (config.zone, config.suffix):
            return {}
        led = {each.item for each in keyspace.all_assignments() if each.slot == 0}
        lacking = (item for item in keyspace.items() if not item.value.disable)
        return {(self._application,): float(sum(item.id not in led for item in lacking))}

    async def checks(self, _authorization: str | None) -> Iterable[Check]:
        """Return the outcome of the check of this process' shards."""
        config = self._consumer.config
        held = self._consumer.keyspace.local_assignments(config.zone, config.suffix)
        failed = [each.item for each in held if each.value.code == cpb.ReplicaStatus.FAILED]
        detail = f"{len(held)} shards of this process"
        if failed:
            detail += f", {len(failed)} have failed, such as {failed[0]}"
        return [Check("shards", not failed, detail)]
