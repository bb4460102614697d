"""Clients of the HTTP front that send malformed, slow or misdirected requests."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web

from gazette_sdk.protocol.authorization import Authority
from gazette_sdk.server import http as http_connection
from gazette_sdk.server.http import is_local_name
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run
from support.raw_http import exchange

LIMIT_S = 10.0


async def _echo(request, _target):
    return web.Response(body=await request.read())


def served(scenario, **options):
    """The result of a scenario, which gets the port of a server that echoes bodies."""

    async def work():
        server = Server(allow_hosts=["x"], **options)
        server.http.mount("/", _echo)
        await server.start()
        try:
            return await asyncio.wait_for(scenario(server.listener.port), LIMIT_S)
        finally:
            await server.stop(0)

    return run(work(), 2 * LIMIT_S)


async def _sent(port, *pieces, pause_s=0.0):
    """All that the server answers to these bytes, until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.transport.abort()


MALFORMED = {
    "a version that does not exist": b"GET / HTTP/9.9\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "a NUL in a header": b"GET / HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
    "a header without a name": b"GET / HTTP/1.1\r\nHost: x\r\n: b\r\n\r\n",
    "a header that is too long": b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 20_000 + b"\r\n\r\n",
    "a target that is too long": b"GET /" + b"b" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "too many headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
    "two lengths": b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a negative length": b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "a length and chunks": b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk without a size": b"PUT / HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n",
    "a chunk of another size": b"PUT / HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "an unknown transfer encoding": b"PUT / HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: gzip\r\n\r\nabc",
}


@pytest.mark.parametrize("request_bytes", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_malformed_request_is_logged_in_one_line(caplog, request_bytes, pieces):
    head, end, rest = request_bytes.partition(b"\r\n\r\n")
    parts = [request_bytes] if pieces == 1 else [head + end, rest]
    with caplog.at_level(logging.DEBUG):
        answer = served(lambda port: _sent(port, *parts, pause_s=0.05))
    assert answer.split(b" ")[1] == b"400"
    assert b"nosniff" in answer
    ours = ("gazette_sdk", "aiohttp")
    records = [record for record in caplog.records if record.name.startswith(ours)]
    assert len(records) <= 1
    for record in records:
        assert record.levelno <= logging.INFO
        assert record.exc_info is None
        assert "\n" not in record.getMessage()


def test_every_answer_forbids_to_guess_its_media_type():
    async def ask(port):
        return await exchange(f"http://127.0.0.1:{port}", "PUT", "/x", body=b"<script>")

    assert served(ask).header("X-Content-Type-Options") == "nosniff"


@pytest.mark.parametrize("first", [b"", b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_headers_that_do_not_end_close_the_connection(monkeypatch, first):
    monkeypatch.setattr(http_connection, "HEADERS_TIMEOUT_S", 0.2)
    slow = [b"GET /b HTTP/1.1\r\n"] + [b"A: b\r\n"] * 20

    async def drip(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if first:
            writer.write(first)
            await reader.readuntil(b"\r\n\r\n")
        dripping = asyncio.create_task(_drip(writer, slow))
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            dripping.cancel()
            writer.transport.abort()

    assert served(drip) == b""


async def _drip(writer, pieces):
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_body_that_does_not_come_is_refused(monkeypatch, caplog, is_silent):
    monkeypatch.setattr(http_connection, "BODY_PAUSE_S", 0.2)
    head = b"PUT /a HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    pieces = [head] if is_silent else [head, b"a", b"a"]
    with caplog.at_level(logging.INFO):
        answer = served(lambda port: _sent(port, *pieces, pause_s=0.05))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"bytes of the body came within 0.2 s" in answer
    assert not any(record.exc_info for record in caplog.records)


def test_a_body_that_comes_in_time_is_served(monkeypatch):
    monkeypatch.setattr(http_connection, "BODY_PAUSE_S", 0.2)
    pieces = [b"a" * 2000] * 10
    head = b"PUT /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 20000\r\n\r\n"
    answer = served(lambda port: _sent(port, head, *pieces, pause_s=0.05))
    assert answer.endswith(b"\r\n\r\n" + b"a" * 20_000)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        (None, True),
        ("localhost", True),
        ("LOCALHOST:8080", True),
        ("gazette.localhost:8080", True),
        ("127.0.0.1:8080", True),
        ("127.1.2.3", True),
        ("[::1]:8080", True),
        ("[::1]", True),
        ("", False),
        ("evil.example", False),
        ("evil.example:8080", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("192.168.0.1", False),
        ("0.0.0.0", False),
        ("[::1", False),
        ("localhost@evil.example", False),
    ],
)
def test_a_name_of_loopback_is_local(host, is_local):
    assert is_local_name(host) is is_local


@pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("evil.example", 403)])
@pytest.mark.parametrize("target", ["/x", "//x", "/debug/ready", "http://localhost/x"])
def test_a_server_of_local_names_refuses_others(host, status, target):
    async def ask(port):
        request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        return await _sent(port, request.encode())

    answer = served(ask)
    if status == 403:
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"use localhost" in answer
    else:
        assert not answer.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    ("options", "keys", "status"),
    [
        ({}, None, 403),
        ({"host": "127.0.0.1"}, None, 403),
        ({"host": "localhost", "allow_hosts": ["Evil.Example"]}, None, 404),
        ({"host": "localhost", "advertise_host": "evil.example"}, None, 404),
        ({}, Authority("YSBzZWNyZXQga2V5IG9mIHRoZSB0ZXN0cw=="), 404),
        ({}, Authority("YSBzZWNyZXQga2V5IG9mIHRoZSB0ZXN0cw== AA=="), 403),
        ({"host": ""}, None, 404),
    ],
    ids=["default", "127.0.0.1", "allowed", "advertised", "keys", "keys or none", "all interfaces"],
)
def test_loopback_without_keys_answers_for_its_own_names_only(options, keys, status):
    async def scenario():
        server = Server(debug_port="0", **options)
        if keys is not None:
            server.require_tokens(keys)
        await server.start()
        try:
            ports = (server.listener.port, server._debug_listener.port)
            request = b"GET /x HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
            return [await _sent(port, request) for port in ports]
        finally:
            await server.stop(0)

    for answer in run(scenario(), 10):
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("status", sorted(http_connection.REFUSALS))
def test_the_body_of_a_refused_request_is_not_read(status):
    """The client reads the answer; the server takes no more than the buffers of the sockets."""

    async def scenario():
        server = Server(allow_hosts=["x"])
        server.http.mount("/", lambda *_: _refused(status))
        await server.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
            writer.write(b"PUT /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
            answer = await reader.readline()
            sent = 0
            try:
                while sent < REFUSED_BYTES:
                    writer.write(bytes(1 << 16))
                    await writer.drain()
                    sent += 1 << 16
            except ConnectionError:
                pass
            writer.transport.abort()
            return answer, sent
        finally:
            await server.stop(0)

    answer, sent = run(asyncio.wait_for(scenario(), LIMIT_S), 2 * LIMIT_S)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert sent < REFUSED_BYTES


async def _refused(status):
    return web.Response(status=status)


REFUSED_BYTES = 64 << 20
"""More than the kernel buffers for a connection, and less than a server reads in the time."""
