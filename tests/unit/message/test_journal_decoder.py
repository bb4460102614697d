"""However content arrives, the envelopes are the same."""

from __future__ import annotations

import logging
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import DecodeError, DesyncError, OversizedFrameError, TornFrameError
from gazette_sdk.framing import FixedProtobuf, JsonLines
from gazette_sdk.message import batch_reader
from gazette_sdk.message.batch_reader import JournalDecoder
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, Stamp, build_uuid
from support.protobuf_messages import Gram


def stream_of(texts: list[str], framing) -> bytes:
    kind = kind_of(Gram if framing.form == "protobuf" else dict, framing.form)
    stamp = Stamp(b"\x01bcdef")
    out = bytearray()
    for text in texts:
        stamp.tick_now()
        message = Gram(text=text) if framing.form == "protobuf" else {"text": text}
        framing.encode(kind.encode(message, stamp), out)
    return bytes(out)


def decoder(framing, offset: int = 0, message_type: type = dict, **options) -> JournalDecoder:
    kind = kind_of(Gram if framing.form == "protobuf" else message_type, framing.form)
    return JournalDecoder("a/journal", framing, kind, offset, **options)


def follow(framing, chunks: list[bytes], offset: int) -> list:
    following = decoder(framing, offset)
    envelopes = []
    for chunk in chunks:
        found, error = following.feed(chunk)
        assert error is None
        envelopes += found.items
    found, error = following.finish()
    assert error is None
    return [*envelopes, *found.items]


class Anything(msgspec.Struct):
    """A message of which nothing is known."""

    n: int = 0


@given(
    st.lists(st.text(max_size=30), max_size=15),
    st.lists(st.integers(min_value=0, max_value=3000), max_size=15),
    st.integers(min_value=0, max_value=1 << 50),
)
@pytest.mark.parametrize("framing", [JsonLines(), FixedProtobuf()], ids=lambda f: f.form)
def test_chunks_never_change_envelopes(framing, texts, places, offset):
    stream = stream_of(texts, framing)
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    chunks = [stream[begin:end] for begin, end in pairwise(edges)]
    whole = follow(framing, [stream], offset)
    assert follow(framing, chunks, offset) == whole
    read = [e.message.text if framing.form == "protobuf" else e.message["text"] for e in whole]
    assert read == texts
    clocks = [envelope.clock for envelope in whole]
    assert clocks == sorted(set(clocks))


def test_a_bad_payload_is_named_by_journal_and_offset():
    framing = FixedProtobuf()
    out = bytearray(stream_of(["good"], framing))
    begin = len(out)
    framing.encode(b"test message content", out)
    run, error = decoder(framing, 1000).feed(bytes(out))
    assert [envelope.message.text for envelope in run.items] == ["good"]
    assert isinstance(error, DecodeError)
    assert (error.journal, error.offset) == ("a/journal", 1000 + begin)
    assert "as Gram" in str(error)
    assert error.__cause__ is not None


def test_reading_goes_on_behind_junk():
    framing = FixedProtobuf()
    junk = b"this is no frame"
    following = decoder(framing, 1000)
    run, error = following.feed(junk + stream_of(["after"], framing))
    assert run.items == []
    assert isinstance(error, DesyncError)
    assert (error.journal, error.offset, error.skipped) == ("a/journal", 1000, len(junk))
    run, error = following.feed(b"")
    assert error is None
    assert [envelope.begin for envelope in run.items] == [1000 + len(junk)]
    assert following.offset == run.ends[-1]


def test_a_frame_beyond_the_limit_is_an_error(monkeypatch):
    following = decoder(JsonLines(), 5)
    monkeypatch.setattr(following._cutter, "_frame_bytes_max", 10)
    run, error = following.feed(b"x" * 11)
    assert run.items == []
    assert type(error) is OversizedFrameError
    assert (error.journal, error.offset) == ("a/journal", 5)


def test_jumps_between_messages_are_logged_and_within_one_are_torn(caplog):
    following = decoder(JsonLines())
    following.feed(b'{"a":1}\n')
    assert following.jump(8) is None
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        assert following.jump(50) is None
    assert "offsets 8 to 50 is gone" in caplog.text
    following.feed(b'{"a"')
    error = following.jump(100)
    assert isinstance(error, TornFrameError)
    assert (error.journal, error.offset) == ("a/journal", 50)
    assert following.offset == 100


def test_finding_the_write_head_is_no_jump(caplog):
    following = decoder(JsonLines(), -1)
    with caplog.at_level(logging.WARNING):
        assert following.jump(70) is None
    assert caplog.records == []
    assert following.feed(b"{}\n")[0].items[0].begin == 70


def line(n: int, *, clock: int = 0, flags: int = 0) -> bytes:
    uuid = build_uuid(b"\x01bcdef", clock or 160 * (n + 1), flags)
    return b'{"UUID":"%b","n":%d}\n' % (str(uuid).encode(), n)


BAD = {
    "no JSON": b'{"n":\n',
    "no object": b"17\n",
    "blank": b"\n",
    "no UUID": b'{"UUID":"f47ac10b-58cc-11d1-8000-0123456789zz","n":1}\n',
    "too short": b'{"UUID":"f47ac10b","n":1}\n',
    "no text": b'{"UUID":17,"n":1}\n',
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_each_bad_message_is_reported_once_and_all_others_are_decoded(bad, count):
    """Whatever stands before, between and behind."""
    stream = b"".join(
        line(n) if n % 4 else bad + line(n) + (bad if n % 8 else b"") for n in range(count)
    )
    following = decoder(JsonLines(), 100, sequenced=True)
    envelopes, errors = [], []
    run, error = following.feed(stream)
    while True:
        envelopes += run.items
        assert run.clocks.tolist() == [envelope.clock for envelope in run.items]
        if error is None:
            break
        assert isinstance(error, DecodeError)
        assert error.journal == "a/journal"
        assert following.offset == error.offset + len(bad)
        errors.append(error.offset)
        run, error = following.feed(b"")
    assert [envelope.message["n"] for envelope in envelopes] == list(range(count))
    places = [100 + at for at in range(len(stream)) if stream.startswith(bad, at)]
    assert errors == [at for at in places if bad != b"\n" or stream[at - 101] == 0x0A or at == 100]
    assert following.offset == 100 + len(stream)


def test_what_uuids_say_is_told_in_bulk_and_one_by_one():
    flags = [CONTINUE_TXN, CONTINUE_TXN, ACK_TXN, 0, 0x3FF]
    stream = b"".join(line(n, flags=each) for n, each in enumerate(flags))
    for content in (stream, stream.replace(b'"UUID":', b'"UUID": ')):
        run, error = decoder(JsonLines(), sequenced=True).feed(content)
        assert error is None
        assert run.flags.tolist() == flags
        assert run.clocks.tolist() == [160 * (n + 1) for n in range(5)]
        assert set(run.producers.tolist()) == {int.from_bytes(b"\x01bcdef")}
        assert [(e.flags, e.clock, e.message) for e in run.items] == [
            (each, 160 * (n + 1), {"n": n}) for n, each in enumerate(flags)
        ]


def test_messages_without_uuid_have_no_clock():
    run, error = decoder(JsonLines(), sequenced=True).feed(b'{"n":1}\n' * 9)
    assert error is None
    assert run.clocks.tolist() == [0] * 9
    assert [envelope.time for envelope in run.items] == [None] * 9


def test_empty_acknowledgements_stand_between_typed_messages():
    class Count(msgspec.Struct):
        n: int

    ack = b'{"UUID":"%b"}\n' % str(build_uuid(b"\x01bcdef", 10_000, ACK_TXN)).encode()
    stream = b"".join(line(n, flags=CONTINUE_TXN) for n in range(9)) + ack + line(99)
    run, error = decoder(JsonLines(), 0, Count, sequenced=True).feed(stream)
    assert error is None
    assert [envelope.message.n for envelope in run.items] == [*range(9), 0, 99]
    assert run.flags.tolist() == [CONTINUE_TXN] * 9 + [ACK_TXN, 0]


LINES = st.sampled_from(
    [
        b'{"UUID":"9f32c9cc-1a2b-11ef-8401-010203040506","n":1}',
        b'{"UUID":"9F32C9CC-1A2B-11EF-8402-010203040506","n":2}',
        b'{"n":3,"uuid":"9f32c9cc-1a2b-11ef-8400-010203040506"}',
        b'{"n":4}',
        b'{"UUID":"","n":5}',
        b'{"UUID":"9f32c9cc-1a2b-11ef-8401-01020304050","n":6}',
        b'{"UUID":7}',
        b"{",
        b"",
    ]
)


@given(st.lists(LINES, max_size=12), st.integers(min_value=0, max_value=1 << 50))
@pytest.mark.parametrize("message_type", [dict, Anything], ids=["dict", "struct"])
def test_few_messages_are_decoded_as_many_are(message_type, lines, offset):
    def said(short_max: int) -> list:
        found = []
        following = decoder(JsonLines(), offset, message_type, sequenced=True)
        content = b"".join(line + b"\n" for line in lines)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_reader, "_SHORT_MAX", short_max)
            while True:
                run, error = following.feed(content)
                assert len(run) == len(run.items)
                found += [run.messages(), str(error), following.offset]
                if error is None:
                    return found
                content = b""

    assert said(-1) == said(1) == said(100)
