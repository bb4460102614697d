"""Writes of a Spark cluster whose workers are processes of their own, and repeat their tasks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gazette_sdk import Journals, Reader
from gazette_sdk.embedded import EmbeddedCluster
from support.pages import ROOT
from support.spark_faults import planted
from support.spark_writes import committed, log_lines

PROGRAM_TIMEOUT_S = 800


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_attempts_that_fail_lag_or_lose_a_race_leave_nothing_visible(
    gazette: EmbeddedCluster, tmp_path: Path
):
    Journals(gazette.transport).create("copies", partitions=3, replication=1)
    path = [str(ROOT / "tests"), str(ROOT), str(ROOT / "contrib" / "spark")]
    subprocess.run(
        [sys.executable, "-m", "support.spark_cluster_writes", gazette.address, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        timeout=PROGRAM_TIMEOUT_S,
        check=True,
    )
    assert planted(tmp_path) == []
    assert sorted(message["n"] for message in committed(gazette)) == list(range(300))
    every = Reader(dict, "topic=copies", transport=gazette.transport, isolation="uncommitted")
    # Each fault left the rows of one of four tasks behind.
    written = sum("n" in envelope.message for envelope in every)
    assert written >= 300 + 3 * 25
    assert [line["rows"] for line in log_lines(gazette, "batch") if "rows" in line] == [100] * 3
