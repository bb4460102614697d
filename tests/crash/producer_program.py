"""A producer of transactions which may be killed at any moment, and goes on from what it stored.

What it publishes follows from a seed alone, so that whoever reads the journals knows what each
transaction holds. Its whole state is one file, replaced atomically: which attempt at which
transaction was decided, and the intents that acknowledge it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from crash.transactions import Message, Transaction
from gazette_sdk.message import JsonMessage, Publisher
from gazette_sdk.message.transaction import Transaction as Publishing
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.wire import ANYWHERE, AppendItem, Target

__all__ = [
    "Assignment",
    "Decision",
    "Entry",
    "Event",
    "Moment",
    "message_of",
    "plan",
    "produce",
]

ACKNOWLEDGE_TIMEOUT_S = 60.0
MESSAGES_MAX = 200
LARGE_BYTES = 400_000
WAY_S = 0.005


@dataclass
class Entry(JsonMessage):
    """A message. Everything in it follows from the seed and its first four fields."""

    producer: str
    number: int
    attempt: int
    index: int
    body: str


class Moment(StrEnum):
    """How far the program is; what follows is under way."""

    STARTED = "started"  # writing the intents of the last transaction again
    RECOVERED = "recovered"  # making a new transaction
    PUBLISHING = "publishing"
    PUBLISHED = "published"  # waiting until everything is durable
    SAVING = "saving"  # storing the intents
    SAVED = "saved"  # writing the intents to the journals
    ACKNOWLEDGED = "acknowledged"  # making the next transaction
    ROLLED_BACK = "rolled back"
    FAILED = "failed"


class Event(NamedTuple):
    """A line of the program's log."""

    moment: Moment
    number: int = -1
    attempt: int = -1
    at: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Assignment:
    """What a process of a producer is to do.

    Attributes:
        process: counts the processes of this producer.
        state: path of its state file.
        transactions_max: it ends by itself after so many.
    """

    address: str
    journals: tuple[str, ...]
    seed: int
    producer: str
    process: int
    state: Path
    transactions_max: int


@dataclass(frozen=True)
class Decision:
    """The content of a state file."""

    number: int
    attempt: int
    intents: bytes

    @classmethod
    def load(cls, path: Path) -> Decision | None:
        if not path.exists():
            return None
        state = json.loads(path.read_bytes())
        return cls(state["number"], state["attempt"], base64.b64decode(state["intents"]))

    def store(self, path: Path) -> None:
        """Replace the state, so that a killed process leaves the old one or this one."""
        state = {
            "number": self.number,
            "attempt": self.attempt,
            "intents": base64.b64encode(self.intents).decode(),
        }
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def plan(
    seed: int, producer: str, number: int, attempt: int, journals: tuple[str, ...]
) -> Transaction:
    """The transaction that an attempt publishes: 1 to 200 messages, in any of the journals."""
    chance = random.Random(f"plan {seed} {producer} {number} {attempt}")
    count = chance.choice([1, chance.randint(2, 20), chance.randint(2, MESSAGES_MAX)])
    chosen = chance.sample(journals, chance.randint(1, len(journals)))
    return Transaction(
        producer, number, attempt, tuple(chance.choice(chosen) for _ in range(count))
    )


def body_of(seed: int, message: Message) -> str:
    """Mostly short; one in three hundred is large."""
    chance = random.Random(f"body {seed} {message}")
    length = LARGE_BYTES if chance.random() < 1 / 300 else chance.choice([0, 40, 400, 4000])
    return chance.randbytes(chance.randint(0, length) // 2).hex()


def message_of(seed: int, entry: Entry) -> Message:
    """What an entry says of itself, once its body was found to be the right one."""
    message = Message(entry.producer, entry.number, entry.attempt, entry.index)
    assert entry.body == body_of(seed, message), f"the body of {message} is another's"
    return message


class FarAway(GrpcTransport):
    """A cluster to which the way takes some milliseconds, now more, now less.

    Without that a transaction's acknowledgements land at nearly the same time.
    """

    async def append(
        self, requests: AsyncIterator[AppendItem], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        await asyncio.sleep(random.expovariate(1 / WAY_S))
        response = await super().append(requests, target)
        await asyncio.sleep(random.expovariate(1 / WAY_S))
        return response


class RolledBackError(Exception):
    """A program that changed its mind within a transaction."""


def produce(assignment: Assignment, log: Connection) -> None:
    """Acknowledge what was decided last, then make one transaction after the other."""
    try:
        _Program(assignment, log).run()
    except BaseException:
        log.send(Event(Moment.FAILED, text=traceback.format_exc()))
        raise


class _Program:
    def __init__(self, assignment: Assignment, log: Connection) -> None:
        self._assignment = assignment
        self._log = log
        self._chance = random.Random(
            f"process {assignment.seed} {assignment.producer} {assignment.process}"
        )
        self._attempts = 0

    def run(self) -> None:
        self._tell(Moment.STARTED)
        decided = Decision.load(self._assignment.state)
        transport = FarAway(self._assignment.address)
        with Publisher(transport=transport) as publisher:
            if decided is not None:
                publisher.acknowledge(decided.intents).result(ACKNOWLEDGE_TIMEOUT_S)
            self._tell(Moment.RECOVERED)
            number = 0 if decided is None else decided.number + 1
            for following in range(number, number + self._assignment.transactions_max):
                while not self._publish(publisher, following):
                    pass
        run(transport.aclose(), ACKNOWLEDGE_TIMEOUT_S)

    def _publish(self, publisher: Publisher, number: int) -> bool:
        """One attempt at a transaction; whether it was not rolled back."""
        given = self._assignment
        attempt = given.process << 16 | self._attempts
        self._attempts += 1
        transaction = plan(given.seed, given.producer, number, attempt, given.journals)

        def mapping(entry: Entry) -> str:
            return transaction.journals[entry.index]

        def save(intents) -> None:
            self._tell(Moment.SAVING, number, attempt)
            Decision(number, attempt, intents.to_bytes()).store(given.state)
            self._tell(Moment.SAVED, number, attempt)

        self._tell(Moment.PUBLISHING, number, attempt)
        try:
            with publisher.transaction(mapping=mapping, save=save) as publishing:
                self._fill(publishing, transaction)
                self._tell(Moment.PUBLISHED, number, attempt)
        except RolledBackError:
            self._tell(Moment.ROLLED_BACK, number, attempt)
            return False
        self._tell(Moment.ACKNOWLEDGED, number, attempt)
        return True

    def _fill(self, publishing: Publishing, transaction: Transaction) -> None:
        """Publish the messages; one time in ten something is wrong with one of them."""
        count = len(transaction.journals)
        failing = self._chance.randrange(count) if self._chance.random() < 0.1 else count
        for entries in self._portions(transaction):
            if len(entries) == 1:
                publishing.publish(entries[0])
            else:
                publishing.publish_batch(entries)
            if entries[-1].index >= failing:
                raise RolledBackError

    def _portions(self, transaction: Transaction) -> Iterator[list[Entry]]:
        """The messages of a transaction, one by one or in batches."""
        index, count = 0, len(transaction.journals)
        longest = self._chance.choice([1, 10, MESSAGES_MAX])
        while index < count:
            behind = min(index + self._chance.randint(1, longest), count)
            messages = [
                Message(transaction.producer, transaction.number, transaction.attempt, each)
                for each in range(index, behind)
            ]
            yield [Entry(*each, body_of(self._assignment.seed, each)) for each in messages]
            index = behind

    def _tell(self, moment: Moment, number: int = -1, attempt: int = -1) -> None:
        self._log.send(Event(moment, number, attempt, time.monotonic()))
