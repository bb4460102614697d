"""`kill -9` of `gazette dev` in the middle of appends loses nothing that was acknowledged."""

import http.client
import os
import random
import threading
import time
from pathlib import Path

import pytest

from crash.appends import History, append_over_http, make_content, read_over_http
from crash.dev_cluster import DevCluster

ROUNDS = int(os.environ.get("GAZETTE_KILLS", "5"))
WRITERS_PER_JOURNAL = 2

JOURNALS = """
name: crash/
replication: 1
fragment:
  length: 262144
  compression_codec: GZIP
  stores: ["file:///"]
  refresh_interval: 1s
children:
  - name: crash/one
  - name: crash/two
"""
NAMES = ("crash/one", "crash/two")


def append_until_it_dies(url: str, history: History, seed: int, lock: threading.Lock) -> None:
    """Append one after the other; the one whose answer does not come is unknown."""
    chance = random.Random(seed)
    while True:
        content = make_content(chance, chance.choice([1, 200, 5_000, 80_000, 300_000]))
        try:
            begin = append_over_http(url, content)
        except (OSError, http.client.HTTPException):
            with lock:
                history.unknown.append(content)
            return
        with lock:
            assert begin not in history.acknowledged, "one offset was acknowledged twice"
            history.acknowledged[begin] = content


@pytest.mark.slow
@pytest.mark.timeout(100 + 20 * ROUNDS)
def test_every_acknowledged_append_survives_kills_in_a_row(tmp_path: Path):
    cluster = DevCluster(tmp_path / "data")
    histories = {name: History() for name in NAMES}
    chance = random.Random(20)
    lock = threading.Lock()
    for round_number in range(ROUNDS):
        cluster.start()
        if round_number == 0:
            cluster.apply(JOURNALS)
        for name, history in histories.items():
            history.check(read_over_http(f"{cluster.address}/{name}"))

        before = sum(len(history.acknowledged) for history in histories.values())
        writers = [
            threading.Thread(
                target=append_until_it_dies,
                args=(f"{cluster.address}/{name}", history, chance.getrandbits(32), lock),
            )
            for name, history in histories.items()
            for _ in range(WRITERS_PER_JOURNAL)
        ]
        for writer in writers:
            writer.start()
        # The kill comes after some appends of this round, and at no moment they could know.
        wanted = before + chance.randrange(5, 120)
        deadline = time.monotonic() + 30
        while sum(len(h.acknowledged) for h in histories.values()) < wanted:
            assert any(writer.is_alive() for writer in writers), "all appends of a round failed"
            assert time.monotonic() < deadline, "appends make no progress"
            time.sleep(chance.random() * 0.01)
        cluster.kill()
        for writer in writers:
            writer.join(60)
            assert not writer.is_alive()

    cluster.start()
    for name, history in histories.items():
        history.check(read_over_http(f"{cluster.address}/{name}"))
    assert cluster.stop() == 0, "Ctrl-C is a clean end"
    acknowledged = sum(len(history.acknowledged) for history in histories.values())
    unknown = sum(len(history.unknown) for history in histories.values())
    print(f"{acknowledged} acknowledged appends, {unknown} unknown ones, {ROUNDS} kills")

    cluster.start()
    for name, history in histories.items():
        history.check(read_over_http(f"{cluster.address}/{name}"))
    assert cluster.stop() == 0
