"""Spark sessions of tests, all with the same settings."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    # Python and the JVM meet at sockets that take one connection each. On TCP their ports are
    # those of brokers which tests have stopped, and clients of these dial them again.
    "spark.python.unix.domain.socket.enabled": "true",
}


def start_session(master: str, **settings: str) -> SparkSession:
    """Start a session, in a process that has none.

    Args:
        master: URL of the master, as ``local[2]``.
        settings: more settings of Spark, which replace those of all tests.
    """
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(master)
    for name, value in {**SETTINGS, **settings}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
