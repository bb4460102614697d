"""Application of `timers.py`, in a module that its process can import."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gazette_sdk import JsonMessage, shard

__all__ = ["Alarm", "alarms"]


@dataclass
class Alarm(JsonMessage):
    """An alarm: a timer is set for it. How late it fires is kept, if it is measured."""

    name: str
    at: float
    is_measured: bool = False


@shard.handler(
    message=Alarm, store=shard.RocksStore[str, float], sources="topic=alarms", hot_standbys=0
)
def alarms(txn: shard.Transaction, alarm: Alarm) -> None:
    """Set a timer."""
    txn.timers.set((alarm.name, int(alarm.is_measured)), at=alarm.at)


@alarms.timer
def fired(txn: shard.Transaction, timer: shard.Timer) -> None:
    """Keep how late a timer fires."""
    name, is_measured = timer.key
    if is_measured:
        txn.store[name] = time.time() - timer.at


@alarms.get("/late")
def late(query: shard.Query) -> dict[str, float]:
    """Return how late each measured timer fired, in seconds."""
    return dict(query.store.items())
