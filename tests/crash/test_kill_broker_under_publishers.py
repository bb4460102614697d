"""`kill -9` of brokers under publishers: nothing is lost, what is written twice is seen once."""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from crash.dev_cluster import DevCluster
from crash.followers import Follower, read_all
from crash.transactions import History, Message, Transaction, check_uninterrupted
from gazette_sdk.message import JsonMessage, Publisher, Reader
from gazette_sdk.transport.stream.blocking import BlockingClient, StreamBlockingCall

KILLS = int(os.environ.get("GAZETTE_KILLS", "4"))
CHECKPOINTS_CHECKED = 4
SEED = 7
PROGRESS_TIMEOUT_S = 60.0
ACKNOWLEDGE_TIMEOUT_S = 120.0
PENDING_BYTES_MAX = 2 << 20
PAUSE_S_MAX = 0.05
"""Pause of a program between rounds. Readers check every message several times, so the number of
messages determines how long the test takes."""

SELECTOR = "topic=brokers"
NAMES = tuple(f"brokers/part-{part:03d}" for part in range(3))
JOURNALS = """
name: brokers/
replication: 1
labels:
  - {name: topic, value: brokers}
  - {name: content-type, value: application/x-ndjson}
fragment:
  length: 1048576
  compression_codec: SNAPPY
  stores: ["file:///"]
  refresh_interval: 1s
children:
""" + "".join(f"  - name: {name}\n" for name in NAMES)


@dataclass
class Item(JsonMessage):
    """A message; which it is, and something that takes room."""

    producer: str
    number: int
    index: int
    journal: str
    body: str


def message_of(item: Item) -> Message:
    return Message(item.producer, item.number, 0, item.index)


@dataclass
class Program:
    """A thread which publishes until it is told to stop.

    Whatever it publishes counts as decided: the publisher tries it until it succeeds.
    """

    name: str
    publisher: Publisher
    chance: random.Random
    history: History
    stopping: threading.Event
    failure: BaseException | None = None

    def items(self, count: int) -> list[Item]:
        """New messages, which a transaction of the history is made of."""
        number = len(self.history.decided.get(self.name, []))
        length = self.chance.choice([0, 100, 1000, 20_000])
        items = [
            Item(self.name, number, index, self.chance.choice(NAMES), "x" * length)
            for index in range(count)
        ]
        self.history.decide(Transaction(self.name, number, 0, tuple(i.journal for i in items)))
        return items

    def told(self, first: int) -> None:
        """Everything from a number on is acknowledged."""
        for transaction in self.history.decided[self.name][first:]:
            self.history.acknowledge(self.name, transaction.number)

    def run(self, publish: Callable[["Program"], None]) -> None:
        try:
            while not self.stopping.is_set():
                first = len(self.history.decided.get(self.name, []))
                publish(self)
                self.told(first)
                self.stopping.wait(self.chance.random() * PAUSE_S_MAX)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error


def one_by_one(program: Program) -> None:
    receipts = [
        program.publisher.publish(item)
        for _ in range(program.chance.randint(1, 100))
        for item in program.items(1)
    ]
    for receipt in receipts:
        receipt.result(ACKNOWLEDGE_TIMEOUT_S)


def waiting_for_each(program: Program) -> None:
    """The thread appends by itself, mostly."""
    for _ in range(program.chance.randint(5, 100)):
        for item in program.items(1):
            program.publisher.publish(item).result(ACKNOWLEDGE_TIMEOUT_S)


def in_batches(program: Program) -> None:
    batches = [
        program.publisher.publish_batch(program.items(program.chance.randint(1, 100)))
        for _ in range(program.chance.randint(1, 3))
    ]
    for batch in batches:
        batch.result(ACKNOWLEDGE_TIMEOUT_S)


def in_transactions(program: Program) -> None:
    with program.publisher.transaction() as transaction:
        items = program.items(program.chance.randint(1, 200))
        some = program.chance.randint(0, len(items))
        for item in items[:some]:
            transaction.publish(item)
        if some < len(items):
            transaction.publish_batch(items[some:])


def rolled_back_or_not(program: Program) -> None:
    """As transactions are; messages which the history does not know stand in others."""
    with pytest.raises(ChangedMindError):
        change_mind(program)
    in_transactions(program)


def change_mind(program: Program) -> None:
    with program.publisher.transaction() as transaction:
        for index in range(program.chance.randint(1, 50)):
            journal = program.chance.choice(NAMES)
            transaction.publish(Item("nobody", 0, index, journal, "rolled back"))
        raise ChangedMindError


class ChangedMindError(Exception):
    """Whoever publishes does not want to any more."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DevCluster]:
    with DevCluster(tmp_path / "data") as cluster:
        cluster.apply(JOURNALS)
        monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(200 + 20 * KILLS)
def test_retries_across_kills_are_seen_once(cluster: DevCluster, monkeypatch: pytest.MonkeyPatch):
    inline = count_inline_appends(monkeypatch)
    stopping = threading.Event()
    publishers = [
        Publisher(lambda item: item.journal, pending_bytes_max=PENDING_BYTES_MAX) for _ in range(5)
    ]
    # The first publisher is used by three threads, the last one by two.
    work = [
        ("singles", publishers[0], one_by_one),
        ("waiting among others", publishers[0], waiting_for_each),
        ("waiting", publishers[4], waiting_for_each),
        ("waiting, too", publishers[4], waiting_for_each),
        ("batches", publishers[0], in_batches),
        ("more batches", publishers[1], in_batches),
        ("transactions", publishers[2], in_transactions),
        ("roll-backs", publishers[3], rolled_back_or_not),
    ]
    programs = [
        Program(name, publisher, random.Random(f"{SEED} {name}"), History(), stopping)
        for name, publisher, _ in work
    ]
    threads = [
        threading.Thread(target=program.run, args=(publish,), name=program.name, daemon=True)
        for program, (_, _, publish) in zip(programs, work, strict=True)
    ]
    chance, readers = random.Random(SEED), random.Random(f"follower {SEED}")
    with Follower(Item, SELECTOR, message_of, chance=readers, ring_size=128) as follower:
        for thread in threads:
            thread.start()
        try:
            for _ in range(KILLS):
                wait_for_progress(programs, chance.randint(1, 3))
                time.sleep(chance.random() * 0.3)  # the kill comes at no moment they could know
                cluster.kill()
                cluster.start()
            wait_for_progress(programs, 1)
        finally:
            stopping.set()
            deadline = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        assert not [program.failure for program in programs if program.failure is not None]
        assert not any(thread.is_alive() for thread in threads)
        for publisher in publishers:
            publisher.close(ACKNOWLEDGE_TIMEOUT_S)

    history = History()
    for program in programs:
        history.decided |= program.history.decided
        history.acknowledged |= program.history.acknowledged
    again = read_all(Item, SELECTOR, message_of)
    written = 0
    with Reader(Item, SELECTOR, isolation="uncommitted") as reader:
        for envelope in reader:
            written += envelope.message.producer in history.decided
    seen = sum(map(len, again.values()))
    print(
        f"{history.decided_count} publications of {seen} messages, {written - seen} of which were"
        f" written twice, {inline.total()} inline appends, {KILLS} kills;"
        f" {follower.restarts} restarts of the reader,"
        f" {follower.relapses} from earlier checkpoints"
    )
    for delivered in (follower.delivered, again):
        history.check(delivered)
        check_uninterrupted(transactions_in(delivered))
    follower.check_checkpoints(CHECKPOINTS_CHECKED)
    assert len(history.acknowledged) == history.decided_count
    assert inline["waiting"]
    assert inline["waiting, too"]


def count_inline_appends(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the number of inline appends of each thread."""
    counts: Counter[str] = Counter()
    append = BlockingClient.append

    def counting(*arguments: Any) -> StreamBlockingCall | None:
        call = append(*arguments)
        if call is not None:
            counts[threading.current_thread().name] += 1
        return call

    monkeypatch.setattr(BlockingClient, "append", counting)
    return counts


def wait_for_progress(programs: list[Program], rounds: int) -> None:
    """Wait until every program was told of so many further publications."""
    wanted = [len(program.history.acknowledged) + rounds for program in programs]
    deadline = time.monotonic() + PROGRESS_TIMEOUT_S
    while any(
        len(program.history.acknowledged) < count
        for program, count in zip(programs, wanted, strict=True)
    ):
        assert not [program.failure for program in programs if program.failure is not None]
        assert time.monotonic() < deadline, "publishers make no progress"
        time.sleep(0.005)


def transactions_in(delivered):
    return {
        journal: [m for m in messages if m.producer in {"transactions", "roll-backs"}]
        for journal, messages in delivered.items()
    }
