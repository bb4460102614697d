from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gazette_sdk.user_code import on_worker
from support.etcd import run


def test_a_function_is_called_on_a_worker_and_its_error_is_raised():
    async def scenario():
        with ThreadPoolExecutor(1, thread_name_prefix="worker") as workers:
            name = await on_worker(workers, lambda: threading.current_thread().name)
            assert name.startswith("worker")
            assert await on_worker(None, pow, 2, 3) == 8
            with pytest.raises(ZeroDivisionError):
                await on_worker(workers, lambda: 1 / 0)

    run(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_a_wait_that_is_cancelled_several_times_lasts_until_the_function_has_returned(fails):
    released, ended = threading.Event(), []

    def work():
        released.wait(30)
        ended.append(True)
        if fails:
            raise ValueError("it failed, and nobody waits for that")

    async def scenario():
        with ThreadPoolExecutor(1) as workers:
            call = asyncio.create_task(on_worker(workers, work))
            for _ in range(3):
                await asyncio.sleep(0)
                call.cancel()
            await asyncio.wait([call], timeout=0.05)
            assert not call.done()
            released.set()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert ended

    run(scenario())
