"""Kinds of JSON messages: dicts, dataclasses and msgspec Structs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.kinds.base import Decoded
from gazette_sdk.message.kinds.fixed_place import acknowledging, raw_texts
from gazette_sdk.message.kinds.json_kind import (
    BULK_MIN,
    DECODE_ERRORS,
    KEY,
    JsonKind,
    checked,
    decode_lines,
    decode_object,
    encode,
    encoded_lines,
)
from gazette_sdk.message.uuid import RawUuid, is_uuid_text

__all__ = ["DictKind", "TypedKind"]

decode_dicts = msgspec.json.Decoder(dict).decode_lines


class DictKind(JsonKind):
    """Kind of dicts. The UUID is no part of a dict: it is spliced in, and removed."""

    def __init__(self, message_type: type[Any]) -> None:
        super().__init__(message_type, decode_object, key=KEY)

    def _dumps(self, message: Any) -> bytes:
        if KEY in message:
            message = {key: value for key, value in message.items() if key != KEY}
        return encode(message)

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
        message = self._loads(payload)
        raw = message.pop(KEY, None)
        if raw is not None:
            return message, checked(raw)
        lower = message.get("uuid")
        return message, lower if is_uuid_text(lower) else None

    def new_acknowledgement(self, message: Any, journal: str) -> Any:
        """Return an empty dict."""
        del message, journal
        return {}


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
        super().__init__(
            message_type,
            decoder.decode,
            key=key,
            field=names.get(key),
            strict=bool(strict),
            names=names,
        )
        self._decode_lines = decoder.decode_lines
        if callable(getattr(message_type, "validate", None)):
            self.validate = call_validate

    def _lines(self, messages: Sequence[Any]) -> bytes | None:
        return encoded_lines(messages)

    def decode(self, framing: Framing, buffer: Buffer, frames: Frames) -> Decoded[Any]:
        """Decode a run of lines in one call; in several, if it holds empty acknowledgements."""
        if self._strips or not framing.newline_delimited:
            return super().decode(framing, buffer, frames)
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
                    messages += self._decode_lines(view[begins[at] : ends[index - 1]])
                if index < len(frames):
                    line = bytes(view[begins[index] : ends[index] - 1])
                    messages.append(self._decode_one(line)[0])
                at = index + 1
        except DECODE_ERRORS:
            return None
        return messages if len(messages) == len(frames) else None


def call_validate(message: Any) -> object:
    return message.validate()
