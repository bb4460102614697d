"""However content is cut into chunks, the frames and their offsets are the same."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import DesyncError, FramingError, OversizedFrameError, TornFrameError
from gazette_sdk.framing import Csv, Cutter, FixedProtobuf, Framing, JsonLines
from gazette_sdk.framing import base as json_lines
from gazette_sdk.testing.framings import read_through

MAGIC = b"\x66\x33\x93\x36"


def follow(framing: Framing, chunks: list[bytes], offset: int = 0) -> tuple[list, int, list]:
    """(payload, begin, end) of every frame; bytes skipped; errors at the end."""
    cutter = Cutter(framing, offset)
    frames, skipped, errors = [], 0, []

    def take(cut):
        nonlocal skipped
        while True:
            payloads = framing.payloads(cut.buffer, cut.frames)
            for payload, begin, end in zip(
                payloads, cut.frames.begins, cut.frames.ends, strict=True
            ):
                frames.append((payload, cut.offset + begin, cut.offset + end))
            if not isinstance(cut.frames.error, DesyncError):
                return cut
            skipped += cut.frames.error.skipped
            cut = cutter.feed(b"")

    for chunk in chunks:
        assert take(cutter.feed(chunk)).frames.error is None
    last = cutter.finish()
    if isinstance(last.frames.error, TornFrameError):
        errors.append(last.frames.error.offset)
    return frames, skipped, errors


def cuts_of(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[begin:end] for begin, end in itertools.pairwise(edges)]


PAYLOADS = st.lists(st.binary(max_size=40).map(lambda raw: raw.replace(b"\n", b".")), max_size=12)
PLACES = st.lists(st.integers(min_value=0, max_value=1000), max_size=20)


@given(PAYLOADS, st.binary(max_size=6), PLACES, st.integers(min_value=0, max_value=1 << 40))
@pytest.mark.parametrize("framing", [JsonLines(), FixedProtobuf()], ids=lambda f: f.form)
def test_chunks_never_change_frames_nor_offsets(framing, payloads, tail, places, offset):
    stream = bytearray()
    ends = framing.encode_many(payloads, stream)
    tail = tail.replace(b"\n", b".")
    if framing.form == "protobuf":
        tail = MAGIC + b"\xff\xff\xff\x7f" + tail if tail else b""
    stream += tail
    frames, skipped, torn = follow(framing, cuts_of(bytes(stream), places), offset)
    assert [frame[0] for frame in frames] == payloads
    assert [frame[2] - offset for frame in frames] == ends
    assert [frame[1] - offset for frame in frames] == [0, *ends][: len(ends)]
    assert skipped == 0
    assert torn == ([offset + len(stream) - len(tail)] if tail else [])


@given(PAYLOADS.filter(len), st.binary(min_size=8, max_size=60), PLACES)
def test_junk_between_fixed_frames_is_skipped_exactly(payloads, junk, places):
    junk = b"J" + junk.replace(MAGIC[:1], b"j")  # it must not look like the begin of a frame
    framing = FixedProtobuf()
    stream = bytearray()
    framing.encode_many(payloads, stream)
    begin = len(stream)
    stream += junk
    expected_begin = len(stream)
    framing.encode(b"after", stream)
    frames, skipped, torn = follow(framing, cuts_of(bytes(stream), places))
    assert [frame[0] for frame in frames] == [*payloads, b"after"]
    assert frames[-1][1] == expected_begin
    assert skipped == expected_begin - begin
    assert torn == []


@given(st.lists(st.integers(min_value=0, max_value=5000), max_size=30))
def test_a_frame_much_longer_than_its_chunks_is_found_whole(places):
    stream = b'"' + b"x" * 4000 + b'"\n{}\n'
    frames, _, torn = follow(JsonLines(), cuts_of(stream, places))
    assert [frame[1:] for frame in frames] == [(0, 4003), (4003, 4006)]
    assert torn == []


def test_a_frame_longer_than_the_limit_is_an_error_with_its_offset():
    cutter = Cutter(JsonLines(), 70, frame_bytes_max=100)
    assert cutter.feed(b"{}\n" + b"x" * 90).frames.error is None
    error = cutter.feed(b"y" * 90).frames.error
    assert type(error) is OversizedFrameError
    assert error.offset == 73
    assert cutter.offset == 73, "a reader that stops here begins at the frame again"


LIMIT = 50
SIZES = st.lists(st.integers(0, 2 * LIMIT) | st.integers(LIMIT - 12, LIMIT + 4), max_size=12)


@given(SIZES, PLACES, st.integers(0, 1 << 40), st.sampled_from([b"x", b'""', b"\n", b",", b"\r"]))
@pytest.mark.parametrize("framing", [JsonLines(), FixedProtobuf(), Csv()], ids=lambda f: f.form)
def test_frames_that_are_too_long_are_passed_over(framing, sizes, places, offset, text):
    stream, expected, oversized = bytearray(), [], []
    for size in sizes:
        if framing.form == "csv":
            payload = b'"a%b",b' % (text * (size // len(text)))
        else:
            payload = b"{%b}" % (b"x" * size)
        begin = len(stream)
        framing.encode(payload, stream)
        found = expected if len(stream) - begin <= LIMIT else oversized
        found.append((offset + begin, offset + len(stream)))
    cutter = Cutter(framing, offset, frame_bytes_max=LIMIT)
    frames, errors = [], []
    for chunk in cuts_of(bytes(stream), places):
        fed: bytes | None = chunk
        while fed is not None:
            cut = cutter.feed(fed)
            assert cutter.pending_bytes <= len(stream)
            frames += [
                (cut.offset + begin, cut.offset + end)
                for begin, end in zip(cut.frames.begins, cut.frames.ends, strict=True)
            ]
            fed = None
            if cut.frames.error is not None:
                assert type(cut.frames.error) is OversizedFrameError
                errors.append(cut.frames.error.offset)
                fed = b""
    last = cutter.finish()
    assert (len(last.frames), last.frames.error) == (0, None)
    assert frames == expected
    assert errors == [begin for begin, _ in oversized]
    assert cutter.offset == offset + len(stream)


@pytest.mark.parametrize("framing", [JsonLines(), FixedProtobuf(), Csv()], ids=lambda f: f.form)
def test_a_frame_that_is_too_long_and_not_complete_is_torn_at_its_begin(framing):
    stream = bytearray()
    framing.encode(b'"%b"' % (b"x" * 2 * LIMIT), stream)
    cutter = Cutter(framing, 70, frame_bytes_max=LIMIT)
    assert type(cutter.feed(bytes(stream[:-5])).frames.error) is OversizedFrameError
    assert cutter.feed(b"").frames.error is None
    torn = cutter.finish().frames.error
    assert type(torn) is TornFrameError
    assert (torn.offset, cutter.offset) == (70, 70)
    assert len(cutter.feed(bytes(stream[-5:]) + stream[:0]).frames) == 0
    assert cutter.offset == 70 + len(stream)
    assert cutter.feed(stream[:10] if framing.form == "protobuf" else b'"x"\n').frames.error is None


def test_a_frame_that_is_too_long_and_deleted_in_parts_is_torn():
    cutter = Cutter(JsonLines(), 70, frame_bytes_max=LIMIT)
    assert cutter.feed(b"x" * 100).frames.error is not None
    torn = cutter.jump(1000)
    assert torn is not None
    assert "offset 170 to 1000 was deleted" in str(torn)
    assert len(cutter.feed(b"{}\n").frames) == 1
    assert cutter.offset == 1003


def test_a_framing_that_finds_no_ends_of_long_frames_stops_at_them():
    class Own(FixedProtobuf):
        def find_end(self, head, passed, buffer):
            return Framing.find_end(self, head, passed, buffer)

    cutter = Cutter(Own(), frame_bytes_max=LIMIT)
    content = MAGIC + b"\xff\xff\x00\x00" + b"x" * LIMIT
    assert type(cutter.feed(content).frames.error) is FramingError
    assert type(cutter.feed(b"x").frames.error) is FramingError
    assert cutter.offset == 0


@pytest.mark.parametrize("framing", [JsonLines(), FixedProtobuf(), Csv()])
def test_content_that_is_no_frame_fills_no_memory(framing):
    head = MAGIC + b"\xff\xff\xff\xff" if isinstance(framing, FixedProtobuf) else b'"'
    cutter = Cutter(framing)
    errors = [cutter.feed(head + b"x" * (1 << 22)).frames.error]
    while errors[-1] is None:
        errors.append(cutter.feed(b"x" * (1 << 22)).frames.error)
    assert "more than 67108864 bytes" in str(errors[-1])
    assert "frame_bytes_max" in str(errors[-1])
    assert cutter.pending_bytes <= (1 << 26) + (1 << 22) + len(head)


def test_a_registered_framing_has_its_own_bound():
    class Short(JsonLines):
        frame_bytes_max = 10

    assert Cutter(Short()).feed(b"x" * 11).frames.error is not None
    framing = JsonLines()
    framing.frame_bytes_max = 1 << 40
    assert Cutter(framing).feed(b"x" * 11).frames.error is None


def test_a_jump_between_frames_goes_on_at_the_new_offset():
    cutter = Cutter(JsonLines(), 10)
    cutter.feed(b"{}\n")
    assert cutter.offset == 13
    assert cutter.jump(1000) is None
    cut = cutter.feed(b"[]\n")
    assert cut.offset == 1000
    assert cutter.offset == 1003


def test_what_a_framing_remembers_of_a_stream_ends_with_it():
    cutter, other = Cutter(Csv()), Cutter(Csv())
    assert cutter.feed(b"a,b\n").frames.error is None
    assert other.feed(b"a,b,c\n").frames.error is None
    assert cutter.feed(b"a,b,c\n").frames.error is not None
    assert cutter.jump(100) is None
    cut = cutter.feed(b"a,b,c\n")
    assert (cut.offset, cut.frames.ends, cut.frames.error) == (100, [6], None)


def test_a_jump_within_a_frame_is_a_torn_frame_and_may_be_passed_over():
    cutter = Cutter(JsonLines(), 10)
    cutter.feed(b'{}\n{"half":')
    error = cutter.jump(1000)
    assert isinstance(error, TornFrameError)
    assert error.offset == 13
    assert cutter.feed(b"[]\n").offset == 1000


def naive_fixed(stream: bytes) -> tuple[list[tuple[bytes, int, int]], list[tuple[int, int]]]:
    """The rules of the fixed framing, with all content at hand."""
    frames, bad, at = [], [], 0
    while len(stream) - at >= 8:
        if stream[at : at + 4] != MAGIC:
            found = stream.find(MAGIC, at + 1)
            to = found if found >= 0 else len(stream) - 3
            bad.append((at, to))
            at = to
            continue
        end = at + 8 + int.from_bytes(stream[at + 4 : at + 8], "little")
        if end > len(stream):
            break
        frames.append((stream[at + 8 : end], at, end))
        at = end
    if at < len(stream) and stream[at:] != b"\n":
        if bad and bad[-1][1] == at:
            at = bad.pop()[0]
        bad.append((at, len(stream)))
    return frames, bad


PIECES = st.lists(
    st.binary(max_size=12).map(lambda raw: MAGIC + len(raw).to_bytes(4, "little") + raw)
    | st.binary(max_size=9)
    | st.sampled_from([MAGIC, MAGIC[:3], MAGIC[:1], MAGIC + b"\xff\0\0\0", b"\n"]),
    max_size=12,
).map(b"".join)


@given(PIECES, PLACES)
def test_corrupt_fixed_content_loses_no_frame_that_its_rules_deliver(stream, places):
    reading = read_through(FixedProtobuf(), cuts_of(stream, places))
    assert (reading.frames, reading.bad) == naive_fixed(stream)


@given(
    st.lists(st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"")), max_size=8),
    st.binary(max_size=4).filter(lambda raw: b"\n" not in raw),
    PLACES,
)
@pytest.mark.parametrize("short_bytes", [-1, 10, 2048])
def test_lines_of_any_bytes_are_frames(short_bytes, lines, tail, places):
    stream = b"".join(line + b"\n" for line in lines) + tail
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "_SHORT_BYTES", short_bytes)
        reading = read_through(JsonLines(), cuts_of(stream, places))
    assert [frame[0] for frame in reading.frames] == lines
    assert reading.torn == (len(stream) - len(tail) if tail else None)
