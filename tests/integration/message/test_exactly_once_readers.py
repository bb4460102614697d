"""Committed readers of many journals: resumed at any point, and while journals come and go."""

import random
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from crash.transactions import History, Message, Transaction, check_uninterrupted
from gazette_sdk.message import Publisher, Reader
from integration.message.topics import (
    Entry,
    Topic,
    delete,
    entries,
    message_of,
    transaction_of,
)
from support.threads import in_parallel

WAIT_S = 30.0
JOURNALS = 20


def publish_to_all(topic: Topic, seed: int) -> History:
    """Three programs publish at once, to all journals."""
    names = [topic.name(part) for part in range(JOURNALS)]
    histories: dict[str, list[Transaction]] = {}

    def publish(name: str, *, transactions: bool) -> None:
        chance = random.Random(f"{seed} {name}")
        with Publisher(lambda entry: entry.journal) as publisher:
            for number in range(20):
                some = chance.sample(names, chance.choice([1, 4, JOURNALS]))
                publication = entries(name, number, chance.choices(some, k=chance.randint(1, 80)))
                histories.setdefault(name, []).append(transaction_of(publication))
                if transactions:
                    with publisher.transaction() as transaction:
                        transaction.publish_batch(publication)
                else:
                    publisher.publish_batch(publication)

    in_parallel(
        [
            partial(publish, "batches", transactions=False),
            partial(publish, "transactions", transactions=True),
            partial(publish, "more transactions", transactions=True),
        ]
    )
    return History(histories)


@pytest.mark.parametrize(("ring_size", "seed"), [(1, 1), (20, 2), (8192, 3)])
def test_a_reader_of_twenty_journals_is_resumed_again_and_again(
    topic: Topic, ring_size: int, seed: int
):
    """Each reader takes some messages, stores its checkpoint and is gone."""
    topic.create(*range(JOURNALS), fragment_bytes=1 << 16)
    history = publish_to_all(topic, seed)
    wanted = sum(len(t.journals) for known in history.decided.values() for t in known)
    chance = random.Random(f"{seed} {ring_size}")
    delivered: dict[str, list[Message]] = {}
    stored: bytes | None = None
    taken, readers = 0, 0
    while taken < wanted:
        readers += 1
        count = chance.choice([1, 3, 60, 400])
        with Reader(Entry, topic.selector, checkpoint=stored, ring_size=ring_size) as reader:
            for _, envelope in zip(range(count), reader, strict=False):
                delivered.setdefault(envelope.journal, []).append(message_of(envelope.message))
                taken += 1
            stored = reader.checkpoint().to_bytes()
        assert readers < wanted, "readers find nothing any more"
    with Reader(Entry, topic.selector, checkpoint=stored, ring_size=ring_size) as reader:
        assert [envelope.message for envelope in reader] == []
    history.check(delivered)
    check_uninterrupted(
        {
            journal: [message for message in messages if message.producer != "batches"]
            for journal, messages in delivered.items()
        }
    )
    print(f"{readers} readers of {taken} messages")


class Tail:
    """A reader in a thread, which follows a selector."""

    def __init__(self, topic: Topic) -> None:
        self.delivered: dict[str, list[Message]] = {}
        self.reader = Reader(Entry, topic.selector, block=True)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for envelope in self.reader:
                self.delivered.setdefault(envelope.journal, []).append(message_of(envelope.message))
        except BaseException as error:  # noqa: BLE001 - raised below
            self._failure = error

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self._failure is None, self._failure
            assert self._thread.is_alive(), "a reader that blocks came to an end"
            assert time.monotonic() < deadline, f"not seen: {self.delivered}"
            time.sleep(0.005)

    def stop(self) -> None:
        self.reader.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        assert self._failure is None, self._failure


def test_a_reader_follows_journals_which_come_and_go(topic: Topic):
    topic.create(0, 1)
    histories: dict[str, list[Transaction]] = {}
    tail = Tail(topic)
    try:
        with Publisher(lambda entry: entry.journal) as publisher:

            def publish(*parts: int) -> None:
                known = histories.setdefault("ada", [])
                journals = [topic.name(part) for part in parts] * 20
                publication = entries("ada", len(known), journals)
                known.append(transaction_of(publication))
                with publisher.transaction() as transaction:
                    transaction.publish_batch(publication)

            def seen() -> bool:
                count = sum(len(transaction.journals) for transaction in histories["ada"])
                return sum(map(len, tail.delivered.values())) >= count

            publish(0, 1)
            tail.until(seen)
            topic.create(2, 3)
            publish(0, 2, 3)
            publish(3, 2)
            tail.until(seen)
            delete(topic, 1, 2)
            publish(0, 3)
            topic.create(4)
            publish(4, 0)
            tail.until(seen)
            # A journal which is created anew is another journal: read from its begin.
            forget_fragments(topic, 2)
            topic.create(2)
            publish(2, 4)
            tail.until(seen)
    finally:
        tail.stop()
    history = History(histories)
    history.check(tail.delivered)
    check_uninterrupted(tail.delivered)
    # Those which are there now are seen by a new reader as well, and nothing again by one that
    # goes on.
    stored = tail.reader.checkpoint()
    with Reader(Entry, topic.selector, checkpoint=stored) as reader:
        assert [envelope.message for envelope in reader] == []


def forget_fragments(topic: Topic, part: int) -> None:
    """Remove what a deleted journal left in the store, which one of its name would go on from."""
    left = topic.cluster.fragments / topic.name(part)
    deadline = time.monotonic() + WAIT_S
    while not left.exists():
        assert time.monotonic() < deadline, "the content of a deleted journal is not stored"
        time.sleep(0.005)
    shutil.rmtree(left)
