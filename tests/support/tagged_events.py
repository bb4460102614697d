"""Application that processes of a test run: events of two classes in one topic, numbered."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from gazette_sdk import Journals, Reader, mapping, shard


class Ride(msgspec.Struct, tag=True):
    driver: str
    number: int


class Driver(msgspec.Struct, tag=True):
    driver: str
    car: str


class Seen(msgspec.Struct, tag=True):
    driver: str
    event: Ride | Driver
    count: int


class Milestone(msgspec.Struct, tag=True):
    driver: str
    count: int


TO_EVENTS = mapping.modulo("topic=events", key=attrgetter("driver"))
TO_SEEN = mapping.direct("seen/part-000")


@shard.handler(
    message=Ride | Driver,
    sources="topic=events",
    store=shard.RocksStore[str, int],
    name="tagged-events",
)
def events(txn: shard.Transaction, event: Ride | Driver) -> None:
    count = txn.store[event.driver] = txn.store.get(event.driver, 0) + 1
    txn.publish(Seen(event.driver, event, count), mapping=TO_SEEN)
    if count % 10 == 0:
        txn.publish(Milestone(event.driver, count), mapping=TO_SEEN)


def create_journals(transport):
    journals = Journals(transport=transport)
    journals.create("events", partitions=2, replication=1)
    journals.create("seen", partitions=1, replication=1)


def seen(transport):
    """Return the messages that the application has published, in its order."""
    reader = Reader(Seen | Milestone, "topic=seen", block=False, transport=transport)
    return [each.message for each in reader]
