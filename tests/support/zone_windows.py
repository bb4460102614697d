"""Applications that processes of a test run: each window is published when it is closed."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import Journals, JsonMessage, Publisher, Reader, mapping, shard
from support.window_model import Event, Model, S, merged

DATABASE = "ZONES_DATABASE"
"""Environment variable with the URL of the database of ``InSql``."""


@dataclass
class Ride(JsonMessage):
    name: str
    zone: str
    at: float


@dataclass
class Output(JsonMessage):
    """A window that was closed, or one for which a ride was late."""

    what: str
    zone: str
    begin_us: int
    end_us: int
    names: list[str]


BY_ZONE = mapping.modulo("topic=rides", key=attrgetter("zone"))
TO_OUTPUT = mapping.modulo("topic=windows", key=attrgetter("zone"))
OPTIONS = {"grace_s": 2, "by": attrgetter("zone"), "state": list[str]}


class Zones(shard.Application):
    message, sources, idle_s = Ride, "topic=rides", None
    event_time = attrgetter("at")

    def consume(self, txn, message):
        for window in txn.windows(message):
            window.state = sorted([*(window.state or []), message.name])

    def on_closed(self, txn, window):
        span = window.begin_us, window.end_us
        txn.publish(Output("closed", window.key, *span, window.state), mapping=TO_OUTPUT)

    def on_late(self, txn, message, window):
        span = window.begin_us, window.end_us
        txn.publish(Output("late", window.key, *span, [message.name]), mapping=TO_OUTPUT)


class InRocks(Zones):
    store, windows = shard.RocksStore, shard.windows.Tumbling(5, **OPTIONS)


class InSqlite(Zones):
    store, windows = shard.SqliteStore, shard.windows.Session(3, merge=merged, **OPTIONS)


class InJson(Zones):
    store, windows = shard.JsonStore, shard.windows.Session(1, merge=merged, **OPTIONS)


class InSql(Zones):
    store = shard.SqlStore.of(os.environ.get(DATABASE, "sqlite://"))
    windows = shard.windows.Hopping(6, 2, **OPTIONS)


def create_journals(transport):
    journals = Journals(transport=transport)
    journals.create("rides", partitions=2, replication=1)
    journals.create("windows", partitions=1, replication=1)


def publish(transport, events: list[Event]):
    with Publisher(mapping=BY_ZONE, transport=transport) as publisher:
        for event in events:
            publisher.publish(Ride(event.name, event.key, event.event / S))


def expected_output(transport, declared) -> Counter:
    """Return what the model gives for the rides, as they are in their journals."""
    output = Counter()
    for number in range(2):
        model = Model(declared)
        journal = f"rides/part-{number:03}"
        for each in Reader(Ride, journal, block=False, transport=transport):
            at_us = round(each.message.at * S)
            model.consume(Event(each.message.name, each.message.zone, at_us, at_us))
        model.close_passed()
        output += model.output
    return output


def output(transport) -> Counter:
    """Return the committed output, as the model has it."""
    found = Counter()
    for each in Reader(Output, "topic=windows", block=False, transport=transport):
        message = each.message
        if message.what == "closed":
            span = message.begin_us, message.end_us
            found["closed", message.zone, span, tuple(message.names)] += 1
        else:
            found["late", message.zone, message.begin_us, *message.names] += 1
    return found


def until_output(transport, expected: Counter, timeout_s=60):
    """Wait until the output is what is expected."""
    ends_at = time.monotonic() + timeout_s
    while (found := output(transport)) != expected:
        assert time.monotonic() < ends_at, (expected - found, found - expected)
        time.sleep(0.05)
