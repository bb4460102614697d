"""The selector that spins before it sleeps."""

import asyncio
import socket
import threading
import time

from gazette_sdk.adaptive_spin import SELECTOR_SPIN_S, SpinningSelector, new_loop


def test_an_event_that_comes_soon_is_found_without_sleeping(monkeypatch):
    slept = []
    plain = SpinningSelector.__mro__[1].select

    def select(self, timeout=None):
        if timeout is None or timeout > 0:
            slept.append(timeout)
        return plain(self, timeout)

    monkeypatch.setattr(SpinningSelector.__mro__[1], "select", select)
    ours, theirs = socket.socketpair()
    with ours, theirs, SpinningSelector() as selector:
        selector.register(ours, 1)
        theirs.send(b"1")
        assert selector.select(5)
        assert slept == [5]  # nothing came before: it sleeps as any other
        assert selector.select(5)
        assert slept == [5]


def test_a_silent_socket_is_polled_for_a_moment_before_the_sleep():
    ours, theirs = socket.socketpair()
    with ours, theirs, SpinningSelector() as selector:
        selector.register(ours, 1)
        theirs.send(b"1")
        assert selector.select(5)
        ours.recv(1)
        begun = time.process_time(), time.monotonic()
        assert selector.select(0.5) == []
        assert time.monotonic() - begun[1] >= 0.5
        assert time.process_time() - begun[0] < 0.2
        assert selector.select(0) == []
        assert selector.select(SELECTOR_SPIN_S / 2) == []


def test_a_loop_of_it_serves_timers_threads_and_connections():
    async def work() -> list[str]:
        loop = asyncio.get_running_loop()
        told = []
        reader_done = asyncio.Event()

        async def echo(reader, writer):
            while data := await reader.read(100):
                writer.write(data)
            writer.close()
            await writer.wait_closed()
            reader_done.set()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for at in range(200):
            writer.write(b"%d" % at)
            assert await reader.read(100) == b"%d" % at
        told.append("echoed")
        called = loop.create_future()
        thread = threading.Timer(0.05, lambda: loop.call_soon_threadsafe(called.set_result, 1))
        thread.start()
        await asyncio.wait_for(called, 5)
        told.append("called")
        begun = loop.time()
        await asyncio.sleep(0.05)
        assert loop.time() - begun >= 0.05
        told.append("slept")
        writer.close()
        await writer.wait_closed()
        await asyncio.wait_for(reader_done.wait(), 5)
        server.close()
        await server.wait_closed()
        return told

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(work()) == ["echoed", "called", "slept"]
