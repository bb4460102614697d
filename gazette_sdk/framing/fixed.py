"""Fixed header and payload: the framing of protobuf messages (message section 7)."""

from __future__ import annotations

import struct
from typing import ClassVar

from gazette_sdk.errors import DesyncError, FramingError, TornFrameError
from gazette_sdk.framing.base import Buffer, Frames, Framing

__all__ = ["FixedProtobuf"]

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
