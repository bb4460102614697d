"""Guard against commits of a process that was stopped for longer than its lease may last.

A replica's peers protect a journal from a stale primary: they do not acknowledge. A primary without
peers has only its lease. When a stopped process is continued, it may read appends of clients before
it notices that its lease has ended: until then it must not acknowledge them.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.errors import EtcdError

__all__ = ["KnownLease", "PauseGuard"]


@dataclass(slots=True)
class KnownLease:
    """Knowledge about this broker's lease.

    Attributes:
        valid_until: loop time until which the lease is alive, unless Etcd ends it early.
    """

    valid_until: float = math.inf


class PauseGuard:
    """Clock that finds out if the process did not run for half of its lease's time to live.

    The lease is renewed every third of that time. So it is alive behind a shorter pause, and is
    looked up in Etcd behind a longer one.

    Args:
        etcd: the client.
        lease: id of this broker's lease.
        ttl_s: its time to live.

    Attributes:
        known: until when the lease is alive.
    """

    def __init__(self, etcd: Etcd, lease: int, ttl_s: float) -> None:
        self._etcd = etcd
        self._lease = lease
        self._pause_max_s = ttl_s / 2
        self._period_s = ttl_s / 20
        self._loop = asyncio.get_running_loop()
        self.known = KnownLease(self._loop.time() + self._pause_max_s)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            if self._loop.time() <= self.known.valid_until or await self._is_alive():
                self.known.valid_until = self._loop.time() + self._pause_max_s

    async def _is_alive(self) -> bool:
        try:
            return await self._etcd.time_to_live(self._lease) > 0
        except EtcdError:
            return False
