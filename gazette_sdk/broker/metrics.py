"""Metrics of the broker (broker section 19); those of stores and of the allocator stand there.

Prometheus' client appends ``_total`` to the name of every counter. Two names of the broker's end
in ``_totals`` instead, so these are kept by a collector of our own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = [
    "SERVER_COMPLETED",
    "SERVER_STARTED",
    "SPOOLS_COMPLETED",
    "SPOOLS_PERSISTED",
    "SPOOL_COMMITS",
    "SPOOL_COMMIT_BYTES",
    "SPOOL_ROLLBACKS",
    "SPOOL_ROLLBACK_BYTES",
    "WRITE_HEAD",
    "PlainCounter",
]


class PlainCounter(Collector):
    """A counter that is exposed under exactly its name.

    Args:
        name: as exposed.
        documentation: one line.
        label_names: names of its labels.
        registry: where it is registered.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        label_names: tuple[str, ...],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label_names = label_names
        self._values: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()
        registry.register(self)

    def inc(self, *labels: str, by: float = 1) -> None:
        """Count ``by`` more, for the values of its labels."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + by

    def value(self, *labels: str) -> float:
        """What was counted for the values of its labels."""
        return self._values.get(labels, 0)

    def collect(self) -> Iterable[Metric]:
        """For the registry. The type is left open, since a counter's name would be changed."""
        metric = Metric(self._name, self._documentation, "unknown")
        with self._lock:
            for labels, value in self._values.items():
                given = dict(zip(self._label_names, labels, strict=True))
                metric.add_sample(self._name, given, value)
        return [metric]


SERVER_STARTED = PlainCounter(
    "gazette_journal_server_started_totals", "Calls started.", ("operation",)
)
SERVER_COMPLETED = PlainCounter(
    "gazette_journal_server_completed_totals",
    "Calls completed; status is ok, <error>, or the name of a status.",
    ("operation", "status"),
)
WRITE_HEAD = Gauge("gazette_write_head", "Offset of the next byte to be appended.", ["journal"])

SPOOL_COMMITS = Counter("gazette_spool_commits", "Commits to spools.")
SPOOL_COMMIT_BYTES = Counter("gazette_spool_commit_bytes", "Bytes committed to spools.")
SPOOL_ROLLBACKS = Counter("gazette_spool_rollbacks", "Rollbacks of spools with content.")
SPOOL_ROLLBACK_BYTES = Counter("gazette_spool_rollback_bytes", "Bytes rolled back in spools.")
SPOOLS_COMPLETED = Counter("gazette_spool_completed", "Spools closed with content.")
SPOOLS_PERSISTED = Counter(
    "gazette_spool_persisted", "Spools uploaded, found in their store, or dropped."
)
