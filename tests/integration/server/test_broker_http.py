"""A whole broker behind its port, compared with what was recorded of another implementation."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.loop import run
from support.brokers import Client
from support.raw_http import Answer, exchange
from support.served import local, served, stored
from support.vectors import golden

RECORDED_ENDPOINT = "http://127.0.0.1:28081"
PATTERN = b"".join(b"%07d\n" % number for number in range(2000))


def place(root: Path, journal: str, begin: int, end: int, content: bytes, **how: Any) -> None:
    """A fragment file as a broker would have stored it."""
    digest = hashlib.sha1(how.get("digest_of", content)).hexdigest()
    path = root / journal / f"{begin:016x}-{end:016x}-{digest}{how.get('extension', '.raw')}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (how["mod_time"], how["mod_time"]))


async def recorded_state(root: Path, client: Client) -> None:
    """Set up the state before the recordings."""
    place(root, "http/stored", 0, 12, b"stored line\n", mod_time=1700000000)
    for begin in (1100, 3300, 4400):
        content = PATTERN[begin : begin + 1100]
        place(root, "read/holes", begin, begin + 1100, content, mod_time=1700000000)
    broken = gzip.compress(PATTERN[:1000])
    how = {"mod_time": 1795221607, "digest_of": PATTERN[:1100], "extension": ".gz"}
    place(root, "read/broken", 0, 1100, broken, **how)
    place(root, "read/broken", 1100, 2200, PATTERN[1100:2200], mod_time=1795221607)
    await client.apply(
        local("http/data"),
        local("http/new"),
        local("http/put"),
        local("append/wo", flags=2),
        local("append/ro", flags=1),
        local("suspend/http"),
        stored("http/stored"),
        stored("read/holes"),
        stored("read/broken"),
    )
    for content in (b"first line\n", b"second line\n"):
        response = await client.append_when_ready("http/data", content)
        assert response.status == pb.OK
    response = await client.append_when_ready("suspend/http", suspend=pb.AppendRequest.SUSPEND_NOW)
    assert response.status == pb.SUSPENDED
    for journal, head in (("http/stored", 12), ("read/holes", 5500), ("read/broken", 2200)):
        await client.fragments_when(
            journal, lambda found, head=head: found and found[-1].end == head
        )
    for journal in ("http/new", "http/put", "append/wo", "append/ro"):
        await client.append_when_ready(journal)


async def replay(endpoint: str, case: dict[str, Any]) -> Answer:
    """Send what was sent when the case was recorded."""
    request = case["request"]
    body = base64.b64decode(request["body_base64"]) if "body_base64" in request else None
    if body is None and request["method"] == "PUT":
        body = b""
    options: dict[str, Any] = {}
    if case.get("complete") is False:  # the client left when it had this
        options["leave_after"] = case["body"].encode()[-10:].removesuffix(b"\n")
    elif not case["status_line"]:
        options["leave_after_s"] = 0.3
    return await exchange(
        endpoint,
        request["method"],
        request["target"],
        headers=tuple(request["headers"]),
        body=body,
        http="1.0" if case["name"].endswith("HTTP/1.0") else "1.1",
        **options,
    )


FREE_TEXT = re.compile(r"(?!(?:[A-Z_]+|unknown method: [A-Z]+|<a .*)\n\s*$)")
"""Bodies of errors whose wording is free: all but names of statuses, and few others."""


def differences(case: dict[str, Any], answer: Answer, endpoint: str) -> list[str]:
    """Return the differences from the recording in what the contract covers."""
    found: list[str] = []

    def compare(what: str, ours: object, recorded: object) -> None:
        if ours != recorded:
            found.append(f"{case['name']}: {what}: {ours!r}, recorded {recorded!r}")

    compare("status line", answer.status_line, case["status_line"])
    recorded = {
        name.lower(): value.replace(RECORDED_ENDPOINT, endpoint) for name, value in case["headers"]
    }
    ours = {name.lower(): value for name, value in answer.headers_beside(case["headers"])}
    is_error = answer.status >= 400 and bool(FREE_TEXT.match(case["body"]))
    varying = {"date", "content-length"} if is_error or answer.status == 307 else {"date"}
    if case["request"]["target"].startswith("/read/broken"):
        varying.add("x-fragment-last-modified")
    for name in varying:
        if name in recorded:
            compare(f"presence of {name}", name in ours, True)
        ours.pop(name, None)
        recorded.pop(name, None)
    if case["name"].endswith("HTTP/1.0") or "keep-alive" in case["name"]:
        ours.pop("connection", None)
    compare("headers", ours, recorded)
    if not is_error:
        compare("body", answer.body.decode(), case["body"])
    if "trailers" in case:
        ours_closed, recorded_closed = dict(answer.trailers), dict(case["trailers"])
        if "rpc error" in str(recorded_closed):  # the wording of errors is free
            compare("trailer", list(ours_closed), list(recorded_closed))
        else:
            compare("trailer", ours_closed, recorded_closed)
        compare("complete", answer.complete, case["complete"])
    compare("interim", answer.interim, case.get("interim_response", ""))
    return found


def test_the_gateway_answers_as_recorded(etcd, tmp_path):
    async def scenario():
        async with served(etcd, tmp_path) as (broker, client):
            await recorded_state(tmp_path / "fragments", client)
            found: list[str] = []
            for case in golden("broker/http_gateway.json"):
                answer = await replay(broker.endpoint, case)
                if "fully suspended" in case["name"] and case["request"]["method"] == "PUT":
                    # Which of the two depends on how far the resumption has come.
                    assert answer.status == 500
                    names = {"NO_JOURNAL_PRIMARY_BROKER", "INSUFFICIENT_JOURNAL_BROKERS"}
                    assert answer.body.decode().strip() in names
                    continue
                found += differences(case, answer, broker.endpoint)
            return found

    assert run(scenario(), 60) == []


VARYING = re.compile(
    rb'"(clusterId|memberId|revision|raftTerm|modRevision|createRevision|modTime)":"[1-9]\d*"'
)


def normal(body: bytes, endpoint: str) -> list[Any]:
    """The lines of a JSON answer, without what varies."""
    body = VARYING.sub(rb'"\1":"SOME"', body).replace(RECORDED_ENDPOINT.encode(), endpoint.encode())
    return [json.loads(line) for line in body.splitlines()]


def test_the_json_gateway_answers_as_recorded(etcd, tmp_path):
    """Those recordings whose state is a few journals; the form of all is tested elsewhere."""

    def is_comparable(case: dict[str, Any]) -> bool:
        return case["name"] not in {
            "list empty body",  # everything there was
            "list, suspended journal and lists of labels",  # many journals of other tests
            "unknown route",  # it is `apply`, which brokers of this SDK have
        }

    async def scenario():
        async with served(etcd, tmp_path, allow_origins=("http://ui.example",)) as (broker, client):
            await recorded_state(tmp_path / "fragments", client)
            labels = {
                "app.gazette.dev/message-type": "Order",
                "content-type": "application/x-ndjson",
                "part": "000",
                "topic": "orders",
            }
            spec = stored("orders/part-000", compression_codec=pb.SNAPPY, length=4096)
            for name, value in labels.items():
                spec.labels.labels.add(name=name, value=value)
            await client.apply(spec)
            await client.append_when_ready("orders/part-000")
            found: list[str] = []
            for case in filter(is_comparable, golden("broker/http_json_v1.json")):
                answer = await replay(broker.endpoint, case)
                if answer.status_line != case["status_line"]:
                    found.append(f"{case['name']}: {answer.status_line}")
                recorded = {name.lower() for name, _ in case["headers"]}
                ours = {name.lower() for name, _ in answer.headers_beside(case["headers"])}
                if case["request"]["method"] == "OPTIONS":
                    ours.discard("content-type")
                if ours != recorded:
                    found.append(f"{case['name']}: headers {ours ^ recorded}")
                ours_lines = normal(answer.body, broker.endpoint)
                recorded_lines = normal(case["body"].encode(), broker.endpoint)
                for line in (*ours_lines, *recorded_lines):
                    line.get("error", line).pop("message", None)
                if ours_lines != recorded_lines:
                    found.append(f"{case['name']}: {ours_lines} recorded {recorded_lines}")
            return found

    assert run(scenario(), 60) == []


KEYS = "Z29sZGVuIHJlY29yZGluZyBrZXk=,YSBzZWNvbmQga2V5"


def test_with_keys_every_front_requires_the_callers_token(etcd, tmp_path):
    authority = Authority(KEYS)

    def bearer(capability: Capability, journal: str = "") -> tuple[str, ...]:
        selector = pb.LabelSelector()
        if journal:
            selector.include.labels.add(name="name", value=journal)
        return (f"Authorization: Bearer {authority.sign(capability, selector, 60, time.time())}",)

    async def scenario():
        async with served(etcd, tmp_path, auth_keys=KEYS) as (broker, _):
            async with GrpcTransport(broker.endpoint, auth_keys=KEYS) as transport:
                client = Client(transport)
                await client.apply(local("acme/one"))
                await client.append_when_ready("acme/one", b"hello\n")

            async def ask(method, *headers, **options):
                return await exchange(
                    broker.endpoint, method, "/acme/one", headers=headers, **options
                )

            for method, body in (("GET", None), ("HEAD", None), ("PUT", b"x\n")):
                for headers in ((), ("Authorization: Bearer abc",), bearer(Capability.LIST)):
                    answer = await ask(method, *headers, body=body)
                    assert answer.status == 401, (method, headers)
                    assert answer.header("WWW-Authenticate") == "Bearer"
            assert (await ask("GET", *bearer(Capability.READ))).body == b"hello\n"
            assert (await ask("GET", *bearer(Capability.READ, "acme/one"))).body == b"hello\n"
            assert (await ask("GET", *bearer(Capability.READ, "acme/two"))).status == 404
            assert (await ask("PUT", *bearer(Capability.READ), body=b"x\n")).status == 401
            wrong = await ask("PUT", *bearer(Capability.APPEND, "acme/two"), body=b"x\n")
            assert (wrong.status, wrong.body) == (500, b"JOURNAL_NOT_FOUND\n")
            right = await ask("PUT", *bearer(Capability.APPEND, "acme/one"), body=b"x\n")
            assert right.header("X-Commit-End") == "8"

            for case in golden("broker/auth.json"):
                if not case["name"].startswith("v1"):
                    continue
                token = bearer(Capability.LIST)[0].removeprefix("Authorization: Bearer ")
                with_token = json.loads(json.dumps(case).replace("TOKEN", token))
                answer = await replay(broker.endpoint, with_token)
                assert answer.status_line == case["status_line"], case["name"]

    run(scenario(), 30)


def test_a_stop_ends_reads_that_block_with_the_reason(etcd, tmp_path):
    async def scenario():
        async with served(etcd, tmp_path) as (broker, client):
            await client.apply(local("http/data"))
            await client.append_when_ready("http/data", b"content\n")

            def blocked(offset: int) -> asyncio.Task[Answer]:
                target = f"/http/data?offset={offset}&block=true"
                return asyncio.create_task(exchange(broker.endpoint, "GET", target))

            begun, silent = blocked(0), blocked(8)
            channel = grpc.aio.insecure_channel(broker.endpoint.removeprefix("http://"))
            async with channel, GrpcTransport(broker.endpoint) as transport:
                read = transport.read(pb.ReadRequest(journal="http/data", block=True))
                assert (await anext(read)).status == pb.OK
                assert await anext(read) == b"content\n"
                ended = asyncio.ensure_future(anext(read, None))
                await asyncio.sleep(0.2)  # until both reads surely wait for content
                begun_s = asyncio.get_running_loop().time()
                await broker.stop()
                took_s = asyncio.get_running_loop().time() - begun_s
                assert await ended is None
            first, second = await begun, await silent
            assert first.body == b"content\n"
            assert first.trailers == [("X-Close-Error", "broker terminated RPC")]
            assert second.status == 500
            assert took_s < 5

    run(scenario(), 40)


BROKER_METRICS = (
    "gazette_allocator_",
    "gazette_journal_",
    "gazette_spool_",
    "gazette_store_",
    "gazette_write_head",
    "grpc_server_",
)
"""Those of brokers; the recorded one also showed its platform's and those of clients."""


def test_metrics_have_the_recorded_names_types_and_labels(etcd, tmp_path):
    async def scenario():
        async with served(etcd, tmp_path) as (broker, client):
            await client.apply(stored("a/journal"))
            for content in (b"first content", b"second content", b"third"):
                await client.append_when_ready("a/journal", content)
            async with GrpcTransport(broker.endpoint) as transport:
                outside = Client(transport)
                await outside.append("a/journal", b"more")
                assert (await outside.read("a/journal")).endswith(b"more")
            await client.fragments_when("a/journal", lambda found: found[0].mod_time)
            return await exchange(broker.endpoint, "GET", "/debug/metrics")

    lines = run(scenario(), 40).body.decode().splitlines()
    types = dict(line.split(" ")[2:] for line in lines if line.startswith("# TYPE "))
    labels: dict[str, set[str]] = {}
    for line in lines:
        if found := re.match(r"(\w+)(?:\{(.*)\})? ", line):
            names = set(re.findall(r'(\w+)="', found[2] or ""))
            labels.setdefault(found[1], set()).update(names)
    recorded = golden("broker/debug_endpoints.json")["/debug/metrics"]["metrics"]
    wrong: list[str] = []
    for name, metric in recorded.items():
        if not name.startswith(BROKER_METRICS):
            continue
        if types.get(name) != metric["type"]:
            wrong.append(f"{name}: {types.get(name)}, recorded {metric['type']}")
            continue
        shown = labels.get(name, labels.get(f"{name}_bucket", set())) - {"le"}
        if shown and shown != set(metric["labels"]):
            wrong.append(f"{name}: {shown}, recorded {metric['labels']}")
        if metric["type"] == "histogram":
            bounds = [
                found[1]
                for line in lines
                if line.startswith(f"{name}_bucket") and (found := re.search(r'le="([^"]+)"', line))
            ]
            if bounds and bounds[: len(metric["buckets"])] != metric["buckets"]:
                wrong.append(f"{name}: buckets {bounds}, recorded {metric['buckets']}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("size", [1, 100_000, 5_000_000])
def test_bytes_written_by_one_front_are_read_by_the_others(etcd, tmp_path, size):
    content = os.urandom(size)

    async def scenario():
        async with served(etcd, tmp_path) as (broker, client):
            await client.apply(stored("a/journal", compression_codec=pb.ZSTANDARD))
            await client.append_when_ready("a/journal")
            answer = await exchange(broker.endpoint, "PUT", "/a/journal", body=content)
            assert answer.header("x-commit-sha1-sum") == hashlib.sha1(content).hexdigest()
            async with GrpcTransport(broker.endpoint) as transport:
                outside = Client(transport)
                assert await outside.read("a/journal") == content
                pieces = [content[i : i + 30_000] for i in range(0, size, 30_000)]
                response = await outside.append("a/journal", *pieces)
                assert response.commit.end == 2 * size
            answer = await exchange(broker.endpoint, "GET", f"/a/journal?offset={size // 2}")
            assert answer.body == (content * 2)[size // 2 :]

    run(scenario(), 40)
