"""``gazctl shards prune`` over recorded hints and fragments of recovery logs."""

from __future__ import annotations

import json
import re

import pytest

from gazette_sdk.protocol import consumer_pb2 as cpb
from support.vectors import golden

RECORDED = golden("consumer/gazctl/prune.json")
RUNS = {run["name"]: run for run in RECORDED["runs"]}
LOGS = "examples/word-count/logs"
BIKES = "examples/bike-share/recovery-logs"
TOTALS = re.compile(r"(bytesPruned|bytesTotal|fragmentsPruned|fragmentsTotal)=(\d+)")
SPECS = f"""
name: examples/
replication: 1
labels: [{{name: content-type, value: application/x-gazette-recoverylog}}]
fragment: {{length: 1048576, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1s}}
children:
- name: {BIKES}/cycles-part-000
- name: {LOGS}/
  children: [{{name: {LOGS}/shard-000}}, {{name: {LOGS}/shard-001}}]
"""


@pytest.fixture
def recorded(shards, consumer, cluster):
    """``gazctl shards``, beside shards with the recorded hints and fragments."""
    tool = shards.tool
    for name, (stored, _) in RECORDED["fragments_before"].items():
        total = "{part1:016x}{part2:016x}{part3:08x}".format(
            **{part: int(number) for part, number in stored["sum"].items()}
        )
        path = cluster.file_root / name / f"{0:016x}-{int(stored['end']):016x}-{total}.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    tool.ok("journals", "apply", stdin=SPECS.encode())
    for name, (stored, local) in RECORDED["fragments_before"].items():
        refused = tool("journals", "append", name, stdin=b"x")
        assert "INDEX_HAS_GREATER_OFFSET" in refused.stderr
        tool.ok("journals", "reset-head", "-l", f"name={name}")
        length = int(local["end"]) - int(stored["end"])
        tool.ok("journals", "append", name, stdin=b"x" * length)
    for group, prefix in (("words", LOGS), ("bike", BIKES)):
        for key, value in RECORDED["hints"][group].items():
            consumer.do(consumer.process.etcd.put(key.encode(), value.encode()))
            shard = key.rpartition("/")[2].partition(".")[0]
            if f"{prefix}/{shard}" in SPECS:
                consumer.put(
                    cpb.ShardSpec(
                        id=shard,
                        recovery_log_prefix=prefix,
                        hint_prefix=key.rpartition("/")[0],
                        hint_backups=2,
                        max_txn_duration={"seconds": 1},
                    )
                )
    return shards


def totals(run):
    """The totals that a recorded run logged."""
    last = [line for line in run["stderr"].splitlines() if "all shards" in line][-1]
    return {name: int(number) for name, number in TOTALS.findall(last)}


def shown(outcome):
    """The totals of an output of ours."""
    logs = [json.loads(line) for line in outcome.text.splitlines()]
    names = {
        "bytesPruned": "pruned_bytes",
        "bytesTotal": "bytes",
        "fragmentsPruned": "pruned_fragments",
        "fragmentsTotal": "fragments",
    }
    return {name: sum(log[ours] for log in logs) for name, ours in names.items()}


def test_the_recorded_fragments_are_pruned(recorded, cluster):
    shards = recorded
    for name in (
        "prune, dry run, one shard",
        "prune, dry run, all hints present but the oldest backup is empty",
        "prune, no match",
    ):
        run = RUNS[name]
        outcome = shards(*run["args"][1:], "-o", "json")
        assert outcome.status == run["exit"]
        assert shown(outcome) == totals(run), name
        if "skippedJournals=1" in run["stderr"]:
            assert "a log is not pruned" in outcome.stderr
    run = RUNS["prune, dry run, all shards"]
    words = ("prune", "-l", "id:prefix=shard-", "-o", "json")
    assert shown(shards(*words, "--dry-run")) == totals(run)
    missing = shards(*RUNS["prune, no selector"]["args"][1:])
    assert (missing.status, "--selector" in missing.stderr) == (1, True)
    # The recorded tool has no file root, and failed at the first file.
    assert RUNS["prune, all shards"]["exit"] == shards(*words, "--yes").status == 1
    done = shards(*words, "--yes", "--file-root", str(cluster.file_root))
    assert done.status == 0, done.stderr
    assert shown(done) == totals(run)
    assert not list((cluster.file_root / LOGS).rglob("*.gz"))
