"""Frames: their bounds and inner forms, and that no cut of the bytes changes what is decoded.

``STREAM_CASES=100000`` runs the laws for so many cases each.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.rules import RPCS
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    CONTENT_BYTES_MAX,
    END_FRAME,
    HEADER_BYTES,
    MESSAGE_BYTES_MAX,
    METHODS,
    PING_BYTES_MAX,
    PREFACE,
    STATUS_OK_FRAME,
    Frame,
    FrameBuffer,
    Kind,
    Method,
    MethodTraits,
    StatusLine,
    decode_call,
    decode_head,
    decode_hello,
    decode_status,
    decode_text,
    encode,
    encode_append,
    encode_call,
    encode_goaway,
    encode_hello,
    encode_status,
    header,
)
from gazette_sdk.protocol.stream_pb2 import CallHead, Hello
from support.frame_feed import FrameFeed

CASES = int(os.environ.get("STREAM_CASES", "100"))
LAW = settings(max_examples=CASES, deadline=None)
LONG = pytest.mark.timeout(max(120, CASES // 10))

BOUNDS = {
    Kind.CONTENT: CONTENT_BYTES_MAX,
    Kind.END: 0,
    Kind.ABORT: 0,
    Kind.PING: PING_BYTES_MAX,
    Kind.PONG: PING_BYTES_MAX,
}
KINDS = list(Kind)


class Decoded(NamedTuple):
    frames: list[Frame]
    error: str | None
    inside: bool


def decode(pieces: list[bytes], opening: bytes = b"") -> Decoded:
    """What becomes of bytes that arrive in such pieces, up to the first that is refused."""
    frames: list[Frame] = []
    buffer = FrameFeed(opening)
    for piece in pieces:
        if buffer.error is None:
            frames += buffer.feed(piece)
    return Decoded(frames, _reason(buffer.error), buffer.inside_frame)


def _reason(error: StreamProtocolError | None) -> str | None:
    return None if error is None else error.reason


def cut(data: bytes, seed: int) -> list[bytes]:
    """Pieces of random lengths, some of them empty; single bytes only of what is short."""
    source = random.Random(seed)
    greatest = max(source.choice((1, 3, 16, 300, 5000, 100_000)), len(data) // 100)
    pieces = []
    while data:
        length = source.randint(0, greatest)
        pieces.append(data[:length])
        data = data[length:]
    return pieces


# -------------------------------------------------------------------- bounds


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_of_the_greatest_length_is_taken_and_a_longer_one_refused_at_its_header(kind):
    bound = BOUNDS.get(kind, MESSAGE_BYTES_MAX)
    assert decode([header(kind, bound)]).error is None
    longer = bytes([kind]) + (bound + 1).to_bytes(4, "big")
    expected = f"{kind.name} frame of {bound + 1} bytes exceeds {bound}"
    assert decode([longer]) == ([], expected, True)
    for encoder in (lambda: header(kind, bound + 1), lambda: encode(kind, bytes(bound + 1))):
        with pytest.raises(StreamProtocolError, match=expected):
            encoder()


@pytest.mark.parametrize("kind", [0, 11, 12, 71, 80, 255])
def test_an_unknown_kind_is_refused_at_its_first_byte(kind):
    good = encode(Kind.PING, b"abc")
    for pieces in (
        [good + bytes([kind])],
        [good, bytes([kind])],
        [good + bytes([kind]) + bytes(9)],
    ):
        decoded = decode(pieces)
        assert decoded.frames == [Frame(Kind.PING, b"abc")]
        assert decoded.error == f"frame of unknown kind {kind}"
    with pytest.raises(StreamProtocolError, match="unknown kind"):
        header(kind, 0)


def test_frames_before_a_bad_one_are_given_and_none_after():
    data = encode(Kind.MESSAGE, b"first") + header(Kind.END, 0)[:1] + b"\0\0\0\1x" + END_FRAME
    buffer = FrameFeed()
    assert buffer.feed(data) == [Frame(Kind.MESSAGE, b"first")]
    assert buffer.error is not None
    with pytest.raises(StreamProtocolError, match="END frame of 1 bytes exceeds 0"):
        buffer.updated(1)


# ------------------------------------------------------------------- preface


@pytest.mark.parametrize("at", range(len(PREFACE) + 1))
def test_a_server_finds_the_preface_in_any_pieces(at):
    data = PREFACE + encode(Kind.PING, b"1")
    decoded = decode([data[:at], data[at:]], PREFACE)
    assert decoded == ([Frame(Kind.PING, b"1")], None, False)
    assert decode([PREFACE[:at]], PREFACE).inside == (at < len(PREFACE))


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"GZT/2\r\n\r\n", PREFACE[:-1] + b"x", b"\0"]
)
def test_other_openings_than_the_preface_are_refused(data):
    expected = ([], "the connection does not begin with the preface")
    assert decode([data], PREFACE)[:2] == expected
    assert decode([data[i : i + 1] for i in range(len(data))], PREFACE)[:2] == expected


# --------------------------------------------------------------- inner forms


def test_the_wire_is_as_written_down():
    assert PREFACE == b"GZT/1\r\n\r\n"
    assert encode(Kind.MESSAGE, b"ab") == b"\3\0\0\0\2ab"
    assert encode_call(Method.READ, b"req", b"head") == b"\2\0\0\0\x0a\3\0\4headreq"
    assert encode_call(Method.LIST, b"") == b"\2\0\0\0\3\1\0\0"
    assert encode_status(5, "no") == b"\7\0\0\0\3\5no"
    assert encode_status(2, "no", "StoreError") == b"\7\0\0\0\x0e\2no\0StoreError"
    assert encode_status(0) == STATUS_OK_FRAME == b"\7\0\0\0\1\0"
    assert (END_FRAME, ABORT_FRAME) == (b"\5\0\0\0\0", b"\6\0\0\0\0")
    assert encode_goaway("bye") == b"\x0a\0\0\0\3bye"


def test_methods_are_those_of_the_journal_service_and_unary_ones_of_shards():
    assert {rpc.number for rpc in RPCS} | {16, 17, 18, 19, 20} == set(METHODS) == set(Method)
    for rpc in RPCS:
        name = "".join("_" * (i > 0 and c.isupper()) + c.upper() for i, c in enumerate(rpc.name))
        assert Method[name] == rpc.number
        assert METHODS[rpc.number] == MethodTraits(
            rpc.client_streams, rpc.server_streams, rpc.name == "Read"
        )
    assert all(METHODS[number] == MethodTraits() for number in range(16, 21))


@given(st.integers(0, 255), st.binary(max_size=80), st.binary(max_size=80))
def test_calls_round_trip(method, head, request):
    (frame,) = FrameFeed().feed(encode_call(method, request, head))
    assert frame.kind == Kind.CALL
    assert decode_call(frame.payload) == (method, head, request)


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_a_whole_append_is_its_three_frames(request, content, head):
    assert encode_append(request, content, head) == (
        encode_call(Method.APPEND, request, head) + encode(Kind.CONTENT, content) + END_FRAME
    )


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "0 bytes has no head"),
        (b"\1\0", "2 bytes has no head"),
        (b"\1\0\1", "3 bytes ends within its head"),
        (b"\1\xff\xffabc", "6 bytes ends within its head"),
    ],
)
def test_a_call_that_is_shorter_than_it_says_is_refused(payload, why):
    with pytest.raises(StreamProtocolError, match=why):
        decode_call(payload)


@pytest.mark.parametrize("encoder", [lambda h, r: encode_call(1, r, h), None])
def test_calls_that_are_too_long_are_refused(encoder):
    encoder = encoder or (lambda head, request: encode_append(request, b"", head))
    with pytest.raises(StreamProtocolError, match="head of 65536 bytes exceeds 65535"):
        encoder(bytes(65536), b"")
    with pytest.raises(StreamProtocolError, match="CALL frame of 16777217 bytes exceeds"):
        encoder(b"", bytes(MESSAGE_BYTES_MAX - 2))
    with pytest.raises(StreamProtocolError, match="CONTENT frame of 1048577 bytes exceeds"):
        encode_append(b"", bytes(CONTENT_BYTES_MAX + 1))


def test_heads_are_decoded_or_refused():
    head = CallHead(metadata={"authorization": "Bearer x"}, timeout_ms=1 << 40, after_success=True)
    assert decode_head(head.SerializeToString()) == head
    with pytest.raises(StreamProtocolError, match="a call's head is malformed"):
        decode_head(b"\xff\xff")


@given(st.integers(0, 16), st.text(max_size=50), st.sampled_from(["", "StoreError"]))
def test_statuses_round_trip(code, text, kind):
    text = text.replace("\0", "-")
    (frame,) = FrameFeed().feed(encode_status(code, text, kind))
    assert decode_status(frame.payload) == StatusLine(code, text, kind)


def test_a_nul_in_a_text_cannot_be_taken_for_a_kind():
    assert decode_status(encode_status(2, "a\0b")[5:]) == StatusLine(2, "a b", "")


@pytest.mark.parametrize("payload", [b"", b"\x11", b"\xffx"])
def test_a_status_without_a_code_is_refused(payload):
    with pytest.raises(StreamProtocolError, match="without a status code"):
        decode_status(payload)


def test_long_texts_are_cut_between_characters():
    for frame in (encode_status(2, "aé" * 20_000)[1:], encode_goaway("aé" * 20_000)):
        text = frame[HEADER_BYTES:].decode("utf-8")
        assert 16_000 < len(text.encode()) <= 16_385
    assert decode_text(b"a\xff") == "a\\xff"
    assert encode_goaway("\ud800")[5:] == b"?"


def test_hellos_round_trip_with_their_bounds_filled_in():
    hello = decode_hello(encode_hello("zone", "suffix")[5:])
    assert (hello.zone, hello.suffix, hello.wire_version) == ("zone", "suffix", 1)
    assert (hello.content_bytes_max, hello.message_bytes_max) == (1 << 20, 16 << 20)
    bare = decode_hello(Hello(wire_version=7).SerializeToString())
    assert (bare.content_bytes_max, bare.message_bytes_max) == (1 << 20, 16 << 20)
    assert decode_hello(encode_hello(content_bytes_max=9)[5:]).content_bytes_max == 9
    for payload, why in ((b"\xff", "malformed"), (b"", "no version")):
        with pytest.raises(StreamProtocolError, match=why):
            decode_hello(payload)


# ---------------------------------------------------------------------- laws

payloads = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([300, 4095, 5000, 9000, 40_000]).map(
        lambda length: bytes(range(256)) * (length // 256) + b"!"
    ),
)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(KINDS))
    return Frame(int(kind), draw(payloads)[: BOUNDS.get(kind, MESSAGE_BYTES_MAX)])


@LONG
@LAW
@given(st.lists(frames(), max_size=12), st.integers(0, 2**32), st.booleans())
def test_no_cut_changes_what_is_decoded(sent, seed, prefaced):
    opening = PREFACE if prefaced else b""
    data = opening + b"".join(encode(*frame) for frame in sent)
    assert decode(cut(data, seed), opening) == (sent, None, False)
    assert decode(cut(data[:-1], seed), opening).inside == (len(data) > 0)


@LONG
@LAW
@given(
    st.lists(frames(), max_size=4),
    st.one_of(
        st.binary(max_size=200),
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 70), st.binary(max_size=9))).map(
            lambda parts: b"".join(bytes([k, 0, 0, 0, n]) + p for k, n, p in parts)
        ),
    ),
    st.integers(0, 2**32),
)
def test_garbage_gives_the_same_in_any_pieces_and_raises_only_our_error(before, garbage, seed):
    data = b"".join(encode(*frame) for frame in before) + garbage
    whole = decode([data])
    assert whole.frames[: len(before)] == before
    assert decode(cut(data, seed))[:2] == whole[:2]
    assert decode(cut(data, seed), PREFACE)[:2] == decode([data], PREFACE)[:2]


# -------------------------------------------------------------------- memory


def test_the_greatest_frames_arrive_whole_in_pieces_of_a_socket():
    source = random.Random(1)
    sent = [Frame(int(Kind.CONTENT), source.randbytes(CONTENT_BYTES_MAX)) for _ in range(3)]
    sent.append(Frame(int(Kind.MESSAGE), source.randbytes(MESSAGE_BYTES_MAX)))
    data = b"".join(encode(*frame) for frame in sent) + END_FRAME
    pieces = [data[at : at + 262_144] for at in range(0, len(data), 262_144)]
    assert decode(pieces) == ([*sent, Frame(int(Kind.END), b"")], None, False)


def test_a_header_alone_reserves_no_memory_and_single_bytes_cost_no_object_each():
    piece = header(Kind.MESSAGE, MESSAGE_BYTES_MAX)
    buffer = FrameFeed()

    tracemalloc.start()
    try:
        assert buffer.feed(piece) == []
        assert tracemalloc.get_traced_memory()[1] < 10_000
        for value in range(10_000):
            assert buffer.feed(value.to_bytes(2, "big")[1:]) == []
        assert tracemalloc.get_traced_memory()[1] < 60_000
    finally:
        tracemalloc.stop()


def test_a_buffer_grows_for_what_comes_and_shrinks_after_some_quiet():
    buffer = FrameFeed()
    small = encode(Kind.MESSAGE, b"x" * 100)
    for _ in range(100):
        buffer.feed(small)
    assert len(buffer.get_buffer()) == FrameBuffer.SMALL_BYTES
    assert len(buffer.feed(small * 20_000)) == 20_000
    assert len(buffer._memory) == FrameBuffer.LARGE_BYTES
    buffer.feed(encode(Kind.CONTENT, bytes(CONTENT_BYTES_MAX)))
    assert len(buffer._memory) == CONTENT_BYTES_MAX + HEADER_BYTES
    for _ in range(FrameBuffer.QUIET_UPDATES + 2):
        buffer.feed(small)
    assert len(buffer._memory) == FrameBuffer.SMALL_BYTES


def test_a_buffer_gives_memory_back_between_frames_only():
    buffer = FrameFeed()
    buffer.feed(encode(Kind.CONTENT, bytes(50_000)))
    buffer.trim()
    assert len(buffer._memory) == FrameBuffer.SMALL_BYTES
    data = encode(Kind.CONTENT, bytes(50_000))
    buffer.feed(data[:-1])
    buffer.trim()
    assert buffer.feed(data[-1:]) == [Frame(Kind.CONTENT, bytes(50_000))]


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=6), st.data())
def test_a_buffer_knows_what_is_missing_of_a_frame(payloads, data):
    stream = b"".join(encode(Kind.CONTENT, payload) for payload in payloads)
    cut = data.draw(st.integers(1, len(stream)))
    buffer = FrameFeed()
    buffer.feed(stream[:cut])
    ends_at = 0
    for payload in payloads:
        if ends_at + HEADER_BYTES > cut > ends_at:
            assert buffer.missing == ends_at + HEADER_BYTES - cut
            return
        ends_at += HEADER_BYTES + len(payload)
        if cut <= ends_at:
            break
    assert buffer.missing == ends_at - cut
