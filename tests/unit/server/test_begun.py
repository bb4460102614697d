from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.server.begun import Begun


async def at_once(value):
    return value


async def fails():
    raise ValueError("bad")


def test_what_never_waits_is_done_without_a_loop():
    begun = Begun(at_once(7))
    assert begun.done
    assert begun.result == 7


def test_awaiting_what_is_done_gives_its_result():
    async def scenario():
        return await Begun(at_once(7))

    assert asyncio.run(scenario()) == 7


def test_an_error_is_raised_where_it_is_awaited():
    async def scenario():
        begun = Begun(fails())
        assert not begun.done
        with pytest.raises(ValueError, match="bad"):
            await begun

    asyncio.run(scenario())


@pytest.mark.parametrize("waits", [1, 3])
def test_what_waits_goes_on_when_it_is_awaited(waits):
    async def scenario():
        loop, steps = asyncio.get_running_loop(), []

        async def work():
            for step in range(waits):
                steps.append(step)
                future = loop.create_future()
                loop.call_later(0.001, future.set_result, step)
                assert await future == step
                await asyncio.sleep(0)
            return "done"

        begun = Begun(work())
        assert (begun.done, steps) == (False, [0])
        await asyncio.sleep(0.01)  # what it waits for may have come before it is awaited
        assert await begun == "done"
        assert steps == list(range(waits))

    asyncio.run(scenario())


def test_errors_of_what_it_waits_for_are_its_own():
    async def scenario():
        future = asyncio.get_running_loop().create_future()

        async def work():
            try:
                await future
            except OSError:
                await asyncio.sleep(0)
                return "handled"

        begun = Begun(work())
        future.set_exception(OSError())
        assert await begun == "handled"

    asyncio.run(scenario())


def test_cancelling_reaches_it():
    async def scenario():
        seen = []

        async def work():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                await asyncio.sleep(0)
                seen.append("cleaned up")
                raise

        async def awaiting():
            await Begun(work())

        task = asyncio.create_task(awaiting())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert seen == ["cancelled", "cleaned up"]

    asyncio.run(scenario())


def test_an_interrupt_is_raised_where_it_waits():
    async def scenario():
        async def work():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                return "interrupted"

        begun = Begun(work())
        begun.interrupt = asyncio.CancelledError()
        assert await begun == "interrupted"

    asyncio.run(scenario())


def test_timeouts_inside_work_as_in_its_task():
    async def scenario():
        async def work():
            try:
                async with asyncio.timeout(0.001):
                    await asyncio.Event().wait()
            except TimeoutError:
                return "too late"

        assert await Begun(work()) == "too late"

    asyncio.run(scenario())


def test_items_of_a_generator_and_its_end():
    async def numbers():
        yield 1
        await asyncio.sleep(0)
        yield 2

    async def scenario():
        items = numbers()
        first = Begun.next_of(items)
        assert (first.done, first.result) == (True, 1)
        second = Begun.next_of(items)
        assert not second.done
        assert await second == 2
        end = Begun.next_of(items)
        assert not end.done
        with pytest.raises(StopAsyncIteration):
            await end

    asyncio.run(scenario())
