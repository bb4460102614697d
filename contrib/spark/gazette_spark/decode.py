"""Decoding of blocks of frames to record batches."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.protobuf.message import Message

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.framing import Cut, Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.framing.registry import framing_for
from gazette_sdk.message.columns.decoders import BlockDecoder
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.kinds.base import Decoded, Kind
from gazette_sdk.message.kinds.protobuf_kind import ProtobufKind
from gazette_sdk.message.uuid import RawUuid
from gazette_spark.options import Options, load_message

__all__ = ["Decoder"]

_CLASSES: dict[str, type] = {"json": dict, "csv": list}


class Decoder:
    """Decoder of the blocks of one journal.

    Args:
        options: options of the read, with the protobuf class.
        journal: the journal's name.
        content_type: content type of its framing.
        schema: requested columns.

    Raises:
        ConfigurationError: messages of this framing cannot be read without the option ``message``.
    """

    def __init__(
        self, options: Options, journal: str, content_type: str, schema: pa.Schema
    ) -> None:
        framing = framing_for(content_type)
        if framing.form not in _CLASSES and not options.message:
            raise ConfigurationError(
                f"gazette: {journal} holds {content_type}; give the option message=module:Class"
            )
        if framing.form in _CLASSES:
            kind: Kind[Any] = kind_of(_CLASSES[framing.form], framing.form)
        else:
            kind = _protobuf_kind(load_message(options.message))
        self._blocks = BlockDecoder(journal, framing, kind, schema)

    def decode(self, cut: Cut) -> pa.RecordBatch:
        """Return the record batch of a block's whole frames.

        Raises:
            DecodeError: a message cannot be decoded; it names journal and offset.
        """
        return self._blocks.decode(cut)


def _protobuf_kind(message_type: type[Message]) -> ProtobufKind:
    if "uuid" in message_type.DESCRIPTOR.fields_by_name:
        return ProtobufKind(message_type)
    return _WithoutUuid(message_type)


class _WithoutUuid(ProtobufKind):
    """Kind of a protobuf class without a field for the UUID. It can be read, but not published."""

    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[Any]:
        """Parse each payload."""
        messages: list[Any] = []
        error = None
        try:
            messages.extend(map(self.message_type.FromString, framing.payloads(buffer, frames)))
        except ProtobufDecodeError as cause:
            error = cause
        uuids: list[RawUuid] = [None] * len(messages)
        return Decoded(messages, uuids, error)
