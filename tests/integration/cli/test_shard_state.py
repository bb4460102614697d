"""``gazctl shards state``: of a primary and from the log, of each store, for each part of it."""

from __future__ import annotations

import base64
import json
import tempfile
import time
from dataclasses import dataclass
from operator import attrgetter

import pytest

from gazette_sdk import Journals, JsonMessage, Publisher, mapping, shard
from gazette_sdk.errors import CallError
from gazette_sdk.protocol.authorization import Capability, authority_for
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.shard import EmbeddedConsumer
from gazette_sdk.shard.consumer.client import ShardClient

TIMEOUT_S = 60
KEYS = base64.b64encode(b"a secret key of consumers, 32 by").decode()
AT = 1_700_000_000.0


@dataclass
class Ride(JsonMessage):
    zone: str
    at: float


@dataclass
class Zone(JsonMessage):
    name: str
    city: str


drivers = shard.table("topic=places", key=attrgetter("name"), message=Zone)


@shard.handler(
    message=Ride,
    store=shard.RocksStore.of(key=str, value=int, families={"pairs": (tuple[str, int], bytes)}),
    sources="topic=rides",
    tables=[drivers],
    event_time=attrgetter("at"),
    idle_s=None,
    windows=shard.windows.Tumbling(size_s=60, by=attrgetter("zone"), state=int),
    name="rocks",
    hot_standbys=0,
)
def rocks(txn, ride):
    txn.store[ride.zone] = txn.store.get(ride.zone, 0) + 1
    txn.store.family("pairs")[ride.zone, 7] = b"\xff\x00"
    for window in txn.windows(ride):
        window.state = (window.state or 0) + 1
    txn.timers.set(("soon", ride.zone), after_s=3600)


@rocks.timer
def timed(txn, timer):
    pass


@rocks.closed
def closed(txn, window):
    pass


@shard.handler(message=Ride, store=shard.JsonStore, sources="topic=rides", name="json")
def as_json(txn, ride):
    txn.store[ride.zone] = {"rides": txn.store.get(ride.zone, {"rides": 0})["rides"] + 1}


@shard.handler(
    message=Ride,
    store=shard.SqliteStore.of(schema="CREATE TABLE IF NOT EXISTS rides (zone TEXT, at REAL)"),
    sources="topic=rides",
    name="sqlite",
)
def sqlite(txn, ride):
    txn.store.execute("INSERT INTO rides VALUES (?, ?)", (ride.zone, ride.at))


@pytest.fixture
def running(gazctl, gazette_cluster):
    """Run an application over three rides of two zones, and return ``gazctl shards state``."""
    dev = gazette_cluster(1)
    gazctl.environ["GAZETTE_ADDRESS"] = dev.address
    for topic in ("rides", "places"):
        Journals(transport=dev.transport).create(topic, partitions=1, replication=1)
    rides, places = mapping.direct("rides/part-000"), mapping.direct("places/part-000")
    with Publisher(mapping=places, transport=dev.transport) as publisher:
        publisher.publish(Zone("north", "Kiel"))
        publisher.publish(Zone("south", "Ulm"))
    with Publisher(mapping=rides, transport=dev.transport) as publisher:
        for zone in ("north", "north", "south"):
            publisher.publish(Ride(zone, AT))
    consumers = []

    def start(application, **options):
        options = {"transport": dev.transport, "etcd": dev.etcd_endpoint, **options}
        consumer = EmbeddedConsumer(application, **options)
        consumers.append(consumer)
        consumer.start()
        consumer.wait_caught_up(TIMEOUT_S)
        gazctl.environ["CONSUMER_ADDRESS"] = consumer.address
        id_ = consumer.list_shards()[0].spec.id

        def state(*arguments):
            return gazctl("shards", "state", id_, *arguments)

        state.id, state.consumer = id_, consumer
        return state

    yield start
    for consumer in consumers:
        consumer.stop()


def entries(outcome):
    assert outcome.status == 0, outcome.stderr
    found = [json.loads(line) for line in outcome.text.splitlines()]
    return [(each["place"], each["key"], each["value"]) for each in found]


@pytest.mark.parametrize("where", [(), ("--from-log",)], ids=["primary", "log"])
def test_every_part_of_a_rocks_store_is_shown(running, where):
    state = running(rocks)

    def shown(*arguments):
        return entries(state(*arguments, *where, "-o", "json"))

    value = "base64:" + base64.b64encode(b"\xff\x00").decode()
    pairs = [("pairs", ["north", 7], value), ("pairs", ["south", 7], value)]
    assert shown() == [("", "north", 2), ("", "south", 1), *pairs]
    assert shown("south") == [("", "south", 1)]
    assert shown('["north", 7]') == pairs[:1]
    assert [each[:2] for each in shown("--what", "tables")] == [
        ("topic=places", "north"),
        ("topic=places", "south"),
    ]
    ((place, key, message),) = shown("south", "--what", "tables")
    assert (place, key, message["city"]) == ("topic=places", "south", "Ulm")
    begin, end = "2023-11-14T22:13:00.000+00:00", "2023-11-14T22:14:00.000+00:00"
    window = {"begin": begin, "end": end, "count": 2, "state": 2}
    assert shown("--what", "windows") == [
        ("", "north", window),
        ("", "south", {**window, "count": 1, "state": 1}),
    ]
    assert shown("north", "--what", "windows") == [("", "north", window)]
    timers = shown("--what", "timers")
    assert [each[:2] for each in timers[:2]] == [
        ("processing", ["soon", "north"]),
        ("processing", ["soon", "south"]),
    ]
    assert [each[0] for each in timers[2:]] == ["end of a window"] * 2
    assert timers[2][2] == end

    limited = state("--limit", "1", *where)
    assert limited.text.splitlines()[1].split() == ["<none>", '"north"', "2"]
    assert len(limited.text.splitlines()) == 2
    assert "there are more entries" in limited.stderr
    assert "more entries" not in state("--limit", "4", *where).stderr
    for arguments, words in (
        (["nowhere"], "has no 'nowhere' in its state"),
        (["north", "--what", "timers"], "leave the key out"),
        (["base64:!"], "is not base64"),
    ):
        outcome = state(*arguments, *where)
        assert outcome.status == 1
        assert words in outcome.stderr


@pytest.mark.parametrize("where", [(), ("--from-log",)], ids=["primary", "log"])
def test_other_stores_are_shown(running, where):
    state = running(as_json)
    assert entries(state(*where, "-o", "json")) == [
        ("", "north", {"rides": 2}),
        ("", "south", {"rides": 1}),
    ]
    assert entries(state("south", *where, "-o", "json")) == [("", "south", {"rides": 1})]
    assert entries(state("--what", "windows", *where, "-o", "json")) == []
    state = running(sqlite)
    rows = [("rides", None, {"zone": zone, "at": AT}) for zone in ("north", "north", "south")]
    assert entries(state(*where, "-o", "json")) == rows
    assert entries(state("rides", *where, "-o", "json")) == rows
    for what in ("tables", "windows", "timers"):
        assert entries(state("--what", what, *where, "-o", "json")) == []
    assert state("gazette_checkpoint", *where).status == 1


def test_the_log_shows_a_shard_whose_processes_do_not(running, gazctl, monkeypatch, tmp_path):
    state = running(as_json)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()

    async def unimplemented(self, request):
        raise CallError("unknown service consumer.ShardState", code="UNIMPLEMENTED")

    monkeypatch.setattr(ShardClient, "state", unimplemented)
    outcome = state()
    assert outcome.status == 1
    assert "use --from-log" in outcome.stderr
    assert entries(state("north", "--from-log", "-o", "json")) == [("", "north", {"rides": 2})]
    assert list((tmp_path / "copies").iterdir()) == []
    outcome = gazctl("shards", "state", "nothing", "--from-log")
    assert outcome.status == 1
    assert "no shard exists with the given id (nothing)" in outcome.stderr
    assert gazctl("shards", "state", "bad id").status == 1


def test_a_token_must_allow_to_read_the_shard(running):
    state = running(as_json, auth_keys=KEYS)
    keys = authority_for(KEYS)

    def outcome(capability, selector):
        token = keys.sign(capability, parse_selector(selector), 60, time.time())
        return state("--consumer.auth-token", token.removeprefix("Bearer "))

    assert state().status == 1
    assert "READ" in outcome(Capability.LIST, "").stderr
    assert "SHARD_NOT_FOUND" in outcome(Capability.READ, "id=another").stderr
    assert outcome(Capability.READ, f"id={state.id}").status == 0
    assert state("--consumer.auth-keys", KEYS, "north").status == 0
