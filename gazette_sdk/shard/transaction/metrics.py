"""Metrics of a shard's transactions (operations section 3)."""

from __future__ import annotations

import time
from collections.abc import Mapping

from prometheus_client import Counter, Gauge

from gazette_sdk.shard.transaction.machine import Prior

__all__ = ["ShardMetrics"]

_TRANSACTIONS = Counter("gazette_shard_transactions", "Completed transactions.", ["shard"])
_MESSAGES = Counter("gazette_shard_read_messages", "Messages consumed.", ["shard"])
_BYTES = Counter(
    "gazette_shard_read_bytes", "Bytes of source journals that were read through.", ["shard"]
)
_READ_HEAD = Gauge("gazette_shard_read_head", "Next offset to read.", ["shard", "journal"])
_PHASE = Counter(
    "gazette_shard_phase_seconds",
    "Time of transactions by phase, in seconds.",
    ["shard", "phase", "type"],
)

_PRIOR_PHASES = {
    Prior.COMMITTING: "50-committing",
    Prior.ACKNOWLEDGING: "60-acknowledging",
}


class ShardMetrics:
    """Counters of one shard.

    Args:
        shard: full name of the shard.
    """

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._transactions = _TRANSACTIONS.labels(shard)
        self._messages = _MESSAGES.labels(shard)
        self._bytes = _BYTES.labels(shard)
        self._heads: dict[str, int] = {}
        self._phases = {
            phase: _PHASE.labels(shard, phase, "sync" if phase < "50" else "async")
            for phase in (
                "10-not-running",
                "20-consuming",
                "30-stalled",
                "40-preparing",
                *_PRIOR_PHASES.values(),
            )
        }
        self._prior_since = time.monotonic()

    def spent(self, phase: str, seconds: float) -> None:
        """Add the time of a phase, in seconds."""
        self._phases[phase].inc(max(0.0, seconds))

    def prior_changed(self, left: Prior, now: float) -> None:
        """Add the time of a phase of the prior transaction that has ended.

        Args:
            left: the phase; NONE for the time before a commit.
            now: monotonic seconds.
        """
        phase = _PRIOR_PHASES.get(left)
        if phase is not None:
            self.spent(phase, now - self._prior_since)
        self._prior_since = now

    def start(self, offsets: Mapping[str, int]) -> None:
        """Begin with the offsets of a checkpoint."""
        self._heads = dict(offsets)

    def completed(self, offsets: Mapping[str, int], message_count: int) -> None:
        """Count a completed transaction.

        Args:
            offsets: read-through offsets behind it, by journal.
            message_count: messages that it consumed.
        """
        self._transactions.inc()
        self._messages.inc(message_count)
        for journal, offset in offsets.items():
            self._bytes.inc(max(0, offset - self._heads.get(journal, offset)))
            self._heads[journal] = offset
            _READ_HEAD.labels(self._shard, journal).set(offset)
