"""How bytes become frames, however they are cut."""

from __future__ import annotations

from functools import partial

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.stream_frames.codec import (
    FRAME_HEADER,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    Frame,
    complaint,
)

__all__ = ["FrameBuffer", "FrameDecoder"]

_unpack_header = FRAME_HEADER.unpack_from
_frame_of = partial(tuple.__new__, Frame)  # what Frame() does, at half of its cost

_PIECE_BYTES_MIN = 4096
"""Smaller pieces of a frame are gathered in one buffer, so that a peer that sends single bytes
can't make us hold an object for each."""


class FrameDecoder:
    """Makes frames of the pieces in which bytes arrive. A payload is copied once.

    Args:
        opening: bytes that come before the first frame: :data:`PREFACE` at a server that sees
            them, nothing elsewhere.

    Attributes:
        error: what broke the rules. Whoever feeds looks at it after each piece: frames before
            the bad one were returned, and none follow.
    """

    __slots__ = ("_head", "_kind", "_missing", "_opening", "_pieces", "error")

    def __init__(self, opening: bytes = b"") -> None:
        self.error: StreamProtocolError | None = None
        self._opening = opening
        self._head = b""
        self._kind = 0
        self._missing = 0
        self._pieces: list[bytes | bytearray] = []

    @property
    def inside_frame(self) -> bool:
        """Whether the bytes so far end within the opening or a frame."""
        return bool(self._missing or self._head or self._opening)

    def feed(self, data: bytes) -> list[Frame]:
        """Takes the next piece of the stream.

        Args:
            data: any number of bytes, of at least none.

        Returns:
            The frames that are whole now, in order. If something was wrong, :attr:`error` tells.

        Raises:
            StreamProtocolError: an earlier piece was wrong already.
        """
        if self.error is not None:
            raise self.error
        if self._opening:
            data = self._past_opening(data)
        if self._head:
            data = self._head + data
            self._head = b""
        frames: list[Frame] = []
        begin = 0
        end = len(data)
        if self._missing:
            if end < self._missing:
                self._hold(data)
                return frames
            begin = self._missing
            self._pieces.append(data[:begin])
            frames.append(Frame(self._kind, b"".join(self._pieces)))
            self._pieces.clear()
            self._missing = 0
        while end - begin >= HEADER_BYTES:
            kind, length = _unpack_header(data, begin)
            if length > PAYLOAD_BYTES_MAX[kind]:
                self.error = StreamProtocolError(complaint(kind, length))
                return frames
            begin += HEADER_BYTES
            after = begin + length
            if after > end:
                self._kind = kind
                self._missing = length
                self._hold(data[begin:])
                return frames
            frames.append(_frame_of((kind, data[begin:after])))
            begin = after
        if begin < end:
            self._head = data[begin:]
            self._check_kind(self._head[0])
        return frames

    def _hold(self, piece: bytes) -> None:
        """Keeps a piece of a payload of which more is missing than that."""
        self._missing -= len(piece)
        if len(piece) >= _PIECE_BYTES_MIN:
            self._pieces.append(piece)
        elif self._pieces and isinstance(self._pieces[-1], bytearray):
            self._pieces[-1] += piece
        elif piece:
            self._pieces.append(bytearray(piece))

    def _past_opening(self, data: bytes) -> bytes:
        """Takes the opening off the first bytes."""
        seen = data[: len(self._opening)]
        if not self._opening.startswith(seen):
            self._opening = b""
            self.error = StreamProtocolError("the connection does not begin with the preface")
            return b""
        self._opening = self._opening[len(seen) :]
        return data[len(seen) :]

    def _check_kind(self, kind: int) -> None:
        if PAYLOAD_BYTES_MAX[kind] < 0:
            self.error = StreamProtocolError(complaint(kind, 0))


class FrameBuffer:
    """Makes frames of the bytes that a socket wrote into its memory.

    For ``asyncio.BufferedProtocol`` and for ``recv_into``: :meth:`get_buffer`, receive,
    :meth:`updated`. The memory begins small and doubles as frames fill it, never ahead of the
    bytes that have arrived by more than as much again; it shrinks after some quiet, so that
    thousands of connections cost little. A payload is copied once.

    Args:
        opening: as that of :class:`FrameDecoder`.

    Attributes:
        error: as that of :class:`FrameDecoder`.
        missing: bytes which are known to follow: those of a frame that has begun.
    """

    __slots__ = ("_begin", "_end", "_memory", "_opening", "_quiet", "_view", "error", "missing")

    SMALL_BYTES = 8 << 10
    """Memory of a quiet connection."""

    LARGE_BYTES = 256 << 10
    """How far the memory grows for masses of small frames."""

    QUIET_UPDATES = 16
    """It shrinks after so many updates in a row of few, whole frames."""

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
        """Whether the bytes so far end within the opening or a frame."""
        return self._begin < self._end or bool(self._opening)

    def get_buffer(self, _sizehint: int = -1) -> memoryview:
        """Where the next bytes go: never empty. Valid until :meth:`updated`."""
        return self._view[self._end :]

    def updated(self, length: int) -> list[Frame]:
        """Takes the next bytes of the stream: the first ``length`` of :meth:`get_buffer`.

        Returns:
            The frames that are whole now, in order. If something was wrong, :attr:`error` tells.

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
        """Gives memory back that an idle connection doesn't need. Not between the two others."""
        if self._begin == self._end and len(self._memory) > self.SMALL_BYTES:
            self._begin = self._end = 0
            self._allocate(self.SMALL_BYTES)

    def _resize_empty(self, received: int, *, quiet: bool) -> None:
        """Grows the memory if one update filled it, shrinks it after some quiet."""
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
        """Sees to it that more bytes of a frame find room.

        Args:
            wanted: length of the frame that begins at what is held, as far as that is known.
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
        """Takes other memory. What is held stands at the begin of both."""
        memory = bytearray(capacity)
        memory[: self._end] = self._view[: self._end]
        self._memory = memory
        self._view = memoryview(memory)

    def _past_opening(self, begin: int, end: int) -> int:
        """Where frames begin, as far as that is known."""
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
