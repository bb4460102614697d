"""Lakes: directories of Parquet files, ``LAKE/date=2026-01-31/hour=17/batch=42/*.parquet``.

``batch=A-B`` has what batches A to B had. Names that begin with an underscore are not data: readers
of Parquet pass over them. Files are reached as Spark reaches them, over Hadoop's file systems.

:func:`export` writes journals by the hour of each message, incrementally, and exactly once. A run
exports what came since the last one. Batches are those of a streaming query, whose checkpoint lies
in the lake, as ``_checkpoint``. A batch that is run again has the same rows, and overwrites its own
directories, so that a crash leaves neither gaps nor duplicates to readers.

:func:`compact` makes many exported batches of an hour one. The batches are written once more as
``batch=A-B``; then a plan in ``_compaction`` names them and that directory; then they are deleted,
and the plan. A plan that a crash left is completed by the next run, and a merged directory without
a plan is deleted. Between the first step and the last, readers can see rows twice. The newest batch
of the lake is left out, because its export may be run again.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everywhere in PySpark
from pyspark.sql.types import StructType

from gazette_sdk.errors import ConfigurationError

CHECKPOINT = "_checkpoint"

DIRECTORIES = ("date", "hour", "batch")
"""Columns by whose values rows lie in directories."""


@dataclass(frozen=True, slots=True)
class ExportedBatch:
    """Result of one batch.

    Attributes:
        batch: its number, which its directories have in their names.
        rows: number of messages.
        first: time of the oldest message, in UTC; ``None`` if no message has a time.
        last: time of the newest message.
    """

    batch: int
    rows: int
    first: dt.datetime | None
    last: dt.datetime | None


def export(
    spark: SparkSession,
    source: Mapping[str, str],
    lake: str,
    *,
    schema: StructType | str | None = None,
    on_batch: Callable[[ExportedBatch], None] | None = None,
) -> list[ExportedBatch]:
    """Export what journals have gained since the last run, and return its batches.

    Rows have the columns of the schema, the metadata columns ``_journal``, ``_offset``, ``_uuid``
    and ``_time`` that the schema names, and ``date`` and ``hour`` of ``_time`` in UTC.

    Args:
        spark: the session.
        source: options of the data source ``gazette``.
        lake: URL of the directory, used for one export only.
        schema: schema of the messages with ``_time``; by default that of the source.
        on_batch: called with the result of each batch when it is complete.

    Raises:
        ConfigurationError: the schema has no ``_time``, or a column that directories have.
        StreamingQueryException: a batch failed. The next run continues with that batch.
    """
    batches: list[ExportedBatch] = []

    def write(rows: DataFrame, batch: int) -> None:
        seen = Observation()
        observed = rows.observe(
            seen,
            F.count(F.lit(1)).alias("rows"),
            F.min("_time").alias("first"),
            F.max("_time").alias("last"),
        )
        (
            observed.withColumns({**_date_and_hour(), "batch": F.lit(batch)})
            .write.mode("overwrite")
            .option("partitionOverwriteMode", "dynamic")
            .partitionBy(*DIRECTORIES)
            .parquet(lake)
        )
        found = seen.get
        result = ExportedBatch(batch, found["rows"], found["first"], found["last"])
        batches.append(result)
        if on_batch is not None:
            on_batch(result)

    reader = spark.readStream.format("gazette").options(**source)
    stream = (reader.schema(schema) if schema is not None else reader).load()
    _check(stream.columns)
    query = (
        stream.writeStream.foreachBatch(write)
        .option("checkpointLocation", f"{lake.rstrip('/')}/{CHECKPOINT}")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return batches


def _check(columns: Sequence[str]) -> None:
    """Check that the columns of directories, which are added, replace none of the messages."""
    if "_time" not in columns:
        raise ConfigurationError("the schema has no column '_time timestamp', by which rows lie")
    if taken := [name for name in columns if name.lower() in DIRECTORIES]:
        raise ConfigurationError(
            f"the messages have a column {taken[0]!r}, and so have the directories of the lake:"
            " give a schema without it"
        )


def _date_and_hour() -> dict[str, Column]:
    """Return the columns of the date and the hour in UTC, whatever the session's time zone."""
    hours = F.floor(F.unix_seconds("_time") / 3600)
    days = F.floor(hours / 24).cast("int")
    return {
        "date": F.date_add(F.to_date(F.lit("1970-01-01")), days).cast("string"),
        "hour": F.lpad((hours % 24).cast("string"), 2, "0"),
    }


# ------------------------------------------------------------------ compaction

PLANS = "_compaction"

FILE_BYTES = 128 << 20
"""Size at which a merged directory gets another file: large enough to make opening it cheap, and
small enough for a task."""


@dataclass(frozen=True, slots=True)
class CompactedHour:
    """Result for one hour.

    Attributes:
        hour: path of the hour below the lake, ``date=…/hour=…``.
        batches: number of directories before.
        size_before: their size in bytes.
        size_after: size in bytes of the directory that replaces them.
    """

    hour: str
    batches: int
    size_before: int
    size_after: int


def compact(
    spark: SparkSession,
    lake: str,
    *,
    on_hour: Callable[[CompactedHour], None] | None = None,
) -> list[CompactedHour]:
    """Merge the batches of each hour into one, and return the hours that changed.

    One compaction of a lake may run at a time. Exports may run beside it.

    Args:
        spark: the session.
        lake: URL of the directory that ``export`` wrote.
        on_hour: called with the result of each hour when it is complete.

    Raises:
        ConfigurationError: the directory does not exist.
    """
    directory = Lake(spark, lake)
    if not directory.exists():
        raise ConfigurationError(
            f"the lake {lake} does not exist; give the directory that `gazette spark export` wrote"
        )
    for name in directory.names(f"{PLANS}/*.json"):
        _complete(directory, f"{PLANS}/{name}")
    batches = directory.batches()
    newest = max((batch.last for batch in batches), default=0)
    hours: list[CompactedHour] = []
    for hour, found in groupby(batches, key=attrgetter("hour")):
        inputs = _without_leftovers(directory, list(found))
        inputs = [batch for batch in inputs if batch.last < newest]
        if len(inputs) < 2:
            continue
        hours.append(_merge(spark, directory, hour, inputs))
        if on_hour is not None:
            on_hour(hours[-1])
    return hours


def _merge(
    spark: SparkSession, lake: Lake, hour: str, inputs: Sequence[BatchDirectory]
) -> CompactedHour:
    merged = BatchDirectory(hour, inputs[0].first, max(batch.last for batch in inputs))
    before = sum(lake.size_bytes(batch.path) for batch in inputs)
    rows = spark.read.option("mergeSchema", "true").parquet(
        *(lake.absolute(batch.path) for batch in inputs)
    )
    rows.coalesce(math.ceil(before / FILE_BYTES)).write.mode("overwrite").parquet(
        lake.absolute(merged.path)
    )
    plan = f"{PLANS}/{hour.replace('/', '-')}.json"
    lake.write_json(plan, {"merged": merged.path, "inputs": [batch.path for batch in inputs]})
    _complete(lake, plan)
    return CompactedHour(hour, len(inputs), before, lake.size_bytes(merged.path))


def _complete(lake: Lake, plan: str) -> None:
    """Delete what a plan says is merged, and the plan."""
    for path in lake.read_json(plan)["inputs"]:
        lake.delete(path)
    lake.delete(plan)


def _without_leftovers(lake: Lake, batches: Sequence[BatchDirectory]) -> list[BatchDirectory]:
    """Delete merged directories whose batches are still there, and return the others."""
    kept: list[BatchDirectory] = []
    for batch in batches:
        if any(
            other is not batch and batch.first <= other.first and other.last <= batch.last
            for other in batches
        ):
            lake.delete(batch.path)
        else:
            kept.append(batch)
    return kept


# ------------------------------------------------------------------ directories

_BATCH = re.compile(r"batch=(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class BatchDirectory:
    """Directory of the rows of one hour that one or more batches wrote.

    Attributes:
        hour: path of its hour below the lake, ``date=…/hour=…``.
        first: number of the first batch.
        last: number of the last batch.
    """

    hour: str
    first: int
    last: int

    @property
    def path(self) -> str:
        """Path below the lake."""
        batches = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.hour}/batch={batches}"

    @classmethod
    def parse(cls, path: str) -> BatchDirectory | None:
        """Return the directory of a path below the lake; ``None`` for another directory."""
        hour, _, name = path.rpartition("/")
        match = _BATCH.fullmatch(name)
        if match is None:
            return None
        first, last = match.groups()
        return cls(hour, int(first), int(last or first))


class Lake:
    """Directory of Parquet files, and the file system that has it.

    Args:
        spark: session whose Hadoop configuration has the credentials.
        url: URL of the directory, as for ``DataFrameReader.parquet``.
    """

    def __init__(self, spark: SparkSession, url: str) -> None:
        self.url = url.rstrip("/")
        jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no other way to its file systems
        self._hadoop = jvm.org.apache.hadoop.fs
        root = self._hadoop.Path(self.url)
        self._files: Any = root.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001
        self._root = str(self._files.makeQualified(root).toString()).rstrip("/")

    def exists(self) -> bool:
        """Return True if the directory is there; in an object store, if anything is below it."""
        return bool(self._files.exists(self._hadoop.Path(self._root)))

    def batches(self) -> list[BatchDirectory]:
        """Return the directories of batches, by hour and number."""
        found = self._files.globStatus(self._path("date=*/hour=*/batch=*")) or ()
        prefix = len(self._root) + 1
        paths = (str(status.getPath().toString())[prefix:] for status in found)
        batches = [batch for path in paths if (batch := BatchDirectory.parse(path)) is not None]
        return sorted(batches, key=lambda batch: (batch.hour, batch.first, batch.last))

    def absolute(self, path: str) -> str:
        """Return the URL of a path below the lake."""
        return f"{self.url}/{path}"

    def size_bytes(self, path: str) -> int:
        """Return the size of the files below a path."""
        return int(self._files.getContentSummary(self._path(path)).getLength())

    def files(self, path: str = "") -> Iterator[tuple[str, int]]:
        """Yield URL and size in bytes of each file of data below a path."""
        listing = self._files.listFiles(
            self._path(path) if path else self._hadoop.Path(self.url), True
        )
        while listing.hasNext():
            status = listing.next()
            url = str(status.getPath().toString())
            names = url[len(self._root) + 1 :].split("/")
            if not any(name.startswith(("_", ".")) for name in names):
                yield url, int(status.getLen())

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with all that is in it. It need not exist."""
        self._files.delete(self._path(path), True)

    def read_json(self, path: str) -> Any:
        """Return the JSON document of a file below the lake."""
        stream = self._files.open(self._path(path))
        try:
            return json.loads(bytes(stream.readAllBytes()))
        finally:
            stream.close()

    def write_json(self, path: str, document: Any) -> None:
        """Write a JSON document to a new file below the lake, which readers see when complete."""
        part = self._path(f"{path}.part")
        stream = self._files.create(part, True)
        try:
            stream.write(bytearray(json.dumps(document).encode()))
        finally:
            stream.close()
        self._files.rename(part, self._path(path))

    def names(self, pattern: str) -> list[str]:
        """Return the names of the files below the lake whose paths match a pattern."""
        found = self._files.globStatus(self._path(pattern)) or ()
        return sorted(str(status.getPath().getName()) for status in found)

    def _path(self, path: str) -> Any:
        return self._hadoop.Path(f"{self._root}/{path}")
