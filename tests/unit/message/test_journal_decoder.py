"""However content arrives, the envelopes are the same."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import DecodeError, DesyncError, FramingError, TornFrameError
from gazette_sdk.framing import FixedProtobuf, JsonLines
from gazette_sdk.message.journal_decoder import JournalDecoder
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.uuid import Stamp
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


def decoder(framing, offset: int = 0) -> JournalDecoder:
    kind = kind_of(Gram if framing.form == "protobuf" else dict, framing.form)
    return JournalDecoder("a/journal", framing, kind, offset)


def follow(framing, chunks: list[bytes], offset: int) -> list:
    following = decoder(framing, offset)
    envelopes = []
    for chunk in chunks:
        found, error = following.feed(chunk)
        assert error is None
        envelopes += found
    assert following.finish() is None
    return envelopes


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
    envelopes, error = decoder(framing, 1000).feed(bytes(out))
    assert [envelope.message.text for envelope in envelopes] == ["good"]
    assert isinstance(error, DecodeError)
    assert (error.journal, error.offset) == ("a/journal", 1000 + begin)
    assert "as Gram" in str(error)
    assert error.__cause__ is not None


def test_reading_goes_on_behind_junk():
    framing = FixedProtobuf()
    junk = b"this is no frame"
    following = decoder(framing, 1000)
    envelopes, error = following.feed(junk + stream_of(["after"], framing))
    assert envelopes == []
    assert isinstance(error, DesyncError)
    assert (error.journal, error.offset, error.skipped) == ("a/journal", 1000, len(junk))
    envelopes, error = following.feed(b"")
    assert error is None
    assert [envelope.begin for envelope in envelopes] == [1000 + len(junk)]


def test_a_frame_beyond_the_limit_is_an_error(monkeypatch):
    following = decoder(JsonLines(), 5)
    monkeypatch.setattr(following._cutter, "_frame_bytes_max", 10)
    envelopes, error = following.feed(b"x" * 11)
    assert envelopes == []
    assert type(error) is FramingError
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
    assert following.feed(b"{}\n")[0][0].begin == 70
