"""Spark sessions of tests, all with the same settings."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest import mock

from pyspark import java_gateway
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
    with mock.patch.object(java_gateway, "Popen", _start_without_fork):
        return builder.getOrCreate()


def _start_without_fork(
    command: list[str], *, preexec_fn: object, **options: Any
) -> subprocess.Popen[bytes]:
    """Start the JVM in a process group of its own, which no Ctrl-C reaches.

    PySpark has a function for that, which is called in the child, so that Python must fork. In a
    process whose threads use gRPC, as an embedded cluster's do, one in six of such children
    crashed before it became the JVM: ``epoll_wait error: Bad file descriptor``
    (https://github.com/grpc/grpc/issues/43055).
    """
    return subprocess.Popen(command, process_group=0, **options)
