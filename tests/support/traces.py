"""Traces of OpenTelemetry whose spans a test can look at."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from gazette_sdk import tracing


class Exporter(InMemorySpanExporter):
    """Spans that ended.

    Attributes:
        has_transaction: set by the span of a shard's transaction.
        tracer: of the test's own spans.
    """

    tracer: Tracer

    def __init__(self) -> None:
        super().__init__()
        self.has_transaction = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Keep spans."""
        result = super().export(spans)
        if any(span.name.startswith("transaction") for span in spans):
            self.has_transaction.set()
        return result


@contextmanager
def traced() -> Iterator[Exporter]:
    """Enable traces in a block, and return their spans."""
    exporter, provider = Exporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    exporter.tracer = provider.get_tracer("tests")
    tracing.enable(provider)
    try:
        yield exporter
    finally:
        tracing.disable()
