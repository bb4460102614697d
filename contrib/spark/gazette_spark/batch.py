"""Batch reads: the driver splits journals into ranges, which tasks read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from gazette_sdk.transport import loop as sdk_loop
from gazette_spark.content import list_content
from gazette_spark.failure import clear_errors
from gazette_spark.options import Options
from gazette_spark.planning import Pruning, ReadTask, ranges_of, tasks_of

_PUSHDOWN = "pyspark.sql.worker.data_source_pushdown_filters"


class GazetteBatchReader(DataSourceReader):
    """Reader of the content that exists when the query is planned.

    Args:
        options: options of the read.
        schema: requested columns.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._pruning = Pruning()

    def partitions(self) -> list[ReadTask]:
        """Return the tasks that read all journals. Runs on the driver."""
        with clear_errors():
            contents = sdk_loop.run(list_content(self._options))
            return tasks_of(ranges_of(contents, self._options, self._pruning))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield record batches of a task. Runs in a worker of an executor."""
        from gazette_spark.range_read import read_ranges  # noqa: PLC0415 - not for planning

        if isinstance(partition, ReadTask):  # else Spark made one, as there are no ranges
            with clear_errors():
                yield from read_ranges(self._options, self._schema, partition.ranges)


class _PushdownReader(GazetteBatchReader):
    """Batch reader that leaves out ranges by the filters of the query."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take notice of filters, and hand all of them back. Runs on the driver."""
        self._pruning = Pruning.of(filters)
        return filters


def batch_reader(options: Options, schema: StructType) -> GazetteBatchReader:
    """Return a batch reader, which takes filters where Spark pushes them down.

    Where ``spark.sql.python.filterPushdown.enabled`` is off, Spark refuses readers that define
    ``pushFilters``. Only the process that pushes filters runs the module for that.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    pushes = _PUSHDOWN in sys.modules or (spec is not None and spec.name == _PUSHDOWN)
    return (_PushdownReader if pushes else GazetteBatchReader)(options, schema)
