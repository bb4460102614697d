"""The queue between fetching coroutines and a consumer: in order, joined, bounded, woken."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from gazette_sdk.message.fetcher import ContentQueue, FetchedContent, Finished, Jumped
from gazette_sdk.transport.loop import run, sdk_loop

WAIT_S = 10.0


def new_queue(bytes_max: int = 1000, *limits: int) -> ContentQueue:
    return ContentQueue(sdk_loop(), bytes_max, *limits)


def shown(item):
    """Name and content of an item, or name and offset."""
    if isinstance(item, FetchedContent):
        return (item.journal, b"".join(item.pieces))
    return (item.journal, item.offset) if isinstance(item, Jumped) else None


def taken(queue: ContentQueue) -> list:
    """Everything in front of a jump to 0 in a journal without name, which is put here."""
    queue.put(Jumped("", 0))
    found = []
    while (item := queue.pop()) != Jumped("", 0):
        found.append(shown(item))
    return found


def test_content_in_the_queue_is_joined_by_what_continues_it():
    queue = new_queue()
    for journal, content in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("b", b"4")):
        queue.put_content(journal, content)
    assert taken(queue) == [("a", b"13"), ("b", b"24")]
    queue.put_content("a", b"5")
    assert taken(queue) == [("a", b"5")]


def test_content_behind_a_jump_does_not_join_what_is_before():
    queue = new_queue()
    queue.put_content("a", b"1")
    queue.put(Jumped("a", 77))
    queue.put_content("a", b"2")
    assert taken(queue) == [("a", b"1"), ("a", 77), ("a", b"2")]


def test_nothing_joins_what_its_consumer_works_on():
    queue = new_queue()
    queue.put_content("a", b"1")
    item = queue.pop()
    queue.put_content("a", b"2")
    assert shown(item) == ("a", b"1")
    assert taken(queue) == [("a", b"2")]


def test_items_are_bounded():
    queue = new_queue(1000, 3)
    for content in (b"1", b"2", b"3", b"4", b"56789"):
        queue.put_content("a", content)
    assert taken(queue) == [("a", b"123"), ("a", b"4"), ("a", b"56789")]


@pytest.mark.parametrize("piece_bytes", [1, 3, 10, 30])
def test_content_is_bounded_and_its_writer_goes_on_when_it_was_taken(piece_bytes):
    async def write(queue: ContentQueue, most: list[int]) -> None:
        for _ in range(200):
            await queue.room()
            queue.put_content("a", b"x" * piece_bytes)
            most.append(queue.queued_bytes)
        queue.put(Finished())

    async def start() -> tuple[ContentQueue, list[int], asyncio.Task[None]]:
        queue, most = new_queue(20), []
        return queue, most, sdk_loop().create_task(write(queue, most))

    queue, most, writing = run(start(), WAIT_S)
    length = 0
    while True:
        queue.wait()
        item = queue.pop()
        if isinstance(item, Finished):
            break
        length += len(b"".join(item.pieces))
    assert length == 200 * piece_bytes
    assert max(most) < 20 + piece_bytes
    assert writing.done()


# ---------------------------------------------------------------------- wake-ups


def put(queue: ContentQueue, number: int) -> None:
    sdk_loop().call_soon_threadsafe(queue.put, Jumped("a", number))


def next_offset(queue: ContentQueue) -> int:
    queue.wait()
    return queue.pop().offset


async def next_offset_async(queue: ContentQueue) -> int:
    await asyncio.wait_for(queue.wait_async(), WAIT_S)
    return queue.pop().offset


def test_items_stay_until_they_are_popped():
    queue = new_queue()
    put(queue, 1)
    queue.wait()
    put(queue, 2)
    queue.wait()
    assert [next_offset(queue), next_offset(queue)] == [1, 2]


def test_a_thread_is_woken():
    queue, found = new_queue(), []
    thread = threading.Thread(target=lambda: found.append(next_offset(queue)))
    thread.start()
    put(queue, 7)
    thread.join(WAIT_S)
    assert found == [7]


def test_a_coroutine_of_another_loop_is_woken():
    queue = new_queue()

    async def consume():
        waiting = asyncio.create_task(next_offset_async(queue))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        put(queue, 7)
        return await waiting

    assert asyncio.run(consume()) == 7


def test_a_coroutine_of_the_same_loop_is_woken():
    queue = new_queue()

    async def consume():
        waiting = asyncio.create_task(next_offset_async(queue))
        await asyncio.sleep(0)
        queue.put(Jumped("a", 7))
        return await waiting

    assert run(consume(), WAIT_S) == 7


def test_a_consumer_that_gave_up_misses_nothing():
    queue = new_queue()

    async def consume():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.wait_async(), 0.01)
        put(queue, 7)
        return await next_offset_async(queue)

    assert asyncio.run(consume()) == 7


def test_a_consumer_whose_loop_is_closed_disturbs_nobody():
    queue = new_queue()

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.wait_async(), 0.01)

    asyncio.run(give_up())
    put(queue, 7)
    assert next_offset(queue) == 7


COUNT = 2000


async def put_many(queue: ContentQueue) -> None:
    for number in range(COUNT):
        queue.put(Jumped("a", number))
        if number % 7 == 0:
            await asyncio.sleep(0)  # the consumer catches up, and waits


def test_a_thread_misses_nothing():
    queue, found = new_queue(), []

    def consume() -> None:
        while len(found) < COUNT:
            found.append(next_offset(queue))

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    run(put_many(queue), WAIT_S)
    consumer.join(WAIT_S)
    assert found == list(range(COUNT))


def test_a_coroutine_misses_nothing():
    queue = new_queue()

    async def consume() -> list[int]:
        putting = asyncio.run_coroutine_threadsafe(put_many(queue), sdk_loop())
        found = [await next_offset_async(queue) for _ in range(COUNT)]
        await asyncio.wrap_future(putting)
        return found

    assert asyncio.run(consume()) == list(range(COUNT))


def test_other_coroutines_run_between_items():
    queue, turns = new_queue(), []

    async def other() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)  # the consumer catches up, and waits

    async def consume() -> None:
        running = asyncio.create_task(other())
        for number in range(20):
            queue.put(Jumped("a", number))
        for _ in range(20):
            await next_offset_async(queue)
        running.cancel()

    run(consume(), WAIT_S)
    assert len(turns) >= 20


def test_a_thread_that_was_interrupted_waits_again():
    """An interrupt leaves a gate behind, which the next item opens for nobody."""
    queue = new_queue()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            queue.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    for number in range(3):
        timer = threading.Timer(0.02, put, (queue, number))
        timer.start()
        assert next_offset(queue) == number
        timer.join(WAIT_S)
