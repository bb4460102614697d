"""Contract tests of framings: the behaviour that readers and publishers require.

Derive a test class, with your framing and its payloads::

    class TestMyFraming(FramingContract):
        framing = MyFraming()
        payloads = st.binary(max_size=100)     # a Hypothesis strategy
        refused = (b"a payload it cannot hold",)
        broken = (b"bytes that are no frame",)

The last test publishes to a journal and reads it. It needs the fixture ``gazette``, or a fixture
``transport`` in your class. The tests need Hypothesis.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from gazette_sdk.errors import FramingError, TornFrameError
from gazette_sdk.framing import Cutter, Frames, Framing, framing_for, register
from gazette_sdk.message import Publisher, Reader
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, label_set
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import apply_journals
from gazette_sdk.transport.loop import run

WAIT_S = 20.0
"""Limit of each call of the tests."""

_CALLS_MAX = 100_000
"""Limit of cuts of a chunk. The contents of these tests have fewer frames and errors."""


@dataclass(slots=True)
class Reading:
    """Result of cutting some content.

    Attributes:
        frames: payload, begin and end of each frame; offsets of the content.
        bad: begins and ends of bytes that are no frame, in order; adjacent ones are joined.
        torn: offset of an incomplete frame at the end; None if there is none.
    """

    frames: list[tuple[bytes, int, int]] = field(default_factory=list)
    bad: list[tuple[int, int]] = field(default_factory=list)
    torn: int | None = None


def read_through(framing: Framing, chunks: Sequence[bytes], offset: int = 0) -> Reading:
    """Cut content that arrives in chunks, and continue after bad bytes.

    Args:
        framing: framing of the content.
        chunks: the content.
        offset: offset of the first chunk.

    Raises:
        AssertionError: the framing makes no progress, or loses bytes.
    """
    reading = Reading()
    cutter = Cutter(framing, offset)
    length = offset
    for chunk in chunks:
        length += len(chunk)
        fed = chunk
        for _ in range(_CALLS_MAX):
            cut = cutter.feed(fed)
            _note(reading, framing, cut.buffer, cut.frames, cut.offset)
            if cut.frames.error is None:
                break
            assert not isinstance(cut.frames.error, TornFrameError), "torn before the end"
            fed = b""
        else:
            raise AssertionError(f"a chunk is not complete after {_CALLS_MAX} cuts")
    for _ in range(_CALLS_MAX):
        cut = cutter.finish()
        _note(reading, framing, cut.buffer, cut.frames, cut.offset)
        if cut.frames.error is None or isinstance(cut.frames.error, TornFrameError):
            break
    else:
        raise AssertionError(f"the end is not complete after {_CALLS_MAX} cuts")
    if isinstance(cut.frames.error, TornFrameError):
        reading.torn = cut.frames.error.offset
        assert reading.torn is not None
        _note_bad(reading, reading.torn, length)
    else:
        assert cutter.offset == length, f"{length - cutter.offset} bytes at the end are lost"
    return reading


def _note(
    reading: Reading, framing: Framing, buffer: bytes | bytearray, frames: Frames, base: int
) -> None:
    check_frames(frames, len(buffer))
    payloads = framing.payloads(buffer, frames)
    for payload, begin, end in zip(payloads, frames.begins, frames.ends, strict=True):
        reading.frames.append((payload, base + begin, base + end))
    error = frames.error
    if error is not None and not isinstance(error, TornFrameError):
        assert error.offset is not None, f"{error!r} has no offset"
        # The Cutter has converted it to an offset of the journal.
        _note_bad(reading, error.offset, base + frames.consumed)


def _note_bad(reading: Reading, begin: int, end: int) -> None:
    if reading.bad and reading.bad[-1][1] == begin:
        begin = reading.bad.pop()[0]
    reading.bad.append((begin, end))


def check_frames(frames: Frames, length: int) -> None:
    """Check that frames are in order, and lie within the consumed part of a buffer."""
    assert len(frames.begins) == len(frames.ends)
    at = 0
    for begin, end in zip(frames.begins, frames.ends, strict=True):
        assert at <= begin < end, f"frame [{begin}, {end}) begins before {at}, or is empty"
        at = end
    assert at <= frames.consumed <= length, (at, frames.consumed, length)
    error = frames.error
    if error is not None:
        assert isinstance(error, FramingError)
        assert isinstance(error, TornFrameError) or frames.consumed > at, (
            f"{error!r} does not consume the bad bytes: no reader could continue behind them"
        )


class FramingContract:
    """Contract tests of a framing. Derive a test class from it.

    Attributes:
        framing: the framing.
        payloads: strategy of payloads it can hold.
        refused: payloads it cannot hold.
        broken: bad bytes between two frames. Each is reported, and readers continue after its
            last byte.
        ends_with_the_stream: True if the last frame of a stream may lack its end, so that not
            every torn frame is detected.
        messages: messages of one class to publish in its form; by default dicts for ``"json"``
            and lists for ``"csv"``.
    """

    framing: ClassVar[Framing]
    payloads: ClassVar[st.SearchStrategy[bytes]]
    refused: ClassVar[Sequence[bytes]] = ()
    broken: ClassVar[Sequence[bytes]] = ()
    ends_with_the_stream: ClassVar[bool] = False
    messages: ClassVar[Sequence[Any]] = ()

    # -------------------------------------------------------------- frames

    def test_frames_are_cut_back_into_their_payloads(self) -> None:
        """Check that encoded frames are found without gaps, and consumed."""

        @_examples
        @given(st.lists(self.payloads, max_size=8))
        def holds(payloads: list[bytes]) -> None:
            content, ends = self._encoded(payloads)
            frames = self.framing.stream().cut(content)
            check_frames(frames, len(content))
            assert frames.error is None
            assert (frames.begins, frames.ends) == ([0, *ends][: len(ends)], ends)
            assert frames.consumed == len(content)
            for buffer in (content, bytearray(content)):
                assert self.framing.payloads(buffer, frames) == payloads

        holds()

    def test_many_payloads_are_encoded_as_one_by_one(self) -> None:
        """Check that ``encode_many`` appends the same bytes as ``encode``."""

        @_examples
        @given(st.lists(self.payloads, max_size=8), st.binary(max_size=4))
        def holds(payloads: list[bytes], before: bytes) -> None:
            one_by_one, ends = bytearray(before), []
            for payload in payloads:
                self.framing.encode(payload, one_by_one)
                ends.append(len(one_by_one))
            together = bytearray(before)
            assert list(self.framing.encode_many(iter(payloads), together)) == ends
            assert together == one_by_one
            assert together.startswith(before)

        holds()

    def test_a_refused_payload_leaves_nothing_behind(self) -> None:
        """Check that ``encode`` and ``encode_many`` raise, and keep earlier bytes."""
        good = self._some_payload()
        for payload in self.refused:
            out = bytearray(b"before")
            with pytest.raises(FramingError):
                self.framing.encode(payload, out)
            assert out == b"before"
            with pytest.raises(FramingError):
                self.framing.encode_many([good, payload, good], out)
            assert out == b"before"

    # -------------------------------------------------------------- chunks

    def test_chunks_change_nothing(self) -> None:
        """Check that frames and offsets do not depend on chunks."""

        @_examples
        @given(st.lists(self.payloads, max_size=8), _PLACES, st.integers(0, 1 << 50))
        def holds(payloads: list[bytes], places: list[int], offset: int) -> None:
            content, ends = self._encoded(payloads)
            reading = read_through(self.framing, _chunks(content, places), offset)
            begins = [0, *ends]
            assert reading.frames == [
                (payload, offset + begin, offset + end)
                for payload, begin, end in zip(payloads, begins, ends, strict=False)
            ]
            assert reading.bad == []

        holds()

    def test_chunks_change_nothing_where_content_is_bad(self) -> None:
        """Check that cutting any bytes raises nothing, and does not depend on chunks."""

        @_examples
        @given(st.lists(self.payloads, max_size=8), st.data(), _PLACES)
        def holds(payloads: list[bytes], data: st.DataObject, places: list[int]) -> None:
            content = bytearray(self._encoded(payloads)[0])
            for _ in range(data.draw(st.integers(1, 3))):
                begin = data.draw(st.integers(0, len(content)))
                end = data.draw(st.integers(begin, min(begin + 6, len(content))))
                content[begin:end] = data.draw(st.binary(max_size=6))
            whole = read_through(self.framing, [bytes(content)])
            parts = read_through(self.framing, _chunks(bytes(content), places))
            assert (parts.frames, parts.bad) == (whole.frames, whole.bad)

        holds()

    def test_longer_content_only_adds_frames(self) -> None:
        """Check that further content changes no earlier frames, and consumes no less."""

        @_examples
        @given(st.lists(self.payloads, min_size=1, max_size=4))
        def holds(payloads: list[bytes]) -> None:
            content, _ = self._encoded(payloads)
            before = Frames([], [], 0)
            for length in range(len(content) + 1):
                frames = self.framing.stream().cut(content[:length])
                assert frames.error is None
                assert frames.consumed >= before.consumed
                assert frames.begins[: len(before)] == before.begins
                assert frames.ends[: len(before)] == before.ends
                before = frames
            assert len(before) == len(payloads)

        holds()

    def test_what_was_searched_before_only_saves_time(self) -> None:
        """Check that ``searched`` changes no result, for any part of an incomplete frame."""

        @_examples
        @given(st.lists(self.payloads, min_size=1, max_size=3), st.data())
        def holds(payloads: list[bytes], data: st.DataObject) -> None:
            content, ends = self._encoded(payloads)
            seen = data.draw(st.integers(0, ends[0] - 1))
            searched = data.draw(st.integers(0, seen))
            stream = self.framing.stream()
            first = stream.cut(content[:seen])
            assert (first.begins, first.error) == ([], None)
            if first.consumed == 0:
                assert stream.cut(content, searched=searched).ends == ends

        holds()

    # -------------------------------------------------------------- bad content

    def test_a_torn_tail_is_reported(self) -> None:
        """Check that frames before a torn one are found, and that it is reported."""

        @_examples
        @given(st.lists(self.payloads, min_size=1, max_size=4), st.data(), _PLACES)
        def holds(payloads: list[bytes], data: st.DataObject, places: list[int]) -> None:
            content, ends = self._encoded(payloads)
            begin = ([0, *ends])[len(payloads) - 1]
            content = content[: data.draw(st.integers(begin, ends[-1] - 1))]
            reading = read_through(self.framing, _chunks(content, places))
            assert [frame[0] for frame in reading.frames[: len(payloads) - 1]] == payloads[:-1]
            if not self.ends_with_the_stream:
                assert len(reading.frames) == len(payloads) - 1
                assert reading.torn == (begin if len(content) > begin else None)

        holds()

    def test_nothing_is_lost_behind_what_is_bad(self) -> None:
        """Check that exactly the bad bytes are reported, and all frames around them found."""
        if not self.broken:
            return

        @_examples
        @given(
            st.lists(self.payloads, min_size=2, max_size=8),
            st.lists(st.tuples(st.integers(1, 8), st.sampled_from(self.broken)), max_size=4),
            _PLACES,
        )
        def holds(
            payloads: list[bytes], broken: list[tuple[int, bytes]], places: list[int]
        ) -> None:
            content = bytearray()
            expected = Reading()
            for index, payload in enumerate(payloads):
                begin = len(content)
                self.framing.encode(payload, content)
                expected.frames.append((payload, begin, len(content)))
                for place, bad in broken:
                    # Bad bytes after the last frame could be the begin of a torn one.
                    if place == index + 1 < len(payloads):
                        begin = len(content)
                        content += bad
                        _note_bad(expected, begin, len(content))
            reading = read_through(self.framing, _chunks(bytes(content), places))
            assert reading == expected

        holds()

    # -------------------------------------------------------------- in use

    def test_the_framing_is_found_by_its_content_type(self) -> None:
        """Check that :func:`gazette_sdk.framing.register` accepts it."""
        with _registered(self.framing):
            assert framing_for(self.framing.content_type) is self.framing

    @pytest.fixture
    def transport(self, request: pytest.FixtureRequest) -> Transport:
        """Return a transport to a broker. A derived class may override this fixture."""
        transport: Transport = request.getfixturevalue("gazette").transport
        return transport

    def test_messages_are_published_and_read_back(self, transport: Transport) -> None:
        """Check that single messages and batches are read as they were published."""
        messages = list(self.messages) or _default_messages(self.framing.form)
        one_by_one, at_once = messages[: len(messages) // 2], messages[len(messages) // 2 :]
        name = f"contract/{uuid.uuid4().hex}"
        with _registered(self.framing):
            _apply(transport, pb.ApplyRequest.Change(upsert=self._journal(name)))
            try:
                with Publisher(lambda _: name, transport=transport) as publisher:
                    receipts = [publisher.publish(message) for message in one_by_one]
                    publisher.publish_batch(at_once).result(timeout=WAIT_S)
                    spans = [(receipt.begin, receipt.end) for receipt in receipts]
                with Reader(type(messages[0]), name=name, transport=transport) as reader:
                    found = list(reader)
            finally:
                change = pb.ApplyRequest.Change(delete=name, expect_mod_revision=-1)
                _apply(transport, change)
        assert [envelope.message for envelope in found] == messages
        places = [(envelope.begin, envelope.end) for envelope in found]
        assert places[: len(spans)] == spans
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))

    # -------------------------------------------------------------- parts

    def _encoded(self, payloads: list[bytes]) -> tuple[bytes, list[int]]:
        content = bytearray()
        ends = self.framing.encode_many(payloads, content)
        return bytes(content), list(ends)

    def _some_payload(self) -> bytes:
        """Return a simple payload."""
        return find(self.payloads, lambda _: True, settings=settings(database=None))

    def _journal(self, name: str) -> pb.JournalSpec:
        return pb.JournalSpec(
            name=name,
            replication=1,
            labels=label_set([(CONTENT_TYPE, self.framing.content_type)]),
            fragment=pb.JournalSpec.Fragment(
                length=16 << 20, compression_codec=pb.NONE, refresh_interval={"seconds": 300}
            ),
        )


_examples = settings(deadline=None)
"""Examples have no deadline, because machines that run tests are busy."""

_PLACES = st.lists(st.integers(0, 1000), max_size=12)


def _chunks(content: bytes, places: list[int]) -> list[bytes]:
    """Split content at these positions, modulo its length."""
    edges = [0, *sorted(place % (len(content) + 1) for place in places), len(content)]
    return [content[begin:end] for begin, end in itertools.pairwise(edges)]


def _default_messages(form: str) -> list[Any]:
    if form == "json":
        return [{"number": number, "text": "a\nb" * number} for number in range(10)]
    if form == "csv":
        return [["", str(number), 'a,"b"\n' * number] for number in range(10)]
    raise AssertionError(f"give the contract `messages` of the form {form!r}")


@contextmanager
def _registered(framing: Framing) -> Iterator[None]:
    """Register the framing for the time of the context."""
    try:
        before = framing_for(framing.content_type)
    except FramingError:
        before = framing
    register(framing)
    try:
        yield
    finally:
        register(before)


def _apply(transport: Transport, change: pb.ApplyRequest.Change) -> None:
    run(apply_journals(transport, pb.ApplyRequest(changes=[change])), WAIT_S)
