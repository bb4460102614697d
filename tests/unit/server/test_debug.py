import asyncio
import base64
import gzip
import json
import logging
import sys
import time
from types import SimpleNamespace

import grpc.aio
import pytest

from gazette_sdk.errors import StoreError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.server import debug
from gazette_sdk.server.health import Check
from gazette_sdk.server.logging import LEVEL, RECENT
from gazette_sdk.transport.loop import run
from support.raw_http import exchange
from support.scripted_journals import ScriptedJournals, items, serving, stub
from support.vectors import golden

AUTHORITY = Authority(base64.b64encode(b"a secret of the cluster").decode())
PAGES = (
    *(
        "health",
        "log",
        "metrics",
        "vars",
        "requests",
        "events",
        "pprof/",
        "pprof/tasks",
        "pprof/threads",
    ),
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


def test_metrics_are_compressed_for_clients_that_want_it():
    async def scenario():
        async with serving(ScriptedJournals()) as server:
            return [
                await exchange(server.endpoint, "GET", "/debug/metrics", headers=headers)
                for headers in ((), ("Accept-Encoding: gzip",))
            ]

    plain, compressed = run(scenario(), 20)
    assert compressed.header("Content-Encoding") == "gzip"
    assert compressed.header("Content-Type") == plain.header("Content-Type")
    assert b"# TYPE gazette_write_head gauge" in gzip.decompress(compressed.body)
    assert len(compressed.body) * 5 < len(plain.body)


def test_a_scrape_finds_numbers_first_and_does_not_wait_long_for_them(monkeypatch):
    monkeypatch.setattr(debug, "REFRESH_TIMEOUT_S", 0.1)
    found = []

    async def find():
        found.append("quick")

    async def fail():
        raise StoreError("no answer")

    async def scenario():
        async with serving(ScriptedJournals()) as server:
            server.debug_pages.refreshers += [find, fail, asyncio.Event().wait]
            return await exchange(server.endpoint, "GET", "/debug/metrics")

    assert run(scenario(), 20).status == 200
    assert found == ["quick"]


def test_a_process_lives_until_its_lease_is_lost():
    async def scenario():
        async with serving(ScriptedJournals()) as server:
            server.require_tokens(AUTHORITY)
            answers = [await exchange(server.endpoint, "GET", "/debug/live")]
            for dead in ("", "the lease is lost"):
                server.debug_pages.health = SimpleNamespace(dead=dead, end=lambda: None)
                answers.append(await exchange(server.endpoint, "GET", "/debug/live"))
            return [(answer.status, answer.body) for answer in answers]

    assert run(scenario(), 20) == [(200, b""), (200, b""), (503, b"the lease is lost\n")]


def test_health_is_good_if_all_checks_are():
    async def scenario():
        async with serving(ScriptedJournals()) as server:
            answers = []
            for checks in ([], [Check("etcd", True, "answers")], [Check("etcd", False, "none")]):

                async def made(_authorization, checks=checks):
                    return checks

                server.debug_pages.health = SimpleNamespace(checks=made, end=lambda: None)
                answers.append(await exchange(server.endpoint, "GET", "/debug/health"))
            return [(answer.status, json.loads(answer.body)) for answer in answers]

    assert run(scenario(), 20) == [
        (200, {"healthy": True, "checks": []}),
        (200, {"healthy": True, "checks": [{"name": "etcd", "ok": True, "detail": "answers"}]}),
        (503, {"healthy": False, "checks": [{"name": "etcd", "ok": False, "detail": "none"}]}),
    ]


def change_level(body, *headers, authority=None, capability=None):
    """Status and body of the answer to a change of the level."""

    async def scenario():
        async with serving(ScriptedJournals()) as server:
            given = headers
            if authority is not None:
                server.require_tokens(authority)
            if capability is not None:
                token = AUTHORITY.sign(capability, parse_selector(""), 60, time.time())
                given = (*headers, f"Authorization: Bearer {token}")
            return await exchange(server.endpoint, "POST", "/debug/log", body=body, headers=given)

    answer = run(scenario(), 20)
    return answer.status, answer.body.decode()


@pytest.fixture
def level():
    yield LEVEL
    LEVEL.restore()


def test_the_level_of_the_log_is_changed_for_some_minutes(level, caplog):
    caplog.set_level(logging.INFO, "gazette.audit")
    status, body = change_level(b'{"level": "debug", "minutes": 2}')
    assert status == 200
    assert json.loads(body)["level"] == "debug"
    assert logging.getLogger("gazette_sdk").level == logging.DEBUG
    (shown,) = ask("/debug/log")
    assert json.loads(shown.body) == json.loads(body)
    (record,) = [each for each in caplog.records if each.name == "gazette.audit"]
    assert record.getMessage() == "SetLogLevel answered"
    assert record.outcome == "level debug for 2 minutes"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'{"level": "debug"}', b'{"level": "loud", "minutes": 1}',
        b'{"level": "debug", "minutes": 61}', b'{"level": "debug", "minutes": 0}',
        b'{"level": "debug", "minutes": "x"}', b'{"level": ["debug"], "minutes": 1}',
    ],
)  # fmt: skip
def test_a_malformed_change_of_the_level_is_refused(body, level):
    assert change_level(body)[0] == 400
    assert logging.getLogger("gazette_sdk").level == logging.NOTSET


@pytest.mark.parametrize(
    ("capability", "status"),
    [(None, 401), (Capability.LIST, 401), (Capability.LIST | Capability.APPLY, 200)],
)
def test_the_level_is_changed_by_who_may_apply(capability, status, level, caplog):
    body = b'{"level": "debug", "minutes": 1}'
    assert change_level(body, authority=AUTHORITY, capability=capability)[0] == status
    refused = [each for each in caplog.records if each.getMessage() == "SetLogLevel refused"]
    assert len(refused) == (status == 401)


def test_a_page_of_another_origin_does_not_change_the_level(level):
    body = b'{"level": "debug", "minutes": 1}'
    assert change_level(body, "Origin: http://elsewhere")[0] == 401


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
