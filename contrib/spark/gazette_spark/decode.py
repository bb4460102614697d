"""Blocks of frames to record batches, by the form of their messages."""

from __future__ import annotations

import uuid
from typing import Any

import pyarrow as pa
from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.protobuf.message import Message

from gazette_sdk.errors import ConfigurationError, DecodeError
from gazette_sdk.framing import Cut
from gazette_sdk.framing.registry import framing_for
from gazette_sdk.message.arrow import decode_json_block, decode_message_block
from gazette_spark.options import Options, load_message

__all__ = ["Decoder"]

_UUID_BYTES = 16


class Decoder:
    """Decodes blocks of one journal.

    Args:
        options: of the read; names the protobuf class.
        journal: the journal's name.
        content_type: of its framing.
        schema: columns wanted.

    Raises:
        ConfigurationError: messages of this framing cannot be read without the option ``message``.
    """

    def __init__(
        self, options: Options, journal: str, content_type: str, schema: pa.Schema
    ) -> None:
        self._framing = framing_for(content_type)
        self._journal = journal
        self._schema = schema
        self._message: type[Message] | None = None
        if self._framing.form == "json":
            return
        if not options.message:
            raise ConfigurationError(
                f"gazette: {journal} holds {content_type}; give the option message=module:Class"
            )
        self._message = load_message(options.message)

    def decode(self, cut: Cut) -> pa.RecordBatch:
        """The batch of a block's whole frames.

        Raises:
            DecodeError: a message cannot be decoded; names journal and offset.
        """
        if self._message is None:
            block = bytes(memoryview(cut.buffer)[: cut.frames.consumed])
            return decode_json_block(block, self._journal, cut.offset, self._schema)
        return self._decode_protobuf(cut, self._message)

    def _decode_protobuf(self, cut: Cut, message_type: type[Message]) -> pa.RecordBatch:
        rows, uuids = [], []
        starts = [cut.offset + begin for begin in cut.frames.begins]
        for start, payload in zip(
            starts, self._framing.payloads(cut.buffer, cut.frames), strict=True
        ):
            try:
                message = message_type.FromString(payload)
            except ProtobufDecodeError as error:
                raise DecodeError(
                    f"{self._journal}: the message at offset {start} is no "
                    f"{message_type.DESCRIPTOR.full_name}: {error}; check the option 'message'",
                    journal=self._journal,
                    offset=start,
                ) from error
            rows.append(_row(message))
            raw = getattr(message, "uuid", b"")
            uuids.append(
                str(uuid.UUID(bytes=raw))
                if isinstance(raw, bytes) and len(raw) == _UUID_BYTES
                else None
            )
        return decode_message_block(rows, uuids, starts, self._journal, self._schema)


def _row(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            row[field.name] = [
                (key, _value(field.message_type.fields[1], value[key])) for key in value
            ]
        elif field.is_repeated:
            row[field.name] = [_value(field, element) for element in value]
        elif field.has_presence and not message.HasField(field.name):
            row[field.name] = None
        else:
            row[field.name] = _value(field, value)
    return row


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return _row(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else str(value)
    return value
