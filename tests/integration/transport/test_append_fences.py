"""Appends that wait for others, and registers that fence writers, on a real broker."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib

import pytest

from gazette_sdk.errors import OffsetNotYetAvailableError, RegisterMismatchError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.append.queue import DependencyFailedError
from gazette_sdk.transport.journal_reader import RetryReader
from gazette_sdk.transport.loop import run

JOURNALS = """
name: fence/
replication: 1
fragment: {length: 1048576, stores: [file:///], compression_codec: NONE, refresh_interval: 5m}
children:
  - name: fence/log
  - name: fence/out
"""
WAIT_S = 30.0


@pytest.fixture
def cluster(gazette):
    gazette.apply(JOURNALS)
    return gazette


def wanted(author):
    selector = pb.LabelSelector()
    selector.include.labels.add(name="author", value=author)
    return selector


def labels(author):
    return pb.LabelSet(labels=[pb.Label(name="author", value=author)])


async def content_of(transport, journal):
    reader = RetryReader(transport, pb.ReadRequest(journal=journal, offset=0))
    content = b""
    with contextlib.suppress(OffsetNotYetAvailableError):
        while True:
            content += await reader.read()
    await reader.aclose()
    return content


def test_a_commit_waits_for_outputs_and_acknowledgements_wait_for_the_commit(cluster):
    async def commit():
        service = AppendService(cluster.transport)
        log, out = service.appender("fence/log"), service.appender("fence/out")
        log.append(b"begin,", union=labels("one"))
        gate = asyncio.get_running_loop().create_future()
        messages = out.append(b"messages 1,", after=[gate])
        committed = log.append(b"commit 1,", after=out.pending(), check=wanted("one"))
        acknowledged = out.append(b"ACK 1,", after=[committed])
        overlapping = out.append(b"messages 2,")
        assert not messages.done()
        assert not committed.done()
        gate.set_result(None)
        async with asyncio.timeout(WAIT_S):
            responses = [await each for each in (messages, committed, acknowledged, overlapping)]
        assert [each.status for each in responses] == [pb.OK] * 4
        await service.aclose()
        assert await content_of(cluster.transport, "fence/out") == (b"messages 1,ACK 1,messages 2,")
        assert await content_of(cluster.transport, "fence/log") == b"begin,commit 1,"

    run(commit(), loop=cluster.transport.loop)


def test_a_fenced_author_writes_neither_its_log_nor_its_acknowledgements(cluster):
    async def fence():
        loop = asyncio.get_running_loop()
        one, two = AppendService(cluster.transport), AppendService(cluster.transport)
        log, out = one.appender("fence/log"), one.appender("fence/out")
        async with asyncio.timeout(WAIT_S):
            await log.append(b"one,", union=labels("one"))
            await log.append(b"again,", check=wanted("one"))
            gate = loop.create_future()
            late = log.append(b"late,", after=[gate], check=wanted("one"))
            acknowledged = out.append(b"ACK,", after=[late])
            behind = out.append(b"messages,")
            await two.appender("fence/log").append(b"two,", union=labels("two"))
            gate.set_result(None)
            for append in (late, acknowledged, behind):
                await append.ended()
        assert isinstance(late.exception(), RegisterMismatchError)
        assert isinstance(acknowledged.exception(), DependencyFailedError)
        assert isinstance(behind.exception(), DependencyFailedError)
        with pytest.raises(RegisterMismatchError):
            log.append(b"once more,", check=wanted("one")).result()
        await one.aclose()
        await two.aclose()
        assert await content_of(cluster.transport, "fence/log") == b"one,again,two,"
        assert await content_of(cluster.transport, "fence/out") == b""

    run(fence(), loop=cluster.transport.loop)


def test_a_worker_thread_appends_behind_an_append_that_it_sent_itself(cluster):
    """The answer of an append that a thread sent is received, though the thread goes away."""

    async def begin():
        return AppendService(cluster.transport)

    service = run(begin(), loop=cluster.transport.loop)
    log, out = service.appender("fence/log"), service.appender("fence/out")

    def publish():
        out.append(b"1,")
        return out.append(b"2,")

    with concurrent.futures.ThreadPoolExecutor(1) as worker:
        message = worker.submit(publish).result(WAIT_S)
        committed = log.append(b"commit,", after=[message], union=labels("one"))
        acknowledged = out.append(b"ACK,", after=[committed])
    assert acknowledged.wait(WAIT_S)
    assert acknowledged.result().commit.end == 8
    run(service.aclose(), loop=cluster.transport.loop)
