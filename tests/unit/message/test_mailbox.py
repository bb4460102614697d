"""The mailbox between the event loop and a consumer."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from gazette_sdk.message.reading.mailbox import Mailbox

WAIT_S = 10.0


def test_items_come_in_order_and_stay_until_they_are_dropped():
    box: Mailbox[int] = Mailbox()
    box.put(1)
    box.put(2)
    assert box.first() == box.first() == 1
    box.drop()
    assert box.first() == 2


def test_a_thread_is_woken():
    box: Mailbox[int] = Mailbox()
    found = []
    thread = threading.Thread(target=lambda: found.append(box.first()))
    thread.start()
    box.put(7)
    thread.join(WAIT_S)
    assert found == [7]


def test_a_coroutine_is_woken_from_another_thread():
    box: Mailbox[int] = Mailbox()

    async def consume():
        waiting = asyncio.create_task(box.afirst())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        threading.Thread(target=box.put, args=(7,)).start()
        return await asyncio.wait_for(waiting, WAIT_S)

    assert asyncio.run(consume()) == 7


def test_a_consumer_that_gave_up_misses_nothing():
    box: Mailbox[int] = Mailbox()

    async def consume():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.afirst(), 0.01)
        box.put(7)
        return await asyncio.wait_for(box.afirst(), WAIT_S)

    assert asyncio.run(consume()) == 7


def test_a_consumer_whose_loop_is_gone_disturbs_nobody():
    box: Mailbox[int] = Mailbox()
    loop = asyncio.new_event_loop()
    box._waiter = loop.create_future()
    loop.close()
    box.put(7)
    assert box.first() == 7


PUTTERS, EACH = 4, 500


def put_from_threads(box: Mailbox[tuple[int, int]]) -> None:
    def put(putter: int) -> None:
        for number in range(EACH):
            box.put((putter, number))
            if number % 7 == 0:
                time.sleep(0)  # the consumer catches up, and waits

    for putter in range(PUTTERS):
        threading.Thread(target=put, args=(putter,)).start()


def assert_all_in_order(found: list[tuple[int, int]]) -> None:
    for putter in range(PUTTERS):
        assert [number for by, number in found if by == putter] == list(range(EACH))


def test_a_thread_misses_nothing_that_many_threads_put():
    box: Mailbox[tuple[int, int]] = Mailbox()
    found = []

    def consume() -> None:
        while len(found) < PUTTERS * EACH:
            found.append(box.first())
            box.drop()

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    put_from_threads(box)
    consumer.join(WAIT_S)
    assert_all_in_order(found)
    assert len(box._gates) <= 1


def test_a_coroutine_misses_nothing_that_many_threads_put():
    box: Mailbox[tuple[int, int]] = Mailbox()

    async def consume() -> list[tuple[int, int]]:
        found = []
        put_from_threads(box)
        while len(found) < PUTTERS * EACH:
            found.append(await asyncio.wait_for(box.afirst(), WAIT_S))
            box.drop()
        return found

    assert_all_in_order(asyncio.run(consume()))


def test_other_coroutines_run_between_items():
    box: Mailbox[int] = Mailbox()
    turns = []

    async def other() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    async def consume() -> None:
        running = asyncio.create_task(other())
        for number in range(20):
            box.put(number)
        for _ in range(20):
            await box.afirst()
            box.drop()
        running.cancel()

    asyncio.run(consume())
    assert len(turns) >= 20


def test_a_thread_that_was_interrupted_waits_again():
    """An interrupt leaves a gate behind, which the next item opens for nobody."""
    box: Mailbox[int] = Mailbox()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            box.first()
    finally:
        signal.signal(signal.SIGALRM, before)
    for number in range(3):
        timer = threading.Timer(0.02, box.put, (number,))
        timer.start()
        assert box.first() == number
        box.drop()
        timer.join(WAIT_S)
    assert not box._gates
