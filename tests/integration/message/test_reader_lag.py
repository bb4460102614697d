"""Lag of readers, which is asked of a real broker."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from gazette_sdk import Journals, Reader, connect
from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.errors import CallError
from gazette_sdk.message import Lag
from gazette_sdk.message.uuid import OUTSIDE_TXN, build_uuid, clock_of_time
from integration.failures.journals import append, within
from integration.message.topics import Topic

HOUR_S = 3600.0


def line(n: int, at: datetime) -> bytes:
    uuid = build_uuid(b"\x01bcdef", clock_of_time(at), OUTSIDE_TXN)
    return b'{"UUID":"%b","n":%d}\n' % (str(uuid).encode(), n)


def lag_of(reader, how: str, **options):
    return reader.lag(**options) if how == "plain" else asyncio.run(reader.alag(**options))


@pytest.mark.parametrize("how", ["plain", "coroutine"])
@pytest.mark.parametrize("given", ["transport", "environment"])
def test_the_lag_is_what_was_not_taken_in_bytes_and_seconds(topic: Topic, how: str, given: str):
    topic.create(0, 1)
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    lines = [line(n, hour_ago + timedelta(minutes=20 * n)) for n in range(3)]
    append(topic.cluster.transport, topic.name(0), b"".join(lines))
    transport = connect(topic.cluster.address) if given == "transport" else None
    with Reader(dict, topic.selector, transport=transport) as reader:
        assert lag_of(reader, how) == {}
        if how == "plain":
            assert reader.poll(30, limit=1)
        else:
            assert asyncio.run(reader.apoll(30, limit=1))
        lag = lag_of(reader, how)[topic.name(0)]
        assert lag.bytes == len(lines[1] + lines[2])
        assert HOUR_S - 20 * 60 <= lag.seconds < HOUR_S
    with Reader(dict, topic.selector, transport=transport) as reader:
        assert len(list(reader)) == 3
        assert lag_of(reader, how) == {topic.name(0): Lag(0, 0.0), topic.name(1): Lag(0, 0.0)}
        append(topic.cluster.transport, topic.name(1), b'{"n": 1}\n')
        assert lag_of(reader, how)[topic.name(1)] == Lag(9, None)


def test_the_lag_of_columns_and_of_given_offsets(topic: Topic):
    topic.create(0)
    content = line(1, datetime.now(UTC))
    append(topic.cluster.transport, topic.name(0), content)
    reader = Reader(dict, topic.selector, offsets={topic.name(0): 0})
    assert reader.lag()[topic.name(0)].bytes == len(content)
    columns = reader.arrow([("n", "int64")])
    assert sum(batch.num_rows for batch in columns) == 1
    assert reader.lag() == {topic.name(0): Lag(0, 0.0)}


def test_a_deleted_journal_has_no_lag_and_no_broker_is_an_error(topic: Topic):
    topic.create(0, 1)
    with Reader(dict, topic.selector) as reader:
        assert list(reader) == []
        Journals(topic.cluster.transport).delete(topic.name(0))
        assert reader.lag() == {topic.name(1): Lag(0, 0.0)}
    away = connect(f"http://127.0.0.1:{reserve_port()}", connect_timeout_s=0.2)
    with within(5), pytest.raises(CallError):
        Reader(dict, name="a/journal", offsets={"a/journal": 0}, transport=away).lag(timeout_s=1)
