"""The data source ``gazette``: its schema and its readers.

Spark plans the first query of a session in processes that begin without this package, one after the
other. So each part is imported where it is used: what the query does not need would delay it.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pyspark.sql import types as st
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from gazette_sdk.errors import ConfigurationError
from gazette_spark.options import Options, clear_errors, refuse_types

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa
    from pyspark.sql.datasource import Filter, InputPartition

    from gazette_spark.planning import Pruning, ReadTask

_PUSHDOWN = "pyspark.sql.worker.data_source_pushdown_filters"


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
        from gazette_spark.planning import list_content
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
        with clear_errors():
            refuse_types(schema)
            return batch_reader(Options.parse(self.options), schema)

    def streamReader(self, schema: st.StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        """Return a reader that follows the journals."""
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


# ------------------------------------------------------------------ batch reads


class GazetteBatchReader(DataSourceReader):
    """Reader of the content that exists when the query is planned.

    The driver splits journals into ranges, which tasks read.

    Args:
        options: options of the read.
        schema: requested columns.
    """

    def __init__(self, options: Options, schema: st.StructType) -> None:
        self._options = options
        self._schema = schema
        self._pruning: Pruning | None = None

    def partitions(self) -> list[ReadTask]:
        """Return the tasks that read all journals. Runs on the driver."""
        from gazette_sdk.transport import loop as sdk_loop
        from gazette_spark.planning import Pruning, list_content, ranges_of, tasks_of

        with clear_errors():
            contents = sdk_loop.run(list_content(self._options))
            return tasks_of(ranges_of(contents, self._options, self._pruning or Pruning()))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield record batches of a task. Runs in a worker of an executor."""
        from gazette_spark.planning import ReadTask
        from gazette_spark.range_read import read_ranges

        if isinstance(partition, ReadTask):  # else Spark made one, as there are no ranges
            with clear_errors():
                yield from read_ranges(self._options, self._schema, partition.ranges)


class _PushdownReader(GazetteBatchReader):
    """Batch reader that leaves out ranges by the filters of the query."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take notice of filters, and hand all of them back. Runs on the driver."""
        from gazette_spark.planning import Pruning

        self._pruning = Pruning.of(filters)
        return filters


def batch_reader(options: Options, schema: st.StructType) -> GazetteBatchReader:
    """Return a batch reader, which takes filters where Spark pushes them down.

    Where ``spark.sql.python.filterPushdown.enabled`` is off, Spark refuses readers that define
    ``pushFilters``. Only the process that pushes filters runs the module for that.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    pushes = _PUSHDOWN in sys.modules or (spec is not None and spec.name == _PUSHDOWN)
    return (_PushdownReader if pushes else GazetteBatchReader)(options, schema)
