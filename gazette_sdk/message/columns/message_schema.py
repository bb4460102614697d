"""Schemas of the columns of classes of messages: each field's type as an Arrow type.

Fields of JSON classes have the type of their values, not of the JSON text: a ``datetime`` is a
timestamp, although its text is a string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import msgspec.inspect as mi
import pyarrow as pa
import pydantic
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.message.columns.metadata import METADATA_COLUMNS
from gazette_sdk.message.kinds.json_kind import KEY

__all__ = ["schema_of"]

DECIMAL = pa.decimal128(38, 18)
"""Type of decimals whose digits are not bounded: as many behind the point as Spark has."""

REMEDY = "give arrow() a pyarrow.Schema of the columns wanted"


def schema_of(message_type: type[Any]) -> pa.Schema:
    """Return the schema of all fields of a class, by the names that they have in journals.

    The field of the UUID is left out. All columns are nullable, as acknowledgements are empty.

    Raises:
        ConfigurationError: the class names no fields, or a field has no Arrow type.
    """
    if issubclass(message_type, Message):
        fields = list(_protobuf_fields(cast("Descriptor", message_type.DESCRIPTOR), ()))
        fields = [each for each in fields if (each.name, each.type) != ("uuid", pa.binary())]
    elif issubclass(message_type, (dict, list)):
        raise ConfigurationError(
            f"{message_type.__qualname__} names no fields: {REMEDY}, or use a class with fields"
        )
    else:
        key = getattr(message_type, "uuid_field", KEY)
        fields = [
            pa.field(name, _json_type(_Place(message_type, name), found))
            for name, found in _json_fields(message_type)
            if name != key
        ]
    for field in fields:
        if field.name in METADATA_COLUMNS:
            raise ConfigurationError(
                f"field {field.name!r} of {message_type.__qualname__} has the name of a metadata"
                f" column: rename it in the class, or {REMEDY}"
            )
    if not fields:
        raise ConfigurationError(
            f"{message_type.__qualname__} has no field but its UUID: {REMEDY}, such as _offset"
        )
    return pa.schema(fields)


class _Place(NamedTuple):
    """Place of a type: a field of the class of messages, and the classes within, outermost first.

    Raises errors that name the field.
    """

    message_type: type[Any]
    field: str
    within: tuple[object, ...] = ()

    def inside(self, cls: object, field: str) -> _Place:
        """Return the place of a field of a class that is part of this place's type."""
        if cls is self.message_type or cls in self.within:
            raise self.error(f"is recursive in {getattr(cls, '__qualname__', cls)}")
        return self._replace(field=f"{self.field}.{field}", within=(*self.within, cls))

    def error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"field {self.field!r} of {self.message_type.__qualname__} {problem}, which has no"
            f" Arrow type: {REMEDY}, without this one or with a type of your choice"
        )


# ---------------------------------------------------------------------- JSON

_PLAIN: dict[type[mi.Type], pa.DataType] = {
    mi.BoolType: pa.bool_(),
    mi.IntType: pa.int64(),
    mi.FloatType: pa.float64(),
    mi.StrType: pa.string(),
    mi.BytesType: pa.binary(),
    mi.ByteArrayType: pa.binary(),
    mi.DateTimeType: pa.timestamp("us", tz="UTC"),
    mi.DateType: pa.date32(),
    mi.TimeType: pa.time64("us"),
    mi.TimeDeltaType: pa.duration("us"),
    mi.UUIDType: pa.string(),
    mi.DecimalType: DECIMAL,
    mi.NoneType: pa.null(),
}

_PYDANTIC: dict[type[Any], pa.DataType] = {
    **dict.fromkeys(
        (
            pydantic.AwareDatetime,
            pydantic.NaiveDatetime,
            pydantic.PastDatetime,
            pydantic.FutureDatetime,
        ),
        pa.timestamp("us", tz="UTC"),
    ),
    **dict.fromkeys((pydantic.PastDate, pydantic.FutureDate), pa.date32()),
}
"""Types of pydantic's own classes, where these are no aliases of Python's."""


def _json_fields(message_type: type[Any]) -> Iterator[tuple[str, mi.Type | pa.DataType]]:
    """Yield the key and type of each field of a class, as it is written."""
    if not issubclass(message_type, pydantic.BaseModel):
        found = mi.type_info(message_type)
        assert isinstance(found, (mi.StructType, mi.DataclassType))
        for each in found.fields:
            yield each.encode_name, each.type
        return
    for name, field in message_type.model_fields.items():
        if not field.exclude:
            key = field.serialization_alias or field.alias or name
            yield key, _decimal_of(field.metadata) or mi.type_info(field.annotation)


def _decimal_of(metadata: Iterable[Any]) -> pa.DataType | None:
    """Return the type of a decimal whose digits pydantic bounds; None for anything else."""
    for each in metadata:
        digits, places = getattr(each, "max_digits", None), getattr(each, "decimal_places", None)
        if digits is not None and places is not None and 0 <= places <= digits <= DECIMAL.precision:
            return pa.decimal128(digits, places)
    return None


def _json_type(place: _Place, found: mi.Type | pa.DataType) -> pa.DataType:
    """Return the Arrow type of a field.

    Raises:
        ConfigurationError: there is none.
    """
    if isinstance(found, mi.Metadata):
        found = found.type
    plain = found if isinstance(found, pa.DataType) else _PLAIN.get(type(found))
    if plain is not None:
        return plain
    for kinds, make in _COMPOSED:
        if isinstance(found, kinds):
            return make(place, found)
    return _of_class(place, found)


def _of_class(place: _Place, found: mi.Type) -> pa.DataType:
    """Return the struct of a class that is part of a message's."""
    if isinstance(found, (mi.StructType, mi.DataclassType, mi.TypedDictType)):
        if isinstance(found, mi.StructType) and found.array_like:
            raise place.error(f"is {found.cls.__qualname__}, which is written as an array")
        return pa.struct(
            [
                (each.encode_name, _json_type(place.inside(found.cls, each.encode_name), each.type))
                for each in found.fields
            ]
        )
    if isinstance(found, mi.CustomType):
        if found.cls in _PYDANTIC:
            return _PYDANTIC[found.cls]
        if isinstance(found.cls, type) and issubclass(found.cls, pydantic.BaseModel):
            return pa.struct(
                [
                    (name, _json_type(place.inside(found.cls, name), each))
                    for name, each in _json_fields(found.cls)
                ]
            )
        raise place.error(f"is {getattr(found.cls, '__qualname__', found.cls)}")
    raise place.error(f"is {type(found).__name__.removesuffix('Type')}")


def _of_union(place: _Place, found: mi.UnionType) -> pa.DataType:
    """Return the type of a union: of its one member beside None, or of floats for numbers."""
    types = [_json_type(place, each) for each in found.types if not isinstance(each, mi.NoneType)]
    if set(types) == {pa.int64(), pa.float64()}:
        return pa.float64()
    return _same(place, types)


def _same(place: _Place, types: list[pa.DataType]) -> pa.DataType:
    if len(set(types)) != 1:
        raise place.error(f"has values of several types ({', '.join(map(str, types))})")
    return types[0]


def _of_values(place: _Place, values: Iterable[Any]) -> pa.DataType:
    """Return the type of the values of an enum, which are what is written."""
    plain = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    types = []
    for value in values:
        base = next((each for each in plain if isinstance(value, each)), None)
        if value is None:
            continue
        if base is None:
            raise place.error(f"has the value {value!r}")
        types.append(plain[base])
    return _same(place, types)


def _of_map(place: _Place, found: mi.DictType) -> pa.DataType:
    key, value = (_json_type(place, each) for each in (found.key_type, found.value_type))
    return pa.map_(key, value)


_COMPOSED: list[tuple[Any, Callable[[_Place, Any], pa.DataType]]] = [
    (mi.UnionType, _of_union),
    (mi.EnumType, lambda place, found: _of_values(place, [each.value for each in found.cls])),
    (mi.LiteralType, lambda place, found: _of_values(place, found.values)),
    (mi.CollectionType, lambda place, found: pa.list_(_json_type(place, found.item_type))),
    (
        mi.TupleType,
        lambda place, found: pa.list_(
            _same(place, [_json_type(place, each) for each in found.item_types])
        ),
    ),
    (mi.DictType, _of_map),
]
"""Types with parts, and the functions of their Arrow types."""


# ------------------------------------------------------------------ protobuf

_PROTOBUF: dict[int, pa.DataType] = {
    FieldDescriptor.CPPTYPE_INT32: pa.int32(),
    FieldDescriptor.CPPTYPE_INT64: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT32: pa.uint32(),
    FieldDescriptor.CPPTYPE_UINT64: pa.uint64(),
    FieldDescriptor.CPPTYPE_DOUBLE: pa.float64(),
    FieldDescriptor.CPPTYPE_FLOAT: pa.float32(),
    FieldDescriptor.CPPTYPE_BOOL: pa.bool_(),
    FieldDescriptor.CPPTYPE_ENUM: pa.string(),
    FieldDescriptor.CPPTYPE_STRING: pa.string(),
}


def _protobuf_fields(descriptor: Descriptor, within: tuple[str, ...]) -> Iterator[pa.Field]:
    """Yield the columns of a message's fields."""
    for field in descriptor.fields:
        yield pa.field(field.name, _protobuf_type(field, (*within, descriptor.full_name)))


def _protobuf_type(field: FieldDescriptor, within: tuple[str, ...]) -> pa.DataType:
    """Return the type of a field of the innermost of nested messages.

    Raises:
        ConfigurationError: the field's message holds itself.
    """
    message = field.message_type
    if message is None:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        found = pa.binary() if is_bytes else _PROTOBUF[field.cpp_type]
    elif message.GetOptions().map_entry:
        key, value = (_protobuf_type(each, within) for each in message.fields)
        return pa.map_(key, value)
    elif message.full_name in within:
        raise ConfigurationError(
            f"field {field.name!r} of {within[-1]} is recursive in {message.full_name}, which has"
            f" no Arrow type: {REMEDY}, without this one"
        )
    else:
        found = pa.struct(list(_protobuf_fields(message, within)))
    return pa.list_(found) if field.is_repeated else found
