"""Pruning of recovery logs: which fragments no hints need any more (recovery log 8). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.hints import Segment, flatten


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
