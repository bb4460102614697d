import asyncio
import base64
import json
import logging
import sys
import time

import grpc.aio
import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.server.logging import RECENT
from gazette_sdk.transport.loop import run
from support.raw_http import exchange
from support.scripted_journals import ScriptedJournals, items, serving, stub
from support.vectors import golden

AUTHORITY = Authority(base64.b64encode(b"a secret of the cluster").decode())
PAGES = (
    *("metrics", "vars", "requests", "events", "pprof/", "pprof/tasks", "pprof/threads"),
    *("pprof/goroutine", "pprof/heap", "pprof/cmdline", "pprof/profile?seconds=0.1"),
)


def ask(*targets: str, **options):
    async def scenario():
        async with serving(ScriptedJournals(), **options) as server:
            return [await exchange(server.endpoint, "GET", target) for target in targets]

    return run(scenario(), 20)


def test_every_recorded_page_exists():
    recorded = golden("broker/debug_endpoints.json")
    names = [name for name in recorded if name != "/debug/nope"]
    for name, answer in zip(names, ask(*names), strict=True):
        assert answer.status_line == recorded[name]["status_line"], name
        media_types = [value for key, value in recorded[name]["headers"] if key == "Content-Type"]
        if media_types and name in {"/debug/vars", "/debug/pprof/"}:
            assert answer.header("Content-Type") == media_types[0]


def test_ready_is_an_empty_success():
    (answer,) = ask("/debug/ready")
    assert (answer.status, answer.body) == (200, b"")


def test_metrics_are_prometheus_text():
    (answer,) = ask("/debug/metrics")
    assert answer.header("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    recorded = golden("broker/debug_endpoints.json")["/debug/metrics"]["metrics"]
    shown = dict(
        line.removeprefix("# TYPE ").split(" ")
        for line in answer.body.decode().splitlines()
        if line.startswith("# TYPE ")
    )
    for name, metric in recorded.items():
        if name.startswith("grpc_server_"):
            assert shown[name] == metric["type"]


def test_grpc_metrics_have_the_recorded_labels_and_buckets():
    (answer,) = ask("/debug/metrics")
    recorded = golden("broker/debug_endpoints.json")["/debug/metrics"]["metrics"]
    buckets = [
        line.partition('le="')[2].partition('"')[0]
        for line in answer.body.decode().splitlines()
        if line.startswith("grpc_server_handling_seconds_bucket")
        and 'grpc_method="Apply"' in line
        and 'grpc_service="protocol.Journal"' in line
    ]
    assert buckets == recorded["grpc_server_handling_seconds"]["buckets"]
    started = next(
        line
        for line in answer.body.decode().splitlines()
        if line.startswith("grpc_server_started_total{")
    )
    labels = sorted(pair.partition("=")[0] for pair in started[26:].split("}")[0].split(","))
    assert labels == recorded["grpc_server_started_total"]["labels"]


def test_variables_are_json_without_keys(monkeypatch):
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *("gazette", "--broker.auth-keys", "c2VjcmV0", "--broker.auth-keys=c2VjcmV0", "x"),
            *("--etcd.password", "c2VjcmV0", "--etcd.password=c2VjcmV0", "--etcd.user", "me"),
            *("--conf", "spark.hadoop.fs.s3a.secret.key=c2VjcmV0"),
        ],
    )
    variables, command_line = ask("/debug/vars", "/debug/pprof/cmdline")
    shown = json.loads(variables.body)
    assert sorted(shown) == ["cmdline", "memstats"]
    assert shown["cmdline"] == [
        *("gazette", "--broker.auth-keys", "…", "--broker.auth-keys=…", "x"),
        *("--etcd.password", "…", "--etcd.password=…", "--etcd.user", "me"),
        *("--conf", "spark.hadoop.fs.s3a.secret.key=…"),
    ]
    assert command_line.body.decode().split("\0") == shown["cmdline"]
    assert b"c2VjcmV0" not in command_line.body


@pytest.mark.parametrize(
    ("page", "holds"),
    [
        ("tasks", "in _received"),
        ("threads", "gazette-sdk-loop"),
        ("goroutine", "threads"),
        ("heap", "objects under garbage collection"),
        ("profile?seconds=0.1", ";"),
    ],
)
def test_profiles_show_the_process(page, holds):
    (answer,) = ask(f"/debug/pprof/{page}")
    assert answer.status == 200
    assert holds in answer.body.decode()


@pytest.mark.parametrize("seconds", ["x", "0", "-1", "nan", "1e9"])
def test_a_bad_duration_of_a_profile_is_refused(seconds):
    (answer,) = ask(f"/debug/pprof/profile?seconds={seconds}")
    assert answer.status == 400


def test_profiles_leave_the_thread_pool_to_the_broker():
    async def scenario():
        async with serving(ScriptedJournals()) as server:
            profile = "/debug/pprof/profile?seconds=5"
            asked = [
                asyncio.create_task(exchange(server.endpoint, "GET", profile)) for _ in range(40)
            ]
            refused = 0
            for answered in asyncio.as_completed(asked):
                refused += (await answered).status == 429
                if refused == len(asked) - 1:
                    break
            await asyncio.wait_for(asyncio.to_thread(lambda: None), 1)
            for task in asked:
                task.cancel()

    run(scenario(), 4)


def test_a_second_profile_is_refused_until_the_first_ended():
    async def scenario():
        async with serving(ScriptedJournals()) as server:

            async def ask(seconds):
                return await exchange(
                    server.endpoint, "GET", f"/debug/pprof/profile?seconds={seconds}"
                )

            together = await asyncio.gather(ask(0.5), ask(0.5))
            return sorted(together, key=lambda answer: answer.status), await ask(0.01)

    (taken, refused), later = run(scenario(), 20)
    assert (taken.status, later.status) == (200, 200)
    assert (refused.status, refused.header("Retry-After")) == (429, "60")
    assert b"try again when it has ended" in refused.body


def test_a_client_that_leaves_ends_its_profile():
    async def scenario():
        async with serving(ScriptedJournals()) as server:
            profile = "/debug/pprof/profile?seconds=60"
            await exchange(server.endpoint, "GET", profile, leave_after_s=0.1)
            short = "/debug/pprof/profile?seconds=0.01"
            while (await exchange(server.endpoint, "GET", short)).status == 429:
                pass

    run(scenario(), 10)


@pytest.mark.parametrize("page", PAGES)
def test_diagnostics_require_a_token_for_all_journals_where_keys_are_set(page):
    async def scenario():
        async with serving(ScriptedJournals(), debug_port="0") as server:
            server.require_tokens(AUTHORITY)
            own = f"http://localhost:{server._debug_listener.port}"

            async def ask(endpoint, capability=None, selector=""):
                headers = ()
                if capability is not None:
                    token = AUTHORITY.sign(capability, parse_selector(selector), 60, time.time())
                    headers = (f"Authorization: Bearer {token}",)
                answer = await exchange(endpoint, "GET", f"/debug/{page}", headers=headers)
                return answer.status

            return [
                await ask(server.endpoint),
                await ask(own),
                await ask(server.endpoint, Capability.APPEND),
                await ask(server.endpoint, Capability.LIST, "name=a/journal"),
                await ask(server.endpoint, Capability.LIST),
                await ask(own, Capability.LIST),
            ]

    assert run(scenario(), 20) == [401, 401, 401, 401, 200, 200]


def test_readiness_requires_no_token():
    async def scenario():
        async with serving(ScriptedJournals()) as server:
            server.require_tokens(AUTHORITY)
            return await exchange(server.endpoint, "GET", "/debug/ready")

    assert run(scenario(), 20).status == 200


def test_calls_under_way_are_listed():
    async def scenario():
        async def blocked():
            yield pb.ListResponse()
            await asyncio.Event().wait()

        journals = ScriptedJournals()
        journals.on_list = lambda *_: blocked()
        async with (
            serving(journals) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.listener.port}") as channel,
        ):
            call = stub(channel, "List")(pb.ListRequest(watch=True))
            await call.read()
            answer = await exchange(server.endpoint, "GET", "/debug/requests")
            call.cancel()
            return answer.body.decode()

    page = run(scenario(), 10)
    assert "1 calls under way" in page
    assert "/protocol.Journal/List" in page


def test_recent_warnings_are_shown():
    RECENT.handle(logging.makeLogRecord({"msg": "store failed", "levelno": 30, "store": "s3://x"}))
    (answer,) = ask("/debug/events")
    assert "store=s3://x" in answer.body.decode()


def test_an_unknown_page_is_left_to_the_gateway():
    async def scenario():
        journals = ScriptedJournals()
        journals.on_read = lambda *_: items(pb.ReadResponse(status=pb.JOURNAL_NOT_FOUND))
        async with serving(journals) as server:
            return await exchange(server.endpoint, "GET", "/debug/nope")

    answer = run(scenario(), 10)
    recorded = golden("broker/debug_endpoints.json")["/debug/nope"]
    assert answer.status_line == recorded["status_line"]
    assert answer.body.decode() == recorded["body"]


def test_private_diagnostics_are_on_their_own_port_only():
    async def scenario():
        journals = ScriptedJournals()
        journals.on_read = lambda *_: items(pb.ReadResponse(status=pb.JOURNAL_NOT_FOUND))
        async with serving(journals, debug_port="0", debug_private=True) as server:
            public = await exchange(server.endpoint, "GET", "/debug/ready")
            own = f"http://localhost:{server._debug_listener.port}"
            private = await exchange(own, "GET", "/debug/ready")
            elsewhere = await exchange(own, "GET", "/a/journal")
            return public.status, private.status, elsewhere.status

    assert run(scenario(), 10) == (404, 200, 404)


def test_private_diagnostics_without_a_port_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        ask(debug_private=True)
    assert "unreachable" in caplog.text
