"""Content that a StreamTransport sends and takes: early answers, frames, and slow ends."""

from __future__ import annotations

import asyncio
import os

import pytest

from gazette_sdk.errors import CallError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import HalfClosed
from support.scripted_broker import append_ok, append_status, in_loop, read_metadata
from support.stream_transports import APPLIED, apply, items, read, served

pytestmark = pytest.mark.usefixtures("no_descriptor_leaks")

# ------------------------------------------------------------------ early answers


@in_loop
async def test_an_early_answer_stops_the_sending_and_keeps_the_connection():
    early = append_status(pb.REGISTER_MISMATCH)

    async def script(peer):
        await peer.greet()
        peer.answer((await peer.call()).call, early)
        peer.answer((await peer.call()).call, APPLIED)
        await peer.hang_up()

    async with served(script) as (server, transport):
        sent = 0

        async def endless():
            nonlocal sent
            yield pb.AppendRequest(journal="a/journal")
            while True:
                sent += 1
                yield b"x" * 100_000

        assert await transport.append(endless()) == early
        assert sent < 1000
        assert await apply(transport) == APPLIED
        assert len(server.peers) == 1


@in_loop
async def test_an_early_refusal_is_reported_as_it_is():
    async def script(peer):
        await peer.greet()
        peer.raw(peer.calls.status((await peer.call()).call, 16, "no token"))
        await peer.hang_up()

    async with served(script) as (_, transport):
        with pytest.raises(CallError, match="no token") as caught:
            await transport.append(items(*[b"x" * (128 << 10)] * 20))
        assert caught.value.code == "UNAUTHENTICATED"


# ------------------------------------------------------------------ frames of content


@in_loop
async def test_content_that_comes_in_time_is_sent_as_it_comes():
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def script(peer):
        await peer.greet()
        began = await peer.call()
        while not isinstance(event := await peer.event(), HalfClosed):
            seen.put_nowait(event.payload)
        peer.answer(began.call, append_ok(0, 3))
        await peer.hang_up()

    loop = asyncio.get_running_loop()
    second, third = loop.create_future(), loop.create_future()
    async with served(script) as (_, transport):
        appending = asyncio.create_task(transport.append(items(b"a", second, third)))
        assert await seen.get() == b"a"
        second.set_result(b"b")
        assert await seen.get() == b"b"
        third.set_result(b"c")
        assert await appending == append_ok(0, 3)
        assert await seen.get() == b"c"


@in_loop
async def test_content_above_a_frames_bound_is_cut():
    received = []

    async def script(peer):
        await peer.greet()
        began, content = await peer.whole_append()
        received.append(content)
        peer.answer(began.call, append_ok(0, len(content)))
        await peer.hang_up()

    content = os.urandom((3 << 20) + 17)
    async with served(script) as (_, transport):
        await transport.append(items(content, b"end"))
    assert received == [content + b"end"]


# ------------------------------------------------------------------- back-pressure


@in_loop
async def test_a_slow_reader_stops_the_server():
    sent = 0

    async def script(peer):
        nonlocal sent
        await peer.greet()
        began = await peer.call()
        peer.message(began.call, read_metadata(0, 0, 1 << 40))
        for _ in range(256):
            peer.raw(peer.calls.content(began.call, bytes(256 << 10)))
            await peer.writer.drain()
            sent += 1
        peer.raw(peer.calls.status(began.call))
        await peer.hang_up()

    async with served(script) as (_, transport):
        reading = read(transport)
        await anext(reading)
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 100
        assert sum([len(item) async for item in reading]) == 64 << 20


@in_loop
async def test_a_slow_server_stops_the_sender():
    proceed = asyncio.Event()

    async def script(peer):
        await peer.greet()
        began = await peer.call()
        await proceed.wait()
        while not isinstance(await peer.event(), HalfClosed):
            pass
        peer.answer(began.call, append_ok())
        await peer.hang_up()

    taken = 0

    async def content():
        nonlocal taken
        yield pb.AppendRequest(journal="a/journal")
        for _ in range(64):
            taken += 1
            yield bytes(1 << 20)
        yield pb.AppendRequest()

    async with served(script) as (_, transport):
        appending = asyncio.create_task(transport.append(content()))
        before = -1
        while taken != before:
            before = taken
            await asyncio.sleep(0.1)
        assert taken < 30
        proceed.set()
        assert await appending == append_ok()
