"""Pruning of recovery logs: which fragments no hints need any more (recovery log 8).

A consumer labels each log with the offset before which none is needed, and brokers remove them.
``gazctl shards prune`` removes more: also unneeded fragments between others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gazette_sdk.errors import EtcdTransactionFailedError, GazetteError
from gazette_sdk.journals.changes import list_named
from gazette_sdk.protocol import broker_pb2
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.protocol.labels import NEEDED_FROM, needed_from, set_value
from gazette_sdk.retries import Outage
from gazette_sdk.shard.recovery.hints import Segment, flatten
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import apply_journals

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardHints:
    """Hints of one shard.

    Attributes:
        shard: its id.
        log: its recovery log.
        hints: of all slots, primary and backups; None for an empty slot.
    """

    shard: str
    log: str
    hints: Sequence[pb.FSMHints | None]


@dataclass(slots=True)
class PrunePlan:
    """Content of logs that hints need.

    All shards that may read a log must be in the plan, whichever logs are pruned.

    Attributes:
        segments: by log. Those of different hints may contradict each other.
        kept: reason why a log is not pruned at all, by log.
    """

    segments: dict[str, list[Segment]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, shards: Iterable[ShardHints]) -> PrunePlan:
        """Return the plan of all shards that may read the logs.

        Raises:
            ValidationError: hints are malformed.
        """
        plan = cls()
        for shard in shards:
            for hints in shard.hints:
                if hints is None or not hints.live_nodes:
                    plan.kept.setdefault(shard.log, f"hints of shard {shard.shard} are missing")
                if hints is not None:
                    plan.fold(hints)
        return plan

    def fold(self, hints: pb.FSMHints) -> None:
        """Add all segments of hints. Playback reads from the last of them to the head.

        Raises:
            ValidationError: the hints are malformed.
        """
        found = list(flatten(hints)[1])
        for index, segment in enumerate(found):
            if index == len(found) - 1:
                segment.last_offset = 0
            self.segments.setdefault(segment.log, []).append(segment)

    def is_prunable(self, log: str, begin: int, end: int) -> bool:
        """Return True if no playback reads a fragment.

        Args:
            log: journal of the fragment.
            begin: offset of its first byte.
            end: offset after its last one; 0 if it is not known.
        """
        return log not in self.kept and not overlaps(begin, end, self.segments.get(log, ()))

    def needed_from(self, log: str) -> int | None:
        """Return the offset before which no playback reads a log; None where that is not known."""
        segments = self.segments.get(log)
        if log in self.kept or not segments:
            return None
        return min(segment.first_offset for segment in segments)


class LogPruning:
    """Reports of the begin of recovery logs that no recovery needs, while this process leads.

    The process that leads a consumer knows all of its shards. A log is reported once at least the
    length of a fragment is not needed.

    Args:
        transport: to the logs.
        hints: loads the hints of all shards of the consumer.
        leads: returns True if this process is to report.
        period_s: time between two reports, in seconds.
    """

    def __init__(
        self,
        transport: Transport,
        hints: Callable[[], Awaitable[Sequence[ShardHints]]],
        leads: Callable[[], bool],
        *,
        period_s: float,
    ) -> None:
        self._transport = transport
        self._hints = hints
        self._leads = leads
        self._period_s = period_s

    async def run(self) -> None:
        """Report until it is cancelled."""
        outage = Outage(_log, "pruning of recovery logs")
        while True:
            await asyncio.sleep(self._period_s)
            if not self._leads():
                continue
            try:
                await self.report()
            except GazetteError as error:
                outage.failed(error)
            else:
                outage.ended()

    async def report(self) -> None:
        """Label the logs whose begin is not needed.

        Raises:
            ValidationError: hints are malformed, so that nothing is known to be unneeded.
            GazetteError: Etcd or a broker failed.
        """
        plan = PrunePlan.of(await self._hints())
        logs = await list_named(self._transport, sorted(plan.segments.keys() - plan.kept.keys()))
        for name, journal in sorted(logs.items()):
            needed = plan.needed_from(name)
            known = needed_from(journal.spec.labels)
            if needed is None or needed - known < max(journal.spec.fragment.length, 1):
                continue
            change = broker_pb2.ApplyRequest.Change(expect_mod_revision=journal.mod_revision)
            change.upsert.CopyFrom(journal.spec)
            set_value(change.upsert.labels, NEEDED_FROM, str(needed))
            try:
                await apply_journals(self._transport, broker_pb2.ApplyRequest(changes=[change]))
            except EtcdTransactionFailedError:
                continue  # it was changed meanwhile: with the next report
            _log.info("a recovery log is not needed before offset %d: %s", needed, name)


def overlaps(begin: int, end: int, segments: Sequence[Segment]) -> bool:
    """Return True if a fragment holds operations of a segment, or if there are no segments.

    Args:
        begin: offset of the fragment's first byte.
        end: offset after its last one; 0 if it is not known.
        segments: of its log; a last offset of 0 is not known.
    """
    if not segments:
        return True
    return any(
        (segment.first_offset < end or end == 0)
        and (segment.last_offset > begin or segment.last_offset == 0)
        for segment in segments
    )
