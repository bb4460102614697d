"""JSON messages: dicts, dataclasses, Structs and pydantic models (message section 6).

A UUID is written as the first key of the object, so that a reader of our own publisher's
messages cuts it at a fixed place, for a whole chunk at once. Messages of other writers may have
it anywhere: those are looked through one by one.

Everything but pydantic goes through ``msgspec``: typed messages because nothing else is as
quick, dicts because it decodes the lines of a chunk in one call and was measured ahead of
``orjson`` in both directions.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import itertools
import typing
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pydantic
import pydantic_core

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.empty import empty_instance
from gazette_sdk.message.fixed_place import (
    TEXT_BYTES,
    Texts,
    UuidPlace,
    acknowledging,
    raw_texts,
)
from gazette_sdk.message.flags import ACK_TXN
from gazette_sdk.message.kinds import Decoded, JsonMessage, Kind, RawUuid, Spliced
from gazette_sdk.message.uuid import Stamp, parse_uuid, uuid_of_text

__all__ = ["DictKind", "JsonKind", "PydanticKind", "TypedKind", "find"]

_KEY = "UUID"
_NEWLINE = 0x0A
_BULK_MIN = 4
"""For fewer frames than this the fixed cost of vectors outweighs what they save."""

_ENCODE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, AttributeError)
_DECODE_ERRORS = (Exception,)
"""Making a message runs code of its class, which raises what it likes to refuse it."""


def find(message_type: type[Any]) -> Kind[Any] | None:
    """The adapter of a class of JSON messages; None for any other class.

    Raises:
        ValidationError: the class is of a JSON kind, but cannot carry a UUID.
    """
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


class _Header(msgspec.Struct):
    """The keys under which a UUID may stand, whatever they hold."""

    upper: Any = msgspec.field(default=None, name="UUID")
    lower: Any = msgspec.field(default=None, name="uuid")


_decode_header = msgspec.json.Decoder(_Header).decode
_decode_object = msgspec.json.Decoder(dict).decode


class JsonKind(Kind[Any]):
    """What all kinds of JSON messages have in common.

    Args:
        message_type: the class.
        key: key of the UUID in the written object.
        field: name of the class's own field that holds the UUID, if it has one; nothing is
            spliced into its objects then.
        strict: the class refuses or collects keys that it does not know, so that it must not
            see the UUID's.
        names: keys that the class knows, where it is strict.
    """

    form: ClassVar[str] = "json"

    def __init__(
        self,
        message_type: type[Any],
        *,
        key: str,
        field: str | None = None,
        strict: bool = False,
        names: Collection[str] = (),
    ) -> None:
        super().__init__(message_type)
        self.key = key
        self._field = field
        self._convert = _uuid_conversion(message_type, field) if field else str
        self._strips = strict and field is None
        self._knows_lower = "uuid" in names
        self._prefix = b'{"%b":"' % key.encode()
        self._width = len(self._prefix) + TEXT_BYTES + 1
        self._place = UuidPlace(self._prefix)

    # -------------------------------------------------------------- encoding

    def encode(self, message: Any, stamp: Stamp) -> bytes:
        """The message's JSON object, with the UUID as its first key."""
        if self._field is not None:
            message = self._with_uuid(message, stamp.text().decode())
        try:
            acknowledges = stamp.flags == ACK_TXN
            body = self._dumps_empty(message) if acknowledges else self._dumps(message)
        except _ENCODE_ERRORS as error:
            raise self._unencodable(error) from error
        if self._field is not None:
            return body
        if len(body) == 2:
            return b'%b%b"}' % (self._prefix, stamp.text())
        return b'%b%b",%b' % (self._prefix, stamp.text(), body[1:])

    def encode_many(self, messages: Sequence[Any]) -> Spliced | None:
        """The messages' objects in bulk; None where the UUID is a field of the class's own."""
        if self._field is not None:
            return None
        lines = self._lines(messages)
        if lines is None:
            lines = b"".join(self._line(message) for message in messages)
        return Spliced(self._prefix, lines)

    def _lines(self, messages: Sequence[Any]) -> bytes | None:
        """Each message's object on a line; None if that must be done one by one."""
        del messages
        return None

    def _line(self, message: Any) -> bytes:
        try:
            body = self._dumps(message)
        except _ENCODE_ERRORS as error:
            raise self._unencodable(error) from error
        if b"\n" in body:  # as only Raw can bring in, which is written as it is
            raise self._unencodable("it holds a line break")
        return body + b"\n"

    def _unencodable(self, reason: object) -> ValidationError:
        return ValidationError(
            f"{self.message_type.__qualname__} cannot be encoded as JSON: {reason}",
            kind="encoding",
        )

    def _dumps(self, message: Any) -> bytes:
        return _encode(message)

    def _dumps_empty(self, message: Any) -> bytes:
        """The object of an acknowledgement, whose fields may be emptier than their types."""
        return self._dumps(message)

    def _with_uuid(self, message: Any, text: str) -> Any:
        """The message with its own field set; a frozen one is copied."""
        field = typing.cast("str", self._field)
        value = self._convert(text)
        try:
            setattr(message, field, value)
        except (AttributeError, pydantic.ValidationError):
            return _replaced(message, field, value)
        return message

    # -------------------------------------------------------------- decoding

    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[Any]:
        """Decode a run of frames: at once if possible, else one by one, which finds the bad."""
        payloads = framing.payloads(buffer, frames)
        texts = self._texts(framing, buffer, frames)
        if texts is not None:
            try:
                if self._strips:
                    messages = [self._loads(self._stripped(payload)) for payload in payloads]
                else:
                    messages = list(map(self._loads, payloads))
            except _DECODE_ERRORS:
                return self._decode_each(payloads)
            return Decoded(messages, raw_texts(texts), texts=texts)
        return self._decode_each(payloads)

    def _texts(self, framing: Framing, buffer: Buffer, frames: Frames) -> Texts | None:
        """Every frame's UUID, if all have it at its place."""
        if len(frames) < _BULK_MIN:
            return None
        return self._place.texts(buffer, frames, framing.header_bytes)

    @abc.abstractmethod
    def _loads(self, payload: bytes) -> Any:
        """The message of one payload."""

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
            except _DECODE_ERRORS as cause:
                error = cause
                break
            messages.append(message)
            uuids.append(raw)
        return Decoded(messages, uuids, error)

    def _decode_one(self, payload: bytes) -> tuple[Any, RawUuid]:
        raw = self._uuid_within(payload)
        try:
            message = self._loads(self._stripped(payload) if self._strips else payload)
        except _DECODE_ERRORS:
            # An acknowledgement is empty: it need not hold what other messages must.
            if not _is_acknowledgement(raw):
                raise
            _decode_object(payload)  # but it is an object
            message = empty_instance(self.message_type)
            if self._field is not None:
                message = self._with_uuid(message, _text_of(raw))
        return message, raw

    def _uuid_within(self, payload: bytes) -> RawUuid:
        """The UUID of an object: text, None if it has none, or whatever stands in its place."""
        head = len(self._prefix)
        if payload.startswith(self._prefix) and payload[self._width - 1 : self._width] == b'"':
            return payload[head : head + TEXT_BYTES]
        if self.key not in {"UUID", "uuid"}:
            own = _decode_object(payload).get(self.key)
            if own is not None:
                return _checked(own)
        header = _decode_header(payload)
        if header.upper is not None:
            return _checked(header.upper)
        return header.lower if _is_uuid_text(header.lower) else None

    def _stripped(self, payload: bytes) -> bytes:
        """The object without its UUID."""
        width = self._width
        if payload.startswith(self._prefix):
            following = payload[width - 1 : width + 1]
            if following == b'",':
                return b"{" + payload[width + 1 :]
            if following == b'"}':
                return b"{" + payload[width:]
        known = _decode_object(payload)
        keys = (self.key, _KEY)
        if not any(known.pop(key, None) is not None for key in keys) and not self._knows_lower:
            lower = known.get("uuid")
            if _is_uuid_text(lower):
                del known["uuid"]
        return _encode(known)

    # ------------------------------------------------------- acknowledgements

    def new_acknowledgement(self, message: Any, journal: str) -> Any:
        """What the message's own ``new_acknowledgement`` says, or an empty instance."""
        own = getattr(message, "new_acknowledgement", None)
        return own(journal) if callable(own) else empty_instance(self.message_type)


class DictKind(JsonKind):
    """Plain dicts. The UUID is no part of a dict: it is spliced in, and taken out."""

    def __init__(self, message_type: type[Any]) -> None:
        super().__init__(message_type, key=_KEY)

    def _dumps(self, message: Any) -> bytes:
        if _KEY in message:
            message = {key: value for key, value in message.items() if key != _KEY}
        return _encode(message)

    def _lines(self, messages: Sequence[Any]) -> bytes | None:
        if any(map(dict.__contains__, messages, itertools.repeat(_KEY))):
            return None
        return _encoded_lines(messages)

    def _loads(self, payload: bytes) -> Any:
        return _decode_object(payload)

    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[Any]:
        """Decode a run of lines in one call."""
        messages = _decode_lines(_decode_dicts, framing, buffer, frames)
        if messages is None:
            return self._decode_each(framing.payloads(buffer, frames))
        uuids = [message.pop(_KEY, None) for message in messages]
        texts = self._texts(framing, buffer, frames)
        if texts is None:
            for index, raw in enumerate(uuids):
                if raw is None:
                    lower = messages[index].get("uuid")
                    uuids[index] = lower if _is_uuid_text(lower) else None
                elif not isinstance(raw, str):
                    return self._decode_each(framing.payloads(buffer, frames))
        return Decoded(messages, uuids, texts=texts)

    def _decode_one(self, payload: bytes) -> tuple[Any, RawUuid]:
        message = self._loads(payload)
        raw = message.pop(_KEY, None)
        if raw is not None:
            return message, _checked(raw)
        lower = message.get("uuid")
        return message, lower if _is_uuid_text(lower) else None

    def new_acknowledgement(self, message: Any, journal: str) -> Any:
        """An empty dict."""
        del message, journal
        return {}


class TypedKind(JsonKind):
    """Dataclasses on JsonMessage, and msgspec Structs."""

    def __init__(self, message_type: type[Any]) -> None:
        key = getattr(message_type, "uuid_field", _KEY)
        struct = issubclass(message_type, msgspec.Struct)
        strict = struct and message_type.__struct_config__.forbid_unknown_fields
        names = dict(
            zip(message_type.__struct_encode_fields__, message_type.__struct_fields__, strict=True)
            if struct
            else ((each.name, each.name) for each in dataclasses.fields(message_type))
        )
        super().__init__(
            message_type, key=key, field=names.get(key), strict=bool(strict), names=names
        )
        if callable(getattr(message_type, "validate", None)):
            self.validate = _call_validate
        try:
            self._decoder = msgspec.json.Decoder(message_type)
        except (TypeError, NameError) as error:
            raise ValidationError(
                f"{message_type.__qualname__} has a field that JSON cannot hold: {error}",
                kind="message_type",
            ) from error

    def _lines(self, messages: Sequence[Any]) -> bytes | None:
        return _encoded_lines(messages)

    def _loads(self, payload: bytes) -> Any:
        return self._decoder.decode(payload)

    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[Any]:
        """Decode a run of lines in one call; in several, if it holds empty acknowledgements."""
        if self._strips or not framing.newline_delimited:
            return super().decode(framing, buffer, frames)
        texts = self._texts(framing, buffer, frames)
        if texts is None and self._field is None:
            return self._decode_each(framing.payloads(buffer, frames))
        messages = _decode_lines(self._decoder.decode_lines, framing, buffer, frames)
        if messages is None and texts is not None:
            messages = self._decode_around(acknowledging(texts), buffer, frames)
        if messages is None:
            return self._decode_each(framing.payloads(buffer, frames))
        if texts is None:
            # A class with a field for its UUID needs no look at its lines.
            return Decoded(messages, [getattr(each, str(self._field)) for each in messages])
        return Decoded(messages, raw_texts(texts), texts=texts)

    def _decode_around(
        self, acknowledgements: list[int], buffer: Buffer, frames: Frames
    ) -> list[Any] | None:
        """Messages of lines of which some are empty; None if another is bad."""
        if not acknowledgements:
            return None
        messages: list[Any] = []
        begins, ends = frames.begins, frames.ends
        view = memoryview(buffer)
        at = 0
        try:
            for index in [*acknowledgements, len(frames)]:
                if at < index:
                    messages += self._decoder.decode_lines(view[begins[at] : ends[index - 1]])
                if index < len(frames):
                    line = bytes(view[begins[index] : ends[index] - 1])
                    messages.append(self._decode_one(line)[0])
                at = index + 1
        except _DECODE_ERRORS:
            return None
        return messages if len(messages) == len(frames) else None


class PydanticKind(JsonKind):
    """Pydantic models, by their aliases where they have some."""

    def __init__(self, message_type: type[Any]) -> None:
        names = {
            each.serialization_alias or each.alias or name: name
            for name, each in message_type.model_fields.items()
        }
        key = getattr(message_type, "uuid_field", _KEY)
        strict = message_type.model_config.get("extra", "ignore") != "ignore"
        super().__init__(message_type, key=key, field=names.get(key), strict=strict, names=names)
        self._serializer = message_type.__pydantic_serializer__
        self._validator = message_type.__pydantic_validator__

    def _dumps(self, message: Any, *, warns: bool = True) -> bytes:
        try:
            body = bytes(self._serializer.to_json(message, by_alias=True, warnings=warns))
        except pydantic_core.PydanticSerializationError as error:
            raise ValueError(str(error)) from error
        if body[:1] != b"{":
            raise ValueError("its serializer makes no object of it, which could hold a UUID")
        return body

    def _dumps_empty(self, message: Any) -> bytes:
        return self._dumps(message, warns=False)

    def _loads(self, payload: bytes) -> Any:
        try:
            return self._validator.validate_json(payload)
        except pydantic.ValidationError as error:
            # Its text takes many lines.
            raise ValueError("; ".join(map(_complaint, error.errors()))) from error


# ------------------------------------------------------------------- pieces

_encode = msgspec.json.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines
_decode_dicts = msgspec.json.Decoder(dict).decode_lines


def _decode_lines(
    decode: Callable[[Any], list[Any]], framing: Framing, buffer: Buffer, frames: Frames
) -> list[Any] | None:
    """All messages in one call; None if that is not possible, or a frame is bad."""
    if not frames.ends or not framing.newline_delimited:
        return None
    try:
        messages = decode(memoryview(buffer)[frames.begins[0] : frames.ends[-1]])
    except _DECODE_ERRORS:
        return None
    # Blank lines are passed over there, but they are no messages.
    return messages if len(messages) == len(frames) else None


def _encoded_lines(messages: Sequence[Any]) -> bytes | None:
    """Each message on a line; None if that must be done one by one, which finds what is bad."""
    try:
        lines: bytes = _encode_lines(messages)
    except _ENCODE_ERRORS:
        return None
    # Only Raw, which is written as it is, can bring in further line breaks.
    breaks = np.count_nonzero(np.frombuffer(lines, dtype=np.uint8) == _NEWLINE)
    return lines if breaks == len(messages) else None


def _call_validate(message: Any) -> object:
    return message.validate()


def _complaint(error: pydantic_core.ErrorDetails) -> str:
    place = ".".join(map(str, error["loc"]))
    return f"{place}: {error['msg']}" if place else error["msg"]


def _replaced(message: Any, field: str, value: object) -> Any:
    if isinstance(message, msgspec.Struct):
        return msgspec.structs.replace(message, **{field: value})
    if isinstance(message, pydantic.BaseModel):
        return message.model_copy(update={field: value})
    # Not dataclasses.replace, as the class's __post_init__ could refuse an acknowledgement.
    made = copy.copy(message)
    object.__setattr__(made, field, value)
    return made


def _is_uuid_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        uuid_of_text(value)
    except ValueError:
        return False
    return True


def _checked(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"its UUID is no text but {type(value).__name__}")


def _is_acknowledgement(raw: RawUuid) -> bool:
    try:
        return parse_uuid(uuid_of_text(_text_of(raw))).flags == ACK_TXN
    except ValueError:
        return False


def _text_of(raw: RawUuid) -> str:
    return raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw or "")


def _uuid_conversion(message_type: type[Any], field: str) -> Callable[[str], Any]:
    """From text to the declared type of the class's own UUID field."""
    hint = typing.get_type_hints(message_type)[field]
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
