"""Appends whose answers are lost are made again; committed readers see their messages once."""

import random
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

import pytest

from crash.transactions import History, Transaction, check_uninterrupted
from gazette_sdk import connect
from gazette_sdk.message import Publisher, Reader
from gazette_sdk.testing.tcp_proxy import TcpProxy
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.base import Transport
from integration.message.topics import Entry, Topic, entries, message_of, read_all, transaction_of
from support.threads import in_parallel

WAIT_S = 60.0
CUTS = 12
HOLD_MAX_S = 0.05
SEED = 3


def lose_answers(proxy: TcpProxy, hold_s: float) -> None:
    """Hold answers back for a while, in which appends land unseen, then break the connections."""
    proxy.cut("answers")
    time.sleep(hold_s)
    proxy.reset()
    proxy.heal()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "publishers make no progress"
        time.sleep(0.002)


def test_messages_whose_acknowledgement_was_lost_are_seen_once(topic: Topic):
    topic.create(*range(3))
    names = [topic.name(part) for part in range(3)]
    histories: dict[str, list[Transaction]] = {name: [] for name in PROGRAMS}
    wanted: dict[str, int] = {}
    over = []

    def publish(name: str, transport: Transport) -> None:
        program, chance = PROGRAMS[name], random.Random(f"{SEED} {name}")
        with Publisher(lambda entry: entry.journal, transport=transport) as publisher:
            while not over:
                journals = chance.choices(names, k=chance.randint(1, 60))
                publication = entries(name, len(histories[name]), journals)
                histories[name].append(transaction_of(publication))
                program(publisher, publication)

    def all_come_through() -> bool:
        return all(len(known) >= wanted[name] for name, known in histories.items())

    def slam() -> None:
        chance = random.Random(SEED)
        try:
            for _ in range(CUTS):
                wanted.update({name: len(known) + 2 for name, known in histories.items()})
                until(all_come_through)
                lose_answers(proxy, chance.random() * HOLD_MAX_S)
        finally:
            over.append(True)

    with TcpProxy(urlsplit(topic.cluster.address).port) as proxy:
        address = proxy.address
        # Without routes, every call goes through the door.
        transports = {name: connect(address, cache_size=0) for name in PROGRAMS}
        in_parallel([*(partial(publish, *each) for each in transports.items()), slam], 2 * WAIT_S)
        for transport in transports.values():
            sdk_loop.run(transport.aclose(), WAIT_S)

    history = History(histories)
    for ring_size in (8192, 8):
        delivered = read_all(topic, Entry, message_of, ring_size=ring_size)
        history.check(delivered)
        transactions = {
            journal: [message for message in messages if message.producer == "transactions"]
            for journal, messages in delivered.items()
        }
        check_uninterrupted(transactions)
    seen = sum(map(len, delivered.values()))
    with Reader(Entry, topic.selector, isolation="uncommitted") as reader:
        written = sum(envelope.message.producer in histories for envelope in reader)
    print(f"{written} messages were written, {seen} are committed")
    assert written > seen, "nothing was written twice: no answer was lost"


def one_by_one(publisher: Publisher, publication: list[Entry]) -> None:
    receipts = [publisher.publish(entry) for entry in publication]
    receipts[-1].result(WAIT_S)


def in_batches(publisher: Publisher, publication: list[Entry]) -> None:
    publisher.publish_batch(publication).result(WAIT_S)


def in_transactions(publisher: Publisher, publication: list[Entry]) -> None:
    with publisher.transaction() as transaction:
        for entry in publication:
            transaction.publish(entry)


PROGRAMS = {"singles": one_by_one, "batches": in_batches, "transactions": in_transactions}


@pytest.mark.parametrize("times", [1, 3])
def test_intents_are_written_again_as_often_as_one_likes(topic: Topic, times: int):
    """Whoever was told nothing writes the intents again: it is the same acknowledgement."""
    topic.create(*range(3))
    names = [topic.name(part) for part in range(3)]
    history, stored = History(), []
    for number in range(4):
        publication = entries("ada", number, names * 3)
        history.decide(transaction_of(publication))
        with Publisher(lambda entry: entry.journal) as publisher:
            with publisher.transaction(save=stored.append) as transaction:
                transaction.publish_batch(publication)
            for _ in range(times):
                publisher.acknowledge(stored[-1]).result(WAIT_S)
        with Publisher() as another:
            another.acknowledge(stored[-1].to_bytes()).result(WAIT_S)
    delivered = read_all(topic, Entry, message_of)
    history.check(delivered)
    check_uninterrupted(delivered)


def test_a_transaction_whose_save_failed_is_seen_whole_or_not_at_all(topic: Topic):
    """Whether what ``save`` stored counts, nobody can say; it is the same for all messages."""
    topic.create(*range(2))
    names = [topic.name(part) for part in range(2)]
    stored: list[bytes] = []

    def store_and_fail(intents) -> None:
        stored.append(intents.to_bytes())
        raise DiskError

    decided = entries("ada", 0, names * 5)
    with Publisher(lambda entry: entry.journal) as publisher:
        with pytest.raises(DiskError), publisher.transaction(save=store_and_fail) as transaction:
            transaction.publish_batch(decided)
        publisher.close(WAIT_S)
    with Publisher() as publisher:
        publisher.acknowledge(stored[0]).result(WAIT_S)
    delivered = read_all(topic, Entry, message_of)
    if any(delivered.values()):
        history = History()
        history.decide(transaction_of(decided))
        history.check(delivered)


class DiskError(Exception):
    """Storing the intents ended badly."""
