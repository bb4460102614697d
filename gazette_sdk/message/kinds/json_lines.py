"""JSON by msgspec: objects, and the lines of a chunk in one call.

msgspec rounds times to microseconds. All else truncates them, as pydantic, columns and Spark:
digits that it would round up are cut off the text first, where a class has times.
"""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import msgspec.inspect as mi
import numpy as np

from gazette_sdk.framing import Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.user_code import call

__all__ = [
    "BULK_MIN",
    "DECODE_ERRORS",
    "ENCODE_ERRORS",
    "decode_dicts",
    "decode_lines",
    "decode_object",
    "encode",
    "encoded_lines",
    "holds_long_times",
    "last_values",
    "time_cutter",
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
        messages = call(decode, memoryview(buffer)[frames.begins[0] : frames.ends[-1]])
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


_decode_parts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


def last_values(text: bytes) -> bytes:
    """Return JSON whose objects, at any depth, have each key once, with its last value.

    Raises:
        DecodeError: of msgspec: it is malformed.
    """
    first = text.lstrip()[:1]
    if first == b"{":
        parts = _decode_parts(text)
        return encode({key: msgspec.Raw(last_values(bytes(part))) for key, part in parts.items()})
    if first == b"[":
        return encode([msgspec.Raw(last_values(bytes(item))) for item in _decode_items(text)])
    return text


# -------------------------------------------------------------------- times

_DOT, _COLON, _FIVE, _NINE = (np.uint8(ord(character)) for character in ".:59")
_DIGITS_MAX = 6

_is_long = re.compile(rb":\d\d\.\d{6}[5-9]").search
_long_digits = re.compile(rb"(:\d\d\.\d{6})\d+")

Cutter: TypeAlias = Callable[[bytes], bytes]
"""Function that returns JSON with the digits of its times cut to microseconds."""


def time_cutter(message_type: type[Any]) -> Cutter | None:
    """Return the function for messages of a class; None if the class has no times."""
    cut = _cutter(mi.type_info(message_type), {})
    if cut is None:
        return None
    return lambda payload: cut(payload) if b"." in payload and _is_long(payload) else payload


def holds_long_times(buffer: Buffer | memoryview, begin: int, end: int) -> bool:
    """Return True if content may hold a time that would be rounded up."""
    content = np.frombuffer(buffer, np.uint8)[begin:end]
    dots = np.flatnonzero(content == _DOT)
    dots = dots[(dots > 2) & (dots < len(content) - _DIGITS_MAX - 1)]
    digits = content[dots + _DIGITS_MAX + 1]
    is_long = (digits >= _FIVE) & (digits <= _NINE) & (content[dots - 3] == _COLON)
    return bool(is_long.any())


def _cutter(kind: mi.Type, known: dict[type, dict[str, Cutter]]) -> Cutter | None:
    """Return the function for JSON of a type; None if the type has no times.

    Args:
        kind: the type.
        known: functions of the fields of classes, to which this one belongs.
    """
    if isinstance(kind, mi.Metadata):
        return _cutter(kind.type, known)
    if isinstance(kind, mi.DateTimeType | mi.TimeType):
        return lambda text: _long_digits.sub(rb"\1", text)
    if isinstance(kind, mi.StructType | mi.DataclassType | mi.TypedDictType):
        return _class_cutter(kind, known)
    return _composed_cutter(kind, known)


def _composed_cutter(kind: mi.Type, known: dict[type, dict[str, Cutter]]) -> Cutter | None:
    """Return the function for JSON of a type that has others as its parts."""
    if isinstance(kind, mi.UnionType | mi.TupleType):
        types = kind.types if isinstance(kind, mi.UnionType) else kind.item_types
        found = [_cutter(part, known) for part in types]
        if not any(found):
            return None
        is_union = isinstance(kind, mi.UnionType)
        return _all_of(found) if is_union else lambda text: _with_items(text, found)
    if isinstance(kind, mi.DictType | mi.CollectionType):
        part = _cutter(kind.value_type if isinstance(kind, mi.DictType) else kind.item_type, known)
        if part is None:
            return None
        if isinstance(kind, mi.DictType):
            return lambda text: _with_parts(text, lambda _: part)
        return lambda text: _with_items(text, itertools.repeat(part))
    return None


def _class_cutter(
    kind: mi.StructType | mi.DataclassType | mi.TypedDictType, known: dict[type, dict[str, Cutter]]
) -> Cutter | None:
    fields = known.get(kind.cls)
    if fields is None:
        fields = known[kind.cls] = {}
        for field in kind.fields:
            cut = _cutter(field.type, known)
            if cut is not None:
                fields[field.encode_name] = cut
        if not fields:
            return None
    # Of a class within itself the fields are found while this function is made.
    return lambda text: _with_parts(text, fields.get)


def _with_parts(text: bytes, cutter_of: Callable[[str], Cutter | None]) -> bytes:
    """Return an object with some of its values cut; anything else as it is."""
    if not text.lstrip().startswith(b"{"):
        return text
    parts: dict[str, Any] = _decode_parts(text)
    for name, value in parts.items():
        cut = cutter_of(name)
        if cut is not None:
            parts[name] = msgspec.Raw(cut(bytes(value)))
    return encode(parts)


def _with_items(text: bytes, cutters: Iterable[Cutter | None]) -> bytes:
    """Return an array with some of its items cut; anything else as it is."""
    if not text.lstrip().startswith(b"["):
        return text
    items = _decode_items(text)
    cutting = itertools.chain(cutters, itertools.repeat(None))
    return encode(
        [
            item if cut is None else msgspec.Raw(cut(bytes(item)))
            for item, cut in zip(items, cutting, strict=False)
        ]
    )


def _all_of(cutters: Sequence[Cutter | None]) -> Cutter:
    """Return a function that applies all: each leaves JSON of another type as it is."""

    def cut(text: bytes) -> bytes:
        for each in filter(None, cutters):
            text = each(text)
        return text

    return cut
