"""What is wrong is the last line of the driver's exception: where it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from gazette_sdk import Journals, Publisher, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.fragment import Store
from support.protobuf_messages import Gram
from support.spark_writes import last_line

pytest_plugins = ["support.spark"]
pytestmark = pytest.mark.timeout(400)  # Spark starts many processes

NO_BROKER = "http://127.0.0.1:9"
KEYS = "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3I="


def failure_of(work: Callable[[], object]) -> str:
    """Return the last line of the error of a query, which is one of the SDK."""
    with pytest.raises(PySparkException) as caught:
        work()
    text = last_line(caught.value)
    assert text.startswith("gazette_sdk.errors.")
    return text


def check(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text


def read(spark: SparkSession, schema: str = "cents long", **options: str) -> DataFrame:
    return spark.read.format("gazette").options(**options).schema(schema).load()


def write(spark: SparkSession, **options: str) -> None:
    rows = spark.range(3).select(sf.col("id").alias("cents"))
    rows.write.format("gazette").options(**options).mode("append").save()


def stream(spark: SparkSession, checkpoint: Path, **options: str) -> None:
    rows = spark.readStream.format("gazette").options(**options).schema("cents long").load()
    started = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    started.trigger(availableNow=True).start().awaitTermination()


def publish(cluster: EmbeddedCluster, topic: str, messages: list, **options: str) -> None:
    Journals(cluster.transport).create(topic, partitions=1, replication=1, **options)
    by_topic = mapping.random(f"topic={topic}")
    with Publisher(mapping=by_topic, transport=cluster.transport) as publisher:
        publisher.publish_batch(messages).result(30)


def test_a_missing_broker_is_named_by_reads_writes_and_streams(spark: SparkSession, tmp_path: Path):
    options = {"address": NO_BROKER, "journals": "topic=orders"}
    for work in (
        lambda: read(spark, **options).collect(),
        lambda: write(spark, **options),
        lambda: stream(spark, tmp_path, **options),
    ):
        check(failure_of(work), f"cannot connect to {NO_BROKER}", "check that a broker runs at")


def test_a_missing_credential_of_a_broker_is_named(spark: SparkSession, tmp_path: Path):
    with EmbeddedCluster(tmp_path, sync_etcd=False, auth_keys=KEYS) as cluster:
        options = {"address": cluster.address, "journals": "topic=orders"}
        for work in (lambda: read(spark, **options).collect(), lambda: write(spark, **options)):
            check(failure_of(work), "UnauthenticatedError", cluster.address, "BROKER_AUTH_KEYS")


def test_a_missing_bucket_is_named(spark: SparkSession, make_store: Callable[..., Store]):
    url = make_store("s3").url
    missing = url.replace(urlsplit(url).netloc, "no-such-bucket")
    text = failure_of(lambda: read(spark, store=missing, journals="orders/").collect())
    check(text, "no-such-bucket", "orders/", "check")


def test_a_schema_that_does_not_fit_is_named_with_journal_and_fragment(
    spark: SparkSession, gazette: EmbeddedCluster
):
    publish(gazette, "orders", [{"cents": cents} for cents in range(9)])
    gazette.stop()  # a stop stores what was only local
    [file] = (gazette.fragments / "orders/part-000").iterdir()
    stored = {"store": f"file://{gazette.fragments}/", "journals": "orders/"}
    text = failure_of(lambda: read(spark, "cents boolean", **stored).collect())
    check(text, "orders/part-000: the message at offset 0 cannot", file.name, "mode=PERMISSIVE")


def test_a_class_that_executors_cannot_import_is_named_with_the_journal(
    spark: SparkSession, gazette: EmbeddedCluster
):
    kind = {"content_type": "application/x-protobuf-fixed"}
    publish(gazette, "grams", [Gram(text="a")], **kind)
    options = {"address": gazette.address, "journals": "topic=grams"}
    message = "support.driver_only:Gram"
    text = failure_of(lambda: read(spark, "text string", message=message, **options).collect())
    check(text, f"message '{message}' cannot be loaded", "addPyFile", "to read grams/part-000")
    message = "nowhere_pb2:Gram"
    text = failure_of(lambda: read(spark, "text string", message=message, **options).collect())
    check(text, f"message '{message}' cannot be loaded", "addPyFile")


def test_a_stream_names_what_is_wrong_with_a_fragment(
    spark: SparkSession, gazette: EmbeddedCluster, tmp_path: Path
):
    publish(gazette, "orders", [{"cents": cents} for cents in range(9)])
    gazette.stop()
    [file] = (gazette.fragments / "orders/part-000").iterdir()
    stored_bytes = file.read_bytes()
    # Only where content is missing: of a file without its last bytes all may still be read.
    file.write_bytes(stored_bytes[: len(stored_bytes) // 2])
    stored = {"store": f"file://{gazette.fragments}/", "journals": "orders/"}
    text = failure_of(lambda: stream(spark, tmp_path / "checkpoint", **stored))
    check(text, "CorruptFragmentError", "orders/part-000", file.name, "put a good copy")
