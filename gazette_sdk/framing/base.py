r"""Interface of a framing: payloads of messages to frames and back.

A :class:`Cutter` cuts a journal's content, received in chunks of any size, into frames.

:class:`FixedProtobuf` is the framing of protobuf messages: a fixed header and the payload (message
section 7). :class:`JsonLines` has one compact JSON value per message, ended by ``\n`` (message
section 6). :func:`framing_for` finds a framing by its content type (message section 5).
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import DesyncError, FramingError, OversizedFrameError, TornFrameError
from gazette_sdk.user_code import check_raised

FRAME_BYTES_MAX = 64 << 20
"""Limit of the length of a message with its framing: publishers refuse a longer one, and readers
pass over it. Default of :attr:`Framing.frame_bytes_max`."""

Offsets: TypeAlias = npt.NDArray[np.int64]

Buffer: TypeAlias = bytes | bytearray
"""Content of a journal in memory."""


@dataclass(slots=True)
class Frames:
    """Positions of the frames in a buffer.

    Attributes:
        begins: index of each frame's first byte, ascending.
        ends: index after each frame's last byte; as many as ``begins``.
        consumed: number of leading bytes of the buffer that are cut. The bytes after them are
            the begin of a frame that is not complete.
        error: the error after the frames, if any. Its ``offset`` is an index of the buffer. The
            bad bytes are consumed, so that another cut continues after them: the skipped bytes of a
            :class:`~gazette_sdk.errors.DesyncError`, or the one frame of a
            :class:`~gazette_sdk.errors.DecodeError`. Only a
            :class:`~gazette_sdk.errors.TornFrameError`, at the end, leaves its bytes.
    """

    begins: list[int]
    ends: list[int]
    consumed: int
    error: FramingError | None = None
    _arrays: tuple[Offsets, Offsets] | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.ends)

    def arrays(self) -> tuple[Offsets, Offsets]:
        """Return ``begins`` and ``ends`` as arrays. Do not change them."""
        if self._arrays is None:
            self._arrays = np.array(self.begins, np.int64), np.array(self.ends, np.int64)
        return self._arrays


class Framing(abc.ABC):
    """Base class of framings, which delimit the messages in a journal.

    A user's own framing derives from this class, sets ``content_type`` and ``form``, implements
    ``encode`` and ``cut``, and is registered with :func:`gazette_sdk.framing.register`. One call
    cuts all frames of a buffer.

    Attributes:
        content_type: value of the journal's ``content-type`` label.
        form: form of payloads, ``"json"``, ``"protobuf"`` or ``"csv"``: selects the adapter
            between a message's class and payloads.
        header_bytes: length of a frame's header before the payload.
        trailer_bytes: length of a frame's trailer after the payload.
        frame_bytes_max: greatest length of a frame that is published and read. A longer one is
            not kept in memory. Set it on a class, or on a framing that you register, in all
            publishers and readers, to have longer messages.
        newline_delimited: True if a frame is its payload and a newline, and payloads hold no
            newline.
    """

    content_type: ClassVar[str]
    form: ClassVar[str]
    header_bytes: ClassVar[int] = 0
    trailer_bytes: ClassVar[int] = 0
    newline_delimited: ClassVar[bool] = False
    frame_bytes_max: int = FRAME_BYTES_MAX

    @abc.abstractmethod
    def encode(self, payload: bytes, out: bytearray) -> None:
        """Append the frame of ``payload`` to ``out``.

        Raises:
            FramingError: no frame can hold this payload; ``out`` is as it was.
        """

    def stream(self) -> Framing:
        """Return the framing that cuts one stream, from the begin of a frame on.

        A framing whose frames depend on earlier ones of the stream returns a new object with that
        state, whose cuts follow each other. A framing without such a state returns ``self``.
        """
        return self

    @abc.abstractmethod
    def cut(self, buffer: Buffer, *, searched: int = 0, final: bool = False) -> Frames:
        """Find all whole frames of ``buffer``, which begins at the boundary of a frame.

        Frames, offsets and skipped bytes must not depend on how content is cut into buffers.

        Args:
            buffer: content.
            searched: number of leading bytes that an earlier cut found to be an incomplete frame.
                It only saves time.
            final: True if no more content follows. Remaining bytes are then reported as an error.
        """

    def find_end(self, head: bytes, passed: int, buffer: Buffer) -> int | None:
        """Return the index in ``buffer`` after a frame that is too long to be kept.

        The calls for a frame follow each other, with all of its content. A framing that does not
        implement this, and is not newline-delimited, has readers that stop at such a frame.

        Args:
            head: the frame's first ``header_bytes``.
            passed: number of its bytes before ``buffer``.
            buffer: the content after these.

        Returns:
            -1 if the end is not in ``buffer``; None if the end of such a frame cannot be found.
        """
        del head, passed
        if not self.newline_delimited:
            return None
        return buffer.find(b"\n") + 1 or -1

    def encode_many(self, payloads: Iterable[bytes], out: bytearray) -> list[int]:
        """Append the frames of ``payloads``, and return the length of ``out`` after each.

        Raises:
            FramingError: as :meth:`encode`; ``out`` is as it was.
        """
        length_before = len(out)
        ends = []
        try:
            for payload in payloads:
                self.encode(payload, out)
                ends.append(len(out))
        except BaseException:
            del out[length_before:]
            raise
        return ends

    def payloads(self, buffer: Buffer, frames: Frames) -> list[bytes]:
        """Return the payload of each frame, copied out of ``buffer``."""
        head, tail = self.header_bytes, self.trailer_bytes
        whole = bytes(buffer)
        return [
            whole[begin + head : end - tail]
            for begin, end in zip(frames.begins, frames.ends, strict=True)
        ]


@dataclass(slots=True)
class Cut:
    """Frames that one chunk completed.

    Attributes:
        buffer: content; valid until the next call of :meth:`Cutter.feed`.
        frames: positions of its frames.
        offset: the journal's offset of the buffer's first byte.
    """

    buffer: Buffer
    frames: Frames
    offset: int


class Cutter:
    """Cutter of one journal's content into frames.

    A frame that is too long is an error as soon as that is known. Its bytes are dropped up to its
    end, if the framing finds that, and cutting continues after it.

    Args:
        framing: the journal's framing.
        offset: begin of the content, at the boundary of a frame.
        frame_bytes_max: longer frames are an error; by default the framing's bound.

    Attributes:
        offset: the journal's offset after the last frame that is cut or passed, to resume
            reading from.
    """

    def __init__(
        self, framing: Framing, offset: int = 0, *, frame_bytes_max: int | None = None
    ) -> None:
        self.offset = offset
        self._framing = framing
        self._stream = framing.stream()
        self._pending: Buffer = b""
        self._searched = 0
        self._frame_bytes_max = frame_bytes_max or framing.frame_bytes_max
        # Of a frame that is too long: its header, and the number of bytes that were dropped.
        self._head = b""
        self._passed = 0

    @property
    def pending_bytes(self) -> int:
        """Length of the incomplete frame at :attr:`offset`."""
        return self._passed + len(self._pending)

    def feed(self, *pieces: bytes) -> Cut:
        """Cut the next content, in pieces, and keep an incomplete frame for the next call."""
        if self._passed:
            return self._pass_over(b"".join(pieces))
        buffer: Buffer
        if isinstance(self._pending, bytearray):
            for piece in pieces:
                self._pending += piece
            buffer = self._pending
        elif not self._pending and len(pieces) == 1:
            buffer = pieces[0]
        else:
            buffer = b"".join((self._pending, *pieces))
        return self._cut(buffer, final=False)

    def finish(self) -> Cut:
        """Cut the rest when the content has ended: an incomplete frame is an error."""
        if self._passed:
            error = TornFrameError(
                f"unexpected EOF: {self._passed} bytes of a frame that is too long",
                offset=self.offset,
            )
            return Cut(b"", Frames([], [], 0, error), self.offset)
        return self._cut(self._pending, final=True)

    def jump(self, offset: int) -> TornFrameError | None:
        """Continue at a later offset, because the content between was deleted.

        Returns:
            An error, if the deleted content begins inside a frame.
        """
        torn = None
        if self.pending_bytes:
            torn = TornFrameError(
                f"content from offset {self.offset + self.pending_bytes} to {offset} was deleted,"
                " within a frame",
                offset=self.offset,
            )
        self._pending = b""
        self._searched = self._passed = 0
        self._stream = self._framing.stream()
        self.offset = offset
        return torn

    def _cut(self, buffer: Buffer, *, final: bool) -> Cut:
        try:
            frames = self._stream.cut(buffer, searched=self._searched, final=final)
        except BaseException as error:
            check_raised(error, self._stream.cut)
            raise
        if len(buffer) > self._frame_bytes_max:
            frames = self._up_to_oversized(frames)
        cut = Cut(buffer, frames, self.offset)
        if frames.error is not None and frames.error.offset is not None:
            frames.error.offset += self.offset
        consumed = frames.consumed
        if consumed == 0 and len(buffer) > 0:
            # A long frame grows in place, so that its cost stays linear in its length.
            self._pending = buffer if isinstance(buffer, bytearray) else bytearray(buffer)
            self._searched = len(buffer)
            if len(buffer) > self._frame_bytes_max and frames.error is None:
                frames.error = self._begin_oversized(buffer)
        else:
            self._pending = bytes(buffer[consumed:])
            self._searched = len(self._pending) if frames.error is None else 0
        self.offset += consumed
        return cut

    # ---------------------------------------------------------- oversized frames

    def _up_to_oversized(self, frames: Frames) -> Frames:
        """Return the frames before the first that is too long, and the error of that."""
        begins, ends = frames.begins, frames.ends
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if end - begin > self._frame_bytes_max:
                return Frames(begins[:index], ends[:index], end, self._oversized(begin))
        return frames

    def _begin_oversized(self, buffer: Buffer) -> FramingError:
        """Return the error of an incomplete frame that is too long, and drop its bytes."""
        head = bytes(buffer[: self._framing.header_bytes])
        if self._stream.find_end(head, 0, buffer) is None:
            return FramingError(str(self._oversized(0)), offset=self.offset)
        self._head = head
        self._passed = len(buffer)
        self._pending = b""
        self._searched = 0
        return self._oversized(self.offset)

    def _oversized(self, offset: int) -> OversizedFrameError:
        return OversizedFrameError(
            f"a frame of more than {self._frame_bytes_max} bytes; if such messages are legal, set"
            f" {type(self._framing).__name__}.frame_bytes_max before reading",
            offset=offset,
        )

    def _pass_over(self, buffer: bytes) -> Cut:
        """Drop the content of a frame that is too long, and cut what follows."""
        end = self._stream.find_end(self._head, self._passed, buffer)
        assert end is not None, "the framing found no end before"
        if end < 0:
            self._passed += len(buffer)
            return Cut(b"", Frames([], [], 0), self.offset)
        self.offset += self._passed + end
        self._passed = 0
        return self._cut(buffer[end:], final=False)


_MAGIC = b"\x66\x33\x93\x36"
_HEADER = struct.Struct("<II")
_MAGIC_WORD = int.from_bytes(_MAGIC, "little")

_PAYLOAD_BYTES_MAX = 0xFFFF_FFFF
"""The header's length field has 32 bits."""


class FixedProtobuf(Framing):
    """``application/x-protobuf-fixed``: magic, little-endian length, protobuf payload."""

    content_type: ClassVar[str] = "application/x-protobuf-fixed"
    form: ClassVar[str] = "protobuf"
    header_bytes: ClassVar[int] = 8

    def encode(self, payload: bytes, out: bytearray) -> None:
        """Append header and payload. An empty payload is legal."""
        if len(payload) > _PAYLOAD_BYTES_MAX:
            raise FramingError(f"a payload of {len(payload)} bytes is too long for its header")
        out += _HEADER.pack(_MAGIC_WORD, len(payload))
        out += payload

    def find_end(self, head: bytes, passed: int, buffer: Buffer) -> int:
        """Return the index in ``buffer`` after a frame; -1 if it does not end there."""
        end = 8 + _HEADER.unpack(head)[1] - passed
        return end if end <= len(buffer) else -1

    def cut(self, buffer: Buffer, *, searched: int = 0, final: bool = False) -> Frames:
        """Find all whole frames up to the end or to bytes that are no frame.

        Such bytes are skipped to the next magic, or, without one in the buffer, to its last three
        bytes, which could begin one; the error counts them. A single newline at the end of the
        stream is no error.
        """
        del searched  # a frame is found by its header alone: nothing is searched twice
        begins: list[int] = []
        ends: list[int] = []
        at, available = 0, len(buffer)
        unpack = _HEADER.unpack_from
        error: FramingError | None = None
        end = 0
        while at + 8 <= available:
            magic, length = unpack(buffer, at)
            if magic != _MAGIC_WORD:
                found = buffer.find(_MAGIC, at + 1)
                to = found if found >= 0 else available - 3
                error = DesyncError(
                    f"{to - at} bytes are no frame: they were skipped", skipped=to - at, offset=at
                )
                return Frames(begins, ends, to, error)
            end = at + 8 + length
            if end > available:
                break
            begins.append(at)
            ends.append(end)
            at = end
        if final and at < available:
            pending = available - at
            if pending >= 8:
                error = TornFrameError(
                    f"unexpected EOF: reading frame (size {end - at}), of which {pending} bytes"
                    " are there",
                    offset=at,
                )
            elif buffer[at:] == b"\n":
                at = available
            else:
                error = TornFrameError(
                    f"unexpected EOF: {pending} bytes of a frame's header", offset=at
                )
        return Frames(begins, ends, at, error)


_NEWLINE = 0x0A

_SHORT_BYTES = 2048
"""In shorter buffers, finding the lines one by one is faster than with an array."""


class JsonLines(Framing):
    """``application/x-ndjson``. Lines may be of any length; blank lines are no messages."""

    content_type: ClassVar[str] = "application/x-ndjson"
    form: ClassVar[str] = "json"
    trailer_bytes: ClassVar[int] = 1
    newline_delimited: ClassVar[bool] = True

    def encode(self, payload: bytes, out: bytearray) -> None:
        """Append ``payload``, a JSON value without line breaks, and a newline."""
        if b"\n" in payload:
            raise FramingError("a JSON line cannot hold a line break; encode without indentation")
        out += payload
        out += b"\n"

    def encode_many(self, payloads: Iterable[bytes], out: bytearray) -> list[int]:
        """Append a line for each of ``payloads``, and return the length of ``out`` after each."""
        begin = len(out)
        lines = [part for payload in payloads for part in (payload, b"\n")]
        out += b"".join(lines)
        ends: list[int] = _line_ends(out, begin).tolist()
        if len(ends) * 2 != len(lines):
            del out[begin:]
            raise FramingError("a JSON line cannot hold a line break; encode without indentation")
        return ends

    def cut(self, buffer: Buffer, *, searched: int = 0, final: bool = False) -> Frames:
        """Find all whole lines. At the end of the stream a line without newline is torn."""
        if len(buffer) - searched <= _SHORT_BYTES:
            return self._cut_short(buffer, searched, final=final)
        found = _line_ends(buffer, searched)
        places = np.empty(len(found) + 1, np.int64)
        places[0] = 0
        places[1:] = found
        edges: list[int] = places.tolist()
        error = _torn(buffer, edges[-1]) if final else None
        return Frames(edges[:-1], edges[1:], edges[-1], error, (places[:-1], places[1:]))

    def _cut_short(self, buffer: Buffer, searched: int, *, final: bool) -> Frames:
        ends: list[int] = []
        end = buffer.find(b"\n", searched) + 1
        while end:
            ends.append(end)
            end = buffer.find(b"\n", end) + 1
        consumed = ends[-1] if ends else 0
        begins = [0, *ends[:-1]] if ends else []
        return Frames(begins, ends, consumed, _torn(buffer, consumed) if final else None)


def _torn(buffer: Buffer, consumed: int) -> TornFrameError | None:
    """Return the error of an incomplete line at the end of the stream, if any."""
    pending = len(buffer) - consumed
    if not pending:
        return None
    return TornFrameError(f"unexpected EOF: {pending} bytes without a newline", offset=consumed)


def _line_ends(buffer: Buffer, begin: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    content = np.frombuffer(buffer, dtype=np.uint8, offset=0)[begin:]
    return np.flatnonzero(content == _NEWLINE) + (begin + 1)


# ------------------------------------------------------- by content type

NO_FRAMING_REMEDY = (
    "give the journal a content type with a framing, as with Journals().update(NAME,"
    " content_type='application/x-ndjson') for JSON lines, or register a framing"
)
"""End of errors about a journal whose content type has no framing."""

_RECOVERY_LOG = "application/x-gazette-recoverylog"


def register(framing: Framing) -> None:
    """Register a framing under its content type, replacing an earlier one.

    Args:
        framing: the framing; its ``content_type`` is the value of the journal's label.

    Raises:
        FramingError: the content type is empty, or that of recovery logs, which hold operations
            on files and no messages.
    """
    if not framing.content_type or framing.content_type == _RECOVERY_LOG:
        raise FramingError(
            f"{type(framing).__name__} cannot be registered for the content type "
            f"{framing.content_type!r}"
        )
    _framings[framing.content_type] = framing


def framing_for(content_type: str) -> Framing:
    """Return the framing of a journal, by the first value of its ``content-type`` label.

    Args:
        content_type: the label's value, ``""`` for a journal without it.

    Raises:
        FramingError: ``unrecognized content-type (<value>)``.
    """
    framing = _framings.get(content_type)
    if framing is None:
        raise FramingError(f"unrecognized content-type ({content_type})")
    return framing


_framings: dict[str, Framing] = {}
for _framing in (JsonLines(), FixedProtobuf()):
    register(_framing)
