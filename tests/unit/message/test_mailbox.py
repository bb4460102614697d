"""The mailbox between the event loop and a consumer."""

from __future__ import annotations

import asyncio
import threading

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
    box._waiter = (loop, loop.create_future())
    loop.close()
    box.put(7)
    assert box.first() == 7
