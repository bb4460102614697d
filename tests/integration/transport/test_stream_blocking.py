"""Appends from plain code over a blocking socket, against servers right and wrong."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from pathlib import Path

import pytest

from gazette_sdk.errors import (
    CallError,
    ClosedError,
    DeadlineExceededError,
    UnavailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.service import RPCS_BY_NAME
from gazette_sdk.protocol.stream_calls import NOT_RUN, Ping
from gazette_sdk.protocol.stream_frames import Kind, encode, encode_goaway
from gazette_sdk.server.tls import server_context
from gazette_sdk.transport.stream import blocking, blocking_call
from gazette_sdk.transport.stream.blocking import BlockingClient
from gazette_sdk.transport.stream.blocking_connection import BlockingDialer
from gazette_sdk.transport.stream.dialing import NotStreamError
from gazette_sdk.transport.target import Destination, Peer
from gazette_sdk.transport.tls import Tls
from support.certificates import Authority
from support.scripted_broker import append_ok, in_loop, until
from support.scripted_stream import ScriptedPeer, ScriptedStream

OPEN_FILES = Path("/proc/self/fd")
OPENING = pb.AppendRequest(journal="a/journal").SerializeToString()
WAIT_S = 10.0


@pytest.fixture(autouse=True)
def _nothing_leaks():
    before = len(list(OPEN_FILES.iterdir()))
    threads = threading.active_count()
    yield
    gc.collect()
    assert len(list(OPEN_FILES.iterdir())) <= before
    assert threading.active_count() <= threads + 8  # of asyncio.to_thread


def destination(address, authorization=None):
    peer = Peer("zone", "member", address)
    return Destination(RPCS_BY_NAME["Append"], "a/journal", peer, "the broker", authorization)


def to_the_end(call):
    assert call.wait(WAIT_S)
    return call.response()


class Served:
    """A scripted server and a client of it, whose calls are made in threads."""

    def __init__(self, script, *, tls=None, client_tls=None, **options):
        self.server = ScriptedStream(script, tls=tls)
        self.client = BlockingClient(BlockingDialer(client_tls or Tls()), **options)

    async def __aenter__(self):
        await self.server.__aenter__()
        return self

    async def __aexit__(self, *error):
        self.client.close()
        await self.server.__aexit__(*error)

    @property
    def to(self):
        return destination(self.server.address)

    async def append(self, content=b"content\n", to=None):
        def there():
            return to_the_end(self.client.append(to or self.to, OPENING, content))

        return await asyncio.to_thread(there)

    async def begun(self, content=b"content\n"):
        return await asyncio.to_thread(self.client.append, self.to, OPENING, content)


async def obliging(peer):
    await peer.greet()
    while True:
        began, content = await peer.whole_append()
        peer.answer(began.call, append_ok(end=len(content)))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    issued = authority.issue()
    context = server_context(str(issued.cert_file), str(issued.key_file))
    return context, Tls(trusted_ca_file=str(authority.ca_file))


# ------------------------------------------------------------------------ appends


@pytest.mark.parametrize("is_tls", [False, True])
@in_loop
async def test_appends_follow_each_other_on_one_connection(certificates, is_tls):
    tls, client_tls = certificates if is_tls else (None, None)
    async with Served(obliging, tls=tls, client_tls=client_tls) as served:
        for length in (1, 100, 200_000, 5):
            response = await served.append(b"x" * length)
            assert response == append_ok(end=length)
        [peer] = served.server.peers
        assert served.client.is_connected(served.server.address)
        if is_tls:
            tls = peer.writer.get_extra_info("ssl_object")
            assert tls.selected_alpn_protocol() == "gzt/1"


@in_loop
async def test_a_unix_socket_is_spoken_to(tmp_path):
    async def serve(reader, writer):
        peer = ScriptedPeer(reader, writer)
        await peer.greet()
        began, content = await peer.whole_append()
        peer.answer(began.call, append_ok(end=len(content)))
        await writer.drain()
        writer.close()

    path = tmp_path / "socket"
    server = await asyncio.start_unix_server(serve, path)
    client = BlockingClient(BlockingDialer(Tls()))
    to = destination(f"unix://{path}")
    call = await asyncio.to_thread(client.append, to, OPENING, b"abc")
    assert (await asyncio.to_thread(to_the_end, call)).commit.end == 3
    client.close()
    server.close()


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
async def test_a_connection_that_was_closed_meanwhile_is_dialled_again():
    async def one_only(peer):
        await peer.greet()
        began, _ = await peer.whole_append()
        peer.answer(began.call, append_ok())

    async with Served(one_only) as served:
        for _ in range(3):
            await served.append()
            await asyncio.sleep(0.02)
        assert len(served.server.peers) == 3


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
async def test_idle_connections_are_bounded_and_grow_old(monkeypatch):
    async with Served(obliging) as served:
        calls = [await served.begun() for _ in range(blocking.IDLE_MAX + 2)]
        for call in calls:
            await asyncio.to_thread(to_the_end, call)
        assert len(served.client._idle[served.server.address]) == blocking.IDLE_MAX
        monkeypatch.setattr(blocking, "IDLE_MAX_S", 0.0)
        served.client._sweep_at = 0.0
        await served.append()
        assert not served.client.is_connected(served.server.address)


# --------------------------------------------------------------------- what goes wrong


async def _loses(peer):
    await peer.greet()
    await peer.whole_append()


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
        (_loses, "closed the connection"),
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
        assert not served.client.is_connected(served.server.address)


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
            with pytest.raises(CallError, match=f"Append at the broker: {text}") as caught:
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
        assert not served.client.is_connected(served.server.address)


# ------------------------------------------------------------------------------- time


async def _silent(peer):
    await peer.greet()
    await peer.hang_up()


@in_loop
async def test_its_time_runs_out():
    async with Served(_silent, call_timeout_s=0.1) as served:
        with pytest.raises(DeadlineExceededError, match="no answer within"):
            await served.append()


@in_loop
async def test_a_silent_server_is_asked_and_then_dropped(monkeypatch):
    monkeypatch.setattr(blocking_call, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(blocking_call, "SILENCE_MAX_S", 0.2)
    async with Served(_silent) as served:
        with pytest.raises(UnavailableError, match="said nothing for 0 s"):
            await served.append()
        await asyncio.sleep(0.01)
        assert any(isinstance(event, Ping) for event in served.server.peers[0].events)


@pytest.mark.parametrize("is_tls", [False, True])
@in_loop
async def test_who_does_not_wait_may_have_an_event_loop_go_on(certificates, is_tls):
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

    tls, client_tls = certificates if is_tls else (None, None)
    async with Served(gated, tls=tls, client_tls=client_tls) as served:
        call = await served.begun()
        assert not await asyncio.to_thread(call.wait, 0.05)
        assert not call.over
        finishing = asyncio.create_task(call.finish())
        await asyncio.sleep(0.01)
        gate.set()
        await finishing
        assert call.response() == append_ok()
        await served.append()
        assert len(served.server.peers) == 1


@in_loop
async def test_going_on_can_be_given_up():
    async with Served(_silent) as served:
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
    async with Served(_loses) as served:
        call = await served.begun()
        await call.finish()
        with pytest.raises(UnavailableError, match="closed the connection"):
            call.response()
    monkeypatch.setattr(blocking_call, "PING_AFTER_S", 0.02)
    monkeypatch.setattr(blocking_call, "SILENCE_MAX_S", 0.05)
    async with Served(_silent) as served:
        call = await served.begun()
        await call.finish()
        with pytest.raises(UnavailableError, match="said nothing"):
            call.response()


# ---------------------------------------------------------------------------- dialing


async def _closes(peer):
    pass


async def _answers_http(peer):
    peer.raw(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


async def _swallows(peer):
    await peer.hang_up()


@pytest.mark.parametrize("script", [_closes, _answers_http, _swallows])
@in_loop
async def test_what_speaks_something_else_is_told_and_left_alone(monkeypatch, script):
    monkeypatch.setattr(blocking, "DIAL_TIMEOUT_S", 0.1)
    async with Served(script) as served:
        assert served.client.takes(served.server.address)
        with pytest.raises(NotStreamError, match="the broker"):
            await served.append()
        assert not served.client.takes(served.server.address)


@in_loop
async def test_what_cannot_be_reached_is_told(certificates, tmp_path):
    context, _ = certificates
    client = BlockingClient(BlockingDialer(Tls()))
    for address in ("http://127.0.0.1:1", f"unix://{tmp_path}/none"):
        with pytest.raises(UnavailableError, match="cannot connect to the broker"):
            client.append(destination(address), OPENING, b"x")
    async with Served(obliging, tls=context) as served:
        with pytest.raises(UnavailableError, match="cannot agree on TLS with the broker"):
            await served.append()


@in_loop
async def test_a_server_that_chooses_http2_is_no_stream_server(tmp_path):
    authority = Authority(tmp_path)
    issued = authority.issue()
    context = server_context(str(issued.cert_file), str(issued.key_file), alpn=("h2",))
    client_tls = Tls(trusted_ca_file=str(authority.ca_file))
    async with Served(_swallows, tls=context, client_tls=client_tls) as served:
        with pytest.raises(NotStreamError, match="it chose h2 in TLS"):
            await served.append()


@in_loop
async def test_a_server_that_is_leaving_speaks_the_wire():
    async def script(peer):
        peer.raw(encode_goaway("it stops"))
        await peer.hang_up()

    async with Served(script) as served:
        with pytest.raises(UnavailableError, match="it stops") as caught:
            await served.append()
        assert not isinstance(caught.value, NotStreamError)


# ------------------------------------------------------------------------------- ends


@in_loop
async def test_closing_ends_what_is_under_way_and_what_follows():
    async with Served(_silent) as served:
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
            good = not served.client.is_connected(served.server.address)
            good &= connection.fileno() == -1
            os._exit(0 if good else 1)
        status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status[1]) == 0
        await served.append()
        assert len(served.server.peers) == 1
