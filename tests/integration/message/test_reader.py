"""Committed reading from a real broker, over its port and without one."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest

from gazette_sdk import Reader, connect
from gazette_sdk.errors import DecodeError
from gazette_sdk.message.checkpoint import Checkpoint
from integration.failures.journals import append
from integration.message.topics import Topic
from support.written_messages import History


def written(topic: Topic, part: int = 0) -> History:
    """A journal with transactions, copies and a roll-back, appended piece by piece."""
    topic.create(part)
    history = History(topic.name(part))
    history.outside(1)
    history.pending(2)
    history.pending(3)
    appended = store(topic, history, 0)
    history.outside(1)
    history.pending(2)
    history.again(1, 5)
    history.ack(2)
    appended = store(topic, history, appended)
    history.ack(3)
    for _ in range(40):
        history.pending(3)
        history.outside(1)
    history.ack(3, at=2)
    for _ in range(40):
        history.pending(3)
        history.outside(1)
    history.ack(3)
    store(topic, history, appended)
    return history


def store(topic: Topic, history: History, begin: int) -> int:
    append(topic.cluster.transport, history.journal, bytes(history.content[begin:]))
    return len(history.content)


def numbers(reader) -> list[int]:
    return [envelope.message["n"] for envelope in reader]


@pytest.mark.parametrize("ring_size", [1, 8, 8192])
def test_committed_messages_come_once_over_every_transport(topic: Topic, ring_size: int):
    history = written(topic)
    expected = history.committed()
    within = topic.cluster.transport
    wired = [connect(topic.cluster.address, wire=wire) for wire in ("auto", "stream", "grpc")]
    for transport in (within, *wired, None):
        reader = Reader(dict, topic.selector, transport=transport, ring_size=ring_size)
        assert numbers(reader) == expected
        assert numbers(reader) == []
        everything = Reader(
            dict, name=history.journal, transport=transport, isolation="uncommitted"
        )
        assert numbers(everything) == [message.item for message in history.messages]


def test_readers_resume_at_every_position_from_stored_checkpoints(topic: Topic):
    history = written(topic)
    expected = history.committed()
    for count in range(0, len(expected) + 1, 3):
        with Reader(dict, topic.selector, ring_size=4) as reader:
            taken = numbers(islice(reader, count))
            stored = reader.checkpoint().to_bytes()
        assert Checkpoint.from_bytes(stored).to_bytes() == stored
        with Reader(dict, topic.selector, ring_size=4, checkpoint=stored) as rest:
            assert taken + numbers(rest) == expected


def test_coroutines_read_what_had_to_be_read_again(topic: Topic):
    history = written(topic)

    async def read() -> list[int]:
        async with Reader(dict, topic.selector, ring_size=1) as reader:
            return [envelope.message["n"] async for envelope in reader]

    assert asyncio.run(read()) == history.committed()


def test_a_blocking_reader_reads_again_what_its_ring_lost(topic: Topic):
    topic.create(0)
    history = History(topic.name(0))
    history.pending(1)
    history.outside(2)
    appended = store(topic, history, 0)
    with Reader(dict, topic.selector, block=True, ring_size=1) as reader:
        assert numbers(islice(reader, 1)) == [1]
        history.pending(1)
        history.outside(2)
        history.ack(1)
        store(topic, history, appended)
        assert numbers(islice(reader, 3)) == [3, 0, 2]


def test_a_transaction_larger_than_what_is_kept_is_read_again(topic: Topic, monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.reader.RING_BYTES_MAX", 10_000)
    topic.create(0, fragment_bytes=1 << 16)
    history = History(topic.name(0))
    for _ in range(5000):
        history.pending(1)
        history.outside(2)
    history.ack(1)
    store(topic, history, 0)
    expected = history.committed()
    with Reader(dict, topic.selector) as reader:
        assert numbers(reader) == expected


def test_a_poisoned_record_is_passed_over(topic: Topic):
    topic.create(0)
    history = History(topic.name(0))
    history.outside(1)
    begin = store(topic, history, 0)
    append(topic.cluster.transport, history.journal, b"poison\n")
    second = bytes(history.content)
    history.outside(1)
    append(topic.cluster.transport, history.journal, bytes(history.content[len(second) :]))
    errors = []
    assert numbers(Reader(dict, topic.selector, on_error=errors.append)) == [0, 1]
    assert [(type(each), each.journal, each.offset) for each in errors] == [
        (DecodeError, history.journal, begin)
    ]
