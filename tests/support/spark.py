"""One Spark session for all tests that need it: a JVM takes seconds to start."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from gazette_spark import GazetteDataSource
from support.spark_session import start_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # The JVM's environment is that of all Python workers. moto checks no credentials.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        # Workers import what tests register.
        tests = str(Path(__file__).parents[1])
        environment.setenv("PYTHONPATH", tests, prepend=os.pathsep)
        session = start_session("local[2]")
    session.dataSource.register(GazetteDataSource)
    yield session
    session.stop()
