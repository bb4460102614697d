"""Framings, by the conformance vectors and golden frames."""

from __future__ import annotations

import base64

import pytest

from gazette_sdk.errors import DesyncError, FramingError, TornFrameError
from gazette_sdk.framing import (
    Cutter,
    FixedProtobuf,
    Frames,
    Framing,
    JsonLines,
    base,
    framing_for,
    register,
)
from gazette_sdk.message.kinds import kind_of
from support.vectors import golden, group

FIXED = group("message", "fixed_framing")
JSON = group("message", "json_framing")


def cut_all(framing: Framing, stream: bytes) -> tuple[list[bytes | str], bytes]:
    """Payloads and skipped lengths in order, with the offset of each, and what remains."""
    cutter = Cutter(framing)
    found: list = []
    cut = cutter.feed(stream)
    while True:
        payloads = framing.payloads(cut.buffer, cut.frames)
        for begin, end, payload in zip(cut.frames.begins, cut.frames.ends, payloads, strict=True):
            found.append((payload, cut.offset + begin, cut.offset + end))
        if cut.frames.error is None:
            return found, stream[cutter.offset :]
        assert isinstance(cut.frames.error, DesyncError)
        found.append((cut.frames.error.skipped, cut.frames.error.offset))
        cut = cutter.feed(b"")


@pytest.mark.parametrize("case", FIXED["encode"])
def test_fixed_frames_are_written_as_recorded(case):
    framing = FixedProtobuf()
    payloads = [text.encode() for text in case["payloads_utf8"]]
    stream = bytes.fromhex(case["expect_stream"])
    out = bytearray()
    ends = framing.encode_many(payloads, out)
    assert out == stream
    assert ends[-1] == len(stream)
    assert [each[0] for each in cut_all(framing, stream)[0]] == payloads


def test_exactly_the_fixed_frame_is_consumed():
    case = FIXED["decode"][0]
    found, remaining = cut_all(FixedProtobuf(), bytes.fromhex(case["stream"]))
    expected = [
        (each["payload_utf8"].encode(), each["begin"], each["end"]) for each in case["expect"]
    ]
    assert found == expected
    assert remaining == case["expect_remaining_utf8"].encode()


def test_a_desynchronised_stream_is_skipped_to_the_next_magic():
    case = FIXED["decode"][2]
    found, remaining = cut_all(FixedProtobuf(), bytes.fromhex(case["stream"]))
    assert found == [(6, 0), (b"test message content", 6, 34)]
    assert not remaining


def test_junk_longer_than_the_buffer_is_skipped_in_pieces_of_the_same_total():
    case = FIXED["decode"][3]
    stream = bytes.fromhex(case["stream"])
    framing = FixedProtobuf()
    cutter = Cutter(framing)
    skipped, payloads = 0, []
    for at in range(0, len(stream), case["read_buffer_size"]):
        cut = cutter.feed(stream[at : at + case["read_buffer_size"]])
        payloads += framing.payloads(cut.buffer, cut.frames)
        while cut.frames.error is not None:
            skipped += cut.frames.error.skipped
            cut = cutter.feed(b"")
            payloads += framing.payloads(cut.buffer, cut.frames)
    assert skipped == 21
    assert payloads == [b"test message content"]


@pytest.mark.parametrize("case", FIXED["incomplete"][0]["cases"])
def test_an_incomplete_fixed_frame_is_torn(case):
    base = bytes.fromhex(FIXED["incomplete"][0]["base_stream"])
    framing = FixedProtobuf()
    stream = base[slice(*case["slice"])]
    frames = framing.cut(stream, final=True)
    if "expect_payload_utf8" in case:
        assert framing.payloads(stream, frames) == [case["expect_payload_utf8"].encode()]
    elif case["error"] == "EOF":
        assert not frames.begins
        assert frames.error is None
    elif case["slice"][0] == 0 and len(stream) < 8:
        assert isinstance(frames.error, TornFrameError)
    else:
        assert isinstance(frames.error, TornFrameError)
        assert "unexpected EOF" in str(frames.error)
        if "size 28" in case["error"]:
            assert "reading frame (size 28)" in str(frames.error)


def test_a_single_newline_ends_a_fixed_stream_cleanly():
    frames = FixedProtobuf().cut(b"\n", final=True)
    assert frames.error is None
    assert frames.consumed == 1


@pytest.mark.parametrize("tail", [b"x", b"\n\n", b"x\n"])
def test_other_trailing_bytes_are_torn(tail):
    assert isinstance(FixedProtobuf().cut(tail, final=True).error, TornFrameError)


def test_json_lines_are_written_as_recorded():
    case = JSON["encode"][0]
    out = bytearray()
    JsonLines().encode_many([b'{"A":42,"B":"the answer"}', b'{"Bar":63}'], out)
    assert out.decode() == case["expect_stream_utf8"]


@pytest.mark.parametrize("many", [False, True])
def test_a_json_payload_with_a_line_break_is_refused_and_leaves_nothing(many):
    out = bytearray(b"before")
    encode = JsonLines().encode_many if many else JsonLines().encode
    payload = [b"{}", b"{\n}"] if many else b"{\n}"
    with pytest.raises(FramingError, match="line break"):
        encode(payload, out)
    assert out == b"before"


def test_a_json_line_without_newline_is_torn():
    case = JSON["decode"][1]
    frames = JsonLines().cut(case["stream_utf8"].encode(), final=True)
    assert len(frames) == 0
    assert case["error"] in str(frames.error)


def test_of_content_with_a_bad_line_exactly_that_line_is_consumed():
    case = JSON["decode"][2]
    stream = case["stream_utf8"].encode()
    found, remaining = cut_all(JsonLines(), stream)
    assert found == [(stream.split(b"\n")[0], 0, stream.index(b"\n") + 1)]
    assert remaining.decode() == case["expect_remaining_utf8"]
    frames = JsonLines().cut(stream)
    assert kind_of(dict, "json").decode(JsonLines(), stream, frames).error is not None


def test_lines_longer_than_the_buffer_are_unpacked():
    case = group("message", "line_unpacking")
    stream = case["stream_utf8"].encode()
    cutter = Cutter(JsonLines())
    lines = []
    for at in range(0, len(stream), case["read_buffer_size"]):
        cut = cutter.feed(stream[at : at + case["read_buffer_size"]])
        lines += [
            bytes(cut.buffer[begin:end]).decode()
            for begin, end in zip(cut.frames.begins, cut.frames.ends, strict=True)
        ]
    assert lines == case["expect"][:2]
    error = cutter.finish().frames.error
    assert case["expect"][2]["error"] in str(error)
    assert cutter.pending_bytes == len(case["expect"][2]["partial"])
    assert error.offset == len(stream) - len("extra")


def test_content_types_are_known_or_refused_with_their_text():
    case = group("message", "content_types")
    for content_type in case["registered"]:
        assert framing_for(content_type).content_type == content_type
    for rejected in case["rejected"]:
        with pytest.raises(FramingError) as caught:
            framing_for(rejected["content_type"])
        assert str(caught.value) == rejected["error"]


class Semicolons(Framing):
    content_type = "text/x-semicolons"
    form = "json"
    trailer_bytes = 1

    def encode(self, payload, out):
        if b";" in payload:
            raise FramingError("a semicolon")
        out += payload + b";"

    def cut(self, buffer, *, searched=0, final=False):
        ends = [at + 1 for at in range(searched, len(buffer)) if buffer[at : at + 1] == b";"]
        return Frames([0, *ends][: len(ends)], ends, ends[-1] if ends else 0)


def test_a_framing_of_ones_own_is_registered_by_content_type(monkeypatch):
    monkeypatch.setattr(base, "_framings", dict(base._framings))
    own = Semicolons()
    register(own)
    assert framing_for("text/x-semicolons") is own
    out = bytearray()
    assert own.encode_many([b"1", b"22"], out) == [2, 5]
    assert own.payloads(out, own.cut(out)) == [b"1", b"22"]
    with pytest.raises(FramingError):
        own.encode_many([b"3", b";"], out)
    assert out == b"1;22;"


@pytest.mark.parametrize("content_type", ["", "application/x-gazette-recoverylog"])
def test_some_content_types_cannot_be_registered(content_type):
    framing = Semicolons()
    framing.content_type = content_type
    with pytest.raises(FramingError, match="cannot be registered"):
        register(framing)


@pytest.mark.parametrize(
    "case", golden("consumer/messages/framing.json")["frames"], ids=lambda c: c["name"]
)
def test_golden_frames_are_cut_whole(case):
    framing = framing_for(case["content_type"])
    frame = base64.b64decode(case["frame"])
    frames = framing.cut(frame, final=True)
    assert (frames.begins, frames.ends, frames.error) == ([0], [len(frame)], None)
    out = bytearray()
    framing.encode(framing.payloads(frame, frames)[0], out)
    assert out == frame
