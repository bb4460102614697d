"""Writes whose tasks, commits and drivers fail: every row of the table in docs/spark.md.

A query copies files to journals, one file in a micro-batch. After each fault it is started again
from its checkpoint, and what committed readers see is compared with the files, row by row.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming import StreamingQuery

from gazette_sdk import Journals, Publisher
from gazette_sdk.embedded import EmbeddedCluster
from gazette_spark import transactions
from support.spark_faults import FaultyDataSource, plant, planted
from support.spark_writes import committed, last_line, log_lines, producers_by_journal

pytest_plugins = ["support.spark"]
pytestmark = pytest.mark.timeout(600)

QUERY_TIMEOUT_S = 280
"""Spark starts many processes, which takes minutes on a busy machine."""


class Copy:
    """A streaming query from files to journals, and the files it has been given."""

    def __init__(self, spark: SparkSession, cluster: EmbeddedCluster, directory: Path) -> None:
        self.spark = spark
        self.cluster = cluster
        self.faults = directory / "faults"
        self.files = directory / "files"
        self.checkpoint = directory / "checkpoint"
        self.query_id = ""
        self.transaction_log = "gazette-spark/transactions"
        self.rows = 0
        self.beaten: set[int] = set()  # rows which a rival wrote
        self.faults.mkdir()
        self.files.mkdir()

    def add_files(self, count: int, rows: int = 12) -> None:
        for _ in range(count):
            lines = [
                json.dumps({"n": n, "key": f"key {n % 7}"})
                for n in range(self.rows, self.rows + rows)
            ]
            made = self.files.parent / "new.json"
            made.write_text("\n".join(lines))
            made.rename(self.files / f"{self.rows:06}.json")
            self.rows += rows

    def start(self) -> StreamingQuery:
        stream = (
            self.spark.readStream.format("json")
            .schema("n long, key string")
            .option("maxFilesPerTrigger", 1)
            .load(str(self.files))
            .repartition(2)
        )
        query = (
            stream.writeStream.format("faulty")
            .option("faults", str(self.faults))
            .option("address", self.cluster.address)
            .option("journals", "topic=copies")
            .option("key", "key")
            .option("transactionLog", self.transaction_log)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        self.query_id = str(query.id)
        return query

    def run(self) -> None:
        """Run the query until it has read all files."""
        assert self.start().awaitTermination(QUERY_TIMEOUT_S)

    def fail(self) -> str:
        """Run the query, which must fail; return the last line of its error."""
        query = self.start()
        with pytest.raises(PySparkException) as caught:
            query.awaitTermination(QUERY_TIMEOUT_S)
        return last_line(caught.value)

    def check(self) -> None:
        found = sorted((m["n"], m["key"]) for m in committed(self.cluster))
        wanted = sorted(set(range(self.rows)) - self.beaten)
        assert found == [(n, f"key {n % 7}") for n in wanted]

    @property
    def log(self) -> list[dict]:
        return log_lines(self.cluster, self.query_id, self.transaction_log)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        Journals(cluster.transport).create("copies", partitions=3, replication=1)
        yield cluster


@pytest.fixture(scope="module")
def copy(
    spark: SparkSession, cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Copy:
    """One query for all faults: each has micro-batches of its own."""
    spark.dataSource.register(FaultyDataSource)
    copy = Copy(spark, cluster, tmp_path_factory.mktemp("copy"))
    copy.add_files(2)
    copy.run()
    copy.check()
    return copy


FAULTS = [
    ("task-published", "raise", "task fails before prepare"),
    ("task-published", "kill", "worker dies before prepare"),
    ("task-prepared", "raise", "task fails after prepare"),
    ("before-decided", "kill", "driver dies before decided"),
    ("after-decided", "kill", "driver dies after decided"),
    ("after-acknowledgement", "kill", "driver dies between acknowledgements"),
    ("before-done", "kill", "driver dies after acknowledgements"),
    ("after-done", "kill", "driver dies after done"),
    ("after-decided", "raise", "commit fails and Spark calls abort"),
]


@pytest.mark.parametrize(
    ("place", "what"), [(p, w) for p, w, _ in FAULTS], ids=[name for _, _, name in FAULTS]
)
def test_a_query_that_fails_and_is_started_again_writes_each_row_once(
    copy: Copy, place: str, what: str
):
    plant(copy.faults, place, what)
    copy.add_files(2)
    copy.fail()
    assert planted(copy.faults) == []
    copy.run()
    copy.check()
    decided = [line["decided"] for line in copy.log if "decided" in line]
    assert decided == list(range(copy.rows // 12))
    is_decided = place.startswith(("after", "before-done"))
    [done] = [line for line in copy.log if line.get("done") == decided[-2]]
    assert done["clean"] is (not is_decided or place == "after-done")


LOST = [
    ("task-answers", "an append is tried again inside a task"),
    ("after-decided", "the answer of decided is lost"),
    ("after-done", "the answer of done is lost"),
]


@pytest.mark.parametrize("place", [p for p, _ in LOST], ids=[name for _, name in LOST])
def test_lost_answers_of_appends_stop_no_query(copy: Copy, place: str):
    plant(copy.faults, place, "lose")
    copy.add_files(1)
    copy.run()
    assert planted(copy.faults) == []
    copy.check()
    assert copy.log[-1]["clean"] is True


def test_two_drivers_on_one_checkpoint_write_each_row_once(copy: Copy, tmp_path: Path):
    behind = tmp_path / "checkpoint"
    shutil.copytree(copy.checkpoint, behind)
    copy.add_files(3)
    copy.run()
    copy.checkpoint, newest = behind, copy.checkpoint
    try:
        error = copy.fail()
    finally:
        copy.checkpoint = newest
    assert "another driver runs the same query, or its checkpoint is an old copy" in error
    copy.check()


def test_a_rival_that_decides_first_is_completed_and_what_it_beat_stays_invisible(copy: Copy):
    number = max(line["decided"] for line in copy.log if "decided" in line) + 1
    name = f"{copy.transaction_log}/{copy.query_id}"
    line = json.dumps({"decided": number, "job": "rival", "intents": [], "rows": 0})
    with Publisher(transport=copy.cluster.transport) as publisher:
        publisher.acknowledge({name: line.encode() + b"\n"}).result(30)
    before = len(committed(copy.cluster))
    copy.add_files(1)
    copy.run()
    assert len(committed(copy.cluster)) == before  # the rival wrote the rows of this batch
    assert [line for line in copy.log if number in line.values()] == [
        {"decided": number, "job": "rival", "intents": [], "rows": 0},
        {"completing": number},
        {"done": number, "clean": False},
    ]
    copy.beaten.update(range(copy.rows - 12, copy.rows))
    copy.check()


def test_a_log_that_is_lost_stops_the_query_until_it_is_created(copy: Copy):
    done = copy.log[-1]["done"]
    copy.transaction_log = "another/place"
    copy.add_files(1)
    assert f"transactions.create('{copy.query_id}', ..., after={done})" in copy.fail()
    where = {"address": copy.cluster.address, "transaction_log": copy.transaction_log}
    transactions.create(copy.query_id, "topic=copies", after=done, **where)
    copy.run()
    copy.check()


def test_a_batch_that_dies_when_it_is_decided_is_completed_by_the_next(
    spark: SparkSession, copy: Copy, tmp_path: Path
):
    Journals(copy.cluster.transport).create("second", partitions=2, replication=1)

    def write(first: int) -> None:
        frame = spark.range(first, first + 10).select(sf.col("id").alias("n"))
        frame.write.format("faulty").options(
            address=copy.cluster.address, journals="topic=second", faults=str(tmp_path)
        ).mode("append").save()

    write(0)
    plant(tmp_path, "after-decided", "kill")
    with pytest.raises(Py4JJavaError, match="Python worker exited unexpectedly"):
        write(10)
    plant(tmp_path, "task-prepared")
    with pytest.raises(PySparkException, match="InjectedError: task-prepared"):
        write(20)
    write(30)
    found = sorted(message["n"] for message in committed(copy.cluster, "topic=second"))
    assert found == [*range(20), *range(30, 40)]
    lines = log_lines(copy.cluster, "batch")
    assert [line["clean"] for line in lines if "done" in line] == [True, False, True]


def test_the_producers_of_a_query_are_those_of_its_workers(copy: Copy):
    first = set.union(*producers_by_journal(copy.cluster).values())
    copy.add_files(6)
    copy.run()
    copy.check()
    # What was in doubt is not used again: the workers had idle ones, or take one more.
    added = set.union(*producers_by_journal(copy.cluster).values()) - first
    assert len(added) <= 4
