"""Application that processes of a test run: rides joined with the newest car of their driver."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import Journals, JsonMessage, Reader, mapping, shard

RIDES, DRIVERS = "topic=rides", "topic=drivers"
PARTITIONS = 2


@dataclass
class Ride(JsonMessage):
    driver: str
    number: int


@dataclass
class Driver(JsonMessage):
    driver: str
    car: str


@dataclass
class Joined(JsonMessage):
    driver: str
    number: int
    car: str
    rides: int


TO_RIDES = mapping.modulo(RIDES, key=attrgetter("driver"))
TO_DRIVERS = mapping.modulo(DRIVERS, key=attrgetter("driver"))
TO_JOINED = mapping.direct("joined/part-000")


@shard.handler(
    message={RIDES: Ride, DRIVERS: Driver},
    sources=shard.partitions(RIDES, DRIVERS),
    store=shard.RocksStore[str, dict[str, str]],
    name="joined-rides",
)
def joined(txn: shard.Transaction, message: Ride | Driver) -> None:
    known = txn.store.get(message.driver, {"car": "", "rides": "0"})
    if txn.source == DRIVERS:
        assert isinstance(message, Driver)
        txn.store[message.driver] = {**known, "car": message.car}
        return
    assert isinstance(message, Ride)
    rides = int(known["rides"]) + 1
    txn.store[message.driver] = {**known, "rides": str(rides)}
    txn.publish(Joined(message.driver, message.number, known["car"], rides), mapping=TO_JOINED)


@joined.get("/drivers/{driver}", by=TO_DRIVERS)
def driver_of(query, driver):
    return query.store.get(driver, {})


CARS = shard.table(DRIVERS, key=attrgetter("driver"), message=Driver)


@shard.handler(
    message=Ride,
    sources=RIDES,
    tables=[CARS],
    store=shard.RocksStore[str, int],
    name="rides-by-table",
)
def by_table(txn: shard.Transaction, ride: Ride) -> None:
    rides = txn.store[ride.driver] = txn.store.get(ride.driver, 0) + 1
    car = txn.table(CARS)[ride.driver].car
    txn.publish(Joined(ride.driver, ride.number, car, rides), mapping=TO_JOINED)


@by_table.get("/cars/{driver}", by=TO_RIDES)
def car_of(query, driver):
    return {"car": query.table(CARS)[driver].car}


def create_journals(transport, *, rides=PARTITIONS, drivers=PARTITIONS):
    journals = Journals(transport=transport)
    for topic, partitions in [("rides", rides), ("drivers", drivers), ("joined", 1)]:
        journals.create(topic, partitions=partitions, replication=1)


def published(transport):
    """The joined rides, in their order."""
    reader = Reader(Joined, "topic=joined", block=False, transport=transport)
    return [each.message for each in reader]
