"""Metrics in Prometheus' text format, under the names that dashboards know.

Names and labels are a compatibility surface (broker section 19, operations section 3). Two habits
of the Python client library get in their way: it ends every counter's name in ``_total`` (some of
ours end otherwise), and adds a ``_created`` series to each. So the text is written here, from the
library's own registry.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

__all__ = ["CONTENT_TYPE", "GrpcMeters", "metrics_text"]

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
    """All metrics of this process in Prometheus' text format 0.0.4."""
    lines: list[str] = []
    for metric in registry.collect():
        lines += _lines(metric)
    return "\n".join([*lines, ""])


def _lines(metric: Metric) -> Iterator[str]:
    suffix = "_total" if metric.type == "counter" and metric.name not in _EXACT_COUNTERS else ""
    kind = {"unknown": "untyped", "info": "gauge", "stateset": "gauge"}.get(
        metric.type, metric.type
    )
    if metric.name in _EXACT_COUNTERS:  # whose collectors cannot call them counters
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
    """A bucket's bound as others write it: ``1``, where Python writes ``1.0``."""
    return bound.removesuffix(".0")


# ---------------------------------------------------------------------- gRPC

_RPC_LABELS = ("grpc_type", "grpc_service", "grpc_method")

_STARTED = Counter("grpc_server_started", "RPCs begun on the server.", _RPC_LABELS)
_HANDLED = Counter(
    "grpc_server_handled", "RPCs completed on the server.", (*_RPC_LABELS, "grpc_code")
)
_RECEIVED = Counter(
    "grpc_server_msg_received", "Messages received by RPCs on the server.", _RPC_LABELS
)
_SENT = Counter("grpc_server_msg_sent", "Messages sent by RPCs on the server.", _RPC_LABELS)
_HANDLING_SECONDS = Histogram(
    "grpc_server_handling_seconds",
    "Response latency of RPCs on the server.",
    _RPC_LABELS,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)


class GrpcMeters:
    """The ``grpc_server_…`` metrics of one method.

    Args:
        path: the method's path, ``/package.Service/Method``.
        client_streams: whether its requests are a stream.
        server_streams: whether its responses are a stream.
    """

    def __init__(self, path: str, client_streams: bool, server_streams: bool) -> None:  # noqa: FBT001 - as in Rpc
        _, service, method = path.split("/")
        kind = {
            (False, False): "unary",
            (True, False): "client_stream",
            (False, True): "server_stream",
            (True, True): "bidi_stream",
        }[client_streams, server_streams]
        self._labels = (kind, service, method)
        self.started = _STARTED.labels(*self._labels)
        self.received = _RECEIVED.labels(*self._labels)
        self.sent = _SENT.labels(*self._labels)
        self._seconds = _HANDLING_SECONDS.labels(*self._labels)
        self._handled: dict[str, Counter] = {}

    def handled(self, code: str, duration_s: float) -> None:
        """Count a call that ended, by the name of its status code (``DEADLINE_EXCEEDED``)."""
        counter = self._handled.get(code)
        if counter is None:
            counter = _HANDLED.labels(*self._labels, _code_label(code))
            self._handled[code] = counter
        counter.inc()
        self._seconds.observe(duration_s)


def _code_label(code: str) -> str:
    """A status code as the label ``grpc_code`` spells it: ``DeadlineExceeded``."""
    if code in {"OK", "CANCELLED"}:
        return {"OK": "OK", "CANCELLED": "Canceled"}[code]
    return code.title().replace("_", "")
