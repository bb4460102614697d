"""Guard against commits of a process that did not run for longer than its lease may last.

A stopped process, and one whose machine was suspended or moved to another host, may read appends of
clients before it notices that its lease has ended, and so may all replicas of a journal that stood
still together. Until then it must not acknowledge them, nor upload anything.

The clock of an event loop stands still while a machine is suspended. So two others are compared:
the time since boot, which counts suspensions where the system knows of them, and the wall time,
which jumps where only the host does. The one that moved furthest counts. Wall time that is set
costs one look-up of the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.errors import EtcdError, UnavailableError

__all__ = ["KnownLease", "PauseGuard", "boot_s"]

_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_s() -> float:
    """Return seconds since boot, with those of suspensions where the system counts them."""
    return time.clock_gettime(_BOOT_CLOCK)


class KnownLease:
    """Knowledge about this broker's lease.

    Args:
        pause_max_s: longest time without :meth:`ran` after which the lease is alive, unless Etcd
            ends it early. By default it is alive for ever.
    """

    def __init__(self, pause_max_s: float = math.inf) -> None:
        self._pause_max_s = pause_max_s
        self.ran()

    def ran(self) -> None:
        """Note that the lease is alive now."""
        self._boot_s, self._wall_s = boot_s(), time.time()

    @property
    def is_alive(self) -> bool:
        """True if the lease is alive. False if it may have ended."""
        most = self._pause_max_s
        return boot_s() - self._boot_s <= most and time.time() - self._wall_s <= most

    def error(self, journal: str) -> UnavailableError | None:
        """Return the error of an append that must not be acknowledged; None while it may be."""
        if self.is_alive:
            return None
        return UnavailableError(
            "this broker was stopped for longer than its lease may last; try again",
            journal=journal,
        )


class PauseGuard:
    """Clock that finds out if the process did not run for half of its lease's time to live.

    The lease is renewed every third of that time. So it is alive after a shorter pause, and is
    looked up in Etcd after a longer one.

    Args:
        etcd: the client.
        lease: id of this broker's lease.
        ttl_s: its time to live.

    Attributes:
        known: knowledge about the lease.
    """

    def __init__(self, etcd: Etcd, lease: int, ttl_s: float) -> None:
        self._etcd = etcd
        self._lease = lease
        self._period_s = ttl_s / 20
        self.known = KnownLease(ttl_s / 2)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            with contextlib.suppress(EtcdError):
                if await self.has_lease():
                    self.known.ran()

    async def has_lease(self) -> bool:
        """Return True if the lease is alive, after a pause as Etcd has it.

        Raises:
            EtcdError: Etcd did not answer.
        """
        return self.known.is_alive or await self._etcd.time_to_live(self._lease) > 0
