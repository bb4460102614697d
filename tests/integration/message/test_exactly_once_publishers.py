"""What publishers of all kinds write, from wherever they are called, is seen exactly once."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from functools import partial

import msgspec
import pydantic
import pytest

from crash.transactions import History, Message, Transaction, check_uninterrupted
from gazette_sdk.message import JsonMessage, Publisher, Reader
from gazette_sdk.transport import loop as sdk_loop
from integration.message.topics import Entry, Topic, entries, message_of, read_all, transaction_of
from support.protobuf_messages import Gram
from support.threads import in_parallel

WAIT_S = 30.0


class ChangedMindError(Exception):
    """Whoever publishes does not want to any more."""


# -------------------------------------------------- kinds of messages, both kinds of publishing


@dataclass
class Line(JsonMessage):
    text: str


class Struct(msgspec.Struct):
    text: str


class Model(pydantic.BaseModel):
    text: str


KINDS = [Line, Struct, Model, dict, Gram]


def text_of(message: object) -> str:
    return message["text"] if isinstance(message, dict) else message.text


def which(message: object) -> Message:
    producer, number, index, _ = text_of(message).split()
    return Message(producer, int(number), 0, int(index))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_two_publishers_and_two_readers(topic: Topic, kind: type):
    """One publishes message by message, the other transactions, some of which it rolls back."""
    topic.create(
        *range(3),
        content_type="application/x-protobuf-fixed" if kind is Gram else "application/x-ndjson",
    )
    names = [topic.name(part) for part in range(3)]
    history = History()
    lock = threading.Lock()

    def decide(producer: str, number: int, journals: list[str]) -> list[object]:
        with lock:
            history.decide(Transaction(producer, number, 0, tuple(journals)))
        return [
            kind(text=f"{producer} {number} {index} {journal}")
            for index, journal in enumerate(journals)
        ]

    def journal_of(message: object) -> str:
        return text_of(message).split()[3]

    def publish_singles() -> None:
        with Publisher(journal_of) as publisher:
            for number in range(400):
                publisher.publish(*decide("singles", number, [names[number % 3]]))

    def roll_back(publisher: Publisher, number: int) -> None:
        with publisher.transaction() as transaction:
            for index in range(1 + number % 20):
                transaction.publish(kind(text=f"nobody {number} {index} {names[index % 3]}"))
            raise ChangedMindError

    def publish_transactions() -> None:
        with Publisher(journal_of) as publisher:
            for number in range(30):
                if number % 4 == 1:
                    with pytest.raises(ChangedMindError):
                        roll_back(publisher, number)
                journals = [names[index % (1 + number % 3)] for index in range(1 + number * 2)]
                messages = decide("transactions", number, journals)
                with publisher.transaction() as transaction:
                    for message in messages[:number]:
                        transaction.publish(message)
                    transaction.publish_batch(messages[number:])

    with Reader(kind, topic.selector, block=True) as reader:
        tailed: dict[str, list[Message]] = {}

        def tail() -> None:
            wanted = 400 + sum(1 + number * 2 for number in range(30))
            for _, envelope in zip(range(wanted), reader, strict=False):
                tailed.setdefault(envelope.journal, []).append(which(envelope.message))

        in_parallel([publish_singles, publish_transactions, tail])
    again = read_all(topic, kind, which)
    for delivered in (tailed, again):
        history.check(delivered)
        check_uninterrupted(delivered)


# ------------------------------------------------------------------------- threads and loops


def test_one_publisher_serves_eight_threads_and_two_loops_at_once(topic: Topic):
    topic.create(*range(4))
    names = [topic.name(part) for part in range(4)]
    histories = {}
    publisher = Publisher(lambda entry: entry.journal)

    def plan(producer: str) -> list[list[Entry]]:
        made = [
            entries(
                producer, number, [names[(number + index) % 4] for index in range(number % 5 + 1)]
            )
            for number in range(60)
        ]
        histories[producer] = [transaction_of(each) for each in made]
        return made

    def in_thread(publications: list[list[Entry]]) -> None:
        for number, publication in enumerate(publications):
            if number % 10 == 3:
                with publisher.transaction() as transaction:
                    transaction.publish_batch(publication)
                continue
            if number % 2:
                publisher.publish_batch(publication)
                continue
            receipts = [publisher.publish(entry) for entry in publication]
            if number % 7 == 0:
                receipts[-1].result(WAIT_S)

    async def in_coroutine(publications: list[list[Entry]]) -> None:
        for number, publication in enumerate(publications):
            if number % 10 == 3:
                async with publisher.transaction() as transaction:
                    transaction.publish_batch(publication)
                continue
            receipts = [publisher.publish(entry) for entry in publication]
            if number % 5 == 0:
                await receipts[0]
            else:
                await asyncio.sleep(0)

    async def on_running_loop() -> None:
        async with asyncio.TaskGroup() as group:
            for task in range(3):
                group.create_task(in_coroutine(plan(f"task-{task}")))

    with publisher:
        sdk_loop.run(publisher.ready(), WAIT_S)
        in_parallel(
            [
                *(partial(in_thread, plan(f"thread-{thread}")) for thread in range(8)),
                lambda: asyncio.run(on_running_loop()),
                lambda: sdk_loop.run(in_coroutine(plan("sdk-loop")), WAIT_S),
            ]
        )
        publisher.flush(WAIT_S)
    History(histories).check(read_all(topic, Entry, message_of))
    assert len(histories) == 12


@pytest.mark.parametrize("shared", [True, False], ids=["one publisher", "six publishers"])
def test_transactions_of_many_threads_are_each_in_one_piece(topic: Topic, shared: bool):
    """Six threads have transactions open over the same journals, at the same time."""
    topic.create(*range(3))
    names = [topic.name(part) for part in range(3)]
    histories: dict[str, list[Transaction]] = {}
    meeting = threading.Barrier(6, timeout=WAIT_S)

    def publish(name: str, publisher: Publisher) -> None:
        for number in range(10):
            publication = entries(name, number, [names[i % 3] for i in range(30)])
            histories.setdefault(name, []).append(transaction_of(publication))
            with publisher.transaction() as transaction:
                for entry in publication[:10]:
                    transaction.publish(entry)
                meeting.wait()  # all have begun, none has ended
                if number % 3 == 2:
                    publisher.publish(Entry(f"beside {name}", number, 0, names[0])).result(WAIT_S)
                transaction.publish_batch(publication[10:])
                meeting.wait()

    threads = [f"thread-{thread}" for thread in range(6)]
    publishers = [Publisher(lambda entry: entry.journal) for _ in range(1 if shared else 6)]
    with contextlib.ExitStack() as stack:
        for publisher in publishers:
            stack.enter_context(publisher)
        in_parallel(
            partial(publish, name, publishers[0 if shared else index])
            for index, name in enumerate(threads)
        )
    for ring_size in (1, 8192):
        delivered = read_all(topic, Entry, message_of, ring_size=ring_size)
        History(histories).check(
            {
                journal: [message for message in messages if message.producer in histories]
                for journal, messages in delivered.items()
            }
        )
        check_uninterrupted(delivered)
        beside = [m for m in delivered[names[0]] if m.producer not in histories]
        assert sorted(beside) == sorted(
            Message(f"beside {name}", number, 0, 0) for name in threads for number in (2, 5, 8)
        )


def test_one_transaction_is_filled_by_many_threads(topic: Topic):
    topic.create(*range(3))
    names = [topic.name(part) for part in range(3)]
    history = History()
    with (
        Publisher(lambda entry: entry.journal) as publisher,
        publisher.transaction() as transaction,
    ):

        def publish(name: str) -> None:
            publication = entries(name, 0, [names[i % 3] for i in range(100)])
            for entry in publication:
                transaction.publish(entry)

        in_parallel(partial(publish, f"thread-{thread}") for thread in range(8))
        assert read_all(topic, Entry, message_of) == {}, "visible before it is acknowledged"
    for thread in range(8):
        history.decide(
            transaction_of(entries(f"thread-{thread}", 0, [names[i % 3] for i in range(100)]))
        )
    history.check(read_all(topic, Entry, message_of))


# ----------------------------------------------------------------------------------- forks


FORKED = textwrap.dedent(
    """
    import os, sys
    from gazette_sdk.errors import ClosedError, ConfigurationError
    from gazette_sdk.message import Publisher
    from integration.message.topics import entries

    when, *journals = sys.argv[1:]
    publisher = Publisher(lambda entry: entry.journal)

    def publish(producer):
        for number in range(20):
            with publisher.transaction() as transaction:
                for entry in entries(producer, number, journals):
                    transaction.publish(entry)
        for number in range(20, 40):
            for entry in entries(producer, number, journals):
                publisher.publish(entry)

    if when == "used":
        publish("early")  # nobody waits for the last ones before the fork
    children = []
    for child in range(2):
        process = os.fork()
        if process == 0:
            try:
                try:
                    publish(f"refused-{child}")
                except ClosedError as error:
                    assert "make another Publisher in the child" in str(error)
                else:
                    raise AssertionError
                publisher.close(30)
                publisher = Publisher(lambda entry: entry.journal)
                publish(f"child-{child}")
                publisher.close(30)
                os._exit(0)
            except ConfigurationError as error:
                print(error, flush=True)
                os._exit(3)
            finally:
                os._exit(1)
        children.append(process)
    publish("parent")
    for child in children:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), publisher.producer.hex())
    publisher.close(30)
    """
)


def ends(printed: str) -> list[str]:
    """Exit statuses of the children, of which each stands on a line with the parent's id."""
    return re.findall(r"^(-?\d+) [0-9a-f]{12}$", printed, re.MULTILINE)


@pytest.mark.parametrize("wire", ["stream", "grpc"])
@pytest.mark.parametrize("when", ["unused", "used"])
def test_a_fork_publishes_nothing_twice(topic: Topic, when: str, wire: str):
    """A child is refused, and has a publisher of its own; over gRPC it cannot, after use."""
    topic.create(*range(2))
    names = [topic.name(part) for part in range(2)]
    program = subprocess.run(
        [sys.executable, "-c", FORKED, when, *names],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "GAZETTE_ADDRESS": f"{topic.cluster.address}?wire={wire}",
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    producers = ["parent"]
    if when == "used":
        producers.append("early")
    if when == "used" and wire == "grpc":
        # A child says that it cannot go on; or gRPC's own threads, cut off, have crashed it.
        said = program.stdout.count("which does not survive that; connect first in the child")
        crashed = sum(-int(end) in {signal.SIGSEGV, signal.SIGABRT} for end in ends(program.stdout))
        assert said + crashed == 2
    else:
        assert ends(program.stdout) == ["0", "0"]
        producers += ["child-0", "child-1"]
    history = History()
    for producer in producers:
        for number in range(40):
            history.decide(transaction_of(entries(producer, number, names)))
    history.check(read_all(topic, Entry, message_of))
