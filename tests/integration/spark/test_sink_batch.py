"""Batch writes: all rows become visible to committed readers, or none; each once."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from operator import itemgetter

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from gazette_sdk import Journals, Publisher, Reader, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_spark import partition_by_journal, transactions
from gazette_spark.schema import METADATA_FIELDS
from gazette_spark.write_options import METADATA_COLUMNS
from support.protobuf_messages import Gram
from support.spark_writes import committed, last_line, log_lines, producers_by_journal, write

pytest_plugins = ["support.spark"]
pytestmark = pytest.mark.timeout(300)  # Spark starts many processes


@pytest.fixture
def cluster(gazette: EmbeddedCluster) -> EmbeddedCluster:
    Journals(gazette.transport).create("copies", partitions=3, replication=1)
    return gazette


def orders(spark: SparkSession, count: int, tasks: int = 2) -> DataFrame:
    return spark.range(0, count, 1, tasks).select(
        sf.col("id").alias("n"),
        sf.format_string("customer %d", sf.col("id") % 11).alias("customer"),
    )


def numbers(cluster: EmbeddedCluster) -> list[int]:
    return sorted(message["n"] for message in committed(cluster))


def test_rows_are_messages_in_the_journals_that_every_publisher_maps_them_to(
    spark: SparkSession, cluster: EmbeddedCluster
):
    write(orders(spark, 200), cluster, key="customer")
    assert numbers(cluster) == list(range(200))
    by_customer = mapping.modulo("topic=copies", key=itemgetter("customer"))
    with Publisher(mapping=by_customer, transport=cluster.transport) as publisher:
        for number in range(11):
            publisher.publish({"n": -1, "customer": f"customer {number}"})
    journals: dict[str, set[str]] = {}
    for envelope in Reader(dict, "topic=copies", transport=cluster.transport):
        journals.setdefault(envelope.message["customer"], set()).add(envelope.journal)
    assert {len(each) for each in journals.values()} == {1}
    assert len(set.union(*journals.values())) == 3


def test_what_was_read_is_written_without_its_metadata_columns(
    spark: SparkSession, cluster: EmbeddedCluster
):
    assert {field.name for field in METADATA_FIELDS} <= METADATA_COLUMNS
    write(orders(spark, 20), cluster, key="customer")
    Journals(cluster.transport).create("second", partitions=1, replication=1)
    copy = (
        spark.read.format("gazette")
        .option("address", cluster.address)
        .option("journals", "topic=copies")
        .schema(
            "n long, customer string, _journal string, _offset long, _uuid string, _time timestamp"
        )
        .load()
    )
    # Tests of the source read what is committed; this one reads its own acknowledgements, too.
    write(copy.where("n is not null"), cluster, journals="topic=second", key="customer")
    found = committed(cluster, "topic=second")
    assert sorted(message["n"] for message in found) == list(range(20))
    assert {tuple(message) for message in found} == {("n", "customer")}


def test_values_of_all_types_are_written_as_json(spark: SparkSession, cluster: EmbeddedCluster):
    frame = spark.sql(
        "select cast(1 as short) s, 2.5 d, cast('1.50' as decimal(5,2)) dec, true b,"
        " binary('ab') bin, date'2026-01-31' day, timestamp'2026-01-31 12:00:00.5' at,"
        " array(1, null) a,"
        " map('k', 1) m, named_struct('x', 1, 'y', cast(null as string)) st, cast(null as int) nil"
    )
    write(frame, cluster)
    [message] = committed(cluster)
    assert dt.datetime.fromisoformat(message.pop("at")) == dt.datetime(
        2026, 1, 31, 12, 0, 0, 500_000, tzinfo=dt.UTC
    )
    assert Decimal(message.pop("dec")) == Decimal("1.50")
    assert Decimal(message.pop("d")) == Decimal("2.5")
    assert message == {
        "s": 1,
        "b": True,
        "bin": "YWI=",
        "day": "2026-01-31",
        "a": [1, None],
        "m": {"k": 1},
        "st": {"x": 1, "y": None},
        "nil": None,
    }


def test_rows_are_csv_records_and_protobuf_messages_where_their_journals_hold_those(
    spark: SparkSession, cluster: EmbeddedCluster
):
    journals = Journals(cluster.transport)
    journals.create("records", partitions=2, replication=1, content_type="text/csv")
    write(orders(spark, 30), cluster, journals="topic=records", key="customer")
    found = [e.message for e in Reader(list, "topic=records", transport=cluster.transport)]
    assert sorted(int(record[1]) for record in found) == list(range(30))
    assert {record[2] for record in found} == {f"customer {number}" for number in range(11)}
    for value in ("binary('ab')", "array(1)", "map('k', 1)", "named_struct('x', 1)"):
        with pytest.raises(PySparkException) as caught:
            write(spark.sql(f"select 1 n, {value} v"), cluster, journals="topic=records")
        assert "column 'v' cannot be written to a CSV journal" in last_line(caught.value)

    journals.create(
        "grams", partitions=2, replication=1, content_type="application/x-protobuf-fixed"
    )
    frame = spark.sql("select 'ada' text, 7L count union all select 'grace', null")
    with pytest.raises(PySparkException) as caught:
        write(frame, cluster, journals="topic=grams")
    assert "give the option message=module:Class" in last_line(caught.value)
    options = {"journals": "topic=grams", "message": "support.protobuf_messages:Gram"}
    write(frame, cluster, key="text", **options)
    found = [e.message for e in Reader(Gram, "topic=grams", transport=cluster.transport)]
    assert sorted((each.text, each.count) for each in found) == [("ada", 7), ("grace", 0)]
    with pytest.raises(PySparkException) as caught:
        write(frame.withColumnRenamed("count", "number"), cluster, **options)
    assert 'a row does not fit Gram: Protocol message Gram has no "number"' in last_line(
        caught.value
    )


def test_a_version_of_an_application_is_written_once(spark: SparkSession, cluster: EmbeddedCluster):
    for version in (0, 1, 0, 5, 1):
        write(orders(spark, 10), cluster, txnAppId="back-fill", txnVersion=version)
    assert numbers(cluster) == sorted([*range(10)] * 3)
    decided = [line for line in log_lines(cluster, "back-fill") if "decided" in line]
    assert [line["decided"] for line in decided] == [0, 1, 5]
    assert [line["rows"] for line in decided] == [10, 10, 10]
    with pytest.raises(PySparkException) as caught:
        write(orders(spark, 10), cluster, txnAppId="back-fill", txnVersion=3)
    assert "txnVersion 3 was never written: use ascending values" in last_line(caught.value)


def test_workers_use_their_producers_again(spark: SparkSession, cluster: EmbeddedCluster):
    for _ in range(8):
        write(orders(spark, 40), cluster)
    assert numbers(cluster) == sorted([*range(40)] * 8)
    producers = set.union(*producers_by_journal(cluster).values())
    # Two tasks at a time in two processes; what a process lent last is free before its next task.
    assert 2 <= len(producers) <= 6
    assert all(line["clean"] for line in log_lines(cluster, "batch") if "done" in line)


def test_an_empty_dataframe_is_a_transaction_without_messages(
    spark: SparkSession, cluster: EmbeddedCluster
):
    write(orders(spark, 10).where("n < 0"), cluster)
    assert committed(cluster) == []
    assert [line.get("rows") for line in log_lines(cluster, "batch")] == [None, 0, None]


def test_one_task_writes_a_journal_if_rows_are_partitioned_by_it(
    spark: SparkSession, cluster: EmbeddedCluster
):
    write(orders(spark, 300, tasks=6), cluster, key="customer")
    assert max(map(len, producers_by_journal(cluster).values())) > 1
    Journals(cluster.transport).create("second", partitions=3, replication=1)
    frame = partition_by_journal(
        orders(spark, 300, tasks=6), "topic=second", "customer", address=cluster.address
    )
    assert frame.columns == ["n", "customer"]
    write(frame, cluster, journals="topic=second", key="customer")
    assert {len(each) for each in producers_by_journal(cluster, "topic=second").values()} == {1}
    assert len(committed(cluster, "topic=second")) == 300
    by_number = partition_by_journal(orders(spark, 9), "topic=second", "n", address=cluster.address)
    assert sorted(row["n"] for row in by_number.collect()) == list(range(9))


def test_a_log_of_an_application_is_completed_by_hand_or_found_complete(
    spark: SparkSession, cluster: EmbeddedCluster
):
    write(orders(spark, 5), cluster, txnAppId="app", txnVersion=0, transactionLog="logs/of/jobs")
    where = {"address": cluster.address, "transaction_log": "logs/of/jobs"}
    assert transactions.complete("app", **where) is None
    with Publisher(transport=cluster.transport) as publisher:
        line = {"decided": 1, "job": "dead", "intents": [], "rows": 0}
        publisher.acknowledge({"logs/of/jobs/app": json.dumps(line).encode() + b"\n"}).result(30)
    assert transactions.complete("app", **where) == 1
    transactions.create("a-query", "topic=copies", after=6, **where)
    log = Reader(dict, name="logs/of/jobs/a-query", transport=cluster.transport)
    assert [e.message for e in log] == [{"log": 1}, {"done": 6, "clean": False}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"journals": "topic=none"}, "no journal matches 'topic=none' at http://"),
        ({"key": "_journal"}, "key '_journal' is none of the columns that are written"),
        ({"address": "http://localhost:1"}, "cannot connect to http://localhost:1"),
        ({"mode": "overwrite"}, "journals are append-only; use .mode('append')"),
    ],
)
def test_a_write_that_cannot_be_is_one_clear_error(
    spark: SparkSession, cluster: EmbeddedCluster, options: dict[str, str], message: str
):
    with pytest.raises(PySparkException) as caught:
        write(orders(spark, 4).withColumn("_journal", sf.lit("x")), cluster, **options)
    assert message in last_line(caught.value)
    assert last_line(caught.value).startswith("gazette_sdk.errors.")
    assert committed(cluster) == []


def test_a_row_without_a_key_is_refused_with_all_others(
    spark: SparkSession, cluster: EmbeddedCluster
):
    frame = orders(spark, 40).withColumn("customer", sf.expr("if(n = 30, null, customer)"))
    with pytest.raises(PySparkException) as caught:
        write(frame, cluster, key="customer")
    assert "a mapping key of type NoneType has no agreed bytes" in last_line(caught.value)
    assert committed(cluster) == []


def test_journals_of_different_content_types_are_refused_by_name(
    spark: SparkSession, cluster: EmbeddedCluster
):
    options = {"labels": {"topic": "copies"}, "replication": 1, "content_type": "text/csv"}
    Journals(cluster.transport).create("records", partitions=0, **options)
    with pytest.raises(PySparkException) as caught:
        write(orders(spark, 4), cluster)
    assert "records holds text/csv" in last_line(caught.value)
