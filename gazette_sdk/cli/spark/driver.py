"""Program that ``spark-submit`` runs: one pipeline, its progress and its summary.

Its argument is a JSON array of the pipeline's name, the format of the summary, its options, and a
directory for its outcome: ``spark-submit`` mixes what a program writes to standard output and to
standard error. The files are ``summary`` and, if it failed, ``failure``. A driver that the cluster
runs (``--deploy-mode cluster``) has no such directory: its outcome is in its own output.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from gazette_sdk.cli.formats import NONE, iec_bytes, write_table
from gazette_sdk.cli.program import explain
from gazette_sdk.cli.spark.commands import (
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


METADATA = "_journal string, _offset long, _uuid string, _time timestamp"

_PREFIX = re.compile(r"^(Caused by)?: ")
_CODE = re.compile(r" *SQLSTATE: .*")
"""Text that Spark writes in front of a message, and after it."""

R = TypeVar("R", bound="DataclassInstance")

Rows = tuple[Sequence[str], Sequence[Sequence[Any]]]
"""Headers and rows of a summary."""


def main(arguments: Sequence[str]) -> int:
    """Run a pipeline and write its outcome; return the exit status."""
    name, output, options, directory = json.loads(arguments[0])
    outcome = Path(directory)
    is_beside_command = outcome.is_dir()
    spark = SparkSession.builder.getOrCreate()
    # Ctrl-C reaches the JVM, too, which PySpark's own handler would ask to cancel its jobs.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        spark.dataSource.register(GazetteDataSource)
        (headers, rows), failure = PIPELINES[name](spark, options)
        with _opened(outcome / "summary") if is_beside_command else nullcontext(sys.stdout) as file:
            _write_summary(output, headers, rows, file)
    except (GazetteError, PySparkException, Py4JError) as error:
        failure = reason_of(error)
    finally:
        with suppress(Py4JError, OSError):  # the JVM may have ended
            spark.stop()
    if failure and is_beside_command:
        with suppress(FileNotFoundError), _opened(outcome / "failure") as file:
            file.write(failure)
    elif failure:
        _progress(f"{name}: {failure}")
    return 1 if failure else 0


def _opened(path: Path) -> TextIO:
    """Open a file of the outcome. If the command was interrupted, it has removed the directory."""
    return path.open("w", encoding="utf-8")


def _write_summary(
    output: str, headers: Sequence[str], rows: Sequence[Sequence[Any]], file: TextIO
) -> None:
    if output == "json":
        for row in rows:
            record = dict(zip(headers, row, strict=True))
            file.write(f"{json.dumps(record, default=str)}\n")
        return
    cells = [[_cell(*cell) for cell in zip(headers, row, strict=True)] for row in rows]
    write_table(headers, cells, file)


def _export(spark: SparkSession, options: Mapping[str, Any]) -> tuple[Rows, str]:
    settings = ExportSettings.model_validate(options)
    schema = f"{settings.columns}, {METADATA}" if settings.columns else None
    return _told(
        pipelines.ExportedBatch,
        lambda batch: f"batch {batch.batch}: {batch.rows} messages",
        lambda tell: pipelines.export(
            spark, settings.source(), settings.lake, schema=schema, on_batch=tell
        ),
    )


def _compact(spark: SparkSession, options: Mapping[str, Any]) -> tuple[Rows, str]:
    settings = CompactSettings.model_validate(options)
    return _told(
        pipelines.CompactedHour,
        lambda hour: f"{hour.hour}: {hour.batches} batches merged",
        lambda tell: pipelines.compact(spark, settings.lake, on_hour=tell),
    )


def _backfill(spark: SparkSession, options: Mapping[str, Any]) -> tuple[Rows, str]:
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
) -> tuple[Rows, str]:
    """Run a pipeline that reports each of its results; return the table of all.

    Args:
        kind: class of the results, whose fields are the columns.
        line: returns the progress line of a result.
        run: runs the pipeline, which calls a function with each result.
    """
    results = run(lambda result: _progress(line(result)))
    return ([each.name for each in fields(kind)], [astuple(result) for result in results]), ""


def _reconcile(spark: SparkSession, options: Mapping[str, Any]) -> tuple[Rows, str]:
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
    return (list(counts), [list(counts.values())]), "" if result.is_equal else "they differ"


def _word_count(spark: SparkSession, options: Mapping[str, Any]) -> tuple[Rows, str]:
    settings = WordCountSettings.model_validate(options)
    messages = _read(spark, settings.source(), settings.columns or f"{settings.column} string")
    counts = pipelines.word_count(messages, column=settings.column)
    if settings.output:
        counts.write.parquet(settings.output)
        counts = spark.read.parquet(settings.output).orderBy(
            ["count", "word"], ascending=[False, True]
        )
    return (["word", "count"], [list(row) for row in counts.limit(settings.top).collect()]), ""


PIPELINES: Mapping[str, Callable[[SparkSession, Mapping[str, Any]], tuple[Rows, str]]] = {
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
    if value is None:
        return NONE
    return iec_bytes(value) if header.startswith("size") else str(value)


def _progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def reason_of(error: BaseException) -> str:
    """Return the line of an error which names its cause.

    Spark's messages are pages of text: a traceback of Python, whose last line is the cause; stack
    traces of Java, with a line for each cause; and plans and states of queries after a line.
    """
    if isinstance(error, GazetteError):
        return explain(error)
    _, _, text = str(error).rpartition("Traceback (most recent call last):\n")
    lines = [line for line in text.splitlines() if line and not line[0].isspace()]
    causes = [line for line in lines if "An error occurred while calling" not in line]
    others = [line for line in causes[1:] if line.startswith("Caused by: ")]
    found = [_PREFIX.sub("", _CODE.sub("", line)) for line in [*causes[:1], *others]]
    return "; ".join(dict.fromkeys(found)) or explain(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
