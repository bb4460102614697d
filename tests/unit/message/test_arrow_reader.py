"""Columns hold what a reader delivers, row by row, whatever was written and however it is read."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from itertools import islice

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk import Reader
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    DecodeError,
    FramingError,
    ValidationError,
)
from gazette_sdk.framing import FixedProtobuf
from gazette_sdk.message import columns
from gazette_sdk.message.columns import batches as arrow_rows
from gazette_sdk.message.uuid import ACK_TXN, build_uuid
from support.memory_transport import MemoryTransport
from support.protobuf_messages import Gram
from support.readers import interruptible
from support.written_messages import TICK, History, crafted, producer_id, served

WAIT_S = 10.0

SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("_journal", pa.string()),
        ("_offset", pa.int64()),
        ("_end", pa.int64()),
        ("_uuid", pa.string()),
        ("_time", pa.timestamp("us", tz="UTC")),
        ("_flags", pa.int32()),
    ]
)
N = pa.schema([("n", pa.int64())])


def row_of(envelope) -> dict:
    clock = envelope.clock
    return {
        "n": envelope.message.get("n"),
        "_journal": envelope.journal,
        "_offset": envelope.begin,
        "_end": envelope.end,
        "_uuid": str(envelope.uuid) if clock else None,
        "_time": envelope.time,
        "_flags": envelope.flags,
    }


def rows_of(batches) -> list[dict]:
    return [row for batch in batches for row in batch.to_pylist()]


def by_journal(rows: list[dict]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(row["_journal"], []).append(row)
    return found


def numbers(batches) -> list[int]:
    return [row["n"] for row in rows_of(batches)]


@pytest.mark.parametrize("ring_size", [1, 2, 100])
@pytest.mark.parametrize("acknowledgements", [True, False])
def test_committed_columns_hold_what_is_committed(ring_size, acknowledgements):
    history = crafted()
    options = {
        "name": "a/journal",
        "transport": served(history),
        "ring_size": ring_size,
        "acknowledgements": acknowledgements,
    }
    rows = rows_of(Reader(dict, **options).arrow(SCHEMA))
    assert rows == [row_of(envelope) for envelope in Reader(dict, **options)]
    assert [row["n"] for row in rows] == history.committed(acknowledgements=acknowledgements)


def test_uncommitted_columns_hold_everything():
    history = crafted()
    options = {"name": "a/journal", "transport": served(history), "isolation": "uncommitted"}
    rows = rows_of(Reader(dict, **options).arrow(SCHEMA))
    assert rows == [row_of(envelope) for envelope in Reader(dict, **options)]
    flags = [message.flags for message in history.messages]
    assert [row["_flags"] for row in rows] == flags
    assert ACK_TXN in flags


def test_transactions_are_delivered_in_bulk_without_their_acknowledgements():
    history = History()
    for size in (100, 3, 1, 50):
        for _ in range(size):
            history.pending(1)
        history.ack(1)
    for each in ([], [1]):
        reader = Reader(dict, name="a/journal", transport=served(history))
        batches = list(reader.arrow(SCHEMA, batch_rows=70 if each else 1 << 16))
        assert numbers(batches) == history.committed()
        assert [batch.num_rows for batch in batches] == ([70, 70, 14] if each else [154])


def test_iteration_goes_on_where_it_was_broken_off_in_turns_plain_and_asynchronous():
    history = crafted()
    reader = Reader(dict, name="a/journal", transport=served(history))
    batches = reader.arrow(N, batch_rows=1)

    async def one() -> list[int]:
        async for batch in batches:
            return numbers([batch])
        return []

    found = []
    while taken := numbers(islice(batches, 1)) + asyncio.run(one()):
        found += taken
    assert found == history.committed()
    history.ack(4)
    reader._transport.journals["a/journal"].content[:] = history.content
    assert numbers(reader.arrow(N)) == history.committed()[len(found) :]


@pytest.mark.parametrize("batch_rows", [1, 2, 3])
@pytest.mark.parametrize("ring_size", [1, 100])
def test_a_reader_resumes_from_its_checkpoint_after_any_batch(batch_rows, ring_size):
    history = _with_groups(crafted())
    expected = history.committed()
    transport = served(history)
    options = {"name": "a/journal", "transport": transport, "ring_size": ring_size}
    for count in range(0, len(expected) + 1, 3):
        reader = Reader(dict, **options)
        taken = numbers(islice(reader.arrow(N, batch_rows=batch_rows), count))
        checkpoint, offsets = reader.checkpoint(), reader.offsets
        reader.close()
        columns = Reader(dict, **options, checkpoint=checkpoint).arrow(N)
        assert taken + numbers(columns) == expected
        messages = Reader(dict, **options, checkpoint=checkpoint.to_bytes())
        assert taken + [envelope.message["n"] for envelope in messages] == expected
        repeated = numbers(Reader(dict, **options, offsets=offsets).arrow(N))
        assert set(expected[len(taken) :]) <= set(repeated)


def _with_groups(history: History) -> History:
    for _ in range(10):
        for _ in range(7):
            history.pending(5)
        history.ack(5)
    return history


def test_offsets_are_behind_the_last_row_of_an_uncommitted_reader():
    history = _with_groups(History())
    reader = Reader(dict, name="a/journal", transport=served(history), isolation="uncommitted")
    batches = reader.arrow(SCHEMA, batch_rows=9)
    for batch in batches:
        assert reader.offsets == {"a/journal": batch.column("_end")[-1].as_py()}


def test_end_offsets_end_columns_too():
    history = _with_groups(History())
    ends = {"a/journal": history.messages[10].end}
    reader = Reader(dict, name="a/journal", transport=served(history), end_offsets=ends)
    assert numbers(reader.arrow(N)) == list(range(7))


def test_journals_without_content_have_no_batches():
    transport = served(History("t/one"), History("t/two"))
    reader = Reader(dict, "topic=t", transport=transport)
    assert list(reader.arrow(N)) == []
    assert reader.offsets == {"t/one": 0, "t/two": 0}
    assert pa.table(reader.arrow(N)).num_rows == 0


def test_columns_follow_the_write_head(transport, on_loop):
    history = History()
    journal = on_loop(transport.create, "a/journal")
    reader = Reader(dict, name="a/journal", transport=transport, block=True)
    found: list[int] = []
    taken = threading.Semaphore(0)

    def take() -> None:
        for batch in reader.arrow(N):
            for n in numbers([batch]):
                found.append(n)
                taken.release()

    thread = threading.Thread(target=take)
    thread.start()

    def append(content: bytes) -> None:
        journal.content += content
        transport.signal()

    for n in range(3):
        history.pending(1)
        history.outside(2)
        on_loop(append, bytes(history.content[len(journal.content) :]))
        assert taken.acquire(timeout=WAIT_S), n
    history.ack(1)
    on_loop(append, bytes(history.content[len(journal.content) :]))
    for _ in range(3):
        assert taken.acquire(timeout=WAIT_S)
    reader.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert found == history.committed() == [1, 3, 5, 0, 2, 4]


# ------------------------------------------------------------------ bad content


def poisoned() -> tuple[History, int]:
    history = History()
    for _ in range(5):
        history.outside(1)
    begin = len(history.content)
    history.content += (
        b'{"UUID":"%s","n":"many"}\n' % str(build_uuid(producer_id(7), TICK, 0)).encode()
    )
    for _ in range(5):
        history.outside(1)
    return history, begin


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_a_poison_line_is_named_behind_the_messages_before_it(isolation):
    history, begin = poisoned()
    reader = Reader(dict, name="a/journal", transport=served(history), isolation=isolation)
    batches = iter(reader.arrow(N))
    assert numbers([next(batches)]) == [0, 1, 2, 3, 4]
    for again in (batches, iter(reader.arrow(N))):
        with pytest.raises(DecodeError, match=f"the message at offset {begin} ") as caught:
            next(again)
    assert caught.value.offset == begin
    assert reader.offsets == {"a/journal": begin}


def test_poison_is_passed_over_where_that_is_asked_for():
    history, begin = poisoned()
    skipped = []
    for on_error in ("skip", skipped.append):
        reader = Reader(dict, name="a/journal", transport=served(history), on_error=on_error)
        assert numbers(reader.arrow(N)) == list(range(10))
    assert [error.offset for error in skipped] == [begin]


def test_a_uuid_that_is_none_is_poison_to_committed_readers():
    transport = MemoryTransport()
    transport.create("a/bad").content += b'{"n":1}\n{"UUID":"%s","n":2}\n{"n":3}\n' % (b"x" * 36)
    reader = Reader(dict, name="a/bad", transport=transport, on_error="skip")
    assert numbers(reader.arrow(N)) == [1, 3]
    with pytest.raises(DecodeError, match="has no valid UUID"):
        list(Reader(dict, name="a/bad", transport=transport).arrow(N))
    everything = Reader(dict, name="a/bad", transport=transport, isolation="uncommitted")
    assert numbers(everything.arrow(N)) == [1, 2, 3]


def test_what_arrow_cannot_do_is_told():
    transport = served(crafted())

    def reader() -> Reader:
        return Reader(dict, name="a/journal", transport=transport)

    for schema, text in [
        (5, "pyarrow"),
        (pa.schema([]), "empty"),
        ([("n", pa.int64()), ("n", pa.string())], "twice"),
    ]:
        with pytest.raises(ConfigurationError, match=text):
            reader().arrow(schema)
    with pytest.raises(ConfigurationError, match="batch_rows=0"):
        reader().arrow(N, batch_rows=0)
    begun = reader()
    assert len(list(islice(begun, 1))) == 1
    with pytest.raises(ConfigurationError, match="taken from the reader already"):
        begun.arrow(N)
    begun.close()
    columns = reader()
    assert columns.arrow([("n", pa.int64())]) is columns.arrow(N)
    with pytest.raises(ConfigurationError, match="another schema"):
        columns.arrow(SCHEMA)
    with pytest.raises(ConfigurationError, match="delivers columns"):
        list(columns)
    columns.close()
    with pytest.raises(ClosedError):
        list(columns.arrow(N))
    transport.create("a/odd", content_type="text/plain")
    with pytest.raises(FramingError, match="a/odd"):
        list(Reader(dict, name="a/odd", transport=transport).arrow(N))
    transport.create("a/proto", content_type="application/x-protobuf-fixed")
    with pytest.raises(ValidationError, match="a/proto"):
        list(Reader(dict, name="a/proto", transport=transport).arrow(N))


def test_without_pyarrow_the_extra_is_named(monkeypatch):
    monkeypatch.delattr(columns, "batches", raising=False)
    monkeypatch.setitem(sys.modules, "gazette_sdk.message.columns.batches", None)
    with pytest.raises(ConfigurationError, match=r"gazette-sdk\[arrow\]"):
        Reader(dict, name="a/journal", transport=MemoryTransport()).arrow(N)


def test_an_interrupt_at_work_leaves_no_checkpoint(monkeypatch):
    reader = Reader(dict, name="a/journal", transport=served(crafted()))
    batches = reader.arrow(N, batch_rows=1)
    interrupt = interruptible(monkeypatch, batches._batches._delivery._sequencer)
    assert len(list(islice(batches, 2))) == 2
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        list(batches)
    with pytest.raises(ClosedError):
        reader.checkpoint()
    with pytest.raises(ClosedError):
        list(batches)
    reader.close()


# ------------------------------------------------------------ framings, streams


def test_protobuf_and_csv_journals_become_columns():
    transport = MemoryTransport()
    schema = pa.schema([("text", pa.string()), ("count", pa.int64()), ("_flags", pa.int32())])
    framing = FixedProtobuf()
    grams = transport.create("a/grams", content_type=framing.content_type)
    records = transport.create("a/records", content_type="text/csv")
    stamps = [
        build_uuid(producer_id(1), TICK * at, flags) for at, flags in ((1, 1), (2, 1), (3, 2))
    ]
    for count, stamp in enumerate(stamps):
        text = "" if count == 2 else f"t{count}"
        framing.encode(
            Gram(uuid=stamp.bytes, text=text, count=count).SerializeToString(), grams.content
        )
        records.content += f"{stamp},{text},{count if text else ''}\n".encode()
    for message_type, name in ((Gram, "a/grams"), (list, "a/records")):
        reader = Reader(message_type, name=name, transport=transport)
        assert rows_of(reader.arrow(schema)) == [
            {"text": "t0", "count": 0, "_flags": 1},
            {"text": "t1", "count": 1, "_flags": 1},
        ]


def test_batches_are_a_stream_to_whatever_takes_one():
    history = _with_groups(History())
    transport = served(history)

    def batches():
        return Reader(dict, name="a/journal", transport=transport).arrow(N, batch_rows=4)

    assert pa.table(batches()).column("n").to_pylist() == history.committed()
    assert batches().to_reader().read_all().num_rows == len(history.committed())


# ------------------------------------------------------------------------- rows


def test_rows_which_are_kept_do_not_keep_their_batch():
    batch = pa.record_batch({"n": list(range(1000)), "text": ["x" * 1000] * 1000})
    rows = arrow_rows.Rows(batch)
    kept = list(rows)
    assert arrow_rows.gathered(kept).equals(batch)
    assert max(row.batch.nbytes for row in kept) < 20_000
    assert arrow_rows.gathered(list(rows[10:20])).equals(batch.slice(10, 10))
    assert rows[-1].batch.slice(rows[-1].row, 1).to_pylist()[0]["n"] == 999
    with pytest.raises(IndexError):
        rows[1000]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=300))
def test_rows_are_gathered_in_their_order(indices):
    batches = [pa.record_batch({"n": range(at, at + 10)}) for at in range(0, 100, 10)]
    rows = [arrow_rows.Row(batches[index // 10], index % 10) for index in indices]
    assert arrow_rows.gathered(rows).column("n").to_pylist() == indices


# ------------------------------------------------------------------------- laws


@st.composite
def histories(draw) -> list[History]:
    """Several producers write to several journals; some of it twice, or rolled back."""
    seeded = random.Random(draw(st.integers(0, 2**32)))
    found = [History(f"t/part-{index}") for index in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(0, 150))):
        history = seeded.choice(found)
        producer = seeded.randrange(3)
        kind = seeded.choices(
            ["outside", "pending", "ack", "retry", "again", "rollback", "none", "group", "plain"],
            [3, 6, 4, 2, 2, 1, 1, 3, 3],
        )[0]
        if kind == "outside":
            history.outside(4 + producer)
        elif kind == "pending":
            history.pending(producer)
        elif kind == "ack":
            history.ack(producer)
        elif kind == "retry":
            history.retried(producer, seeded.randrange(1, 6))
        elif kind == "again" and history.messages:
            begin = seeded.randrange(len(history.messages))
            history.again(begin, begin + seeded.randrange(1, 6))
        elif kind == "rollback":
            history.ack(producer, at=seeded.randrange(1, 20))
        elif kind == "none":
            history.without_uuid()
        elif kind == "group":
            for _ in range(seeded.randrange(1, 40)):
                history.pending(producer)
            history.ack(producer)
        elif kind == "plain":
            for _ in range(seeded.randrange(40, 80)):
                history.outside(7)
    return found


@given(
    histories=histories(),
    chunk_bytes=st.sampled_from([17, 64, 333, 5000, 1 << 20]),
    ring_size=st.sampled_from([1, 2, 5, 1000]),
    batch_rows=st.sampled_from([1, 7, 1000]),
    isolation=st.sampled_from(["committed", "uncommitted"]),
)
@settings(max_examples=60, deadline=None)
def test_columns_equal_messages(histories, chunk_bytes, ring_size, batch_rows, isolation):
    transport = served(*histories, chunk_bytes=chunk_bytes)
    options = {"transport": transport, "ring_size": ring_size, "isolation": isolation}
    batches = list(Reader(dict, "topic=t", **options).arrow(SCHEMA, batch_rows=batch_rows))
    assert all(0 < batch.num_rows <= batch_rows for batch in batches)
    assert all(len(set(batch.column("_journal").to_pylist())) == 1 for batch in batches)
    expected = [row_of(envelope) for envelope in Reader(dict, "topic=t", **options)]
    assert by_journal(rows_of(batches)) == by_journal(expected)


@given(
    histories=histories(),
    chunk_bytes=st.sampled_from([17, 333, 1 << 20]),
    ring_size=st.sampled_from([1, 5, 1000]),
    batch_rows=st.sampled_from([1, 7, 50]),
    count=st.integers(0, 40),
)
@settings(max_examples=40, deadline=None)
def test_columns_resume_anywhere(histories, chunk_bytes, ring_size, batch_rows, count):
    transport = served(*histories, chunk_bytes=chunk_bytes)
    options = {"transport": transport, "ring_size": ring_size}
    whole = rows_of(Reader(dict, "topic=t", **options).arrow(SCHEMA))
    reader = Reader(dict, "topic=t", **options)
    rows = rows_of(islice(reader.arrow(SCHEMA, batch_rows=batch_rows), count))
    checkpoint = reader.checkpoint()
    reader.close()
    rows += rows_of(Reader(dict, "topic=t", **options, checkpoint=checkpoint).arrow(SCHEMA))
    assert by_journal(rows) == by_journal(whole)
