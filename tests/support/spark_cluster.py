"""A Spark cluster whose executors are processes of their own, and jobs on it.

A process has one Spark session at a time, and its JVM keeps the environment that it was started
with. So the driver is another process, too, beside tests with a local session.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyspark

from gazette_spark import GazetteDataSource
from support.spark_faults import FaultyDataSource, executor_pid
from support.spark_session import start_session

T = TypeVar("T")

JOB_TIMEOUT_S = 500.0
"""Bound of a job. Spark starts many processes, which takes long on a busy machine."""


class SparkCluster:
    """Driver process of a cluster of two executors with one core each."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(self, job: Callable[..., T], *arguments: Any) -> T:
        """Run a function of this module in the driver, and return its result."""
        return self._pool.submit(job, *arguments).result(JOB_TIMEOUT_S)


@contextmanager
def spark_cluster(home: Path) -> Iterator[SparkCluster]:
    """Start a cluster, which keeps its files below a directory."""
    # A local cluster finds jars and Python below SPARK_HOME, and writes logs of executors there.
    for name in ("bin", "jars", "python"):
        (home / name).symlink_to(Path(pyspark.__file__).parent / name)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_start, initargs=(str(home),)) as pool:
        yield SparkCluster(pool)
        pool.submit(_stop).result(JOB_TIMEOUT_S)


def _start(home: str) -> None:
    # Executors have the environment of the driver's JVM. They import what tests register.
    tests = str(Path(__file__).parents[1])
    searched = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(searched)
    os.environ["SPARK_HOME"] = home
    memory = {"spark.executor.memory": "512m", "spark.local.dir": home}
    session = start_session("local-cluster[2,1,1024]", **memory)
    session.dataSource.register(GazetteDataSource)
    session.dataSource.register(FaultyDataSource)


def _stop() -> None:
    _session().stop()


def _session() -> pyspark.sql.SparkSession:
    return pyspark.sql.SparkSession.builder.getOrCreate()


# --------------------------------------------------------------------------- jobs


def read_rows(options: Mapping[str, str], schema: str) -> Counter[tuple[Any, ...]]:
    """Read journals in a batch, and return the rows, counted."""
    frame = _session().read.format("gazette").options(**options).schema(schema).load()
    return Counter(tuple(row) for row in frame.collect())


def copy_batch(source: Mapping[str, str], schema: str, target: Mapping[str, str]) -> None:
    """Write to journals what others hold, in a batch."""
    frame = _session().read.format("gazette").options(**source).schema(schema).load()
    frame.write.format("faulty").options(**target).mode("append").save()


def copy_stream(source: Mapping[str, str], schema: str, target: Mapping[str, str]) -> int:
    """Write to journals what others hold, as a stream; return the number of micro-batches."""
    stream = _session().readStream.format("gazette").options(**source).schema(schema).load()
    query = stream.writeStream.format("faulty").options(**target).trigger(availableNow=True).start()
    assert query.awaitTermination(JOB_TIMEOUT_S)
    return sum(progress.numInputRows > 0 for progress in query.recentProgress)


def processes_of_tasks() -> list[tuple[int, int]]:
    """Return the ids of the executors in which tasks run, and of the driver."""
    context = _session().sparkContext
    pids = context.parallelize(range(8), 8).map(lambda _: executor_pid()).distinct().collect()
    return [(pid, os.getpid()) for pid in pids]
