"""Waiting for an append over a blocking socket: looks, time limits, and who goes on."""

from __future__ import annotations

import asyncio
import statistics
import time

import pytest

from gazette_sdk.errors import (
    DeadlineExceededError,
    UnavailableError,
)
from gazette_sdk.protocol import stream_calls as stream_liveness
from gazette_sdk.protocol.stream_calls import Ping
from gazette_sdk.transport.append.appender import INLINE_BYTES_MAX
from support.blocking_clients import (
    OPENING,
    WAIT_S,
    Served,
    certificates,
    loses,
    nothing_leaks,
    obliging,
    over_each_way,
    serve,
    silent,
)
from support.scripted_broker import append_ok, in_loop, until

__all__ = ["certificates", "nothing_leaks", "serve"]

LOOK_MAX_S = 0.05
SEND_MAX_S = 2.0  # a connection that has no room is waited for longer


@in_loop
async def test_its_time_runs_out():
    async with Served(silent, call_timeout_s=0.1) as served:
        with pytest.raises(DeadlineExceededError, match="no answer within"):
            await served.append()


@in_loop
async def test_a_silent_server_is_asked_and_then_dropped(monkeypatch):
    monkeypatch.setattr(stream_liveness, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(stream_liveness, "SILENCE_MAX_S", 0.2)
    async with Served(silent) as served:
        with pytest.raises(UnavailableError, match="said nothing for 0 s"):
            await served.append()
        await asyncio.sleep(0.01)
        assert any(isinstance(event, Ping) for event in served.server.peers[0].events)


def looked(call):
    """Whether it is over, by one look at it."""
    is_over = call.wait(0)
    assert is_over == call.over
    return is_over


@over_each_way
@in_loop
async def test_a_look_at_a_silent_server_takes_no_time_and_changes_nothing(serve):
    gate = asyncio.Event()

    async def gated(peer):
        await peer.greet()
        while True:
            began, content = await peer.whole_append()
            await gate.wait()
            peer.answer(began.call, append_ok(end=len(content)))

    async with serve(gated) as served:
        call = await served.begun(b"abc")
        taken_s = []
        for _ in range(20):
            began_at = time.monotonic()
            assert not looked(call)
            taken_s.append(time.monotonic() - began_at)
            await asyncio.sleep(0.002)
        assert statistics.median(taken_s) < LOOK_MAX_S  # a busy machine may stop any of them
        gate.set()
        await until(lambda: looked(call))
        assert looked(call)  # again
        assert call.response() == append_ok(end=3)
        assert len(served.idle) == 1
        assert (await served.append(b"abcd")).commit.end == 4
        assert len(served.server.peers) == 1


@over_each_way
@in_loop
async def test_a_look_takes_what_is_there_so_far(serve):
    steps = asyncio.Queue()
    pongs = []

    async def slow(peer):
        await peer.greet()
        began, _ = await peer.whole_append()
        peer.raw(peer.calls.ping(b"busy"))
        pongs.append(await peer.event())
        answer = peer.calls.answer(began.call, append_ok().SerializeToString())
        for part in (answer[:3], answer[3:10], answer[10:-1], answer[-1:]):
            await steps.get()
            peer.raw(part)
        await peer.hang_up()

    async with serve(slow) as served:
        call = await served.begun()
        while not pongs:
            assert not looked(call)
            await asyncio.sleep(0.001)
        for _ in range(3):
            steps.put_nowait("on")
            for _ in range(5):
                await asyncio.sleep(0.002)
                assert not looked(call)
        steps.put_nowait("on")
        await until(lambda: looked(call))
        assert call.response() == append_ok()
        assert [pong.payload for pong in pongs] == [b"busy"]


@over_each_way
@in_loop
async def test_who_sends_waits_for_nothing_though_the_server_reads_nothing(serve):
    async def idle(peer):
        await peer.greet()
        peer.writer.transport.pause_reading()
        await asyncio.Event().wait()

    async with serve(idle) as served:
        for length in (1, INLINE_BYTES_MAX):
            await served.prepare()
            began_at = time.monotonic()
            call = served.client.append(served.to, OPENING, b"x" * length)
            assert time.monotonic() - began_at < SEND_MAX_S
            assert not looked(call)
            call.give_up("it was seen")


@over_each_way
@in_loop
async def test_a_look_sees_the_connection_lost(serve):
    async with serve(loses) as served:
        call = await served.begun()
        await until(lambda: looked(call))
        with pytest.raises(UnavailableError, match="closed the connection"):
            call.response()
        assert not served.is_connected


@in_loop
async def test_a_look_sees_that_time_ran_out():
    async with Served(silent, call_timeout_s=0.1) as served:
        call = await served.begun()
        assert not looked(call)
        await asyncio.sleep(0.11)
        assert looked(call)
        with pytest.raises(DeadlineExceededError, match="no answer within"):
            call.response()


@over_each_way
@in_loop
async def test_an_answer_that_came_in_time_is_good_however_late_it_is_looked_for(
    monkeypatch, serve
):
    monkeypatch.setattr(stream_liveness, "PING_AFTER_S", 0.05)
    monkeypatch.setattr(stream_liveness, "SILENCE_MAX_S", 0.1)
    async with serve(obliging, call_timeout_s=0.2) as served:
        for finish in (looked, lambda call: call.wait(WAIT_S), None):
            call = await served.begun(b"abc")
            await asyncio.sleep(0.3)
            if finish is None:
                await call.finish()
            else:
                assert finish(call)
            assert call.response() == append_ok(end=3)
        assert len(served.server.peers) == 1


@over_each_way
@in_loop
async def test_who_does_not_wait_may_have_an_event_loop_go_on(serve):
    gate = asyncio.Event()

    async def gated(peer):
        await peer.greet()
        began, _ = await peer.whole_append()
        await gate.wait()
        answer = peer.calls.answer(began.call, append_ok().SerializeToString())
        peer.raw(answer[:10])
        await asyncio.sleep(0.01)
        peer.raw(answer[10:])
        began, _ = await peer.whole_append()
        peer.answer(began.call, append_ok())

    async with serve(gated) as served:
        call = await served.begun()
        assert not await asyncio.to_thread(call.wait, 0.05)
        assert not looked(call)
        finishing = asyncio.create_task(call.finish())
        await asyncio.sleep(0.01)
        gate.set()
        await finishing
        assert call.response() == append_ok()
        await served.append()
        assert len(served.server.peers) == 1


@in_loop
async def test_going_on_can_be_given_up():
    async with Served(silent) as served:
        call = await served.begun()
        finishing = asyncio.create_task(call.finish())
        await asyncio.sleep(0.01)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        with pytest.raises(UnavailableError, match="given up"):
            call.response()


@in_loop
async def test_going_on_sees_the_connection_lost_and_the_silence(monkeypatch):
    async with Served(loses) as served:
        call = await served.begun()
        await call.finish()
        with pytest.raises(UnavailableError, match="closed the connection"):
            call.response()
    monkeypatch.setattr(stream_liveness, "PING_AFTER_S", 0.02)
    monkeypatch.setattr(stream_liveness, "SILENCE_MAX_S", 0.05)
    async with Served(silent) as served:
        call = await served.begun()
        await call.finish()
        with pytest.raises(UnavailableError, match="said nothing"):
            call.response()
