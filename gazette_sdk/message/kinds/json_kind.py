"""Kinds of JSON messages: dicts, dataclasses and msgspec Structs (message section 6).

A UUID is written as the first key of the object, so that a reader of our own publisher's
messages cuts it at a fixed place, for a whole chunk at once. Messages of other writers may have
it anywhere: those are parsed one by one.

All but pydantic models use ``msgspec``: it decodes the lines of a chunk in one call, and was
measured ahead of ``orjson`` in both directions, also for dicts.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import typing
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import msgspec
import pydantic

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.flags import ACK_TXN
from gazette_sdk.message.kinds.base import Decoded, Kind, Spliced
from gazette_sdk.message.kinds.empty import empty_instance
from gazette_sdk.message.kinds.fixed_place import Texts, UuidPlace, acknowledging, raw_texts
from gazette_sdk.message.kinds.json_lines import (
    BULK_MIN,
    DECODE_ERRORS,
    ENCODE_ERRORS,
    decode_dicts,
    decode_lines,
    decode_object,
    encode,
    encoded_lines,
    holds_long_times,
    time_cutter,
)
from gazette_sdk.message.uuid import RawUuid, Stamp, is_uuid_text, parse_raw_uuid
from gazette_sdk.user_code import EXITS, call, call_each, check_raised, text_of

__all__ = ["DictKind", "JsonKind", "TypedKind"]

KEY = "UUID"


class _Header(msgspec.Struct):
    """Values of the keys of a UUID, of any type."""

    upper: Any = msgspec.field(default=None, name="UUID")
    lower: Any = msgspec.field(default=None, name="uuid")


_decode_header = msgspec.json.Decoder(_Header).decode


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
        self._place = UuidPlace(key)
        self._prefix = self._place.prefix
        self._dumps: Callable[[Any], bytes] = encode

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
            f"{self.message_type.__qualname__} cannot be encoded as JSON: {text_of(reason)}",
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
        """Return the object without its UUID."""
        if self._place.text(payload) is not None:
            after = self._place.end + 1
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
    """Kind of dataclasses on JsonMessage, and of msgspec Structs."""

    def __init__(self, message_type: type[Any]) -> None:
        key = getattr(message_type, "uuid_field", KEY)
        struct = issubclass(message_type, msgspec.Struct)
        strict = struct and message_type.__struct_config__.forbid_unknown_fields
        names = dict(
            zip(message_type.__struct_encode_fields__, message_type.__struct_fields__, strict=True)
            if struct
            else ((each.name, each.name) for each in dataclasses.fields(message_type))
        )
        try:
            decoder = msgspec.json.Decoder(message_type)
        except (TypeError, NameError) as error:
            raise ValidationError(
                f"{message_type.__qualname__} has a field that JSON cannot hold: {error}",
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


def call_validate(message: Any) -> object:
    return message.validate()


def replaced(message: Any, field: str, value: object) -> Any:
    if isinstance(message, msgspec.Struct):
        return msgspec.structs.replace(message, **{field: value})
    if isinstance(message, pydantic.BaseModel):
        return message.model_copy(update={field: value})
    # Not dataclasses.replace: the class's __post_init__ could refuse an acknowledgement.
    made = copy.copy(message)
    object.__setattr__(made, field, value)
    return made


def checked(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"its UUID is no text but {type(value).__name__}")


def is_acknowledgement(raw: RawUuid) -> bool:
    try:
        return bool(raw) and parse_raw_uuid(uuid_text(raw))[2] == ACK_TXN
    except ValueError:
        return False


def uuid_text(raw: RawUuid) -> str:
    return raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw or "")


def uuid_conversion(message_type: type[Any], field: str) -> Callable[[str], Any]:
    """Return the conversion from text to the declared type of the class's own UUID field."""
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
