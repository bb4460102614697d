"""Protobuf messages to columns: each column at once, of the fields that are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor

__all__ = ["ProtobufColumns"]

Getter = Callable[[Any], Any]


class ProtobufColumns:
    """Converter of messages of a generated class to columns.

    Fields that are not set are null, or their defaults if they have no presence. Enums are
    the names of their values, messages are structs, maps are maps.

    Args:
        descriptor: descriptor of the messages' class.
        fields: columns wanted, with their types. One that is no field of the class is null.
    """

    def __init__(self, descriptor: Descriptor, fields: Iterable[pa.Field]) -> None:
        known = descriptor.fields_by_name
        self._columns = [
            (field, _getter(known[field.name])) for field in fields if field.name in known
        ]

    def columns(self, messages: Sequence[Any]) -> dict[str, pa.Array]:
        """Return the columns of messages, by name.

        Raises:
            ArrowInvalid: or another of pyarrow's errors: a field does not fit its column's type.
        """
        return {
            field.name: pa.array(list(map(get, messages)), type=field.type)
            for field, get in self._columns
        }


def _getter(field: FieldDescriptor) -> Getter:
    """Return a function that reads a field of a message, as Arrow takes it."""
    name = field.name
    is_plain = field.message_type is None and field.enum_type is None
    if is_plain and not field.is_repeated and not field.has_presence:
        return attrgetter(name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value_of = _converter(field.message_type.fields_by_name["value"])
        return lambda message: [
            (key, value_of(value)) for key, value in getattr(message, name).items()
        ]
    convert = _converter(field)
    if field.is_repeated:
        return lambda message: [convert(each) for each in getattr(message, name)]
    if field.has_presence:
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    return lambda message: convert(getattr(message, name))


def _converter(field: FieldDescriptor) -> Getter:
    """Return a function that converts one value of a field for Arrow."""
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return lambda value: names.get(value, str(value))
    if field.message_type is not None:
        return _Struct(field.message_type)
    return _itself


class _Struct:
    """Converter of messages to dicts. Its getters are made on first use: classes may recur."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self._getters: list[tuple[str, Getter]] | None = None

    def __call__(self, message: Any) -> dict[str, Any]:
        if self._getters is None:
            self._getters = [(each.name, _getter(each)) for each in self._descriptor.fields]
        return {name: get(message) for name, get in self._getters}


def _itself(value: Any) -> Any:
    return value
