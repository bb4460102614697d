"""Health and metrics of a consumer process, over real brokers."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from gazette_sdk import Journals, Publisher, mapping, shard

TIMEOUT_S = 60.0
PREFIX = "/gazette/consumers/healthy-totals/items/"


@shard.handler(message=dict, store=shard.JsonStore, sources="topic=rides", name="healthy-totals")
def totals(txn, ride):
    if ride.get("bad"):
        raise ValueError("this ride is refused")


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scraped(address):
    """Values of the series of a scrape, by name and labels."""
    _, text = get(f"{address}/debug/metrics")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def until(condition):
    ends_at = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    return found


def test_a_failed_shard_is_counted_and_the_process_is_not_well(gazette):
    Journals(transport=gazette.transport).create("rides", partitions=1)
    to_rides = mapping.random("topic=rides")
    name = f"{PREFIX}healthy-totals/rides/part-000"
    with (
        Publisher(mapping=to_rides, transport=gazette.transport) as publisher,
        shard.EmbeddedConsumer(
            totals, transport=gazette.transport, etcd=gazette.etcd_endpoint
        ) as consumer,
    ):
        publisher.publish({"zone": "a"}).result(timeout=TIMEOUT_S)
        consumer.wait_caught_up(TIMEOUT_S)
        status, text = get(f"{consumer.address}/debug/health")
        shown = scraped(consumer.address)
        publisher.publish({"bad": True}).result(timeout=TIMEOUT_S)
        until(lambda: get(f"{consumer.address}/debug/health")[0] == 503)
        _, failed_text = get(f"{consumer.address}/debug/health")
        failed = scraped(consumer.address)
        live, _ = get(f"{consumer.address}/debug/live")
    assert status == 200
    checks = {each["name"]: each["detail"] for each in json.loads(text)["checks"]}
    assert sorted(checks) == ["etcd", "lease", "shards", "watch"]
    assert checks["shards"] == "1 shards of this process"
    assert shown["gazette_shards_without_primary", "healthy-totals"] == 0
    assert shown["gazette_shard_read_lag_seconds", name] == 0
    assert shown["gazette_shard_recovery_bytes", name, "total"] == 0
    assert shown["gazette_shard_primary_changes_total", name] == 1
    assert shown["gazette_shard_failures_total", name] == 0
    assert failed["gazette_shard_failures_total", name] == 1
    assert "1 have failed, such as healthy-totals/rides/part-000" in failed_text
    assert live == 200


def test_a_shard_that_no_process_has_room_for_is_counted(gazette):
    Journals(transport=gazette.transport).create("rides", partitions=2)
    with shard.EmbeddedConsumer(
        totals, transport=gazette.transport, etcd=gazette.etcd_endpoint, shard_limit=1
    ) as consumer:
        key = ("gazette_shards_without_primary", "healthy-totals")
        until(lambda: scraped(consumer.address).get(key) == 1)
