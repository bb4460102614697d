"""Health of a broker: metrics of its cluster, its spools and its stores, and checks of them.

The numbers are found when someone scrapes or asks, in slices of the event loop, and the rarer the
more it costs. Numbers of all journals are shown by the broker that leads the allocator, so that
each is there once.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from gazette_sdk.broker.process import Broker
from gazette_sdk.broker.views.members import ClusterMembers
from gazette_sdk.broker.views.page import Line
from gazette_sdk.cluster.allocator.state import leader_of
from gazette_sdk.cluster.broker_keys import is_consistent
from gazette_sdk.fragment.registry import StoreHealth
from gazette_sdk.meters import Reading, ReadMetric
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.journal_spec import desired_replication, is_suspended
from gazette_sdk.server.authorization import Call
from gazette_sdk.server.health import ANSWER_TIMEOUT_S, Check
from gazette_sdk.server.members import verify_view
from gazette_sdk.transport.loop import LoopSlices

COST_SHARE = 0.005
"""Greatest share of a processor that is spent on finding the numbers of spools."""

AGE_MAX_S = 60.0
"""Greatest age of the numbers of spools, whatever they cost."""

CLOCK_SKEW_S = 5.0
"""Difference of clocks that verifiers of tokens allow."""

DISK_FREE_BYTES, DISK_FREE_PART = 1 << 30, 0.05
"""Least free space of the disk of spools, in bytes and as a part of the disk; one suffices."""

_LEADER = "; shown by the broker that leads the allocator"

REPLICAS_MISSING = ReadMetric(
    "gazette_allocator_replicas_missing",
    f"Replicas that journals want, and that are on no broker or not in sync{_LEADER}.",
    combine=max,
)
SINGLE_ZONE = ReadMetric(
    "gazette_allocator_journals_single_zone",
    "Journals with several replicas, all in one zone, while brokers run in several zones"
    f"{_LEADER}.",
    combine=max,
)
WAITING = ReadMetric(
    "gazette_journals_waiting",
    "Journals whose appends are refused until brokers that alone have their last bytes are back"
    f"{_LEADER}.",
    combine=max,
)
SPOOL_PENDING_BYTES = ReadMetric(
    "gazette_spool_pending_bytes",
    "Content of journals that this broker leads which is in no store.",
)
SPOOL_OLDEST_SECONDS = ReadMetric(
    "gazette_spool_oldest_seconds",
    "Age of the oldest content of journals that this broker leads which is in no store.",
    combine=max,
)
SPOOL_DISK_FREE_BYTES = ReadMetric(
    "gazette_spool_disk_free_bytes", "Free space of the disk of spools.", combine=min
)
STORE_HEALTHY = ReadMetric(
    "gazette_store_healthy",
    "1 for a store whose last check by this process succeeded, else 0.",
    ("store",),
    combine=min,
)
STORE_UNHEALTHY_SECONDS = ReadMetric(
    "gazette_store_unhealthy_seconds",
    "Time for which the checks of a store by this process have failed; 0 if it is healthy.",
    ("store",),
    combine=max,
)


@dataclass(slots=True)
class _JournalNumbers:
    """Numbers of all journals.

    Attributes:
        lines: the lines of which they are made.
        missing: replicas that are missing.
        single_zone: journals in one zone only.
        waiting: journals that wait for brokers.
    """

    lines: Sequence[Line] = ()
    missing: int = 0
    single_zone: int = 0
    waiting: int = 0


class BrokerHealth:
    """Metrics and checks of a broker, which has started.

    Args:
        broker: the broker.
        members: members of its cluster.
    """

    def __init__(self, broker: Broker, members: ClusterMembers) -> None:
        self._broker = broker
        self._members = members
        self._journals: _JournalNumbers | None = None
        self._pending_bytes = 0
        self._oldest_s = 0.0
        self._spools_due_s = 0.0
        self._disk = shutil.disk_usage(broker.spool_root)
        self._shown = ExitStack()
        self._refreshing = asyncio.Lock()

    def begin(self) -> None:
        """Show the metrics, until :meth:`end`."""
        readings: Sequence[tuple[ReadMetric, Callable[[], Reading]]] = (
            (REPLICAS_MISSING, lambda: self._of_journals("missing")),
            (SINGLE_ZONE, lambda: self._of_journals("single_zone")),
            (WAITING, lambda: self._of_journals("waiting")),
            (SPOOL_PENDING_BYTES, lambda: {(): float(self._pending_bytes)}),
            (SPOOL_OLDEST_SECONDS, lambda: {(): self._oldest_s}),
            (SPOOL_DISK_FREE_BYTES, lambda: {(): float(self._disk.free)}),
            (STORE_HEALTHY, self._stores_healthy),
            (STORE_UNHEALTHY_SECONDS, self._stores_unhealthy_s),
        )
        for metric, read in readings:
            self._shown.callback(metric.add(read))

    def end(self) -> None:
        """Show the metrics no more."""
        self._shown.close()

    async def refresh(self) -> None:
        """Find the numbers that cost something. A scrape awaits it."""
        async with self._refreshing:
            self._disk = await asyncio.to_thread(shutil.disk_usage, self._broker.spool_root)
            await self._refresh_journals()
            await self._refresh_spools()

    # ------------------------------------------------------------- metrics

    def _of_journals(self, name: str) -> Reading:
        return {} if self._journals is None else {(): float(getattr(self._journals, name))}

    def _leads(self) -> bool:
        config, leader = self._broker.config, leader_of(self._broker.keyspace.members())
        return leader is not None and (leader.zone, leader.suffix) == (config.zone, config.suffix)

    async def _refresh_journals(self) -> None:
        if not self._leads():
            self._journals = None
            return
        lines = await self._broker.views.pages.lines()
        if self._journals is not None and self._journals.lines is lines:
            return
        found, slices = _JournalNumbers(lines), LoopSlices()
        for line in lines:
            await slices.rest()
            found.single_zone += line.state == clpb.JOURNAL_SINGLE_ZONE
            found.waiting += line.state == clpb.JOURNAL_WAITING
            found.missing += self._missing(line)
        self._journals = found

    def _missing(self, line: Line) -> int:
        """Return the replicas that a journal lacks; those out of sync of a full one are one."""
        spec = line.item.value
        if is_suspended(spec):
            return 0
        wanted = desired_replication(spec, self._broker.config.max_replication)
        lacking = wanted - len({(each.zone, each.suffix) for each in line.assignments})
        return lacking if lacking > 0 else int(not is_consistent(line.assignments))

    async def _refresh_spools(self) -> None:
        if time.monotonic() < self._spools_due_s:
            return
        pending_bytes, oldest_s, slices = 0, 0.0, LoopSlices()
        for replica in self._broker.resolver.replicas:
            await slices.rest()
            if replica.is_primary:
                unstored, age_s = self._broker.local_heads.unstored(replica)
                pending_bytes += unstored
                oldest_s = max(oldest_s, age_s or 0.0)
        self._pending_bytes, self._oldest_s = pending_bytes, oldest_s
        self._spools_due_s = time.monotonic() + min(AGE_MAX_S, slices.taken_s / COST_SHARE)

    def _checked_stores(self) -> Iterable[StoreHealth]:
        """Return the stores whose first check has ended."""
        return [health for health in self._broker.stores.healths() if health.checked_at]

    def _stores_healthy(self) -> Reading:
        return {(each.url,): float(each.error is None) for each in self._checked_stores()}

    def _stores_unhealthy_s(self) -> Reading:
        return {(each.url,): _unhealthy_s(each) for each in self._checked_stores()}

    # -------------------------------------------------------------- checks

    async def checks(self, authorization: str | None) -> Iterable[Check]:
        """Return the outcomes of checks of the spools' disk, stores, replicas and clocks.

        Args:
            authorization: header of the caller, which is passed on to other brokers.
        """
        await self.refresh()
        disk = self._disk
        is_free = disk.free >= DISK_FREE_BYTES or disk.free >= disk.total * DISK_FREE_PART
        detail = f"{disk.free / 1e9:.1f} of {disk.total / 1e9:.1f} GB of the spools' disk are free"
        found = [Check("spool-disk", is_free, detail)]
        for health in self._checked_stores():
            detail = health.error or "its last check succeeded"
            found.append(Check("store", health.error is None, f"{health.url}: {detail}"))
        return [*found, self._check_replicas(), await self._check_clocks(authorization)]

    def _check_replicas(self) -> Check:
        """Check the journals that this broker leads."""
        config, keyspace = self._broker.config, self._broker.keyspace
        led = [
            each.item
            for each in keyspace.local_assignments(config.zone, config.suffix)
            if each.slot == 0
        ]
        short = [name for name in led if not is_consistent(keyspace.assignments(name))]
        detail = f"{len(led) - len(short)} of {len(led)} journals that it leads are in sync"
        return Check("replicas", not short, f"{detail}; not {short[0]}" if short else detail)

    async def _check_clocks(self, authorization: str | None) -> Check:
        """Compare our clock with those of other brokers that answer."""
        call = Call(authorization, ANSWER_TIMEOUT_S)
        claims = verify_view(self._broker.authority, authorization)
        facts = await self._members.describe({}, claims, call, details=False)
        ahead = {each.name: each.clock_ahead_s for each in facts if each.clock_ahead_s is not None}
        ahead.pop(f"{self._broker.config.zone}/{self._broker.config.suffix}", None)
        worst = max(ahead, key=lambda name: abs(ahead[name]), default="")
        if not worst:
            return Check("clock", ok=True, detail="no other broker answers")
        detail = f"differs by {abs(ahead[worst]):.1f} s from {worst}, and less from others"
        return Check("clock", abs(ahead[worst]) <= CLOCK_SKEW_S, detail)


def _unhealthy_s(health: StoreHealth) -> float:
    if health.error is None:
        return 0.0
    now_s = asyncio.get_running_loop().time()
    return now_s - (health.failing_since or now_s)
