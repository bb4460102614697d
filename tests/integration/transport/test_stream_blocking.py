"""Appends from plain code over a blocking socket, against servers right and wrong."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gazette_sdk.errors import (
    CallError,
    ClosedError,
    DeadlineExceededError,
    UnavailableError,
)
from gazette_sdk.protocol.stream_calls import NOT_RUN
from gazette_sdk.protocol.stream_frames import Kind, encode, encode_goaway
from gazette_sdk.transport.stream import blocking
from support.blocking_clients import (
    WAIT_S,
    Served,
    certificates,
    destination,
    loses,
    may_be_dialled,
    nothing_leaks,
    obliging,
    over_each_way,
    serve,
    silent,
    to_the_end,
)
from support.scripted_broker import append_ok, in_loop, until

__all__ = ["certificates", "nothing_leaks", "serve"]


# ------------------------------------------------------------------------ appends


@over_each_way
@in_loop
async def test_appends_follow_each_other_on_one_connection(serve):
    async with serve(obliging) as served:
        for length in (1, 100, 200_000, 5):
            response = await served.append(b"x" * length)
            assert response == append_ok(end=length)
        [peer] = served.server.peers
        assert served.is_connected
        tls = peer.writer.get_extra_info("ssl_object")
        if served.server.address.startswith("https"):
            assert tls.selected_alpn_protocol() == "gzt/1"
        else:
            assert tls is None


@in_loop
async def test_threads_have_connections_of_their_own_and_share_what_is_idle():
    gate = asyncio.Event()

    async def gated(peer):
        await peer.greet()
        while True:
            began, _ = await peer.whole_append()
            await gate.wait()
            peer.answer(began.call, append_ok())

    async with Served(gated) as served:
        appends = [asyncio.create_task(served.append()) for _ in range(4)]
        await until(lambda: sum(len(peer.events) >= 3 for peer in served.server.peers) == 4)
        gate.set()
        await asyncio.gather(*appends)
        for _ in range(10):
            await served.append()
        assert len(served.server.peers) == 4


@in_loop
async def test_the_token_and_the_bound_are_in_the_head():
    heads = []

    async def script(peer):
        await peer.greet()
        while True:
            began, _ = await peer.whole_append()
            heads.append(began.head)
            peer.answer(began.call, append_ok())

    async with Served(script, call_timeout_s=5.0) as served:
        await served.append()
        await served.append(to=destination(served.server.address, "Bearer token"))
    assert [head.timeout_ms for head in heads] == [5000, 5000]
    assert [dict(head.metadata) for head in heads] == [{}, {"authorization": "Bearer token"}]


# ----------------------------------------------------------- what isn't there any more


@in_loop
async def test_a_connection_that_was_closed_meanwhile_is_none_until_another_is_prepared():
    async def one_only(peer):
        await peer.greet()
        began, _ = await peer.whole_append()
        peer.answer(began.call, append_ok())

    async with Served(one_only) as served:
        for count in range(1, 4):
            await served.append()
            await asyncio.sleep(0.02)
            assert served.is_connected  # nobody has looked
            assert await served.tried() is None
            assert not served.is_connected
            assert len(served.server.peers) == count


@in_loop
async def test_a_server_that_said_it_leaves_gets_no_further_call():
    async def leaving(peer):
        await peer.greet()
        began, _ = await peer.whole_append()
        peer.answer(began.call, append_ok())
        peer.raw(encode_goaway("it stops"))
        await peer.hang_up()

    async with Served(leaving) as served:
        for _ in range(3):
            await served.append()
            await asyncio.sleep(0.02)
        assert [len(peer.events) for peer in served.server.peers] == [3, 3, 3]


@in_loop
async def test_a_question_between_calls_is_answered_with_the_next():
    pongs = []

    async def asking(peer):
        await peer.greet()
        began, _ = await peer.whole_append()
        peer.answer(began.call, append_ok())
        peer.raw(peer.calls.ping(b"idle"))
        pongs.append(await peer.event())
        began, _ = await peer.whole_append()
        peer.raw(peer.calls.ping(b"busy"))
        pongs.append(await peer.event())
        peer.answer(began.call, append_ok())

    async with Served(asking) as served:
        await served.append()
        await asyncio.sleep(0.02)
        await served.append()
        assert [pong.payload for pong in pongs] == [b"idle", b"busy"]
        assert len(served.server.peers) == 1


@in_loop
async def test_idle_connections_grow_old(monkeypatch):
    async with Served(obliging) as served:
        await served.append()
        assert len(served.idle) == 1
        monkeypatch.setattr(blocking, "IDLE_MAX_S", 0.0)
        served.client._sweep_at = 0.0
        await served.append()
        assert not served.is_connected


# ---------------------------------------------------------------------------- to prepare


@over_each_way
@in_loop
async def test_an_append_uses_what_was_prepared_and_opens_nothing_itself(serve):
    async with serve(obliging) as served:
        assert await served.tried() is None
        assert served.server.peers == []
        assert not served.is_connected
        await served.prepare()
        assert served.is_connected
        assert len(served.idle) == 1
        first = await served.tried(b"abc")
        assert await served.tried(b"abcd") is None  # the only one is in use
        assert (await asyncio.to_thread(to_the_end, first)).commit.end == 3
        assert (await served.append(b"abcde")).commit.end == 5
        [peer] = served.server.peers
        assert len(peer.events) == 2 * 3


@in_loop
async def test_no_more_connections_are_prepared_than_are_kept():
    gate = asyncio.Event()

    async def gated(peer):
        await peer.greet()
        while True:
            began, _ = await peer.whole_append()
            await gate.wait()
            peer.answer(began.call, append_ok())

    async with Served(gated) as served:
        for count in range(1, blocking.IDLE_MAX + 1):
            await served.prepare()
            assert len(served.idle) == count
        await served.prepare()
        assert len(served.idle) == len(served.server.peers) == blocking.IDLE_MAX
        calls = [await served.tried() for _ in range(blocking.IDLE_MAX)]
        assert None not in calls
        await served.prepare()  # busy ones count, too
        assert await served.tried() is None
        assert len(served.server.peers) == blocking.IDLE_MAX
        gate.set()
        for call in calls:
            await asyncio.to_thread(to_the_end, call)
        assert len(served.idle) == len(served.server.peers) == blocking.IDLE_MAX


@in_loop
async def test_threads_that_prepare_at_once_leave_no_more_than_are_kept():
    gate = asyncio.Event()

    async def slow(peer):
        await gate.wait()
        await peer.greet()
        await peer.hang_up()

    count = blocking.IDLE_MAX + 3
    loop = asyncio.get_running_loop()
    async with Served(slow) as served:
        with ThreadPoolExecutor(count) as threads:
            preparing = [
                loop.run_in_executor(threads, served.client.prepare, served.to)
                for _ in range(count)
            ]
            await until(lambda: len(served.server.peers) == count)
            gate.set()
            await asyncio.gather(*preparing)
        assert len(served.idle) == blocking.IDLE_MAX
        assert not served.client._busy


@in_loop
async def test_a_closed_client_prepares_nothing():
    async with Served(obliging) as served:
        await served.prepare()
        served.client.close()
        for _ in range(2):
            with pytest.raises(ClosedError):
                await served.prepare()
        with pytest.raises(ClosedError):
            await served.tried()
        assert not served.is_connected
        assert not may_be_dialled(served.client, served.server.address)


@in_loop
async def test_a_connection_that_is_there_only_after_the_client_was_closed_is_closed_too():
    gate = asyncio.Event()
    is_gone = asyncio.Event()

    async def slow(peer):
        await gate.wait()
        await peer.greet()
        await peer.hang_up()
        is_gone.set()

    async with Served(slow) as served:
        preparing = asyncio.create_task(served.prepare())
        await until(lambda: served.server.peers)
        served.client.close()
        gate.set()
        with pytest.raises(ClosedError):
            await preparing
        await is_gone.wait()
        assert not served.is_connected


# --------------------------------------------------------------------- what goes wrong


async def _breaks_rules(peer):
    await peer.greet()
    await peer.whole_append()
    peer.raw(encode(Kind.CONTENT, b"what"))
    await peer.hang_up()


async def _sends_an_unknown_frame(peer):
    await peer.greet()
    await peer.whole_append()
    peer.raw(b"\xee\0\0\0\0")
    await peer.hang_up()


async def _ends_within_a_frame(peer):
    await peer.greet()
    began, _ = await peer.whole_append()
    peer.raw(peer.calls.answer(began.call, append_ok().SerializeToString())[:-3])


async def _goes_away(peer):
    await peer.greet()
    await peer.whole_append()
    peer.raw(encode_goaway("it stops"))


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (loses, "closed the connection"),
        (_breaks_rules, "broke the rules of the wire: CONTENT frame out of order"),
        (_sends_an_unknown_frame, "broke the rules of the wire: frame of unknown kind"),
        (_ends_within_a_frame, "closed the connection"),
        (_goes_away, "it went away: it stops"),
    ],
)
@in_loop
async def test_an_append_whose_answer_is_lost_fails_and_is_not_repeated(script, told):
    async with Served(script) as served:
        with pytest.raises(UnavailableError, match=told) as caught:
            await served.append()
        assert caught.value.journal == "a/journal"
        assert len(served.server.peers) == 1
        assert not served.is_connected


@in_loop
async def test_statuses_are_the_same_errors_as_on_the_event_loop():
    statuses = [(14, "no", NOT_RUN), (16, "who", ""), (4, "late", ""), (13, "odd", "")]

    async def script(peer):
        await peer.greet()
        for code, text, kind in statuses:
            began, _ = await peer.whole_append()
            peer.raw(peer.calls.status(began.call, code, text, kind))
        began, _ = await peer.whole_append()
        peer.raw(peer.calls.answer(began.call, b"\xff\xff"))
        began, _ = await peer.whole_append()
        peer.answer(began.call, append_ok())

    async with Served(script) as served:
        for code, text, _ in statuses:
            with pytest.raises(
                CallError, match=f"Append at broker zone/member .*: {text}"
            ) as caught:
                await served.append()
            assert isinstance(caught.value, UnavailableError) == (code == 14)
            assert isinstance(caught.value, DeadlineExceededError) == (code == 4)
        with pytest.raises(CallError, match="malformed"):
            await served.append()
        await served.append()
        assert len(served.server.peers) == 1


@in_loop
async def test_content_that_is_too_long_is_not_sent():
    async with Served(obliging) as served:
        with pytest.raises(CallError, match="content of 1048576 bytes"):
            await served.append(b"x" * ((1 << 20) + 1))
        await served.append()
        assert len(served.server.peers) == 1
        assert len(served.server.peers[0].events) == 3


@in_loop
async def test_an_answer_with_nonsense_behind_it_is_good_and_the_last():
    async def script(peer):
        await peer.greet()
        began, _ = await peer.whole_append()
        answer = peer.calls.answer(began.call, append_ok().SerializeToString())
        peer.raw(answer + encode(Kind.CONTENT, b"what"))
        await peer.hang_up()

    async with Served(script) as served:
        assert await served.append() == append_ok()
        assert not served.is_connected


# ------------------------------------------------------------------------------- ends


@in_loop
async def test_closing_ends_what_is_under_way_and_what_follows():
    async with Served(silent) as served:
        call = await served.begun()
        waiting = asyncio.create_task(asyncio.to_thread(call.wait, WAIT_S))
        await asyncio.sleep(0.02)
        began_at = time.monotonic()
        served.client.close()
        assert await waiting
        assert time.monotonic() - began_at < WAIT_S / 2
        with pytest.raises(ClosedError):
            call.response()
        with pytest.raises(ClosedError):
            await served.append()


@in_loop
async def test_a_forked_child_has_no_connections_and_harms_none():
    async with Served(obliging) as served:
        await served.append()
        [connection] = served.client._idle[served.server.address]
        child = os.fork()
        if child == 0:
            good = not served.is_connected
            good &= connection.fileno() == -1
            os._exit(0 if good else 1)
        status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status[1]) == 0
        await served.append()
        assert len(served.server.peers) == 1
