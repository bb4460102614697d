"""Health of a process that is a member of a cluster: its checks, and metrics of the same facts.

``/debug/live`` says that the event loop answers and that the lease is not lost. ``/debug/health``
has the checks of :meth:`MemberHealth.checks`, to which brokers and consumers add their own.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from gazette_sdk.cluster.items import ItemKeySpace
from gazette_sdk.cluster.membership import MemberProcess
from gazette_sdk.errors import GazetteError
from gazette_sdk.meters import Reading, ReadMetric
from gazette_sdk.server.members import installed_version
from gazette_sdk.server.tls import certificate_end

ANSWER_TIMEOUT_S = 2.0
"""Longest time of a call that a check makes."""

LEASE_PART_MIN = 0.25
"""Part of a lease that must be left: renewals that work leave two thirds of it or more."""

CERTIFICATE_LEFT_S = 7 * 86400.0
"""Least time before the end of a certificate."""

BUILD_INFO = ReadMetric(
    "gazette_build_info",
    "Version of gazette-sdk and of Python, and what the process is; always 1.",
    ("version", "python", "component"),
    combine=max,
)
LEASE_REMAINING_SECONDS = ReadMetric(
    "gazette_lease_remaining_seconds",
    "Time for which the lease of this process is alive by the answers of Etcd.",
    combine=min,
)
ETCD_WATCH_AGE_SECONDS = ReadMetric(
    "gazette_etcd_watch_age_seconds",
    "Time since the watch of Etcd was lost: changes of this time are not known. 0 while it works.",
    combine=max,
)


class Check(NamedTuple):
    """Outcome of a check.

    Attributes:
        name: its name.
        ok: False if something is wrong.
        detail: what was found.
    """

    name: str
    ok: bool
    detail: str


FurtherChecks = Callable[[str | None], Awaitable[Iterable[Check]]]
"""Makes checks, given the ``Authorization`` header of the caller."""


class MemberHealth:
    """Health of this process.

    Args:
        component: ``broker``, or the name of the application.
        member: its connection to Etcd and its lease.
        keyspace: its mirror of Etcd.
        certificates: files of its certificates; empty paths are ignored.

    Attributes:
        further: checks of what the process is.
    """

    def __init__(
        self,
        component: str,
        member: MemberProcess,
        keyspace: ItemKeySpace[Any, Any, Any],
        certificates: Sequence[str] = (),
    ) -> None:
        self.further: list[FurtherChecks] = []
        self._component = component
        self._member = member
        self._keyspace = keyspace
        self._certificates = [path for path in certificates if path]
        self._shown = ExitStack()

    def begin(self) -> None:
        """Show the metrics, until :meth:`end`."""
        build = (installed_version(), platform.python_version(), self._component)
        readings: Sequence[tuple[ReadMetric, Callable[[], Reading]]] = (
            (BUILD_INFO, lambda: {build: 1.0}),
            (LEASE_REMAINING_SECONDS, self._lease_left),
            (ETCD_WATCH_AGE_SECONDS, lambda: {(): self._keyspace.watch_age_s}),
        )
        for metric, read in readings:
            self._shown.callback(metric.add(read))

    def end(self) -> None:
        """Show the metrics no more."""
        self._shown.close()

    def _lease_left(self) -> Reading:
        membership = self._member.membership
        left_s = None if membership is None else membership.lease_left_s
        return {} if left_s is None else {(): max(0.0, left_s)}

    @property
    def dead(self) -> str:
        """Reason why this process must be started again; empty text if it lives."""
        membership = self._member.membership
        lost = None if membership is None else membership.lost
        if lost is None or not lost.done() or lost.cancelled():
            return ""
        return f"{lost.exception()}: this process is no member of its cluster any more"

    async def checks(self, authorization: str | None) -> Sequence[Check]:
        """Return the outcomes of all checks.

        Args:
            authorization: header of the caller, which is passed on to other members.
        """
        further = await asyncio.gather(*(check(authorization) for check in self.further))
        return [
            await self._check_etcd(),
            self._check_lease(),
            Check(
                "watch",
                self._keyspace.watch_age_s == 0,
                f"lost {self._keyspace.watch_age_s:.0f} s ago"
                if self._keyspace.watch_age_s
                else f"at revision {self._keyspace.revision}",
            ),
            *[await asyncio.to_thread(_check_certificate, path) for path in self._certificates],
            *(check for found in further for check in found),
        ]

    async def _check_etcd(self) -> Check:
        etcd = self._member.etcd
        if etcd is None:
            return Check("etcd", ok=False, detail="not connected yet")
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await etcd.range(b"\x00")
        except (GazetteError, TimeoutError) as error:
            return Check(
                "etcd", ok=False, detail=str(error) or f"no answer in {ANSWER_TIMEOUT_S} s"
            )
        spent_ms = (time.monotonic() - begun_s) * 1000
        return Check("etcd", ok=True, detail=f"answers in {spent_ms:.0f} ms")

    def _check_lease(self) -> Check:
        membership = self._member.membership
        left_s = None if membership is None else membership.lease_left_s
        if membership is None or left_s is None:
            return Check("lease", ok=False, detail="none yet")
        is_ok = not self.dead and left_s >= membership.ttl_s * LEASE_PART_MIN
        return Check("lease", is_ok, f"{max(0.0, left_s):.0f} of {membership.ttl_s:.0f} s are left")


def _check_certificate(path: str) -> Check:
    """Return whether a certificate is valid for long enough; of one that cannot be read, no."""
    end = certificate_end(path)
    if end is None:
        return Check("certificate", ok=False, detail=f"{path} cannot be read")
    left_s = end - time.time()
    days = f"ends in {left_s / 86400:.1f} days" if left_s > 0 else "has ended"
    return Check("certificate", left_s > CERTIFICATE_LEFT_S, f"{path} {days}")
