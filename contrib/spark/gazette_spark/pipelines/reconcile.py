"""Comparison of two sets of messages: what is missing in one of them, and what differs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - as everywhere in PySpark

from gazette_sdk.errors import ConfigurationError
from gazette_spark.write_options import METADATA_COLUMNS

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
