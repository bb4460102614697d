"""Pipelines over files: compaction, reconciliation and word count."""

import datetime as dt
import json
import subprocess
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from gazette_sdk.cli.spark import commands, driver
from gazette_sdk.errors import ConfigurationError
from gazette_spark.pipelines import compact, reconcile, word_count

pytest_plugins = ["support.spark"]

DAY = "date=2026-01-31"


def write_batch(spark: SparkSession, lake: Path, hour: str, batch: str, rows: list[int]) -> None:
    frame = spark.createDataFrame([(row,) for row in rows], "cents long").coalesce(1)
    frame.write.parquet(f"{lake}/{DAY}/hour={hour}/batch={batch}")


def rows_of(spark: SparkSession, lake: Path) -> list[tuple[int, int]]:
    return sorted(
        (int(row["hour"]), row["cents"]) for row in spark.read.parquet(str(lake)).collect()
    )


def directories(lake: Path, hour: str) -> set[str]:
    return {path.name for path in (lake / DAY / f"hour={hour}").iterdir()}


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Path:
    """Return a lake of two hours and four batches."""
    directory = tmp_path / "lake"
    for hour, batch, rows in (
        ("16", "0", [1]),
        ("16", "1", [2, 3]),
        ("17", "1", [4]),
        ("17", "2", [5]),
    ):
        write_batch(spark, directory, hour, batch, rows)
    write_batch(spark, directory, "17", "3", [6])
    return directory


def test_batches_of_an_hour_are_merged_except_the_newest(spark: SparkSession, lake: Path):
    before = rows_of(spark, lake)
    compacted = compact(spark, str(lake))
    assert [(hour.hour, hour.batches) for hour in compacted] == [
        (f"{DAY}/hour=16", 2),
        (f"{DAY}/hour=17", 2),
    ]
    assert directories(lake, "16") == {"batch=0-1"}
    assert directories(lake, "17") == {"batch=1-2", "batch=3"}
    assert rows_of(spark, lake) == before
    assert compact(spark, str(lake)) == []


def test_a_lake_that_does_not_exist_is_an_error(spark: SparkSession, tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"the lake .*/typo does not exist"):
        compact(spark, str(tmp_path / "typo"))
    (tmp_path / "empty").mkdir()
    assert compact(spark, str(tmp_path / "empty")) == []


@pytest.mark.timeout(480)
def test_a_driver_in_the_cluster_has_its_outcome_in_its_log(lake: Path, tmp_path: Path):
    """As with ``--deploy-mode cluster``, it has no directory of a command beside it."""

    def run(pipeline: str, **options: str) -> subprocess.CompletedProcess[str]:
        outcome = tmp_path / "of another machine"
        program = [pipeline, "json", {"lake": str(lake), **options}, str(outcome)]
        command = [commands._spark_submit(), "--master", "local[1]", driver.__file__]
        return subprocess.run(
            [*command, json.dumps(program)],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    done = run("compact")
    assert done.returncode == 0, done.stderr
    hours = [json.loads(line)["hour"] for line in done.stdout.splitlines() if line[:1] == "{"]
    assert hours == [f"{DAY}/hour=16", f"{DAY}/hour=17"]
    failed = run("export", journals="orders/", store=tmp_path.as_uri())
    assert failed.returncode == 1
    log = failed.stdout + failed.stderr  # of which Spark makes one
    assert "export: " in log
    assert "no journal matches 'orders/'" in log


def test_a_merged_hour_is_merged_with_later_batches(spark: SparkSession, lake: Path):
    compact(spark, str(lake))
    write_batch(spark, lake, "16", "4", [7])
    write_batch(spark, lake, "16", "5", [8])
    compact(spark, str(lake))
    assert directories(lake, "16") == {"batch=0-4", "batch=5"}
    assert [cents for hour, cents in rows_of(spark, lake) if hour == 16] == [1, 2, 3, 7, 8]


def test_what_a_crash_left_before_its_plan_is_merged_again(spark: SparkSession, lake: Path):
    before = rows_of(spark, lake)
    write_batch(spark, lake, "16", "0-1", [1])  # without what batch 1 has
    compact(spark, str(lake))
    assert directories(lake, "16") == {"batch=0-1"}
    assert rows_of(spark, lake) == before


def test_a_plan_that_a_crash_left_is_completed(spark: SparkSession, lake: Path):
    before = rows_of(spark, lake)
    write_batch(spark, lake, "16", "0-1", [1, 2, 3])
    (lake / DAY / "hour=16/batch=0/_SUCCESS").unlink()
    plans = lake / "_compaction"
    plans.mkdir()
    inputs = [f"{DAY}/hour=16/batch={batch}" for batch in (0, 1)]
    plan = {"merged": f"{DAY}/hour=16/batch=0-1", "inputs": inputs}
    (plans / "hour.json").write_text(json.dumps(plan))
    compact(spark, str(lake))
    assert directories(lake, "16") == {"batch=0-1"}
    assert rows_of(spark, lake) == before
    assert not list(plans.glob("*.json"))


MESSAGES = "order long, cents long, _uuid string, _journal string, _offset long"


def test_two_sets_of_messages_are_compared_by_a_key(spark: SparkSession):
    left = [(1, 10, "a", "l", 0), (2, 20, "b", "l", 9), (3, 30, "c", "l", 18), (4, 1, "d", "l", 27)]
    right = [
        (1, 10, "e", "r", 0),
        (2, 21, "f", "r", 9),
        (5, 50, "g", "r", 18),
        (4, 1, "h", "r", 27),
    ]
    right.append((4, 1, "i", "r", 36))  # twice
    result = reconcile(
        spark.createDataFrame(left, MESSAGES), spark.createDataFrame(right, MESSAGES), by=["order"]
    )
    assert (result.equal, result.different, result.left_only, result.right_only) == (1, 2, 1, 1)
    assert not result.is_equal
    assert [tuple(sample) for sample in result.samples] == [
        (2, "different", "l@9", "r@9"),
        (4, "different", "l@27", "r@27"),
        (3, "left only", "l@18", None),
        (5, "right only", None, "r@18"),
    ]


def test_without_a_key_messages_are_compared_by_their_content(spark: SparkSession):
    left = spark.createDataFrame([(1, 10, "a", "l", 0), (2, None, "b", "l", 9)], MESSAGES)
    right = spark.createDataFrame([(2, None, "c", "r", 0), (1, 10, "d", "r", 9)], MESSAGES)
    assert reconcile(left, right, by=[]).is_equal
    assert reconcile(left, right.limit(1), by=[]).left_only == 1


def test_keys_that_are_null_are_one_key(spark: SparkSession):
    left = [(None, 10, "a", "l", 0), (None, 20, "b", "l", 9), (3, None, "c", "l", 18)]
    right = [(None, 20, "d", "r", 0), (None, 10, "e", "r", 9), (3, 0, "f", "r", 18)]
    result = reconcile(
        spark.createDataFrame(left, MESSAGES), spark.createDataFrame(right, MESSAGES), by=["order"]
    )
    assert (result.equal, result.different, result.left_only, result.right_only) == (1, 1, 0, 0)
    pair = reconcile(
        spark.createDataFrame(left, MESSAGES),
        spark.createDataFrame(right, MESSAGES),
        by=["order", "cents"],
    )
    assert (pair.equal, pair.left_only, pair.right_only) == (2, 1, 1)
    assert [tuple(sample) for sample in pair.samples] == [
        (3, None, "left only", "l@18", None),
        (3, 0, "right only", None, "r@18"),
    ]


def test_each_difference_of_content_is_found(spark: SparkSession):
    names = "left string, `a.b` string, _state string, at timestamp, local timestamp_ntz"
    at = dt.datetime(2026, 1, 31, 12, 0, 0, 123456)  # noqa: DTZ001 - of the session's zone
    row = ("key", "x", "open", at, at)

    def outcome_of(changed: tuple) -> tuple[int, int]:
        one, other = (spark.createDataFrame([each], names) for each in (row, changed))
        result = reconcile(one, other, by=["left"])
        return result.equal, result.different

    assert outcome_of(row) == (1, 0)
    later = at.replace(microsecond=123457)
    for place, value in ((1, "y"), (2, "done"), (3, later), (4, later)):
        assert outcome_of((*row[:place], value, *row[place + 1 :])) == (0, 1)


def test_sets_with_other_columns_or_without_the_key_are_refused(spark: SparkSession):
    messages = spark.createDataFrame([(1, 10, "a", "l", 0)], MESSAGES)
    with pytest.raises(ConfigurationError, match="one lacks cents"):
        reconcile(messages, messages.drop("cents"))
    with pytest.raises(ConfigurationError, match="'customer' is not in the schema"):
        reconcile(messages, messages, by=["customer"])


def test_words_are_counted_in_lower_case_and_the_most_frequent_come_first(spark: SparkSession):
    texts = spark.createDataFrame([("The cat, the dog.",), ("THE end",), (None,)], "text string")
    assert [tuple(row) for row in word_count(texts).collect()] == [
        ("the", 3),
        ("cat", 1),
        ("dog", 1),
        ("end", 1),
    ]
