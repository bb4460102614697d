"""One Spark session for all tests that need it: a JVM takes seconds to start."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from gazette_spark import GazetteDataSource  # noqa: PLC0415 - the environment comes first

    # The JVM's environment is that of all Python workers. moto checks no credentials.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        # Workers import what tests register.
        tests = str(Path(__file__).parents[1])
        environment.setenv("PYTHONPATH", tests, prepend=os.pathsep)
        session = _started()
    session.dataSource.register(GazetteDataSource)
    yield session
    session.stop()


def _started() -> SparkSession:
    return (
        SparkSession.builder.master("local[2]")
        .appName("gazette tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
