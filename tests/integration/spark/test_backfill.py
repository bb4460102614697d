"""Files to journals: each row once, though a run ends between two transactions."""

import json
from collections import Counter
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from gazette_sdk import Reader
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import ConfigurationError
from gazette_spark.pipelines import BackfilledFiles, backfill
from gazette_spark.pipelines.batch import _application_id
from support.spark_writes import committed

pytest_plugins = ["support.spark"]

SPECS = """
name: shop/
replication: 1
labels: [{name: content-type, value: application/x-ndjson}, {name: topic, value: orders}]
fragment: {length: 1048576, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1s}
children: [{name: shop/orders-000}, {name: shop/orders-001}]
"""


class CrashError(Exception):
    pass


@pytest.mark.timeout(300)
def test_a_back_fill_that_ended_between_transactions_is_completed_by_the_next_run(
    spark: SparkSession, gazette: EmbeddedCluster, tmp_path: Path
):
    gazette.apply(SPECS)
    rows = [(number, f"customer {number % 5}") for number in range(90)]
    files = spark.createDataFrame(rows, "cents long, customer string").repartition(3)
    files.write.json(str(tmp_path / "files"))
    target = {"address": gazette.address, "journals": "topic=orders", "key": "customer"}
    transactions: list[BackfilledFiles] = []

    def run(*, crashes: bool = False) -> list[BackfilledFiles]:
        def note(transaction: BackfilledFiles) -> None:
            transactions.append(transaction)
            if crashes:
                raise CrashError

        return backfill(
            spark,
            str(tmp_path / "files"),
            target,
            format="json",
            schema="cents long, customer string",
            transaction_bytes=1,
            on_transaction=note,
        )

    with pytest.raises(CrashError):
        run(crashes=True)
    assert [(each.transaction, each.files) for each in transactions] == [(0, 1)]
    assert [each.transaction for each in run()] == [0, 1, 2]
    assert [each.transaction for each in run()] == [0, 1, 2]
    reader = Reader(dict, "topic=orders", transport=gazette.transport, isolation="uncommitted")
    assert sum("cents" in each.message for each in reader) == len(rows)
    orders = (
        spark.read.format("gazette")
        .options(address=gazette.address, journals="topic=orders")
        .schema("cents long, customer string, _journal string")
        .load()
        .collect()
    )
    assert Counter((row["cents"], row["customer"]) for row in orders) == Counter(rows)
    journals = {row["customer"]: row["_journal"] for row in orders}
    assert all(journals[row["customer"]] == row["_journal"] for row in orders)


@pytest.mark.timeout(300)
def test_all_columns_and_rows_of_each_file_are_published_and_lines_that_are_none_are_refused(
    spark: SparkSession, gazette: EmbeddedCluster, tmp_path: Path
):
    gazette.apply(SPECS)
    target = {"address": gazette.address, "journals": "topic=orders"}

    def run(name: str, **options: str) -> None:
        backfill(spark, str(tmp_path / name), target, **options)

    def rows() -> list[dict]:
        return sorted(committed(gazette, "topic=orders"), key=json.dumps)

    spark.sql("select 1 a").write.parquet(str(tmp_path / "columns"))
    spark.sql("select 2 a, 3 b").write.mode("append").parquet(str(tmp_path / "columns"))
    run("columns")
    assert rows() == [{"a": 1, "b": None}, {"a": 2, "b": 3}]

    (tmp_path / "names").mkdir()
    for number, name in enumerate(["part1", "part[1]", "part?", "{part}"]):
        (tmp_path / "names" / f"{name}.json").write_text(f'{{"n": {number}}}')
    run("names", format="json", schema="n long")
    assert rows()[2:] == [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 3}]

    (tmp_path / "lines").mkdir()
    for line in ('{"n": 5, "tor', '{"n": "five"}'):
        (tmp_path / "lines" / "bad.json").write_text(f'{{"n": 4}}\n{line}\n')
        with pytest.raises(Py4JJavaError, match=r"reading file file:.*/lines/bad\.json"):
            run("lines", format="json", schema="n long")
    assert len(rows()) == 6


def test_a_run_is_that_of_the_same_transactions_and_cluster_whatever_its_address():
    files = [(f"/files/{name}", 1) for name in "abc"]
    target = {"address": "http://broker-1:8080", "journals": "topic=orders"}
    own = _application_id([files[:2], files[2:]], target)
    assert own == _application_id([files[:2], files[2:]], {"journals": "topic=orders"})
    # The second transaction of the first run has file c, and here b: it must not pass for it.
    assert own != _application_id([files[:1], files[1:2], files[2:]], target)
    assert own != _application_id([files[:2], files[2:]], {**target, "journals": "topic=others"})


def test_a_directory_without_files_is_refused(spark: SparkSession, tmp_path: Path):
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(ConfigurationError, match="there are no files to publish"):
        backfill(spark, str(tmp_path), {"journals": "topic=orders"})
