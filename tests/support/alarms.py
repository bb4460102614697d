"""Applications that processes of a test run: each alarm that was set rings once, by a timer."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter

from gazette_sdk import Journals, JsonMessage, Publisher, Reader, mapping, shard

DATABASE = "ALARMS_DATABASE"
"""Environment variable with the URL of the database of ``InSql``."""


@dataclass
class Alarm(JsonMessage):
    """Alarm to set, to move, or (``after_s`` < 0) to cancel."""

    name: str
    after_s: float


@dataclass
class Ring(JsonMessage):
    name: str
    due: float
    rang: float


BY_NAME = mapping.modulo("topic=alarms", key=attrgetter("name"))
TO_RINGS = mapping.modulo("topic=rings", key=attrgetter("name"))


class Alarms(shard.Application):
    """Alarms with odd numbers are of event time, which follows the present 0.2 s later."""

    message, sources, event_time, idle_s = Alarm, "topic=alarms", "published", 0.2

    def consume(self, txn, message):
        clock = "event" if int(message.name.rpartition("/")[2]) % 2 else "processing"
        if message.after_s < 0:
            txn.timers.cancel(message.name, clock=clock)
        else:
            txn.timers.set(message.name, at=txn.now + message.after_s, clock=clock)

    def on_timer(self, txn, timer):
        txn.publish(Ring(timer.key, timer.at, time.time()), mapping=TO_RINGS)


class InRocks(Alarms):
    store = shard.RocksStore[str, int]


class InSqlite(Alarms):
    store = shard.SqliteStore


class InJson(Alarms):
    store = shard.JsonStore


class InSql(Alarms):
    store = shard.SqlStore.of(os.environ.get(DATABASE, "sqlite://"))


def create_journals(transport):
    journals = Journals(transport=transport)
    journals.create("alarms", partitions=2, replication=1)
    journals.create("rings", partitions=1, replication=1)


def publish(transport, alarms):
    with Publisher(mapping=BY_NAME, transport=transport) as publisher:
        for alarm in alarms:
            publisher.publish(alarm)


def rings(transport):
    """Return the committed rings, in order."""
    return [each.message for each in Reader(Ring, "topic=rings", block=False, transport=transport)]


def until_rung(transport, names, timeout_s=60):
    """Wait until all have rung; then each has rung once, and no other."""
    ends_at = time.monotonic() + timeout_s
    while (found := Counter(each.name for each in rings(transport))).keys() != set(names):
        assert time.monotonic() < ends_at, (set(names) ^ found.keys(), found)
        time.sleep(0.05)
    time.sleep(0.3)
    assert Counter(each.name for each in rings(transport)) == Counter(names)
