from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.wires.stream.source import END, PENDING, Source
from support.scripted_broker import in_loop

COMMIT = pb.AppendRequest()


async def items(*steps):
    """An iteration; futures among the steps are awaited, errors raised."""
    for step in steps:
        if isinstance(step, Exception):
            raise step
        yield (await step) if isinstance(step, asyncio.Future) else step


@in_loop
async def test_what_is_there_is_given_without_waiting():
    source = Source(items(b"a", b"b", COMMIT))
    assert [source.poll() for _ in range(4)] == [b"a", b"b", COMMIT, END]


@in_loop
async def test_what_is_not_there_is_waited_for():
    loop = asyncio.get_running_loop()
    later = loop.create_future()
    source = Source(items(b"a", later, b"c"))
    assert source.poll() == b"a"
    assert source.poll() is PENDING
    loop.call_soon(later.set_result, b"b")
    assert await source.next() == b"b"
    assert source.poll() == b"c"
    assert source.poll() is END


@in_loop
async def test_an_item_that_comes_between_asking_and_waiting_is_given():
    later = asyncio.get_running_loop().create_future()
    source = Source(items(later))
    assert source.poll() is PENDING
    later.set_result(b"x")
    await asyncio.sleep(0)
    assert await source.next() == b"x"


@in_loop
async def test_several_waits_within_one_item_are_all_waited_for():
    async def slow():
        for _ in range(5):
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await asyncio.sleep(0.001)
        yield b"x"
        await asyncio.sleep(0)

    source = Source(slow())
    assert source.poll() is PENDING
    assert await source.next() == b"x"
    assert source.poll() is PENDING
    assert await source.next() is END


@in_loop
async def test_errors_come_where_they_are_raised():
    source = Source(items(b"a", ZeroDivisionError()))
    assert source.poll() == b"a"
    with pytest.raises(ZeroDivisionError):
        source.poll()

    async def failing():
        await asyncio.sleep(0)
        raise ZeroDivisionError
        yield b""  # pragma: no cover - makes it a generator

    source = Source(failing())
    assert source.poll() is PENDING
    with pytest.raises(ZeroDivisionError):
        await source.next()


@in_loop
async def test_a_cancelled_wait_cancels_the_iteration():
    seen = []

    async def waiting():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        yield b""  # pragma: no cover - makes it a generator

    source = Source(waiting())
    assert source.poll() is PENDING
    task = asyncio.create_task(source.next())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]


@in_loop
async def test_a_pending_item_can_be_given_up():
    seen = []

    async def waiting():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("ended")
        yield b""  # pragma: no cover - makes it a generator

    iteration = waiting()
    source = Source(iteration)
    assert source.poll() is PENDING
    await source.cancel()
    assert seen == ["ended"]
    await source.cancel()
    await iteration.aclose()


@in_loop
async def test_other_iterators_than_generators_will_do():
    class Numbers:
        def __init__(self):
            self.left = 2

        def __aiter__(self):
            return self

        async def __anext__(self):
            if not self.left:
                raise StopAsyncIteration
            self.left -= 1
            if self.left == 0:
                await asyncio.sleep(0)
            return bytes([self.left])

    source = Source(Numbers())
    assert source.poll() == b"\x01"
    assert source.poll() is PENDING
    assert await source.next() == b"\x00"
    assert source.poll() is END
