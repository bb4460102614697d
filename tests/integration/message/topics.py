"""Journals of one topic, and messages which say which they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crash.transactions import Message, Transaction
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.message import JsonMessage, Reader
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import loop as sdk_loop

JSON = "application/x-ndjson"
WAIT_S = 30.0


@dataclass
class Entry(JsonMessage):
    """A message which says which it is, and where it belongs."""

    producer: str
    number: int
    index: int
    journal: str


def message_of(entry: Entry) -> Message:
    return Message(entry.producer, entry.number, 0, entry.index)


@dataclass(frozen=True)
class Topic:
    """Journals which one label selects."""

    cluster: EmbeddedCluster
    label: str

    @property
    def selector(self) -> str:
        return f"topic={self.label}"

    def name(self, part: int) -> str:
        return f"{self.label}/part-{part:03d}"

    def create(self, *parts: int, content_type: str = JSON, fragment_bytes: int = 1 << 22) -> None:
        self.cluster.apply(
            f"""
            name: {self.label}/
            replication: 1
            labels:
              - {{name: topic, value: {self.label}}}
              - {{name: content-type, value: {content_type}}}
            fragment:
              length: {fragment_bytes}
              compression_codec: SNAPPY
              stores: ["file:///"]
              refresh_interval: 1s
            children:
            """
            + "".join(f"  - name: {self.name(part)}\n            " for part in parts)
        )


def entries(producer: str, number: int, journals: Sequence[str]) -> list[Entry]:
    """The messages of a transaction, one for each of the journals."""
    return [Entry(producer, number, index, journal) for index, journal in enumerate(journals)]


def transaction_of(messages: Sequence[Entry]) -> Transaction:
    """What a history knows of it."""
    first = messages[0]
    return Transaction(first.producer, first.number, 0, tuple(each.journal for each in messages))


def read_all(
    topic: Topic, kind: type, which: Callable[[Any], Message], *, ring_size: int = 8192
) -> dict[str, list[Message]]:
    """What a committed reader sees of a topic, from the begin to the write heads."""
    delivered: dict[str, list[Message]] = {}
    with Reader(kind, topic.selector, ring_size=ring_size) as reader:
        for envelope in reader:
            delivered.setdefault(envelope.journal, []).append(which(envelope.message))
    return delivered


def delete(topic: Topic, *parts: int) -> None:
    """Delete journals of a topic, by their parts."""
    changes = [
        pb.ApplyRequest.Change(delete=topic.name(part), expect_mod_revision=-1) for part in parts
    ]

    async def apply() -> pb.ApplyResponse:
        return await topic.cluster.transport.apply(pb.ApplyRequest(changes=changes))

    assert sdk_loop.run(apply(), WAIT_S).status == pb.OK
