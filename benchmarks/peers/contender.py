"""Common measurement of all systems, on the same messages.

A contender runs in a new process for each round. The round is:

1. warm up: publish and consume some messages with each method, which is not counted; if only
   latencies are measured, publish some messages one by one
2. publish messages with each method, from creating the first message to the last
   acknowledgement, including encoding
3. consume and decode them with each method
4. publish one message after the other, each after the acknowledgement of the previous one
5. publish at a fixed rate, while another thread or client reads at the end: from creating a
   message to its decoding
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
"""Partitions of a topic, or their equivalent."""

WARM_UP_MESSAGES = 10_000
WARM_UP_SINGLES = 200

SINGLE_MESSAGES = 2000
"""Number of messages that are published one by one, and of those with a tail latency."""

TAIL_PER_S = 1000

PILOTS_MAX = 1000
PILOT_INTERVAL_S = 0.02

Way = Callable[[str, int], float]
"""(topic, number of messages) -> seconds."""


def make(i: int) -> dict[str, Any]:
    """Return message ``i``, about 150 bytes of JSON."""
    return {
        "key": "user-%d" % (i % 1000),  # noqa: UP031 - the quickest way, and not what is measured
        "amount": i * 0.5,
        "city": "springfield",
        "payload": "x" * 80,
        "n": i,
    }


@dataclass
class Round:
    """Result of one contender in one round.

    Attributes:
        published_per_s: messages published and acknowledged per second, by method.
        consumed_per_s: messages consumed and decoded per second, by method.
        single_s: seconds from creating each message to its acknowledgement.
        tail_s: seconds from creating each message to its decoding by the reader.
    """

    published_per_s: dict[str, float] = field(default_factory=dict)
    consumed_per_s: dict[str, float] = field(default_factory=dict)
    single_s: list[float] = field(default_factory=list)
    tail_s: list[float] = field(default_factory=list)


class Contender(abc.ABC):
    """System under measurement.

    Attributes:
        name: name in tables.
        durability: meaning of its acknowledgements; set on the object if it syncs the disk for
            each message.
        publishers: methods of publishing.
        consumers: methods of consuming the messages of the first publisher.
    """

    name: ClassVar[str]
    durability: str
    publishers: dict[str, Way]
    consumers: dict[str, Way]

    @abc.abstractmethod
    def create(self, topic: str, partitions: int) -> None:
        """Create a topic."""

    # Latencies are those of one partition.

    @abc.abstractmethod
    def single(self, topic: str, count: int) -> list[float]:
        """Publish and await message by message; return the seconds of each."""

    @abc.abstractmethod
    def tail(self, topic: str, count: int) -> list[float]:
        """Publish at :data:`TAIL_PER_S` and read at the end; return the seconds of each."""

    @abc.abstractmethod
    def close(self) -> None:
        """Delete the topics, and disconnect."""


def measure(contender: Contender, topic: str, messages: int, singles: int) -> Round:
    """Run one round of a contender.

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
        contender.single(f"{topic}-warm", min(WARM_UP_SINGLES, singles))
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
    """Return the seconds of each call, including creating the message."""
    taken = []
    for i in range(count):
        begun = time.perf_counter()
        publish(make(i))
        taken.append(time.perf_counter() - begun)
    return taken


class Tail:
    """Latencies of a reader at the end.

    The publisher sends pilots, messages without a time, until the reader receives one.
    """

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.is_following = threading.Event()

    def note(self, message: dict[str, Any]) -> None:
        """Record a decoded message."""
        sent = message.get("t")
        if sent is None:
            self.is_following.set()
        else:
            self.taken.append(time.perf_counter() - sent)


def at_rate(publish: Callable[[dict[str, Any]], object], tail: Tail, count: int) -> None:
    """Send pilots until the reader receives one, then messages at :data:`TAIL_PER_S`."""
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
