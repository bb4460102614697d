"""Writes of two at a time: attempts of one task, jobs of one version, and drivers of one query."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from gazette_sdk import Journals, Reader
from gazette_sdk.embedded import EmbeddedCluster
from support.spark_faults import FaultyDataSource, held, plant
from support.spark_writes import committed, last_line, log_lines

pytest_plugins = ["support.spark"]
pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 400
ROWS = 40
TASKS = 4


@pytest.fixture
def cluster(gazette: EmbeddedCluster) -> EmbeddedCluster:
    Journals(gazette.transport).create("copies", partitions=2, replication=1)
    return gazette


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    made = tmp_path / "faults"
    made.mkdir()
    return made


def start_driver(kind: str, **given: Any) -> subprocess.Popen[str]:
    """Start a driver in a process of its own."""
    root = Path(__file__).parents[3]
    paths = [root / "tests", root, root / "contrib" / "spark"]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYSPARK_PYTHON": sys.executable,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "support.spark_driver", json.dumps({"kind": kind, **given})],
        env=environ,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


@pytest.fixture
def drivers() -> Iterator[list[subprocess.Popen[str]]]:
    """Drivers of a test, which end with it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for driver in started:
        driver.kill()
        driver.communicate()


def wait_for(driver: subprocess.Popen[str]) -> None:
    _, errors = driver.communicate(timeout=TIMEOUT_S)
    assert driver.returncode == 0, errors


def numbers(cluster: EmbeddedCluster) -> list[int]:
    return sorted(message["n"] for message in committed(cluster))


def written(cluster: EmbeddedCluster) -> Counter[int]:
    """Count the messages that are written, committed or not, by their number."""
    reader = Reader(dict, "topic=copies", transport=cluster.transport, isolation="uncommitted")
    return Counter(e.message["n"] for e in reader if "n" in e.message)


def wait_until_done(driver: subprocess.Popen[str], cluster: EmbeddedCluster) -> None:
    """Wait until the transaction of a batch is done."""
    log = "gazette-spark/transactions/batch"
    while log not in {each.name for each in Journals(cluster.transport).list()}:
        check_runs(driver)
    for envelope in Reader(dict, name=log, transport=cluster.transport, block=True):
        if "done" in envelope.message:
            return
        check_runs(driver)


def check_runs(driver: subprocess.Popen[str]) -> None:
    time.sleep(0.1)
    assert driver.poll() is None, driver.communicate()[1]


def test_of_two_attempts_of_a_task_that_both_end_one_is_visible(
    cluster: EmbeddedCluster, faults: Path, tmp_path: Path, drivers: list[subprocess.Popen[str]]
):
    plant(faults, "task-prepared", "hold")
    options = {"address": cluster.address, "journals": "topic=copies", "faults": str(faults)}
    driver = start_driver(
        "speculation", options=options, count=ROWS, tasks=TASKS, directory=str(tmp_path / "workers")
    )
    drivers.append(driver)
    with held(faults, "task-prepared", lambda: check_runs(driver)):
        # All messages of the held attempt are durable. Another attempt of its task ends the job.
        wait_until_done(driver, cluster)
        assert numbers(cluster) == list(range(ROWS))
    wait_for(driver)
    assert numbers(cluster) == list(range(ROWS))
    # On a busy machine Spark starts second attempts of other tasks, too.
    attempts = Counter(written(cluster).values())
    assert attempts[2] >= ROWS // TASKS
    assert attempts[1] + attempts[2] == ROWS
    [record] = [line for line in log_lines(cluster, "batch") if "decided" in line]
    assert len(record["intents"]) == TASKS
    assert record["rows"] == ROWS


def test_of_two_jobs_that_write_one_version_one_wins_and_the_other_is_told(
    spark: SparkSession, cluster: EmbeddedCluster, faults: Path
):
    spark.dataSource.register(FaultyDataSource)
    plant(faults, "before-decided", "hold")

    def write(first: int) -> None:
        # Spark looks for data sources in the session of the thread.
        jvm_session = spark._jvm.org.apache.spark.sql.classic.SparkSession
        jvm_session.setActiveSession(spark._jsparkSession)
        rows = spark.range(first, first + ROWS, 1, 2).select(sf.col("id").alias("n"))
        rows.write.format("faulty").options(
            address=cluster.address,
            journals="topic=copies",
            txnAppId="nightly",
            txnVersion=7,
            faults=str(faults),
        ).mode("append").save()

    with ThreadPoolExecutor(1) as pool:
        beaten = pool.submit(write, 1000)
        with held(faults, "before-decided", lambda: beaten.done() and beaten.result()):
            write(0)
            assert numbers(cluster) == list(range(ROWS))
        with pytest.raises(PySparkException) as caught:
            beaten.result(TIMEOUT_S)
    text = last_line(caught.value)
    assert "gazette-spark/transactions/nightly: another job has written txnVersion 7" in text
    assert "a txnVersion of its own" in text
    assert numbers(cluster) == list(range(ROWS))
    assert written(cluster).total() == 2 * ROWS  # all that the other wrote, invisible
    write(1000)  # a job that begins when the version is there is a repeated one
    assert numbers(cluster) == list(range(ROWS))


def test_of_two_live_drivers_of_one_query_one_wins_and_the_other_is_told(
    spark: SparkSession,
    cluster: EmbeddedCluster,
    faults: Path,
    tmp_path: Path,
    drivers: list[subprocess.Popen[str]],
):
    spark.dataSource.register(FaultyDataSource)
    files = tmp_path / "files"
    spark.range(0, ROWS, 1, 2).select(sf.col("id").alias("n")).write.json(str(files))
    options = {
        "address": cluster.address,
        "journals": "topic=copies",
        "checkpointLocation": str(tmp_path / "checkpoint"),
        "faults": str(faults),
    }
    plant(faults, "before-decided", "hold")
    stream = spark.readStream.format("json").schema("n long").load(str(files))
    query = stream.writeStream.format("faulty").options(**options)
    beaten = query.trigger(availableNow=True).start()
    with held(faults, "before-decided"):
        driver = start_driver("stream", options=options, files=str(files), rows="n long")
        drivers.append(driver)
        wait_for(driver)
        assert numbers(cluster) == list(range(ROWS))
    with pytest.raises(PySparkException) as caught:
        beaten.awaitTermination(TIMEOUT_S)
    text = last_line(caught.value)
    log = f"gazette-spark/transactions/{beaten.id}"
    assert f"{log}: another driver has written micro-batch 0 at the same time" in text
    assert "stop one of them" in text
    assert numbers(cluster) == list(range(ROWS))
    again = query.trigger(availableNow=True).start()
    assert again.awaitTermination(TIMEOUT_S)
    assert numbers(cluster) == list(range(ROWS))
    assert [line["decided"] for line in log_lines(cluster, str(again.id)) if "decided" in line] == [
        0
    ]
