"""The data source ``gazette``: its schema and its readers."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from pyspark.sql import types as st
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from gazette_sdk.errors import ConfigurationError
from gazette_spark.batch import GazetteBatchReader
from gazette_spark.options import Options, load_message
from gazette_spark.sink import GazetteBatchWriter, GazetteStreamWriter
from gazette_spark.write_options import WriteOptions

__all__ = ["METADATA_FIELDS", "GazetteDataSource"]

METADATA_FIELDS = (
    st.StructField("_journal", st.StringType()),
    st.StructField("_offset", st.LongType()),
    st.StructField("_uuid", st.StringType()),
    st.StructField("_time", st.TimestampType()),
)


class GazetteDataSource(DataSource):
    """Data source of the messages of journals.

    Options: ``address`` or ``store``, ``journals``, ``framing`` (``json``, ``protobuf`` or a
    content type), ``message`` (``module:Class`` of a protobuf message), ``begin`` and ``end``
    (offsets by journal as JSON, or times), ``isolation``, ``fileRoot`` (the local
    directory of a broker's ``file://`` stores on the executors).
    """

    @classmethod
    def name(cls) -> str:
        """Return the short name of the format."""
        return "gazette"

    def schema(self) -> st.StructType:
        """Return the fields of the protobuf message and the metadata columns.

        Raises:
            ConfigurationError: messages are JSON, which has no schema.
        """
        options = Options.parse(self.options)
        if not options.message:
            raise ConfigurationError(
                "gazette: JSON messages have no schema; give one with .schema(…), which may have "
                "the metadata columns _journal string, _offset long, _uuid string, _time timestamp"
            )
        fields = _fields(load_message(options.message).DESCRIPTOR)
        return st.StructType([*fields, *METADATA_FIELDS])

    def reader(self, schema: st.StructType) -> DataSourceReader:
        """Return a reader of the current content of the journals."""
        return GazetteBatchReader(Options.parse(self.options), schema)

    def writer(self, schema: st.StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """Return a writer of rows as messages: all of them become visible, or none."""
        _refuse(overwrite=overwrite)
        return GazetteBatchWriter(WriteOptions.parse(self.options, schema, is_stream=False))

    def streamWriter(self, schema: st.StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802, FBT001 - Spark's signature
        """Return a writer of micro-batches, each as one transaction."""
        _refuse(overwrite=overwrite)
        return GazetteStreamWriter(WriteOptions.parse(self.options, schema, is_stream=True))


def _refuse(*, overwrite: bool) -> None:
    if overwrite:
        raise ConfigurationError(
            "gazette: journals are append-only; use .mode('append'), or outputMode 'append' or"
            " 'update' for a stream"
        )


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


def _fields(message: Any) -> list[st.StructField]:
    return [st.StructField(field.name, _type(field)) for field in message.fields]


def _type(field: Any) -> st.DataType:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields
        return st.MapType(_element(key), _element(value))
    element = _element(field)
    return st.ArrayType(element) if field.is_repeated else element


def _element(field: Any) -> st.DataType:
    if field.message_type is not None:
        return st.StructType(_fields(field.message_type))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        return st.BinaryType() if is_bytes else st.StringType()
    return _SCALARS[field.cpp_type]()
