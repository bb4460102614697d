"""A pause that is longer than the lease loses nothing, and its cluster serves again by itself."""

import contextlib
import http.client
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from crash.appends import History, append_over_http, make_content, read_over_http
from crash.dev_cluster import DevCluster

PAUSE_S = 4.0
"""Longer than the lease of the clusters, and than the half second in which Etcd ends a lease."""

JOURNALS = """
name: pause/
replication: {replication}
fragment:
  length: 262144
  compression_codec: GZIP
  stores: ["file:///"]
  refresh_interval: 1s
children:
  - name: pause/one
"""
NAME = "pause/one"
SERVES_AGAIN_S = 20.0


def append_known(url: str, history: History, content: bytes) -> bool:
    """Append, and note what became of it."""
    try:
        history.acknowledged[append_over_http(url, content)] = content
    except (OSError, http.client.HTTPException):
        history.unknown.append(content)
        return False
    return True


def append_until(stop: threading.Event, url: str, history: History, seed: int) -> None:
    chance = random.Random(seed)
    while not stop.is_set():
        if not append_known(url, history, make_content(chance, 2_000)):
            stop.wait(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paused", "brokers"), [("process", 1), ("all", 1), ("etcd", 1), ("all", 3)]
)
def test_a_dev_cluster_serves_again_after_a_pause_longer_than_its_lease(
    paused: str, brokers: int, tmp_path: Path
):
    with DevCluster(tmp_path / "data", "--lease", "2s", "--brokers", str(brokers)) as cluster:
        send = {
            "process": cluster.signal_process,
            "etcd": cluster.signal_etcd,
            "all": cluster.signal_all,
        }[paused]
        cluster.apply(JOURNALS.format(replication=brokers))
        url = f"{cluster.address}/{NAME}"
        history, stop = History(), threading.Event()
        writer = threading.Thread(target=append_until, args=(stop, url, history, 7))
        writer.start()
        while len(history.acknowledged) < 20:
            time.sleep(0.01)

        send(signal.SIGSTOP)
        time.sleep(PAUSE_S)  # the lease has to run out
        before = len(history.acknowledged)
        send(signal.SIGCONT)

        resumed_at = time.monotonic()
        try:
            while len(history.acknowledged) < before + 20:
                assert time.monotonic() < resumed_at + SERVES_AGAIN_S, "the cluster does not serve"
                time.sleep(0.01)
        finally:
            stop.set()
            writer.join(60)
        print(f"served again after {time.monotonic() - resumed_at:.1f} s")
        history.check(read_over_http(url))
        assert cluster.stop() == 0, "Ctrl-C is a clean end"
        output = b"".join(cluster.output).decode()
        assert output.count("joins the cluster again") == brokers
        assert "Traceback" not in output
        cluster.start()
        history.check(read_over_http(url))


def test_a_program_with_an_embedded_cluster_goes_on_after_a_pause_longer_than_the_lease(
    tmp_path: Path,
):
    count = 300
    program = subprocess.Popen(
        [
            *(sys.executable, "-m", "crash.pausing_program"),
            *(str(tmp_path / "data"), "pause/x", str(count)),
        ],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
    )
    try:
        assert program.stdout.readline() == "publishing\n"
        program.send_signal(signal.SIGSTOP)
        time.sleep(3)  # the lease has to run out
        program.send_signal(signal.SIGCONT)
        output, _ = program.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            program.kill()
        program.wait()
    assert program.returncode == 0
    numbers = [int(line) for line in output.splitlines()]
    assert numbers == list(range(count))
