"""Content at a server of the stream transport: slow ends, files, and TLS."""

from __future__ import annotations

import os
import ssl
import threading
import time

import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    CONTENT_BYTES_MAX,
    END_FRAME,
    Kind,
    Method,
    encode,
)
from gazette_sdk.server.tls import server_context
from support.certificates import Authority
from support.raw_stream import RawStream, append_frames, read_call
from support.scripted_journals import FileSpan, ScriptedJournals, items, metadata
from support.stream_servers import LIMIT_S, Waiting, stream_server, until

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
