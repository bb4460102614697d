"""Files to journals: each row once, though a run ends between two transactions."""

from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import ConfigurationError
from gazette_spark.pipelines import BackfilledFiles, backfill

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


def test_a_directory_without_files_is_refused(spark: SparkSession, tmp_path: Path):
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(ConfigurationError, match="there are no files to publish"):
        backfill(spark, str(tmp_path), {"journals": "topic=orders"})
