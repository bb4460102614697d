"""Connections of a StreamTransport: shared, kept, left, closed, and forked."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from gazette_sdk.errors import ClosedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing.tcp_proxy import TcpProxy
from gazette_sdk.transport.stream import pool as pool_module
from gazette_sdk.transport.stream.wire import StreamTransport
from support.scripted_broker import append_ok, in_loop, read_metadata, until
from support.scripted_stream import ScriptedStream
from support.stream_transports import APPLIED, apply, obliging, pool, read, served
from support.stream_transports import idle as _idle

pytestmark = pytest.mark.usefixtures("no_descriptor_leaks")


@in_loop
async def test_after_goaway_calls_end_and_new_ones_go_elsewhere():
    calls = []

    async def script(peer):
        await peer.greet()
        while True:
            began = await peer.call()
            calls.append(peer)
            peer.raw(peer.calls.goaway("draining"))
            peer.answer(began.call, APPLIED)

    async with served(script) as (server, transport):
        for _ in range(3):
            assert await apply(transport) == APPLIED
        assert calls == server.peers
        await until(lambda: len(pool(transport)) == 0)


@in_loop
async def test_calls_one_after_the_other_share_a_connection():
    async with served(obliging) as (server, transport):
        for _ in range(20):
            await apply(transport)
        assert len(server.peers) == 1


@in_loop
async def test_many_short_calls_at_once_share_a_few_connections(monkeypatch):
    # On a busy machine 50 ms pass without an answer: then there would be more of them.
    monkeypatch.setattr(pool_module, "SLOW_S", 10.0)
    async with served(obliging) as (server, transport):
        await asyncio.gather(*(apply(transport) for _ in range(600)))
        assert len(server.peers) == pool_module.SHARED_MAX


@in_loop
async def test_a_pipeline_whose_appends_were_answered_at_once_takes_no_more():
    """Its connection is idle in the pool by then, which may close it."""

    async def script(peer):
        await peer.greet()
        calls = []
        while len(calls) < 2:
            calls.append((await peer.call()).call)
        for call in calls:  # by one write
            peer.answer(call, append_ok())

    async with served(script) as (_, transport):
        request = pb.AppendRequest(journal="a/journal")
        append = transport.router.prepare_append(request)
        pipeline = await transport.wire.open_pipeline(append.to)
        states = []

        def answered(outcome):
            states.append((outcome.status, pipeline.in_flight, pipeline.can_begin))

        pipeline.begin(append, [b"1"], answered)
        pipeline.begin(append, [b"2"], answered)
        await until(lambda: len(states) == 2)
        assert states[0] == (pb.OK, 1, False)


@in_loop
async def test_reads_have_connections_of_their_own_and_few_of_them_are_kept():
    async def script(peer):
        await peer.greet()
        while True:
            began = await peer.call()
            peer.message(began.call, read_metadata(0, 0, 9))
            await peer.event()
            peer.raw(peer.calls.status(began.call, 1))

    async with served(script) as (server, transport):
        readings = [read(transport, block=True) for _ in range(40)]
        for reading in readings:
            await anext(reading)
        assert len(server.peers) == 40
        for reading in readings:
            await reading.aclose()
        await until(lambda: len(pool(transport)) == pool_module.IDLE_MAX)


@in_loop
async def test_idle_connections_are_swept():
    async with served(obliging) as (server, transport):
        await apply(transport)
        connections = pool(transport)
        [idle] = _idle(transport)
        connections.sweep(idle.idle_since + pool_module.SWEEP_INTERVAL_S - 1)
        await apply(transport)
        assert len(server.peers) == 1
        connections.sweep(idle.idle_since + pool_module.SWEEP_INTERVAL_S)
        assert len(connections) == 0
        await apply(transport)
        assert len(server.peers) == 2


@in_loop
async def test_a_connection_that_broke_while_idle_is_not_used():
    async with (
        ScriptedStream(obliging) as server,
        TcpProxy(server.port) as proxy,
        StreamTransport(f"http://localhost:{proxy.port}") as transport,
    ):
        await apply(transport)
        proxy.reset()
        await until(lambda: not _idle(transport))
        assert await apply(transport) == APPLIED


@in_loop
async def test_closing_the_transport_ends_calls_and_dials_under_way():
    arrived = asyncio.Event()

    async def script(peer):
        if len(server.peers) == 1:
            await peer.greet()
            await peer.call()
            arrived.set()
        await peer.hang_up()

    async with ScriptedStream(script) as server:
        transport = StreamTransport(server.address)
        first = asyncio.create_task(apply(transport))
        await arrived.wait()
        dialling = asyncio.create_task(anext(read(transport)))
        await until(lambda: len(server.peers) == 2)
        await transport.aclose()
        for call in (first, dialling):
            with pytest.raises(ClosedError):
                await call
        with pytest.raises(ClosedError, match="connect again"):
            await apply(transport)
        await transport.aclose()


_FORK = """
import asyncio, os, sys
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.stream.wire import StreamTransport

transport = StreamTransport(sys.argv[1])
loop = asyncio.new_event_loop()
loop.run_until_complete(transport.apply(pb.ApplyRequest()))
child = os.fork()
if child == 0:
    async def use():
        await transport.apply(pb.ApplyRequest())
        await transport.aclose()
    asyncio.run(use())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
for _ in range(3):
    loop.run_until_complete(transport.apply(pb.ApplyRequest()))
loop.run_until_complete(transport.aclose())
loop.close()
"""


@in_loop
async def test_a_forked_child_reconnects_and_leaves_its_parent_alone():
    async with ScriptedStream(obliging) as server:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-W", "error", "-c", _FORK, server.address],
            check=False,
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert len(server.peers) == 2
