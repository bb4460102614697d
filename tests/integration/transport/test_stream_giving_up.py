"""Calls of a StreamTransport that are given up: by the caller, for their time, for silence."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.errors import DeadlineExceededError, UnavailableError
from gazette_sdk.protocol import stream_calls as stream_liveness
from gazette_sdk.protocol.stream_calls import Aborted, HalfClosed, Ping
from gazette_sdk.transport.stream import connection
from support.scripted_broker import in_loop, read_metadata, until
from support.stream_transports import APPLIED, apply, items, pool, read, served
from support.stream_transports import idle as _idle

pytestmark = pytest.mark.usefixtures("no_descriptor_leaks")

# ------------------------------------------------------------------------ giving up


@in_loop
async def test_closing_a_read_aborts_it_and_keeps_the_connection():
    async def script(peer):
        await peer.greet()
        began = await peer.call()
        peer.message(began.call, read_metadata(0, 0, 9))
        assert await peer.event() == Aborted(began.call)
        for _ in range(20):  # what was under way
            peer.raw(peer.calls.content(began.call, b"x" * 100_000))
        peer.raw(peer.calls.status(began.call, 1, "given up"))
        peer.answer((await peer.call()).call, APPLIED)
        await peer.hang_up()

    async with served(script) as (server, transport):
        reading = read(transport, block=True)
        assert await anext(reading) == read_metadata(0, 0, 9)
        await reading.aclose()
        await until(lambda: pool(transport)._endpoints and _idle(transport))
        assert await apply(transport) == APPLIED
        assert len(server.peers) == 1


@in_loop
async def test_a_read_that_does_not_end_when_given_up_loses_its_connection(monkeypatch):
    monkeypatch.setattr(connection, "ABORT_TIMEOUT_S", 0.05)
    gone = asyncio.Event()

    async def script(peer):
        await peer.greet()
        peer.message((await peer.call()).call, read_metadata(0, 0, 9))
        await peer.hang_up()
        gone.set()

    async with served(script) as (_, transport):
        reading = read(transport, block=True)
        await anext(reading)
        await reading.aclose()
        await gone.wait()
        await until(lambda: len(pool(transport)) == 0)


@in_loop
async def test_a_cancelled_call_is_aborted():
    arrived, aborted = asyncio.Event(), asyncio.Event()

    async def script(peer):
        await peer.greet()
        began = await peer.call()
        arrived.set()
        assert await peer.event() == Aborted(began.call)
        peer.raw(peer.calls.status(began.call, 1))
        aborted.set()
        await peer.hang_up()

    async with served(script) as (_, transport):
        applying = asyncio.create_task(apply(transport))
        await arrived.wait()
        applying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await applying
        await aborted.wait()


@pytest.mark.parametrize("waits_in", ["content", "answer"])
@in_loop
async def test_a_cancelled_append_is_aborted(waits_in):
    arrived, aborted = asyncio.Event(), asyncio.Event()
    never = asyncio.get_running_loop().create_future()

    async def script(peer):
        await peer.greet()
        began = await peer.call()
        event = await peer.event()
        while waits_in == "answer" and not isinstance(event, HalfClosed):
            event = await peer.event()
        arrived.set()
        assert await peer.event() == Aborted(began.call)
        peer.raw(peer.calls.status(began.call, 1))
        aborted.set()
        await peer.hang_up()

    async with served(script) as (_, transport):
        content = (b"x", never) if waits_in == "content" else (b"x",)
        appending = asyncio.create_task(transport.append(items(*content)))
        await arrived.wait()
        appending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await appending
        await aborted.wait()
        await until(lambda: _idle(transport))


# --------------------------------------------------------------- time and silence


@in_loop
async def test_a_silent_peer_is_asked_and_dropped(monkeypatch):
    monkeypatch.setattr(stream_liveness, "PING_AFTER_S", 0.05)
    monkeypatch.setattr(stream_liveness, "SILENCE_MAX_S", 0.15)

    async def script(peer):
        await peer.greet()
        await peer.call()
        await peer.hang_up()

    async with served(script) as (server, transport):
        with pytest.raises(UnavailableError, match="said nothing for"):
            await apply(transport)
        [peer] = server.peers
        await until(lambda: any(isinstance(event, Ping) for event in peer.events))


@in_loop
async def test_a_peer_that_answers_pings_may_take_its_time(monkeypatch):
    monkeypatch.setattr(stream_liveness, "PING_AFTER_S", 0.02)
    monkeypatch.setattr(stream_liveness, "SILENCE_MAX_S", 0.5)

    async def script(peer):
        await peer.greet()
        began = await peer.call()
        for _ in range(3):
            ping = await peer.event()
            peer.raw(peer.calls.pong(ping.payload))
        peer.answer(began.call, APPLIED)
        await peer.hang_up()

    async with served(script) as (_, transport):
        assert await apply(transport) == APPLIED


@in_loop
async def test_pings_of_the_server_are_answered():
    async def script(peer):
        await peer.greet()
        began = await peer.call()
        peer.raw(peer.calls.ping(b"are you there?"))
        pong = await peer.event()
        assert pong.payload == b"are you there?"
        peer.answer(began.call, APPLIED)
        await peer.hang_up()

    async with served(script) as (_, transport):
        assert await apply(transport) == APPLIED


@in_loop
async def test_calls_are_bounded_at_both_ends_where_a_bound_is_given():
    heads = []

    async def script(peer):
        await peer.greet()
        began = await peer.call()
        heads.append(began.head.timeout_ms)
        assert await peer.event() == Aborted(began.call)
        peer.raw(peer.calls.status(began.call, 4))
        peer.answer((await peer.call()).call, APPLIED)
        await peer.hang_up()

    async with served(script, call_timeout_s=0.05) as (server, transport):
        with pytest.raises(DeadlineExceededError, match=r"0\.05 s"):
            await apply(transport)
        await until(lambda: _idle(transport))
        assert await apply(transport) == APPLIED
        assert (heads, len(server.peers)) == ([50], 1)
