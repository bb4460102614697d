"""Lag of event loops, and requests that are forwarded to members, and to nothing else."""

import asyncio
import json
import socket
import ssl
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gazette_sdk.errors import CallError, UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.server import members as module
from gazette_sdk.server.members import (
    AT_PREFIX,
    LoopLag,
    MemberGateway,
    parse_path,
    verify_view,
)
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run
from support.raw_http import exchange

KEY = "c29tZSBzZWNyZXQgb2YgdGhlIGNsdXN0ZXI="


# ---------------------------------------------------------------- the lag


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_the_longest_lag_of_the_last_seconds_counts():
    async def scenario():
        clock = Clock()
        lag = LoopLag(now=clock)
        lag.start()
        found = [lag.longest_s]
        for step_s in (1.0, 1.7, *[1.0] * 9):
            clock.now_s += step_s
            lag._measure()
            found.append(lag.longest_s)
        clock.now_s += 1
        lag._measure()
        lag.stop()
        return found, lag.longest_s

    found, last = run(scenario(), 10)
    assert found[0] == 0
    assert found[1] == pytest.approx(0)
    assert found[2] == pytest.approx(0.7)
    assert found[-1] == pytest.approx(0.7)
    assert last == pytest.approx(0), "ten seconds later it is forgotten"


def test_a_loop_that_is_held_is_seen_by_the_timer():
    async def scenario():
        lag = LoopLag()
        lag.start()
        time.sleep(1.4)  # noqa: ASYNC251 - it shall hold the loop
        held = lag.longest_s
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        lag.stop()
        return held, lag.longest_s

    held, seen = run(scenario(), 10)
    assert held >= 0.3
    assert seen >= 0.3


def test_rates_are_those_of_the_last_seconds():
    async def scenario():
        clock, carried = Clock(), [0, 0]
        lag = LoopLag(lambda: tuple(carried), now=clock)
        assert lag.rates() is None
        lag.start()
        found = [lag.rates()]
        for second in range(30):
            carried[0] += 1000 if second >= 15 else 0
            clock.now_s += 1
            lag._measure()
            found.append(lag.rates())
        lag.stop()
        return found

    found = run(scenario(), 10)
    assert found[0] is None
    assert found[1] == pytest.approx((0, 0))
    assert found[20] == pytest.approx((500, 0), rel=0.1)
    assert found[30] == pytest.approx((1000, 0), rel=0.1)


# ---------------------------------------------------------------- who may ask


def header(capability, *, selector=None, keys=KEY):
    return Authority(keys).header(capability, selector or pb.LabelSelector(), 60, time.time())


def test_views_of_a_cluster_need_list_without_a_selector():
    authority = Authority(KEY)
    both = verify_view(authority, header(Capability.LIST | Capability.READ))
    assert both.capability & Capability.READ
    assert not verify_view(authority, header(Capability.LIST)).capability & Capability.READ
    selector = pb.LabelSelector(include=label_set(topic="orders"))
    for refused in (None, header(Capability.READ), header(Capability.LIST, selector=selector)):
        with pytest.raises(UnauthenticatedError):
            verify_view(authority, refused)
    open_authority = Authority(f"{KEY} AA==")
    assert verify_view(open_authority, None).capability & Capability.READ


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v1/at/a/broker-1/cluster/members", ("a", "broker-1", "/v1/cluster/members")),
        ("/v1/at/a/broker-1/v1/cluster/members", ("a", "broker-1", "/v1/cluster/members")),
        ("/v1/at/a/broker-1/debug/metrics", ("a", "broker-1", "/debug/metrics")),
        ("/v1/at/a/broker-1/debug/events", ("a", "broker-1", "/debug/events")),
        ("/v1/at/a/broker-1/debug/pprof/profile", ("a", "broker-1", "/debug/pprof/profile")),
    ],
)
def test_a_path_names_a_member_and_a_call(path, target):
    assert parse_path(path, path) == target
    assert parse_path(path, f"http://proxy:80{path}?a=b") == target


# ---------------------------------------------------------------- forwarding


class Recorder:
    """A member that notes what it gets, and answers what it is set to."""

    def __init__(self):
        self.requests = []
        self.answer = lambda request: web.json_response({"path": request.raw_path})

    async def __call__(self, request, _target):
        body = await request.read()
        self.requests.append((request.method, request.raw_path, dict(request.headers), body))
        return self.answer(request)


@asynccontextmanager
async def forwarding(**options):
    """The endpoint of a server that forwards to one member, and that member."""
    recorder = Recorder()
    member = Server(host="127.0.0.1", debug_private=True)
    server = Server(host="127.0.0.1")
    member.http.mount("/", recorder)
    endpoint = await member.start()

    async def find(zone, suffix):
        return endpoint if (zone, suffix) == ("a", "broker-1") else None

    gateway = MemberGateway(find, endpoint="http://127.0.0.1:1", **options)
    server.http.mount(AT_PREFIX, gateway)
    try:
        yield await server.start(), recorder
    finally:
        await server.stop(0)
        await member.stop(0)


def forwarded(method, target, *, set_answer=None, body=None, headers=(), **options):
    """The answer to a request, and what the member got."""

    async def scenario():
        async with forwarding(**options) as (endpoint, recorder):
            if set_answer is not None:
                recorder.answer = set_answer
            answer = await exchange(endpoint, method, target, body=body, headers=headers)
            return answer, recorder.requests

    return run(scenario(), 20)


def test_a_request_is_sent_on_with_the_token_and_no_other_header():
    headers = (
        "Authorization: Bearer of-the-caller",
        "Cookie: a=b",
        "X-Forwarded-For: 10.0.0.1",
        "User-Agent: test",
        "Accept-Encoding: gzip",
        "Accept: text/html",
    )
    answer, [request] = forwarded(
        "POST", "/v1/at/a/broker-1/journals/list?x=%2F", body=b'{"a":1}', headers=headers
    )
    method, path, sent, body = request
    assert (method, path, body) == ("POST", "/v1/journals/list?x=%2F", b'{"a":1}')
    assert {name.lower() for name in sent} == {
        "host",
        "authorization",
        "content-type",
        "content-length",
        "x-gazette-forwarded",
    }
    assert sent["Authorization"] == "Bearer of-the-caller"
    assert answer.status == 200
    assert json.loads(answer.body) == {"path": "/v1/journals/list?x=%2F"}
    assert answer.header("content-type").startswith("application/json")
    assert "sandbox" in answer.header("content-security-policy")


def test_a_request_without_a_token_is_sent_on_without_one():
    answer, [(method, path, sent, body)] = forwarded("GET", "/v1/at/a/broker-1/debug/metrics")
    assert (answer.status, method, path, body) == (200, "GET", "/debug/metrics", b"")
    assert {name.lower() for name in sent} == {"host", "x-gazette-forwarded"}


LONG = "x" * 3000
HOSTILE = [
    "/v1/at/a/broker-9/cluster/members",  # no such member
    "/v1/at/b/broker-1/cluster/members",
    "/v1/at/{canary}/cluster/members",  # other hosts
    "/v1/at/127.0.0.1/{port}/cluster/members",
    "/v1/at/a@{canary}/broker-1/cluster/members",  # userinfo
    "/v1/at/a/broker-1@{canary}/cluster/members",
    "/v1/at/a/broker-1:{port}/cluster/members",  # ports
    "/v1/at/http:%2F%2F{canary}/broker-1/cluster/members",  # encoded slashes
    "/v1/at/a/broker-1%2F..%2F..%2F..%2F..%2Fconsole/",
    "/v1/at/a%2Fbroker-1/cluster/members",
    "/v1/at/a/../a/broker-1/../../../{canary}/",  # dots
    "/v1/at/a/%2e%2e/cluster/members",
    "/v1/at/../broker-1/cluster/members",
    "/v1/at/./broker-1/cluster/members",
    "/v1/at//broker-1/cluster/members",  # empty
    "/v1/at/a//cluster/members",
    "/v1/at/a/broker-1/",
    "/v1/at/a/broker-1",
    "/v1/at/",
    "/v1/at/a/br%C3%B6ker-1/cluster/members",  # Unicode
    "/v1/at/a/broker%EF%BC%8D1/cluster/members",
    f"/v1/at/a/{LONG}/cluster/members",  # very long
    f"/v1/at/{LONG}/broker-1/cluster/members",
    "/v1/at/a/broker-1/at/a/broker-1/cluster/members",  # nested
    "/v1/at/a/broker-1/v1/at/a/broker-1/cluster/members",
    "/v1/at/a/broker-1/at",
    "/v1/at/a/broker-1/%61t/a/broker-1/cluster/members",
    "/v1/at/a/broker%2D1/cluster/members",  # escapes of the name
    "/v1/at/a/broker-1%00/cluster/members",
    "/v1/at/a/broker-1%0d%0aHost:%20{canary}/cluster/members",
    "/v1/at/a/broker-1/debug/vars",  # pages that are not shown
    "/v1/at/a/broker-1/debug/../../console/",
    "/v1/at/a/broker-1?@{canary}/",
    "http://{canary}/v1/at/b/broker-1/cluster/members",
]


@pytest.mark.parametrize("target", HOSTILE, ids=[each[:50] for each in HOSTILE])
def test_a_hostile_target_is_refused_and_nothing_is_dialled(target):
    async def scenario():
        dialled = []

        async def note(_reader, writer):
            dialled.append(writer.get_extra_info("peername"))
            writer.close()

        canary = await asyncio.start_server(note, "127.0.0.1", 0)
        port = canary.sockets[0].getsockname()[1]
        url = target.replace("{canary}", f"127.0.0.1:{port}").replace("{port}", str(port))
        async with canary, forwarding() as (endpoint, recorder):
            answer = await exchange(endpoint, "GET", url)
            for _ in range(3):  # a path that is not canonical is redirected, within the server
                if answer.status != 307:
                    break
                location = answer.header("location")
                assert location.startswith("/")
                answer = await exchange(endpoint, "GET", location)
            return answer.status, recorder.requests, dialled

    status, requests, dialled = run(scenario(), 20)
    assert status in {400, 404}
    assert requests == []
    assert dialled == []


def test_a_forwarded_request_is_not_forwarded_again():
    target = "/v1/at/a/broker-1/cluster/members"
    answer, requests = forwarded("GET", target, headers=("x-gazette-forwarded: 1",))
    assert (answer.status, requests) == (400, [])
    assert "not forwarded again" in json.loads(answer.body)["message"]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "HEAD"])
def test_only_get_and_post_are_forwarded(method):
    answer, requests = forwarded(method, "/v1/at/a/broker-1/cluster/members")
    assert (answer.status, requests) == (400, [])


def test_a_caller_without_a_good_token_makes_no_one_dial():
    target = "/v1/at/a/broker-1/cluster/members"
    for headers in ((), ("Authorization: Bearer forged",)):
        answer, requests = forwarded("GET", target, headers=headers, authority=Authority(KEY))
        assert (answer.status, requests) == (401, [])
    good = (f"Authorization: {header(Capability.READ)}",)
    answer, requests = forwarded("GET", target, headers=good, authority=Authority(KEY))
    assert (answer.status, len(requests)) == (200, 1)


def test_a_long_body_is_refused():
    target = "/v1/at/a/broker-1/journals/list"
    answer, [_] = forwarded("POST", target, body=b"x" * (16 << 10))
    assert answer.status == 200
    answer, requests = forwarded("POST", target, body=b"x" * ((16 << 10) + 1))
    assert (answer.status, requests) == (413, [])


def test_a_redirect_of_a_member_is_not_followed():
    answer, requests = forwarded(
        "GET",
        "/v1/at/a/broker-1/cluster/members",
        set_answer=lambda _: web.Response(status=302, headers={"Location": "http://10.0.0.1/"}),
    )
    assert (answer.status, len(requests)) == (503, 1)
    assert answer.header("location") is None
    assert b"10.0.0.1" not in answer.body


def test_statuses_and_texts_are_passed_on_but_no_other_header():
    def refuse(_request):
        return web.Response(
            status=401,
            text="<script>alert(1)</script>",
            content_type="application/xhtml+xml",
            headers={"Set-Cookie": "a=b", "Refresh": "0"},
        )

    answer, _ = forwarded("GET", "/v1/at/a/broker-1/debug/requests", set_answer=refuse)
    assert answer.status == 401
    assert answer.header("www-authenticate") == "Bearer"
    assert answer.header("set-cookie") is None
    assert answer.header("refresh") is None
    assert answer.header("content-type") == "text/plain; charset=utf-8"


def test_an_answer_that_is_too_long_has_no_end():
    long = {"set_answer": lambda _: web.Response(body=b"x" * 5000), "answer_bytes_max": 4999}
    answer, _ = forwarded("GET", "/v1/at/a/broker-1/cluster/report", **long)
    assert not answer.complete
    events, _ = forwarded("GET", "/v1/at/a/broker-1/cluster/events", **long)
    assert events.complete
    assert len(events.body) == 5000


def test_a_member_that_does_not_answer_in_time_is_an_error():
    async def silent():
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"

            async def find(_zone, _suffix):
                return endpoint

            server = Server(host="127.0.0.1")
            gateway = MemberGateway(find, endpoint="http://127.0.0.1:1", timeout_s=0.2)
            server.http.mount(AT_PREFIX, gateway)
            try:
                ours = await server.start()
                slow = await exchange(ours, "GET", "/v1/at/a/broker-1/cluster/members")
                listening.close()
                gone = await exchange(ours, "GET", "/v1/at/a/broker-1/cluster/members")
            finally:
                await server.stop(0)
            return slow, gone, endpoint

    slow, gone, endpoint = run(silent(), 20)
    assert slow.status == 504
    assert json.loads(slow.body)["message"] == "a/broker-1 did not answer in time"
    assert gone.status == 503
    assert endpoint.removeprefix("http://").encode() not in gone.body


def test_a_token_is_not_sent_to_a_member_without_tls():
    async def scenario():
        async def find(_zone, _suffix):
            return "http://10.255.255.1:80"

        server = Server(host="127.0.0.1")
        gateway = MemberGateway(find, endpoint="https://broker:80", tls=ssl.create_default_context)
        server.http.mount(AT_PREFIX, gateway)
        try:
            ours = await server.start()
            headers = ("Authorization: Bearer secret",)
            return await exchange(ours, "GET", "/v1/at/a/broker-1/x", headers=headers)
        finally:
            await server.stop(0)

    answer = run(scenario(), 20)
    assert answer.status == 400
    assert b"has no TLS" in answer.body


def test_too_many_forwarded_requests_are_refused(monkeypatch):
    monkeypatch.setattr(module, "FORWARDS_MAX", 0)
    answer, requests = forwarded("GET", "/v1/at/a/broker-1/cluster/members")
    assert (answer.status, requests) == (429, [])


def test_pages_of_allowed_origins_may_call():
    target = "/v1/at/a/broker-1/cluster/members"
    origins = {"allow_origins": ("http://console",), "headers": ("Origin: http://console",)}
    answer, _ = forwarded("GET", target, **origins)
    assert answer.header("access-control-allow-origin") == "http://console"
    preflight, requests = forwarded("OPTIONS", target, **origins)
    assert (preflight.status, requests) == (200, [])
    assert preflight.header("access-control-allow-origin") == "http://console"


def test_pages_of_other_origins_may_not_post():
    target = "/v1/at/a/broker-1/shards/unassign"
    headers = ("Origin: http://elsewhere",)
    answer, requests = forwarded("POST", target, headers=headers)
    assert (answer.status, requests) == (401, [])
    assert b"--broker.allow-origin" in answer.body
    answer, requests = forwarded(
        "POST", target, headers=headers, allow_origins=("http://elsewhere",)
    )
    assert len(requests) == 1


def test_a_malformed_path_is_an_error_of_the_caller():
    with pytest.raises(CallError) as error:
        parse_path("/v1/at/a/b/x", "/v1/at/a/b/x")  # an id has at least four bytes
    assert error.value.code == "INVALID_ARGUMENT"
