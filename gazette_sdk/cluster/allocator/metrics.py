"""Metrics of the allocator (allocator section 12)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

__all__ = [
    "ASSIGNMENT_ADDED",
    "ASSIGNMENT_PACKED",
    "ASSIGNMENT_REMOVED",
    "CONVERGE",
    "DESIRED_REPLICATION_SLOTS",
    "ITEMS",
    "MAX_FLOW_RUNTIME_SECONDS",
    "MEMBERS",
]

ASSIGNMENT_ADDED = Counter(
    "gazette_allocator_assignment_added_total",
    "Assignments that a round wanted to add, whether or not its transaction succeeded.",
)
ASSIGNMENT_REMOVED = Counter(
    "gazette_allocator_assignment_removed_total",
    "Assignments that a round wanted to remove, whether or not its transaction succeeded.",
)
ASSIGNMENT_PACKED = Counter(
    "gazette_allocator_assignment_packed_total",
    "Assignments that a round wanted to give another slot, promotions included.",
)
CONVERGE = Counter("gazette_allocator_converge_total", "Rounds that succeeded.")
MAX_FLOW_RUNTIME_SECONDS = Histogram(
    "gazette_allocator_max_flow_runtime_seconds",
    "Time it took to solve for assignments.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
ITEMS = Gauge("gazette_allocator_items", "Items, as last seen by this process as the leader.")
MEMBERS = Gauge("gazette_allocator_members", "Members, as last seen by this process as the leader.")
DESIRED_REPLICATION_SLOTS = Gauge(
    "gazette_allocator_desired_replication_slots",
    "Assignments that all items want, as last seen by this process as the leader.",
)
