"""Readers whose position does not exist: behind the write head, or of a journal that is gone."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from gazette_sdk import Publisher, Reader, connect, mapping
from gazette_sdk.errors import CheckpointMismatchError, OffsetNotYetAvailableError, SuspendedError
from gazette_sdk.message import fetcher as positions
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.protocol import broker_pb2 as pb
from integration.failures.journals import append
from integration.message.topics import JSON, Topic, delete
from support.scripted_appends import until

HEAD_LAG_S = 0.2


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "HEAD_LAG_MAX_S", HEAD_LAG_S)


def publish(topic: Topic, *numbers: int) -> int:
    """Publish messages to the topic's journal; return its write head."""
    with Publisher(mapping=mapping.direct(topic.name(0))) as publisher:
        receipts = [publisher.publish({"n": number}) for number in numbers]
        return receipts[-1].result(timeout=30).end


def store(topic: Topic) -> Path:
    """Suspend the journal: its content is in its store then. Return the store's directory."""
    with pytest.raises(SuspendedError):
        append(topic.cluster.transport, topic.name(0), b"", suspend=pb.AppendRequest.SUSPEND_NOW)
    stored = topic.cluster.fragments / topic.name(0)
    until(lambda: stored.is_dir() and any(stored.glob("0*")))  # and not one being written
    return stored


def recreate(topic: Topic) -> None:
    """Delete the journal with all its content, and create another of the same name."""
    stored = store(topic)
    delete(topic, 0)
    shutil.rmtree(stored)
    topic.create(0)


def first_numbers(count: int, reader: Reader) -> list[int]:
    found = []
    for envelope in reader:
        found.append(envelope.message["n"])
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("block", [False, True])
def test_an_offset_behind_the_write_head_is_an_error(topic: Topic, block: bool):
    topic.create(0)
    head = publish(topic, 1, 2)
    reader = Reader(dict, topic.selector, offsets={topic.name(0): head + 1}, block=block)
    with reader, pytest.raises(OffsetNotYetAvailableError, match="on_missing") as caught:
        list(reader)
    assert caught.value.journal == topic.name(0)
    assert caught.value.offset == head + 1


@pytest.mark.parametrize("block", [False, True])
def test_an_offset_behind_the_write_head_may_stand_for_the_begin(topic: Topic, block: bool):
    topic.create(0)
    head = publish(topic, 1, 2)
    with Reader(
        dict, topic.selector, offsets={topic.name(0): head + 1}, block=block, on_missing="begin"
    ) as reader:
        assert first_numbers(2, reader) == [1, 2]


def test_an_offset_behind_the_write_head_may_stand_for_the_end(topic: Topic):
    topic.create(0)
    head = publish(topic, 1, 2)
    reader = Reader(dict, topic.selector, offsets={topic.name(0): head + 1}, on_missing="end")
    assert first_numbers(1, reader) == []
    publish(topic, 3)
    assert first_numbers(1, reader) == [3]


def test_the_write_head_itself_is_no_missing_offset(topic: Topic):
    topic.create(0)
    head = publish(topic, 1)
    reader = Reader(dict, topic.selector, offsets={topic.name(0): head})
    assert first_numbers(1, reader) == []
    publish(topic, 2)
    assert first_numbers(1, reader) == [2]


@pytest.mark.parametrize("count", [1, 30], ids=["shorter", "longer"])
def test_a_checkpoint_of_a_journal_that_was_created_anew_is_an_error(topic: Topic, count: int):
    topic.create(0)
    publish(topic, *range(10))
    with Reader(dict, topic.selector) as reader:
        assert len(list(reader)) == 10
        stored = reader.checkpoint().to_bytes()
    recreate(topic)
    publish(topic, *range(count))
    reader = Reader(dict, topic.selector, checkpoint=stored)
    with pytest.raises(CheckpointMismatchError, match=r"earlier journal.*on_missing") as caught:
        list(reader)
    assert caught.value.journal == topic.name(0)

    anew = Reader(dict, topic.selector, checkpoint=stored, on_missing="begin")
    assert first_numbers(count, anew) == list(range(count))
    again = Reader(dict, topic.selector, checkpoint=anew.checkpoint())
    assert first_numbers(1, again) == []


def test_coroutines_meet_the_same_error(topic: Topic):
    topic.create(0)
    publish(topic, 1)

    async def read() -> None:
        async with Reader(dict, topic.selector, offsets={topic.name(0): 1 << 40}) as reader:
            async for _ in reader:
                pass

    with pytest.raises(OffsetNotYetAvailableError):
        asyncio.run(read())


def test_a_checkpoint_goes_on_at_the_store_and_back(topic: Topic):
    """A fragment store does not know when its journals were created."""
    topic.create(0)
    publish(topic, *range(5))
    reader = Reader(dict, topic.selector)
    assert len(list(reader)) == 5
    checkpoint = reader.checkpoint()
    assert set(checkpoint.create_revisions) == {topic.name(0)}
    store(topic)
    fragments = connect(topic.cluster.fragments.as_uri(), content_type=JSON)
    stored = Reader(dict, name=topic.name(0), transport=fragments, checkpoint=checkpoint)
    assert first_numbers(1, stored) == []
    assert stored.checkpoint().create_revisions == checkpoint.create_revisions
    publish(topic, 5)
    assert first_numbers(1, Reader(dict, topic.selector, checkpoint=stored.checkpoint())) == [5]


def test_a_checkpoint_keeps_the_create_revisions_of_journals_that_were_not_read():
    checkpoint = Checkpoint({"a/b": 7}, create_revisions={"a/b": 12})
    assert Checkpoint.from_bytes(checkpoint.to_bytes()) == checkpoint
