"""A broker in a process of its own with a store that fails, and heals while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from crash.appends import History, append_over_http, read_over_http
from crash.dev_cluster import DevCluster
from gazette_sdk.testing import StoreFaults, save_store_faults

WAIT_S = 60.0
SPEC = """
name: a/journal
replication: 1
fragment: {length: 1024, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1s}
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A `gazette dev` whose stores follow ``faults.json``."""
    save_store_faults(tmp_path / "faults.json", StoreFaults(), seed=1)
    popen = subprocess.Popen

    def with_faults(command, *arguments, **options):
        if command[1:3] == ["-m", "gazette_sdk.cli.gazette"]:
            faulty = "gazette_sdk.testing.faulty_process"
            command = [sys.executable, "-m", faulty, str(tmp_path / "faults.json"), *command[2:]]
        return popen(command, *arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", with_faults)
    with DevCluster(tmp_path / "data") as cluster:
        cluster.apply(SPEC)
        yield cluster


def fragments(cluster):
    return list((cluster.data / "fragments" / "a" / "journal").glob("*.raw"))


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_acknowledged_is_lost_while_a_store_fails(cluster, tmp_path):
    url, history = f"{cluster.address}/a/journal", History()

    def append():
        content = os.urandom(700)
        try:
            history.acknowledged[append_over_http(url, content)] = content
        except OSError:
            history.unknown.append(content)
            return False
        return True

    for _ in range(4):
        assert append()
    until(lambda: fragments(cluster))
    save_store_faults(tmp_path / "faults.json", StoreFaults(unreachable=True), seed=1)
    until(lambda: not append())
    stored = fragments(cluster)
    save_store_faults(tmp_path / "faults.json", StoreFaults(errors_after=0.3), seed=1)
    until(append)
    until(lambda: len(fragments(cluster)) > len(stored))
    history.check(read_over_http(url))
