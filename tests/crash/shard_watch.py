"""Mirror of consumers' keys in Etcd: who leads each shard, and how long fail-overs take."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from gazette_sdk.cluster.consumer_keys import ConsumerKeySpace, ShardAssignment
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.transport import loop as sdk_loop

__all__ = ["FailOver", "ShardWatch", "watching"]

START_TIMEOUT_S = 30.0

_Status = cpb.ReplicaStatus


@dataclass
class FailOver:
    """Fail-over of a shard, from the end of its primary until another one serves.

    Times are of the monotonic clock.

    Attributes:
        shard: its id.
        begin: when the primary was killed or stopped.
        was_hot: another process had a standby then.
        lost: assignment of the lost primary.
        assigned: when another process was assigned to lead; None before.
        served: when it had recovered; None before.
    """

    shard: str
    begin: float
    was_hot: bool
    lost: tuple[str, int]
    assigned: float | None = None
    served: float | None = None

    @property
    def lasts_s(self) -> float:
        """Whole time; infinite if it has not ended."""
        return float("inf") if self.served is None else self.served - self.begin

    @property
    def recovery_s(self) -> float:
        """Time from the assignment of the successor until it served."""
        return 0.0 if self.served is None else self.served - (self.assigned or self.served)

    @property
    def bounded_s(self) -> float:
        """Whole time, without the recovery if there was no standby."""
        return self.lasts_s if self.was_hot else self.lasts_s - self.recovery_s


class ShardWatch:
    """Watch of the shards of one application. Updated on the SDK's event loop.

    Attributes:
        failures: texts of shards that had the status FAILED.
    """

    def __init__(self, keyspace: ConsumerKeySpace) -> None:
        self.failures: list[str] = []
        self._keyspace = keyspace
        self._lock = threading.Lock()
        self._open: list[FailOver] = []
        self._assignments: dict[str, list[ShardAssignment]] = {}

    def shards(self) -> list[str]:
        """Return the ids of all shards."""
        with self._lock:
            return sorted(self._assignments)

    def leader(self, shard: str) -> str | None:
        """Return the process that serves a shard; None if none does."""
        with self._lock:
            primary = _primary(self._assignments[shard])
            return primary.suffix if primary and primary.value.code == _Status.PRIMARY else None

    def standbys(self, shard: str) -> list[str]:
        """Return the processes with a standby of a shard that can take over at once."""
        with self._lock:
            return [
                each.suffix
                for each in self._assignments[shard]
                if each.slot and each.value.code == _Status.STANDBY
            ]

    def lose(self, processes: Collection[str]) -> list[FailOver]:
        """Note that processes end or stand still now; return the fail-overs that follow."""
        now = time.monotonic()
        found = []
        with self._lock:
            for shard, assignments in self._assignments.items():
                primary = _primary(assignments)
                if primary is None or primary.suffix not in processes:
                    continue
                was_hot = primary.value.code == _Status.PRIMARY and any(
                    each.value.code == _Status.STANDBY and each.suffix not in processes
                    for each in assignments
                )
                found.append(FailOver(shard, now, was_hot, _identity(primary)))
            self._open += found
        return found

    def is_ready(self, processes: Collection[str]) -> bool:
        """Return True if each shard has a primary and a standby, and all processes are members."""
        with self._lock:
            members = {each.suffix for each in self._keyspace.members()}
            return members == set(processes) and all(
                sorted(each.value.code for each in assignments)
                == [_Status.STANDBY, _Status.PRIMARY]
                for assignments in self._assignments.values()
            )

    def summary(self) -> str:
        """Return who has which shard, for an error."""
        with self._lock:
            return "; ".join(
                f"{shard}: "
                + ", ".join(
                    f"{each.suffix}#{each.slot} {_Status.Code.Name(each.value.code)}"
                    for each in assignments
                )
                for shard, assignments in sorted(self._assignments.items())
            )

    async def run(self) -> None:
        """Take in each update of the mirror."""
        while True:
            self._take_update()
            await self._keyspace.wait_for_update()

    def _take_update(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._assignments = {
                item.id: self._keyspace.assignments(item.id) for item in self._keyspace.items()
            }
            for shard, assignments in self._assignments.items():
                for each in assignments:
                    if each.value.code == _Status.FAILED:
                        text = f"{shard} at {each.suffix}: {'; '.join(each.value.errors)}"
                        if text not in self.failures:
                            self.failures.append(text)
            for each in list(self._open):
                primary = _primary(self._assignments.get(each.shard, []))
                if primary is None or _identity(primary) == each.lost:
                    continue
                each.assigned = each.assigned or now
                if primary.value.code == _Status.PRIMARY:
                    each.served = now
                    self._open.remove(each)


@contextmanager
def watching(etcd_endpoint: str, prefix: str) -> Iterator[ShardWatch]:
    """Yield a watch of the keys of an application.

    Args:
        etcd_endpoint: URL of Etcd.
        prefix: the application's prefix, ``/gazette/consumers/NAME``.
    """
    keyspace = ConsumerKeySpace(prefix)
    watch = ShardWatch(keyspace)
    is_loaded = threading.Event()

    async def work() -> None:
        async with aclosing(await Etcd.connect(etcd_endpoint)) as etcd:
            await keyspace.load(etcd)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(keyspace.watch(etcd, delay_s=0))
                tasks.create_task(watch.run())
                is_loaded.set()

    running = asyncio.run_coroutine_threadsafe(work(), sdk_loop.sdk_loop())
    try:
        assert is_loaded.wait(START_TIMEOUT_S), "Etcd does not answer"
        yield watch
        if running.done():
            running.result()
    finally:
        running.cancel()


def _primary(assignments: list[ShardAssignment]) -> ShardAssignment | None:
    return next((each for each in assignments if each.slot == 0), None)


def _identity(assignment: ShardAssignment) -> tuple[str, int]:
    """Return what tells an assignment from a later one of the same process."""
    return assignment.suffix, assignment.create_revision
