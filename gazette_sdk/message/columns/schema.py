"""Schemas of columns, and the conversion of parsed columns to their types.

A parser takes all columns as nullable, at any depth: acknowledgements are empty, and lack every
column. What other messages lack is checked on its results. And it takes timestamps as texts, of
which pyarrow's parsers read some forms, and take their zones as they like.

:func:`schema_of` has the columns of a class of messages: each field's type as an Arrow type. Fields
of JSON classes have the type of their values, not of the JSON text: a ``datetime`` is a timestamp,
although its text is a string.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import msgspec.inspect as mi
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pydantic
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.message.columns.batches import METADATA_COLUMNS
from gazette_sdk.message.kinds import name_of, union_classes
from gazette_sdk.message.kinds.json import KEY

DECIMAL = pa.decimal128(38, 18)
"""Type of decimals whose digits are not bounded: as many after the point as Spark has."""

REMEDY = "give arrow() a pyarrow.Schema of the columns wanted"


def schema_of(message_type: type[Any]) -> pa.Schema:
    """Return the schema of all fields of a class, by the names that they have in journals.

    The field of the UUID is left out. All columns are nullable, as acknowledgements are empty.

    Raises:
        ConfigurationError: the class names no fields, or a field has no Arrow type.
    """
    if union_classes(message_type):
        raise ConfigurationError(
            f"{name_of(message_type)} has fields of several classes: {REMEDY}, or use one class"
        )
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
    """Yield the key and type of each field of a class, as it is written.

    Raises:
        ConfigurationError: the type of a field cannot be found.
    """
    if not issubclass(message_type, pydantic.BaseModel):
        found = mi.type_info(message_type)
        assert isinstance(found, (mi.StructType, mi.DataclassType))
        for each in found.fields:
            yield each.encode_name, each.type
        return
    for name, field in message_type.model_fields.items():
        if not field.exclude:
            key = field.serialization_alias or field.alias or name
            try:
                found = _decimal_of(field.metadata) or mi.type_info(field.annotation)
            except TypeError as error:  # an Enum of values of several types
                raise _Place(message_type, key).error(f"is of a type ({error})") from error
            yield key, found


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


Mask = npt.NDArray[np.bool_]
Seconds = npt.NDArray[np.int64]


def parsed_field(field: pa.Field) -> pa.Field:
    """Return a column as a parser takes it: nullable, with timestamps as texts."""
    return pa.field(field.name, _parsed_type(field.type))


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_map(kind):
        return pa.map_(_parsed_type(kind.key_type), parsed_field(kind.item_field))
    if pa.types.is_struct(kind):
        return pa.struct([parsed_field(field) for field in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(parsed_field(kind.value_field))
    if _is_list(kind):
        return pa.list_(parsed_field(kind.value_field), getattr(kind, "list_size", -1))
    return kind


def converted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a parsed column with the type of the schema.

    Args:
        array: the column, which begins at the first row of its buffers.
        kind: the type, of which the array has the parser's.

    Raises:
        ArrowInvalid: a text is no timestamp of the type.
    """
    if array.type == kind:
        return array
    if pa.types.is_timestamp(kind):
        return timestamps(array, kind)
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(kind):
        types = [field.type for field in kind]
        # Parts of what is null are null here; in the array itself they may have any value.
        parts = [converted(*each) for each in zip(array.flatten(), types, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=mask)
    if pa.types.is_map(kind):
        keys, items = (
            converted(part, each)
            for part, each in ((array.keys, kind.key_type), (array.items, kind.item_type))
        )
        return pa.MapArray.from_arrays(array.offsets, keys, items, type=kind, mask=mask)
    values = converted(array.values, kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=mask)
    make = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    return make.from_arrays(array.offsets, values, type=kind, mask=mask)


# ----------------------------------------------------------------- timestamps

_TIMESTAMP = (
    r"^(?P<day>\d{4}-\d{2}-\d{2})"
    r"(?:[Tt ](?P<minute>\d{2}:\d{2})(?::(?P<second>\d{2})(?:\.(?P<fraction>\d+))?)?"
    r"(?P<zone>[Zz]|[+-]\d{2}(?::?\d{2})?)?)?$"
)
_SCALES = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_NANOS = 10**9
_UTC = frozenset({"UTC", "Etc/UTC", "Z", "+00:00"})
_YEAR_1 = int(dt.datetime(1, 1, 1, tzinfo=dt.UTC).timestamp())


def timestamps(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return texts as timestamps, truncated to the unit of their type.

    Texts are of RFC 3339, of any number of digits, in any case, with or without the time, its
    seconds and its zone. One without a zone is a time of the column's zone. A column without a
    zone has none with one.

    Args:
        texts: an array of strings.
        kind: a type of timestamps.

    Raises:
        ArrowInvalid: one is no such text, or out of the type's range.
    """
    valid = texts.drop_null()
    found = None
    for parse in (_cast, _cast_local, _cast_cut):
        try:
            # A cast that fails takes ten times as long as one of the first text.
            parse(valid[:1], kind)
            found = parse(texts, kind)
            break
        except pa.ArrowInvalid:
            continue
    if found is None:
        found = _parsed_timestamps(texts, kind)
    first = pc.min(found)
    if first.is_valid and first.value < _YEAR_1 * _SCALES[kind.unit]:
        raise pa.ArrowInvalid("a timestamp is before the year 1")
    return found


def _cast(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    return texts.cast(kind)


def _cast_local(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return texts without a zone as timestamps of the column's."""
    local = texts.cast(pa.timestamp(kind.unit))
    if kind.tz is None or kind.tz in _UTC:
        return local.cast(pa.int64()).cast(kind)
    return pc.assume_timezone(local, kind.tz, ambiguous="earliest").cast(kind)


_PLACES = {"ms": 23, "us": 26, "ns": 29}
"""Index after the last digit of a unit."""


def _cast_cut(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return texts of UTC as timestamps, as Go writes them: with digits that their unit lacks."""
    place = _PLACES.get(kind.unit)
    if place is None:
        raise pa.ArrowInvalid("a text has a fraction")
    cut = pc.utf8_slice_codeunits(texts, place, -1)
    if not pc.all(pc.or_(pc.ascii_is_decimal(cut), pc.equal(cut, ""))).as_py():
        raise pa.ArrowInvalid("a text ends otherwise")
    return pc.utf8_replace_slice(texts, place, -1, "").cast(kind)


def _parsed_timestamps(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    parts = pc.extract_regex(texts, _TIMESTAMP)
    nulls = np.asarray(texts.is_null())
    wrong = np.flatnonzero(np.asarray(parts.is_null()) & ~nulls)
    if len(wrong):
        raise pa.ArrowInvalid(f"{texts[int(wrong[0])].as_py()!r} is no timestamp of RFC 3339")
    day, minute, second, fraction, zone = (each.fill_null("") for each in parts.flatten())
    time = pc.binary_join_element_wise(_filled(minute, "00:00"), _filled(second, "00"), ":")
    local = pc.binary_join_element_wise(_filled(day, "1970-01-01"), time, "T")
    seconds = np.asarray(local.cast(pa.timestamp("s")).cast(pa.int64()))
    digits = pc.utf8_slice_codeunits(pc.utf8_rpad(fraction, 9, "0"), 0, 9)
    nanos = np.asarray(digits.cast(pa.int64()))
    seconds = _in_utc(seconds, zone, kind.tz, nulls)
    scale = _SCALES[kind.unit]
    if bool((np.abs(seconds) > (2**63 - 1) // scale - 1).any()):
        raise pa.ArrowInvalid(f"a timestamp is out of the range of {kind}")
    values = seconds * scale + nanos // (_NANOS // scale)
    return pa.array(values, mask=nulls).cast(kind)


def _filled(texts: pa.Array, default: str) -> pa.Array:
    return pc.if_else(pc.equal(texts, ""), default, texts)


def _in_utc(seconds: Seconds, zones: pa.Array, own: str | None, nulls: Mask) -> Seconds:
    """Return local times as seconds of UTC.

    Args:
        seconds: local times.
        zones: their zones as they are written; empty for the column's.
        own: zone of the column; None if it has none.
        nulls: mask of what is no time.
    """
    found = zones.dictionary_encode()
    names = found.dictionary.to_pylist()
    indices = np.asarray(found.indices)
    if own is None:
        named = next((name for name in names if name), None)
        if named is not None:
            raise pa.ArrowInvalid(f"a timestamp has the zone {named!r}, and its column has none")
        return seconds
    seconds = seconds - np.array([_offset_s(name) for name in names], np.int64)[indices]
    absent = np.array([not name for name in names], np.bool_)[indices] & ~nulls
    if absent.any() and own not in _UTC:
        seconds[absent] = _from_zone(seconds[absent], own)
    return seconds


def _offset_s(zone: str) -> int:
    """Return the seconds by which a zone is ahead of UTC."""
    if len(zone) < 2:
        return 0
    hours, minutes = int(zone[1:3]), int(zone[-2:]) if len(zone) > 3 else 0
    if hours > 23 or minutes > 59:
        raise pa.ArrowInvalid(f"{zone!r} is no zone")
    return (hours * 3600 + minutes * 60) * (-1 if zone[0] == "-" else 1)


def _from_zone(seconds: Seconds, zone: str) -> Seconds:
    """Return local times of a zone as seconds of UTC; of two such, the earlier."""
    local = pa.array(seconds).cast(pa.timestamp("s"))
    try:
        assumed = pc.assume_timezone(local, zone, ambiguous="earliest")
        return np.asarray(assumed.cast(pa.int64()))
    except (
        pa.ArrowInvalid
    ):  # one is skipped by the begin of summer time, as Python and Java read it
        info = pa.lib.string_to_tzinfo(zone)
        epoch = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - of local times
        times = (epoch + dt.timedelta(seconds=each) for each in seconds.tolist())
        return np.array([int(each.replace(tzinfo=info).timestamp()) for each in times], np.int64)


# ------------------------------------------------------------------- NOT NULL


def holds_required(fields: Iterable[pa.Field]) -> bool:
    """Return True if a column, or a part of one, is not nullable."""
    return any(not field.nullable or holds_required(_parts(field.type)) for field in fields)


def _parts(kind: pa.DataType) -> list[pa.Field]:
    if pa.types.is_map(kind):
        return [kind.item_field]  # keys are never null
    if pa.types.is_struct(kind):
        return list(kind)
    return [kind.value_field] if _is_list(kind) else []


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_finite(column: pa.ChunkedArray) -> bool:
    """Return True if a column holds no NaN and no infinite number, at any depth."""
    return not holds_floats(column.type) or all(map(_is_finite_array, column.chunks))


def holds_floats(kind: pa.DataType) -> bool:
    """Return True if values of a type hold floating-point numbers, at any depth."""
    if pa.types.is_dictionary(kind):
        return holds_floats(kind.value_type)
    parts = (kind.field(at).type for at in range(kind.num_fields))
    return bool(pa.types.is_floating(kind)) or any(map(holds_floats, parts))


def _is_finite_array(array: pa.Array) -> bool:
    kind = array.type
    if not holds_floats(kind):
        return True
    if pa.types.is_floating(kind):
        return bool(np.isfinite(array.drop_null().to_numpy()).all())
    if pa.types.is_dictionary(kind):
        return _is_finite_array(array.dictionary_decode())
    if pa.types.is_struct(kind):
        return all(map(_is_finite_array, array.flatten()))
    if pa.types.is_map(kind):
        begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return all(_is_finite_array(each[begin:end]) for each in (array.keys, array.items))
    return _is_finite_array(array.flatten())


def first_lacking(
    fields: Iterable[pa.Field], columns: Mapping[str, pa.Array | None], needed: Mask
) -> tuple[int, str] | None:
    """Return the first row that lacks a value that is not nullable, and its column.

    Args:
        fields: the columns of the schema.
        columns: their arrays by name; a column without one is null in all rows.
        needed: mask of the rows that must have all values: those of no acknowledgement.
    """
    found: tuple[int, str] | None = None
    for field in fields:
        rows = np.flatnonzero(_lacks(columns.get(field.name), field, len(needed)) & needed)
        if len(rows) and (found is None or rows[0] < found[0]):
            found = int(rows[0]), field.name
    return found


def _lacks(array: pa.Array | None, field: pa.Field, count: int) -> Mask:
    """Return the mask of the rows that have a null where the field has none."""
    if array is None:
        return np.full(count, not field.nullable)
    nulls: Mask = np.asarray(array.is_null())
    kind = field.type
    found = np.zeros(count, np.bool_)
    if pa.types.is_struct(kind):
        for at, part in enumerate(kind):
            found |= _lacks(array.field(at), part, count)
    elif pa.types.is_map(kind) or _is_list(kind):
        [part] = _parts(kind)
        if pa.types.is_fixed_size_list(kind):
            parents = np.repeat(np.arange(count), kind.list_size)
            values = array.values[array.offset * kind.list_size :][: len(parents)]
        else:
            offsets = np.asarray(array.offsets)
            parents = np.repeat(np.arange(count), np.diff(offsets))
            values = array.items if pa.types.is_map(kind) else array.values
            values = values[int(offsets[0]) : int(offsets[-1])]
        found[parents[_lacks(values, part, len(parents))]] = True
    return found & ~nulls if field.nullable else found & ~nulls | nulls
