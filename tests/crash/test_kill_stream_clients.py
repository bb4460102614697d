"""A client that is killed at whatever boundary of its frames leaves nothing, or everything."""

from __future__ import annotations

import random
import time

import pytest

from crash.appends import History, make_content, read_over_http
from crash.dev_cluster import DevCluster
from crash.killing import warm_processes
from crash.stopping_client import Boundary, append_and_stop, boundaries
from support.raw_stream import RawStream

JOURNALS = """
name: killed/
replication: 1
fragment:
  length: 4194304
  compression_codec: NONE
  stores: ["file:///"]
  refresh_interval: 1m
children:
  - name: killed/small
  - name: killed/streamed
"""

STOP_TIMEOUT_S = 30.0
PROMPT_S = 3.0
"""What the next append may take. A broker that waited for the silent client would take more."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    with DevCluster(tmp_path_factory.mktemp("killed") / "data") as cluster:
        cluster.apply(JOURNALS)
        yield cluster


@pytest.fixture(scope="module")
def processes():
    with (
        pytest.MonkeyPatch.context() as patch,
        warm_processes(patch.setenv, "crash.stopping_client") as context,
    ):
        yield context


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"), [("small", [200]), ("streamed", [70_000, 100_000, 200, 150_000])]
)
def test_a_client_killed_at_any_boundary_leaves_nothing_or_everything(
    name: str, sizes: list[int], cluster: DevCluster, processes
):
    journal = f"killed/{name}"
    chance = random.Random(name)
    history = History()
    committed = 0
    for boundary in boundaries(len(sizes)):
        content = make_content(chance, sum(sizes))
        chunks, begin = [], 0
        for size in sizes:
            chunks.append(content[begin : begin + size])
            begin += size
        (history.unknown if boundary.commits else history.given_up).append(content)
        _kill_at(boundary, cluster, journal, chunks, processes)

        following = make_content(chance, 100)
        began = time.monotonic()
        with RawStream(cluster.address) as other:
            response = other.append(journal, following)
        took_s = time.monotonic() - began
        assert took_s < PROMPT_S, f"behind {boundary} the next append took {took_s:.1f} s"
        history.acknowledged[response.commit.begin] = following

        found = read_over_http(f"{cluster.address}/{journal}")
        history.check(found)
        committed += content in found
    print(f"{name}: {len(boundaries(len(sizes)))} kills; {committed} appends were whole")


def _kill_at(
    boundary: Boundary, cluster: DevCluster, journal: str, chunks: list[bytes], processes
) -> None:
    """Let a client come to a boundary, and kill it there."""
    events, log = processes.Pipe(duplex=False)
    client = processes.Process(
        target=append_and_stop,
        args=(cluster.address, journal, chunks, boundary),
        kwargs={"streamed": len(chunks) > 1, "log": log},
        daemon=True,
    )
    client.start()
    log.close()
    try:
        assert events.poll(STOP_TIMEOUT_S), f"it never came to {boundary}"
        sent = events.recv()
    finally:
        client.kill()
        client.join()
        events.close()
    kinds = ["preface", "CALL", *["CONTENT"] * len(chunks), "END"]
    assert sent == kinds[: boundary.frame + 1]
