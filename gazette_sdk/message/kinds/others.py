"""Kinds of messages as CSV records and in protobuf.

Protobuf messages have the UUID in their field ``bytes uuid`` (message section 7). CSV messages are
lists of strings, of which the first is the UUID (message section 8).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.protobuf.message import EncodeError as ProtobufEncodeError
from google.protobuf.message import Message

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Csv, Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.kinds.base import Decoded, Kind, call_validate
from gazette_sdk.message.runs import InvalidUuidError, parse_text_uuids
from gazette_sdk.message.uuid import TEXT_BYTES, RawUuid, Stamp, uuid_of_text
from gazette_sdk.tracing import PARENT_KEY, is_sampled
from gazette_sdk.user_code import call, call_each

_BEHIND_FIELD = np.frombuffer(b",\r\n", dtype=np.uint8)

_WHITE = r"\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_needs_quotes = re.compile(rf'[,"\r\n]|\A[{_WHITE}]|\A\\\.\Z').search
_begins_white = re.compile(rf",[{_WHITE}]").search
_fields = re.compile(r'(?:\A|,)(?:"([^"]*+(?:""[^"]*+)*+)"|([^",]*+))').finditer


class CsvRecord(list[str]):
    """CSV record: its fields, of which the first is the UUID's text.

    Publishing overwrites the first field::

        publisher.publish(CsvRecord(["", "7", "12"]))

    Plain lists work as well. A derived class may have ``validate(self) -> None``, which raises to
    refuse a record before it is published.
    """

    def new_acknowledgement(self, journal: str) -> Self:
        """Return a record with as many empty fields: readers refuse another number."""
        del journal
        return type(self)([""] * len(self))


def find_csv(message_type: type[Any]) -> Kind[Any] | None:
    """Return the adapter of ``list`` and of classes derived from it; None for any other class."""
    return CsvKind(message_type) if issubclass(message_type, list) else None


class CsvKind(Kind[Any]):
    """Kind of lists of strings. Publishing a record sets its first item.

    Args:
        message_type: ``list`` or a class derived from it, made by calling it with a list.
    """

    form: ClassVar[str] = "csv"

    def __init__(self, message_type: type[Any]) -> None:
        super().__init__(message_type)
        if callable(getattr(message_type, "validate", None)):
            self.validate = call_validate

    # -------------------------------------------------------------- encoding

    def encode(self, message: Any, stamp: Stamp) -> bytes:
        """Set the record's first field, and write its fields."""
        if not message:
            raise ValidationError(
                "a CSV record without fields can carry no message UUID; give it a first field,"
                " which publishing fills",
                kind="no_uuid",
            )
        message[0] = stamp.text().decode()
        try:
            text = ",".join(message)
        except TypeError as error:
            raise ValidationError(
                f"{self.message_type.__qualname__} cannot be encoded as CSV: {error}; make its"
                " fields strings",
                kind="encoding",
            ) from error
        if (
            text.count(",") != len(message) - 1
            or '"' in text
            or "\n" in text
            or "\r" in text
            or ",\\." in text
            or _begins_white(text)
        ):
            text = ",".join(map(_quoted, message))
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise ValidationError(
                f"{self.message_type.__qualname__} cannot be encoded as CSV: {error}",
                kind="encoding",
            ) from error

    def record_fields(self, message: Any) -> int:
        """Return the number of the record's fields, by which readers refuse others."""
        return len(message)

    def with_uuid_of(self, message: Any, other: Any) -> Any:
        """Set the record's first field to that of another one."""
        message[0] = other[0]
        return message

    # -------------------------------------------------------------- decoding

    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[Any]:
        """Decode records: at once if possible, else one by one, which finds the bad one."""
        bulk = isinstance(framing, Csv) and bool(frames.ends)
        records = _records(buffer, frames) if bulk else None
        texts = None if records is None else _uuids_at_fixed_place(buffer, frames)
        if records is None or texts is None:
            return self._decode_each(framing.payloads(buffer, frames))
        try:
            made = self._made(records)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - of the class; the bad record is found one by one
            return self._decode_each(framing.payloads(buffer, frames))
        return Decoded(made, [record[0] for record in records], texts=texts)

    def _decode_each(self, payloads: list[bytes]) -> Decoded[Any]:
        records: list[Any] = []
        uuids: list[RawUuid] = []
        error: Exception | None = None
        for payload in payloads:
            try:
                record = _fields_of(payload.decode())
            except UnicodeDecodeError as cause:
                error = cause
                break
            try:
                uuid_of_text(record[0])
            except ValueError as cause:
                error = InvalidUuidError(len(records), str(cause))
                break
            uuid = record[0]
            try:
                [made] = self._made([record])
            except MemoryError:
                raise
            except Exception as cause:  # noqa: BLE001 - whatever its class raises
                error = cause
                break
            records.append(made)
            uuids.append(uuid)
        return Decoded(records, uuids, error)

    def _made(self, records: list[list[str]]) -> list[Any]:
        return records if self.message_type is list else call_each(self.message_type, records)

    # ------------------------------------------------------- acknowledgements

    def new_acknowledgement(self, message: Any, journal: str) -> Any:
        """Return the result of the record's own ``new_acknowledgement``, or empty fields."""
        own: Callable[[str], Any] | None = getattr(message, "new_acknowledgement", None)
        if not callable(own):
            return call(self.message_type, [""] * len(message))
        made = call(own, journal)
        if len(made) != len(message):
            raise ValidationError(
                f"an acknowledgement by {self.name} has {len(made)} fields, and its message"
                f" {len(message)}: readers refuse another number; return as many, all empty",
                kind="encoding",
            )
        return made


# ------------------------------------------------------------------- pieces


def _quoted(field: str) -> str:
    if _needs_quotes(field) is None:
        return field
    return '"' + field.replace('"', '""') + '"'


def _fields_of(record: str) -> list[str]:
    """Return the fields of one well-formed record."""
    return [
        quoted.replace('""', '"') if (quoted := found[1]) is not None else found[2]
        for found in _fields(record)
    ]


def _records(buffer: Buffer, frames: Frames) -> list[list[str]] | None:
    """Return the fields of all records at once; None if they must be parsed one by one."""
    try:
        text = str(memoryview(buffer)[frames.begins[0] : frames.ends[-1]], "utf-8")
    except UnicodeDecodeError:
        return None
    if "\r" in text:
        text = text.replace("\r\n", "\n") if '"' not in text else text
    if '"' not in text and "\r" not in text:
        records = [line.split(",") for line in text.split("\n") if line]
    else:
        try:
            records = [record for record in csv.reader(io.StringIO(text), strict=True) if record]
        except csv.Error:
            return None  # a field is too long for it, or has a return without quotes
    # Between frames there may be blank lines, or bad records.
    return records if len(records) == len(frames) else None


def _uuids_at_fixed_place(buffer: Buffer, frames: Frames) -> npt.NDArray[np.uint8] | None:
    """Return every record's UUID as rows of text; None if one is not in canonical form."""
    begins, ends = frames.arrays()
    if int((ends - begins).min()) <= TEXT_BYTES:
        return None
    content = np.frombuffer(buffer, dtype=np.uint8)
    if not np.isin(content[begins + TEXT_BYTES], _BEHIND_FIELD).all():
        return None
    texts = content[begins[:, None] + np.arange(TEXT_BYTES)]
    return None if parse_text_uuids(texts) is None else texts


_UUID_BYTES = 16


def find_protobuf(message_type: type[Any]) -> Kind[Any] | None:
    """Return the adapter of a generated protobuf class; None for any other class."""
    if not issubclass(message_type, Message) or message_type is Message:
        return None
    return ProtobufKind(message_type)


class ProtobufKind(Kind[Any]):
    """Kind of a generated protobuf class. Publishing a message sets its ``uuid``.

    Messages of a class without a field ``bytes uuid`` are decoded as messages without UUID.
    """

    form: ClassVar[str] = "protobuf"

    def __init__(self, message_type: type[Any]) -> None:
        super().__init__(message_type)
        field = message_type.DESCRIPTOR.fields_by_name.get("uuid")
        if field is None or field.type != FieldDescriptor.TYPE_BYTES or field.is_repeated:
            self.no_uuid = (
                f"{message_type.DESCRIPTOR.full_name} can carry no message UUID: give it a field"
                " `bytes uuid`; without one its messages can only be read with"
                " isolation=uncommitted, and from offsets instead of times"
            )
        parent = message_type.DESCRIPTOR.fields_by_name.get(PARENT_KEY)
        is_text = parent is not None and parent.type == FieldDescriptor.TYPE_STRING
        self._holds_parent = is_text and not parent.is_repeated

    def encode(self, message: Any, stamp: Stamp) -> bytes:
        """Set the message's ``uuid`` and serialize it."""
        message.uuid = stamp.raw()
        try:
            payload: bytes = message.SerializeToString()
        except (ProtobufEncodeError, ValueError) as error:
            raise ValidationError(
                f"{self.message_type.__qualname__} cannot be serialized: {error}", kind="encoding"
            ) from error
        return payload

    def with_parent(self, message: Any, payload: bytes, parent: str) -> bytes:
        """Return the message with the context in its field ``traceparent``, if it has one."""
        if not self._holds_parent or message.traceparent:
            return payload
        # Encoded fields that follow a message are part of it.
        return payload + bytes(self.message_type(traceparent=parent).SerializePartialToString())

    def parents(
        self, framing: Framing, buffer: Buffer, frames: Frames, messages: Sequence[Any]
    ) -> dict[int, str]:
        """Return the contexts of the fields ``traceparent``."""
        del framing, buffer, frames
        if not self._holds_parent:
            return {}
        texts = enumerate(message.traceparent for message in messages)
        return {index: text for index, text in texts if text and is_sampled(text)}

    def with_uuid_of(self, message: Any, other: Any) -> Any:
        """Set the message's ``uuid`` to that of another one."""
        message.ClearField("uuid")
        if other.uuid:
            message.uuid = other.uuid
        return message

    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[Any]:
        """Parse each payload."""
        messages: list[Any] = []
        parse = self.message_type.FromString
        error = None
        try:
            # Extending by an iterator keeps the messages before a bad payload.
            messages.extend(map(parse, framing.payloads(buffer, frames)))
        except ProtobufDecodeError as cause:
            error = cause
        if self.no_uuid:
            return Decoded(messages, [b""] * len(messages), error)
        # Only 16 bytes are taken; 36 bytes would be taken for text.
        uuids: list[RawUuid] = [message.uuid[:_UUID_BYTES] for message in messages]
        return Decoded(messages, uuids, error)

    def new_acknowledgement(self, message: Any, journal: str) -> Any:
        """Return an empty message, except required fields, which have their defaults."""
        del message, journal
        empty = self.message_type()
        _fill(empty)
        return empty


def _fill(message: Message) -> None:
    """Set required fields, of which a message of proto2 must have all."""
    for field in message.DESCRIPTOR.fields:
        if field.is_required and field.message_type is not None:
            part = getattr(message, field.name)
            part.SetInParent()
            _fill(part)
        elif field.is_required:
            setattr(message, field.name, field.default_value)
