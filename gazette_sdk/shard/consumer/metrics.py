"""Metrics of a consumer process (operations section 3)."""

from __future__ import annotations

from collections import Counter

from prometheus_client import Gauge

from gazette_sdk.protocol import consumer_pb2 as cpb

__all__ = ["ShardUp"]

_UP = Gauge(
    "gazette_shard_up", "Shards of this process by status; 1 for each.", ["shard", "status"]
)

_shown: Counter[tuple[str, str]] = Counter()
"""Shards that show a series: one that ends late may share it with its successor."""


class ShardUp:
    """Status of one shard as a metric: there is one series while the shard is local.

    Args:
        shard: its id.
    """

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._status = ""

    def set(self, code: cpb.ReplicaStatus.Code) -> None:
        """Show a status in place of the one before."""
        self.remove()
        self._status = cpb.ReplicaStatus.Code.Name(code)
        _shown[self._shard, self._status] += 1
        _UP.labels(self._shard, self._status).set(1)

    def remove(self) -> None:
        """Show none any more."""
        if self._status:
            series, self._status = (self._shard, self._status), ""
            _shown[series] -= 1
            if not _shown[series]:
                del _shown[series]
                _UP.remove(*series)
