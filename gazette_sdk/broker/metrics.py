"""Metrics of the broker (broker section 19), without those of stores and of the allocator.

The metrics of appends are plain numbers, which collectors read on demand: a counter of
Prometheus' client takes a lock and costs as much as a write to the page cache.

Prometheus' client appends ``_total`` to the name of every counter. Two of the broker's names end
in ``_totals`` instead, so these have a collector of our own.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally(Collector):
    """Counter without labels as a plain number. Only the event loop changes it.

    Args:
        name: as exposed, without its ``_total``.
        documentation: one line.
        registry: registry to add it to.

    Attributes:
        value: the count.
    """

    def __init__(
        self, name: str, documentation: str, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self.value = 0
        self._name = name
        self._documentation = documentation
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Return the metric."""
        return [CounterMetricFamily(self._name, self._documentation, value=self.value)]


class CarriedBytes:
    """Bytes that one broker carried for clients since it started. Only the event loop changes it.

    Attributes:
        appended: bytes of appends to journals that it leads.
        read: bytes of reads that it served.
    """

    __slots__ = ("appended", "read")

    def __init__(self) -> None:
        self.appended = 0
        self.read = 0


class Cell:
    """Number of a metric for values of its labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class PlainMetric(Collector):
    """Metric with labels, exposed under exactly its name. Only the event loop changes it.

    Args:
        name: as exposed.
        documentation: one line.
        label_names: names of its labels.
        registry: registry to add it to.
        kind: type of the metric. A counter has none: the library changes the name of a counter.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        label_names: tuple[str, ...],
        registry: CollectorRegistry = REGISTRY,
        kind: str = "unknown",
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._kind = kind
        self._label_names = label_names
        self._cells: dict[tuple[str, ...], Cell] = {}
        registry.register(self)

    def cell(self, *labels: str) -> Cell:
        """Return the number for values of its labels, for callers that count often."""
        found = self._cells.get(labels)
        if found is None:
            found = self._cells[labels] = Cell()
        return found

    def inc(self, *labels: str, by: float = 1) -> None:
        """Add ``by`` for values of its labels."""
        self.cell(*labels).value += by

    def remove(self, *labels: str) -> None:
        """Expose the number for values of its labels no more."""
        self._cells.pop(labels, None)

    def value(self, *labels: str) -> float:
        """Return the number for values of its labels; 0 if there is none."""
        found = self._cells.get(labels)
        return 0 if found is None else found.value

    def collect(self) -> Iterable[Metric]:
        """Return the metric."""
        metric = Metric(self._name, self._documentation, self._kind)
        for labels, cell in list(self._cells.items()):
            given = dict(zip(self._label_names, labels, strict=True))
            metric.add_sample(self._name, given, cell.value)
        return [metric]


SERVER_STARTED = PlainMetric(
    "gazette_journal_server_started_totals", "Calls started.", ("operation",)
)
SERVER_COMPLETED = PlainMetric(
    "gazette_journal_server_completed_totals",
    "Calls completed; status is ok, <error>, or the name of a status.",
    ("operation", "status"),
)
WRITE_HEAD = PlainMetric(
    "gazette_write_head", "Offset of the next byte to be appended.", ("journal",), kind="gauge"
)

UNSTORED_MISSING = PlainMetric(
    "gazette_unstored_missing_bytes",
    "Bytes of a journal in no store which this replica lacks; +Inf until others have reported it.",
    ("journal",),
    kind="gauge",
)

SPOOL_COMMITS = Tally("gazette_spool_commits", "Commits to spools.")
SPOOL_COMMIT_BYTES = Tally("gazette_spool_commit_bytes", "Bytes committed to spools.")
SPOOL_ROLLBACKS = Tally("gazette_spool_rollbacks", "Rollbacks of spools with content.")
SPOOL_ROLLBACK_BYTES = Tally("gazette_spool_rollback_bytes", "Bytes rolled back in spools.")
SPOOLS_COMPLETED = Tally("gazette_spool_completed", "Spools to be uploaded, or dropped.")
RETENTION_FRAGMENTS = Tally(
    "gazette_retention_removed_fragments", "Stored fragments removed since they were too old."
)
RETENTION_BYTES = Tally(
    "gazette_retention_removed_bytes", "Bytes of journals removed since they were too old."
)
SPOOLS_PERSISTED = Counter(
    "gazette_spool_persisted", "Spools uploaded, found in their store, or dropped."
)
