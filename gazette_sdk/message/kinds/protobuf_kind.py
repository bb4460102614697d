"""Kind of protobuf messages: the UUID is their field ``bytes uuid`` (message section 7)."""

from __future__ import annotations

from typing import Any, ClassVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.protobuf.message import EncodeError as ProtobufEncodeError
from google.protobuf.message import Message

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.kinds.base import Decoded, Kind
from gazette_sdk.message.uuid import RawUuid, Stamp

__all__ = ["ProtobufKind", "find"]


_UUID_BYTES = 16


def find(message_type: type[Any]) -> Kind[Any] | None:
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
