"""What a server of the stream transport bears of its clients: silence, numbers, and garbage."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    CONTENT_BYTES_MAX,
    END_FRAME,
    PREFACE,
    Kind,
    Method,
    encode,
    encode_call,
    encode_goaway,
)
from gazette_sdk.server import listener as listener_module
from gazette_sdk.server import stream as connection_module
from gazette_sdk.server import stream_server as server_module
from gazette_sdk.server.stream import StreamOutput
from support.raw_stream import RawStream, append_frames
from support.scripted_journals import ScriptedJournals
from support.stream_servers import LIMIT_S, Waiting, apply_call, left_until, stream_server

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
        assert client.goaway().startswith("no call with a good token came")
        assert client.is_ended()


def test_a_preface_that_trickles_in_is_given_up(monkeypatch):
    monkeypatch.setattr(listener_module, "OPENING_TIMEOUT_S", 0.2)
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
