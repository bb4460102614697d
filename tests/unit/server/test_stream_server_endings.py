"""Calls that end early at a server of the stream transport, and the end of either side."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import NOT_RUN
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    CONTENT_BYTES_MAX,
    Kind,
    Method,
    encode,
    encode_goaway,
)
from gazette_sdk.transport.loop import run
from support.raw_stream import RawStream, append_frames, head_of
from support.scripted_journals import ScriptedJournals, serving
from support.stream_servers import (
    LIMIT_S,
    Waiting,
    apply_call,
    left_until,
    stream_server,
    stream_tasks,
)

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
