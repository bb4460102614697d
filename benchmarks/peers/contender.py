"""What every system under measurement does: the same work, on the same messages.

A contender lives in a process of its own for one round. The round is:

1. warm up: some messages are published and consumed in each way, which is not counted; where only
   latencies are measured, some are published one by one
2. publish so many messages, in each way; the clock runs from making the first message until the
   last one is acknowledged, so that encoding is within
3. consume and decode them all, in each way
4. publish one message after the other, each when the one before is acknowledged
5. publish at a fixed rate, while somebody else reads at the end: from making a message until it
   is decoded there
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

__all__ = [
    "PARTITIONS",
    "Contender",
    "Round",
    "Tail",
    "Way",
    "at_rate",
    "make",
    "measure",
    "one_by_one",
]

PARTITIONS = 4
"""Partitions of a topic, or whatever a system has for them."""

WARM_UP_MESSAGES = 10_000
WARM_UP_SINGLES = 200

SINGLE_MESSAGES = 2000
"""Messages which are published one by one, and messages whose tail latency is measured."""

TAIL_PER_S = 1000

PILOTS_MAX = 1000
PILOT_INTERVAL_S = 0.02

Way = Callable[[str, int], float]
"""(topic, number of messages) -> seconds."""


def make(i: int) -> dict[str, Any]:
    """The message of number ``i``: some 150 bytes of JSON."""
    return {
        "key": "user-%d" % (i % 1000),  # noqa: UP031 - the quickest way, and not what is measured
        "amount": i * 0.5,
        "city": "springfield",
        "payload": "x" * 80,
        "n": i,
    }


@dataclass
class Round:
    """What one contender did in one round.

    Attributes:
        published_per_s: messages published and acknowledged per second, by way.
        consumed_per_s: messages consumed and decoded per second, by way.
        single_s: seconds from making a message to its acknowledgement, message by message.
        tail_s: seconds from making a message to having it decoded elsewhere.
    """

    published_per_s: dict[str, float] = field(default_factory=dict)
    consumed_per_s: dict[str, float] = field(default_factory=dict)
    single_s: list[float] = field(default_factory=list)
    tail_s: list[float] = field(default_factory=list)


class Contender(abc.ABC):
    """One system.

    Attributes:
        name: as it stands in tables.
        durability: what an acknowledgement of it means; of one that syncs the disk for each
            message, set on the object.
        publishers: ways to publish.
        consumers: ways to consume what was published in the first of them.
    """

    name: ClassVar[str]
    durability: str
    publishers: dict[str, Way]
    consumers: dict[str, Way]

    @abc.abstractmethod
    def create(self, topic: str, partitions: int) -> None:
        """Create a topic of so many partitions."""

    # Latencies are those of one partition.

    @abc.abstractmethod
    def single(self, topic: str, count: int) -> list[float]:
        """Publish and await message by message; seconds of each."""

    @abc.abstractmethod
    def tail(self, topic: str, count: int) -> list[float]:
        """Publish at :data:`TAIL_PER_S` and read at the end; seconds of each message."""

    @abc.abstractmethod
    def close(self) -> None:
        """Remove what was created, and disconnect."""


def measure(contender: Contender, topic: str, messages: int, singles: int) -> Round:
    """One round of a contender.

    Args:
        contender: who.
        topic: begin of the names of topics; nobody used them before.
        messages: how many are published and consumed in each way; 0 measures latencies only.
        singles: how many are published one by one, and how many at a rate; 0 for none.
    """
    found = Round()
    if messages:
        _measure_rates(contender, topic, messages, found)
    else:
        contender.create(f"{topic}-warm", 1)
        contender.single(f"{topic}-warm", WARM_UP_SINGLES)
    if singles:
        contender.create(f"{topic}-single", 1)
        found.single_s = contender.single(f"{topic}-single", singles)
        contender.create(f"{topic}-tail", 1)
        found.tail_s = contender.tail(f"{topic}-tail", singles)
    return found


def _measure_rates(contender: Contender, topic: str, messages: int, found: Round) -> None:
    first = ""
    warm = min(messages, WARM_UP_MESSAGES)
    for number, (way, publish) in enumerate(contender.publishers.items()):
        warm_topic, fresh = f"{topic}-warm-{number}", f"{topic}-{number}"
        contender.create(warm_topic, PARTITIONS)
        contender.create(fresh, PARTITIONS)
        publish(warm_topic, warm)
        if number == 0:
            first = fresh
            for consume in contender.consumers.values():
                consume(warm_topic, warm)
        found.published_per_s[way] = messages / publish(fresh, messages)
    for way, consume in contender.consumers.items():
        found.consumed_per_s[way] = messages / consume(first, messages)


def one_by_one(publish: Callable[[dict[str, Any]], object], count: int) -> list[float]:
    """Seconds that each of so many calls takes, making the message included."""
    taken = []
    for i in range(count):
        begun = time.perf_counter()
        publish(make(i))
        taken.append(time.perf_counter() - begun)
    return taken


class Tail:
    """What a reader at the end sees.

    Pilots, messages without a time, are sent until one of them arrives: from then on the reader is
    known to be there.
    """

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.is_following = threading.Event()

    def note(self, message: dict[str, Any]) -> None:
        """A message is decoded."""
        sent = message.get("t")
        if sent is None:
            self.is_following.set()
        else:
            self.taken.append(time.perf_counter() - sent)


def at_rate(publish: Callable[[dict[str, Any]], object], tail: Tail, count: int) -> None:
    """Send pilots until the reader is there, then so many messages at :data:`TAIL_PER_S`."""
    for _ in range(PILOTS_MAX):
        publish(make(0))
        if tail.is_following.wait(PILOT_INTERVAL_S):
            break
    else:
        raise TimeoutError("the reader at the end did not get any message")
    due = time.perf_counter()
    for i in range(count):
        message = make(i)
        message["t"] = time.perf_counter()
        publish(message)
        due += 1 / TAIL_PER_S
        time.sleep(max(0.0, due - time.perf_counter()))
