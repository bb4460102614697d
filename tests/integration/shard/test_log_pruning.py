"""The recovery log of a running consumer loses what no recovery needs, and restores its shard."""

from __future__ import annotations

import time

from gazette_sdk import Journals, Publisher, Reader, mapping, shard
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.protocol.fragments import parse_content_path
from gazette_sdk.shard.consumer.embedded import EmbeddedConsumer
from gazette_sdk.shard.stores.json_store import JsonStore

SPECS = """
name: pruned/
replication: 1
labels: [{name: content-type, value: application/x-ndjson}]
fragment: {length: 4096, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1s}
children:
- {name: pruned/in, labels: [{name: topic, value: in}]}
- {name: pruned/out}
"""
STARTS = 4
MESSAGES = 10
WAIT_S = 30.0


@shard.handler(message=dict, store=JsonStore, sources="topic=in", name="pruned")
def count(txn: shard.Transaction, message: dict) -> None:
    counts = txn.store.state
    counts["pad"] = "x" * 2000
    counts["n"] = counts.get("n", 0) + 1
    txn.publish({"n": counts["n"]}, mapping=mapping.direct("pruned/out"))


def test_a_log_is_pruned_while_its_shard_runs_and_restores_it(tmp_path, monkeypatch):
    """From its second start on, when no backup of its hints is missing any more."""
    monkeypatch.setattr("gazette_sdk.shard.application.generator.HINT_BACKUPS", 1)
    for module in ("recovery.recorder", "consumer.shard"):
        monkeypatch.setattr(f"gazette_sdk.shard.{module}.HINTS_PAUSE_S", 0.2)
    begins = []
    with EmbeddedCluster(tmp_path, sync_etcd=False) as cluster:
        cluster.apply(SPECS)
        transport = cluster.transport
        for _ in range(STARTS):
            with EmbeddedConsumer(
                count, transport=transport, etcd=cluster.etcd_endpoint, prune_period_s=0.3
            ) as consumer:
                with Publisher(
                    mapping=mapping.direct("pruned/in"), transport=transport
                ) as publisher:
                    for number in range(MESSAGES):
                        publisher.publish({"number": number}).result(WAIT_S)
                        consumer.wait_caught_up(WAIT_S)  # each in a transaction of its own
                (log,) = [
                    each.name
                    for each in Journals(transport=transport).list()
                    if "recovery" in each.name
                ]
                directory = tmp_path / "fragments" / log
                deadline = time.monotonic() + (WAIT_S if begins else 2.0)
                while begin_of(directory, log) <= (begins[-1] if begins else 0):
                    if time.monotonic() >= deadline:
                        assert not begins, "nothing was removed"
                        break
                    time.sleep(0.1)
                begins.append(begin_of(directory, log))
        with Reader(dict, name="pruned/out", transport=transport) as reader:
            assert [each.message["n"] for each in reader] == list(range(1, STARTS * MESSAGES + 1))
    assert begins[0] == 0
    assert begins == sorted(set(begins))


def begin_of(directory, log) -> int:
    """Return the offset of the first stored fragment of a log; 0 if there is none."""
    return min(
        (parse_content_path(log, path.name).begin for path in directory.glob("*.raw")), default=0
    )
