"""What all kinds of JSON messages have in common (message section 6).

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
import gc
import typing
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pydantic

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.flags import ACK_TXN
from gazette_sdk.message.kinds.base import Decoded, Kind, Spliced
from gazette_sdk.message.kinds.empty import empty_instance
from gazette_sdk.message.kinds.fixed_place import (
    Texts,
    UuidPlace,
    raw_texts,
)
from gazette_sdk.message.uuid import TEXT_BYTES, RawUuid, Stamp, parse_uuid, uuid_of_text

__all__ = ["JsonKind"]

KEY = "UUID"
_NEWLINE = 0x0A
BULK_MIN = 4
"""For fewer frames than this the fixed cost of vectors outweighs what they save."""

ENCODE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, AttributeError)
DECODE_ERRORS = (Exception,)
"""Making a message runs code of its class, which raises what it likes to refuse it."""


class _Header(msgspec.Struct):
    """The keys under which a UUID may stand, whatever they hold."""

    upper: Any = msgspec.field(default=None, name="UUID")
    lower: Any = msgspec.field(default=None, name="uuid")


_decode_header = msgspec.json.Decoder(_Header).decode
decode_object = msgspec.json.Decoder(dict).decode


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
        self._convert = uuid_conversion(message_type, field) if field else str
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
        except ENCODE_ERRORS as error:
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
        except ENCODE_ERRORS as error:
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
        return encode(message)

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
            return replaced(message, field, value)
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
            except DECODE_ERRORS:
                return self._decode_each(payloads)
            return Decoded(messages, raw_texts(texts), texts=texts)
        return self._decode_each(payloads)

    def _texts(self, framing: Framing, buffer: Buffer, frames: Frames) -> Texts | None:
        """Every frame's UUID, if all have it at its place."""
        if len(frames) < BULK_MIN:
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
            except DECODE_ERRORS as cause:
                error = cause
                break
            messages.append(message)
            uuids.append(raw)
        return Decoded(messages, uuids, error)

    def _decode_one(self, payload: bytes) -> tuple[Any, RawUuid]:
        raw = self._uuid_within(payload)
        try:
            message = self._loads(self._stripped(payload) if self._strips else payload)
        except DECODE_ERRORS:
            # An acknowledgement is empty: it need not hold what other messages must.
            if not is_acknowledgement(raw):
                raise
            decode_object(payload)  # but it is an object
            message = empty_instance(self.message_type)
            if self._field is not None:
                message = self._with_uuid(message, text_of(raw))
        return message, raw

    def _uuid_within(self, payload: bytes) -> RawUuid:
        """The UUID of an object: text, None if it has none, or whatever stands in its place."""
        head = len(self._prefix)
        if payload.startswith(self._prefix) and payload[self._width - 1 : self._width] == b'"':
            return payload[head : head + TEXT_BYTES]
        if self.key not in {"UUID", "uuid"}:
            own = decode_object(payload).get(self.key)
            if own is not None:
                return checked(own)
        header = _decode_header(payload)
        if header.upper is not None:
            return checked(header.upper)
        return header.lower if is_uuid_text(header.lower) else None

    def _stripped(self, payload: bytes) -> bytes:
        """The object without its UUID."""
        width = self._width
        if payload.startswith(self._prefix):
            following = payload[width - 1 : width + 1]
            if following == b'",':
                return b"{" + payload[width + 1 :]
            if following == b'"}':
                return b"{" + payload[width:]
        known = decode_object(payload)
        keys = (self.key, KEY)
        if not any(known.pop(key, None) is not None for key in keys) and not self._knows_lower:
            lower = known.get("uuid")
            if is_uuid_text(lower):
                del known["uuid"]
        return encode(known)

    # ------------------------------------------------------- acknowledgements

    def new_acknowledgement(self, message: Any, journal: str) -> Any:
        """What the message's own ``new_acknowledgement`` says, or an empty instance."""
        own = getattr(message, "new_acknowledgement", None)
        return own(journal) if callable(own) else empty_instance(self.message_type)


encode = msgspec.json.Encoder().encode
encode_lines = msgspec.json.Encoder().encode_lines


def decode_lines(
    decode: Callable[[Any], list[Any]], framing: Framing, buffer: Buffer, frames: Frames
) -> list[Any] | None:
    """All messages in one call; None if that is not possible, or a frame is bad."""
    if not frames.ends or not framing.newline_delimited:
        return None
    # Thousands of new objects, none of them garbage: collecting among them would cost a third of
    # the time. Python 3.12 and later collect only between bytecodes, and behave so by themselves.
    collects = gc.isenabled()
    gc.disable()
    try:
        messages = decode(memoryview(buffer)[frames.begins[0] : frames.ends[-1]])
    except DECODE_ERRORS:
        return None
    finally:
        if collects:
            gc.enable()
    # Blank lines are passed over there, but they are no messages.
    return messages if len(messages) == len(frames) else None


def encoded_lines(messages: Sequence[Any]) -> bytes | None:
    """Each message on a line; None if that must be done one by one, which finds what is bad."""
    try:
        lines: bytes = encode_lines(messages)
    except ENCODE_ERRORS:
        return None
    # Only Raw, which is written as it is, can bring in further line breaks.
    breaks = np.count_nonzero(np.frombuffer(lines, dtype=np.uint8) == _NEWLINE)
    return lines if breaks == len(messages) else None


def replaced(message: Any, field: str, value: object) -> Any:
    if isinstance(message, msgspec.Struct):
        return msgspec.structs.replace(message, **{field: value})
    if isinstance(message, pydantic.BaseModel):
        return message.model_copy(update={field: value})
    # Not dataclasses.replace, as the class's __post_init__ could refuse an acknowledgement.
    made = copy.copy(message)
    object.__setattr__(made, field, value)
    return made


def is_uuid_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        uuid_of_text(value)
    except ValueError:
        return False
    return True


def checked(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"its UUID is no text but {type(value).__name__}")


def is_acknowledgement(raw: RawUuid) -> bool:
    try:
        return parse_uuid(uuid_of_text(text_of(raw))).flags == ACK_TXN
    except ValueError:
        return False


def text_of(raw: RawUuid) -> str:
    return raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw or "")


def uuid_conversion(message_type: type[Any], field: str) -> Callable[[str], Any]:
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
