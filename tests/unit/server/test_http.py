import asyncio
import logging
import time

import pytest
from aiohttp import web

from gazette_sdk.errors import GazetteError, UnauthenticatedError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.server import http as http_module
from gazette_sdk.server.http import (
    TrailedResponse,
    clean_path,
    origin_form,
    parse_target,
    quote_path,
)
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run
from support.raw_http import exchange


@pytest.mark.parametrize(
    ("raw", "path", "query"),
    [
        ("/", "/", ""),
        ("/a/b?offset=1", "/a/b", "offset=1"),
        ("/a%2Fb%3Bc", "/a/b;c", ""),
        ("/a?b?c", "/a", "b?c"),
        ("http://host:80/a/b?c", "/a/b", "c"),
        ("HTTPS://host", "/", ""),
        ("/%C3%BC", "/ü", ""),
        ("*", "*", ""),
    ],
)
def test_a_target_is_decoded(raw, path, query):
    target = parse_target(raw)
    assert (target.path, target.query) == (path, query)


@pytest.mark.parametrize(
    ("raw", "origin"),
    [
        ("/a%20b?c=%2F", "/a%20b?c=%2F"),
        ("http://10.0.0.7:8080/a%20b?c", "/a%20b?c"),
        ("HTTPS://host", "/"),
    ],
)
def test_a_forwarded_target_has_no_scheme_and_no_host(raw, origin):
    assert origin_form(raw) == origin


@pytest.mark.parametrize("raw", ["/%", "/%4", "/%zz", "/a%+1b", "/%ff"])
def test_a_bad_escape_in_a_path_is_refused(raw):
    with pytest.raises(ValidationError):
        parse_target(raw)


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("/", "/"),
        ("//", "/"),
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b/"),
        ("//a", "/a"),
        ("/a//b", "/a/b"),
        ("/a/./b", "/a/b"),
        ("/a/../b", "/b"),
        ("/../../a", "/a"),
        ("/a/..", "/"),
        ("/a/.", "/a"),
    ],
)
def test_a_path_is_made_canonical(path, clean):
    assert clean_path(path) == clean
    assert clean_path(clean) == clean


def test_a_quoted_path_decodes_to_itself():
    path = "/a b/ü;%/c?d#e"
    assert parse_target(quote_path(path)).path == path


def answers(handler, prefix: str = "/"):
    """The answer of a server with one mount, by method, target and more."""

    async def ask(*asked, **options):
        server = Server()
        server.http.mount(prefix, handler)
        endpoint = await server.start()
        try:
            return await exchange(endpoint, *asked, **options)
        finally:
            await server.stop(0)

    return lambda *asked, **options: run(ask(*asked, **options), 15)


async def _echo_path(_request, target):
    return web.Response(text=target.path)


@pytest.mark.parametrize(
    ("target", "location"),
    [
        ("//http/data", "/http/data"),
        ("/http/x/../data?offset=12", "/http/data?offset=12"),
        ("/a/%2e%2e/b%20c", "/b%20c"),
        ("//evil.example/x", "/evil.example/x"),
    ],
)
def test_an_unclean_path_is_redirected(target, location):
    answer = answers(_echo_path)("GET", target)
    assert answer.status == 307
    assert answer.header("Location") == location
    assert answer.body.decode() == f'<a href="{location}">Temporary Redirect</a>.\n\n'


def test_a_bad_path_is_a_bad_request():
    assert answers(_echo_path)("GET", "/a%zz").status == 400


@pytest.mark.parametrize(
    ("codings", "status"),
    [("chunked", 200), ("identity, chunked", 200), ("gzip, chunked", 501), ("br,chunked", 501)],
)
def test_a_body_in_a_transfer_coding_other_than_chunks_is_refused(codings, status):
    async def echo(request, _target):
        return web.Response(body=await request.read())

    answer = answers(echo)("PUT", "/a", headers=(f"Transfer-Encoding: {codings}",), body=b"abc")
    assert answer.status == status
    assert answer.body == (
        b"abc"
        if status == 200
        else f"Transfer-Encoding {codings!r} is not supported: send chunked, and say in "
        "Content-Encoding how the content is compressed\n".encode()
    )


def test_mounts_are_asked_in_order_until_one_answers():
    async def ask():
        async def pass_on(_request, _target):
            return None

        server = Server()
        server.http.mount("/a/", pass_on)
        server.http.mount("/a/", _echo_path)
        endpoint = await server.start()
        try:
            assert (await exchange(endpoint, "GET", "/a/x")).body == b"/a/x"
            assert (await exchange(endpoint, "GET", "/b")).status == 404
        finally:
            await server.stop(0)

    run(ask(), 15)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValidationError("wrong"), 400),
        (UnauthenticatedError("no token"), 401),
        (GazetteError("broken"), 500),
        (web.HTTPRequestEntityTooLarge(1, 2), 413),
    ],
)
def test_errors_become_plain_text_answers(error, status):
    async def fail(_request, _target):
        raise error

    answer = answers(fail)("GET", "/x")
    assert answer.status == status
    assert answer.header("Content-Type") == "text/plain; charset=utf-8"
    assert answer.header("X-Content-Type-Options") == "nosniff"
    assert answer.body.endswith(b"\n")
    assert answer.header("Server") is None
    assert (answer.header("WWW-Authenticate") is not None) == (status == 401)


def test_an_unexpected_error_is_logged_and_answered(caplog):
    async def fail(_request, _target):
        raise ZeroDivisionError("oops")

    with caplog.at_level(logging.ERROR):
        answer = answers(fail)("GET", "/x")
    assert (answer.status, answer.body) == (500, b"ZeroDivisionError: oops\n")
    assert "ZeroDivisionError" in caplog.text


def test_an_unexpected_error_behind_the_first_bytes_breaks_the_connection(caplog):
    async def fail(request, _target):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        raise ZeroDivisionError("oops")

    with caplog.at_level(logging.ERROR):
        answer = answers(fail)("GET", "/x")
    assert (answer.body, answer.complete) == (b"half", False)


async def _trailed(request, target):
    response = TrailedResponse(headers={"Trailer": "X-End"})
    if target.path == "/typed":
        response.media_type = "text/plain"
        await response.prepare(request)
        await response.write(b"one")
        await response.write(b"two")
    else:
        await response.prepare(request)
    await response.finish("X-End", "all is\r\nwell")
    return response


def test_a_body_ends_in_its_trailer():
    answer = answers(_trailed)("GET", "/typed")
    assert (answer.body, answer.chunk_sizes) == (b"onetwo", [3, 3])
    assert (answer.trailers, answer.complete) == ([("X-End", "all is well")], True)
    assert answer.header("Content-Type") == "text/plain"


def test_an_empty_body_ends_in_its_trailer_too():
    answer = answers(_trailed)("GET", "/empty")
    assert (answer.body, answer.trailers) == (b"", [("X-End", "all is well")])
    assert answer.header("Content-Type") is None


def test_http_1_0_gets_no_chunks_and_no_trailer():
    answer = answers(_trailed)("GET", "/typed", http="1.0")
    assert (answer.body, answer.header("Transfer-Encoding")) == (b"onetwo", None)


def test_a_connection_is_kept_for_further_requests():
    async def ask():
        server = Server()
        server.http.mount("/", _trailed)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
        try:
            for _ in range(3):
                writer.write(b"GET /typed HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = await asyncio.wait_for(reader.readuntil(b"well\r\n\r\n"), 5)
                assert answer.startswith(b"HTTP/1.1 200 OK")
        finally:
            writer.transport.abort()
            await server.stop(0)

    run(ask(), 15)


def test_requests_without_a_good_token_wait_while_such_have_used_their_share(monkeypatch):
    monkeypatch.setattr(http_module, "UNKNOWN_DELAY_S", 0.3)
    authority = Authority("YSBzZWNyZXQga2V5IG9mIHRoZSB0ZXN0cw==")
    token = authority.header(Capability.READ, pb.LabelSelector(), 60, time.time())

    async def ask():
        server = Server()
        server.require_tokens(authority)
        server.http.mount("/", _echo_path)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
        server._unknown.spend(100.0)
        took_s = []
        try:
            for header in ("", f"Authorization: {token}\r\n", "", "Authorization: Bearer x\r\n"):
                begun_s = time.monotonic()
                writer.write(f"GET /echo HTTP/1.1\r\nHost: localhost\r\n{header}\r\n".encode())
                await asyncio.wait_for(reader.readuntil(b"/echo"), 5)
                took_s.append(time.monotonic() - begun_s)
        finally:
            writer.transport.abort()
            await server.stop(0)
        return took_s

    without, good, later, bad = run(ask(), 15)
    assert min(without, later, bad) >= 0.3
    assert good < 0.2


def test_a_client_that_leaves_cancels_its_request():
    async def ask():
        cancelled = asyncio.Event()

        async def block(_request, _target):
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        server = Server()
        server.http.mount("/", block)
        endpoint = await server.start()
        try:
            await exchange(endpoint, "GET", "/x", leave_after_s=0.1)
            await asyncio.wait_for(cancelled.wait(), 5)
        finally:
            await server.stop(0)

    run(ask(), 15)


def test_a_stop_lets_a_request_end():
    async def ask():
        finish = asyncio.Event()
        begun = asyncio.Event()

        async def wait(_request, _target):
            begun.set()
            await finish.wait()
            return web.Response(text="done")

        server = Server()
        server.http.mount("/", wait)
        endpoint = await server.start()
        asking = asyncio.create_task(exchange(endpoint, "GET", "/x"))
        await begun.wait()
        stopping = asyncio.create_task(server.stop(10))
        await asyncio.sleep(0)
        finish.set()
        assert (await asking).body == b"done"
        await asyncio.wait_for(stopping, 5)

    run(ask(), 15)
