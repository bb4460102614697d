"""Files of Parquet or JSON to journals, exactly once.

The files are cut, in the order of their names, into transactions of up to 1 GiB. A run that died is
completed by the next one with the same files and journals, and a complete one changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from gazette_sdk.errors import ConfigurationError, JournalNotFoundError
from gazette_sdk.transport import loop as sdk_loop
from gazette_spark import transactions as logs
from gazette_spark.pipelines.lake import Lake

READ_OPTIONS = {"mode": "FAILFAST", "mergeSchema": "true"}
"""A row that cannot be read is an error, and columns that only some files have are read."""

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
        transaction_bytes: greatest size of the files of a transaction of several files. Another
            size makes other transactions, which publish the files once more.
        on_transaction: called with the result of each transaction when it is committed, also of
            those that an earlier run has committed.

    Raises:
        ConfigurationError: there are no files.
        PySparkException: a row cannot be read, or its transaction failed. Those before stay.
    """
    found = sorted(Lake(spark, files).files())
    if not found:
        raise ConfigurationError(f"there are no files to publish in {files}")
    transactions: list[BackfilledFiles] = []
    groups = _groups(found, transaction_bytes)
    application = _application_id(groups, target)
    reader = spark.read.format(format).options(**READ_OPTIONS)
    if schema is not None:
        reader = reader.schema(schema)
    published = _published(application, target)
    for number, group in enumerate(groups):
        if number >= published:
            (
                reader.load([_escaped(url) for url, _ in group])
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


def _application_id(groups: Sequence[Sequence[tuple[str, int]]], target: Mapping[str, str]) -> str:
    """Return the writer's id: equal for equal files of each transaction, and equal journals.

    A cluster has many addresses, and its logs tell what it has.
    """
    options = sorted(each for each in target.items() if each[0].lower() != "address")
    text = json.dumps([groups, options])
    return f"backfill-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _published(application: str, target: Mapping[str, str]) -> int:
    """Return the number of transactions that earlier runs have published; completes the last."""
    options = {name.lower(): value for name, value in target.items()}
    names = {"address": "address", "transactionlog": "transaction_log"}
    where = {names[name]: value for name, value in options.items() if name in names}
    try:
        logs.complete(application, **where)
        last = sdk_loop.run(logs.astate(application, **where)).transaction
    except JournalNotFoundError:
        return 0
    return 0 if last is None else last + 1


def _escaped(url: str) -> str:
    """Return the URL of a file as a pattern that matches only this file."""
    return re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", url)


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
