"""Corrupt content: what is bad is told once, byte for byte, and nothing else is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.errors import DecodeError, DesyncError, FramingError, TornFrameError
from gazette_sdk.framing import Csv, FixedProtobuf, Framing, JsonLines
from gazette_sdk.message.batch_reader import JournalDecoder
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.uuid import CONTINUE_TXN, Stamp
from gazette_sdk.testing.framings import read_through
from support.protobuf_messages import Gram

BASE = 1 << 40
COUNT = 8
STAMP = Stamp(bytes.fromhex("0d04970419de"))
STAMP.flags = CONTINUE_TXN


def written(framing: Framing, messages: list) -> list[bytes]:
    """The frame of each message."""
    frames = []
    for message in messages:
        STAMP.clock += 160
        frame = bytearray()
        framing.encode(kind_of(type(message), framing.form).encode(message, STAMP), frame)
        frames.append(bytes(frame))
    return frames


CASES = {
    "json": (JsonLines(), dict, [{"n": n, "text": "x" * n} for n in range(COUNT)]),
    "protobuf": (FixedProtobuf(), Gram, [Gram(text="x" * n, count=n) for n in range(COUNT)]),
    "csv": (Csv(), list, [["", str(n), 'a,"b"\n' * (n % 3)] for n in range(COUNT)]),
}
FRAMES = {name: written(framing, messages) for name, (framing, _, messages) in CASES.items()}

PLACES = st.lists(st.integers(0, 2000), max_size=10)
EDITS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 5), st.binary(max_size=5)), max_size=4
)


def chunks_of(content: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(content) + 1) for place in places), len(content)]
    return [content[begin:end] for begin, end in itertools.pairwise(edges)]


def follow(name: str, chunks: list[bytes], *, sequenced: bool):
    """Envelopes, and begin and end of what each error is about, with the error."""
    framing, message_type, _ = CASES[name]
    kind = kind_of(message_type, framing.form)
    decoder = JournalDecoder("a/journal", framing, kind, BASE, sequenced=sequenced)
    envelopes, errors = [], []

    def take(run, error) -> bool:
        envelopes.extend(run.items)
        if error is not None:
            assert isinstance(error, FramingError)
            assert error.journal == "a/journal"
            errors.append((error.offset, decoder.offset, error))
        return error is not None and not isinstance(error, TornFrameError)

    for chunk in chunks:
        going = take(*decoder.feed(chunk))
        while going:
            going = take(*decoder.feed(b""))
    going = take(*decoder.finish())
    while going:
        going = take(*decoder.feed(b""))
        going = going or take(*decoder.finish())
    return envelopes, errors, decoder.offset


@pytest.mark.parametrize("sequenced", [False, True])
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60)
@given(EDITS, PLACES)
def test_every_byte_is_delivered_or_told_and_chunks_change_nothing(name, sequenced, edits, places):
    content = bytearray(b"".join(FRAMES[name]))
    for place, length, put in edits:
        at = place % (len(content) + 1)
        content[at : at + length] = put
    envelopes, errors, offset = follow(name, chunks_of(bytes(content), places), sequenced=sequenced)
    whole_envelopes, whole_errors, whole_offset = follow(
        name, [bytes(content)], sequenced=sequenced
    )
    assert envelopes == whole_envelopes

    def frame_errors(found):
        return [(begin, str(error)) for begin, _, error in found if type(error) is DecodeError]

    assert frame_errors(errors) == frame_errors(whole_errors)
    # What the framing finds is an envelope, or an error of its own at its begin.
    reading = read_through(CASES[name][0], [bytes(content)], BASE)
    told = {begin for begin, _, error in errors if type(error) is DecodeError}
    delivered = {(each.begin, each.end) for each in envelopes}
    for _, begin, end in reading.frames:
        assert ((begin, end) in delivered) != (begin in told)
    assert len(delivered) == len(envelopes) <= len(reading.frames)
    # Nothing is told twice, and what was torn is where reading goes on.
    skipped = [(begin, end) for begin, end, error in errors if isinstance(error, DesyncError)]
    assert len({begin for begin, *_ in errors}) == len(errors)
    assert all(begin < end for begin, end in skipped)
    torn = [begin for begin, _, error in errors if isinstance(error, TornFrameError)]
    assert torn in ([], [offset])
    assert offset == BASE + len(content) or torn
    assert (whole_offset == offset) or name == "protobuf"


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 2), min_size=COUNT - 1, max_size=COUNT - 1),
    st.data(),
    PLACES,
)
def test_junk_between_frames_hides_none_of_them(name, amounts, data, places):
    junk = {
        "json": st.binary(min_size=1, max_size=9).map(lambda raw: raw.replace(b"\n", b"") + b"\n"),
        "protobuf": st.binary(min_size=8, max_size=20).map(lambda raw: raw.replace(b"f", b"F")),
        "csv": st.sampled_from(
            [b"a\n", b"a,b,c,d\n", b'a"b,c,d\n', b'"x"y,\n', b'"a\n"b\n', b"no,u,id\n"]
        ),
    }[name]
    content, expected = b"", []
    for index, frame in enumerate(FRAMES[name]):
        expected.append((BASE + len(content), BASE + len(content) + len(frame)))
        content += frame
        if index < COUNT - 1:
            content += b"".join(data.draw(junk) for _ in range(amounts[index]))
    envelopes, errors, _ = follow(name, chunks_of(content, places), sequenced=True)
    found = [(each.begin, each.end) for each in envelopes]
    # Junk may happen to be a message of its own.
    assert [each for each in found if each in expected] == expected
    assert bool(errors) or len(found) > COUNT or not any(amounts)
