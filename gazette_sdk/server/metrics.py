"""Metrics in Prometheus' text format, under the names that existing dashboards use.

Names and labels must stay compatible (broker section 19, operations section 3). The Python client
library ends every counter's name in ``_total`` (some of ours end otherwise), and adds a
``_created`` series to each. So the text is written here, from the library's registry.

:func:`outcome_of` makes errors of services gRPC status codes, the same on every wire.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gazette_sdk.errors import CallError, GazetteError, StoreError
from gazette_sdk.meters import Buckets
from gazette_sdk.protocol.rules import CODE_NAMES
from gazette_sdk.user_code import described, text_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of :func:`metrics_text`."""

_EXACT_COUNTERS = frozenset(
    (
        "gazette_journal_server_started_totals",
        "gazette_journal_server_completed_totals",
        "gazette_sequencer_queued",
        "gazette_sequencer_replay",
    )
)
"""Counters whose names do not end in ``_total``."""


def metrics_text(registry: CollectorRegistry = REGISTRY) -> str:
    """Return all metrics of this process in Prometheus' text format 0.0.4."""
    lines: list[str] = []
    for metric in registry.collect():
        lines += _lines(metric)
    return "\n".join([*lines, ""])


SLICE_LINES = 500
"""Lines after which other tasks of the event loop run."""


async def sliced_metrics_text(registry: CollectorRegistry = REGISTRY) -> str:
    """Return the same text, made in slices of the event loop: each journal may have a line."""
    lines: list[str] = []
    for metric in registry.collect():
        for line in _lines(metric):
            lines.append(line)
            if len(lines) % SLICE_LINES == 0:
                await asyncio.sleep(0)
    return "\n".join([*lines, ""])


def _lines(metric: Metric) -> Iterator[str]:
    suffix = "_total" if metric.type == "counter" and metric.name not in _EXACT_COUNTERS else ""
    kind = {"unknown": "untyped", "info": "gauge", "stateset": "gauge"}.get(
        metric.type, metric.type
    )
    if metric.name in _EXACT_COUNTERS:  # the library refuses them as counters
        kind = "counter"
    name = metric.name + {"info": "_info"}.get(metric.type, suffix)
    help_text = metric.documentation.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
    for sample in metric.samples:
        if sample.name == metric.name + "_created":
            continue
        shown = name if metric.type == "counter" else sample.name
        labels = ",".join(
            f'{label}="{_escaped(_number(text) if label == "le" else text)}"'
            for label, text in sample.labels.items()
        )
        value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
        yield f"{shown}{{{labels}}} {value}" if labels else f"{shown} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(bound: str) -> str:
    """Return a bucket's bound in the usual form: ``1`` for Python's ``1.0``."""
    return bound.removesuffix(".0")


# ---------------------------------------------------------------------- gRPC

_RPC_LABELS = ("grpc_type", "grpc_service", "grpc_method")


class GrpcMeters:
    """``grpc_server_…`` metrics of one method, on every wire.

    They are plain numbers which a collector reads on demand: a counter of Prometheus' client takes
    a lock, and a call counts several times. Only the event loop changes them. There is one object
    per method and process, see :func:`meters_of`.

    Args:
        path: the method's path, ``/package.Service/Method``.
        client_streams: True if its requests are a stream.
        server_streams: True if its responses are a stream.

    Attributes:
        started: calls begun.
        received: messages received.
        sent: messages sent.
        seconds: durations of calls.
    """

    __slots__ = ("_handled", "labels", "received", "seconds", "sent", "started")

    def __init__(self, path: str, client_streams: bool, server_streams: bool) -> None:  # noqa: FBT001 - as in Rpc
        _, service, method = path.split("/")
        kind = {
            (False, False): "unary",
            (True, False): "client_stream",
            (False, True): "server_stream",
            (True, True): "bidi_stream",
        }[client_streams, server_streams]
        self.labels = (kind, service, method)
        self.started = 0
        self.received = 0
        self.sent = 0
        self._handled: defaultdict[str, int] = defaultdict(int)
        self.seconds = Buckets()

    def handled(self, code: str, duration_s: float) -> None:
        """Count a call that ended, by the name of its status code (``DEADLINE_EXCEEDED``)."""
        self._handled[code] += 1
        seconds = self.seconds  # as its observe(), without another call
        seconds.counts[bisect_left(seconds.bounds, duration_s)] += 1
        seconds.sum += duration_s

    def codes(self) -> list[tuple[str, int]]:
        """Return the number of calls that ended with each code, by its label."""
        return [(_code_label(code), count) for code, count in self._handled.items()]

    def latencies(self) -> tuple[list[tuple[str, float]], float]:
        """Return the number of calls up to each bound of seconds, and the sum of their seconds."""
        return self.seconds.exposed()


_METERS: dict[str, GrpcMeters] = {}


def meters_of(path: str, client_streams: bool, server_streams: bool) -> GrpcMeters:  # noqa: FBT001 - as in Rpc
    """Return the metrics of a method; arguments are those of :class:`GrpcMeters`."""
    if path not in _METERS:
        _METERS[path] = GrpcMeters(path, client_streams, server_streams)
    return _METERS[path]


class _GrpcCollector(Collector):
    """Collector of the numbers of all methods."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        methods = list(_METERS.values())
        for name, documentation, attribute in (
            ("grpc_server_started", "RPCs begun on the server.", "started"),
            ("grpc_server_msg_received", "Messages received by RPCs on the server.", "received"),
            ("grpc_server_msg_sent", "Messages sent by RPCs on the server.", "sent"),
        ):
            counter = CounterMetricFamily(name, documentation, labels=_RPC_LABELS)
            for meters in methods:
                counter.add_metric(meters.labels, getattr(meters, attribute))
            yield counter
        handled = CounterMetricFamily(
            "grpc_server_handled",
            "RPCs completed on the server.",
            labels=(*_RPC_LABELS, "grpc_code"),
        )
        seconds = HistogramMetricFamily(
            "grpc_server_handling_seconds",
            "Response latency of RPCs on the server.",
            labels=_RPC_LABELS,
        )
        for meters in methods:
            for code, count in meters.codes():
                handled.add_metric((*meters.labels, code), count)
            buckets, total = meters.latencies()
            seconds.add_metric(meters.labels, buckets, total)
        yield handled
        yield seconds


REGISTRY.register(_GrpcCollector())


def _code_label(code: str) -> str:
    """Return the label ``grpc_code`` of a status code, such as ``DeadlineExceeded``."""
    if code in {"OK", "CANCELLED"}:
        return {"OK": "OK", "CANCELLED": "Canceled"}[code]
    return code.title().replace("_", "")


_log = logging.getLogger(__name__)

MAX_DETAILS = 2048
"""Greatest length of an error's text: gRPC sends it as a trailer, whose size is bounded."""

CODES = {name: number for number, name in enumerate(CODE_NAMES)}
"""Numbers of gRPC's status codes."""


class CallStatus(NamedTuple):
    """Status of a call that has ended.

    Attributes:
        code: name of a gRPC status code.
        text: the reason of a failure.
        kind: name of the error's class, where the client needs it: that of a store's error.
    """

    code: str
    text: str = ""
    kind: str = ""

    @property
    def number(self) -> int:
        """The code's number."""
        return CODES[self.code]


SUCCESS = CallStatus("OK")


def outcome_of(error: Exception, path: str) -> CallStatus:
    """Return the outcome of a call that raised, and log it.

    A :class:`CallError` keeps its code. Every other error, also a bug, is UNKNOWN.

    Args:
        error: what the service raised.
        path: of the method.
    """
    if not isinstance(error, GazetteError):
        _log.error("call failed unexpectedly", extra={"method": path}, exc_info=error)
        return CallStatus("UNKNOWN", described(error)[:MAX_DETAILS])
    code, text = "UNKNOWN", text_of(error)
    if isinstance(error, CallError) and CODES.get(error.code):
        code = error.code
    _log.debug("call failed", extra={"method": path, "err": text})
    kind = type(error).__name__ if isinstance(error, StoreError) else ""
    return CallStatus(code, text[:MAX_DETAILS], kind)


def malformed(path: str) -> CallError:
    """Return the error of bytes that are no request."""
    return CallError(f"bytes received are no request of {path}", code="INTERNAL")
