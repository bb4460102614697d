"""Files of Parquet or JSON to journals, exactly once.

The files are cut, in the order of their names, into transactions of up to 1 GiB. A run that died is
completed by the next one with the same files and journals, and a complete one changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from gazette_sdk.errors import ConfigurationError
from gazette_spark.pipelines.lake import Lake

__all__ = ["BackfilledFiles", "backfill"]

TRANSACTION_BYTES = 1 << 30
"""Size of a transaction's files. What is published is read by others when it is complete."""


@dataclass(frozen=True, slots=True)
class BackfilledFiles:
    """Result of one transaction.

    Attributes:
        transaction: its number, from 0.
        files: number of its files.
        size: their size in bytes.
    """

    transaction: int
    files: int
    size: int


def backfill(
    spark: SparkSession,
    files: str,
    target: Mapping[str, str],
    *,
    format: Literal["parquet", "json"] = "parquet",  # noqa: A002 - as in DataFrameReader.load
    schema: StructType | str | None = None,
    transaction_bytes: int = TRANSACTION_BYTES,
    on_transaction: Callable[[BackfilledFiles], None] | None = None,
) -> list[BackfilledFiles]:
    """Publish the rows of files to journals, and return the transactions.

    Args:
        spark: the session.
        files: URL of a directory. Files whose names begin with ``_`` or ``.`` are left out.
        target: options of the data source ``gazette`` for writing: ``journals``, ``key``.
        format: format of the files.
        schema: schema of the rows; by default that of the files.
        transaction_bytes: greatest size of the files of a transaction of several files.
        on_transaction: called with the result of each transaction when it is committed.

    Raises:
        ConfigurationError: there are no files.
    """
    found = sorted(Lake(spark, files).files())
    if not found:
        raise ConfigurationError(f"there are no files to publish in {files}")
    transactions: list[BackfilledFiles] = []
    application = _application_id(found, target)
    reader = spark.read.format(format)
    if schema is not None:
        reader = reader.schema(schema)
    for number, group in enumerate(_groups(found, transaction_bytes)):
        (
            reader.load([url for url, _ in group])
            .write.format("gazette")
            .options(**target, txnAppId=application, txnVersion=str(number))
            .mode("append")
            .save()
        )
        result = BackfilledFiles(number, len(group), sum(size for _, size in group))
        transactions.append(result)
        if on_transaction is not None:
            on_transaction(result)
    return transactions


def _application_id(files: Sequence[tuple[str, int]], target: Mapping[str, str]) -> str:
    """Return the writer's id: equal for equal files and targets."""
    text = json.dumps([files, sorted(target.items())])
    return f"backfill-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _groups(files: Sequence[tuple[str, int]], limit_bytes: int) -> list[list[tuple[str, int]]]:
    """Return the files of each transaction: as many as fit, at least one."""
    groups: list[list[tuple[str, int]]] = []
    size = 0
    for file in files:
        if not groups or size + file[1] > limit_bytes:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file[1]
    return groups
