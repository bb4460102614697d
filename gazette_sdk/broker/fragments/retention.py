"""Retention: the primary of a journal removes stored fragments that are older.

Fragments are removed from the begin of the journal on, so that readers skip to the first one that
is left, and never meet a gap. The last fragment stays whatever its age: it shows where the journal
ends. Of recovery logs the age does not count, since old parts of them may hold live state: the
consumer sets the offset before which no recovery reads. A fragment is stored for two intervals of
listings at least, so that all replicas see that it was.

A fragment's age is a matter of the store's clock. A broker whose clock is wrong must not remove
what is young. So the time is the wall time, or that of the store if this is earlier: of its newest
object, and of what has passed since it was listed. Where nothing is written to a store, nothing of
it is removed until the broker has run for as long.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple

from gazette_sdk.broker.metrics import RETENTION_BYTES, RETENTION_FRAGMENTS
from gazette_sdk.errors import GazetteError
from gazette_sdk.fragment.listing import StoredFragment
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import to_seconds
from gazette_sdk.protocol.fragments import length_of
from gazette_sdk.protocol.labels import CONTENT_TYPE, RECOVERY_LOG, needed_from, values_of
from gazette_sdk.retries import Outage
from gazette_sdk.transport.loop import for_each

REMOVALS_MAX: Final = 8
"""Concurrent removals of one journal."""

LISTINGS_MIN: Final = 2
"""Least age of a fragment that is removed, in refresh intervals of its journal."""

_log = logging.getLogger(__name__)


class Aged(NamedTuple):
    """Parts of a listing.

    Attributes:
        left: what stays.
        aged: what is older than the retention, and is before everything that stays.
    """

    left: list[StoredFragment]
    aged: list[StoredFragment]


def split_aged(
    spec: pb.JournalSpec, stored: Sequence[StoredFragment], now_of: Callable[[str], float]
) -> Aged:
    """Split the stored fragments of a journal by its retention.

    Args:
        spec: the journal's.
        stored: the listing of all of its stores.
        now_of: returns the time of a store by its URL, in Unix seconds.
    """
    least_s = LISTINGS_MIN * to_seconds(spec.fragment.refresh_interval)
    retention_s = to_seconds(spec.fragment.retention)
    if RECOVERY_LOG in values_of(spec.labels, CONTENT_TYPE):
        until, retention_s = needed_from(spec.labels), 0.0
    else:
        until = sys.maxsize if retention_s > 0 else 0
    if not until or not stored:
        return Aged(list(stored), [])
    end = max(each.fragment.end for each in stored)

    def stays(fragment: pb.Fragment) -> bool:
        age_s = now_of(fragment.backing_store) - fragment.mod_time
        return fragment.end == end or fragment.end > until or age_s < max(retention_s, least_s)

    begin = min(each.fragment.begin for each in stored if stays(each.fragment))
    parts = Aged([], [])
    for each in stored:
        is_aged = each.fragment.end <= begin and not stays(each.fragment)
        (parts.aged if is_aged else parts.left).append(each)
    return parts


class Retention:
    """Remover of aged fragments of a broker's journals. It belongs to the event loop.

    Args:
        stores: of the process.
        mode: ``true``; or ``dry-run`` to log what would be removed, or ``false``.
        now: Unix time in seconds.
    """

    def __init__(
        self,
        stores: StoreRegistry,
        mode: Literal["true", "false", "dry-run"],
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._stores = stores
        self._mode = mode
        self._now = now
        self._store_times: dict[str, float] = {}  # Unix time at time 0 of the loop, at least
        self._shown: dict[str, int] = {}  # number of fragments that a dry run has shown
        self._outages: dict[str, Outage] = {}

    def split(self, spec: pb.JournalSpec, stored: Sequence[StoredFragment]) -> Aged:
        """Split a listing that has just ended; see :func:`split_aged`."""
        loop_s = asyncio.get_running_loop().time()
        self._note_times(loop_s, (each.fragment for each in stored))
        if self._mode == "false":
            return Aged(list(stored), [])

        def now_of(store: str) -> float:
            return min(self._now(), self._store_times.get(store, -math.inf) + loop_s)

        parts = split_aged(spec, stored, now_of)
        if self._mode == "dry-run":
            if self._shown.get(spec.name, 0) != len(parts.aged):
                self._shown[spec.name] = len(parts.aged)
                _log_removal("%d fragments of %s would be removed (%d bytes)", spec, parts.aged)
            return Aged(list(stored), [])
        return parts

    async def remove(self, spec: pb.JournalSpec, aged: Sequence[StoredFragment]) -> None:
        """Remove fragments from their stores. What fails is in the next listing again."""
        outage = self._outages.setdefault(
            spec.name, Outage(_log, f"removal of fragments of {spec.name} beyond its retention")
        )

        gone: list[StoredFragment] = []
        failures = 0

        async def remove(each: StoredFragment) -> None:
            nonlocal failures
            try:
                if await self._stores.remove(each.fragment):
                    gone.append(each)
            except (GazetteError, OSError) as error:
                failures += 1
                outage.failed(f"{error}; let brokers delete there, or use --broker.prune=false")

        await for_each(aged, remove, REMOVALS_MAX)
        RETENTION_FRAGMENTS.value += len(gone)
        RETENTION_BYTES.value += sum(length_of(each.fragment) for each in gone)
        if not failures:
            outage.ended()
        if gone:
            _log_removal("%d fragments of %s are removed (%d bytes)", spec, gone)
        if not outage.is_open:
            del self._outages[spec.name]

    def _note_times(self, loop_s: float, fragments: Iterable[pb.Fragment]) -> None:
        times = self._store_times
        for fragment in fragments:
            store, at = fragment.backing_store, fragment.mod_time - loop_s
            if at > times.get(store, -math.inf):
                times[store] = at


def _log_removal(text: str, spec: pb.JournalSpec, aged: Sequence[StoredFragment]) -> None:
    size = sum(length_of(each.fragment) for each in aged)
    is_log = RECOVERY_LOG in values_of(spec.labels, CONTENT_TYPE)
    reason = "no recovery needs them" if is_log else "they are older than its retention"
    _log.info(f"{text}: {reason}", len(aged), spec.name, size)
