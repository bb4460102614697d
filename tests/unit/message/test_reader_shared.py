"""Readers that several threads, or tasks, take messages from.

Each message goes to one of them and all end, or one gets an error at once.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter

import pyarrow as pa
import pytest

from gazette_sdk import Reader
from gazette_sdk.errors import GazetteError, ReentrantCallError
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN
from support.memory_transport import MemoryTransport
from support.written_messages import TICK, frame

COUNT = 6000
WAIT_S = 30.0
SCHEMA = pa.schema([("n", pa.int64())])


def content(kind):
    """Plain messages, or transactions of two producers that interleave."""
    if kind == "plain":
        return b"".join(frame(n, 1, TICK * (n + 1)) for n in range(COUNT))
    frames = []
    for n in range(COUNT):
        frames.append(frame(n, 1 + n % 2, TICK * (2 * n + 1), CONTINUE_TXN))
        if n % 10 > 7:
            frames.append(frame(-1, 1 + n % 2, TICK * (2 * n + 2), ACK_TXN))
    return b"".join(frames)


@pytest.fixture(params=["plain", "transactions"])
def transport(request):
    transport = MemoryTransport(chunk_bytes=4096)
    transport.create("a/journal").content += content(request.param)
    return transport


def in_threads(work, count=4):
    """Run a function in several threads; return what they took, and their errors."""
    taken, errors = [], []

    def run():
        try:
            for number in work():
                taken.append(number)  # noqa: PERF402 - what was taken before an error counts
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return taken, errors


def numbers(envelopes):
    return (envelope.message["n"] for envelope in envelopes)


def rows(batches):
    return (n for batch in batches for n in batch.column("n").to_pylist())


def expected(transport):
    return [each.message["n"] for each in Reader(dict, name="a/journal", transport=transport)]


def test_threads_with_a_loop_each_share_the_messages_and_all_end(transport):
    wanted = expected(transport)
    reader = Reader(dict, name="a/journal", transport=transport)
    taken, errors = in_threads(lambda: numbers(reader))
    assert errors == []
    assert Counter(taken) == Counter(wanted)
    assert reader.offsets == {"a/journal": len(transport.content_of("a/journal"))}


def test_threads_with_a_loop_each_share_the_record_batches_and_all_end(transport):
    wanted = expected(transport)
    batches = Reader(dict, name="a/journal", transport=transport).arrow(SCHEMA, batch_rows=100)
    taken, errors = in_threads(lambda: rows(batches))
    assert errors == []
    assert Counter(taken) == Counter(wanted)


@pytest.mark.parametrize("columns", [False, True])
def test_threads_that_share_one_iterator_take_each_message_once_or_get_an_error(transport, columns):
    wanted = expected(transport)
    reader = Reader(dict, name="a/journal", transport=transport)
    shared = iter(reader.arrow(SCHEMA, batch_rows=100) if columns else reader)
    taken, errors = in_threads(lambda: rows(shared) if columns else numbers(shared))
    assert all("already executing" in str(error) for error in errors)
    assert len(errors) < 4
    assert Counter(taken) == Counter(wanted)


def test_a_shared_iterator_never_crashes_the_interpreter():
    """In a process of its own, which switches threads as often as it can."""
    program = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from gazette_sdk import Reader
from support.memory_transport import MemoryTransport
from support.written_messages import TICK, frame

sys.setswitchinterval(1e-6)
transport = MemoryTransport(chunk_bytes=300)
transport.create("a/journal").content += b"".join(frame(n, 1, TICK * (n + 1)) for n in range(3000))
shared = iter(Reader(dict, name="a/journal", transport=transport))
taken = []

def work():
    try:
        for envelope in shared:
            taken.append(envelope.message["n"])
    except ValueError:
        pass

threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
[each.start() for each in threads]
[each.join(30) for each in threads]
assert sorted(taken) == list(range(3000)), len(taken)
"""
    tests = str(__import__("pathlib").Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", program, tests], check=True, timeout=60)


@pytest.mark.parametrize("columns", [False, True])
def test_tasks_with_a_loop_each_share_the_messages_and_all_end(transport, columns):
    wanted = expected(transport)

    async def work(source, taken):
        async for each in source:
            taken += rows([each]) if columns else numbers([each])
            await asyncio.sleep(0)

    async def all_of_them():
        reader = Reader(dict, name="a/journal", transport=transport)
        source = reader.arrow(SCHEMA, batch_rows=100) if columns else reader
        taken: list[list[int]] = [[] for _ in range(4)]
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            for each in taken:
                tasks.create_task(work(source, each))
        return taken

    taken = asyncio.run(all_of_them())
    assert Counter(each for part in taken for each in part) == Counter(wanted)
    assert sum(map(bool, taken)) > 1


def test_a_task_gets_an_error_while_a_thread_waits_for_messages():
    transport = MemoryTransport()
    transport.create("a/journal")
    reader = Reader(dict, name="a/journal", transport=transport, block=True)
    waiting = threading.Thread(target=lambda: list(reader), daemon=True)
    waiting.start()
    while reader._batches.lock.acquire(blocking=False):
        reader._batches.lock.release()

    async def take():
        async with asyncio.timeout(WAIT_S):
            return [each async for each in reader]

    with pytest.raises(GazetteError, match="give each a Reader of its own"):
        asyncio.run(take())
    reader.close()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()


def test_a_signal_handler_within_the_wait_for_messages_gets_an_error(monkeypatch):
    transport = MemoryTransport()
    transport.create("a/journal").content += frame(1, 1, TICK)
    reader = Reader(dict, name="a/journal", transport=transport)
    reader._batches.begin(blocks=True)
    queue = reader._batches._fetcher.queue
    wait = queue.wait
    refused = []

    def interrupted(*_):
        if not refused:
            with pytest.raises(ReentrantCallError) as caught:
                next(iter(reader))
            refused.append(caught.value)
        return wait()

    monkeypatch.setattr(queue, "wait", interrupted)
    assert list(numbers(reader)) == [1]
    assert len(refused) == 1
