"""Transports that several event loops of a process use: each has its own connections."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gazette_sdk.errors import ClosedError
from gazette_sdk.transport.stream.wire import ChosenTransport, StreamTransport
from support.scripted_broker import append_ok, in_loop
from support.scripted_stream import ScriptedStream
from support.stream_transports import APPLIED, apply, items, obliging, read, served

pytestmark = pytest.mark.usefixtures("no_descriptor_leaks")


def in_a_thread(coroutine):
    """Runs it on an event loop of its own."""
    return asyncio.to_thread(asyncio.run, coroutine)


@pytest.mark.parametrize("kind", [StreamTransport, ChosenTransport])
@in_loop
async def test_each_loop_has_connections_of_its_own(kind):
    together = threading.Barrier(4)

    async with ScriptedStream(obliging) as server, kind(server.address) as transport:

        async def use():
            for _ in range(20):
                assert await apply(transport) == APPLIED
            await asyncio.to_thread(together.wait)

        await asyncio.gather(use(), *(in_a_thread(use()) for _ in range(3)))
        assert len(server.peers) == 4


@in_loop
async def test_calls_of_a_loop_need_no_other_one():
    async def script(peer):
        await peer.greet()
        began, content = await peer.whole_append()
        peer.answer(began.call, append_ok(end=len(content)))
        peer.answer((await peer.call()).call, APPLIED)
        await peer.hang_up()

    async with served(script) as (_, transport):
        loops = []

        async def noting():
            loops.append(asyncio.get_running_loop())
            async for item in items(b"a", b"b"):
                yield item

        async def use():
            assert (await transport.append(noting())).commit.end == 2
            assert await apply(transport) == APPLIED
            assert loops == [asyncio.get_running_loop()]

        await in_a_thread(use())


@in_loop
async def test_connections_of_a_loop_that_was_closed_are_dropped():
    gone = asyncio.Event()

    async def script(peer):
        try:
            await obliging(peer)
        finally:
            gone.set()

    async with served(script) as (server, transport):
        loop = asyncio.new_event_loop()
        try:
            await asyncio.to_thread(loop.run_until_complete, apply(transport))
            [connection] = next(iter(transport.wire.pools._pools.values())).connections()
        finally:
            loop.close()
        assert await apply(transport) == APPLIED
        await gone.wait()
        assert len(transport.wire.pools) == 1
        assert len(server.peers) == 2
        connection._transport._sock.close()
        connection._transport._sock = None  # else it warns


@in_loop
async def test_closing_the_transport_ends_calls_of_other_loops():
    arrived = asyncio.Event()

    async def script(peer):
        await peer.greet()
        await peer.call()
        arrived.set()
        await peer.hang_up()

    async with ScriptedStream(script) as server:
        transport = StreamTransport(server.address)

        async def use():
            with pytest.raises(ClosedError):
                await anext(read(transport, block=True))
            with pytest.raises(ClosedError, match="connect again"):
                await apply(transport)

        using = asyncio.create_task(in_a_thread(use()))
        await arrived.wait()
        await transport.aclose()
        await using
        with pytest.raises(ClosedError, match="connect again"):
            await apply(transport)


@in_loop
async def test_closing_waits_for_no_loop_that_is_busy():
    arrived, busy = threading.Event(), threading.Event()
    async with ScriptedStream(obliging) as server:
        transport = StreamTransport(server.address)

        async def use():
            await apply(transport)
            arrived.set()
            busy.wait(10)  # blocks its event loop

        using = asyncio.create_task(in_a_thread(use()))
        await asyncio.to_thread(arrived.wait)
        async with asyncio.timeout(5):
            await transport.aclose()
        busy.set()
        await using
