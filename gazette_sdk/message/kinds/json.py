"""Kinds of JSON messages: dicts, typed classes and pydantic models; single ones, and chunks.

A UUID is written as the first key of the object (message section 6), as many others do. So a reader
cuts it at a fixed place, for a whole chunk at once. Where a single frame has it elsewhere, or a
text of another length or with an escape, or the same key once more, of which the last counts,
frames are parsed one by one instead.

All but pydantic models use ``msgspec``: it decodes the lines of a chunk in one call, and was
measured ahead of ``orjson`` in both directions, also for dicts. msgspec rounds times to
microseconds. All else truncates them, as pydantic, columns and Spark: digits that it would round up
are cut off the text first, where a class has times.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import re
import typing
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec
import msgspec.inspect as mi
import numpy as np
import numpy.typing as npt
import pydantic
import pydantic_core

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.kinds.base import (
    Decoded,
    JsonMessage,
    Kind,
    Spliced,
    call_validate,
    empty_instance,
    known_kind,
    name_of,
    union_classes,
)
from gazette_sdk.message.uuid import (
    ACK_TXN,
    TEXT_BYTES,
    RawUuid,
    Stamp,
    is_uuid_text,
    new_producer_id,
    parse_raw_uuid,
)
from gazette_sdk.tracing import PARENT_BYTES, PARENT_KEY, is_sampled
from gazette_sdk.user_code import EXITS, call, call_each, check_raised, text_of

_PARENT = b'"%b":"' % PARENT_KEY.encode()
_PARENT_MARKS = _PARENT.index(b"p"), _PARENT.index(b'":')
"""Indexes of two bytes that few other keys have both."""

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_USUAL_KEY = b'"UUID"'
_USUAL_LETTER = b"U"
"""Letter of the usual key, which other text rarely has, and hardly ever twice in a row. It is
counted in a tenth of the time of the key."""

Texts: TypeAlias = npt.NDArray[np.uint8]
"""Texts of UUIDs, shape [n, 36]."""

Offsets: TypeAlias = npt.NDArray[np.int64]


class UuidPlace:
    """Place of a UUID after its key, between double quotes.

    Args:
        key: key of the UUID, which is the first of every payload.
        behind_bytes: number of bytes after the closing quote that :meth:`heads` returns.

    Attributes:
        prefix: first bytes of every payload, the opening quote included.
        begin: index of the UUID in a payload.
        end: index of its closing quote.
    """

    def __init__(self, key: str, behind_bytes: int = 0) -> None:
        self._key = b'"%b"' % key.encode()
        self.prefix = b'{%b:"' % self._key
        text = rb"([0-9A-Fa-f-]{%d})" % TEXT_BYTES
        self._match = re.compile(re.escape(self.prefix) + text + b'"').match
        self._letters = 2 if self._key == _USUAL_KEY else -1
        self.begin = len(self.prefix)
        self.end = self.begin + TEXT_BYTES
        self._width = self.end + 1 + behind_bytes

    def texts(self, buffer: Buffer, frames: Frames, header_bytes: int) -> Texts | None:
        """Return the text at that place of each frame.

        Args:
            buffer: content.
            frames: its frames.
            header_bytes: length of what precedes the payload in each frame.

        Returns:
            Shape [n, 36], of texts that need not be UUIDs; None if a frame has no such place.
        """
        begins, ends = frames.arrays()
        heads = self.heads(buffer, begins + header_bytes if header_bytes else begins, ends)
        return None if heads is None else heads[:, self.begin : self.end]

    def text(self, payload: bytes) -> bytes | None:
        """Return the text at that place of one payload; None if the key may be there twice."""
        found = self._match(payload)
        if found is None:
            return None
        # A letter is counted in a fraction of the time of looking for the key.
        if payload.count(_USUAL_LETTER) == self._letters or payload.find(self._key, self.end) < 0:
            return found[1]
        return None

    def may_repeat(
        self, buffer: Buffer | memoryview, count: int, begin: int = 0, end: int | None = None
    ) -> bool:
        """Return True if the key may be in payloads more often than once each.

        Args:
            buffer: content.
            count: number of the payloads in it, each of which begins with the key.
            begin: index of the first one.
            end: index after the last one; by default all content.
        """
        content = np.frombuffer(buffer, np.uint8)[begin:end]
        if self._letters > 0:
            letters = content == _USUAL_LETTER[0]
            if np.count_nonzero(letters) == self._letters * count:
                return False
            if np.count_nonzero(np.diff(np.flatnonzero(letters)) == 1) == count:
                return False
        return content.tobytes().count(self._key) != count

    def heads(
        self, buffer: Buffer | memoryview, begins: Offsets, ends: Offsets
    ) -> npt.NDArray[np.uint8] | None:
        """Return the first bytes of each payload, shape [n, width]; None if one has no place.

        Args:
            buffer: content.
            begins: index of each payload's first byte.
            ends: index after each frame's last byte.
        """
        if not len(begins) or int((ends - begins).min()) < self._width:
            return None
        heads: npt.NDArray[np.uint8] = (
            windows(buffer, self._width)[begins].view(np.uint8).reshape(-1, self._width)
        )
        if heads[:, : self.begin].tobytes() != self.prefix * len(heads):
            return None
        if not (heads[:, self.end] == _QUOTE).all() or (heads == _BACKSLASH).any():
            return None
        # No text has a quote: it would end there.
        quotes = np.count_nonzero(heads == _QUOTE) - np.count_nonzero(
            heads[:, self.end + 1 :] == _QUOTE
        )
        return heads if quotes == len(heads) * (self.prefix.count(b'"') + 1) else None


def windows(buffer: Buffer | memoryview, width: int) -> npt.NDArray[np.void]:
    """Return overlapping items of ``width`` bytes, one at each byte, to copy some at once."""
    return np.ndarray((len(buffer) - width + 1,), f"V{width}", buffer, strides=(1,))


def raw_texts(texts: Texts) -> list[bytes]:
    """Return each row as bytes. Rows must not end in zeros, which would be cut off."""
    listed: list[bytes] = np.ascontiguousarray(texts).view(f"S{TEXT_BYTES}").ravel().tolist()
    return listed


def acknowledging(texts: Texts) -> list[int]:
    """Return the indices of the UUIDs of acknowledgements; others may be among them."""
    # The last three digits of the fourth group hold the flags, below two bits of the clock.
    found = _FLAGS_HIGH_ZERO[texts[:, 20]] & (texts[:, 21] == ord("0")) & (texts[:, 22] == ord("2"))
    listed: list[int] = np.flatnonzero(found).tolist()
    return listed


_FLAGS_HIGH_ZERO = np.zeros(256, dtype=bool)
_FLAGS_HIGH_ZERO[np.frombuffer(b"048cC", dtype=np.uint8)] = True
"""Digits whose two lower bits, the upper ones of the flags, are zero."""


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
    tag = (kind.tag_field, kind.tag) if isinstance(kind, mi.StructType) and kind.tag_field else None
    # Of a class within itself the fields are found while this function is made.
    return lambda text: _with_parts(text, fields.get, tag)


def _with_parts(
    text: bytes,
    cutter_of: Callable[[str], Cutter | None],
    tag: tuple[str, str | int | None] | None = None,
) -> bytes:
    """Return an object with some of its values cut; anything else as it is.

    Args:
        text: JSON.
        cutter_of: returns the function of the value of a key.
        tag: key and value that its objects have, of a class of a union.
    """
    if not text.lstrip().startswith(b"{"):
        return text
    parts: dict[str, Any] = _decode_parts(text)
    if tag is not None and tag[0] in parts and msgspec.json.decode(parts[tag[0]]) != tag[1]:
        return text  # of another class of a union
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


def spliced(content: bytes, prefix: bytes, parent: str) -> bytes:
    """Return JSON lines, or one object, with the context of a trace in the first object.

    Args:
        content: objects, each of which begins with ``prefix`` and the text of a UUID.
        prefix: bytes before that text.
        parent: the context; one that the first object has is kept.
    """
    end = content.find(b"\n")
    if content.find(_PARENT, 0, len(content) if end < 0 else end) >= 0:
        return content
    at = len(prefix) + TEXT_BYTES + 1
    return b'%b,%b%b"%b' % (content[:at], _PARENT, parent.encode(), content[at:])


KEY = "UUID"


class _Header(msgspec.Struct):
    """Values of the keys of a UUID, of any type."""

    upper: Any = msgspec.field(default=None, name="UUID")
    lower: Any = msgspec.field(default=None, name="uuid")


_decode_header = msgspec.json.Decoder(_Header).decode


def uuid_of_json(payload: bytes) -> str | None:
    """Return the text of the UUID of an object that its class cannot read; None if it has none."""
    try:
        found = _decode_header(payload).upper
    except msgspec.DecodeError:
        return None
    return found if is_uuid_text(found) else None


class JsonKind(Kind[Any]):
    """Kind of JSON messages.

    Args:
        message_type: the class.
        loads: returns the message of one payload.
        key: key of the UUID in the written object.
        field: name of the class's own field of the UUID, if it has one; nothing is spliced into
            its objects then.
        strict: the class refuses or collects unknown keys, so that the UUID's key must be
            removed.
        names: keys of the class, where it is strict.
    """

    form: ClassVar[str] = "json"

    def __init__(
        self,
        message_type: type[Any],
        loads: Callable[[bytes], Any],
        *,
        key: str,
        field: str | None = None,
        strict: bool = False,
        names: Collection[str] = (),
    ) -> None:
        super().__init__(message_type)
        self.key = key
        self._loads = loads
        self._field = field
        self._convert = uuid_conversion(message_type, field) if field else str
        self._strips = strict and field is None
        self._knows_lower = "uuid" in names
        self._knows_parent = PARENT_KEY in names
        self._place = UuidPlace(key)
        self._prefix = self._place.prefix
        self._parent_at = re.compile(
            rb'%b[0-9A-Fa-f-]{%d}",%b([0-9a-f-]{%d})"'
            % (re.escape(self._prefix), TEXT_BYTES, _PARENT, PARENT_BYTES)
        )
        self._dumps: Callable[[Any], bytes] = encode

    @property
    def uuid_place(self) -> tuple[object, ...]:
        """Place of the UUID: its key, and the field of the class, with the type that it has."""
        return self.key, self._field, self._convert

    # -------------------------------------------------------------- encoding

    def encode(self, message: Any, stamp: Stamp) -> bytes:
        """Return the message's JSON object, with the UUID as its first key."""
        if self._field is not None:
            message = call(self._with_uuid, message, stamp.text().decode())
        try:
            acknowledges = stamp.flags == ACK_TXN
            body = self._dumps_empty(message) if acknowledges else self._dumps(message)
        except ENCODE_ERRORS as error:
            raise self._unencodable(error) from error
        if self._field is not None:
            return body
        if len(body) == 2:
            return b'%b%b"}' % (self._prefix, stamp.text())
        return b'%b%b",%b' % (self._prefix, stamp.text(), body[1:])

    def with_parent(self, message: Any, payload: bytes, parent: str) -> bytes:
        """Return the object with the context as its second key, after a UUID that is no field."""
        del message
        return payload if self._field is not None else spliced(payload, self._prefix, parent)

    def parents(
        self, framing: Framing, buffer: Buffer, frames: Frames, messages: Sequence[Any]
    ) -> dict[int, str]:
        """Return the contexts that are the second keys of objects.

        Of many frames, those are looked at that have two letters of the key at its place.
        """
        found: dict[int, str] = {}
        indexes: Iterable[int] = range(len(messages))
        if len(messages) >= BULK_MIN:
            content = np.frombuffer(buffer, np.uint8)
            keys = frames.arrays()[0][: len(messages)] + (
                framing.header_bytes + self._place.end + 2
            )
            first, last = _PARENT_MARKS
            likely = np.flatnonzero(content.take(keys + first, mode="clip") == _PARENT[first])
            ended = content.take(keys[likely] + last, mode="clip") == _PARENT[last]
            indexes = likely[ended].tolist()
        for index in indexes:
            begin = frames.begins[index] + framing.header_bytes
            parent = self._parent_at.match(buffer, begin, frames.ends[index])
            if parent is not None and is_sampled(text := parent[1].decode()):
                found[index] = text
        return found

    def with_uuid_of(self, message: Any, other: Any) -> Any:
        """Return a message whose own field of the UUID, if any, is that of another one."""
        if self._field is None:
            return message
        return replaced(message, self._field, getattr(other, self._field))

    def check_readable(self, message: Any) -> None:
        """Check that the class reads what is written of a message: read it."""
        stamp = Stamp(new_producer_id())
        stamp.tick_now()
        payload = self.encode(message, stamp)
        try:
            self._decode_one(payload)
        except DECODE_ERRORS as error:
            name = self.name
            raise ValidationError(
                f"a Reader({name}) could not read this {name}: {text_of(error)}; mend its values, "
                "or the class; Publisher(validate=False) publishes it for readers of other classes",
                kind="unreadable",
            ) from error

    def encode_many(self, messages: Sequence[Any]) -> Spliced | None:
        """Return the messages' objects in bulk; None where the UUID is a field of the class."""
        if self._field is not None:
            return None
        lines = self._lines(messages)
        if lines is None:
            lines = b"".join(self._line(message) for message in messages)
        return Spliced(self._prefix, lines)

    def _lines(self, messages: Sequence[Any]) -> bytes | None:
        """Return each message's object on a line; None if they must be encoded one by one."""
        del messages
        return None

    def _line(self, message: Any) -> bytes:
        try:
            body = self._dumps(message)
        except ENCODE_ERRORS as error:
            raise self._unencodable(error) from error
        if b"\n" in body:  # from a Raw, which is written unchanged
            raise self._unencodable("it holds a line break")
        return body + b"\n"

    def _unencodable(self, reason: object) -> ValidationError:
        return ValidationError(
            f"{self.name} cannot be encoded as JSON: {text_of(reason)}",
            kind="encoding",
        )

    def _dumps_empty(self, message: Any) -> bytes:
        """Return the object of an acknowledgement, whose fields may have values of other types."""
        return self._dumps(message)

    def _with_uuid(self, message: Any, text: str) -> Any:
        """Return the message with its own field set; a frozen one is copied."""
        field = typing.cast("str", self._field)
        value = self._convert(text)
        try:
            setattr(message, field, value)
        except (AttributeError, pydantic.ValidationError):
            return replaced(message, field, value)
        return message

    # -------------------------------------------------------------- decoding

    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[Any]:
        """Decode frames: at once if possible, else one by one, which finds the bad one."""
        payloads = framing.payloads(buffer, frames)
        texts = self._texts(framing, buffer, frames)
        if texts is not None:
            try:
                if self._strips:
                    payloads = [self._stripped(payload) for payload in payloads]
                messages = call_each(self._loads, payloads)
            except DECODE_ERRORS:
                return self._decode_each(framing.payloads(buffer, frames))
            return Decoded(messages, raw_texts(texts), texts=texts)
        return self._decode_each(payloads)

    def _texts(self, framing: Framing, buffer: Buffer, frames: Frames) -> Texts | None:
        """Return every frame's UUID, if all have it at its place, and no other."""
        if len(frames.ends) < BULK_MIN:
            return None
        texts = self._place.texts(buffer, frames, framing.header_bytes)
        begin, end = int(frames.begins[0]), int(frames.ends[-1])
        if texts is None or not self._place.may_repeat(buffer, len(texts), begin, end):
            return texts
        return texts if self._are_last(texts, framing.payloads(buffer, frames)) else None

    def _are_last(self, texts: Texts, payloads: Sequence[bytes]) -> bool:
        """Return True if no object has another UUID, of which the last counts, than these."""
        try:
            return all(
                self._place.text(payload) is not None or self._parsed_uuid(payload) == text.decode()
                for text, payload in zip(raw_texts(texts), payloads, strict=True)
            )
        except DECODE_ERRORS:
            return False  # to be found one by one

    def _decode_each(self, payloads: Sequence[bytes]) -> Decoded[Any]:
        messages: list[Any] = []
        uuids: list[RawUuid] = []
        error: Exception | None = None
        for payload in payloads:
            try:
                if not payload.strip():
                    raise ValueError("a blank line is no message")
                message, raw = self._decode_one(payload)
            except MemoryError:
                raise
            except DECODE_ERRORS as cause:
                error = cause
                break
            messages.append(message)
            uuids.append(raw)
        return Decoded(messages, uuids, error)

    def _decode_one(self, payload: bytes) -> tuple[Any, RawUuid]:
        raw: RawUuid = self._place.text(payload)
        if raw is None:
            raw = self._parsed_uuid(payload)
        try:
            message = self._loads(self._stripped(payload) if self._strips else payload)
        except BaseException as error:
            # An acknowledgement is empty: it may lack the fields that other messages must have.
            if isinstance(error, EXITS) or not is_acknowledgement(raw):
                check_raised(error, self._loads)
                raise
            decode_object(payload)  # refuses anything but an object
            message = call(empty_instance, self.message_type)
            if self._field is not None:
                message = call(self._with_uuid, message, uuid_text(raw))
        return message, raw

    def _parsed_uuid(self, payload: bytes) -> str | None:
        """Return the UUID of an object, wherever it is: text, or None if it has none.

        Raises:
            ValueError: its value is no text.
        """
        if self.key not in {"UUID", "uuid"}:
            own = decode_object(payload).get(self.key)
            if own is not None:
                return checked(own)
        header = _decode_header(payload)
        if header.upper is not None:
            return checked(header.upper)
        return header.lower if is_uuid_text(header.lower) else None

    def _stripped(self, payload: bytes) -> bytes:
        """Return the object without its UUID, and the context of its trace."""
        if self._place.text(payload) is not None:
            after = self._place.end + 1
            parent = None if self._knows_parent else self._parent_at.match(payload)
            if parent is not None:
                after = parent.end()
            if payload[after : after + 1] == b",":
                return b"{" + payload[after + 1 :]
            if payload[after : after + 1] == b"}":
                return b"{" + payload[after:]
        known = decode_object(payload)
        keys = (self.key, KEY)
        if not any(known.pop(key, None) is not None for key in keys) and not self._knows_lower:
            lower = known.get("uuid")
            if is_uuid_text(lower):
                del known["uuid"]
        if not self._knows_parent:
            known.pop(PARENT_KEY, None)
        return encode(known)

    # ------------------------------------------------------- acknowledgements

    def new_acknowledgement(self, message: Any, journal: str) -> Any:
        """Return the result of the message's own ``new_acknowledgement``, or an empty instance."""
        own = getattr(message, "new_acknowledgement", None)
        return call(own, journal) if callable(own) else call(empty_instance, self.message_type)


class DictKind(JsonKind):
    """Kind of dicts. The UUID is no part of a dict: it is spliced in, and removed.

    A dict with the same key is refused: its value would be lost.
    """

    def __init__(self, message_type: type[Any]) -> None:
        super().__init__(message_type, decode_object, key=KEY)
        self._dumps = _encode_dict

    def check_readable(self, message: Any) -> None:
        """Any object that can be written can be read as a dict."""

    def _lines(self, messages: Sequence[Any]) -> bytes | None:
        if any(map(dict.__contains__, messages, itertools.repeat(KEY))):
            return None
        return encoded_lines(messages)

    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[Any]:
        """Decode a run of lines in one call."""
        if len(frames.ends) < BULK_MIN:
            return self._decode_each(framing.payloads(buffer, frames))
        messages = decode_lines(decode_dicts, framing, buffer, frames)
        if messages is None:
            return self._decode_each(framing.payloads(buffer, frames))
        uuids = [message.pop(KEY, None) for message in messages]
        texts = self._texts(framing, buffer, frames)
        if texts is None:
            for index, raw in enumerate(uuids):
                if raw is None:
                    lower = messages[index].get("uuid")
                    uuids[index] = lower if is_uuid_text(lower) else None
                elif not isinstance(raw, str):
                    return self._decode_each(framing.payloads(buffer, frames))
        return Decoded(messages, uuids, texts=texts)

    def _decode_one(self, payload: bytes) -> tuple[Any, RawUuid]:
        message = decode_object(payload)
        raw = message.pop(KEY, None)
        if raw is not None:
            return message, checked(raw)
        lower = message.get("uuid")
        return message, lower if is_uuid_text(lower) else None

    def new_acknowledgement(self, message: Any, journal: str) -> Any:
        """Return an empty dict."""
        del message, journal
        return {}


def _encode_dict(message: dict[str, Any]) -> bytes:
    if KEY in message:
        raise own_uuid(f"the dict has the key {KEY!r}")
    return encode(message)


def own_uuid(subject: str) -> ValidationError:
    """Return the error of a message with a key of its own that the message UUID takes."""
    return ValidationError(
        f"{subject}, which publishing writes: its own value would be lost; rename the key, or"
        " remove it from an object that was not read by a Reader",
        kind="own_uuid",
    )


class TypedKind(JsonKind):
    """Kind of dataclasses on JsonMessage, of msgspec Structs, and of unions of those with tags."""

    def __init__(self, message_type: type[Any]) -> None:
        classes = union_classes(message_type) or (message_type,)
        key, strict, names = getattr(classes[0], "uuid_field", KEY), False, dict[str, str]()
        for each in classes:
            if issubclass(each, msgspec.Struct):
                config = each.__struct_config__
                if config.tag_field == key:
                    raise own_uuid(f"{each.__qualname__} has the tag {key!r}")
                strict |= config.forbid_unknown_fields
                fields = zip(each.__struct_encode_fields__, each.__struct_fields__, strict=True)
                names.update(fields)
            else:
                names.update((field.name, field.name) for field in dataclasses.fields(each))
        try:
            decoder = msgspec.json.Decoder(message_type)
        except (TypeError, NameError) as error:
            raise ValidationError(
                f"{name_of(message_type)} has a field that JSON cannot hold"
                f"{_refused_field(message_type, names.values())}: {error}",
                kind="message_type",
            ) from error
        self._cut_times = time_cutter(message_type)
        super().__init__(
            message_type,
            decoder.decode if self._cut_times is None else self._loads_cut,
            key=key,
            field=names.get(key),
            strict=bool(strict),
            names=names,
        )
        self._decode_whole = decoder.decode
        self._decode_lines = decoder.decode_lines
        if callable(getattr(message_type, "validate", None)):
            self.validate = call_validate

    def _lines(self, messages: Sequence[Any]) -> bytes | None:
        return encoded_lines(messages)

    def _loads_cut(self, payload: bytes) -> Any:
        """Return the message of a payload, whose times are truncated."""
        assert self._cut_times is not None
        return self._decode_whole(self._cut_times(payload))

    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[Any]:
        """Decode a run of lines in one call; in several, if it holds empty acknowledgements."""
        if self._strips or not framing.newline_delimited:
            return super().decode(framing, buffer, frames)
        if self._cut_times is not None and holds_long_times(
            buffer, int(frames.begins[0]), int(frames.ends[-1])
        ):
            return self._decode_each(framing.payloads(buffer, frames))
        texts = self._texts(framing, buffer, frames)
        if texts is None and self._field is None:
            return self._decode_each(framing.payloads(buffer, frames))
        messages = decode_lines(self._decode_lines, framing, buffer, frames)
        if messages is None and texts is not None:
            messages = self._decode_around(acknowledging(texts), buffer, frames)
        if messages is None:
            return self._decode_each(framing.payloads(buffer, frames))
        if texts is None:
            # A class with a field for its UUID has it in its messages.
            return Decoded(messages, [getattr(each, str(self._field)) for each in messages])
        return Decoded(messages, raw_texts(texts), texts=texts)

    def _decode_around(
        self, acknowledgements: list[int], buffer: Buffer, frames: Frames
    ) -> list[Any] | None:
        """Return the messages of lines, some of which are acknowledgements; None if one is bad."""
        if not acknowledgements:
            return None
        messages: list[Any] = []
        begins, ends = frames.begins, frames.ends
        view = memoryview(buffer)
        at = 0
        try:
            for index in [*acknowledgements, len(frames)]:
                if at < index:
                    messages += call(self._decode_lines, view[begins[at] : ends[index - 1]])
                if index < len(frames):
                    line = bytes(view[begins[index] : ends[index] - 1])
                    messages.append(self._decode_one(line)[0])
                at = index + 1
        except DECODE_ERRORS:
            return None
        return messages if len(messages) == len(frames) else None


def _union_kind(message_type: Any) -> TypedKind:
    """Return the adapter of a union of classes.

    Raises:
        ValidationError: they cannot be distinguished, or have different places for the UUID.
    """
    classes = union_classes(message_type)
    name = name_of(message_type)
    for each in classes:
        is_struct = isinstance(each, type) and issubclass(each, msgspec.Struct)
        if not is_struct or each.__struct_config__.tag is None:
            raise _indistinct(name, f"{name_of(each)} is no msgspec Struct with a tag")
    try:
        msgspec.json.Decoder(message_type)
    except TypeError as error:
        raise _indistinct(name, error) from error
    kinds: list[Any] = [known_kind(each) for each in classes]
    if len({kind.uuid_place for kind in kinds}) > 1:
        raise ValidationError(
            f"{name} is no class of messages: its classes have their UUIDs in different fields;"
            " give all of them the same field, or none",
            kind="no_uuid",
        )
    return TypedKind(message_type)


def _indistinct(name: str, reason: object) -> ValidationError:
    return ValidationError(
        f"{name} is no class of messages, as its classes cannot be distinguished: {reason}; declare"
        " all of them as `class Ride(msgspec.Struct, tag=True)`, each with another tag",
        kind="message_type",
    )


def _refused_field(message_type: type[Any], fields: Iterable[str]) -> str:
    """Return the name of the field that makes a class unusable, for its error; empty if unknown."""
    try:
        hints = typing.get_type_hints(message_type, include_extras=True)
    except NameError:
        return ""
    for name in fields:
        try:
            msgspec.json.Decoder(hints[name])
        except TypeError:
            return f", {name!r}"
    return ""


def replaced(message: Any, field: str, value: object) -> Any:
    """Return a copy of the message with another value of the field, without validation."""
    if isinstance(message, msgspec.Struct):
        return msgspec.structs.replace(message, **{field: value})
    if isinstance(message, pydantic.BaseModel):
        return message.model_copy(update={field: value})
    # Not dataclasses.replace: the class's __post_init__ could refuse an acknowledgement.
    made = copy.copy(message)
    object.__setattr__(made, field, value)
    return made


def checked(value: object) -> str:
    """Return the value, which is to be the text of a UUID.

    Raises:
        ValueError: it is no text.
    """
    if isinstance(value, str):
        return value
    raise ValueError(f"its UUID is no text but {type(value).__name__}")


def is_acknowledgement(raw: RawUuid) -> bool:
    """Return True if the UUID has the flag of an acknowledgement."""
    try:
        return bool(raw) and parse_raw_uuid(uuid_text(raw))[2] == ACK_TXN
    except ValueError:
        return False


def uuid_text(raw: RawUuid) -> str:
    """Return the text of a UUID; empty for none."""
    return raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw or "")


def uuid_conversion(message_type: type[Any], field: str) -> Callable[[str], Any]:
    """Return the conversion from text to the declared type of the class's own UUID field."""
    owner = (*union_classes(message_type), message_type)[0]
    hint = typing.get_type_hints(owner)[field]
    options = typing.get_args(hint) or (hint,)
    if str in options:
        return str
    if uuid.UUID in options:
        return uuid.UUID
    raise ValidationError(
        f"{message_type.__qualname__}.{field} cannot hold a message UUID: declare it as str or"
        " uuid.UUID",
        kind="no_uuid",
    )


class PydanticKind(JsonKind):
    """Kind of pydantic models, by their aliases where they have some."""

    def __init__(self, message_type: type[Any]) -> None:
        names = {
            each.serialization_alias or each.alias or name: name
            for name, each in message_type.model_fields.items()
        }
        key = getattr(message_type, "uuid_field", KEY)
        strict = message_type.model_config.get("extra", "ignore") != "ignore"
        super().__init__(
            message_type,
            self._validated,
            key=key,
            field=names.get(key),
            strict=strict,
            names=names,
        )
        if self._field is None and key in _computed_keys(message_type):
            raise own_uuid(f"{message_type.__qualname__} has a computed field {key!r}")
        self._takes_extra = message_type.model_config.get("extra") == "allow"
        self._dumps = self._encode
        self._serializer = message_type.__pydantic_serializer__
        self._validator = message_type.__pydantic_validator__

    def _encode(self, message: Any, *, warns: bool = True) -> bytes:
        if self._takes_extra and self.key in (message.__pydantic_extra__ or ()):
            raise own_uuid(f"the {self.message_type.__qualname__} has an extra field {self.key!r}")
        try:
            body = call(self._serialized, message, warns)
        except pydantic_core.PydanticSerializationError as error:
            raise ValueError(text_of(error)) from error
        if body[:1] != b"{":
            raise ValueError("its serializer makes no object of it, which could hold a UUID")
        return body

    def _serialized(self, message: Any, warns: bool) -> bytes:  # noqa: FBT001 - called by position
        return bytes(self._serializer.to_json(message, by_alias=True, warnings=warns))

    def _dumps_empty(self, message: Any) -> bytes:
        return self._encode(message, warns=False)

    def _validated(self, payload: bytes) -> Any:
        try:
            return self._validator.validate_json(payload)
        except pydantic.ValidationError as error:
            # The error's own text has many lines.
            raise ValueError("; ".join(map(_complaint, error.errors()))) from error


def _computed_keys(message_type: type[pydantic.BaseModel]) -> set[str]:
    fields = message_type.model_computed_fields
    return {each.alias or name for name, each in fields.items()}


def _complaint(error: pydantic_core.ErrorDetails) -> str:
    place = ".".join(map(str, error["loc"]))
    return f"{place}: {error['msg']}" if place else error["msg"]


def find_json(message_type: type[Any]) -> Kind[Any] | None:
    """Return the adapter of a class of JSON messages, or of a union; None for any other class.

    Raises:
        ValidationError: the class is of a JSON kind, but cannot hold a UUID; or the classes of a
            union cannot be distinguished.
    """
    if union_classes(message_type):
        return _union_kind(message_type)
    if issubclass(message_type, dict):
        return DictKind(message_type)
    if issubclass(message_type, pydantic.BaseModel):
        if issubclass(message_type, pydantic.RootModel):
            raise ValidationError(
                f"{message_type.__qualname__} can carry no message UUID: it is a RootModel; use a"
                " model with fields",
                kind="no_uuid",
            )
        return PydanticKind(message_type)
    if issubclass(message_type, msgspec.Struct):
        if message_type.__struct_config__.array_like:
            raise ValidationError(
                f"{message_type.__qualname__} can carry no message UUID: it is written as an"
                " array; leave array_like off",
                kind="no_uuid",
            )
        return TypedKind(message_type)
    if dataclasses.is_dataclass(message_type):
        if issubclass(message_type, JsonMessage):
            return TypedKind(message_type)
        raise ValidationError(
            f"{message_type.__qualname__} can carry no message UUID: derive the dataclass from"
            " JsonMessage",
            kind="no_uuid",
        )
    if issubclass(message_type, JsonMessage):
        raise ValidationError(
            f"{message_type.__qualname__} has no fields: decorate it with @dataclass",
            kind="message_type",
        )
    return None
