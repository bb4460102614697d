"""The batch source reads what the SDK published: over a broker, and from fragment files alone."""

import datetime as dt
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from gazette_sdk import JsonMessage, Publisher, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.fragment import Store
from gazette_spark import GazetteDataSource
from support.fragment_files import fragment_of, store_fragment

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


def test_timestamps_are_those_of_sparks_own_json_source(spark: SparkSession, tmp_path: Path):
    texts = "01T00:00:00.123456789Z", "02T00:00:00", "03T02:30:00.5", "04T00:00:00+05:30"
    content = b"".join(b'{"at":"2026-07-%s"}\n' % text.encode() for text in texts)
    store_fragment(tmp_path / "store", fragment_of("a/part", 0, content), content)
    plain = tmp_path / "plain.json"
    plain.write_bytes(content)
    options = {"store": f"file://{tmp_path}/store/", "journals": "a/", "isolation": "uncommitted"}
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        ours = spark.read.format("gazette").options(**options).schema("at timestamp").load()
        assert ours.collect() == spark.read.schema("at timestamp").json(str(plain)).collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


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


def test_json_without_a_schema_has_that_of_its_messages(
    spark: SparkSession, gazette: EmbeddedCluster
):
    gazette.apply(JOURNALS.format(codec="GZIP"))
    expected = publish(gazette, 10)
    reader = spark.read.format("gazette").option("journals", "topic=orders")
    frame = reader.option("address", gazette.address).load()
    assert frame.columns == ["customer", "cents", "_journal", "_offset", "_uuid", "_time"]
    assert rows(frame) == expected


class RollBackError(Exception):
    pass


def transact(publisher: Publisher, orders: list[Order], *, rolls_back: bool = False) -> None:
    with publisher.transaction() as transaction:
        for order in orders:
            transaction.publish(order)
        if rolls_back:
            raise RollBackError


def test_transactions_are_read_from_an_object_store_as_they_were_committed(
    spark: SparkSession, gazette: EmbeddedCluster, make_store: Callable[..., Store]
):
    store = make_store("s3")
    specs = JOURNALS.format(codec="ZSTANDARD").replace("file:///", store.url)
    gazette.apply(specs)
    committed = [Order(f"customer {i % 7}", i) for i in range(300)]
    with Publisher(mapping=BY_CUSTOMER, transport=gazette.transport) as publisher:
        for begin in range(0, 300, 100):
            part = committed[begin : begin + 100]
            with pytest.raises(RollBackError):
                transact(publisher, part, rolls_back=True)
            transact(publisher, part)
    expected = Counter((order.customer, order.cents) for order in committed)
    over_broker = spark.read.format("gazette").option("address", gazette.address)
    frame = over_broker.option("journals", "topic=orders").schema(SCHEMA).load()
    assert rows(frame) == expected
    gazette.stop()  # a stop stores what was only local
    stored = spark.read.format("gazette").option("store", store.url)
    frame = stored.option("journals", "shop/orders/").schema(SCHEMA).load()
    assert rows(frame) == expected
    every = stored.option("journals", "shop/orders/").option("isolation", "uncommitted")
    # Beside what was rolled back there are acknowledgements, which have an empty customer.
    assert rows(every.schema(SCHEMA).load().where("customer <> ''")) == expected + expected


def test_filters_leave_out_journals_and_rows_alike(spark: SparkSession, gazette: EmbeddedCluster):
    gazette.apply(JOURNALS.format(codec="GZIP"))
    publish(gazette, 200)
    reader = spark.read.format("gazette").option("address", gazette.address)
    frame = reader.option("journals", "topic=orders").schema(SCHEMA).load()
    filters = "_journal = 'shop/orders/part-001' and _offset > 0 and _time > '2020-01-01'"
    expected = rows(frame.where(filters))
    assert 0 < sum(expected.values()) < 200
    assert frame.where(filters).rdd.getNumPartitions() == 2
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        pushed = reader.load().where(filters)
        assert rows(pushed) == expected
        assert pushed.rdd.getNumPartitions() == 1
        assert rows(reader.load().where("_offset in (0)")) == rows(frame.where("_offset = 0"))
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


# ------------------------------------------------------------------ bad input


def last_line(error: PySparkException) -> str:
    """The last line of an exception, but for the state that Spark appends to some."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(line for line in reversed(lines) if not line.startswith("SQLSTATE"))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"address": "http://127.0.0.1:9"}, ["127.0.0.1:9", "check that a broker runs"]),
        ({"store": "file:///nowhere/at/all/"}, ["/nowhere/at/all/"]),
        ({"store": "s3://bucket/?region=us-east-1&profile=nobody"}, ["s3://bucket/", "nobody"]),
    ],
)
def test_a_broker_or_a_store_that_is_not_there_is_named_in_the_last_line(
    spark: SparkSession, options: dict[str, str], parts: list[str]
):
    reader = spark.read.format("gazette").options(**options).option("journals", "shop/orders/")
    with pytest.raises(PySparkException) as raised:
        reader.schema(SCHEMA).load().collect()
    text = last_line(raised.value)
    assert text.startswith("gazette_sdk.errors.")
    for part in parts:
        assert part in text


def test_what_is_wrong_with_a_fragment_is_the_last_line(
    spark: SparkSession, gazette_cluster: Callable[[int], EmbeddedCluster]
):
    cluster = gazette_cluster(1)
    cluster.apply(JOURNALS.format(codec="GZIP"))
    publish(cluster, 200)
    cluster.stop()
    reader = spark.read.format("gazette").option("store", f"file://{cluster.fragments}/")
    reader = reader.option("journals", "shop/orders/part-000")
    frame = reader.schema("customer string").load()
    assert frame.count() > 0  # which plans it
    file = sorted((cluster.fragments / "shop/orders/part-000").iterdir())[1]
    content = file.read_bytes()

    def failure_of(failing: DataFrame) -> str:
        with pytest.raises(PySparkException) as raised:
            failing.collect()
        return last_line(raised.value)

    for problem, damage in [
        ("was there when the query was planned", file.unlink),
        ("CorruptFragmentError", lambda: file.write_bytes(content[:-30])),
    ]:
        damage()
        text = failure_of(frame)
        for part in (problem, "shop/orders/part-000", file.name):
            assert part in text
    file.write_bytes(content)
    text = failure_of(reader.schema("customer long").load())
    assert "shop/orders/part-000: the message at offset 0 cannot be decoded" in text


def test_the_source_is_registered_under_its_name():
    assert GazetteDataSource.name() == "gazette"


def test_strings_take_what_the_json_source_of_spark_takes(spark: SparkSession, tmp_path: Path):
    values = ['"x"', "1", "1.50", "true", "null", '{"a": 1}', "[1, 2.0]", '"\\u00e9"', "[]"]
    content = "".join(f'{{"v":{value},"s":{{"v":{value}}}}}\n' for value in values).encode()
    store_fragment(tmp_path, fragment_of("a/part", 0, content), content)
    (tmp_path / "lines.json").write_bytes(content)
    options = {"store": tmp_path.as_uri(), "journals": "a/part", "isolation": "uncommitted"}
    for schema in ("v string, s struct<v: string>", None):  # it infers the same, too
        reader = spark.read.format("gazette").options(**options)
        wanted = spark.read.json(str(tmp_path / "lines.json"), schema=schema)
        found = (reader.schema(schema) if schema else reader).load().select(wanted.columns)
        assert found.schema.simpleString() == wanted.schema.simpleString()
        assert found.collect() == wanted.collect()
