"""Decoding of the frames of a byte stream, however it is cut, and of their payloads."""

from __future__ import annotations

import struct
from functools import partial
from typing import NamedTuple

from google.protobuf.message import DecodeError as ProtobufDecodeError

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.stream_frames.encoding import (
    CONTENT_BYTES_MAX,
    FRAME_HEADER,
    HEADER_BYTES,
    MESSAGE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    Frame,
    complaint,
)
from gazette_sdk.protocol.stream_pb2 import CallHead, Hello

__all__ = [
    "FrameBuffer",
    "StatusLine",
    "decode_call",
    "decode_head",
    "decode_hello",
    "decode_status",
    "decode_text",
]

_CODE_MAX = 16
"""Greatest gRPC status code."""

_unpack_header = FRAME_HEADER.unpack_from
_frame_of = partial(tuple.__new__, Frame)  # equal to Frame(), at half of its cost


class FrameBuffer:
    """Decoder of frames in the memory that a socket receives into.

    For ``asyncio.BufferedProtocol`` and for ``recv_into``: :meth:`get_buffer`, receive,
    :meth:`updated`. The memory begins small and doubles as frames fill it, up to twice the bytes
    received. It shrinks when few bytes are received, so that thousands of connections cost little.
    A payload is copied once.

    Args:
        opening: bytes before the first frame: :data:`PREFACE` at a server that receives it,
            nothing elsewhere.

    Attributes:
        error: the violation of the rules, if any. Check it after each :meth:`updated`: frames
            before the bad one were returned, and none follow.
        missing: bytes of an incomplete frame that are known to follow.
    """

    __slots__ = ("_begin", "_end", "_memory", "_opening", "_quiet", "_view", "error", "missing")

    SMALL_BYTES = 8 << 10
    """Memory of a quiet connection."""

    LARGE_BYTES = 256 << 10
    """Greatest memory for many small frames; only one greater frame needs more."""

    QUIET_UPDATES = 16
    """The memory shrinks after so many updates in a row of few, whole frames."""

    def __init__(self, opening: bytes = b"") -> None:
        self.error: StreamProtocolError | None = None
        self.missing = 0
        self._opening = opening
        self._begin = 0
        self._end = 0
        self._quiet = 0
        self._memory = bytearray(self.SMALL_BYTES)
        self._view = memoryview(self._memory)

    @property
    def inside_frame(self) -> bool:
        """Return True if the bytes so far end inside the opening or inside a frame."""
        return self._begin < self._end or bool(self._opening)

    @property
    def frame_bytes(self) -> int:
        """Length of the incomplete frame, as far as it is known; 0 if there is none."""
        buffered = self._end - self._begin
        return buffered + self.missing if buffered else 0

    def get_buffer(self, _sizehint: int = -1) -> memoryview:
        """Return the memory for the next bytes: never empty, valid until :meth:`updated`."""
        return self._view[self._end :]

    def updated(self, length: int) -> list[Frame]:
        """Decode the next bytes of the stream: the first ``length`` of :meth:`get_buffer`.

        Returns:
            The frames that are complete now, in order. :attr:`error` is set if one was wrong.

        Raises:
            StreamProtocolError: earlier bytes were wrong already.
        """
        if self.error is not None:
            raise self.error
        frames: list[Frame] = []
        view = self._view
        begin = self._begin
        fresh = begin == self._end
        end = self._end = self._end + length
        if self._opening:
            begin = self._past_opening(begin, end)
        wanted = HEADER_BYTES
        while (payload := begin + HEADER_BYTES) <= end:
            kind, size = _unpack_header(view, begin)
            if size > PAYLOAD_BYTES_MAX[kind]:
                self.error = StreamProtocolError(complaint(kind, size))
                return frames
            after = payload + size
            if after > end:
                wanted += size
                break
            frames.append(_frame_of((kind, bytes(view[payload:after]))))
            begin = after
        if begin == end:
            self.missing = self._begin = self._end = 0
            if len(view) > self.SMALL_BYTES or end == len(view):
                self._resize_empty(length, quiet=fresh and length < self.SMALL_BYTES)
        else:
            self._begin = begin
            self.missing = wanted - (end - begin)
            self._check_kind(view[begin])
            self._make_room(wanted)
        return frames

    def trim(self) -> None:
        """Release the memory that an idle connection doesn't need.

        Not to be called between :meth:`get_buffer` and :meth:`updated`.
        """
        if self._begin == self._end and len(self._memory) > self.SMALL_BYTES:
            self._begin = self._end = 0
            self._allocate(self.SMALL_BYTES)

    def _resize_empty(self, received: int, *, quiet: bool) -> None:
        """Grow the memory if one update filled it; shrink it after some quiet updates."""
        capacity = len(self._memory)
        if received == capacity and capacity < self.LARGE_BYTES:
            self._allocate(2 * capacity)
        elif not quiet:
            self._quiet = 0
        elif self._quiet < self.QUIET_UPDATES:
            self._quiet += 1
        else:
            self._quiet = 0
            self._allocate(self.SMALL_BYTES)

    def _make_room(self, wanted: int) -> None:
        """Move or grow the memory so that more bytes of an incomplete frame fit.

        Args:
            wanted: length of the incomplete frame, as far as it is known.
        """
        capacity = len(self._memory)
        begin, end = self._begin, self._end
        if begin and (end == capacity or begin + wanted > capacity):
            self._end = end - begin
            self._begin = 0
            self._view[: end - begin] = self._view[begin:end]
        if self._end == capacity:
            self._allocate(min(2 * capacity, wanted))
        elif end == capacity < self.LARGE_BYTES:
            self._allocate(2 * capacity)

    def _allocate(self, capacity: int) -> None:
        """Replace the memory. The bytes of an incomplete frame stand at the begin of both."""
        memory = bytearray(capacity)
        memory[: self._end] = self._view[: self._end]
        self._memory = memory
        self._view = memoryview(memory)

    def _past_opening(self, begin: int, end: int) -> int:
        """Return the position behind the part of the opening that was received."""
        seen = bytes(self._view[begin : min(end, begin + len(self._opening))])
        if not self._opening.startswith(seen):
            self._opening = b""
            self.error = StreamProtocolError("the connection does not begin with the preface")
            return end
        self._opening = self._opening[len(seen) :]
        return begin + len(seen)

    def _check_kind(self, kind: int) -> None:
        if PAYLOAD_BYTES_MAX[kind] < 0:
            self.error = StreamProtocolError(complaint(kind, 0))


# ---------------------------------------------------------- inner forms

_unpack_call = struct.Struct(">BH").unpack_from


class StatusLine(NamedTuple):
    """Payload of a STATUS: the end of a call.

    Attributes:
        code: gRPC status code; 0 is success.
        text: reason of the failure; empty for success.
        kind: name of the error's class, where the server sent it.
    """

    code: int
    text: str = ""
    kind: str = ""


def decode_call(payload: bytes) -> tuple[int, bytes, bytes]:
    """Split a CALL's payload.

    Returns:
        Number of the method (any), the encoded head, the encoded request.

    Raises:
        StreamProtocolError: it is shorter than its header says.
    """
    if len(payload) < 3:
        raise StreamProtocolError(f"CALL frame of {len(payload)} bytes has no head")
    method, head_length = _unpack_call(payload)
    if not head_length:
        return method, b"", payload[3:]
    begin = 3 + head_length
    if len(payload) < begin:
        raise StreamProtocolError(f"CALL frame of {len(payload)} bytes ends within its head")
    return method, payload[3:begin], payload[begin:]


def decode_head(head: bytes) -> CallHead:
    """Return the head of a CALL.

    Raises:
        StreamProtocolError: it is no ``CallHead``.
    """
    try:
        return CallHead.FromString(head)
    except ProtobufDecodeError as error:
        raise StreamProtocolError(f"a call's head is malformed: {error}") from error


def decode_status(payload: bytes) -> StatusLine:
    """Return the content of a STATUS's payload.

    Raises:
        StreamProtocolError: it is empty, or its code is none of gRPC's.
    """
    if payload == b"\0":
        return _SUCCESS
    if not payload or payload[0] > _CODE_MAX:
        raise StreamProtocolError("STATUS frame without a status code")
    text, _, kind = decode_text(payload[1:]).partition("\0")
    return StatusLine(payload[0], text, kind)


_SUCCESS = StatusLine(0)


def decode_hello(payload: bytes) -> Hello:
    """Return the message in a HELLO's payload, with default bounds where it has none.

    Raises:
        StreamProtocolError: it is no ``Hello``, or names no version.
    """
    try:
        hello = Hello.FromString(payload)
    except ProtobufDecodeError as error:
        raise StreamProtocolError(f"HELLO is malformed: {error}") from error
    if not hello.wire_version:
        raise StreamProtocolError("HELLO names no version")
    hello.content_bytes_max = hello.content_bytes_max or CONTENT_BYTES_MAX
    hello.message_bytes_max = hello.message_bytes_max or MESSAGE_BYTES_MAX
    return hello


def decode_text(payload: bytes) -> str:
    """Return the text of a GOAWAY or STATUS; bytes that are not UTF-8 are escaped."""
    return payload.decode("utf-8", "backslashreplace")
