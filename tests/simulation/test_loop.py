"""Virtual clock and nodes: what a killed and a paused process does not do any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from simulation.loop import Node, StuckError, VirtualLoop


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a virtual clock."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def test_time_jumps_to_the_next_timer() -> None:
    async def scenario() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run(scenario()) == 3600


def test_timers_of_one_moment_run_in_the_order_of_their_calls() -> None:
    async def scenario() -> list[int]:
        loop, order = asyncio.get_running_loop(), []
        for number in range(5):
            loop.call_at(7.0, order.append, number)
        await asyncio.sleep(8)
        return order

    assert run(scenario()) == [0, 1, 2, 3, 4]


def test_a_wait_that_nothing_ends_is_an_error() -> None:
    async def scenario() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(StuckError):
        run(scenario())


def test_a_killed_node_does_nothing_more_and_cleans_nothing_up() -> None:
    async def scenario() -> list[str]:
        events: list[str] = []

        async def child() -> None:
            try:
                while True:
                    await asyncio.sleep(1)
                    events.append("ran")
            finally:
                events.append("cleaned up")

        async def process() -> None:
            await asyncio.create_task(child())  # it inherits the node

        node, loop = Node("broker"), asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        node.task(process())
        await asyncio.sleep(2.5)
        loop.bury(node)
        await asyncio.sleep(10)
        return list(events)

    assert run(scenario()) == ["ran", "ran"]


def test_a_paused_node_goes_on_where_it_was_and_time_has_passed() -> None:
    async def scenario() -> list[float]:
        loop, times = asyncio.get_running_loop(), []
        assert isinstance(loop, VirtualLoop)

        async def process() -> None:
            while True:
                await asyncio.sleep(1)
                times.append(loop.time())

        node = Node("broker")
        node.task(process())
        await asyncio.sleep(1.5)
        node.pause()
        await asyncio.sleep(10)
        node.proceed()
        await asyncio.sleep(1.2)
        loop.bury(node)
        return times

    assert run(scenario()) == [1.0, 11.5, 12.5]


def test_work_of_threads_takes_virtual_time() -> None:
    async def scenario() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.work_delay_s = lambda: 2.0
        return await asyncio.to_thread(lambda: "result"), loop.time()

    assert run(scenario()) == ("result", 4.0)


def test_the_killed_node_s_work_of_threads_ends_with_it() -> None:
    async def scenario() -> list[str]:
        loop, events = asyncio.get_running_loop(), []
        assert isinstance(loop, VirtualLoop)
        loop.work_delay_s = lambda: 2.0
        node = Node("broker")
        node.task(asyncio.to_thread(events.append, "uploaded"))
        await asyncio.sleep(1)
        loop.bury(node)
        await asyncio.sleep(10)
        return events

    assert run(scenario()) == []
