"""The data source ``gazette``: its schema and its readers.

Spark plans the first query of a session in processes that begin without this package, one after the
other. So each part is imported where it is used: what the query does not need would delay it.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

from pyspark.sql import types as st
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from gazette_sdk.errors import ConfigurationError
from gazette_spark.failure import clear_errors


class GazetteDataSource(DataSource):
    """Data source of the messages of journals.

    Options: ``address`` or ``store``, ``journals``, ``framing`` (``json``, ``protobuf`` or a
    content type), ``message`` (``module:Class`` of the messages), ``isolation`` (``committed`` or
    ``uncommitted``), ``begin`` and ``end`` (offsets by journal as JSON, or times), ``mode`` and
    ``columnNameOfCorruptRecord`` (as of Spark's own sources), ``maxBytesPerTrigger`` and
    ``failOnDataLoss`` (of streams), ``fileRoot`` (the local directory of a broker's ``file://``
    stores on the executors).
    """

    @classmethod
    def name(cls) -> str:
        """Return the short name of the format."""
        return "gazette"

    def schema(self) -> st.StructType:
        """Return the fields of the messages' class, or of a sample, and the metadata columns.

        Raises:
            ConfigurationError: the class, or the sample, has no schema.
        """
        from gazette_sdk.transport import loop as sdk_loop
        from gazette_spark.content import list_content
        from gazette_spark.options import Options
        from gazette_spark.schema import (
            METADATA_FIELDS,
            fields_of_class,
            fields_of_messages,
            sample_of,
        )

        with clear_errors():
            options = Options.parse(self.options)
            if options.message:
                fields = fields_of_class(options.message)
            else:
                contents = sdk_loop.run(list_content(options))
                fields = fields_of_messages(sample_of(contents, options))
        if options.mode == "PERMISSIVE":
            fields = [*fields, st.StructField(options.corrupt_column, st.StringType())]
        return st.StructType([*fields, *METADATA_FIELDS])

    def reader(self, schema: st.StructType) -> DataSourceReader:
        """Return a reader of the current content of the journals."""
        from gazette_spark.batch import batch_reader
        from gazette_spark.options import Options, refuse_types

        with clear_errors():
            refuse_types(schema)
            return batch_reader(Options.parse(self.options), schema)

    def streamReader(self, schema: st.StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        """Return a reader that follows the journals."""
        from gazette_spark.options import Options, refuse_types
        from gazette_spark.stream import GazetteStreamReader

        with clear_errors():
            refuse_types(schema)
            return GazetteStreamReader(Options.parse(self.options), schema)

    def writer(self, schema: st.StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's
        """Return a writer of rows as messages: all of them become visible, or none."""
        from gazette_spark.sink import GazetteBatchWriter
        from gazette_spark.write_options import WriteOptions

        with clear_errors():
            _refuse(overwrite=overwrite)
            return GazetteBatchWriter(WriteOptions.parse(self.options, schema, is_stream=False))

    def streamWriter(self, schema: st.StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802, FBT001 - Spark's
        """Return a writer of micro-batches, each as one transaction."""
        from gazette_spark.sink import GazetteStreamWriter
        from gazette_spark.write_options import WriteOptions

        with clear_errors():
            _refuse(overwrite=overwrite)
            return GazetteStreamWriter(WriteOptions.parse(self.options, schema, is_stream=True))


def _refuse(*, overwrite: bool) -> None:
    if overwrite:
        raise ConfigurationError(
            "gazette: journals are append-only; use .mode('append'), or outputMode 'append' or"
            " 'update' for a stream"
        )
