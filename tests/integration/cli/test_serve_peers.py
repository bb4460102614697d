"""Peers of `gazette serve`: limits of their calls and connections, and the audit log."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import signal
import socket
import time
import urllib.error
import urllib.request

import jwt
import pytest

from gazette_sdk import connect
from gazette_sdk.errors import GazetteError, UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.listing import apply_journals, list_journals
from integration.cli.test_processes import TIMEOUT_S, serve, served_at
from support.brokers import journal_spec

KEY = base64.b64encode(b"a secret of this cluster, long enough").decode()
WIRES = ("grpc", "stream")


@contextlib.contextmanager
def served(etcd, directory, *options):
    """A broker, with its process and its endpoint."""
    arguments = ["--etcd.address", etcd.address, "--broker.spool-dir=s", *options]
    with serve(directory, *arguments) as process:
        try:
            yield process, served_at(process)[0].replace("localhost", "127.0.0.1")
        finally:
            process.kill()


def raw_get(endpoint, path):
    """The status line of a GET, and the connection, which stays open."""
    port = int(endpoint.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return connection.recv(4096).decode(), connection


async def listed(endpoint, wire, **options):
    transport = connect(f"{endpoint}?wire={wire}", **options)
    try:
        return await asyncio.wait_for(list_journals(transport), TIMEOUT_S)
    finally:
        await transport.aclose()


def test_connections_of_one_address_are_limited_on_every_wire(etcd, tmp_path):
    with served(etcd, tmp_path, "--broker.max-peer-connections=3") as (_, endpoint):
        held = [raw_get(endpoint, "/debug/ready") for _ in range(3)]
        assert all(answer.startswith("HTTP/1.1 200") for answer, _ in held)
        answer, refused = raw_get(endpoint, "/debug/ready")
        assert answer.startswith("HTTP/1.1 429 Too Many Requests")
        assert "127.0.0.1 has 3 connections already" in answer
        assert "--broker.max-peer-connections" in answer
        refused.close()
        for wire, reason in (("grpc", "HTTP status 429"), ("stream", "has 3 connections already")):
            with pytest.raises(GazetteError, match=reason):
                asyncio.run(listed(endpoint, wire, connect_timeout_s=1.0))
        for _, connection in held:
            connection.close()
        for wire in WIRES:
            assert asyncio.run(listed(endpoint, wire)).status == pb.OK


async def create(transport, name):
    change = pb.ApplyRequest.Change(upsert=journal_spec(name))
    await apply_journals(transport, pb.ApplyRequest(changes=[change]))


def test_concurrent_calls_of_one_address_are_limited_on_every_wire(etcd, tmp_path):
    async def scenario(endpoint):
        transport = connect(endpoint)
        await create(transport, "a/journal")
        await append(transport, pb.AppendRequest(journal="a/journal"), [b"begin"])
        await transport.aclose()

        url = f"{endpoint}/a/journal?offset=0&block=true"
        reads = await asyncio.gather(
            *(asyncio.to_thread(urllib.request.urlopen, url) for _ in "12")
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            await asyncio.to_thread(urllib.request.urlopen, url)
        assert caught.value.code == 429
        assert "127.0.0.1 has 2 calls in progress already" in caught.value.read().decode()
        caught.value.close()
        for wire in WIRES:
            with pytest.raises(GazetteError, match="has 2 calls in progress already") as failed:
                await listed(endpoint, wire)
            assert failed.value.code == "RESOURCE_EXHAUSTED"
        reads.pop().close()
        ends_at = time.monotonic() + TIMEOUT_S
        while True:  # until the broker has noticed
            with contextlib.suppress(GazetteError):
                assert (await listed(endpoint, "grpc")).status == pb.OK
                break
            assert time.monotonic() < ends_at
        reads.pop().close()

    with served(etcd, tmp_path, "--broker.max-peer-calls=2") as (_, endpoint):
        asyncio.run(scenario(endpoint))


def token(capability, **claims):
    payload = {"cap": int(capability), "exp": time.time() + 600, **claims}
    return jwt.encode(payload, base64.b64decode(KEY), "HS256", headers={"kid": "2026"})


def audit_records(process, count):
    """The records of the audit log, which are JSON."""
    found = []
    while len(found) < count:
        line = process.stderr.readline()
        assert line, found
        record = json.loads(line)
        if re.match(
            r"(Append|Apply|List|Read) (answered|refused)$", record["msg"]
        ) and not re.match(
            "NO_JOURNAL_PRIMARY|INSUFFICIENT", record["outcome"]
        ):  # an append that comes early is tried again
            found.append(record)
    return found


def test_writes_and_refusals_are_in_the_audit_log_with_peer_token_and_journal(etcd, tmp_path):
    ada = token(Capability.ALL, sub="ada", jti="7")
    reader = token(Capability.READ, sub="reader")

    async def scenario(endpoint):
        for wire in WIRES:
            transport = connect(f"{endpoint}?wire={wire}", auth_token=ada)
            await create(transport, f"a/{wire}")
            await append(transport, pb.AppendRequest(journal=f"a/{wire}"), [b"content"])
            await transport.aclose()
            for _ in range(3):
                with pytest.raises(UnauthenticatedError):
                    await listed(endpoint, wire, auth_token=reader)

    options = ["--broker.auth-keys", f"2026:{KEY}", "--broker.audit=all", "--log.format=json"]
    arguments = ["--etcd.address", etcd.address, "--broker.spool-dir=s", "--log.level=info"]
    with serve(tmp_path, *arguments, *options) as process:
        while b'"serving"' not in (line := process.stderr.readline()):
            assert line
        endpoint = json.loads(line)["endpoint"].replace("localhost", "127.0.0.1")
        asyncio.run(scenario(endpoint))
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{endpoint}/a/grpc?offset=0", timeout=TIMEOUT_S)
        caught.value.close()
        process.send_signal(signal.SIGKILL)
        records = audit_records(process, 6)
    assert {record["process"].partition("/")[0] for record in records} == {"local"}
    wrote = {
        "level": "info",
        "component": "broker",
        "outcome": "OK",
        "peer": "127.0.0.1",
        "subject": "ada",
    }
    assert [
        {name: value for name, value in record.items() if name not in {"time", "process"}}
        for record in records[:3]
    ] == [
        {**wrote, "msg": "Apply answered", "method": "Apply", "journal": "a/grpc", "token_id": "7"},
        {
            **wrote,
            "msg": "Append answered",
            "method": "Append",
            "journal": "a/grpc",
            "token_id": "7",
        },
        {
            "level": "warning",
            "component": "broker",
            "msg": "List refused",
            "method": "List",
            "outcome": "token lacks the required capability LIST",
            "peer": "127.0.0.1",
            "subject": "reader",
            "token_id": "2026",
        },
    ], "the refusals that follow are repetitions"
    assert [record["journal"] for record in records[3:]] == ["a/stream", "a/stream", "a/grpc"]
    assert records[5]["msg"] == "Read refused"
    assert "missing authorization header" in records[5]["outcome"]


def test_calls_that_a_gateway_refuses_are_in_the_audit_log(etcd, tmp_path):
    reader, lister = (
        token(Capability.READ, sub="reader"),
        token(Capability.ALL, sub="lister"),
    )
    requests = [
        ("/v1/journals/list", reader, {}, "List", "reader", "capability LIST"),
        ("/v1/journals/page", "none", {}, "Page", "", "token"),
        ("/v1/journals/apply", "", {}, "Apply", "", "missing authorization header"),
        (
            *("/v1/journals/apply", lister, {"Origin": "http://evil.example"}),
            *("Apply", "lister", "pages of http://evil.example"),
        ),
        ("/v1/at/local/x-1/cluster/members", "none", {}, "Forward", "", "token"),
    ]
    options = ["--broker.auth-keys", f"2026:{KEY}", "--log.format=json"]
    with serve(
        tmp_path, "--etcd.address", etcd.address, "--broker.spool-dir=s", *options
    ) as process:
        while b'"serving"' not in (line := process.stderr.readline()):
            assert line
        endpoint = json.loads(line)["endpoint"].replace("localhost", "127.0.0.1")
        for path, bearer, headers, *_ in requests:
            for _ in range(3):
                given = {"Authorization": f"Bearer {bearer}"} if bearer else {}
                request = urllib.request.Request(
                    endpoint + path, data=b"{}", headers={**headers, **given}
                )
                with pytest.raises(urllib.error.HTTPError) as caught:
                    urllib.request.urlopen(request, timeout=TIMEOUT_S)
                assert caught.value.code == 401
                caught.value.close()
        found = []
        while len(found) < len(requests):
            line = process.stderr.readline()
            assert line, found
            if "refused" in (record := json.loads(line))["msg"]:
                found.append(record)
        process.send_signal(signal.SIGKILL)
        rest = process.stderr.read()
    assert b" refused" not in rest, "the refusals that follow are repetitions"
    for record, (_, bearer, _, method, subject, reason) in zip(found, requests, strict=True):
        assert (record["msg"], record["method"]) == (f"{method} refused", method)
        assert (record["peer"], record.get("subject", "")) == ("127.0.0.1", subject)
        assert record["process"].startswith("local/")
        assert (record["component"], record["level"]) == ("broker", "warning")
        assert reason in record["outcome"]
        assert not bearer or bearer not in json.dumps(record) or bearer == "none"
