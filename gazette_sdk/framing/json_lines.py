r"""JSON lines: one compact JSON value per message, ended by ``\n`` (message section 6)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from gazette_sdk.errors import FramingError, TornFrameError
from gazette_sdk.framing.base import Buffer, Frames, Framing

__all__ = ["JsonLines"]

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
