"""Registry of the kinds of classes of messages."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, TypeVar

import msgspec
import pydantic

from gazette_sdk.errors import ValidationError
from gazette_sdk.message.kinds import others as csv_kind
from gazette_sdk.message.kinds import others as protobuf_kind
from gazette_sdk.message.kinds.base import JsonMessage, Kind
from gazette_sdk.message.kinds.json import DictKind, PydanticKind, TypedKind

M = TypeVar("M")


def kind_of(message_type: type[M], form: str, *, needs_uuid: bool = True) -> Kind[M]:
    """Return the adapter of a class.

    Args:
        message_type: class of the messages.
        form: form of payloads, ``"json"``, ``"protobuf"`` or ``"csv"``.
        needs_uuid: False if messages are only read, and not sequenced: protobuf classes then
            need no field of a UUID.

    Raises:
        ValidationError: objects of the class cannot hold a UUID, or have another form.
    """
    found = known_kind(message_type, needs_uuid=needs_uuid)
    if found.form != form:
        raise ValidationError(
            f"{message_type.__qualname__} is a {found.form} message, but the journal's framing"
            f" holds {form}; use {_CLASSES.get(form, 'another class')}, or a journal with another"
            " content-type label",
            kind="message_form",
        )
    return found


_CLASSES = {
    "json": "a dataclass on JsonMessage, a pydantic model, a msgspec Struct or a dict",
    "protobuf": "a generated protobuf class with a field `bytes uuid`",
    "csv": "CsvRecord or list",
}


_known: dict[type, Kind[Any]] = {}
"""Adapters by class. Classes of messages are never dropped."""


def known_kind(message_type: type[M], *, needs_uuid: bool = True) -> Kind[M]:
    """Return the adapter of a class, in the one form that its messages have.

    Raises:
        ValidationError: objects of the class cannot hold a UUID, see :func:`kind_of`.
    """
    if not isinstance(message_type, type):
        raise _no_class(message_type)
    found: Kind[M] = _known.get(message_type) or _made(message_type)
    if needs_uuid and found.no_uuid:
        raise ValidationError(found.no_uuid, kind="no_uuid")
    return found


def _no_class(given: object) -> ValidationError:
    origin = typing.get_origin(given)
    hint = f": derive a class from it, or use {origin.__name__}" if origin is not None else ""
    return ValidationError(f"{given!r} is no class of messages{hint}", kind="message_type")


def _made(message_type: type[M]) -> Kind[M]:
    found: Kind[M] | None = (
        _json_kind(message_type)
        or protobuf_kind.find_protobuf(message_type)
        or csv_kind.find_csv(message_type)
    )
    if found is None:
        raise ValidationError(
            f"{message_type.__qualname__} can carry no message UUID: use a dataclass on"
            " JsonMessage, a pydantic model, a msgspec Struct, a dict, a generated protobuf class,"
            " or, for CSV, a list",
            kind="no_uuid",
        )
    _known[message_type] = found
    return found


def _json_kind(message_type: type[Any]) -> Kind[Any] | None:
    """Return the adapter of a class of JSON messages; None for any other class.

    Raises:
        ValidationError: the class is of a JSON kind, but cannot hold a UUID.
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
