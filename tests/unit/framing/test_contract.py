"""The framings of this package, and one of a user's, keep the promises of framings."""

from __future__ import annotations

import re

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st

from gazette_sdk.errors import DecodeError, FramingError
from gazette_sdk.framing import Csv, FixedProtobuf, Frames, JsonLines, framing_for
from gazette_sdk.testing import framings
from gazette_sdk.testing.framings import FramingContract, read_through
from support.memory_transport import MemoryTransport
from support.netstrings import Netstrings
from support.protobuf_messages import Gram


class InMemory(FramingContract):
    @pytest.fixture
    def transport(self):
        return MemoryTransport(chunk_bytes=64)


class TestJsonLines(InMemory):
    framing = JsonLines()
    payloads = st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"."))
    refused = (b"\n", b'{\n"a":1}')


class TestFixedProtobuf(InMemory):
    framing = FixedProtobuf()
    payloads = st.binary(max_size=30) | st.just(b"\x66\x33\x93\x36")
    broken = (
        b"these are not frames",
        b"\x66\x33\x93 and not one more",
        b"\x00" * 9,
        b"ff3f3f36\x66\x33\x93\x33\x66",
    )
    messages = tuple(Gram(text="wood" * number, count=number) for number in range(10))


FIELDS = st.sampled_from(
    [
        "",
        "a",
        "12",
        "plain text",
        '"',
        '""',
        ",",
        "\n",
        "\r",
        "\r\n",
        'a "b", c\n',
        " x",
        "é",
        "\\.",
    ]
) | st.text(max_size=6).filter(lambda text: not re.search("[\ud800-\udfff]", text))


def csv_text(fields: list[str]) -> bytes:
    return ",".join(
        f'"{field.replace(chr(34), chr(34) * 2)}"' if re.search(r'[",\r\n]', field) else field
        for field in fields
    ).encode()


class TestCsv(InMemory):
    framing = Csv()
    payloads = st.lists(FIELDS, min_size=3, max_size=3).map(csv_text)
    refused = (b"", b"\n", b"\r", b"a,b\n", b"a\nb", b'"a', b'a"b', b'"a"b', b"a,b\r", b'a,"b"\r')
    broken = (
        b"two,fields\n",
        b"one\r\n",
        b"and,three,or,four\n",
        b'bare "quote",a,b\n',
        b'"ends" early,a,b\n',
        b'"a\nb"c,d",e\n',
        b'a,b,"c" \r\n',
        b'""",",x",y\n',
    )
    ends_with_the_stream = True


class TestNetstrings(InMemory):
    framing = Netstrings()
    payloads = st.binary(max_size=20)
    refused = (b"x" * 1000,)
    broken = (b"nonsense,", b"-1:x,", b"01:x,", b"1:xy,", b",")


class Careless(JsonLines):
    """Every promise it breaks is found."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def encode(self, payload, out):
        if self.fault == "leaves a part behind":
            out += payload[:1]
        super().encode(payload, out)

    def encode_many(self, payloads, out):
        ends = super().encode_many(payloads, out)
        return ends[:-1] if self.fault == "forgets an end" else ends

    def cut(self, buffer, *, searched=0, final=False):
        frames = super().cut(buffer, searched=searched, final=final)
        if self.fault == "cuts only whole chunks" and frames.consumed < len(buffer):
            return Frames([], [], 0)
        if self.fault == "loses a torn end" and final:
            return Frames(frames.begins, frames.ends, len(buffer))
        if self.fault == "trusts the hint" and searched:
            return super().cut(buffer, searched=len(buffer), final=final)
        if self.fault == "does not go on" and b"bad" in buffer:
            return Frames([], [], 0, DecodeError("bad", offset=0))
        if self.fault == "skips a frame behind" and b"bad" in buffer:
            end = buffer.index(b"bad") + 4
            end = (buffer.find(b"\n", end) + 1) or end
            return Frames([], [], end, DecodeError("bad", offset=0))
        return frames

    def payloads(self, buffer, frames):
        found = super().payloads(buffer, frames)
        return [each.rstrip() for each in found] if self.fault == "strips" else found


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("strips", "frames_are_cut_back_into_their_payloads"),
        ("forgets an end", "many_payloads_are_encoded_as_one_by_one"),
        ("leaves a part behind", "a_refused_payload_leaves_nothing_behind"),
        ("cuts only whole chunks", "longer_content_only_adds_frames"),
        ("trusts the hint", "what_was_searched_before_only_saves_time"),
        ("loses a torn end", "a_torn_tail_is_reported"),
        ("does not go on", "nothing_is_lost_behind_what_is_bad"),
        ("skips a frame behind", "nothing_is_lost_behind_what_is_bad"),
    ],
)
def test_a_broken_promise_is_found(fault, promise, monkeypatch):
    only_generated = settings(deadline=None, phases=[Phase.generate], database=None)
    monkeypatch.setattr(framings, "_examples", only_generated)

    class Contract(FramingContract):
        framing = Careless(fault)
        payloads = st.binary(max_size=9).map(lambda raw: raw.replace(b"\n", b" ") + b" ")
        refused = (b"a\n",)
        broken = (b"bad\n",)

    with pytest.raises((AssertionError, FramingError)):
        getattr(Contract(), f"test_{promise}")()


def test_a_framing_that_stands_still_is_found():
    with pytest.raises(AssertionError, match="does not consume the bad bytes"):
        read_through(Careless("does not go on"), [b"bad\n"])


def test_the_registry_is_left_as_it_was():
    TestJsonLines().test_the_framing_is_found_by_its_content_type()
    assert type(framing_for("application/x-ndjson")) is JsonLines
