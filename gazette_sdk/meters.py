"""Metrics as plain numbers, which collectors read when they are scraped.

A counter of Prometheus' client takes a lock and costs as much as a write to the page cache. These
are numbers that one thread changes. Values that cost something to find are read at a scrape: a
:class:`ReadMetric` calls what running servers have added to it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from math import inf

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds of the buckets of latencies, in seconds: those of Prometheus' clients."""


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
        kind: type of the metric. A counter whose name does not end in ``_total`` has none: the
            library changes the name of a counter.

    Attributes:
        is_hidden: True if no number of it is exposed.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        label_names: tuple[str, ...],
        registry: CollectorRegistry = REGISTRY,
        kind: str = "unknown",
    ) -> None:
        self.is_hidden = False
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
        name = self._name.removesuffix("_total") if self._kind == "counter" else self._name
        metric = Metric(name, self._documentation, self._kind)
        if self._cells and not self.is_hidden:
            metric.samples = _CellSamples(self._name, self._label_names, self._cells)  # type: ignore[assignment]
        return [metric]


class _CellSamples:
    """Samples of a metric, each made when it is taken: there may be one for each journal.

    Args:
        name: name of the metric.
        label_names: names of its labels.
        cells: its numbers, which are copied.
    """

    def __init__(
        self, name: str, label_names: tuple[str, ...], cells: Mapping[tuple[str, ...], Cell]
    ) -> None:
        self._name = name
        self._label_names = label_names
        self._cells = list(cells.items())

    def __iter__(self) -> Iterator[Sample]:
        for labels, cell in self._cells:
            yield Sample(self._name, dict(zip(self._label_names, labels, strict=True)), cell.value)


class Buckets:
    """Numbers of a histogram for values of its labels. Only one thread at a time changes them.

    Args:
        bounds: upper bounds of the buckets, ascending.

    Attributes:
        bounds: as given.
        counts: number of values of each bucket by itself, unlike those exposed.
        sum: sum of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: Buckets) -> None:
        """Count all values of another one with the same bounds."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def exposed(self) -> tuple[list[tuple[str, float]], float]:
        """Return the number of values up to each bound, and the sum of all values."""
        bounds = [floatToGoString(bound) for bound in (*self.bounds, inf)]  # type: ignore[no-untyped-call]
        return list(zip(bounds, accumulate(self.counts), strict=True)), self.sum


class PlainHistogram(Collector):
    """Histogram with one label at most. Only the event loop changes it.

    Args:
        name: as exposed.
        documentation: one line.
        label: name of its label; empty for none.
        bounds: upper bounds of the buckets.
        registry: registry to add it to.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        label: str = "",
        *,
        bounds: tuple[float, ...] = LATENCY_BOUNDS_S,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label = label
        self._bounds = bounds
        self._buckets: dict[str, list[Buckets]] = {}
        registry.register(self)

    def buckets(self, value: str = "") -> Buckets:
        """Return the numbers for a value of the label."""
        return self._buckets.setdefault(value, [Buckets(self._bounds)])[0]

    def include(self, value: str, counted: Buckets) -> None:
        """Add, when it is exposed, what is counted elsewhere for a value of the label."""
        self.buckets(value)
        self._buckets[value].append(counted)

    def collect(self) -> Iterable[Metric]:
        """Return the metric."""
        labels = [self._label] if self._label else []
        metric = HistogramMetricFamily(self._name, self._documentation, labels=labels)
        for value, parts in list(self._buckets.items()):
            all_parts = Buckets(self._bounds)
            for part in parts:
                all_parts.add(part)
            metric.add_metric([value] if labels else [], *all_parts.exposed())
        return [metric]


Reading = Mapping[tuple[str, ...], float]
"""Numbers of a metric by the values of its labels."""


class ReadMetric(Collector):
    """Metric that is read from the running servers of this process at each scrape.

    Numbers with the same labels, of several servers in one process, become one.

    Args:
        name: as exposed.
        documentation: one line.
        label_names: names of its labels.
        kind: type of the metric, ``gauge`` or ``counter``; a counter's name ends in ``_total``.
        combine: makes one number of several.
        registry: registry to add it to.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        label_names: tuple[str, ...] = (),
        *,
        kind: str = "gauge",
        combine: Callable[[Iterable[float]], float] = sum,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label_names = label_names
        self._kind = kind
        self._combine = combine
        self._sources: dict[object, Callable[[], Reading]] = {}
        registry.register(self)

    def add(self, read: Callable[[], Reading]) -> Callable[[], None]:
        """Read numbers by a function from now on. Return a function that ends that.

        Args:
            read: returns numbers, and does no I/O. An empty key is that of a metric without labels.
        """
        key = object()
        self._sources[key] = read

        def remove() -> None:
            self._sources.pop(key, None)

        return remove

    def collect(self) -> Iterable[Metric]:
        """Return the metric."""
        found: dict[tuple[str, ...], list[float]] = {}
        for read in list(self._sources.values()):
            for labels, value in read().items():
                found.setdefault(labels, []).append(value)
        name = self._name.removesuffix("_total") if self._kind == "counter" else self._name
        metric = Metric(name, self._documentation, self._kind)
        for labels, values in found.items():
            given = dict(zip(self._label_names, labels, strict=True))
            metric.add_sample(self._name, given, self._combine(values))
        return [metric]
