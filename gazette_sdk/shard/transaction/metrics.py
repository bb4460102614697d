"""Metrics of a shard's transactions (operations section 3).

Names that Gazette deprecates, `gazette_consumer_*`, are sums over the shards of the process, made
of the current metrics when these are read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gazette_sdk.shard.transaction.consume import Counts
from gazette_sdk.shard.transaction.machine import Current, Prior

_TRANSACTIONS = Counter("gazette_shard_transactions", "Completed transactions.", ["shard"])
_MESSAGES = Counter("gazette_shard_read_messages", "Messages consumed.", ["shard"])
_TIMERS = Counter("gazette_shard_fired_timers", "Timers fired.", ["shard"])
_SKIPPED = Counter("gazette_shard_skipped", "Records that were left out.", ["shard"])
_DEAD_LETTERS = Counter("gazette_shard_dead_letters", "Dead letters published.", ["shard"])
_LATE = Counter(
    "gazette_shard_late", "Messages that were late for a window, for each window.", ["shard"]
)
_BYTES = Counter(
    "gazette_shard_read_bytes", "Bytes of source journals that were read through.", ["shard"]
)
_READ_HEAD = Gauge("gazette_shard_read_head", "Next offset to read.", ["shard", "journal"])
_READ_LAG = Gauge(
    "gazette_shard_read_lag_bytes",
    "Bytes between the write head, as the last answer of a broker has it, and what is read through"
    " by completed transactions.",
    ["shard", "journal"],
)
_UNREAD = Gauge(
    "gazette_shard_unread_bytes",
    "Content of a source journal that no shard reads, because of an error that the list of shards"
    " shows; in the process that creates shards.",
    ["journal"],
)
_RECORDED = Counter(
    "gazette_shard_recorded_bytes", "Bytes of appends to the recovery log.", ["shard"]
)
_PHASE = Counter(
    "gazette_shard_phase_seconds",
    "Time of transactions by phase, in seconds.",
    ["shard", "phase", "type"],
)

_WAIT_PHASES = {
    Current.EMPTY: "10-not-running",
    Current.OPEN: "20-consuming",
    Current.CLOSED: "30-stalled",
}
_PRIOR_PHASES = {
    Prior.COMMITTING: "50-committing",
    Prior.ACKNOWLEDGING: "60-acknowledging",
}

_DEPRECATED_COUNTS = {
    "tx_count": _TRANSACTIONS,
    "tx_messages": _MESSAGES,
    "consumed_bytes": _BYTES,
}
_DEPRECATED_SECONDS = {
    "tx_seconds": "23456",  # all but the time without a transaction
    "tx_consume_seconds": "2",
    "tx_stalled_seconds": "3",
    "tx_flush_seconds": "4",
    "tx_sync_seconds": "56",
}
"""First digits of the phases that each sums."""


class _DeprecatedMetrics(Collector):
    """Collector of the metrics that Gazette deprecates, for dashboards that use them."""

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the metrics."""
        for name, counter in _DEPRECATED_COUNTS.items():
            yield _deprecated_total(name, counter)
        for name, phases in _DEPRECATED_SECONDS.items():
            yield _deprecated_total(name, _PHASE, phases)
        heads: dict[str, float] = {}
        for sample in _samples(_READ_HEAD):
            journal = sample.labels["journal"]
            heads[journal] = max(sample.value, heads.get(journal, 0.0))
        head = GaugeMetricFamily(
            "gazette_consumer_read_head",
            "Deprecated: the greatest gazette_shard_read_head of a journal.",
            labels=["journal"],
        )
        for journal, offset in heads.items():
            head.add_metric([journal], offset)
        yield head


def _deprecated_total(name: str, counter: Counter, phases: str = "") -> CounterMetricFamily:
    """Return the sum of a counter over all shards, and over phases by their first digits."""
    values = [
        sample.value
        for sample in _samples(counter)
        if sample.name.endswith("_total") and sample.labels.get("phase", "")[:1] in phases
    ]
    (current,) = counter.describe()
    text = f"Deprecated: {current.name}_total, summed."
    return CounterMetricFamily(f"gazette_consumer_{name}", text, value=sum(values))


def _samples(metric: Counter | Gauge) -> Iterator[Sample]:
    for family in metric.collect():
        yield from family.samples


REGISTRY.register(_DeprecatedMetrics())

_newest: dict[str, ShardMetrics] = {}
"""By shard, the run that began last: one that ends late must not remove its gauges."""


class ShardMetrics:
    """Metrics of one primary run of a shard.

    Args:
        shard: full name of the shard.
        lag_bytes: returns the bytes of a source journal that are not read through.
    """

    def __init__(self, shard: str, lag_bytes: Callable[[str], int]) -> None:
        self._shard = shard
        self._lag_bytes = lag_bytes
        self._transactions = _TRANSACTIONS.labels(shard)
        self._counters = [
            each.labels(shard) for each in (_MESSAGES, _TIMERS, _SKIPPED, _DEAD_LETTERS, _LATE)
        ]
        self._bytes = _BYTES.labels(shard)
        self._recorded = _RECORDED.labels(shard)
        self._heads: dict[str, int] = {}
        self._phases = {
            phase: _PHASE.labels(shard, phase, "sync" if phase < "50" else "async")
            for phase in (*_WAIT_PHASES.values(), "40-preparing", *_PRIOR_PHASES.values())
        }
        self._prior_since = time.monotonic()

    def turned(self, spent_s: float, preparing_s: float) -> None:
        """Add the time of a turn of the worker.

        Args:
            spent_s: its duration, in seconds.
            preparing_s: the part in which it prepared a commit.
        """
        self._spent("20-consuming", spent_s - preparing_s)
        self._spent("40-preparing", preparing_s)

    def waited(self, current: Current, spent_s: float) -> None:
        """Add the time of a wait.

        Args:
            current: state of the current transaction meanwhile.
            spent_s: duration of the wait, in seconds.
        """
        self._spent(_WAIT_PHASES[current], spent_s)

    def prior_changed(self, left: Prior, now: float) -> None:
        """Add the time of a phase of the prior transaction that has ended.

        Args:
            left: the phase; NONE for the time before a commit.
            now: monotonic seconds.
        """
        phase = _PRIOR_PHASES.get(left)
        if phase is not None:
            self._spent(phase, now - self._prior_since)
        self._prior_since = now

    def start(self, offsets: Mapping[str, int]) -> None:
        """Begin with the offsets of a checkpoint, by source journal."""
        _newest[self._shard] = self
        self._heads = dict(offsets)
        for journal, offset in offsets.items():
            _READ_HEAD.labels(self._shard, journal).set(offset)
            _READ_LAG.labels(self._shard, journal).set_function(partial(self._lag_bytes, journal))

    def recorded(self, length_bytes: int) -> None:
        """Count bytes that are appended to the recovery log."""
        self._recorded.inc(length_bytes)

    def completed(self, offsets: Mapping[str, int], counts: Counts) -> None:
        """Count a completed transaction.

        Args:
            offsets: read-through offsets after it, by journal.
            counts: numbers of what it consumed.
        """
        self._transactions.inc()
        for counter, count in zip(self._counters, counts, strict=True):
            counter.inc(count)
        for journal, offset in offsets.items():
            self._bytes.inc(max(0, offset - self._heads.get(journal, offset)))
            self._heads[journal] = offset
            _READ_HEAD.labels(self._shard, journal).set(offset)

    def end(self) -> None:
        """Remove the gauges: another process may have the shard now. Counters stay."""
        if _newest.get(self._shard) is not self:
            return
        del _newest[self._shard]
        for journal in self._heads:
            for gauge in (_READ_HEAD, _READ_LAG):
                with contextlib.suppress(KeyError):
                    gauge.remove(self._shard, journal)
        self._heads = {}

    def _spent(self, phase: str, seconds: float) -> None:
        self._phases[phase].inc(max(0.0, seconds))


class UnreadMetric:
    """Metric of the source journals that no shard reads."""

    def __init__(self) -> None:
        self._journals: frozenset[str] = frozenset()

    def note(self, heads: Mapping[str, int]) -> None:
        """Set the write heads of the journals, and remove those of others."""
        for journal in self._journals - heads.keys():
            with contextlib.suppress(KeyError):
                _UNREAD.remove(journal)
        for journal, head in heads.items():
            _UNREAD.labels(journal).set(head)
        self._journals = frozenset(heads)
