"""Streaming queries over brokers and stores: exactly once, over restarts and new journals."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from gazette_sdk import Publisher, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_spark import lag

pytest_plugins = ["support.spark"]

SPECS = """
name: shop/
replication: 1
labels: [{name: content-type, value: application/x-ndjson}, {name: topic, value: orders}]
fragment: {length: 4096, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1s}
children:
  - name: shop/orders-000
  - name: shop/orders-001
"""
LATER = SPECS.replace("orders-000", "orders-002").replace("  - name: shop/orders-001\n", "")

BY_CENTS = mapping.modulo("topic=orders", key=lambda message: str(message["cents"]))


class RollBackError(Exception):
    pass


def transact(publisher: Publisher, numbers: range, *, rolls_back: bool = False) -> None:
    with publisher.transaction() as transaction:
        for cents in numbers:
            transaction.publish({"cents": cents})
        if rolls_back:
            raise RollBackError


def publish(cluster: EmbeddedCluster, numbers: range) -> None:
    """Publish orders in transactions of ten; every third is rolled back first."""
    with Publisher(mapping=BY_CENTS, transport=cluster.transport) as publisher:
        for begin in numbers[::10]:
            part = numbers[begin - numbers.start :][:10]
            if begin % 3 == 0:
                with pytest.raises(RollBackError):
                    transact(publisher, part, rolls_back=True)
            transact(publisher, part)


def streamed(spark: SparkSession, cluster: EmbeddedCluster, **options: str) -> DataFrame:
    reader = spark.readStream.format("gazette").option("address", cluster.address)
    reader = reader.option("journals", "topic=orders").options(**options)
    return reader.schema("cents long, _journal string, _labels map<string,string>").load()


def run_once(frame: DataFrame, place: Path) -> list[dict]:
    """Read what is there, and return the progress of each micro-batch."""
    writer = frame.writeStream.format("json").option("path", str(place / "rows"))
    query = writer.option("checkpointLocation", str(place / "state")).trigger(availableNow=True)
    started = query.start()
    assert started.awaitTermination(100)
    return [json.loads(progress.json) for progress in started.recentProgress]


def written(place: Path) -> Counter[int]:
    files = sorted((place / "rows").glob("*.json"))
    return Counter(json.loads(line)["cents"] for f in files for line in f.read_text().splitlines())


@pytest.mark.timeout(300)
def test_a_committed_stream_delivers_each_order_once_over_restarts_and_new_journals(
    spark: SparkSession, gazette: EmbeddedCluster, tmp_path: Path
):
    gazette.apply(SPECS)
    publish(gazette, range(200))
    frame = streamed(spark, gazette, maxBytesPerTrigger="8k")
    progress = run_once(frame, tmp_path)
    assert written(tmp_path) == Counter(range(200))
    assert len([each for each in progress if each["numInputRows"]]) > 1
    assert sum(lag(progress[-1]).values()) == 0
    assert sum(lag(progress[0]).values()) > 0
    gazette.apply(LATER)
    publish(gazette, range(200, 300))
    run_once(frame, tmp_path)
    assert written(tmp_path) == Counter(range(300))
    lines = [
        json.loads(line)
        for file in (tmp_path / "rows").glob("*.json")
        for line in file.read_text().splitlines()
    ]
    assert {line["_labels"]["topic"] for line in lines} == {"orders"}
    assert {line["_journal"] for line in lines} == {f"shop/orders-00{i}" for i in range(3)}


@pytest.mark.timeout(300)
def test_an_uncommitted_stream_finds_journals_that_are_created_while_it_runs(
    spark: SparkSession, gazette: EmbeddedCluster, tmp_path: Path
):
    gazette.apply(SPECS)
    with Publisher(mapping=BY_CENTS, transport=gazette.transport) as publisher:
        for cents in range(50):
            publisher.publish({"cents": cents})
    frame = streamed(spark, gazette, isolation="uncommitted")
    query = frame.writeStream.format("memory").queryName("cents").start()
    try:
        query.processAllAvailable()
        assert spark.table("cents").count() == 50
        gazette.apply(LATER)
        with Publisher(mapping=BY_CENTS, transport=gazette.transport) as publisher:
            for cents in range(50, 100):
                publisher.publish({"cents": cents})
        deadline = time.monotonic() + 60
        while spark.table("cents").count() < 100 and time.monotonic() < deadline:
            query.processAllAvailable()
        found = Counter(row["cents"] for row in spark.table("cents").collect())
        assert found == Counter(range(100))
        assert spark.table("cents").where("_journal = 'shop/orders-002'").count() > 0
    finally:
        query.stop()
