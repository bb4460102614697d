"""Journals to Parquet, by the hour of each message: incremental, and exactly once.

A run exports what came since the last one. Batches are those of a streaming query, whose
checkpoint lies in the lake, as ``_checkpoint``. A batch that is run again has the same rows, and
overwrites its own directories, so that a crash leaves neither gaps nor duplicates to readers.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
