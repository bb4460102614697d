from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.broker.replication.pipeline import InvalidatedError, Signal, Slot
from support.etcd import run


def test_owners_follow_one_another_in_the_order_of_asking():
    async def scenario():
        slot, order = Slot("thing"), []

        async def own(name):
            value = await slot.take()
            order.append((name, value))
            await asyncio.sleep(0)
            slot.put(value)

        async with asyncio.TaskGroup() as group:
            for name in range(5):
                group.create_task(own(name))
        assert order == [(name, "thing") for name in range(5)]
        assert slot.free

    run(scenario())


def test_a_free_slot_is_taken_at_once():
    slot = Slot("thing")
    assert slot.take_now() == "thing"
    assert not slot.free
    with pytest.raises(AssertionError):
        slot.take_now()
    slot.put("other")
    assert slot.take_now() == "other"


def test_a_fired_signal_ends_the_waiting():
    async def scenario():
        slot, signal = Slot(1), Signal()
        await slot.take()
        waiting = asyncio.ensure_future(slot.take(signal))
        await asyncio.sleep(0)
        signal.fire()
        with pytest.raises(InvalidatedError):
            await waiting
        with pytest.raises(InvalidatedError):
            await slot.take(signal)
        slot.put(1)
        assert slot.free
        with pytest.raises(InvalidatedError):
            await slot.take(signal)
        assert slot.free

    run(scenario())


def test_a_signal_counts_also_when_the_slot_came_free_in_the_same_turn():
    async def scenario():
        slot, signal = Slot(1), Signal()
        await slot.take()
        waiting = asyncio.ensure_future(slot.take(signal))
        await asyncio.sleep(0)
        slot.put(2)
        signal.fire()
        with pytest.raises(InvalidatedError):
            await waiting
        assert await slot.take() == 2

    run(scenario())


@pytest.mark.parametrize("put_first", [True, False])
def test_a_waiter_that_is_cancelled_never_keeps_the_thing(put_first):
    async def scenario():
        slot = Slot(1)
        await slot.take()
        waiting = asyncio.ensure_future(slot.take())
        await asyncio.sleep(0)
        if put_first:
            slot.put(2)
            waiting.cancel()
        else:
            waiting.cancel()
            slot.put(2)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert slot.free
        assert await slot.take() == 2

    run(scenario())


def test_a_slot_is_put_back_only_by_an_owner():
    with pytest.raises(AssertionError):
        Slot(1).put(2)


def test_a_signal_tells_everybody_once():
    async def scenario():
        signal, told = Signal(), []
        signal.on_fire(lambda: told.append("a"))
        forgotten = signal.on_fire(lambda: told.append("b"))
        signal.forget(forgotten)
        waiting = asyncio.ensure_future(signal.wait())
        await asyncio.sleep(0)
        signal.fire()
        signal.fire()
        await waiting
        await signal.wait()
        signal.on_fire(lambda: told.append("late"))
        assert told == ["a", "late"]

    run(scenario())


def test_peek_shows_what_was_handed_to_a_waiter():
    async def scenario():
        slot = Slot()
        taking = asyncio.ensure_future(slot.take())
        await asyncio.sleep(0)
        slot.put("thing")
        assert slot.peek() == "thing"
        assert await taking == "thing"

    run(scenario())
