"""Run a pipeline by ``spark-submit``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NoReturn

from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.spark.settings import NO_PYSPARK, SPARK, parse_pairs
from gazette_sdk.errors import ConfigurationError

__all__ = ["run"]

STOP_TIMEOUT_S = 10.0
"""Bound of the wait for Spark to remove its temporary files."""


def run(invocation: Invocation) -> None:
    """Run the pipeline of a command, and wait for its end.

    Raises:
        ConfigurationError: PySpark or Java is missing.
        CommandFailedError: the pipeline failed.
    """
    [group] = [group for group in invocation.groups if group is not SPARK]
    spark = invocation.settings(SPARK)
    pipeline = group.title.rpartition(".")[2]
    conf = {"spark.log.level": "ERROR", **parse_pairs("--conf", spark.conf)}
    options = invocation.settings(group).model_dump()
    environ = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    with TemporaryDirectory(prefix="gazette-spark-") as directory:
        command = [
            *(_spark_submit(), "--master", spark.master, "--name", f"gazette {pipeline}"),
            *(part for pair in conf.items() for part in ("--conf", "=".join(pair))),
            *invocation.arguments,
            str(Path(__file__).with_name("driver.py")),
            json.dumps([pipeline, spark.format, options, directory]),
        ]
        status = _run_to_end(command, {**environ, **os.environ})
        summary, failure = Path(directory, "summary"), Path(directory, "failure")
        if summary.exists():
            sys.stdout.write(summary.read_text(encoding="utf-8"))
        if status:
            reason = failure.read_text(encoding="utf-8") if failure.exists() else "see above"
            raise CommandFailedError(f"{pipeline}: {reason} (spark-submit: status {status})")


def _run_to_end(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program and return its exit status. It ends with this one, and removes its files."""
    signal.signal(signal.SIGTERM, _exit)
    with subprocess.Popen(command, env=environ, stdout=sys.stderr) as program:  # noqa: S603 - our own
        try:
            return program.wait()
        except BaseException:
            program.terminate()
            try:
                program.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                program.kill()
            raise


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _spark_submit() -> str:
    """Return the path of ``spark-submit``: of SPARK_HOME, else of the installed PySpark.

    Raises:
        ConfigurationError: there is none, or no Java to run it.
    """
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise ConfigurationError("Spark needs Java 17 or later; install it, or set JAVA_HOME")
    if home := os.environ.get("SPARK_HOME"):
        return str(Path(home) / "bin" / "spark-submit")
    found = find_spec("pyspark")
    if found is None or found.origin is None:
        raise ConfigurationError(NO_PYSPARK)
    return str(Path(found.origin).parent / "bin" / "spark-submit")
