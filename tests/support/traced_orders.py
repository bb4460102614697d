"""Application that processes of a test run, whose spans are written to a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from gazette_sdk import JsonMessage, shard, tracing

SPANS_FILE = "SPANS_FILE"
"""Name of the environment variable that names the file; without it nothing is traced."""


@dataclass
class Order(JsonMessage):
    number: int


if path := os.environ.get(SPANS_FILE):
    # Line by line, so that a process that is killed has written all spans that ended.
    exporter = ConsoleSpanExporter(
        out=Path(path).open("a", buffering=1),  # noqa: SIM115 - while the process runs
        formatter=lambda span: span.to_json(None) + "\n",
    )
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.enable(provider)


@shard.handler(
    message=Order, sources=["orders/part-000"], store=shard.RocksStore[str, int], hot_standbys=0
)
def count_orders(txn, order):
    txn.store[str(order.number)] = txn.store.get(str(order.number), 0) + 1
