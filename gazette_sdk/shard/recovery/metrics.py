"""Metrics of recovery logs (operations section 3)."""

from __future__ import annotations

from prometheus_client import Counter

__all__ = ["RECOVERED_BYTES"]

RECOVERED_BYTES = Counter(
    "gazette_recoverylog_recovered_bytes", "Bytes of recovery logs that were played back."
)
