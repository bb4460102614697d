"""StreamTransport against servers that do what they should not, or stop, or are something else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gazette_sdk.errors import (
    CallError,
    ClosedError,
    DeadlineExceededError,
    UnavailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import Aborted, HalfClosed, Ping
from gazette_sdk.protocol.stream_frames import Kind, encode, encode_goaway, header
from gazette_sdk.transport.stream import StreamTransport, connection
from gazette_sdk.transport.stream import pool as pool_module
from gazette_sdk.transport.stream.dialing import NotStreamError
from support.scripted_broker import append_ok, append_status, in_loop, read_metadata, until
from support.scripted_broker import header as message_header
from support.scripted_stream import ScriptedStream
from support.tcp_proxy import TcpProxy

OPEN_FILES = Path("/proc/self/fd")
APPLIED = pb.ApplyResponse(header=message_header())


@pytest.fixture(autouse=True)
def _nothing_leaks():
    before = len(list(OPEN_FILES.iterdir()))
    yield
    gc.collect()
    assert len(list(OPEN_FILES.iterdir())) <= before


@contextlib.asynccontextmanager
async def served(script, **options):
    async with ScriptedStream(script) as server:
        async with StreamTransport(server.address, **options) as transport:
            yield server, transport
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()} - server._tasks
        assert not others


async def items(*contents, commit=True):
    yield pb.AppendRequest(journal="a/journal")
    for content in contents:
        yield (await content) if isinstance(content, asyncio.Future) else content
    if commit:
        yield pb.AppendRequest()


def apply(transport):
    return transport.apply(pb.ApplyRequest())


def read(transport, **fields):
    return transport.read(pb.ReadRequest(journal="a/journal", **fields))


async def obliging(peer):
    """Answers every Apply."""
    await peer.greet()
    while True:
        peer.answer((await peer.call()).call, APPLIED)


# ----------------------------------------------------------- something else there


async def _closes(peer):
    pass


async def _answers_http(peer):
    peer.raw(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


async def _greets_wrongly(peer):
    peer.raw(encode(Kind.HELLO, b"\xff\xff"))
    await peer.hang_up()


async def _begins_out_of_order(peer):
    peer.raw(encode(Kind.STATUS, b"\0"))
    await peer.hang_up()


async def _swallows(peer):
    await peer.hang_up()


@pytest.mark.parametrize(
    "script", [_closes, _answers_http, _greets_wrongly, _begins_out_of_order, _swallows]
)
@in_loop
async def test_what_speaks_something_else_is_told_from_what_cannot_be_reached(script):
    async with served(script, connect_timeout_s=0.3) as (server, transport):
        transport._pool._dialer._hello_timeout_s = 0.1
        with pytest.raises(UnavailableError, match=server.address) as caught:
            await apply(transport)
        assert isinstance(caught.value.__cause__, NotStreamError)


@in_loop
async def test_a_server_that_is_full_says_so_and_speaks_this_wire():
    async def script(peer):
        peer.raw(encode_goaway("too many connections"))

    async with served(script, connect_timeout_s=0.3) as (_, transport):
        with pytest.raises(UnavailableError, match="too many connections") as caught:
            await apply(transport)
        assert not isinstance(caught.value.__cause__, NotStreamError)


# -------------------------------------------------------------- broken in a call


async def _lose(peer, _began):
    peer.writer.transport.abort()


async def _break_off_inside_a_frame(peer, _began):
    peer.raw(header(Kind.MESSAGE, 100) + b"half")


async def _garbage(peer, _began):
    peer.raw(b"\xfe" * 40)
    await peer.hang_up()


async def _oversize(peer, _began):
    peer.raw(bytes((Kind.CONTENT,)) + (1 << 30).to_bytes(4, "big"))
    await peer.hang_up()


async def _out_of_order(peer, began):
    peer.raw(encode(Kind.CONTENT, b"x"))
    await peer.hang_up()


async def _success_without_response(peer, began):
    peer.raw(encode(Kind.STATUS, b"\0"))
    await peer.hang_up()


async def _goaway_and_close(peer, _began):
    peer.raw(encode_goaway("restarting"))


@pytest.mark.parametrize(
    ("breaks", "text"),
    [
        (_lose, "Apply at http"),
        (_break_off_inside_a_frame, "closed the connection"),
        (_garbage, "unknown kind 254"),
        (_oversize, "CONTENT frame of 1073741824 bytes"),
        (_out_of_order, "out of order"),
        (_success_without_response, "success without a response"),
        (_goaway_and_close, "restarting"),
    ],
)
@in_loop
async def test_a_call_that_breaks_is_unavailable_and_the_next_one_reconnects(breaks, text):
    broken = []

    async def script(peer):
        await peer.greet()
        began = await peer.call()
        if not broken:
            broken.append(1)
            await breaks(peer, began)
            return
        peer.answer(began.call, APPLIED)
        await peer.hang_up()

    async with served(script) as (server, transport):
        with pytest.raises(UnavailableError, match=text):
            await apply(transport)
        assert await apply(transport) == APPLIED
        assert len(server.peers) == 2


@in_loop
async def test_an_append_whose_acknowledgement_is_lost_is_sent_once():
    async def script(peer):
        await peer.greet()
        await peer.whole_append()
        peer.writer.transport.abort()

    async with served(script) as (server, transport):
        with pytest.raises(UnavailableError):
            await transport.append(items(b"content"))
        assert len(server.peers) == 1


@in_loop
async def test_a_message_that_is_none_is_an_error_of_the_call_alone():
    async def script(peer):
        await peer.greet()
        peer.raw(peer.calls.answer((await peer.call()).call, b"\xff"))
        peer.answer((await peer.call()).call, APPLIED)
        await peer.hang_up()

    async with served(script) as (server, transport):
        with pytest.raises(CallError, match="malformed") as caught:
            await apply(transport)
        assert caught.value.code == "INTERNAL"
        assert await apply(transport) == APPLIED
        assert len(server.peers) == 1


@in_loop
async def test_responses_above_the_callers_bound_are_refused():
    async def script(peer):
        await peer.greet()
        peer.answer((await peer.call()).call, APPLIED)
        await peer.hang_up()

    async with served(script, max_receive_bytes=3) as (_, transport):
        with pytest.raises(CallError, match="max_receive_bytes") as caught:
            await apply(transport)
        assert caught.value.code == "RESOURCE_EXHAUSTED"


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
        await until(lambda: transport._pool._endpoints and _idle(transport))
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
        await until(lambda: len(transport._pool) == 0)


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


# --------------------------------------------------------------- time and silence


@in_loop
async def test_a_silent_peer_is_asked_and_dropped(monkeypatch):
    monkeypatch.setattr(connection, "PING_AFTER_S", 0.05)
    monkeypatch.setattr(connection, "SILENCE_MAX_S", 0.15)

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
    monkeypatch.setattr(connection, "PING_AFTER_S", 0.02)
    monkeypatch.setattr(connection, "SILENCE_MAX_S", 0.5)

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
        await until(lambda: len(transport._pool) == 0)


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


# ---------------------------------------------------------------------- the pool


def _idle(transport):
    return [c for endpoint in transport._pool._endpoints.values() for c in endpoint.idle]


@in_loop
async def test_calls_one_after_the_other_share_a_connection():
    async with served(obliging) as (server, transport):
        for _ in range(20):
            await apply(transport)
        assert len(server.peers) == 1


@in_loop
async def test_many_short_calls_at_once_share_a_few_connections():
    async with served(obliging) as (server, transport):
        await asyncio.gather(*(apply(transport) for _ in range(600)))
        assert len(server.peers) == pool_module.SHARED_MAX


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
        await until(lambda: len(transport._pool) == pool_module.IDLE_MAX)


@in_loop
async def test_idle_connections_are_swept():
    async with served(obliging) as (server, transport):
        await apply(transport)
        pool = transport._pool
        [idle] = _idle(transport)
        pool.sweep(idle.freed_at + pool_module.SWEEP_INTERVAL_S - 1)
        await apply(transport)
        assert len(server.peers) == 1
        pool.sweep(idle.freed_at + pool_module.SWEEP_INTERVAL_S)
        assert len(pool) == 0
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
        await proxy.break_connections()
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
from gazette_sdk.transport.stream import StreamTransport

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
