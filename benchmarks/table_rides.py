"""Application of `tables.py`, in a module that its process can import."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import JsonMessage, shard

__all__ = ["Driver", "Ride", "rides"]


@dataclass
class Driver(JsonMessage):
    """A driver, of whom the table has the newest message."""

    driver: str
    car: str


@dataclass
class Ride(JsonMessage):
    """A ride, which is joined with its driver."""

    driver: str
    cents: int


drivers = shard.table("topic=drivers", key=attrgetter("driver"), message=Driver)


@shard.handler(
    message=Ride, sources="topic=rides", tables=[drivers], store=shard.RocksStore[str, int]
)
def rides(txn: shard.Transaction, ride: Ride) -> None:
    """Look up the driver of a ride."""
    if txn.table(drivers)[ride.driver].car == "unknown":
        txn.store[ride.driver] = ride.cents
