"""The source and the sink where executors are processes of their own, and fragments lie in S3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gazette_sdk import Journals, Publisher, mapping
from gazette_sdk.embedded import EmbeddedCluster
from support.services import Service
from support.spark_cluster import (
    SparkCluster,
    copy_batch,
    copy_stream,
    processes_of_tasks,
    read_rows,
    spark_cluster,
)
from support.spark_faults import plant, planted
from support.spark_writes import committed, log_lines
from support.stores import create_s3_bucket

pytestmark = pytest.mark.timeout(600)

CODECS = ("NONE", "GZIP", "ZSTANDARD", "SNAPPY")
SPECS = """
name: shop/
replication: 1
labels: [{{name: content-type, value: application/x-ndjson}}, {{name: topic, value: orders}}]
fragment: {{length: 4096, stores: ["{store}"], refresh_interval: 1s}}
children:
  - {{name: shop/orders-NONE, fragment: {{compression_codec: NONE}}}}
  - {{name: shop/orders-GZIP, fragment: {{compression_codec: GZIP}}}}
  - {{name: shop/orders-ZSTANDARD, fragment: {{compression_codec: ZSTANDARD}}}}
  - {{name: shop/orders-SNAPPY, fragment: {{compression_codec: SNAPPY}}}}
"""
SCHEMA = "cents long, _journal string"
KEPT, ROLLED_BACK = range(200), range(1000, 1100)


class RollBackError(Exception):
    pass


@dataclass
class Archive:
    """A broker that has begun over fragments in S3, which another one has stored."""

    cluster: EmbeddedCluster
    store: str

    @property
    def brokers(self) -> dict[str, str]:
        return {"address": self.cluster.address, "journals": "topic=orders"}

    @property
    def fragments(self) -> dict[str, str]:
        return {"store": self.store, "journals": "shop/"}


def expected(*numbers: range) -> Counter[tuple[int, str]]:
    journals = [f"shop/orders-{codec}" for codec in CODECS]
    return Counter((n, journal) for journal in journals for part in numbers for n in part)


def transact(publisher: Publisher, numbers: range, *, rolls_back: bool = False) -> None:
    with publisher.transaction() as transaction:
        for cents in numbers:
            transaction.publish({"cents": cents})
        if rolls_back:
            raise RollBackError


def publish(cluster: EmbeddedCluster, journal: str) -> None:
    """Publish some messages by themselves, others in transactions, one of them rolled back."""
    direct = mapping.direct(journal)
    with Publisher(mapping=direct, transport=cluster.transport) as publisher:
        for cents in KEPT[:100]:
            publisher.publish({"cents": cents})
        with pytest.raises(RollBackError):
            transact(publisher, ROLLED_BACK, rolls_back=True)
        transact(publisher, KEPT[100:])


@pytest.fixture(scope="module")
def archive(s3_service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        endpoint = f"http://{s3_service.address}"
        create_s3_bucket(endpoint, "spark-cluster")
        store = f"s3://spark-cluster/some/prefix/?endpoint={endpoint}&region=us-east-1"
        with EmbeddedCluster(tmp_path_factory.mktemp("first")) as first:
            first.apply(SPECS.format(store=store))
            for codec in CODECS:
                publish(first, f"shop/orders-{codec}")
        with EmbeddedCluster(tmp_path_factory.mktemp("second")) as second:
            second.apply(SPECS.format(store=store))
            Journals(second.transport).create("copies", partitions=2, replication=1)
            yield Archive(second, store)


@pytest.fixture(scope="module")
def spark(archive: Archive, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with spark_cluster(tmp_path_factory.mktemp("spark")) as started:
        yield started


def copies(archive: Archive) -> Counter[int]:
    return Counter(message["cents"] for message in committed(archive.cluster))


def target(archive: Archive, faults: Path, **options: str) -> dict[str, str]:
    address = archive.cluster.address
    return {"address": address, "journals": "topic=copies", "faults": str(faults), **options}


def test_tasks_run_in_two_processes_beside_the_driver(spark: SparkCluster):
    found = spark.run(processes_of_tasks)
    assert len(found) == 2
    assert len({pid for pids in found for pid in pids}) == 3


@pytest.mark.parametrize("place", ["brokers", "fragments"])
def test_fragments_of_every_codec_are_read_committed_and_uncommitted(
    spark: SparkCluster, archive: Archive, place: str
):
    options: dict[str, str] = getattr(archive, place)
    assert spark.run(read_rows, options, SCHEMA) == expected(KEPT)
    found = spark.run(read_rows, {**options, "isolation": "uncommitted"}, SCHEMA)
    # Acknowledgements are rows without content.
    with_content = Counter({row: n for row, n in found.items() if row[0] is not None})
    assert with_content == expected(KEPT, ROLLED_BACK)


def test_a_batch_is_written_once_though_a_task_fails_and_an_executor_is_killed(
    spark: SparkCluster, archive: Archive, tmp_path: Path
):
    before = copies(archive)
    plant(tmp_path, "task-published", "kill executor")
    plant(tmp_path, "task-prepared", "raise")
    spark.run(copy_batch, archive.brokers, "cents long", target(archive, tmp_path))
    assert planted(tmp_path) == []
    assert copies(archive) - before == Counter({n: len(CODECS) for n in KEPT})
    assert [line["rows"] for line in log_lines(archive.cluster, "batch") if "rows" in line] == [
        len(CODECS) * len(KEPT)
    ]


def test_a_stream_is_written_once_though_a_task_fails_and_an_executor_is_killed(
    spark: SparkCluster, archive: Archive, tmp_path: Path
):
    before = copies(archive)
    faults = tmp_path / "faults"
    faults.mkdir()
    plant(faults, "task-published", "raise")
    plant(faults, "task-prepared", "kill executor")
    options = target(archive, faults, checkpointLocation=str(tmp_path / "checkpoint"))
    source = {**archive.fragments, "maxBytesPerTrigger": "40k"}
    assert spark.run(copy_stream, source, "cents long", options) > 1
    assert planted(faults) == []
    assert copies(archive) - before == Counter({n: len(CODECS) for n in KEPT})
