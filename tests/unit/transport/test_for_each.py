"""Concurrent calls with a limit."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.transport.loop import for_each


@pytest.mark.parametrize("calls_max", [1, 3, 100])
def test_results_are_in_order_and_no_more_calls_run_than_allowed(calls_max):
    running: set[int] = set()
    most = 0

    async def square(number: int) -> int:
        nonlocal most
        running.add(number)
        most = max(most, len(running))
        for _ in range(10 - number):  # later calls end first
            await asyncio.sleep(0)
        running.remove(number)
        return number * number

    assert asyncio.run(for_each(range(10), square, calls_max)) == [n * n for n in range(10)]
    assert most == min(calls_max, 10)


def test_the_first_error_cancels_the_others():
    cancelled = []

    async def call(number: int) -> None:
        if number == 1:
            raise ValueError("one")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    with pytest.raises(ValueError, match="one"):
        asyncio.run(for_each(range(3), call))
    assert sorted(cancelled) == [0, 2]
