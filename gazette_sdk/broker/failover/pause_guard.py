"""Guard against commits of a process that did not run for longer than its lease may last.

A stopped process, and one whose machine was suspended or moved to another host, may read appends of
clients before it notices that its lease has ended, and so may all replicas of a journal that stood
still together. Until then it must not acknowledge them, nor upload anything.

The clock of an event loop stands still while a machine is suspended. So two others are compared:
the time since boot, which counts suspensions where the system knows of them, and the wall time,
which jumps where only the host does. The one that moved furthest counts. Wall time that went back
says nothing about a pause: then the lease may have ended, too. Wall time that is set costs one
look-up of the lease.

A broker that knows that its lease is lost may serve for some time yet: it stops, or was asked to
leave and waits for Etcd. It acknowledges nothing from then on.

The lease is renewed on another thread than this loop's. So the time until which it is alive by
Etcd's answers ends the knowledge, too: a loop that runs is no sign of renewals. That time is one of
both clocks: a short pause that the time since boot does not count may follow on renewals that
failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.lease import LeaseLife, boot_s, wall_ahead_s
from gazette_sdk.errors import EtcdError, UnavailableError


class KnownLease:
    """Knowledge about this broker's lease.

    Args:
        pause_max_s: longest time without :meth:`ran` after which the lease is alive, unless Etcd
            ends it early. By default it is alive for ever, unless wall time goes back.
        life: the same by the renewals. By default it is alive for ever.

    Attributes:
        since_wall_s: wall time of the last :meth:`ran`.
        until_boot_s: time since boot until which the lease is alive, as of then.
        until_wall_s: the same as wall time. Appends that wait for nothing compare all of them
            themselves.
    """

    def __init__(self, pause_max_s: float = math.inf, life: LeaseLife | None = None) -> None:
        self._pause_max_s = self._alive_s = pause_max_s
        self._life = LeaseLife() if life is None else life
        # The end by the last answer, which is one of both clocks, and that of the life then.
        self._until = self._ahead_s = math.inf
        self._answered_until: float | None = None
        self.ran()

    def ran(self) -> None:
        """Note that the lease is alive now, unless it was lost."""
        self._see_renewal()
        self._boot_s, self.since_wall_s = boot_s(), time.time()
        # Wall time that went back shortens what is left on this clock.
        self._ahead_s = min(self._ahead_s, self.since_wall_s - self._boot_s)
        self.until_boot_s = min(self._boot_s + self._alive_s, self._until)
        self.until_wall_s = min(self.since_wall_s + self._alive_s, self._until + self._ahead_s)

    def found(self, alive_until: float, ahead_s: float) -> None:
        """Note that Etcd has the lease, which was looked up.

        Args:
            alive_until: time since boot until which it is alive at least.
            ahead_s: wall time less that since boot, when Etcd was asked.
        """
        self._see_renewal()
        self._until, self._ahead_s = alive_until, ahead_s
        self.ran()

    def lost(self) -> None:
        """Note that the lease is renewed no more: from now on it may end."""
        self._alive_s = self.until_boot_s = self.until_wall_s = -math.inf

    @property
    def is_alive(self) -> bool:
        """True if the lease is alive. False if it may have ended."""
        self._see_renewal()
        is_renewed = boot_s() < self._until and time.time() < self._until + self._ahead_s
        return self._ran_within(self._alive_s) and is_renewed

    @property
    def was_paused(self) -> bool:
        """True after a pause in which the lease may have ended."""
        return not self._ran_within(self._pause_max_s)

    def error(self, journal: str) -> UnavailableError | None:
        """Return the error of an append that must not be acknowledged; None while it may be."""
        if self.is_alive:
            return None
        reason = "has not renewed its lease in time"
        if self._alive_s < 0:
            reason = "has lost its lease, and stops"
        elif self.was_paused:
            reason = "was stopped for longer than its lease may last"
        return UnavailableError(f"this broker {reason}; try again", journal=journal)

    def _see_renewal(self) -> None:
        """Take in the last renewal that was answered, unless it is known."""
        if self._life.alive_until != self._answered_until:
            self._until = self._answered_until = self._life.alive_until
            self._ahead_s = self._life.ahead_s

    def _ran_within(self, most_s: float) -> bool:
        wall_s = time.time() - self.since_wall_s
        return boot_s() - self._boot_s <= most_s and 0 <= wall_s <= most_s


class PauseGuard:
    """Clock that finds out if the process did not run for half of its lease's time to live.

    The lease is renewed every third of that time. So it is alive after a shorter pause, and is
    looked up in Etcd after a longer one.

    Args:
        etcd: the client.
        lease: id of this broker's lease.
        life: its end by the renewals.
        ttl_s: its time to live.

    Attributes:
        known: knowledge about the lease.
    """

    def __init__(self, etcd: Etcd, lease: int, life: LeaseLife, ttl_s: float) -> None:
        self._etcd = etcd
        self._lease = lease
        self._period_s = ttl_s / 20
        self.known = KnownLease(ttl_s / 2, life)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            with contextlib.suppress(EtcdError):
                if await self.has_lease():
                    self.known.ran()

    async def has_lease(self) -> bool:
        """Return True if the lease was not lost in a pause. After one, Etcd is asked.

        Raises:
            EtcdError: Etcd did not answer.
        """
        if not self.known.was_paused:
            return True
        asked_at, ahead_s = boot_s(), wall_ahead_s()
        left_s = await self._etcd.time_to_live(self._lease)
        if left_s > 0:
            self.known.found(asked_at + left_s, ahead_s)
        return left_s > 0
