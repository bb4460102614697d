from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from gazette_sdk.errors import GazetteError
from gazette_sdk.transport import loop


async def current_thread():
    return threading.current_thread()


def test_plain_code_runs_coroutines_on_one_background_thread():
    first, second = loop.run(current_thread()), loop.run(current_thread())
    assert first is second
    assert first.daemon
    assert first is not threading.current_thread()


def test_what_was_posted_runs_on_though_nobody_keeps_its_future():
    seen = weakref.WeakSet()
    ended = threading.Event()

    async def background():
        go_on = asyncio.Event()
        seen.add(go_on)
        await go_on.wait()
        ended.set()

    async def wake():
        for go_on in seen:
            go_on.set()

    loop.post(background())
    loop.run(asyncio.sleep(0), 5)
    gc.collect()
    loop.run(wake(), 5)
    assert ended.wait(5)


def test_a_result_that_comes_too_late_is_a_timeout_and_is_cancelled():
    cancelled = threading.Event()

    async def never():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError, match=r"no result within 0\.05 s"):
        loop.run(never(), timeout=0.05)
    assert cancelled.wait(5)


def test_a_timeout_of_the_coroutine_itself_is_passed_on():
    async def late():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        loop.run(late(), timeout=5)


@pytest.mark.parametrize("timeout", [None, 30])
def test_the_error_of_an_alarm_interrupts_the_wait_for_a_result(timeout, alarm):
    with alarm(TimeoutError("of the alarm")), pytest.raises(TimeoutError, match="of the alarm"):
        loop.run(asyncio.sleep(30), timeout)


def test_a_blocking_call_on_the_loop_itself_is_refused_not_a_dead_lock():
    async def inner():
        return 1

    async def outer():
        return loop.run(inner())

    with pytest.raises(GazetteError, match="await"):
        loop.run(outer(), timeout=5)


def test_an_adopted_loop_serves_until_it_is_closed():
    background = loop.sdk_loop()

    async def serve():
        loop.adopt_running_loop()
        assert loop.sdk_loop() is asyncio.get_running_loop()
        assert await loop.on_sdk_loop(current_thread()) is threading.current_thread()
        # Other threads post to it as well.
        posted = await asyncio.to_thread(loop.run, current_thread(), 5)
        assert posted is threading.current_thread()

    asyncio.run(serve())
    assert loop.sdk_loop() is background


def test_coroutines_of_another_loop_reach_the_sdk_loop():
    async def elsewhere():
        return await loop.on_sdk_loop(current_thread())

    assert asyncio.run(elsewhere()).name == "gazette-sdk-loop"


FORKING = """
import os, sys, threading
from gazette_sdk.transport import loop

async def name():
    return threading.current_thread().name, os.getpid()

assert loop.run(name(), 5) == ("gazette-sdk-loop", os.getpid())
child = os.fork()
if child == 0:
    os._exit(0 if loop.run(name(), 5) == ("gazette-sdk-loop", os.getpid()) else 1)
_, status = os.waitpid(child, 0)
assert loop.run(name(), 5)[1] == os.getpid()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_gets_a_loop_of_its_own():
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        capture_output=True,
        timeout=30,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


ENDING = """
import asyncio
from gazette_sdk.transport import loop

async def background():
    try:
        await asyncio.Event().wait()
    finally:
        print("ended in order", flush=True)

loop.post(background())
loop.run(asyncio.sleep(0), 5)
"""


def test_the_end_of_the_process_cancels_what_runs():
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ended in order\n", b"")
