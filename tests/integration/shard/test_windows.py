"""Windows on a real broker: read by queries while they are open, closed on a quiet stream."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import Journals, JsonMessage, Publisher, Reader, mapping, shard

IDLE_S = 1.5


@dataclass
class Ride(JsonMessage):
    zone: str
    at: float
    cents: int


@dataclass
class Count(JsonMessage):
    zone: str
    rides: int
    cents: int


BY_ZONE = mapping.modulo("topic=rides", key=attrgetter("zone"))
TO_COUNTS = mapping.direct("counts/part-000")


def counter():
    @shard.handler(
        message=Ride,
        store=shard.RocksStore,
        sources="topic=rides",
        name="hours",
        event_time=attrgetter("at"),
        windows=shard.windows.Session(1, by=attrgetter("zone"), state=int),
        idle_s=IDLE_S,
        hot_standbys=0,
    )
    def hours(txn, ride):
        for window in txn.windows(ride):
            window.state = (window.state or 0) + ride.cents

    @hours.closed
    def closed(txn, window):
        txn.publish(Count(window.key, window.count, window.state), mapping=TO_COUNTS)

    @hours.get("/zones/{zone}", by=BY_ZONE)
    def zone(query, zone):
        return [[each.count, each.state] for each in query.windows(zone)]

    return hours


def ask(consumer, zone):
    with urllib.request.urlopen(f"{consumer.address}/zones/{zone}", timeout=30) as answer:
        return json.loads(answer.read())


def test_open_windows_are_read_by_queries_and_close_when_their_stream_is_quiet(gazette):
    journals = Journals(transport=gazette.transport)
    journals.create("rides", partitions=2, replication=1)
    journals.create("counts", partitions=1, replication=1)
    zones = "abcdef"
    with (
        shard.EmbeddedConsumer(
            counter(), transport=gazette.transport, etcd=gazette.etcd_endpoint
        ) as consumer,
        Publisher(mapping=BY_ZONE, transport=gazette.transport) as publisher,
    ):
        now = time.time()
        rides = [Ride(zone, now, cents) for zone in zones for cents in (1, 2)]
        publisher.publish_batch(rides).result(timeout=10)
        consumer.wait_caught_up(timeout_s=30)
        found = [ask(consumer, zone) for zone in zones]
        if time.time() < now + 1 + IDLE_S:  # else they may have been closed meanwhile
            assert found == [[[2, 3]]] * len(zones)
        ends_at = time.monotonic() + 30
        found = []
        while len(found) < len(zones):
            assert time.monotonic() < ends_at, found
            time.sleep(0.05)
            reader = Reader(Count, "topic=counts", block=False, transport=gazette.transport)
            found = [each.message for each in reader]
        assert sorted(found, key=attrgetter("zone")) == [Count(zone, 2, 3) for zone in zones]
        assert [ask(consumer, zone) for zone in zones] == [[]] * len(zones)
