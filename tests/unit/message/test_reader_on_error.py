"""Content that is no message: reported with its offset, and raised, passed over, or judged."""

from __future__ import annotations

import codecs
import json
import logging
from itertools import islice

import pyarrow as pa
import pytest

from gazette_sdk import Reader
from gazette_sdk.errors import (
    DecodeError,
    DesyncError,
    FramingError,
    GazetteError,
    OversizedFrameError,
    TornFrameError,
    UserCodeError,
)
from gazette_sdk.framing import Framing, JsonLines, framing_for
from gazette_sdk.message.uuid import CONTINUE_TXN
from gazette_sdk.protocol import broker_pb2 as pb
from support.memory_transport import MemoryTransport
from support.protobuf_messages import Gram
from support.written_messages import TICK, History, frame, producer_id

BAD = {
    "no JSON": b'{"n":\n',
    "blank": b"\n",
    "no UUID": b'{"UUID":"f47ac10b-58cc-11d1-8000-0123456789zz","n":1}\n',
    "no text": b'{"UUID":17,"n":1}\n',
}


def transport_of(content: bytes, chunk_bytes: int = 128 * 1024, **labels) -> MemoryTransport:
    transport = MemoryTransport(chunk_bytes=chunk_bytes)
    transport.create("a/journal", **labels).content += content
    return transport


def numbers(reader) -> list[int]:
    return [envelope.message["n"] for envelope in reader]


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_a_poison_record_is_raised_skipped_or_judged(bad, chunk_bytes, caplog):
    before = b"".join(frame(n, 1, TICK * (n + 1)) for n in range(50))
    behind = frame(50, 1, TICK * 60)
    transport = transport_of(before + bad + bad + behind, chunk_bytes)
    places = [len(before), len(before) + len(bad)]

    reader = Reader(dict, name="a/journal", transport=transport)
    found = []
    with pytest.raises(DecodeError, match="on_error='skip'") as caught:
        found += [found.append(envelope.message["n"]) for envelope in reader]
    assert found == list(range(50))
    assert (caught.value.journal, caught.value.offset) == ("a/journal", places[0])
    assert reader.offsets == {"a/journal": places[0]}
    assert reader.checkpoint().offsets == {"a/journal": places[0]}
    with pytest.raises(DecodeError):
        next(iter(reader))

    with caplog.at_level(logging.WARNING):
        reader = Reader(dict, name="a/journal", transport=transport, on_error="skip")
        assert numbers(reader) == [*range(51)]
    told = [record.args[0].offset for record in caplog.records if "passed over" in record.message]
    assert told == places
    assert reader.offsets == {"a/journal": transport.journals["a/journal"].end}

    errors: list[GazetteError] = []
    reader = Reader(dict, name="a/journal", transport=transport, on_error=errors.append)
    assert numbers(reader) == [*range(51)]
    assert [(type(error), error.offset) for error in errors] == [
        (DecodeError, place) for place in places
    ]


def test_what_stands_before_an_error_is_delivered_before_it_is_judged():
    content = frame(0, 1, TICK) + b"{\n" + frame(1, 1, 2 * TICK)
    told = []
    reader = Reader(dict, name="a/journal", transport=transport_of(content), on_error=told.append)
    iterator = iter(reader)
    assert next(iterator).message == {"n": 0}
    assert told == []
    assert next(iterator).message == {"n": 1}
    assert len(told) == 1


def test_a_function_may_raise_what_it_likes():
    def refuse(error):
        raise LookupError(str(error.offset))

    content = frame(0, 1, TICK) + b"{\n" + frame(1, 1, 2 * TICK)
    reader = Reader(dict, name="a/journal", transport=transport_of(content), on_error=refuse)
    assert numbers(islice(reader, 1)) == [0]
    for _ in range(2):
        with pytest.raises(LookupError, match=str(len(frame(0, 1, TICK)))):
            numbers(reader)
    assert reader.checkpoint().offsets == {"a/journal": len(frame(0, 1, TICK))}


def test_a_function_of_which_nothing_has_run_passes_over_nothing():
    async def later(error):
        """Nothing."""

    content = b"{\n" + frame(1, 1, 2 * TICK)
    reader = Reader(dict, name="a/journal", transport=transport_of(content), on_error=later)
    with pytest.raises(UserCodeError, match="later returned a coroutine, of which nothing has run"):
        numbers(reader)


def test_a_poison_record_within_a_transaction_is_passed_over_when_that_is_read_again():
    history = History()
    history.pending(1)
    history.content += b"poison\n"
    history.pending(1)
    history.outside(2)
    history.ack(1)
    told = []
    reader = Reader(
        dict,
        name="a/journal",
        transport=transport_of(history.content),
        on_error=told.append,
        ring_size=1,
    )
    assert numbers(reader) == [2, 0, 1]
    assert [error.offset for error in told] == [history.messages[0].end]


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_an_uncommitted_reader_takes_any_uuid_and_a_committed_one_none_that_is_none(isolation):
    content = frame(0, 1, TICK) + BAD["no UUID"] + frame(2, 1, 2 * TICK)
    reader = Reader(
        dict,
        name="a/journal",
        transport=transport_of(content),
        on_error="skip",
        isolation=isolation,
    )
    assert numbers(reader) == ([0, 2] if isolation == "committed" else [0, 1, 2])


def test_any_uuid_will_do_whatever_its_version():
    content = b'{"UUID":"f47ac10b-58cc-4372-0567-0e02b2c3d479","n":1}\n'
    (envelope,) = Reader(dict, name="a/journal", transport=transport_of(content))
    assert envelope.producer == bytes.fromhex("0e02b2c3d479")


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_junk_between_frames_is_passed_over(chunk_bytes):
    framing = framing_for("application/x-protobuf-fixed")
    content = bytearray()
    framing.encode(Gram(text="one").SerializeToString(), content)
    junk_at = len(content)
    content += b"some junk here" * 20
    framing.encode(Gram(text="two").SerializeToString(), content)
    errors: list[GazetteError] = []
    reader = Reader(
        Gram,
        name="a/journal",
        transport=transport_of(content, chunk_bytes, content_type="application/x-protobuf-fixed"),
        on_error=errors.append,
    )
    envelopes = list(reader)
    assert [envelope.message.text for envelope in envelopes] == ["one", "two"]
    assert all(isinstance(error, DesyncError) for error in errors)
    assert sum(error.skipped for error in errors) == 14 * 20
    assert errors[0].offset == junk_at
    assert envelopes[1].begin == junk_at + 14 * 20


def test_a_frame_torn_at_the_write_head_is_not_passed_over(caplog):
    whole = frame(0, 1, TICK)
    torn = frame(1, 1, 2 * TICK)
    transport = transport_of(whole + torn[:20])
    with pytest.raises(TornFrameError) as caught:
        numbers(Reader(dict, name="a/journal", transport=transport))
    assert (caught.value.journal, caught.value.offset) == ("a/journal", len(whole))

    reader = Reader(dict, name="a/journal", transport=transport, on_error="skip")
    with caplog.at_level(logging.WARNING):
        assert numbers(reader) == [0]
    assert "passed over" in caplog.text
    assert reader.offsets == {"a/journal": len(whole)}
    transport.journals["a/journal"].content += torn[20:]
    assert numbers(reader) == [1]


def test_a_blocking_reader_waits_for_the_rest_of_a_torn_frame(on_loop):
    torn = frame(0, 1, TICK)
    transport = transport_of(torn[:20])
    reader = Reader(dict, name="a/journal", transport=transport, block=True)

    def complete():
        transport.journals["a/journal"].content += torn[20:]
        transport.signal()

    iterator = iter(reader)
    reader._batches.begin()
    on_loop(complete)
    assert next(iterator).message == {"n": 0}
    reader.close()


def test_a_frame_torn_by_a_jump_is_passed_over():
    class Deleted(MemoryTransport):
        """Content behind offset 60 is gone up to offset 1000."""

        async def read(self, request, target=None):
            whole = frame(0, 1, TICK) + frame(1, 1, 2 * TICK)
            yield pb.ReadResponse(status=pb.OK, header=self._header(), offset=0)
            yield whole[:60]
            yield pb.ReadResponse(status=pb.OK, header=self._header(), offset=1000)
            yield frame(2, 1, 3 * TICK)

    transport = Deleted()
    transport.create("a/journal")
    end = 1000 + len(frame(2, 1, 3 * TICK))
    options = {"name": "a/journal", "transport": transport, "end_offsets": {"a/journal": end}}
    with pytest.raises(TornFrameError, match="was deleted") as caught:
        numbers(Reader(dict, **options))
    assert caught.value.offset == len(frame(0, 1, TICK))
    reader = Reader(dict, on_error="skip", **options)
    assert numbers(reader) == [0, 2]
    assert reader.offsets == {"a/journal": end}


def test_a_frame_without_end_cannot_be_passed_over(monkeypatch):
    monkeypatch.setattr(Framing, "frame_bytes_max", 10)
    monkeypatch.setattr(JsonLines, "find_end", lambda *_: None)
    reader = Reader(dict, name="a/journal", transport=transport_of(b"x" * 100), on_error="skip")
    with pytest.raises(FramingError, match="more than 10 bytes"):
        numbers(reader)


@pytest.fixture
def oversized() -> History:
    """Transactions with messages that are too long within, between and behind them."""
    history = History()
    for n in range(3):
        history.content += b'{"n":%b}\n' % (b"1" * (100 << n))
        history.pending(1)
        history.content += frame(7, 3, TICK, CONTINUE_TXN)[:-2] + b',"pad":"%b"}\n' % (b"x" * 999)
        history.outside(2)
    history.ack(1)
    history.content += frame(8, 4, TICK)[:-2] + b',"pad":"%b"}\n' % (b"x" * 100)
    return history


@pytest.mark.parametrize("chunk_bytes", [1, 7, 128, 1 << 20])
@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_frames_that_are_too_long_are_passed_over(
    monkeypatch, oversized, isolation, chunk_bytes, caplog
):
    monkeypatch.setattr(Framing, "frame_bytes_max", 99)
    transport = transport_of(oversized.content, chunk_bytes)
    options = {"name": "a/journal", "transport": transport, "isolation": isolation, "ring_size": 1}
    reader = Reader(dict, on_error="skip", **options)
    expected = oversized.committed() if isolation == "committed" else [0, 1, 2, 3, 4, 5, 6]
    assert numbers(reader) == expected
    assert reader.offsets == {"a/journal": len(oversized.content)}
    assert caplog.text.count("a frame of more than 99 bytes") == 7
    judged = []
    assert numbers(Reader(dict, on_error=judged.append, **options)) == expected
    assert [type(error) for error in judged] == [OversizedFrameError] * 7
    reader = Reader(dict, **options)
    with pytest.raises(
        OversizedFrameError,
        match=r"^a/journal: offset 0: a frame of more than 99 bytes; .*JsonLines\.frame_bytes_max"
        r".* on_error='skip'",
    ):
        numbers(reader)
    assert reader.offsets == {"a/journal": 0}


def test_columns_pass_over_frames_that_are_too_long(monkeypatch, oversized):
    monkeypatch.setattr(Framing, "frame_bytes_max", 99)
    reader = Reader(
        dict, name="a/journal", transport=transport_of(oversized.content, 7), on_error="skip"
    )
    batches = reader.arrow(pa.schema([("n", pa.int64())]))
    found = [n for batch in batches for n in batch.column("n").to_pylist()]
    assert found == oversized.committed()


def test_a_clock_that_runs_backwards_drops_what_was_committed_already():
    content = frame(0, 1, 5 * TICK) + frame(1, 1, 4 * TICK) + frame(2, 1, 6 * TICK)
    assert numbers(Reader(dict, name="a/journal", transport=transport_of(content))) == [0, 2]


def test_an_open_transaction_is_no_error():
    content = frame(0, 1, TICK, CONTINUE_TXN)
    reader = Reader(dict, name="a/journal", transport=transport_of(content))
    assert numbers(reader) == []
    (state,) = reader.checkpoint().producers
    assert (state.producer, state.begin) == (producer_id(1), 0)


@pytest.mark.parametrize("is_arrow", [False, True], ids=["objects", "columns"])
@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_each_batch_after_a_bad_record_is_a_position_to_continue_at(is_arrow, isolation):
    """Few messages are decoded at a time after a bad one: no position is in between."""
    lines = [frame(n, 1, TICK * (n + 1)) for n in range(2000)]
    places = [0, 1, 2, 70, 71, 500, 1999]
    for at in places:
        lines[at] = BAD["no JSON"]
    wanted = [n for n in range(2000) if n not in places]
    transport = transport_of(b"".join(lines))

    def read(**begin) -> list[tuple[list[int], dict[str, int]]]:
        """Return the messages of each batch, and the offset after it."""
        reader = Reader(
            dict, name="a/journal", transport=transport, isolation=isolation, on_error="skip",
            **begin,
        )  # fmt: skip
        if is_arrow:
            batches = reader.arrow([("n", pa.int64())])
            found = ((batch.column("n").to_pylist(), dict(reader.offsets)) for batch in batches)
        else:
            found = (([each.message["n"]], dict(reader.offsets)) for each in reader)
        with reader:
            return list(found)

    def joined(batches) -> list[int]:
        return [n for numbers, _ in batches for n in numbers]

    batches = read()
    assert joined(batches) == wanted
    assert len(batches) > 8
    for at in range(0, len(batches), 1 if is_arrow else 97):
        assert joined(batches[: at + 1]) + joined(read(offsets=batches[at][1])) == wanted


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.float64(), b"NaN"),
        (pa.float32(), b"-Infinity"),
        (pa.list_(pa.float64()), b"[1,NaN]"),
        (pa.struct([("x", pa.float64())]), b'{"x":Inf}'),
    ],
)
def test_numbers_that_are_no_json_are_bad_content_in_columns_too(kind, value):
    good = frame(1, 1, TICK)
    reader = Reader(dict, name="a/journal", transport=transport_of(good + b'{"m":%b}\n' % value))
    with pytest.raises(DecodeError) as caught:
        list(reader.arrow([("m", kind)]))
    assert caught.value.offset == len(good)


@pytest.mark.parametrize("begins_second", [False, True])
@pytest.mark.parametrize("content_type", ["application/x-ndjson", "text/csv"])
@pytest.mark.parametrize("is_arrow", [False, True], ids=["objects", "columns"])
def test_a_byte_order_mark_is_bad_content_for_all(content_type, begins_second, is_arrow):
    is_csv = content_type == "text/csv"
    lines = [frame(n, 1, TICK * (n + 1)) for n in range(2)]
    if is_csv:
        lines = [json.loads(line)["UUID"].encode() + b",1\n" for line in lines]
    content = lines[0] * begins_second + codecs.BOM_UTF8 + lines[1]
    transport = transport_of(content, content_type=content_type)
    reader = Reader(list if is_csv else dict, name="a/journal", transport=transport)
    found = []
    with pytest.raises(DecodeError) as caught:
        found.extend(reader.arrow([("n", pa.int64())]) if is_arrow else reader)
    assert (len(found), caught.value.offset) == (begins_second, len(lines[0]) * begins_second)
