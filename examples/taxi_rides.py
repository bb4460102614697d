"""Rides of taxis: joined with the cars of their drivers, and counted by zone and minute.

Two applications, one after the other. Create the topics, and start processes of both:

    for topic in rides drivers enriched-rides zone-minutes late-rides; do
        gazctl journals create $topic --partitions 4
    done
    gazctl journals create bad-rides --partitions 0
    gazette run-consumer examples.taxi_rides:enrich
    gazette run-consumer examples.taxi_rides:count

Publish drivers before their rides. `TAXI_WINDOW_S` is the size of windows, by default a minute.
"""

import os
from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import JsonMessage, mapping, shard


@dataclass
class Ride(JsonMessage):
    number: int
    driver: str
    zone: str
    at: float  # Unix seconds
    cents: int


@dataclass
class Driver(JsonMessage):
    driver: str
    car: str


@dataclass
class EnrichedRide(JsonMessage):
    number: int
    zone: str
    at: float
    cents: int
    car: str


@dataclass
class ZoneMinute(JsonMessage):
    zone: str
    begin: float
    rides: int
    cents: int


@dataclass
class LateRide(JsonMessage):
    number: int
    zone: str
    begin: float  # of the minute, which is closed


# Rides and drivers are published by the same key, as tables need it.
to_rides = mapping.modulo("topic=rides", key=attrgetter("driver"))
to_drivers = mapping.modulo("topic=drivers", key=attrgetter("driver"))

by_zone = mapping.modulo("topic=enriched-rides", key=attrgetter("zone"))
to_minutes = mapping.modulo("topic=zone-minutes", key=attrgetter("zone"))
to_late = mapping.modulo("topic=late-rides", key=attrgetter("zone"))
bad_rides = shard.dead_letters("bad-rides")


# ------------------------------------------------ rides with the cars of their drivers

cars = shard.table("topic=drivers", key=attrgetter("driver"), message=Driver, bootstrap=True)


@shard.handler(
    message=Ride, sources="topic=rides", tables=[cars], store=shard.RocksStore, on_error=bad_rides
)
def enrich(txn: shard.Transaction, ride: Ride) -> None:
    if ride.cents < 0:
        raise ValueError("a ride costs nothing or more")  # it becomes a dead letter
    car = txn.table(cars)[ride.driver].car  # and so does the ride of an unknown driver
    txn.publish(EnrichedRide(ride.number, ride.zone, ride.at, ride.cents, car), mapping=by_zone)


# ------------------------------------------------------------ rides by zone and minute

SIZE_S = float(os.environ.get("TAXI_WINDOW_S", "60"))
per_minute = shard.windows.Tumbling(SIZE_S, grace_s=30, by=attrgetter("zone"), state=int)


@shard.handler(
    message=EnrichedRide,
    sources="topic=enriched-rides",
    store=shard.RocksStore[str, ZoneMinute],
    event_time=attrgetter("at"),
    lateness_s=5,
    windows=per_minute,
    on_error=bad_rides,
)
def count(txn: shard.Transaction, ride: EnrichedRide) -> None:
    for window in txn.windows(ride):
        window.state = (window.state or 0) + ride.cents


def minute_of(window: shard.Window[int]) -> ZoneMinute:
    return ZoneMinute(window.key, window.begin, window.count, window.state or 0)


@count.closed
def emit(txn: shard.Transaction, window: shard.Window[int]) -> None:
    minute = txn.store[window.key] = minute_of(window)
    txn.publish(minute, mapping=to_minutes)


@count.late
def late(txn: shard.Transaction, ride: EnrichedRide, window: shard.Window[int]) -> None:
    txn.publish(LateRide(ride.number, ride.zone, window.begin), mapping=to_late)


@count.get("/api/zones/{zone}", by=by_zone)
def zone_of(query: shard.Query, zone: str) -> object:
    minutes = [minute_of(window) for window in query.windows(zone)]
    return {"open": minutes, "last": query.store.get(zone)}
