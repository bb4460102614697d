"""Appends from plain code over a blocking socket, against servers right and wrong."""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gazette_sdk.errors import (
    CallError,
    ClosedError,
    ConfigurationError,
    DeadlineExceededError,
    UnavailableError,
)
from gazette_sdk.message.publishing.direct import BYTES_MAX
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
from support.scripted_stream import ScriptedStream

OPEN_FILES = Path("/proc/self/fd")
OPENING = pb.AppendRequest(journal="a/journal").SerializeToString()
WAIT_S = 10.0
LOOK_MAX_S = 0.05
SEND_MAX_S = 2.0  # a connection that has no room is waited for longer
TRIES_MAX = 20
WAYS = ["TCP", "TLS", "a Unix socket"]


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


class UnixStream(ScriptedStream):
    """A scripted server on a Unix socket."""

    def __init__(self, script, path):
        super().__init__(script)
        self.path = path

    @property
    def address(self):
        return f"unix://{self.path}"

    async def __aenter__(self):
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=1 << 22)
        return self


class Served:
    """A scripted server and a client of it, whose calls are made in threads."""

    def __init__(self, script, *, tls=None, client_tls=None, path=None, **options):
        self.server = UnixStream(script, path) if path else ScriptedStream(script, tls=tls)
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

    @property
    def idle(self):
        return self.client._idle.get(self.server.address, [])

    async def prepare(self):
        await asyncio.to_thread(self.client.prepare, self.to)

    async def tried(self, content=b"content\n"):
        return await asyncio.to_thread(self.client.append, self.to, OPENING, content)

    async def begun(self, content=b"content\n", to=None):
        return await asyncio.to_thread(self._begin, content, to or self.to)

    async def append(self, content=b"content\n", to=None):
        def there():
            return to_the_end(self._begin(content, to or self.to))

        return await asyncio.to_thread(there)

    def _begin(self, content, to):
        for _ in range(TRIES_MAX):  # another thread may be quicker to what was prepared
            call = self.client.append(to, OPENING, content)
            if call is not None:
                return call
            self.client.prepare(to)
        raise AssertionError


@pytest.fixture
def serve(request, certificates, tmp_path):
    """Makes what is served over a way; indirectly parametrized by it."""
    tls, client_tls = certificates

    def made(script, **options):
        if request.param == "TLS":
            options |= {"tls": tls, "client_tls": client_tls}
        elif request.param != "TCP":
            options["path"] = tmp_path / "socket"
        return Served(script, **options)

    return made


over_each_way = pytest.mark.parametrize("serve", WAYS, indirect=True)


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


@over_each_way
@in_loop
async def test_appends_follow_each_other_on_one_connection(serve):
    async with serve(obliging) as served:
        for length in (1, 100, 200_000, 5):
            response = await served.append(b"x" * length)
            assert response == append_ok(end=length)
        [peer] = served.server.peers
        assert served.client.is_connected(served.server.address)
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
            assert served.client.is_connected(served.server.address)  # nobody has looked
            assert await served.tried() is None
            assert not served.client.is_connected(served.server.address)
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
        assert not served.client.is_connected(served.server.address)


# ---------------------------------------------------------------------------- to prepare


@over_each_way
@in_loop
async def test_an_append_uses_what_was_prepared_and_opens_nothing_itself(serve):
    async with serve(obliging) as served:
        assert await served.tried() is None
        assert served.server.peers == []
        assert not served.client.is_connected(served.server.address)
        await served.prepare()
        assert served.client.is_connected(served.server.address)
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
        assert not served.client.is_connected(served.server.address)
        assert not served.client.takes(served.server.address)


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
        for length in (1, BYTES_MAX):
            await served.prepare()
            began_at = time.monotonic()
            call = served.client.append(served.to, OPENING, b"x" * length)
            assert time.monotonic() - began_at < SEND_MAX_S
            assert not looked(call)
            call.give_up("it was seen")


@over_each_way
@in_loop
async def test_a_look_sees_the_connection_lost(serve):
    async with serve(_loses) as served:
        call = await served.begun()
        await until(lambda: looked(call))
        with pytest.raises(UnavailableError, match="closed the connection"):
            call.response()
        assert not served.client.is_connected(served.server.address)


@in_loop
async def test_a_look_sees_that_time_ran_out():
    async with Served(_silent, call_timeout_s=0.1) as served:
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
    monkeypatch.setattr(blocking_call, "PING_AFTER_S", 0.05)
    monkeypatch.setattr(blocking_call, "SILENCE_MAX_S", 0.1)
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
            await served.prepare()
        assert not served.client.takes(served.server.address)
        assert await served.tried() is None


@in_loop
async def test_what_could_not_be_dialled_is_left_alone_ever_longer(monkeypatch):
    monkeypatch.setattr(blocking, "REDIAL_AFTER_S", 0.2)
    is_well = False

    async def ailing(peer):
        if is_well:
            await obliging(peer)

    async with Served(ailing) as served:
        address = served.server.address

        async def left_alone_s():
            with pytest.raises(NotStreamError):
                await served.prepare()
            failed_at = time.monotonic()
            assert not served.client.takes(address)
            await until(lambda: served.client.takes(address))
            return time.monotonic() - failed_at

        assert await left_alone_s() > 0.1
        assert await left_alone_s() > 0.3
        is_well = True
        await served.append()
        assert served.client.takes(address)
        is_well = False
        assert await left_alone_s() < 0.7  # it was well meanwhile


@in_loop
async def test_others_are_spoken_to_while_one_cannot_be_dialled():
    async with Served(obliging) as served:
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(served.client.prepare, destination("http://127.0.0.1:1"))
        assert not served.client.takes("http://127.0.0.1:1")
        assert served.client.takes(served.server.address)
        await served.append()


@in_loop
async def test_what_cannot_be_reached_is_told(certificates, tmp_path):
    context, _ = certificates
    client = BlockingClient(BlockingDialer(Tls()))
    for address in ("http://127.0.0.1:1", f"unix://{tmp_path}/none"):
        assert client.append(destination(address), OPENING, b"x") is None
        assert client.takes(address)
        with pytest.raises(UnavailableError, match="cannot connect to the broker"):
            client.prepare(destination(address))
        assert not client.takes(address)
    async with Served(obliging, tls=context) as served:
        with pytest.raises(UnavailableError, match="cannot agree on TLS with the broker"):
            await served.prepare()


@in_loop
async def test_a_certificate_that_cannot_be_used_is_told_and_not_read_again_at_once(
    certificates, tmp_path
):
    context, _ = certificates
    missing = Tls(trusted_ca_file=str(tmp_path / "none.pem"))
    async with Served(obliging, tls=context, client_tls=missing) as served:
        with pytest.raises(ConfigurationError):
            await served.prepare()
        assert not served.client.takes(served.server.address)


@in_loop
async def test_a_server_that_chooses_http2_is_no_stream_server(tmp_path):
    authority = Authority(tmp_path)
    issued = authority.issue()
    context = server_context(str(issued.cert_file), str(issued.key_file), alpn=("h2",))
    client_tls = Tls(trusted_ca_file=str(authority.ca_file))
    async with Served(_swallows, tls=context, client_tls=client_tls) as served:
        with pytest.raises(NotStreamError, match="it chose h2 in TLS"):
            await served.prepare()


@in_loop
async def test_a_server_that_is_leaving_speaks_the_wire():
    async def script(peer):
        peer.raw(encode_goaway("it stops"))
        await peer.hang_up()

    async with Served(script) as served:
        with pytest.raises(UnavailableError, match="it stops") as caught:
            await served.prepare()
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
