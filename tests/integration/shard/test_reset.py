"""`gazctl shards reset` on real brokers: what is read again, with which state, after restarts."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from gazette_sdk import Journals, JsonMessage, Publisher, Reader, mapping, shard
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import RESET, value_of

TO_COUNTS = mapping.direct("counts/part-000")
STORES = {
    "rocks": shard.RocksStore[str, int],
    "sqlite": shard.SqliteStore.of(
        schema="CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER)"
    ),
    "json": shard.JsonStore[dict[str, int]],
}


@dataclass
class Word(JsonMessage):
    word: str


@dataclass
class Count(JsonMessage):
    word: str
    n: int


def counted(txn, kind, word):
    """Add one to the count of a word in the store of a kind, and return it."""
    if kind != "sqlite":
        n = txn.store[word] = txn.store.get(word, 0) + 1
        return n
    found = txn.store.execute("SELECT n FROM counts WHERE word = ?", (word,)).fetchone()
    n = (found[0] if found else 0) + 1
    txn.store.execute("INSERT OR REPLACE INTO counts VALUES (?, ?)", (word, n))
    return n


def application(kind="rocks"):
    @shard.handler(
        message=Word, sources="topic=words", store=STORES[kind], name=f"counts-in-{kind}"
    )
    def counts(txn, message):
        if message.word == "poison":
            raise ValueError("a word that cannot be counted")
        txn.publish(Count(message.word, counted(txn, kind, message.word)), mapping=TO_COUNTS)

    return counts


class Running:
    """A consumer of the application, with the tool, on journals of one test."""

    def __init__(self, gazette, gazctl, kind="rocks"):
        self.gazette, self.gazctl, self.kind = gazette, gazctl, kind
        journals = Journals(transport=gazette.transport)
        journals.create("words", partitions=2, replication=1)
        journals.create("counts", partitions=1, replication=1)
        self.consumer = None

    def start(self):
        self.consumer = shard.EmbeddedConsumer(
            application(self.kind),
            transport=self.gazette.transport,
            etcd=self.gazette.etcd_endpoint,
        )
        self.consumer.start()
        self.gazctl.environ["CONSUMER_ADDRESS"] = self.consumer.address
        self.gazctl.environ["GAZETTE_ADDRESS"] = self.gazette.address
        return self

    def stop(self):
        self.consumer.stop()

    def publish(self, *words):
        by_word = mapping.modulo("topic=words", key=lambda message: message.word)
        with Publisher(mapping=by_word, transport=self.gazette.transport) as publisher:
            publisher.publish_batch(map(Word, words)).result(timeout=30)

    def wait(self):
        self.consumer.wait_caught_up(timeout_s=30)

    def reset(self, *arguments):
        return self.gazctl("shards", "reset", "-l", "id", *arguments)

    def counts(self):
        """Counts that were published, by word in their order."""
        found = defaultdict(list)
        for envelope in Reader(
            Count, "topic=counts", block=False, transport=self.gazette.transport
        ):
            found[envelope.message.word].append(envelope.message.n)
        return dict(found)

    def specs(self):
        return [each.spec for each in self.consumer.list_shards()]


@pytest.fixture
def running(gazette, gazctl, monkeypatch):
    monkeypatch.setenv("GAZETTE_ADDRESS", gazette.address)
    started = []

    def start(kind="rocks"):
        started.append(Running(gazette, gazctl, kind).start())
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.mark.parametrize("kind", STORES)
def test_a_shard_begins_again_with_or_without_its_state_and_only_once(running, kind):
    shards = running(kind)
    shards.publish(*"abab", "c")
    shards.wait()
    assert shards.counts() == {"a": [1, 2], "b": [1, 2], "c": [1]}

    outcome = shards.reset("--to", "begin")
    assert outcome.status == 0, outcome.stderr
    assert outcome.stdout.count(b"emptied") == 2
    assert f"recovery/counts-in-{kind}/words/part-000" in outcome.stdout.decode()
    shards.wait()
    shards.publish("a")
    shards.wait()
    assert shards.counts() == {"a": [1, 2, 1, 2, 3], "b": [1, 2, 1, 2], "c": [1, 1]}

    assert shards.reset("--to", "begin", "--keep-state").status == 0
    shards.wait()
    assert shards.counts()["a"] == [1, 2, 1, 2, 3, 4, 5, 6]
    shards.stop()
    shards.start()  # the reset is done: it is not done again
    shards.publish("a", "c")
    shards.wait()
    assert shards.counts()["a"] == [1, 2, 1, 2, 3, 4, 5, 6, 7]
    assert shards.counts()["c"] == [1, 1, 2, 3]


def test_a_reset_before_a_message_holds_over_a_restart(running):
    shards = running()
    shards.publish(*"aa")
    shards.wait()
    assert shards.reset("--to", "end", "--keep-state").status == 0
    shards.wait()
    assert shards.reset("--to", "end").status == 0
    shards.wait()
    shards.stop()
    shards.start()
    shards.wait()
    shards.publish("a")
    shards.wait()
    assert shards.counts() == {"a": [1, 2, 1]}
    assert {spec.recovery_log_prefix for spec in shards.specs()} == {"recovery/generation-2"}
    assert not any(value_of(spec.labels, RESET) for spec in shards.specs())
    assert shards.reset("--to", "begin", "--keep-state").status == 0
    shards.wait()
    shards.publish("a")
    shards.wait()
    assert shards.counts() == {"a": [1, 2, 1, 2, 3, 4, 5]}
    assert all(value_of(spec.labels, RESET) for spec in shards.specs())


def test_a_failed_shard_goes_on_after_what_it_cannot_handle(running):
    shards = running()
    shards.publish(*"aa", "poison", *"aa")
    until = time.monotonic() + 30
    while b"FAILED" not in shards.gazctl.ok("shards", "list").stdout:
        assert time.monotonic() < until
        time.sleep(0.05)
    outcome = shards.reset("--to", "end", "--keep-state")
    assert outcome.status == 0, outcome.stderr
    shards.wait()
    shards.publish("a")
    shards.wait()
    assert shards.counts()["a"][-1] in {1, 3, 5}  # a partition of its own, or that of the poison
    listed = shards.gazctl.ok("shards", "list", "--lag").stdout
    assert b"FAILED" not in listed
    assert b":0" in listed


def test_a_position_is_a_time_or_offsets(running):
    shards = running()
    shards.publish(*"aab")
    shards.wait()
    time.sleep(0.01)
    now = datetime.now(UTC).isoformat()
    shards.publish(*"abb")
    shards.wait()
    assert shards.counts() == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert shards.reset("--to", now).status == 0
    shards.wait()
    assert shards.counts() == {"a": [1, 2, 3, 1], "b": [1, 2, 3, 1, 2]}
    lines = shards.reset("--to", now, "--dry-run", "-o", "json").stdout.splitlines()
    offsets = {line["source"]: line["offset"] for line in map(json.loads, lines)}
    assert len(offsets) == 2
    given = ",".join(f"{journal}={offset}" for journal, offset in offsets.items())
    assert shards.reset("--to", given, "--keep-state").status == 0
    shards.wait()
    assert shards.counts() == {"a": [1, 2, 3, 1, 2], "b": [1, 2, 3, 1, 2, 3, 4]}
    assert {spec.recovery_log_prefix for spec in shards.specs()} == {"recovery/generation-2"}


def test_what_cannot_be_reset_is_said_and_nothing_is_changed(running):
    shards = running()
    shards.publish("a")
    shards.wait()
    before = [spec.SerializeToString() for spec in shards.specs()]
    for arguments, text in (
        ((), "--to was not given: begin, end"),
        (("--to", "soon"), "--to: 'soon' is no time"),
        (("--to", "2026-01-31T12:00:00"), "has no time zone"),
        (("--to", "words/part-000=-1"), "is no JOURNAL=OFFSET"),
        (("--to", "words/part-000=0"), "words/part-001 has no offset"),
        (("--to", "words/part-000=0,words/part-001=0,other=1"), "other is no source of"),
        (("--to", "words/part-000=0,words/part-001=99999"), "after its write head"),
    ):
        outcome = shards.reset(*arguments)
        assert outcome.status == 1, arguments
        assert text in outcome.stderr
        assert "Traceback" not in outcome.stderr
    assert shards.gazctl("shards", "reset", "--to", "end").status == 1
    assert shards.gazctl("shards", "reset", "-l", "id=no", "--to", "end").status == 1
    assert shards.reset("--to", "begin", "--dry-run").stdout.count(b"to reset") == 2
    assert [spec.SerializeToString() for spec in shards.specs()] == before


def test_an_interrupted_reset_is_completed_by_the_next(running):
    shards = running()
    shards.publish("a")
    shards.wait()
    # One that has disabled the shards, and created a log.
    text = shards.gazctl.ok("shards", "list", "-o", "yaml").stdout.decode()
    shards.gazctl.ok(
        "shards", "apply", stdin=text.replace("common:", "common:\n  disable: true").encode()
    )
    new = "recovery/generation-2/counts-in-rocks/words/part-000"
    spec = f"""
name: {new}
replication: 1
labels: [{{name: content-type, value: application/x-gazette-recoverylog}}]
fragment: {{length: 1024, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1s}}
"""
    shards.gazctl.ok("journals", "apply", stdin=spec.encode())
    outcome = shards.reset("--to", "begin")
    assert outcome.status == 0, outcome.stderr
    shards.wait()
    assert shards.counts() == {"a": [1, 1]}
    assert {spec.recovery_log_prefix for spec in shards.specs()} == {
        "recovery/generation-2",
        "recovery/generation-3",
    }


def test_shards_are_deleted_with_their_state_and_begin_from_nothing(running):
    shards = running()
    shards.publish(*"aa")
    shards.wait()
    root = shards.gazette.fragments
    delete = ("shards", "delete", "-l", "id:prefix=counts-in", "--yes")
    refused = shards.gazctl(*delete, "--with-log")
    assert refused.status == 1
    assert "--file-root" in refused.stderr
    outcome = shards.gazctl(*delete, "--with-log", "--file-root", str(root))
    assert outcome.status == 0, outcome.stderr
    assert outcome.stdout.count(b"deleted") == 2
    # The process creates them again, with new logs.
    until = time.monotonic() + 30
    while len(shards.specs()) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    shards.wait()
    assert shards.counts() == {"a": [1, 2, 1, 2]}


def test_a_deleted_shard_whose_log_stays_continues_with_it(running):
    shards = running()
    shards.publish(*"aa")
    shards.wait()
    outcome = shards.gazctl("shards", "delete", "-l", "id", "--yes")
    assert outcome.status == 0, outcome.stderr
    until = time.monotonic() + 30
    while len(shards.specs()) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    shards.wait()
    shards.publish("a")
    shards.wait()
    assert shards.counts() == {"a": [1, 2, 3]}


def failed(shards):
    """Wait until a shard has failed, and return its id."""
    until = time.monotonic() + 30
    while True:
        for each in shards.consumer.list_shards():
            if any(status.code == cpb.ReplicaStatus.FAILED for status in each.status):
                return each.spec.id
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("kind", STORES)
def test_a_failed_shard_passes_over_one_record_and_nothing_else(running, kind):
    shards = running(kind)
    # One partition: what is before the record in its transaction is handled, and what is after it.
    shards.publish("poison", *["a"] * 50, "poison", *["b"] * 50)
    first = failed(shards)
    dry = shards.gazctl("shards", "skip", first, "--dry-run", "--save", "bad.jsonl")
    assert dry.status == 0, dry.stderr
    saved = shards.gazctl.directory / "bad.jsonl"
    assert not saved.exists()
    for number in (1, 2):
        assert failed(shards) == first
        outcome = shards.gazctl("shards", "skip", first, "--save", "bad.jsonl")
        assert outcome.status == 0, outcome.stderr
        lines = saved.read_text().splitlines()
        assert [json.loads(line)["word"] for line in lines] == ["poison"] * number
        until = time.monotonic() + 30
        while first in {
            each.spec.id
            for each in shards.consumer.list_shards()
            if any(status.code == cpb.ReplicaStatus.FAILED for status in each.status)
            and f"offset {offset_of(outcome)}" in str(each.status)
        }:
            assert time.monotonic() < until
            time.sleep(0.05)
    shards.wait()
    assert {word: len(found) for word, found in shards.counts().items()} == {"a": 50, "b": 50}
    assert all(found == list(range(1, 51)) for found in shards.counts().values())
    refused = shards.gazctl("shards", "skip", first)
    assert refused.status == 1
    assert "has not failed" in refused.stderr
    # What was skipped once is handled by a reset from the begin.
    assert shards.reset("--to", "begin").status == 0
    assert failed(shards) == first


def offset_of(outcome):
    return outcome.text.splitlines()[1].split()[3]


def test_lines_that_cannot_be_decoded_are_skipped_and_saved(running, tmp_path):
    shards = running()
    shards.gazctl.ok("journals", "append", "words/part-000", stdin=b"no word\nnor this\n")
    first = failed(shards)
    many = shards.gazctl("shards", "skip", first, "--count", "3")
    assert many.status == 1
    assert "has 2 records from offset 0 on, and 3 are to be skipped" in many.stderr
    path = tmp_path / "bad"
    outcome = shards.gazctl("shards", "skip", first, "--count", "2", "--save", str(path))
    assert outcome.status == 0, outcome.stderr
    assert path.read_bytes() == b"no word\nnor this\n"
    shards.publish(*"abc")
    shards.wait()
    assert shards.counts() == {"a": [1], "b": [1], "c": [1]}
    unknown = shards.gazctl("shards", "skip", "no/such/shard")
    assert unknown.status == 1
    assert "no shard exists with the given id (no/such/shard)" in unknown.stderr


def test_a_record_of_a_transaction_that_ended_late_is_skipped(running):
    shards = running()
    by_word = mapping.modulo("topic=words", key=lambda message: message.word)

    def between(_intents):
        shards.publish(*"abcd" * 5)  # committed before, at greater offsets of both partitions
        until = time.monotonic() + 30
        while shards.counts() != {word: [1, 2, 3, 4, 5] for word in "abcd"}:
            assert time.monotonic() < until
            time.sleep(0.05)

    with (
        Publisher(mapping=by_word, transport=shards.gazette.transport) as publisher,
        publisher.transaction(save=between) as txn,
    ):
        for word in ("poison", *"abcd"):
            txn.publish(Word(word))
    first = failed(shards)
    outcome = shards.gazctl("shards", "skip", first)
    assert outcome.status == 0, outcome.stderr
    shards.wait()
    assert shards.counts() == {word: [1, 2, 3, 4, 5, 6] for word in "abcd"}
