"""Metrics of fragment stores, under the names of the broker's metrics (broker section 19)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

STORE_ACTIVE = Gauge("gazette_store_active", "Fragment stores which are open.")

STORE_OPERATIONS = Counter(
    "gazette_store_operation_total",
    "Operations of fragment stores.",
    ["store", "operation", "status"],
)

STORE_OPERATION_SECONDS = Histogram(
    "gazette_store_operation_duration_seconds",
    "Duration of operations of fragment stores.",
    ["store", "operation", "status"],
    buckets=[0.01 * 4**i for i in range(6)],
)

STORE_PUT_BYTES = Counter(
    "gazette_store_put_bytes_total",
    "Bytes put into fragment stores, as stored.",
    ["store", "encoding"],
)

STORE_LIST_ITEMS = Histogram(
    "gazette_store_list_items_count",
    "Objects found by one listing of a fragment store.",
    ["store"],
    buckets=[10 * 4**i for i in range(6)],
)

STORE_HEALTH_CHECKS = Counter(
    "gazette_store_health_check_total",
    "Health checks of fragment stores.",
    ["store", "status"],
)


def remove_store(url: str) -> None:
    """Remove the series of a store."""
    for metric in (
        STORE_OPERATIONS,
        STORE_OPERATION_SECONDS,
        STORE_PUT_BYTES,
        STORE_LIST_ITEMS,
        STORE_HEALTH_CHECKS,
    ):
        metric.remove_by_labels({"store": url})
