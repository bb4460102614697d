"""Modules that a broker enters for one small append, and for the delivery of one to a reader."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gazette_sdk
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.protocol.stream_frames import Kind
from gazette_sdk.transport.loop import run
from support.raw_stream import RawStream, read_call

JOURNAL = "walked/journal"
CONTENT = b'{"n":1}\n'
SPEC = f"""
name: {JOURNAL}
replication: 1
fragment:
  length: 1000000
  compression_codec: SNAPPY
  stores: [file:///]
  refresh_interval: 1m
"""
TIMES = 50
ROOT = str(Path(gazette_sdk.__file__).parent)

# The walks are told file by file in docs/architecture.md.
APPEND_MODULES_MAX = 19
DELIVERY_MODULES_MAX = 4  # beside those of the append that is delivered


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), sync_etcd=False) as cluster:
        cluster.apply(SPEC)
        yield cluster


def modules_of(work: Callable[[], None]) -> set[str]:
    """Return the modules that the broker's loop enters each time ``work`` runs."""
    entered: Counter[str] = Counter()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            entered[frame.f_code.co_filename] += 1

    async def profile(noted: Any) -> None:
        sys.setprofile(noted)

    run(profile(note))
    try:
        for _ in range(TIMES):
            work()
    finally:
        run(profile(None))
    mine = str(Path(ROOT) / "transport" / "loop.py")
    entered.pop(mine, None)
    return {file.removeprefix(ROOT) for file, count in entered.items() if count >= TIMES}


def test_an_append_and_its_delivery_enter_few_modules(cluster):
    with RawStream(cluster.address) as writer, RawStream(cluster.address) as reader:

        def append() -> None:
            writer.append(JOURNAL, CONTENT)

        def deliver() -> None:
            append()
            while reader.frame().kind != Kind.CONTENT:
                pass

        for _ in range(TIMES):
            append()
        by_append = modules_of(append)
        reader.send(read_call(JOURNAL, -1, block=True))
        while not any(cluster.brokers[0].broker.resolver.replica(JOURNAL).index._waiters):
            pass
        deliver()
        by_delivery = modules_of(deliver) - by_append
    assert len(by_append) <= APPEND_MODULES_MAX, sorted(by_append)
    assert len(by_delivery) <= DELIVERY_MODULES_MAX, sorted(by_delivery)
