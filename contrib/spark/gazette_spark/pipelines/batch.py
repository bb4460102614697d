"""Batch jobs: files to journals, comparison of two sets of messages, and words of all history.

:func:`backfill` publishes files of Parquet or JSON, exactly once. They are cut, in the order of
their names, into transactions of up to 1 GiB. A run that died is completed by the next one with the
same files and journals, and a complete one changes nothing.

:func:`reconcile` finds what is missing in one of two sets, and what differs. :func:`word_count` is
the batch counterpart of a shard that counts words.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everywhere in PySpark
from pyspark.sql.types import StructType

from gazette_sdk.errors import ConfigurationError, JournalNotFoundError
from gazette_sdk.transport import loop as sdk_loop
from gazette_spark import transactions as logs
from gazette_spark.pipelines.lake import Lake
from gazette_spark.write_options import METADATA_COLUMNS

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


SAMPLES = 20

_PLACES = frozenset({"_end", "_flags"})
"""Further columns that are no content, which a reader adds where a schema names them."""

_EXACT = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Options by which different rows have different JSON: by default times are cut to milliseconds."""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Result of a comparison. Counts are of keys.

    Attributes:
        equal: keys with the same content on both sides.
        different: keys of both sides with other content, or another number of messages.
        left_only: keys that the right side lacks.
        right_only: keys that the left side lacks.
        samples: some keys that are not equal: the key's columns, ``outcome``, and the place
            ``left`` and ``right`` of a message, as ``journal@offset``.
    """

    equal: int
    different: int
    left_only: int
    right_only: int
    samples: Sequence[Row]

    @property
    def is_equal(self) -> bool:
        """Return True if nothing is missing and nothing differs."""
        return not (self.different or self.left_only or self.right_only)


def reconcile(
    left: DataFrame, right: DataFrame, *, by: Sequence[str] = ("_uuid",), samples: int = SAMPLES
) -> Reconciliation:
    """Compare two sets of messages by a key.

    Args:
        left: rows of the first set, with the same columns as ``right``.
        right: rows of the second set.
        by: columns of the key, such as ``["_uuid"]`` of a copied journal, or ``["order_id"]`` of
            one that was published again. Empty: the content is the key.
        samples: greatest number of samples.

    Raises:
        ConfigurationError: the sets have different columns, or lack one of the key.
    """
    if set(left.columns) != set(right.columns):
        differing = sorted(set(left.columns) ^ set(right.columns))
        raise ConfigurationError(
            f"both sides need the same columns; one lacks {', '.join(differing)}"
        )
    if missing := [name for name in by if name not in left.columns]:
        raise ConfigurationError(f"the key's column {missing[0]!r} is not in the schema")
    names = list(by) or ["content"]
    one, other = _by_key(left, by, "left"), _by_key(right, by, "right")
    pairs = [(one[f"left_key_{at}"], other[f"right_key_{at}"]) for at in range(len(names))]
    keys = [F.coalesce(*pair).alias(name) for pair, name in zip(pairs, names, strict=True)]
    is_same_key = functools.reduce(Column.__and__, (a.eqNullSafe(b) for a, b in pairs))
    joined = one.join(other, on=is_same_key, how="full_outer").withColumn("outcome", _outcome())
    joined.persist()
    try:
        outcomes = joined.groupBy("outcome").count().collect()
        shown = (
            joined.where(F.col("outcome") != "equal")
            .orderBy("outcome", *keys)
            .select(*keys, "outcome", "left", "right")
            .limit(samples)
            .collect()
        )
    finally:
        joined.unpersist()
    counts = {row["outcome"]: row["count"] for row in outcomes}
    return Reconciliation(
        counts.get("equal", 0),
        counts.get("different", 0),
        counts.get("left only", 0),
        counts.get("right only", 0),
        shown,
    )


def _by_key(rows: DataFrame, by: Sequence[str], side: str) -> DataFrame:
    """Return a row a key: the sorted digests of its messages, and the place of one of them."""
    columns = [_column(name) for name in sorted(set(rows.columns) - METADATA_COLUMNS - _PLACES)]
    place: Column = F.lit(side)
    if {"_journal", "_offset"} <= set(rows.columns):
        place = F.concat_ws("@", "_journal", F.col("_offset").cast("string"))
    digest = F.sha2(F.to_json(F.struct(*columns), _EXACT), 256)
    keys = [_column(name) for name in by] or [digest]
    named = [key.alias(f"{side}_key_{at}") for at, key in enumerate(keys)]
    return (
        rows.select(*named, digest.alias("digest"), place.alias("place"))
        .groupBy(*(f"{side}_key_{at}" for at in range(len(keys))))
        .agg(
            F.sort_array(F.collect_list("digest")).alias(f"{side}_digests"),
            F.min("place").alias(side),
        )
    )


def _column(name: str) -> Column:
    """Return a column by its name, which may have dots."""
    return F.col("`" + name.replace("`", "``") + "`")


def _outcome() -> Column:
    return (
        F.when(F.col("right_digests").isNull(), "left only")
        .when(F.col("left_digests").isNull(), "right only")
        .when(F.col("left_digests") == F.col("right_digests"), "equal")
        .otherwise("different")
    )


WORD = r"[a-z]+"
"""Words of a lower-case text."""


def word_count(messages: DataFrame, *, column: str = "text", word: str = WORD) -> DataFrame:
    """Return the words of a column with their counts, the most frequent first.

    Args:
        messages: rows of the messages.
        column: name of the column with texts.
        word: regular expression of Java for a word of the text in lower case.

    Returns:
        Rows of ``word`` (string) and ``count`` (long).
    """
    words = F.explode(F.regexp_extract_all(F.lower(F.col(column)), F.lit(word), F.lit(0)))
    return (
        messages.select(words.alias("word"))
        .groupBy("word")
        .count()
        .orderBy(F.desc("count"), F.asc("word"))
    )
