"""Readers that begin at a time, over a real broker and its store."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from gazette_sdk import Publisher, Reader, connect, mapping
from gazette_sdk.message.uuid import OUTSIDE_TXN, build_uuid, clock_of_time
from gazette_sdk.transport.fragment_store import FragmentStoreTransport
from integration.failures.journals import append
from integration.message.topics import Topic
from support.fragment_files import fragment_of, store_fragment

SCHEMA = pa.schema([("n", pa.int64())])


def numbers(reader) -> list[int]:
    return sorted(envelope.message["n"] for envelope in reader)


def columns(reader) -> list[int]:
    return sorted(n for batch in reader.arrow(SCHEMA) for n in batch["n"].to_pylist())


@pytest.mark.parametrize("wire", ["auto", "stream", "grpc"])
def test_published_messages_are_read_from_a_time_on(topic: Topic, wire: str):
    topic.create(0, 1, 2)
    with Publisher(mapping=mapping.modulo(topic.selector, key=lambda each: each["n"])) as publisher:
        for n in range(50):
            publisher.publish({"n": n}).result(timeout=30)
        since = datetime.now(UTC)
        for n in range(50, 100):
            publisher.publish({"n": n})
    transport = connect(topic.cluster.address, wire=wire)
    options = {"transport": transport, "offsets": since}
    assert numbers(Reader(dict, topic.selector, **options)) == list(range(50, 100))
    everything = Reader(dict, topic.selector, isolation="uncommitted", **options)
    assert numbers(everything) == list(range(50, 100))
    assert columns(Reader(dict, topic.selector, **options)) == list(range(50, 100))
    later = Reader(dict, topic.selector, transport=transport, offsets=since + timedelta(days=1))
    assert numbers(later) == []
    assert later.offsets == everything.offsets


def line(n: int, at: datetime) -> bytes:
    uuid = build_uuid(b"\x01bcdef", clock_of_time(at), OUTSIDE_TXN)
    return b'{"UUID":"%b","n":%d}\n' % (str(uuid).encode(), n)


def test_what_is_stored_before_is_passed_over_by_brokers_and_without_them(topic: Topic):
    now = datetime.now(UTC)
    first = b"no message at all, and it would be an error\n"
    name = topic.name(0)
    root = topic.cluster.data / "fragments"
    path = store_fragment(root, fragment_of(name, 0, first), first)
    old_s = now.timestamp() - 86400
    os.utime(path, (old_s, old_s))
    topic.create(0)
    content = line(1, now - timedelta(hours=2)) + line(2, now)
    append(topic.cluster.transport, name, content, offset=len(first))  # behind what is stored
    since = now - timedelta(hours=1)
    reader = Reader(dict, topic.selector, offsets=since)
    assert numbers(reader) == [2]
    store = FragmentStoreTransport(f"file://{root}/", content_type="application/x-ndjson")
    assert numbers(Reader(dict, name=name, transport=store, offsets=since)) == []
