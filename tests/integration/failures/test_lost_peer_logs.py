"""Brokers that lose a peer with many journals log a few lines with counts, not a line for each."""

from __future__ import annotations

import os
import time

from gazette_sdk import Journals
from gazette_sdk.testing import gazette_cluster

JOURNALS = int(os.environ.get("GAZETTE_LOST_PEER_JOURNALS", "100"))
LINES_MAX = 50
OBSERVED_S = 25.0
"""Time after the death in which lines count: the lease is over by then, and all is given away."""


def test_a_lost_peer_is_logged_in_few_lines(tmp_path):
    with gazette_cluster(3, data=tmp_path, log_level="warn") as cluster:
        transport = cluster.connect()
        Journals(transport=transport).create("many", partitions=JOURNALS, replication=2)
        cluster.wait_until_ready()
        logs = sorted((tmp_path / "logs").glob("broker-*.log"))
        before = {log: log.stat().st_size for log in logs}
        killed = cluster.broker("broker-2")
        died = time.monotonic()
        killed.kill()
        cluster.wait_until_ready()
        time.sleep(max(0.0, OBSERVED_S - (time.monotonic() - died)))
        lines = [
            line for log in logs for line in log.read_bytes()[before[log] :].decode().splitlines()
        ]
    assert len(logs) == 3
    assert 0 < len(lines) <= LINES_MAX, "\n".join(lines[:100])
