"""Memory and places that a server of the stream transport grants to unknown and to slow clients."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import threading
import time

import pytest

from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.stream_frames import (
    CONTENT_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    FrameBuffer,
    Kind,
    Method,
    encode,
    encode_call,
    header,
)
from gazette_sdk.server import stream as connection_module
from gazette_sdk.server import stream_server as server_module
from gazette_sdk.server.metrics import CODES
from support.raw_stream import RawStream, append_frames, head_of
from support.scripted_journals import ScriptedJournals
from support.stream_servers import LIMIT_S, left_until, stream_server, until

AUTHORITY = Authority(base64.b64encode(b"a secret of the cluster").decode())
LARGE = bytes(CONTENT_BYTES_MAX)


def head_with_token(capability: Capability = Capability.APPEND) -> bytes:
    token = AUTHORITY.sign(capability, pb.LabelSelector(), 60, time.time())
    return head_of(token=f"Bearer {token}")


@contextlib.contextmanager
def server_with_keys(journals):
    with stream_server(journals) as server:
        server.require_tokens(AUTHORITY)
        yield server


@pytest.mark.parametrize("kind", [Kind.CALL, Kind.MESSAGE])
def test_a_large_frame_is_refused_before_a_call_had_a_good_token(kind):
    with (
        server_with_keys(ScriptedJournals()) as server,
        RawStream(server.endpoint) as client,
    ):
        client.send(header(kind, MESSAGE_BYTES_MAX), bytes(1000))
        assert "before a call with a good token; until then 65536 are allowed" in client.goaway()
        assert client.is_ended()


@pytest.mark.parametrize("frame", [encode(Kind.PING, b"x"), encode_call(Method.APPLY, b"")])
def test_a_flood_is_refused_before_a_call_had_a_good_token(frame):
    with server_with_keys(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        client.send(frame * 60)
        reason = b""
        while not reason:
            client.send(frame)
            answer = client.frame()
            reason = answer.payload if answer.kind == Kind.GOAWAY else b""
        assert reason == b"256 frames came before a call with a good token"


def test_small_frames_are_taken_before_a_call_had_a_good_token():
    with server_with_keys(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        client.send(*append_frames("a/b", bytes(65_000)))
        assert client.response(Method.APPEND).commit.end == 100 + 65_000


def test_large_frames_are_taken_with_the_first_call_that_has_a_good_token():
    with server_with_keys(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        client.send(*append_frames("a/b", LARGE, LARGE, head=head_with_token()))
        assert client.response(Method.APPEND).commit.end == 100 + 2 * len(LARGE)
        client.send(*append_frames("a/b", LARGE))
        assert client.response(Method.APPEND).commit.end == 100 + len(LARGE)


@pytest.mark.parametrize("head", [b"", head_of(token="Bearer bad")])
def test_a_refused_append_of_large_content_is_answered_before_the_connection_ends(head):
    journals = ScriptedJournals()

    async def refuse(*_):
        raise UnauthenticatedError("bad token")

    journals.on_append = refuse
    with server_with_keys(journals) as server, RawStream(server.endpoint) as client:
        client.send(*append_frames("a/b", LARGE, head=head)[:-1])
        assert client.status().code == CODES["UNAUTHENTICATED"]
        assert "before a call with a good token" in client.goaway()


def test_refused_calls_do_not_keep_a_connection(monkeypatch):
    monkeypatch.setattr(connection_module, "FIRST_CALL_TIMEOUT_S", 0.2)
    journals = ScriptedJournals()
    with server_with_keys(journals) as server, RawStream(server.endpoint) as client:
        client.send(encode_call(Method.APPLY, b""))
        assert client.status().code == 0  # this service checks no tokens
        assert client.goaway().startswith("no call with a good token came")
        assert client.is_ended()


def test_a_frame_that_is_not_completed_ends_the_connection(monkeypatch):
    monkeypatch.setattr(server_module, "TICK_S", 0.005)
    monkeypatch.setattr(connection_module, "IDLE_TICKS_MAX", 10_000)
    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        client.call(Method.APPLY, pb.ApplyRequest())
        client.send(header(Kind.CALL, 1 << 20))
        assert client.goaway() == "a frame was not complete 36 s after it began; send faster"
        assert client.is_ended()


def test_a_connection_without_calls_is_closed_and_pings_do_not_keep_it(monkeypatch):
    monkeypatch.setattr(server_module, "TICK_S", 0.005)
    with stream_server(ScriptedJournals()) as server, RawStream(server.endpoint) as client:
        client.call(Method.APPLY, pb.ApplyRequest())
        client.send(encode(Kind.PING, b"1"))
        assert client.frame().kind == Kind.PONG
        assert client.goaway() == "no call came within 300 s; dial again"
        assert client.is_ended()


def test_what_a_lost_connection_received_is_dropped_while_its_calls_end_slowly():
    journals = ScriptedJournals()
    rolling_back, let_go = threading.Event(), threading.Event()

    async def end_slowly(*_):
        try:
            await asyncio.Event().wait()
        finally:
            rolling_back.set()
            await asyncio.to_thread(let_go.wait, LIMIT_S)

    journals.on_append = end_slowly
    before = _buffered_bytes()  # of earlier tests
    with stream_server(journals) as server:
        with RawStream(server.endpoint) as client:
            client.send(*append_frames("a/b", b"1")[:-1])
            client.send(header(Kind.MESSAGE, MESSAGE_BYTES_MAX), bytes(8 << 20))
            until(lambda: _buffered_bytes() > before + (4 << 20))
        assert rolling_back.wait(LIMIT_S)
        assert _buffered_bytes() < before + (1 << 20)
        let_go.set()
        left_until(server, 0)


def _buffered_bytes() -> int:
    buffers = [found for found in gc.get_objects() if isinstance(found, FrameBuffer)]
    return sum(len(buffer._memory) for buffer in buffers)
