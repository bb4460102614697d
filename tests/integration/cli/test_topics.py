"""``gazctl topics grow``: partitions are added, unless the state of keys would be split."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter

import pytest

from gazette_sdk import Journals, JsonMessage, Publisher, mapping, shard
from gazette_sdk.shard import EmbeddedConsumer

TIMEOUT_S = 60


@dataclass
class Ride(JsonMessage):
    zone: str


TO_RIDES = mapping.modulo("topic=rides", key=attrgetter("zone"))


@shard.handler(message=Ride, store=shard.JsonStore, sources="topic=rides", name="totals")
def totals(txn, ride):
    txn.store[ride.zone] = txn.store.get(ride.zone, 0) + 1


@shard.handler(message=Ride, store=shard.JsonStore, sources="topic=rides", name="stateless")
def stateless(txn, ride):
    pass


@shard.handler(
    message=Ride,
    store=shard.JsonStore,
    sources=shard.partitions("topic=rides", "topic=drivers"),
    name="join",
)
def join(txn, ride):
    pass


@pytest.fixture
def dev(gazctl, gazette_cluster):
    """A cluster with a topic of two partitions, and a function that runs applications."""
    dev = gazette_cluster(1)
    gazctl.environ["GAZETTE_ADDRESS"] = dev.address
    for topic in ("rides", "drivers"):
        Journals(transport=dev.transport).create(topic, partitions=2, replication=1)
    with Publisher(mapping=TO_RIDES, transport=dev.transport) as publisher:
        for zone in "abcdef":
            publisher.publish(Ride(zone))
    with ExitStack() as running:

        def run(application, *, waits=True):
            consumer = EmbeddedConsumer(
                application, transport=dev.transport, etcd=dev.etcd_endpoint
            )
            running.enter_context(consumer)
            if waits:
                consumer.wait_caught_up(TIMEOUT_S)
            ends_at = time.monotonic() + TIMEOUT_S
            while len(consumer.list_shards()) < len(partitions(dev)):
                assert time.monotonic() < ends_at
                time.sleep(0.05)
            return consumer

        dev.run = run
        yield dev


def partitions(dev, topic="rides"):
    return [each.name for each in Journals(transport=dev.transport).list(f"topic={topic}")]


def grow(gazctl, count, *arguments, name="rides"):
    outcome = gazctl("topics", "grow", name, "--partitions", str(count), "-o", "json", *arguments)
    return outcome, json.loads(outcome.text) if outcome.text else None


def test_a_topic_without_state_grows_and_its_shards_follow(gazctl, dev):
    outcome, found = grow(gazctl, 3, "--dry-run")
    assert outcome.status == 0, outcome.stderr
    assert found == {
        "topic": "rides",
        "partitions": 2,
        "wanted": 3,
        "created": [],
        "readers": [],
        "refused": "",
    }
    consumer = dev.run(stateless)
    outcome, found = grow(gazctl, 4)
    assert outcome.status == 0, outcome.stderr
    assert found["created"] == ["rides/part-002", "rides/part-003"]
    (reader,) = found["readers"]
    assert (reader["application"], reader["shards"]) == ("stateless", 2)
    assert (reader["with_state"], reader["unknown"], reader["joins"]) == (0, 0, [])
    ends_at = time.monotonic() + TIMEOUT_S
    while len(consumer.list_shards()) < 4:
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    table = gazctl("topics", "grow", "rides", "--partitions", "5")
    assert table.status == 0, table.stderr
    assert "stateless" in table.text
    assert table.text.splitlines()[-1].split() == ["rides/part-004", "created"]


def test_a_topic_is_not_grown_where_state_would_be_split(gazctl, dev):
    dev.run(totals)
    for arguments in ((), ("--dry-run",)):
        outcome, found = grow(gazctl, 4, *arguments)
        assert outcome.status == (0 if arguments else 1)
        assert "2 of the 2 shards of totals that read rides have state" in outcome.stderr
        assert "--force" in outcome.stderr
        assert found["refused"]
        assert found["created"] == []
        assert [reader["with_state"] for reader in found["readers"]] == [2]
    assert partitions(dev) == ["rides/part-000", "rides/part-001"]
    outcome, found = grow(gazctl, 4, "--force")
    assert outcome.status == 0, outcome.stderr
    assert (found["refused"], len(found["created"])) == ("", 2)
    assert len(partitions(dev)) == 4
    assert len(partitions(dev, "drivers")) == 2


def test_joined_topics_and_unknown_applications_are_named(gazctl, dev):
    dev.run(join)
    outcome, found = grow(gazctl, 3)
    assert outcome.status == 1
    assert "join joins rides with drivers" in outcome.stderr
    assert [reader["joins"] for reader in found["readers"]] == [["drivers"]]
    outcome, found = grow(gazctl, 3, "--consumer.address", "http://localhost:1")
    assert outcome.status == 1
    assert "http://localhost:1 cannot be asked for its shards" in outcome.stderr
    assert len(partitions(dev)) == 2
    assert grow(gazctl, 3, "--force")[0].status == 0
    ends_at = time.monotonic() + TIMEOUT_S
    while "equally many" not in gazctl("consumers", "list").stderr:
        assert time.monotonic() < ends_at
        time.sleep(0.05)


def test_a_shard_that_has_not_begun_to_read_may_have_state_later(gazctl, dev):
    may_go = threading.Event()

    @shard.handler(message=Ride, store=shard.JsonStore, sources="topic=rides", name="waits")
    def waits(txn, ride):
        assert may_go.wait(TIMEOUT_S)

    try:
        dev.run(waits, waits=False)
        outcome, found = grow(gazctl, 3)
    finally:
        may_go.set()
    assert outcome.status == 1
    assert "2 of the 2 shards of waits that read rides have state, or may have" in outcome.stderr
    assert [reader["unknown"] for reader in found["readers"]] == [2]


def test_what_cannot_be_grown_is_refused(gazctl, dev):
    journals = Journals(transport=dev.transport)
    journals.create("other", partitions=0, replication=1, labels={"topic": "mixed"})
    journals.create("mixed", partitions=2, replication=1)
    journals.create("csv", partitions=1, replication=1, content_type="text/csv")
    for name, count, words in (
        ("rides", 2, "rides has 2 partitions, and a topic only grows"),
        ("rides", 1, "rides has 2 partitions, and a topic only grows"),
        ("rides", 0, "--partitions was not given"),
        ("rides", 1001, "partitions"),
        ("none", 3, "there is no topic none"),
        ("mixed", 3, "other is another one"),
    ):
        outcome, _ = grow(gazctl, count, name=name)
        assert outcome.status == 1, (name, count)
        assert words in outcome.stderr
    outcome, found = grow(gazctl, 2, name="csv")
    assert outcome.status == 0, outcome.stderr
    assert found["created"] == ["csv/part-001"]
    assert {each.content_type for each in journals.list("topic=csv")} == {"text/csv"}
