"""``gazctl consumers`` against applications that run, and against members that say less."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from operator import attrgetter

import yaml

from gazette_sdk import Journals, Publisher, mapping, shard
from gazette_sdk.cluster.items import member_key
from gazette_sdk.errors import CallError
from gazette_sdk.shard import EmbeddedConsumer
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.testing import run_shards
from support.shard_services import ROOT, consumer_spec, shard_spec
from support.zone_counts import Ride, zones

TIMEOUT_S = 60
PRIMARY, BACKFILL = 300, 100
EVENT_AT = 1_700_000_000.0


TO_RIDES = mapping.modulo("topic=rides", key=attrgetter("zone"))


@shard.handler(message=Ride, store=shard.JsonStore, sources="topic=nothing", name="nothing")
def nothing(txn, ride):
    pass


def publish(dev, *zones_of_rides):
    with Publisher(mapping=TO_RIDES, transport=dev.transport) as publisher:
        for zone in zones_of_rides:
            publisher.publish(Ride(zone, EVENT_AT))


def publish_for_a_while(dev):
    for _ in range(30):
        publish(dev, *"abcdef")
        time.sleep(0.1)


def until(condition):
    ends_at = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    return found


def shown(gazctl, *arguments):
    return json.loads(gazctl.ok("consumers", *arguments, "-o", "json").text)


def test_applications_processes_and_shards_are_shown_with_their_lag(gazctl, gazette_cluster):
    dev = gazette_cluster(1)
    gazctl.environ["GAZETTE_ADDRESS"] = dev.address
    Journals(transport=dev.transport).create("rides", partitions=2, replication=1)
    options = {"transport": dev.transport, "etcd": dev.etcd_endpoint}
    with (
        run_shards(zones, processes=2, cluster=dev) as running,
        EmbeddedConsumer(nothing, **options) as other,
    ):

        def described():
            return shown(gazctl, "describe", "zones")

        running.wait_caught_up(TIMEOUT_S)
        # Each of two processes leads a shard, and holds the other one.
        until(lambda: [each["primary"] for each in described()["processes"]] == [1, 1])
        publish(dev, *"abcdef")
        running.wait_caught_up(TIMEOUT_S)
        found = described()
        assert found["application"] == "zones"
        endpoints = list(running.list_shards()[0].route.endpoints)
        assert sorted(each["endpoint"] for each in found["processes"]) == sorted(endpoints)
        assert {each["zone"] for each in found["processes"]} == {"local"}
        members = {f"local/{each['id']}" for each in found["processes"]}
        assert [(p["standby"], p["is_exiting"]) for p in found["processes"]] == [(1, False)] * 2
        assert [each["id"] for each in found["shards"]] == [
            "zones/rides/part-000",
            "zones/rides/part-001",
        ]
        for each in found["shards"]:
            assert (each["state"], each["lag_bytes"], each["lag_seconds"]) == ("PRIMARY", 0, 0)
            assert {each["primary"], *each["standbys"]} == members
            assert datetime.fromisoformat(each["watermark"]).timestamp() == EVENT_AT
            assert (each["recovered_bytes"], each["recovery_bytes"]) == (None, None)
            assert each["rate"] == 0
            (source,) = each["sources"]
            assert source["journal"] == each["id"].removeprefix("zones/")
            assert source["read_through"] > 0
        in_yaml = yaml.safe_load(gazctl.ok("consumers", "describe", "zones", "-o", "yaml").text)
        assert in_yaml["shards"] == found["shards"]

        with ThreadPoolExecutor(1) as thread:
            publishing = thread.submit(publish_for_a_while, dev)
            assert any(each["rate"] for each in described()["shards"])
            publishing.result()
        running.wait_caught_up(TIMEOUT_S)

        scaled = ("shards", "scale", "--consumer.address", endpoints[0])
        wish = json.loads(gazctl.ok(*scaled, "-o", "json").text)
        assert wish == {
            "processes": 2,
            "shards_with_lag": 0,
            "lag_bytes": 0,
            "lag_seconds": 0.0,
        }
        assert gazctl.ok(*scaled).text.split("\n")[1].split() == ["2", "0", "0", "B", "0s"]

        # The other application is found, too, and has neither shards nor a known lag.
        listed = {each["application"]: each for each in shown(gazctl, "list")["consumers"]}
        assert set(listed) == {"zones", "nothing"}
        assert (listed["zones"]["processes"], listed["zones"]["primary"]) == (2, 2)
        assert (listed["nothing"]["shards"], listed["nothing"]["lag_bytes"]) == (0, None)

        began = time.time()
        publish(dev, "bad", "bad")
        until(lambda: described()["failed"])
        failed = described()
        (bad,) = [each for each in failed["shards"] if each["state"] == "FAILED"]
        assert "this zone is refused" in bad["error"]
        assert bad["lag_bytes"] > 0
        assert 0 < bad["lag_seconds"] <= time.time() - began + 0.01
        assert failed["lag_bytes"] == bad["lag_bytes"]
        assert failed["lag_seconds"] == bad["lag_seconds"]

        table = gazctl.ok("consumers", "describe", "zones").text
        assert "APPLICATION" in table
        assert endpoints[1] in table
        assert "this zone is refused" in table
        lines = gazctl.ok("consumers", "list").text.splitlines()
        (line,) = [line for line in lines if line.startswith("nothing")]
        assert line.split()[1:] == [other.address, "1", "0", "0", "0", "-", "-"]

        addresses = f"{endpoints[1]}, {other.address},http://localhost:1"
        outcome = gazctl("consumers", "list", "--consumer.address", addresses, "-o", "json")
        assert outcome.status == 1
        assert "http://localhost:1" in outcome.stderr
        assert len(json.loads(outcome.text)["consumers"]) == 2
        outcome = gazctl("consumers", "describe", "zones", "--consumer.address", other.address)
        assert outcome.status == 1
        assert "no application zones is at the addresses" in outcome.stderr
        assert "they are of nothing" in outcome.stderr
        assert gazctl("consumers", "list", "--consumer.address", "x,y").status == 1


def test_a_recovery_is_shown_while_it_runs(shards, consumer):
    consumer.put(shard_spec("shard-a"))
    consumer.put(shard_spec("shard-b"))
    consumer.assign("shard-a", 0, code=BACKFILL)
    local = consumer.process.resolver.local.get("shard-a")
    consumer.do(local.change(recovery=(1024, 4096)))
    found = shown(shards.tool, "describe", "app")
    first, second = found["shards"]
    assert (first["state"], first["recovered_bytes"], first["recovery_bytes"]) == (
        "BACKFILL",
        1024,
        4096,
    )
    assert (first["lag_bytes"], first["lag_seconds"], first["watermark"]) == (None, None, None)
    assert (second["state"], second["primary"], second["standbys"]) == ("IDLE", None, [])
    assert (found["lag_bytes"], found["lag_bytes_unknown"]) == (None, 2)
    assert "1.0 KiB of 4.0 KiB" in shards.tool.ok("consumers", "describe", "app").text


def test_a_process_of_another_implementation_does_not_say_how_many_are_needed(shards, monkeypatch):
    async def unknown(_client):
        raise CallError("unknown method", code="UNIMPLEMENTED")

    monkeypatch.setattr(ShardClient, "scale", unknown)
    outcome = shards.tool("shards", "scale")
    assert outcome.status == 1
    assert "`gazctl shards list --lag` shows what is unread" in outcome.stderr


def test_members_of_other_implementations_show_what_they_have(shards, consumer, monkeypatch):
    key = member_key(ROOT, "zone", "idle")
    consumer.do(consumer.process.etcd.put(key, consumer_spec("idle").SerializeToString()))
    consumer.put(shard_spec("shard-a"))
    consumer.assign("shard-a", 0, code=PRIMARY)
    found = shown(shards.tool, "describe", "app")
    assert [(p["id"], p["primary"]) for p in found["processes"]] == [("aaaa", 1), ("idle", 0)]
    listed = ShardClient.list

    async def list_plainly(self, selector=None, *, with_processes=False):
        return await listed(self, selector)

    monkeypatch.setattr(ShardClient, "list", list_plainly)
    (found,) = shown(shards.tool, "list")["consumers"]
    assert found["application"] is None
    found = shown(shards.tool, "describe", consumer.process.endpoint)
    (process,) = found["processes"]
    assert (process["id"], process["primary"], process["is_exiting"]) == ("aaaa", 1, None)
