"""Application that processes of a test run: rides by zone, with event time; one zone is refused."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import JsonMessage, shard


@dataclass
class Ride(JsonMessage):
    zone: str
    at: float


@shard.handler(
    message=Ride,
    store=shard.JsonStore,
    sources="topic=rides",
    name="zones",
    event_time=attrgetter("at"),
    idle_s=None,
    hot_standbys=1,
)
def zones(txn, ride):
    if ride.zone == "bad":
        raise ValueError("this zone is refused")
    txn.store[ride.zone] = txn.store.get(ride.zone, 0) + 1
