import asyncio
import signal
import subprocess
import sys

import pytest

from gazette_sdk.server.process import StopSignal

PROGRAM = """
import asyncio
from gazette_sdk.server.process import StopSignal

async def main():
    with StopSignal() as stop:
        assert not stop.caught
        print("ready", flush=True)
        print((await asyncio.wait_for(stop.wait(), 20)).name, flush=True)
        assert stop.caught and await stop.wait()
        # Drains; whatever comes now changes nothing.
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), __import__("sys").stdin
        )
        await asyncio.wait_for(reader.read(), 20)
    print("goodbye", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_returned_and_later_ones_are_ignored(first):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(first)
        assert process.stdout.readline() == f"{first.name}\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate("", timeout=20)
        assert rest == "goodbye\n"
        assert process.returncode == 0


def test_a_call_drains_as_the_signal_does():
    async def scenario():
        with StopSignal() as stop:
            waiting = asyncio.ensure_future(stop.wait())
            await asyncio.sleep(0)
            stop.drain()
            stop.drain()
            return await waiting, stop.caught, stop.quits

    assert asyncio.run(scenario()) == (signal.SIGTERM, True, False)
