"""Readers that begin at a time: ``offsets=datetime``."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pytest

from gazette_sdk import Reader
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.message.batch_reader import messages_since
from gazette_sdk.message.delivery import chosen
from gazette_sdk.message.runs import NO_STAMPS, Message, Run, ShortRun
from gazette_sdk.message.uuid import ACK_TXN, clock_of_time, time_of_clock
from gazette_sdk.transport.fragment_store import FragmentStoreTransport
from support.fragment_files import fragment_of, store_fragment
from support.memory_transport import MemoryTransport
from support.written_messages import TICK, History

NOON = datetime(2026, 5, 17, 12, tzinfo=UTC)
BASE = clock_of_time(NOON) // TICK
SCHEMA = pa.schema([("n", pa.int64()), ("_time", pa.timestamp("us", "UTC"))])


def history() -> History:
    """All kinds of messages, each a microsecond behind the one before of its producer."""
    history = History(clocks={1: BASE * TICK, 2: BASE * TICK, 3: BASE * TICK})
    for _ in range(20):
        history.outside(1)
    history.pending(2)
    history.pending(3)
    history.again(3, 6)
    history.without_uuid()
    history.pending(2)
    history.outside(1)
    history.ack(2)
    acknowledged = history.clocks[2] // TICK
    for _ in range(30):
        history.pending(2)
        history.outside(1)
    history.ack(2, at=acknowledged)  # rolls back
    for _ in range(3):
        history.pending(2)
    history.ack(2)
    history.ack(3)
    history.outside(3)
    return history


def clocks_of(history: History) -> list[int]:
    return sorted({message.clock for message in history.messages} - {0})


def served(history: History) -> MemoryTransport:
    transport = MemoryTransport(chunk_bytes=700)
    transport.create("a/journal", topic="all").content += history.content
    return transport


@pytest.mark.parametrize("ring_size", [1, 8192])
def test_exactly_the_committed_messages_since_each_time_are_delivered(ring_size):
    written = history()
    clock_of = {message.item: message.clock for message in written.messages}
    committed = written.committed()
    for clock in clocks_of(written):
        wanted = [n for n in committed if not clock_of[n] or clock_of[n] >= clock]
        options = {"transport": served(written), "ring_size": ring_size}
        since = time_of_clock(clock)
        reader = Reader(dict, "topic=all", offsets=since, **options)
        assert [envelope.message["n"] for envelope in reader] == wanted
        batches = Reader(dict, "topic=all", offsets=since, **options).arrow(SCHEMA)
        assert [n for batch in batches for n in batch["n"].to_pylist()] == wanted


def test_an_uncommitted_reader_delivers_all_messages_since_a_time_as_they_are_written():
    written = history()
    for clock in clocks_of(written)[::7]:
        wanted = [each.item for each in written.messages if not each.clock or each.clock >= clock]
        for zone in (UTC, timezone(timedelta(hours=5))):
            since = time_of_clock(clock).astimezone(zone)
            options = {"offsets": since, "isolation": "uncommitted", "transport": served(written)}
            reader = Reader(dict, "topic=all", **options)
            assert [envelope.message["n"] for envelope in reader] == wanted
            assert reader.offsets == {"a/journal": len(written.content)}
            batches = Reader(dict, "topic=all", **options).arrow(SCHEMA)
            assert [n for batch in batches for n in batch["n"].to_pylist()] == wanted


def test_coroutines_read_since_a_time_and_later_messages_follow():
    written = history()
    transport = served(written)

    async def read() -> tuple[list[int], list[int]]:
        async with Reader(
            dict, "topic=all", offsets=NOON + timedelta(days=1), transport=transport
        ) as reader:
            before = [envelope.message["n"] async for envelope in reader]
            length = len(written.content)
            late = written.outside(1, at=clock_of_time(NOON + timedelta(days=2)) // TICK)
            transport.journals["a/journal"].content += written.content[length:]
            after = [envelope.message["n"] async for envelope in reader]
            assert after == [late]
            return before, after

    before, _ = asyncio.run(read())
    assert before == [n for n in written.committed() if written.messages[n].clock == 0]


def test_a_checkpoint_precedes_the_time_for_the_journals_it_names():
    written = history()
    transport = served(written)
    with Reader(dict, "topic=all", transport=transport) as reader:
        first = next(iter(reader))
        checkpoint = reader.checkpoint()
    rest = Reader(
        dict,
        "topic=all",
        transport=transport,
        checkpoint=checkpoint,
        offsets=NOON + timedelta(days=1),
    )
    assert [first.message["n"], *(envelope.message["n"] for envelope in rest)] == (
        written.committed()
    )


def test_fragments_stored_long_before_the_time_are_not_opened(tmp_path):
    contents = [
        b"not even JSON, in a fragment of the day before\n",
        b'{"UUID":"%b","n":1}\n' % uuid_at(NOON - timedelta(seconds=1)),
        b'{"UUID":"%b","n":2}\n' % uuid_at(NOON),
    ]
    begin = 0
    for content, stored in zip(contents, (-86400, 30, 60), strict=True):
        path = store_fragment(tmp_path, fragment_of("a/journal", begin, content), content)
        mod_time = NOON.timestamp() + stored
        os.utime(path, (mod_time, mod_time))
        begin += len(content)
    transport = FragmentStoreTransport(f"file://{tmp_path}/", content_type="application/x-ndjson")
    for block in (False, True):
        options = {"name": "a/journal", "transport": transport, "block": block}
        with Reader(dict, offsets=NOON, **options) as reader:
            envelope = next(iter(reader))
            assert (envelope.message["n"], envelope.begin) == (2, begin - len(contents[2]))
            assert envelope.time == NOON


def uuid_at(time: datetime) -> bytes:
    written = History()
    written.outside(1, at=clock_of_time(time) // TICK)
    return bytes(written.content[9:45])


def test_a_time_without_zone_is_refused_with_its_remedy():
    with pytest.raises(ConfigurationError, match="has no time zone; give it one"):
        Reader(dict, "topic=all", offsets=datetime(2026, 5, 17, 12))  # noqa: DTZ001 - that is it


def test_runs_of_arrays_and_short_runs_are_selected_alike():
    messages = [Message("j", n, n + 1, 1, clock, 0, n) for n, clock in enumerate((5, 0, 9, 7))]
    messages.append(Message("j", 4, 5, 1, 3, ACK_TXN, 4))
    columns = [np.array([each[place] for each in messages]) for place in (1, 2, 3, 4, 5)]
    for run in (ShortRun("j", messages), Run("j", *columns, [0, 1, 2, 3, 4])):
        for keeps, wanted in ((True, [1, 2, 3, 4]), (False, [1, 2, 3])):
            found = messages_since(run, 7, chosen, keeps_acknowledgements=keeps)
            assert list(found.items) == wanted
            assert found.ends.tolist() == [n + 1 for n in wanted]
    nothing = Run("j", *(each[:0] for each in columns[:2]), *NO_STAMPS, [])
    assert messages_since(nothing, 7, chosen, keeps_acknowledgements=False) is nothing
