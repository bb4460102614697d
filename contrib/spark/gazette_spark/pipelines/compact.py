"""Many exported batches of an hour to one.

The batches of an hour are written once more as ``batch=A-B``; then a plan in ``_compaction`` names
them and that directory; then they are deleted, and the plan. A plan that a crash left is completed
by the next run, and a merged directory without a plan is deleted. Between the first step and the
last, readers can see rows twice.

The newest batch of the lake is left out, because its export may be run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from pyspark.sql import SparkSession

from gazette_sdk.errors import ConfigurationError
from gazette_spark.pipelines.lake import BatchDirectory, Lake

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
