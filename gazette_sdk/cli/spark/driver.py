"""Program that ``spark-submit`` runs: one pipeline, its progress and its summary.

Its argument is a JSON array of the pipeline's name, the format of the summary, and its options.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from gazette_sdk.cli.formats import iec_bytes, write_table
from gazette_sdk.cli.spark.settings import (
    BackfillSettings,
    CompactSettings,
    ExportSettings,
    ReconcileSettings,
    WordCountSettings,
)
from gazette_sdk.errors import GazetteError
from gazette_spark import GazetteDataSource, pipelines

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["main"]

METADATA = "_journal string, _offset long, _uuid string, _time timestamp"

R = TypeVar("R", bound="DataclassInstance")

Rows = tuple[Sequence[str], Sequence[Sequence[Any]]]
"""Headers and rows of a summary."""


def main(arguments: Sequence[str]) -> int:
    """Run a pipeline and print its summary; return the exit status."""
    name, output, options = json.loads(arguments[0])
    spark = SparkSession.builder.getOrCreate()
    try:
        spark.dataSource.register(GazetteDataSource)
        (headers, rows), status = PIPELINES[name](spark, options)
    except (GazetteError, PySparkException) as error:
        sys.stderr.write(f"gazette spark {name}: {_last_line(error)}\n")
        return 1
    finally:
        spark.stop()
    if output == "json":
        for row in rows:
            record = dict(zip(headers, row, strict=True))
            sys.stdout.write(f"{json.dumps(record, default=str)}\n")
    else:
        write_table(
            headers, [[_cell(*cell) for cell in zip(headers, row, strict=True)] for row in rows]
        )
    return status


def _export(spark: SparkSession, options: Mapping[str, Any]) -> tuple[Rows, int]:
    settings = ExportSettings.model_validate(options)
    schema = f"{settings.columns}, {METADATA}" if settings.columns else None
    return _told(
        pipelines.ExportedBatch,
        lambda batch: f"batch {batch.batch}: {batch.rows} messages",
        lambda tell: pipelines.export(
            spark, settings.source(), settings.lake, schema=schema, on_batch=tell
        ),
    )


def _compact(spark: SparkSession, options: Mapping[str, Any]) -> tuple[Rows, int]:
    settings = CompactSettings.model_validate(options)
    return _told(
        pipelines.CompactedHour,
        lambda hour: f"{hour.hour}: {hour.batches} batches merged",
        lambda tell: pipelines.compact(spark, settings.lake, on_hour=tell),
    )


def _backfill(spark: SparkSession, options: Mapping[str, Any]) -> tuple[Rows, int]:
    settings = BackfillSettings.model_validate(options)
    return _told(
        pipelines.BackfilledFiles,
        lambda done: f"transaction {done.transaction}: {done.files} files, {iec_bytes(done.size)}",
        lambda tell: pipelines.backfill(
            spark,
            settings.files,
            settings.target(),
            format=settings.input,
            schema=settings.columns or None,
            on_transaction=tell,
        ),
    )


def _told(
    kind: type[R],
    line: Callable[[R], str],
    run: Callable[[Callable[[R], None]], Sequence[R]],
) -> tuple[Rows, int]:
    """Run a pipeline that tells each of its results; return the table of all.

    Args:
        kind: class of the results, whose fields are the columns.
        line: returns the progress line of a result.
        run: runs the pipeline, which calls a function with each result.
    """
    results = run(lambda result: _progress(line(result)))
    return ([each.name for each in fields(kind)], [astuple(result) for result in results]), 0


def _reconcile(spark: SparkSession, options: Mapping[str, Any]) -> tuple[Rows, int]:
    settings = ReconcileSettings.model_validate(options)
    result = pipelines.reconcile(
        _read(spark, settings.source(), settings.columns),
        _read(spark, settings.other_source(), settings.columns),
        by=settings.by,
        samples=settings.samples,
    )
    for sample in result.samples:
        _progress(json.dumps(sample.asDict(), default=str))
    counts = {name: value for name, value in asdict(result).items() if name != "samples"}
    return (list(counts), [list(counts.values())]), 0 if result.is_equal else 1


def _word_count(spark: SparkSession, options: Mapping[str, Any]) -> tuple[Rows, int]:
    settings = WordCountSettings.model_validate(options)
    messages = _read(spark, settings.source(), settings.columns or f"{settings.column} string")
    counts = pipelines.word_count(messages, column=settings.column)
    if settings.output:
        counts.write.parquet(settings.output)
        counts = spark.read.parquet(settings.output).orderBy("count", ascending=False)
    return (["word", "count"], [list(row) for row in counts.limit(settings.top).collect()]), 0


PIPELINES: Mapping[str, Callable[[SparkSession, Mapping[str, Any]], tuple[Rows, int]]] = {
    "export": _export,
    "compact": _compact,
    "backfill": _backfill,
    "reconcile": _reconcile,
    "word-count": _word_count,
}


def _read(spark: SparkSession, source: Mapping[str, str], columns: str) -> DataFrame:
    reader = spark.read.format("gazette").options(**source)
    return (reader.schema(f"{columns}, {METADATA}") if columns else reader).load()


def _cell(header: str, value: Any) -> str:
    return iec_bytes(value) if header.startswith("size") else str(value)


def _progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _last_line(error: BaseException) -> str:
    """Return the line of an error of Spark that names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
