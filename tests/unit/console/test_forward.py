"""The console as a server of its own: where requests go, and which are refused."""

from __future__ import annotations

import contextlib
import json
import ssl

import pytest
from aiohttp import web

from gazette_sdk.console.forward import serve_console
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run
from support.raw_http import exchange


@contextlib.asynccontextmanager
async def target(name):
    """A server that answers with its name and with the request it got."""

    async def answer(request, found):
        body = {
            "name": name,
            "path": found.path,
            "query": found.query,
            "headers": sorted(request.headers),
            "token": request.headers.get("Authorization"),
            "body": (await request.read()).decode(),
        }
        return web.Response(
            status=206,
            body=json.dumps(body).encode(),
            headers={"Content-Range": "bytes 7-8/9", "Set-Cookie": "a=b", "X-Write-Head": "12"},
        )

    server = Server(host="127.0.0.1")
    server.http.mount("/", answer)
    try:
        yield await server.start()
    finally:
        await server.stop(0.2)


async def forwarded(*requests, headers=(), body=None, has_consumer=True):
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(target("broker"))
        consumer = await stack.enter_async_context(target("consumer")) if has_consumer else ""
        server = Server(host="127.0.0.1")
        context = ssl.create_default_context()
        where = await stack.enter_async_context(serve_console(server, broker, consumer, context))
        endpoint = where.removesuffix("/console/")
        return [
            await exchange(endpoint, method, path, headers=headers, body=body)
            for method, path in requests
        ]


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("POST", "/v1/journals/page", "broker"),
        ("GET", "/v1/cluster/report", "broker"),
        ("GET", "/v1/at/a/totals-0/shards/page", "broker"),
        ("GET", "/orders/part-000?offset=7&block=true", "broker"),
        ("HEAD", "/orders/part-000", "broker"),
        ("POST", "/v1/shards/page", "consumer"),
    ],
)
def test_each_call_goes_to_the_server_that_has_it(method, path, name):
    [answer] = run(forwarded((method, path)), 20)
    assert answer.status == 206
    assert answer.header("x-write-head") == "12"
    if method != "HEAD":
        found = json.loads(answer.body)
        assert found["name"] == name
        assert "?".join(filter(None, (found["path"], found["query"]))) == path


def test_without_a_consumer_the_broker_is_asked_for_shards():
    [answer] = run(forwarded(("POST", "/v1/shards/page"), has_consumer=False), 20)
    assert json.loads(answer.body)["name"] == "broker"


def test_only_the_token_and_the_body_are_forwarded():
    headers = ("Authorization: Bearer abc", "Cookie: a=b", "X-Forwarded-For: 1.2.3.4")
    [answer] = run(forwarded(("POST", "/v1/journals/page"), headers=headers, body=b"{}"), 20)
    found = json.loads(answer.body)
    assert (found["token"], found["body"]) == ("Bearer abc", "{}")
    assert not {"Cookie", "X-Forwarded-For"} & set(found["headers"])
    assert answer.header("content-range") == "bytes 7-8/9"
    assert answer.header("set-cookie") is None
    assert answer.header("content-security-policy") == "sandbox; default-src 'none'"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", "/orders/part-000", 405),
        ("POST", "/orders/part-000", 405),
        ("DELETE", "/v1/journals/list", 405),
        ("POST", "/v1/journals/apply", 403),
        ("POST", "/v1/shards/unassign", 403),
        ("POST", "/v1/at/a/b/shards/unassign", 403),
        ("GET", "/v1/dev", 404),
    ],
)
def test_what_changes_something_is_refused_without_a_token(method, path, status):
    [answer] = run(forwarded((method, path)), 20)
    assert answer.status == status


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/journals/apply", "broker"),
        ("/v1/shards/unassign", "consumer"),
        ("/v1/at/a/totals-0/shards/unassign", "broker"),
        ("/v1/at/a/totals-0/shards/apply", ""),
        ("/v1/at/a/b/journals/apply", ""),
        ("/v1/at/a/b/v1/shards/unassign", ""),
        ("/v1/shards/apply", ""),
    ],
)
def test_changes_of_the_page_are_forwarded_with_their_token_and_no_others(path, name):
    headers = ("Authorization: Bearer abc",)
    [answer] = run(forwarded(("POST", path), headers=headers, body=b"x" * 100_000), 20)
    if not name:
        assert answer.status == 403
        assert b"use gazctl" in answer.body
        return
    found = json.loads(answer.body)
    assert (found["name"], found["path"], found["token"]) == (name, path, "Bearer abc")
    assert len(found["body"]) == 100_000


def test_its_page_offers_changes_to_those_with_a_token_alone():
    [answer] = run(forwarded(("GET", "/console/")), 20)
    assert b'<meta name="changes" content="token">' in answer.body


def test_a_long_body_is_refused():
    [answer] = run(forwarded(("POST", "/v1/journals/page"), body=b"x" * 20_000), 20)
    assert answer.status == 413


def test_a_target_that_does_not_answer_is_named():
    async def scenario():
        server = Server(host="127.0.0.1")
        context = ssl.create_default_context()
        async with serve_console(server, "http://127.0.0.1:1", "", context) as where:
            endpoint = where.removesuffix("/console/")
            return (
                await exchange(endpoint, "GET", "/v1/cluster/report"),
                await exchange(endpoint, "GET", "/console/"),
            )

    failed, page = run(scenario(), 20)
    assert failed.status == 500
    assert b"http://127.0.0.1:1 does not answer" in failed.body
    assert page.status == 200


@pytest.mark.parametrize("address", ["unix:///run/gazette/socket", "localhost:8080", "file:///etc"])
def test_an_address_that_is_no_url_of_http_is_refused(address):
    async def scenario():
        async with serve_console(Server(), address, "", ssl.create_default_context()):
            pass

    with pytest.raises(ConfigurationError, match="give a URL of http"):
        run(scenario(), 20)
