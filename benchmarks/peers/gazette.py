"""Gazette: all methods of publishing and reading, with a broker in another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from gazette_sdk import JsonMessage, Publisher, Reader, Transport, connect, mapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journalspace
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.listing import apply_in_batches
from peers.contender import PARTITIONS, Contender, Tail, Way, at_rate, make, one_by_one

__all__ = ["CONSUMERS", "PUBLISHERS", "SCHEMA", "Gazette", "apply", "columns", "specs_of"]

BATCH_MESSAGES = 10_000

CHANGES_MAX = 40
"""Changes of journals per transaction."""

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("amount", pa.float64()),
        ("city", pa.string()),
        ("payload", pa.string()),
        ("n", pa.int64()),
    ]
)

PUBLISHERS = ("publish()", "publish_batch(list)", "publish_batch(RecordBatch)")
CONSUMERS = ("Reader(dict)", "Reader(Struct)", "Reader(dataclass)", "Reader.arrow")

_KEYS = np.array([make(i)["key"] for i in range(1000)])


class Typed(msgspec.Struct):
    """Message as a Struct."""

    key: str
    amount: float
    city: str
    payload: str
    n: int


@dataclass
class Plain(JsonMessage):
    """Message as a dataclass."""

    key: str
    amount: float
    city: str
    payload: str
    n: int


def columns(begin: int, end: int) -> pa.RecordBatch:
    """Return messages as columns."""
    numbers = np.arange(begin, end)
    first = make(0)
    return pa.record_batch(
        [
            pa.array(_KEYS[numbers % 1000], pa.string()),
            pa.array(numbers * 0.5),
            pa.repeat(pa.scalar(first["city"]), end - begin),
            pa.repeat(pa.scalar(first["payload"]), end - begin),
            pa.array(numbers),
        ],
        schema=SCHEMA,
    )


def specs_of(topic: str, partitions: int, *, fragment_bytes: int = 1 << 30) -> str:
    """Return the journals of a topic, without compression as in the other systems."""
    children = "".join(f"  - name: {topic}/part-{i:03d}\n" for i in range(partitions))
    return f"""
name: {topic}/
replication: 1
labels:
  - {{name: content-type, value: application/x-ndjson}}
  - {{name: topic, value: {topic}}}
fragment:
  length: {fragment_bytes}
  compression_codec: NONE
  stores: ["file:///"]
  refresh_interval: 1m
children:
{children}"""


def apply(transport: Transport, specs: str) -> None:
    """Create journals, and wait until they take appends."""
    root = journalspace.parse(specs)
    journalspace.push_down(root)
    sdk_loop.run(_apply(transport, journalspace.to_apply_request(root)))


async def _apply(transport: Transport, request: pb.ApplyRequest) -> None:
    await apply_in_batches(transport, request, CHANGES_MAX)
    appends = AppendService(transport)
    for change in request.changes:
        # An append of nothing is answered once the journal has its brokers.
        await appends.append(pb.AppendRequest(journal=change.upsert.name), b"")
    await appends.flush()
    await appends.aclose()


class Gazette(Contender):
    """Journals by the hash of a key, and a committed reader.

    Args:
        address: of the broker.
        ways: names of ways to publish and to consume; the first way to publish is always there.
        synced: whether that broker forces what it acknowledges to the disk.
    """

    name = "Gazette"
    durability = "in the page cache of one broker (`replication: 1`, `durability: replicated`)"

    def __init__(
        self,
        address: str,
        ways: Sequence[str] = PUBLISHERS + CONSUMERS,
        *,
        synced: bool = False,
    ) -> None:
        if synced:
            self.durability = (
                "on the disk of one broker (`replication: 1`, `durability: persisted`)"
            )
        self._transport = connect(address)
        self._created: list[str] = []
        publish = (self._publish, self._publish_lists, self._publish_columns)
        read = (*map(self._reading, (dict, Typed, Plain)), self._read_columns)
        publishers: dict[str, Way] = dict(zip(PUBLISHERS, publish, strict=True))
        consumers: dict[str, Way] = dict(zip(CONSUMERS, read, strict=True))
        self.publishers = {way: publishers[way] for way in PUBLISHERS if way in ways}
        self.publishers = self.publishers or {PUBLISHERS[0]: self._publish}
        self.consumers = {way: consumers[way] for way in CONSUMERS if way in ways}

    def create(self, topic: str, partitions: int = PARTITIONS) -> None:
        """See :class:`Contender`."""
        apply(self._transport, specs_of(topic, partitions))
        self._created += [f"{topic}/part-{i:03d}" for i in range(partitions)]

    # ----------------------------------------------------------- publishing

    def _publisher(self, topic: str) -> Publisher:
        by_key = mapping.modulo(f"topic={topic}", key=itemgetter("key"))
        return Publisher(by_key, transport=self._transport)

    def _publish(self, topic: str, count: int) -> float:
        with self._publisher(topic) as publisher:
            begun = time.perf_counter()
            for i in range(count):
                publisher.publish(make(i))
            publisher.flush()
            return time.perf_counter() - begun

    def _publish_lists(self, topic: str, count: int) -> float:
        return self._publish_batches(topic, count, lambda a, b: [make(i) for i in range(a, b)])

    def _publish_columns(self, topic: str, count: int) -> float:
        return self._publish_batches(topic, count, columns)

    def _publish_batches(self, topic: str, count: int, made: Callable[[int, int], Any]) -> float:
        with self._publisher(topic) as publisher:
            begun = time.perf_counter()
            for first in range(0, count, BATCH_MESSAGES):
                publisher.publish_batch(made(first, min(count, first + BATCH_MESSAGES)))
            publisher.flush()
            return time.perf_counter() - begun

    # -------------------------------------------------------------- reading

    def _reading(self, message_type: type[Any]) -> Way:
        def read(topic: str, count: int) -> float:
            begun = time.perf_counter()
            received = 0
            with Reader(message_type, f"topic={topic}", transport=self._transport) as reader:
                for envelope in reader:
                    message = envelope.message
                    received += 1
            taken = time.perf_counter() - begun
            assert received == count, f"{received} messages instead of {count}"
            assert isinstance(message, message_type)
            return taken

        return read

    def _read_columns(self, topic: str, count: int) -> float:
        begun = time.perf_counter()
        received = 0
        with Reader(dict, f"topic={topic}", transport=self._transport) as reader:
            for batch in reader.arrow(SCHEMA):
                received += batch.num_rows
        taken = time.perf_counter() - begun
        assert received == count, f"{received} rows instead of {count}"
        return taken

    # -------------------------------------------------------------- latency

    def single(self, topic: str, count: int) -> list[float]:
        """See :class:`Contender`."""
        with self._publisher(topic) as publisher:
            publisher.publish(make(0)).result(60)  # lists the journals
            return one_by_one(lambda message: publisher.publish(message).result(60), count)

    def tail(self, topic: str, count: int) -> list[float]:
        """See :class:`Contender`."""
        tail = Tail()

        def follow() -> None:
            with Reader(dict, f"topic={topic}", transport=self._transport, block=True) as reader:
                for envelope in reader:
                    tail.note(envelope.message)
                    if len(tail.taken) == count:
                        return

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        with self._publisher(topic) as publisher:
            at_rate(publisher.publish, tail, count)
        follower.join(60)
        return tail.taken

    def close(self) -> None:
        """See :class:`Contender`."""
        changes = [
            pb.ApplyRequest.Change(delete=name, expect_mod_revision=-1) for name in self._created
        ]
        request = pb.ApplyRequest(changes=changes)
        sdk_loop.run(apply_in_batches(self._transport, request, CHANGES_MAX))
        sdk_loop.run(self._transport.aclose())
