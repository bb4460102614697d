"""Event time on a real broker: a quiet source closes what waits, at its write head only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import Journals, JsonMessage, Publisher, Reader, mapping, shard

IDLE_S = 1.0


@dataclass
class Ride(JsonMessage):
    zone: str
    at: float


@dataclass
class Count(JsonMessage):
    zone: str
    second: int
    rides: int


BY_ZONE = mapping.modulo("topic=rides", key=attrgetter("zone"))
TO_COUNTS = mapping.direct("counts/part-000")


def counter():
    @shard.handler(
        message=Ride,
        store=shard.RocksStore[tuple[str, int], int],
        sources="topic=rides",
        name="seconds",
        event_time=attrgetter("at"),
        idle_s=IDLE_S,
        hot_standbys=0,
    )
    def seconds(txn, ride):
        key = ride.zone, int(ride.at)
        txn.store[key] = txn.store.get(key, 0) + 1
        txn.timers.set(key, at=key[1] + 1, clock="event")

    @seconds.timer
    def closed(txn, timer):
        txn.publish(Count(*timer.key, txn.store[timer.key]), mapping=TO_COUNTS)
        del txn.store[timer.key]

    return seconds


def counts(gazette):
    reader = Reader(Count, "topic=counts", block=False, transport=gazette.transport)
    return [each.message for each in reader]


def wait_for(gazette, count, timeout_s=30):
    ends_at = time.monotonic() + timeout_s
    while len(found := counts(gazette)) < count and time.monotonic() < ends_at:
        time.sleep(0.05)
    return sorted(found, key=attrgetter("second", "zone"))


def test_seconds_close_when_their_stream_is_quiet_and_not_while_a_transaction_is_open(gazette):
    journals = Journals(transport=gazette.transport)
    journals.create("rides", partitions=1, replication=1)
    journals.create("counts", partitions=1, replication=1)
    with (
        shard.EmbeddedConsumer(
            counter(), transport=gazette.transport, etcd=gazette.etcd_endpoint
        ) as consumer,
        Publisher(mapping=BY_ZONE, transport=gazette.transport) as publisher,
    ):
        began = time.time()
        publisher.publish_batch([Ride("a", began), Ride("a", began)]).result(timeout=10)
        assert wait_for(gazette, 1) == [Count("a", int(began), 2)]
        assert time.time() >= int(began) + 1 + IDLE_S, "no earlier than it was quiet"

        again = time.time()
        with publisher.transaction() as transaction:
            transaction.publish(Ride("b", again))
            publisher.publish(Ride("c", again)).result(timeout=10)
            time.sleep(3 * IDLE_S)
            assert len(counts(gazette)) == 1, "more of this time may come"
        consumer.wait_caught_up(timeout_s=30)
        rest = wait_for(gazette, 3)[1:]
        assert rest == [Count("b", int(again), 1), Count("c", int(again), 1)]
