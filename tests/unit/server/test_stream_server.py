"""The stream transport at a server, with a service whose every answer is known."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.errors import (
    CallError,
    CorruptFragmentError,
    JournalNotFoundError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import NOT_RUN, PIPELINE_MAX
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    CONTENT_BYTES_MAX,
    END_FRAME,
    PREFACE,
    Kind,
    Method,
    StatusLine,
    encode,
    encode_call,
    encode_goaway,
)
from gazette_sdk.server import FOREIGN_CHUNK_BYTES, MAX_CHUNK_BYTES, Server, server_context
from gazette_sdk.server import listener as listener_module
from gazette_sdk.server import stream_connection as connection_module
from gazette_sdk.server import stream_server as server_module
from gazette_sdk.server.metrics import metrics_text
from gazette_sdk.server.stream_output import StreamOutput
from gazette_sdk.transport.loop import run
from support.certificates import Authority
from support.raw_stream import RawStream, append_frames, head_of, read_call
from support.scripted_journals import HEADER, FileSpan, ScriptedJournals, items, metadata, serving

LIMIT_S = 10.0


@contextlib.contextmanager
def stream_server(journals: Any, **options: Any) -> Iterator[Server]:
    """A server on the SDK's loop. At its end nothing of the connections is left."""
    host = serving(journals, host="127.0.0.1", **options)
    server = run(host.__aenter__(), LIMIT_S)
    before = descriptors()
    try:
        yield server
        left_until(server, 0)
        until(lambda: descriptors() <= before)
    finally:
        run(host.__aexit__(None, None, None), LIMIT_S)
    assert not run(stream_tasks(), LIMIT_S)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def stream_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("stream")]


def until(holds: Any) -> None:
    """Return when something is true, which other threads make so."""
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.005)


def left_until(server: Server, count: int) -> None:
    until(lambda: len(server.stream) == count)
    if not count:
        until(lambda: not run(stream_tasks(), LIMIT_S))


def apply_call(head: bytes = b"") -> bytes:
    return encode_call(Method.APPLY, b"", head)


class Waiting:
    """An append that begins, and waits until it is let go or cancelled."""

    def __init__(self, journals: ScriptedJournals) -> None:
        self.begun = threading.Event()
        self.cancelled = threading.Event()
        self.go: asyncio.Event
        self._journals = journals
        journals.on_append = self

    async def __call__(self, requests: Any, call: Any) -> pb.AppendResponse:
        self.go = asyncio.Event()
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await self._journals.collect(requests, call)

    def let_go(self) -> None:
        async def go() -> None:
            self.go.set()

        run(go(), LIMIT_S)


# ------------------------------------------------------------------ calls


def test_every_method_is_served():
    journals = ScriptedJournals()
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        assert client.hello is not None
        assert client.hello.wire_version == 1
        assert client.call(Method.APPLY, pb.ApplyRequest()).header == HEADER
        assert client.append("a/journal", b"some ", b"content").commit.end == 112
        (taken,) = journals.appended
        assert taken == [
            pb.AppendRequest(journal="a/journal"),
            b"some ",
            b"content",
            pb.AppendRequest(),
        ]
        assert client.read("a/journal") == b"content"
        client.send(encode_call(Method.LIST, b""))
        (frame,), status = client.answer()
        assert pb.ListResponse.FromString(frame.payload).header == HEADER
        assert status == StatusLine(0)
        assert client.call(Method.LIST_FRAGMENTS, pb.FragmentsRequest()).header == HEADER
        assert (
            client.call(Method.FRAGMENT_STORE_HEALTH, pb.FragmentStoreHealthRequest()).header
            == HEADER
        )


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (UnauthenticatedError("no token"), 16, ""),
        (UnavailableError("a peer is gone"), 14, ""),
        (ValidationError("too short", path="journal"), 2, ""),
        (JournalNotFoundError(journal="a/b"), 2, ""),
        (CallError("of a peer", code="INTERNAL"), 13, ""),
        (CallError("odd", code="OK"), 2, ""),
        (CallError("odd", code="NO_SUCH_CODE"), 2, ""),
        (CorruptFragmentError("it is broken"), 2, "CorruptFragmentError"),
    ],
)
@pytest.mark.parametrize("method", [Method.LIST, Method.READ, Method.APPEND, Method.REPLICATE])
def test_errors_become_the_codes_of_grpc(error, code, kind, method):
    async def fail(_requests, _call):
        raise error

    journals = ScriptedJournals()
    journals.on_list = journals.on_read = journals.on_replicate = lambda *_: items(error)
    journals.on_append = fail
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(encode_call(method, b""))
        assert client.answer() == ([], StatusLine(code, str(error), kind))
        client.call(Method.APPLY, pb.ApplyRequest())  # nothing else is harmed


def test_an_unexpected_error_is_logged_and_answered(caplog):
    journals = ScriptedJournals()
    journals.on_list = lambda *_: items(ZeroDivisionError("oops"))
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(encode_call(Method.LIST, b""))
        assert client.status() == StatusLine(2, "ZeroDivisionError: oops")
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("method", [Method.LIST, Method.APPLY, Method.APPEND, Method.READ])
def test_bytes_that_are_no_message_are_internal_errors(method):
    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        client.send(encode_call(method, b"\xff\xff\xff"))
        assert client.status().code == 13


def test_unknown_methods_are_unimplemented():
    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        for number in (99, Method.SHARD_LIST):
            client.send(encode_call(number, b"whatever"))
            status = client.status()
            assert (status.code, status.kind) == (12, NOT_RUN)
        client.call(Method.APPLY, pb.ApplyRequest())


def test_a_call_knows_its_token_its_deadline_and_its_chunk_size():
    journals = ScriptedJournals()
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        for head in (
            b"",
            head_of(token="Bearer x", timeout_ms=60_000),
            head_of(gazette_chunk_bytes="1"),
            head_of(gazette_chunk_bytes="131072"),
        ):
            client.call(Method.APPLY, pb.ApplyRequest(), head)
        client.send(apply_call(head_of(gazette_chunk_bytes="many")))
        assert client.status().code == 3
    plain, with_token, *sizes = journals.calls
    assert (plain.authorization, plain.timeout_s, plain.chunk_bytes) == (
        None,
        None,
        MAX_CHUNK_BYTES,
    )
    assert with_token.authorization == "Bearer x"
    assert 50 < with_token.timeout_s <= 60
    assert [call.chunk_bytes for call in sizes] == [FOREIGN_CHUNK_BYTES, 131072]


def test_calls_are_counted_as_those_of_grpc():
    name = 'grpc_server_handled_total{grpc_type="client_stream",grpc_service="protocol.Journal"'
    name += ',grpc_method="Append",grpc_code="OK"}'

    def count() -> float:
        found = [line for line in metrics_text().splitlines() if line.startswith(name)]
        return float(found[0].rpartition(" ")[2]) if found else 0

    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        before = count()
        client.append("a/journal", b"content")
        until(lambda: count() == before + 1)


def test_calls_under_way_are_listed():
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(*append_frames("a/b", b"1"))
        assert waiting.begun.wait(LIMIT_S)
        with urllib.request.urlopen(f"{server.endpoint}/debug/requests") as page:
            assert b"/protocol.Journal/Append" in page.read()
        waiting.let_go()
        assert client.status().code == 0
        until(lambda: not server.grpc.active)


def test_bytes_may_arrive_one_by_one():
    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        for byte in b"".join(append_frames("a/b", b"some", b"content")):
            client.send(bytes((byte,)))
        assert client.response(Method.APPEND).commit.end == 111


def test_a_replication_gets_content_with_its_place():
    seen: list[pb.ReplicateRequest] = []

    async def replicate(requests, _call):
        async for request in requests:
            seen.append(request)
            if request.acknowledge:
                yield pb.ReplicateResponse(header=HEADER)

    journals = ScriptedJournals()
    journals.on_replicate = replicate
    proposal = pb.ReplicateRequest(
        proposal=pb.Fragment(journal="a/b"), acknowledge=True
    ).SerializeToString()
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(encode_call(Method.REPLICATE, proposal))
        assert pb.ReplicateResponse.FromString(client.frame().payload).header == HEADER
        for _ in range(2):
            client.send(encode(Kind.CONTENT, b"12345"), encode(Kind.CONTENT, b"678"))
            client.send(encode(Kind.MESSAGE, proposal))
            assert client.frame().kind == Kind.MESSAGE
        client.send(END_FRAME)
        assert client.answer() == ([], StatusLine(0))
    assert [(request.content, request.content_delta) for request in seen] == [
        (b"", 0),
        *[(b"12345", 0), (b"678", 5), (b"", 0)] * 2,
    ]


# ------------------------------------------------------------- order, pipelining


def test_more_calls_than_may_be_open_are_answered_in_their_order():
    journals = ScriptedJournals()
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        count = 3 * PIPELINE_MAX
        client.send(*(frame for n in range(count) for frame in append_frames("a/b", b"%d" % n)))
        lengths = [client.response(Method.APPEND).commit.end - 100 for _ in range(count)]
        assert lengths == [len(b"%d" % n) for n in range(count)]
    assert [taken[1] for taken in journals.appended] == [b"%d" % n for n in range(count)]


def test_calls_after_success_stop_at_the_first_failure():
    journals = ScriptedJournals()
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        chained = head_of(after_success=True)
        refused = pb.AppendResponse(status=pb.NOT_ALLOWED)
        collect = journals.collect

        async def append(requests, call):
            opening = await anext(requests)
            if opening.journal == "refused":
                return refused
            if opening.journal == "broken":
                raise UnavailableError("gone")
            return await collect(after(opening, requests), call)

        async def after(opening, requests):
            yield opening
            async for item in requests:
                yield item

        journals.on_append = append
        for bad in ("refused", "broken"):
            client.send(
                *append_frames("a", b"1", head=chained),
                *append_frames("b", b"2", head=chained),
                *append_frames(bad, b"3", head=chained),
                *append_frames("c", b"4", head=chained),
                *append_frames("d", b"5", head=chained),
                *append_frames("e", b"6"),
            )
            outcomes = [client.status() for _ in range(6)]
            assert [outcome.code for outcome in outcomes] == [
                0,
                0,
                0 if bad == "refused" else 14,
                10,
                10,
                0,
            ]
            assert [outcome.kind for outcome in outcomes[3:5]] == [NOT_RUN, NOT_RUN]
    assert [taken[0].journal for taken in journals.appended] == ["a", "b", "e"] * 2


# ------------------------------------------------------------- giving up, refusing


@pytest.mark.parametrize("sent", [False, True])
def test_an_abort_cancels_the_call_and_keeps_the_connection(sent):
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        frames = append_frames("a/b", b"content")
        client.send(*(frames if sent else frames[:-1]))
        assert waiting.begun.wait(LIMIT_S)
        client.send(ABORT_FRAME)
        assert client.status().code == 1
        assert waiting.cancelled.is_set()
        client.call(Method.APPLY, pb.ApplyRequest())


def test_a_call_aborted_before_its_turn_is_never_run():
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(*append_frames("a/b", b"1"))
        assert waiting.begun.wait(LIMIT_S)
        client.send(*append_frames("a/b", b"2"), ABORT_FRAME)
        client.send(encode(Kind.PING, b"?"))
        assert client.frame() == (Kind.PONG, b"?")
        waiting.let_go()
        assert [client.status().code for _ in range(2)] == [0, 1]
    assert [taken[1] for taken in journals.appended] == [b"1"]


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_a_lost_connection_cancels_the_call(how):
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(*append_frames("a/b", b"content")[:-1])
        assert waiting.begun.wait(LIMIT_S)
        if how == "half-close":
            client.socket.shutdown(socket.SHUT_WR)
        else:
            if how == "reset":
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
        assert waiting.cancelled.wait(LIMIT_S)
        left_until(server, 0)
    assert not journals.appended


def test_an_early_refusal_arrives_and_the_rest_of_the_call_is_dropped():
    async def refuse(_requests, _call):
        raise UnauthenticatedError("no")

    journals = ScriptedJournals()
    journals.on_append = refuse
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        call, content, end = append_frames("a/b", b"x" * CONTENT_BYTES_MAX)
        client.send(call)
        assert client.status().code == 16
        for _ in range(20):
            client.send(content)
        client.send(end)
        client.call(Method.APPLY, pb.ApplyRequest())


def test_deadlines_are_held():
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(
            *append_frames("a/b", b"1", head=head_of(timeout_ms=50)),
            *append_frames("a/b", b"2", head=head_of(timeout_ms=20)),
            apply_call(head_of(timeout_ms=60_000)),
        )
        first, second, third = (client.status() for _ in range(3))
        assert (first.code, first.kind) == (4, "")
        assert (second.code, second.kind) == (4, NOT_RUN)
        assert third.code == 0
        assert waiting.cancelled.is_set()


def test_a_service_that_cancels_its_calls_ends_the_connection():
    async def cancel(_requests, _call):
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.Event().wait()

    journals = ScriptedJournals()
    journals.on_append = cancel
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(*append_frames("a/b", b"1"))
        assert client.status().code == 1
        assert client.goaway() == "the server stops"
        assert client.is_ended()


# ------------------------------------------------------------------- silence


def test_pings_are_answered_at_any_time():
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(encode(Kind.PING, b"before"))
        assert client.frame() == (Kind.PONG, b"before")
        client.send(*append_frames("a/b", b"1"), encode(Kind.PING, b"in a call"))
        assert client.frame() == (Kind.PONG, b"in a call")
        assert waiting.begun.wait(LIMIT_S)
        waiting.let_go()
        assert client.status().code == 0


def test_a_client_silent_in_a_call_is_pinged_and_dropped(monkeypatch):
    monkeypatch.setattr(server_module, "TICK_S", 0.02)
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(apply_call())
        assert client.status().code == 0
        time.sleep(1)  # silence between calls means nothing
        client.send(*append_frames("a/b", b"1")[:-1])
        for _ in range(3):
            frame = client.frame()
            assert frame.kind == Kind.PING
            client.send(encode(Kind.PONG, frame.payload))
        assert client.frame().kind == Kind.PING
        assert client.is_ended()
        assert waiting.cancelled.wait(LIMIT_S)


def test_a_client_that_is_behind_is_pinged_before_it_is_taken_for_a_silent_one(monkeypatch):
    monkeypatch.setattr(server_module, "TICK_S", 0.02)
    behind = 3 * connection_module.SILENT_TICKS_MAX
    sizes = iter([1] * behind)
    monkeypatch.setattr(StreamOutput, "waiting_bytes", property(lambda _: next(sizes, 0)))
    journals = ScriptedJournals()
    Waiting(journals)
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(*append_frames("a/b", b"1")[:-1])
        for _ in range(3):
            frame = client.frame()
            assert frame.kind == Kind.PING
            client.send(encode(Kind.PONG, frame.payload))


def test_a_client_that_reads_no_answers_to_its_pings_is_dropped(monkeypatch):
    monkeypatch.setattr(connection_module, "UNREAD_BYTES_MAX", 100_000)
    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        pings = encode(Kind.PING, b"x" * 64) * 10_000
        client.socket.settimeout(0.5)
        with contextlib.suppress(ConnectionError, TimeoutError):
            for _ in range(100):
                client.send(pings)
        left_until(server, 0)


# ------------------------------------------------------------------ bounds


def test_a_connection_without_a_call_is_closed(monkeypatch):
    monkeypatch.setattr(connection_module, "FIRST_CALL_TIMEOUT_S", 0.05)
    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        assert client.goaway().startswith("no call came")
        assert client.is_ended()


def test_a_preface_that_trickles_in_is_given_up(monkeypatch):
    monkeypatch.setattr(listener_module, "SHOW_PROTOCOL_TIMEOUT_S", 0.2)
    with (
        stream_server(ScriptedJournals()) as server,
        RawStream(server.endpoint, preface=b"") as client,
    ):
        with contextlib.suppress(ConnectionError):
            for position in range(len(PREFACE)):
                client.send(PREFACE[position : position + 1])
                time.sleep(0.05)
        assert client.is_ended()


def test_a_preface_in_pieces_is_understood():
    with (
        stream_server(ScriptedJournals()) as server,
        RawStream(server.endpoint, preface=b"") as client,
    ):
        for position in range(len(PREFACE)):
            client.send(PREFACE[position : position + 1])
            time.sleep(0.002)
        assert client.frame().kind == Kind.HELLO
        client.call(Method.APPLY, pb.ApplyRequest())


def test_connections_are_bounded(monkeypatch):
    with stream_server(ScriptedJournals()) as server:
        server.stream._connections_max = 2
        with RawStream(server.endpoint) as first, RawStream(server.endpoint) as second:
            with RawStream(server.endpoint) as third:
                assert "already" in third.goaway()
                assert third.is_ended()
            first.call(Method.APPLY, pb.ApplyRequest())
            second.call(Method.APPLY, pb.ApplyRequest())
            second.close()
            left_until(server, 1)
            with RawStream(server.endpoint) as third:
                third.call(Method.APPLY, pb.ApplyRequest())


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x00\x00\x00\x00",
        b"\xff" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        bytes((Kind.CONTENT,)) + (CONTENT_BYTES_MAX + 1).to_bytes(4, "big"),
        bytes((Kind.CALL,)) + (1 << 24 | 1).to_bytes(4, "big"),
        bytes((Kind.END, 0, 0, 0, 1)),
        encode(Kind.CONTENT, b"of no call"),
        END_FRAME,
        ABORT_FRAME,
        encode(Kind.HELLO, b""),
        encode(Kind.STATUS, b"\0"),
        encode(Kind.CALL, b"\4"),
        encode(Kind.CALL, b"\4\0\xff"),
        encode_call(Method.APPEND, b"") * 2,
        encode_call(Method.APPLY, b"", b"\xff\xff"),
    ],
)
def test_garbage_ends_its_connection_and_no_other(garbage, caplog):
    with (
        stream_server(ScriptedJournals()) as server,
        RawStream(server.endpoint) as other,
        RawStream(server.endpoint) as client,
    ):
        client.send(garbage + b"\xee" * 10_000)
        frames = []
        with contextlib.suppress(EOFError):
            while True:
                frames.append(client.frame())
        assert frames
        assert frames[-1].kind == Kind.GOAWAY
        assert all(frame.kind == Kind.STATUS for frame in frames[:-1])
        other.call(Method.APPLY, pb.ApplyRequest())
        client.close()
    assert not caplog.records


@pytest.fixture(scope="module")
def lasting():
    with stream_server(ScriptedJournals()) as server:
        yield server


@settings(max_examples=150)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from(
                [
                    END_FRAME,
                    ABORT_FRAME,
                    encode_call(Method.APPEND, b""),
                    encode_call(Method.APPLY, b""),
                    encode_call(Method.READ, b""),
                    encode(Kind.CONTENT, b"content"),
                    encode(Kind.PING, b""),
                    encode_goaway("bye"),
                ]
            ),
        ),
        max_size=8,
    )
)
def test_whatever_bytes_come_the_server_goes_on(lasting, pieces):
    with RawStream(lasting.endpoint) as client:
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                client.send(piece)
    with RawStream(lasting.endpoint) as client:
        assert client.append("a/b", b"content").commit.end == 107


# --------------------------------------------------------------- back-pressure


def test_a_slow_reader_is_waited_for_and_does_not_stop_others():
    produced = 0

    async def pour(_request, _call):
        nonlocal produced
        yield metadata()
        for _ in range(500):
            yield b"x" * 100_000
            produced += 1

    journals = ScriptedJournals()
    journals.on_read = pour
    with (
        stream_server(journals) as server,
        RawStream(server.endpoint) as slow,
        RawStream(server.endpoint) as other,
    ):
        slow.send(read_call("a/b"))
        before = -1
        while before != produced:  # until it has no more room for what is not taken
            before = produced
            time.sleep(0.1)
        assert produced < 300
        other.call(Method.APPLY, pb.ApplyRequest())
        frames, status = slow.answer()
        assert status.code == 0
        assert sum(len(frame.payload) for frame in frames[1:]) == 500 * 100_000


def test_a_reader_that_stops_early_keeps_its_connection():
    async def pour(_request, _call):
        yield metadata()
        while True:
            yield b"x" * 100_000

    journals = ScriptedJournals()
    journals.on_read = pour
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(read_call("a/b"))
        for _ in range(10):
            client.frame()
        client.send(ABORT_FRAME)
        assert client.status().code == 1
        client.call(Method.APPLY, pb.ApplyRequest())


def test_an_append_that_nobody_takes_is_not_read():
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(append_frames("a/b")[0])
        assert waiting.begun.wait(LIMIT_S)
        content = encode(Kind.CONTENT, b"x" * CONTENT_BYTES_MAX)
        total = 40
        sender = threading.Thread(
            target=lambda: client.send(*[content] * total, END_FRAME), daemon=True
        )
        sender.start()
        (connection,) = server.stream._connections
        until(lambda: connection._intake.paused)
        assert connection._intake.waiting_bytes < 3 << 20
        waiting.let_go()
        response = client.response(Method.APPEND)
        assert response.commit.end - response.commit.begin == total << 20
        sender.join(LIMIT_S)
        until(lambda: connection._intake.waiting_bytes == 0)


# ------------------------------------------------------------------- files


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def tls_pair(authority: Authority) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    certificate = authority.issue()
    client = ssl.create_default_context(cafile=str(authority.ca_file))
    client.set_alpn_protocols(["gzt/1"])
    return server_context(str(certificate.cert_file), str(certificate.key_file)), client


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("length", [1, 20_000, (1 << 20) + 1, 12 << 20])
def test_content_of_files_arrives_whole(tmp_path, authority, secure, slow, length):
    content = os.urandom(length)
    path = tmp_path / "content"
    path.write_bytes(b"before" + content + b"behind")
    server_tls, client_tls = tls_pair(authority) if secure else (None, None)
    with path.open("rb") as file:
        journals = ScriptedJournals()
        journals.on_read = lambda *_: items(
            metadata(), FileSpan(file.fileno(), 6, length), b"and more"
        )
        with (
            stream_server(journals, tls=server_tls) as server,
            RawStream(("127.0.0.1", server.listener.port), tls=client_tls) as client,
        ):
            client.send(read_call("a/b"), read_call("a/b"))
            if slow:
                time.sleep(0.1)
            for _ in range(2):
                frames, status = client.answer()
                assert status.code == 0
                assert b"".join(frame.payload for frame in frames[1:]) == content + b"and more"


def test_a_file_that_ends_early_is_told(tmp_path):
    path = tmp_path / "content"
    path.write_bytes(b"x" * 100)
    with path.open("rb") as file:
        journals = ScriptedJournals()
        journals.on_read = lambda *_: items(metadata(), FileSpan(file.fileno(), 0, 200))
        with stream_server(journals) as server, RawStream(server.endpoint) as client:
            client.send(read_call("a/b"))
            frames, status = client.answer()
            assert len(frames) == 1
            assert (status.code, status.kind) == (2, "CorruptFragmentError")
            client.call(Method.APPLY, pb.ApplyRequest())


# --------------------------------------------------------------------- TLS


def test_alpn_chooses_the_transport(authority):
    server_tls, client_tls = tls_pair(authority)
    with stream_server(ScriptedJournals(), tls=server_tls) as server:
        with RawStream(("127.0.0.1", server.listener.port), tls=client_tls) as client:
            assert client.socket.selected_alpn_protocol() == "gzt/1"  # type: ignore[attr-defined]
            client.append("a/b", b"x" * 3_000_000)
            assert client.read("a/b") == b"content"
        with RawStream(("127.0.0.1", server.listener.port), tls=client_tls, preface=b"") as client:
            client.send(b"something else")
            assert client.goaway()
            assert client.is_ended()


# --------------------------------------------------------------------- the end


def test_a_server_that_stops_lets_calls_end():
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    host = serving(journals, host="127.0.0.1")
    server = run(host.__aenter__(), LIMIT_S)
    with RawStream(server.endpoint) as client, RawStream(server.endpoint) as idle:
        client.send(*append_frames("a/b", b"content"))
        assert waiting.begun.wait(LIMIT_S)
        stopping = threading.Thread(target=lambda: run(server.stop(LIMIT_S), LIMIT_S))
        stopping.start()
        assert client.goaway() == "the server stops"
        assert idle.goaway() == "the server stops"
        client.send(apply_call())  # it crosses the GOAWAY
        waiting.let_go()
        assert client.response(Method.APPEND).commit.end == 107
        status = client.status()
        assert (status.code, status.kind) == (14, NOT_RUN)
        idle.send(apply_call())
        assert idle.status().code == 14
        client.close()
        idle.close()
        stopping.join(LIMIT_S)
        assert not stopping.is_alive()
    assert not run(stream_tasks(), LIMIT_S)
    run(host.__aexit__(None, None, None), LIMIT_S)


def test_calls_that_do_not_end_are_broken_when_the_grace_is_over():
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    host = serving(journals, host="127.0.0.1")
    server = run(host.__aenter__(), LIMIT_S)
    with RawStream(server.endpoint) as client:
        client.send(*append_frames("a/b", b"content"))
        assert waiting.begun.wait(LIMIT_S)
        run(server.stop(0.1), LIMIT_S)
        assert waiting.cancelled.is_set()
        assert client.goaway() == "the server stops"
        assert client.is_ended()
    assert not run(stream_tasks(), LIMIT_S)
    run(host.__aexit__(None, None, None), LIMIT_S)


def test_a_client_that_leaves_is_served_to_the_end():
    journals = ScriptedJournals()
    waiting = Waiting(journals)
    with stream_server(journals) as server, RawStream(server.endpoint) as client:
        client.send(*append_frames("a/b", b"content"), encode_goaway("bye"))
        assert waiting.begun.wait(LIMIT_S)
        waiting.let_go()
        assert client.response(Method.APPEND).commit.end == 107
        assert client.is_ended()
