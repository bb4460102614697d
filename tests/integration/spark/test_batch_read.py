"""The batch source reads what the SDK published: over a broker, and from fragment files alone."""

import datetime as dt
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from gazette_sdk import JsonMessage, Publisher, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_spark import GazetteDataSource

pytest_plugins = ["support.spark"]

SCHEMA = "customer string, cents long, _journal string, _offset long, _uuid string, _time timestamp"

JOURNALS = """
name: shop/
replication: 1
fragment:
  length: 4096
  compression_codec: {codec}
  stores: ["file:///"]
  refresh_interval: 1s
children:
  - name: shop/empty
    labels: [{{name: content-type, value: application/x-ndjson}}]
  - name: shop/orders/
    labels:
      - {{name: content-type, value: application/x-ndjson}}
      - {{name: topic, value: orders}}
    children:
      - name: shop/orders/part-000
      - name: shop/orders/part-001
"""


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int


BY_CUSTOMER = mapping.modulo("topic=orders", key=attrgetter("customer"))


def publish(cluster: EmbeddedCluster, count: int) -> Counter[tuple[str, int]]:
    orders = [Order(f"customer {i % 7}", i) for i in range(count)]
    with Publisher(mapping=BY_CUSTOMER, transport=cluster.transport) as publisher:
        for order in orders:
            publisher.publish(order)
            if order.cents % 50 == 0:  # several appends, hence several fragments
                publisher.flush()
    return Counter((order.customer, order.cents) for order in orders)


def rows(frame) -> Counter[tuple[str, int]]:
    return Counter((row["customer"], row["cents"]) for row in frame.collect())


@pytest.mark.parametrize("codec", ["GZIP", "ZSTANDARD", "SNAPPY", "NONE"])
def test_messages_are_read_from_the_fragment_files_of_every_codec(
    spark: SparkSession, gazette_cluster: Callable[[int], EmbeddedCluster], codec: str
):
    cluster = gazette_cluster(1)
    cluster.apply(JOURNALS.format(codec=codec))
    expected = publish(cluster, 400)
    cluster.stop()  # a stop stores what was only local
    frame = (
        spark.read.format("gazette")
        .option("store", f"file://{cluster.fragments}/")
        .option("journals", "shop/orders/")
        .schema(SCHEMA)
        .load()
    )
    assert rows(frame) == expected
    assert len(list(cluster.fragments.rglob("part-00*/*-*-*"))) > 4
    first = frame.where("cents = 0").first()
    assert first["_journal"].startswith("shop/orders/part-00")
    assert first["_offset"] == 0
    age = dt.datetime.now(dt.UTC) - first["_time"].replace(tzinfo=dt.UTC)
    assert dt.timedelta(0) <= age < dt.timedelta(minutes=5)
    assert frame.select("_journal", "_offset").distinct().count() == 400


def test_messages_are_read_over_a_broker_also_what_no_store_has_yet(
    spark: SparkSession, gazette: EmbeddedCluster
):
    gazette.apply(JOURNALS.format(codec="GZIP"))
    expected = publish(gazette, 300)
    reader = (
        spark.read.format("gazette")
        .option("address", gazette.address)
        .option("journals", "topic=orders")
        .schema("customer string, cents long")
    )
    assert rows(reader.load()) == expected
    last = Order("late", 12345)
    with Publisher(mapping=BY_CUSTOMER, transport=gazette.transport) as publisher:
        publisher.publish(last)
    assert rows(reader.load()) == expected + Counter({("late", 12345): 1})


def test_a_read_begins_and_ends_at_the_offsets_or_times_it_is_told(
    spark: SparkSession, gazette: EmbeddedCluster
):
    gazette.apply(JOURNALS.format(codec="GZIP"))
    expected = publish(gazette, 200)
    read = (
        spark.read.format("gazette")
        .option("address", gazette.address)
        .option("journals", "topic=orders")
        .schema(SCHEMA)
    )
    middle = read.load().where("cents >= 50").groupBy("_journal").min("_offset")
    offsets = {row["_journal"]: row["min(_offset)"] for row in middle.collect()}
    assert len(offsets) == 2
    head = read.option("end", json.dumps(offsets)).load()
    tail = read.option("begin", json.dumps(offsets)).option("end", "").load()
    assert rows(head) + rows(tail) == expected
    assert head.count() > 0

    read = (
        spark.read.format("gazette")
        .option("address", gazette.address)
        .option("journals", "topic=orders")
        .schema("customer string, cents long")
    )
    now = dt.datetime.now(dt.UTC)
    assert rows(read.option("end", now.isoformat()).load()) == expected
    later = (now + dt.timedelta(hours=1)).isoformat()
    assert read.option("end", "").option("begin", later).load().count() == 0


def test_a_record_that_does_not_fit_is_named_by_journal_and_offset(
    spark: SparkSession, gazette: EmbeddedCluster
):
    gazette.apply(JOURNALS.format(codec="GZIP"))
    publish(gazette, 10)
    frame = (
        spark.read.format("gazette")
        .option("address", gazette.address)
        .option("journals", "name=shop/orders/part-000")
        .schema("customer long")
        .load()
    )
    with pytest.raises(PySparkException, match="shop/orders/part-000: the message at offset 0"):
        frame.collect()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"journals": "topic=orders", "adress": "x"}, "unknown option 'adress'"),
        ({"address": "http://localhost:1"}, "the option 'journals' is missing"),
        ({"journals": "a=b", "store": "s3://b/", "address": "http://h:1"}, "not both"),
        ({"journals": "topic=orders", "begin": "soon"}, "neither a JSON object"),
        ({"journals": "topic=orders", "begin": '{"a/b": -4}'}, "an offset of at least 0"),
        ({"journals": "topic=orders", "message": "nowhere:Order"}, "cannot be loaded"),
        ({"journals": "topic=none"}, "no journal matches 'topic=none'"),
        ({"journals": "a b c"}, "a b c"),
        ({"journals": "a=b", "store": "ftp://host/"}, "must begin with one of"),
    ],
)
def test_a_wrong_option_is_one_clear_error(
    spark: SparkSession, gazette: EmbeddedCluster, options: dict[str, str], message: str
):
    if "address" not in options and "store" not in options:
        options = {"address": gazette.address, **options}
    with pytest.raises(PySparkException, match=message):
        spark.read.format("gazette").options(**options).schema("customer string").load().collect()


def test_json_without_a_schema_asks_for_one(spark: SparkSession, gazette: EmbeddedCluster):
    reader = spark.read.format("gazette").option("journals", "topic=orders")
    with pytest.raises(PySparkException, match="give one with"):
        reader.option("address", gazette.address).load()


def test_the_source_is_registered_under_its_name():
    assert GazetteDataSource.name() == "gazette"
