from __future__ import annotations

import time

import pytest
from prometheus_client import REGISTRY

from gazette_sdk.shard.transaction.consume import Counts
from gazette_sdk.shard.transaction.machine import Current, Prior
from gazette_sdk.shard.transaction.metrics import ShardMetrics
from support.vectors import golden

SHARD = "/app/items/metrics"


def sample(name, **labels):
    return REGISTRY.get_sample_value(f"gazette_shard_{name}", {"shard": SHARD, **labels})


def seconds(phase):
    kind = "sync" if phase < "50" else "async"
    return sample("phase_seconds_total", phase=phase, type=kind)


COUNTS = ("transactions", "read_messages", "fired_timers", "skipped", "dead_letters")


@pytest.fixture
def metrics():
    made = ShardMetrics(SHARD, lambda journal: 7 if journal == "a/journal" else 0)
    yield made
    made.end()


def test_completed_transactions_are_counted_and_sources_have_heads_and_lags(metrics):
    before = {name: sample(f"{name}_total") for name in COUNTS}
    read, recorded = sample("read_bytes_total"), sample("recorded_bytes_total")
    metrics.start({"a/journal": 100, "b/journal": 0})
    assert sample("read_head", journal="a/journal") == 100
    assert sample("read_lag_bytes", journal="a/journal") == 7
    assert sample("read_lag_bytes", journal="b/journal") == 0
    metrics.recorded(50)
    metrics.completed({"a/journal": 130, "b/journal": 5}, Counts(3, 2, 1, 1))
    assert sample("transactions_total") - before["transactions"] == 1
    assert sample("read_messages_total") - before["read_messages"] == 3
    assert sample("fired_timers_total") - before["fired_timers"] == 2
    assert sample("skipped_total") - before["skipped"] == 1
    assert sample("dead_letters_total") - before["dead_letters"] == 1
    assert sample("read_bytes_total") - read == 35
    assert sample("recorded_bytes_total") - recorded == 50
    assert sample("read_head", journal="a/journal") == 130


def test_gauges_end_with_the_shard_and_counters_stay(metrics):
    metrics.start({"a/journal": 100})
    metrics.completed({"a/journal": 130, "new/journal": 5}, Counts(3))
    metrics.end()
    metrics.end()
    assert sample("read_head", journal="a/journal") is None
    assert sample("read_head", journal="new/journal") is None
    assert sample("read_lag_bytes", journal="a/journal") is None
    assert sample("transactions_total") is not None


def test_a_run_that_ends_late_leaves_the_gauges_of_the_next_one(metrics):
    metrics.start({"a/journal": 100})
    following = ShardMetrics(SHARD, lambda _: 3)
    following.start({"a/journal": 120})
    metrics.end()
    assert sample("read_head", journal="a/journal") == 120
    assert sample("read_lag_bytes", journal="a/journal") == 3
    following.end()
    assert sample("read_head", journal="a/journal") is None
    assert sample("read_lag_bytes", journal="a/journal") is None


def test_time_is_counted_by_phase(metrics):
    phases = ["10-not-running", "20-consuming", "30-stalled", "40-preparing", "50-committing"]
    before = {phase: seconds(phase) for phase in phases}
    metrics.waited(Current.EMPTY, 1.0)
    metrics.turned(2.5, 0.5)
    metrics.waited(Current.OPEN, 3.0)
    metrics.waited(Current.CLOSED, 4.0)
    now = time.monotonic()
    metrics.prior_changed(Prior.NONE, now)
    metrics.prior_changed(Prior.COMMITTING, now + 6.0)
    found = {phase: seconds(phase) - before[phase] for phase in phases}
    assert found == pytest.approx(dict(zip(phases, [1.0, 5.0, 4.0, 0.5, 6.0], strict=True)))


def deprecated():
    return {
        sample.name.removeprefix("gazette_consumer_"): (family.type, sample)
        for family in REGISTRY.collect()
        if family.name.startswith("gazette_consumer_")
        for sample in family.samples
        if sample.labels.get("journal", "deprecated/journal") == "deprecated/journal"
    }


def test_deprecated_metrics_have_the_recorded_names_types_and_labels(metrics):
    metrics.start({"deprecated/journal": 100})
    recorded = {
        name.removeprefix("gazette_consumer_"): (each["type"], each["labels"])
        for name, each in golden("consumer/rpc/metrics.json")["metrics"].items()
        if name.startswith("gazette_consumer_")
    }
    found = {name: (kind, [list(sample.labels)]) for name, (kind, sample) in deprecated().items()}
    assert found == recorded


def test_deprecated_metrics_are_sums_over_the_shards_of_the_process(metrics):
    other = ShardMetrics("/app/items/another", lambda _: 0)
    metrics.start({"deprecated/journal": 100})
    other.start({"deprecated/journal": 120})
    before = {name: sample.value for name, (_, sample) in deprecated().items()}
    now = time.monotonic()
    for each in (metrics, other):
        each.waited(Current.EMPTY, 100.0)
        each.turned(2.5, 0.5)
        each.waited(Current.CLOSED, 4.0)
        each.prior_changed(Prior.NONE, now)
        each.prior_changed(Prior.COMMITTING, now + 6.0)
        each.prior_changed(Prior.ACKNOWLEDGING, now + 7.0)
        each.completed({"deprecated/journal": 130}, Counts(3))
    found = {name: sample.value - before[name] for name, (_, sample) in deprecated().items()}
    other.end()
    assert found == pytest.approx(
        {
            "tx_count_total": 2,
            "tx_messages_total": 6,
            "tx_seconds_total": 2 * (2.5 + 4.0 + 7.0),
            "tx_consume_seconds_total": 2 * 2.0,
            "tx_stalled_seconds_total": 2 * 4.0,
            "tx_flush_seconds_total": 2 * 0.5,
            "tx_sync_seconds_total": 2 * 7.0,
            "consumed_bytes_total": 30 + 10,
            "read_head": 10,
        }
    )
