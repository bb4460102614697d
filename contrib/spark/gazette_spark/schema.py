"""Schemas of messages: of their class, or of a sample of JSON messages."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pyspark.sql import types as st
from pyspark.sql.pandas.types import from_arrow_schema

from gazette_sdk import Reader
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.message.columns.schema import schema_of as arrow_schema_of
from gazette_sdk.transport import Transport
from gazette_sdk.transport import loop as sdk_loop
from gazette_spark.options import Options, load_message, open_transport
from gazette_spark.planning import JournalContent, range_of
from gazette_spark.range_read import RangeTransport

METADATA_FIELDS = (
    st.StructField("_journal", st.StringType()),
    st.StructField("_offset", st.LongType()),
    st.StructField("_uuid", st.StringType()),
    st.StructField("_time", st.TimestampType()),
)

SAMPLE_MESSAGES = 1000
"""Messages of a journal from which a schema is inferred."""

SAMPLE_JOURNALS = 8
"""Journals from which a schema is inferred."""

# ------------------------------------------------------------------- classes


def fields_of_class(message: str) -> list[st.StructField]:
    """Return the columns of the class ``module:Class`` of messages.

    Raises:
        ConfigurationError: the class cannot be loaded, or a field has no type in Spark.
    """
    found = load_message(message, needs_uuid=False)
    if issubclass(found, Message):
        return _protobuf_fields(found.DESCRIPTOR)
    try:
        return list(from_arrow_schema(arrow_schema_of(found), prefer_timestamp_ntz=True).fields)
    except TypeError as error:  # of pyspark: a type of Arrow that Spark does not have
        raise ConfigurationError(
            f"gazette: message {message!r} has a field that has no type in Spark ({error}); give"
            " a schema of the columns wanted with .schema(…)"
        ) from error


_SCALARS: dict[int, type[st.DataType]] = {
    FieldDescriptor.CPPTYPE_INT32: st.IntegerType,
    FieldDescriptor.CPPTYPE_INT64: st.LongType,
    FieldDescriptor.CPPTYPE_UINT32: st.LongType,
    FieldDescriptor.CPPTYPE_UINT64: st.LongType,
    FieldDescriptor.CPPTYPE_DOUBLE: st.DoubleType,
    FieldDescriptor.CPPTYPE_FLOAT: st.FloatType,
    FieldDescriptor.CPPTYPE_BOOL: st.BooleanType,
    FieldDescriptor.CPPTYPE_ENUM: st.StringType,
}


def _protobuf_fields(message: Any) -> list[st.StructField]:
    return [st.StructField(field.name, _protobuf_type(field)) for field in message.fields]


def _protobuf_type(field: Any) -> st.DataType:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields
        return st.MapType(_protobuf_element(key), _protobuf_element(value))
    element = _protobuf_element(field)
    return st.ArrayType(element) if field.is_repeated else element


def _protobuf_element(field: Any) -> st.DataType:
    if field.message_type is not None:
        return st.StructType(_protobuf_fields(field.message_type))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        return st.BinaryType() if is_bytes else st.StringType()
    return _SCALARS[field.cpp_type]()


# -------------------------------------------------------------------- samples


def sample_of(contents: Iterable[JournalContent], options: Options) -> Iterator[dict[str, Any]]:
    """Yield the first JSON messages of the first journals that hold content. It blocks.

    Raises:
        ConfigurationError: a journal holds other messages than JSON.
        GazetteError: reading failed.
    """
    transport = open_transport(options.url)
    try:
        for content in islice((each for each in contents if each.cover), SAMPLE_JOURNALS):
            yield from _sample_of(transport, content, options)
    finally:
        sdk_loop.run(transport.aclose())


def _sample_of(
    transport: Transport, content: JournalContent, options: Options
) -> Iterator[dict[str, Any]]:
    if options.message_type(content.name, content.content_type(options)) is not dict:
        raise ConfigurationError(
            f"gazette: {content.name} holds no JSON; give a schema with .schema(…)"
        )
    end = content.readable_end(content.cover.begin)
    part = range_of(content, options, content.cover.begin, end)
    with Reader(
        dict,
        name=part.journal,
        transport=RangeTransport(transport, options, part),
        isolation="uncommitted",
        offsets={part.journal: part.begin},
        end_offsets={part.journal: part.end},
        on_error="raise" if options.mode == "FAILFAST" else "skip",
    ) as reader:
        yield from (envelope.message for envelope in islice(reader, SAMPLE_MESSAGES))


def fields_of_messages(messages: Iterable[dict[str, Any]]) -> list[st.StructField]:
    """Return the columns of JSON messages, without their UUIDs.

    Types are those that Spark infers for JSON: of numbers long or double, of objects structs, and
    string of what is always null, or of several types. Objects that are always empty have no
    column.

    Raises:
        ConfigurationError: there are no messages.
    """
    found: st.DataType = st.StructType([])
    is_empty = True
    for message in messages:
        is_empty = False
        found = _merged(found, _type_of(message))
    if is_empty:
        raise ConfigurationError(
            "gazette: the journals hold no messages from which a schema could be inferred; give one"
            " with .schema(…), which may have the metadata columns _journal string, _offset long,"
            " _uuid string, _time timestamp"
        )
    assert isinstance(found, st.StructType)
    reserved = {"uuid", *(field.name for field in METADATA_FIELDS)}
    return [field for field in _known(found.fields) if field.name.lower() not in reserved]


def _type_of(value: object) -> st.DataType:
    if isinstance(value, list):
        nothing: st.DataType = st.NullType()
        return st.ArrayType(functools.reduce(_merged, map(_type_of, value), nothing))
    if isinstance(value, dict):
        return st.StructType([st.StructField(key, _type_of(each)) for key, each in value.items()])
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return st.DoubleType()
    return _JSON_TYPES[type(value)]()


_JSON_TYPES: dict[type, type[st.DataType]] = {
    type(None): st.NullType,
    bool: st.BooleanType,
    int: st.LongType,
    float: st.DoubleType,
    str: st.StringType,
}


def _merged(one: st.DataType, other: st.DataType) -> st.DataType:
    """Return the type of the values of two types: string if they have nothing in common."""
    if one == other or isinstance(other, st.NullType):
        return one
    if isinstance(one, st.NullType):
        return other
    if {type(one), type(other)} == {st.LongType, st.DoubleType}:
        return st.DoubleType()
    if isinstance(one, st.ArrayType) and isinstance(other, st.ArrayType):
        return st.ArrayType(_merged(one.elementType, other.elementType))
    if isinstance(one, st.StructType) and isinstance(other, st.StructType):
        types = {field.name: field.dataType for field in one.fields}
        for field in other.fields:
            types[field.name] = _merged(types.get(field.name, st.NullType()), field.dataType)
        return st.StructType([st.StructField(name, kind) for name, kind in types.items()])
    return st.StringType()


def _known(fields: Iterable[st.StructField]) -> list[st.StructField]:
    """Return fields with strings in place of what is always null, and without empty structs."""
    found = [(field.name, _without_nulls(field.dataType)) for field in fields]
    return [st.StructField(name, kind) for name, kind in found if kind is not None]


def _without_nulls(kind: st.DataType) -> st.DataType | None:
    if isinstance(kind, st.NullType):
        return st.StringType()
    if isinstance(kind, st.ArrayType):
        element = _without_nulls(kind.elementType)
        return None if element is None else st.ArrayType(element)
    if isinstance(kind, st.StructType):
        fields = _known(kind.fields)
        return st.StructType(fields) if fields else None
    return kind
