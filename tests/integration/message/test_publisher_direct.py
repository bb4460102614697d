"""Publishing by the threads that wait, to real brokers: order, once only, and whatever happens."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from crash.dev_cluster import DevCluster
from gazette_sdk import Publisher, Reader, connect, mapping
from gazette_sdk.message.publishing import receipt as receipt_module
from gazette_sdk.message.publishing.receipt import ReceiptTimeoutError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.stream import ChosenTransport, StreamTransport
from gazette_sdk.transport.stream.blocking import REDIAL_AFTER_S, BlockingClient
from gazette_sdk.transport.stream.dialing import NotStreamError
from integration.message.topics import Topic

WAIT_S = 30.0


@pytest.fixture
def direct_appends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that appended by themselves."""
    names: list[str] = []
    append = BlockingClient.append

    def noting(self, *arguments):
        call = append(self, *arguments)
        names.append(threading.current_thread().name)
        return call

    monkeypatch.setattr(BlockingClient, "append", noting)
    monkeypatch.setattr(receipt_module, "PROMPT_S", 1.0)  # a busy machine does not matter
    return names


def wait_for_each(publisher: Publisher, count: int, **more: object) -> None:
    for n in range(count):
        receipt = publisher.publish({"n": n, **more}).result(WAIT_S)
        assert receipt.end > receipt.begin


def found(journal: str) -> list[dict]:
    return [envelope.message for envelope in Reader(dict, name=journal)]


@pytest.mark.parametrize("wire", ["auto", "stream"])
def test_who_waits_for_each_appends_by_itself(topic: Topic, direct_appends, wire):
    topic.create(0)
    transport = connect(f"{topic.cluster.address}?wire={wire}")
    with Publisher(mapping.direct(topic.name(0)), transport=transport) as publisher:
        wait_for_each(publisher, 200)
    run(transport.aclose())
    assert direct_appends.count(threading.current_thread().name) > 100
    assert [message["n"] for message in found(topic.name(0))] == list(range(200))


def test_over_grpc_nothing_changes(topic: Topic, direct_appends):
    topic.create(0)
    transport = connect(f"{topic.cluster.address}?wire=grpc")
    with Publisher(mapping.direct(topic.name(0)), transport=transport) as publisher:
        wait_for_each(publisher, 20)
    run(transport.aclose())
    assert direct_appends == []
    assert len(found(topic.name(0))) == 20


def test_embedded_clusters_have_no_direct_way(topic: Topic, direct_appends):
    topic.create(0)
    with Publisher(mapping.direct(topic.name(0)), transport=topic.cluster.transport) as publisher:
        wait_for_each(publisher, 20)
    assert direct_appends == []
    assert len(found(topic.name(0))) == 20


@pytest.mark.parametrize("kind", [StreamTransport, ChosenTransport])
def test_a_way_is_there_once_a_primary_is_known_and_spoken_to(topic: Topic, kind):
    topic.create(0)
    journal = topic.name(0)
    transport = kind(topic.cluster.address)

    async def append():
        async def items():
            yield pb.AppendRequest(journal=journal)
            yield b"{}\n"
            yield pb.AppendRequest()

        return await transport.append(items())

    assert transport.direct(journal) is None
    response = run(append())
    if transport.direct(journal) is None:  # it went through the service address
        response = run(append())
    way = transport.direct(journal)
    assert way is not None
    assert transport.direct(journal) is way
    call = way.append(b"{}\n")
    assert call.wait(WAIT_S)
    assert call.response().commit.begin == response.commit.end
    assert not way.check(call.response())
    way.failed(NotStreamError("it was replaced"))
    assert transport.direct(journal) is None
    run(transport.aclose())
    kind_without_memory = kind(topic.cluster.address, cache_size=0)
    assert kind_without_memory.direct(journal) is None


def test_threads_that_wait_and_threads_that_do_not(topic: Topic, direct_appends):
    topic.create(0, 1)
    journals = [topic.name(0), topic.name(1)]
    chance = random.Random(5)
    patterns = [[chance.choice("wwwwwwfta") for _ in range(150)] for _ in range(6)]

    def work(publisher: Publisher, name: int) -> None:
        for n, step in enumerate(patterns[name]):
            message = {"by": name, "n": n, "to": journals[name % 2]}
            if step == "t":
                with publisher.transaction() as txn:
                    txn.publish(message)
                continue
            receipt = publisher.publish(message)
            if step == "w":
                receipt.result(WAIT_S)
            elif step == "a":
                asyncio.run(_await(receipt))

    with Publisher(lambda message: message["to"]) as shared, Publisher(shared._mapping) as alone:
        threads = [
            threading.Thread(target=work, args=(alone if name == 0 else shared, name))
            for name in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert direct_appends
    for number, journal in enumerate(journals):
        seen: dict[int, list[int]] = {}
        for message in found(journal):
            seen.setdefault(message["by"], []).append(message["n"])
        assert seen == {name: list(range(150)) for name in range(6) if name % 2 == number}


async def _await(receipt):
    async with asyncio.timeout(WAIT_S):
        await receipt


# ------------------------------------------------------------------ ends of programs


_PROGRAM = """
    import os, sys, threading
    from gazette_sdk import Publisher, mapping
    from gazette_sdk.message.publishing import receipt
    receipt.PROMPT_S = 1.0
    publisher = Publisher(mapping.direct(sys.argv[1]))
    for n in range(20):
        publisher.publish({"n": n}).result(30)
    assert publisher._sender.outboxes[sys.argv[1]].habit.is_formed
    if sys.argv[2] == "exit":
        publisher.publish({"n": 20})
    elif sys.argv[2] == "close":
        publisher.publish({"n": 20})
        publisher.close(30)
    elif sys.argv[2] == "fork":
        receipt = publisher.publish({"n": 20})
        child = os.fork()
        if child == 0:
            for n in range(100, 120):
                publisher.publish({"n": n}).result(30)
            publisher.publish({"n": 120})
            publisher.close(30)
            os._exit(0)
        receipt.result(30)
        for n in range(21, 40):
            publisher.publish({"n": n}).result(30)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("ending", ["exit", "close", "fork"])
def test_a_message_that_is_held_is_not_left_behind(topic: Topic, ending):
    topic.create(0)
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(_PROGRAM)),
            *(topic.name(0), ending),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    numbers = [message["n"] for message in found(topic.name(0))]
    parents = [n for n in numbers if n < 100]
    assert parents == list(range(40 if ending == "fork" else 21))
    children = [n for n in numbers if n >= 100]
    assert children == (list(range(100, 121)) if ending == "fork" else [])


# --------------------------------------------------------------- brokers that pause or end


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DevCluster]:
    with DevCluster(tmp_path / "data") as cluster:
        cluster.apply(
            """
            name: a/journal
            replication: 1
            labels: [{name: content-type, value: application/x-ndjson}]
            fragment:
              {length: 1048576, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1s}
            """
        )
        monkeypatch.setenv("GAZETTE_ADDRESS", cluster.address)
        yield cluster


def test_a_caller_whose_time_runs_out_still_has_its_message_appended(
    dev: DevCluster, direct_appends
):
    with Publisher(mapping.direct("a/journal")) as publisher:
        wait_for_each(publisher, 20)
        count = len(direct_appends)
        assert count
        os.kill(dev._process.pid, signal.SIGSTOP)
        try:
            receipt = publisher.publish({"n": 20})
            began_at = time.monotonic()
            with pytest.raises(ReceiptTimeoutError):
                receipt.result(timeout=0.3)
            assert 0.29 < time.monotonic() - began_at < 5
            assert len(direct_appends) == count + 1
            behind = publisher.publish({"n": 21})
        finally:
            os.kill(dev._process.pid, signal.SIGCONT)
        receipt.result(WAIT_S)
        behind.result(WAIT_S)
        assert not receipt.batch.was_retried
        wait_for_each(publisher, 10)
    raw = list(Reader(dict, name="a/journal", isolation="uncommitted"))
    assert [each.message["n"] for each in raw] == [*range(22), *range(10)]


def test_a_broker_that_is_killed_and_started_again(dev: DevCluster, direct_appends):
    with Publisher(mapping.direct("a/journal")) as publisher:
        begun = 0
        for round_ in range(3):
            wait_for_each(publisher, 20, round=round_)
            if len(direct_appends) == begun:  # it could not be dialled a moment ago
                time.sleep(REDIAL_AFTER_S * 2)
            wait_for_each(publisher, 20, round=round_)
            assert len(direct_appends) > begun
            begun = len(direct_appends)
            dev.kill()
            starting = threading.Thread(target=dev.start)
            starting.start()
            publisher.publish({"n": 20, "round": round_}).result(WAIT_S)
            starting.join(WAIT_S)
        assert urlsplit(dev.address).port
    numbers = [(message["round"], message["n"]) for message in found("a/journal")]
    assert numbers == [(round_, n) for round_ in range(3) for n in [*range(20), *range(21)]]
