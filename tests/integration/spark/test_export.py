"""The export of journals to Parquet: incremental, and exactly once."""

from collections import Counter
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from gazette_sdk import Publisher, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import ConfigurationError
from gazette_spark.pipelines import ExportedBatch, compact, export

pytest_plugins = ["support.spark"]

SPECS = """
name: shop/orders
replication: 1
labels: [{name: content-type, value: application/x-ndjson}, {name: topic, value: orders}]
fragment: {length: 4096, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1s}
"""
SCHEMA = "cents long, _journal string, _offset long, _time timestamp"


def publish(cluster: EmbeddedCluster, numbers: range) -> None:
    with Publisher(mapping=mapping.direct("shop/orders"), transport=cluster.transport) as publisher:
        for cents in numbers:
            publisher.publish({"cents": cents})


def exported(spark: SparkSession, lake: Path) -> Counter[int]:
    return Counter(row["cents"] for row in spark.read.parquet(str(lake)).collect())


@pytest.mark.timeout(300)
def test_each_message_is_exported_once_though_a_batch_failed_behind_its_write(
    spark: SparkSession, gazette: EmbeddedCluster, tmp_path: Path
):
    gazette.apply(SPECS)
    publish(gazette, range(100))
    lake, source = tmp_path / "lake", {"address": gazette.address, "journals": "topic=orders"}

    def fail(batch: ExportedBatch) -> None:
        raise RuntimeError(f"a crash behind {batch.rows} rows")

    with pytest.raises(StreamingQueryException, match="a crash behind 100 rows"):
        export(spark, source, str(lake), schema=SCHEMA, on_batch=fail)
    [again] = export(spark, source, str(lake), schema=SCHEMA)
    assert (again.batch, again.rows) == (0, 100)
    assert exported(spark, lake) == Counter(range(100))

    publish(gazette, range(100, 150))
    assert [batch.rows for batch in export(spark, source, str(lake), schema=SCHEMA)] == [50]
    publish(gazette, range(150, 160))
    export(spark, source, str(lake), schema=SCHEMA)
    assert exported(spark, lake) == Counter(range(160))
    compact(spark, str(lake))
    assert exported(spark, lake) == Counter(range(160))
    [row] = spark.read.parquet(str(lake)).where("cents = 42").collect()
    assert row["_journal"] == "shop/orders"
    assert str(row["date"]) == f"{row['_time']:%Y-%m-%d}"
    assert int(row["hour"]) == row["_time"].hour


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("cents long", "the schema has no column '_time timestamp'"),
        ("Date string, _time timestamp", "have a column 'Date', and so have the directories"),
    ],
)
def test_columns_that_the_lake_cannot_have_are_refused_before_anything_is_written(
    spark: SparkSession, gazette: EmbeddedCluster, tmp_path: Path, schema: str, reason: str
):
    source = {"address": gazette.address, "journals": "topic=orders"}
    with pytest.raises(ConfigurationError, match=reason):
        export(spark, source, str(tmp_path / "lake"), schema=schema)
    assert not (tmp_path / "lake").exists()
