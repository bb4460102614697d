"""JSON by msgspec: objects, and the lines of a chunk in one call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from gazette_sdk.framing import Frames, Framing
from gazette_sdk.framing.base import Buffer

__all__ = [
    "BULK_MIN",
    "DECODE_ERRORS",
    "ENCODE_ERRORS",
    "decode_dicts",
    "decode_lines",
    "decode_object",
    "encode",
    "encoded_lines",
]

_NEWLINE = 0x0A

BULK_MIN = 4
"""Fewer frames than this are decoded one by one, which costs less than arrays of them."""

ENCODE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, AttributeError)
DECODE_ERRORS = (Exception,)
"""Decoding runs code of the message's class, which may raise any error."""

decode_object = msgspec.json.Decoder(dict).decode
decode_dicts = msgspec.json.Decoder(dict).decode_lines
encode = msgspec.json.Encoder().encode
encode_lines = msgspec.json.Encoder().encode_lines


def decode_lines(
    decode: Callable[[Any], list[Any]], framing: Framing, buffer: Buffer, frames: Frames
) -> list[Any] | None:
    """Return all messages by one call; None if that is not possible, or a frame is bad."""
    if not frames.ends or not framing.newline_delimited:
        return None
    # Garbage collection among thousands of new objects would cost a third of the time. Python 3.12
    # and later collect only between bytecodes.
    collects = gc.isenabled()
    gc.disable()
    try:
        messages = decode(memoryview(buffer)[frames.begins[0] : frames.ends[-1]])
    except DECODE_ERRORS:
        return None
    finally:
        if collects:
            gc.enable()
    # Blank lines are skipped there, but they are bad frames.
    return messages if len(messages) == len(frames) else None


def encoded_lines(messages: Sequence[Any]) -> bytes | None:
    """Return each message on a line; None if one is bad: encoding one by one finds it."""
    try:
        lines: bytes = encode_lines(messages)
    except ENCODE_ERRORS:
        return None
    # A Raw is written unchanged, and may have further line breaks.
    breaks = np.count_nonzero(np.frombuffer(lines, dtype=np.uint8) == _NEWLINE)
    return lines if breaks == len(messages) else None
