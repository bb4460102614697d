"""Content of journals in the console: masks and message types, of a broker and of a console."""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import sys
import time

import pytest
from google.protobuf import descriptor_pb2

from gazette_sdk.broker.api.fronts import AuditedCalls
from gazette_sdk.console.content import ConsoleContent, Masks, MessageTypes
from gazette_sdk.console.forward import serve_console
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.server.process import Server
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.loop import run
from support.brokers import Client, journal_spec
from support.protobuf_messages import Gram
from support.raw_http import exchange
from support.served import served

CALLS = f"/console/{'0' * 64}"
LINES = b'{"to":{"email":"ada@x"},"cents":1}\nno json ada@x\n{"cents":2}\n'
MASKED_LINES = [
    {"begin": 0, "end": 35, "text": '{"to":{"email":"•••"},"cents":1}'},
    {"begin": 35, "end": 49},
    {"begin": 49, "end": 61, "text": '{"cents":2}'},
    {"end": 61},
]
KEYS = "Z29sZGVuIHJlY29yZGluZyBrZXk="
LABELS = {"content-type": "application/x-ndjson", "topic": "orders"}


def types():
    files = descriptor_pb2.FileDescriptorSet()
    Gram.DESCRIPTOR.file.CopyToProto(files.file.add())
    return MessageTypes(files)


CONTENT = ConsoleContent(Masks.parse(["topic=orders: to.email"]), types())


def lines(answer):
    return [json.loads(line) for line in answer.body.splitlines()]


async def fill(client):
    typed = {"content-type": "application/x-protobuf-fixed"}
    typed["app.gazette.dev/message-type"] = Gram.DESCRIPTOR.full_name
    await client.apply(
        journal_spec("acme/orders", labels=LABELS),
        journal_spec("acme/clicks", labels=LABELS | {"topic": "clicks"}),
        journal_spec("acme/grams", labels=typed),
    )
    for journal in ("acme/orders", "acme/clicks"):
        await client.append_when_ready(journal, LINES)


@contextlib.asynccontextmanager
async def forwarding(endpoint, content=CONTENT):
    context = ssl.create_default_context()
    server = Server(host="127.0.0.1")
    async with serve_console(server, endpoint, "", context, content) as where:
        yield where.removesuffix("/console/")


def test_content_is_masked_by_a_broker_and_by_a_console(etcd, tmp_path):
    async def scenario():
        async with served(etcd, tmp_path, content=CONTENT) as (broker, client):
            await fill(client)
            page = await exchange(broker.endpoint, "GET", "/console/")
            assert b'name="features" content="masks types"' in page.body
            async with forwarding(broker.endpoint) as console:
                for endpoint in (broker.endpoint, console):
                    await check(endpoint)

    async def check(endpoint):
        async def read(query):
            return await exchange(endpoint, "GET", f"{CALLS}/read?journal={query}")

        found = await read("acme/orders&offset=0")
        assert lines(found) == MASKED_LINES
        assert found.header("x-console-masked") == "true"
        assert found.header("content-type") == "application/json"
        assert found.header("content-security-policy") == "sandbox; default-src 'none'"
        assert lines(await read("acme/orders&offset=49")) == MASKED_LINES[2:]
        middle = lines(await read("acme/orders;m=1&offset=8"))
        assert middle == [{"begin": 8, "end": 35}, *MASKED_LINES[1:]]
        plain = await read("acme/clicks&offset=35")
        assert plain.body == LINES[35:]
        assert plain.header("x-console-masked") is None
        assert (await read("acme/none")).status == 404
        assert (await read("acme/orders&offset=99")).status == 416
        assert (await read("acme/orders&offset=x")).status == 400
        assert (await read("")).status == 400
        found = await exchange(endpoint, "GET", f"{CALLS}/types?journal=acme/grams")
        assert json.loads(found.body)["types"]["tests.Gram"]["3"] == ["count", 4]
        found = await exchange(endpoint, "GET", f"{CALLS}/types?journal=acme/orders")
        assert json.loads(found.body) == {}

    run(scenario(), 60)


def test_a_tail_shows_each_message_as_it_comes(etcd, tmp_path):
    async def scenario():
        async with served(etcd, tmp_path, content=CONTENT) as (broker, client):
            await fill(client)
            async with forwarding(broker.endpoint) as console:
                for endpoint in (broker.endpoint, console):
                    target = f"{CALLS}/read?journal=acme/orders&offset=49&block=true"
                    found = await exchange(
                        endpoint, "GET", target, leave_after=b'cents\\":2', timeout_s=20
                    )
                    assert found.status == 206

    run(scenario(), 60)


def test_a_console_with_masks_forwards_no_content_and_no_urls_of_it(etcd, tmp_path):
    async def scenario():
        async with served(etcd, tmp_path) as (broker, client), forwarding(broker.endpoint) as where:
            await fill(client)

            async def call(path, body):
                return await exchange(where, "POST", path, body=json.dumps(body).encode())

            assert (await exchange(where, "GET", "/acme/orders?offset=0")).status == 403
            assert (await exchange(where, "HEAD", "/acme/orders?offset=0")).status == 206
            for path in ("/v1/journals/read", "/v1/journals/%72ead", "/v1/at/a/b/journals/read"):
                for body in ({}, {"metadataOnly": False}, {"metadata_only": "x"}, [], None):
                    answer = await call(path, {"journal": "acme/orders"} | body if body else body)
                    assert answer.status == 403, (path, body)
                    assert b"ada" not in answer.body
            found = await call(
                "/v1/journals/read", {"journal": "acme/orders", "metadataOnly": True}
            )
            assert lines(found)[0]["result"]["writeHead"] == str(len(LINES))
            found = await call(
                "/v1/journals/fragments", {"journal": "acme/orders", "signatureTTL": "60s"}
            )
            assert found.status == 200
            assert not [one for one in json.loads(found.body)["fragments"] if one["signedUrl"]]
            assert (await call("/v1/journals/list", {})).status == 200

    run(scenario(), 60)


def test_a_token_sees_no_more_than_elsewhere(etcd, tmp_path):
    authority = Authority(KEYS)

    def bearer(capability, journal=""):
        selector = pb.LabelSelector()
        if journal:
            selector.include.labels.add(name="name", value=journal)
        return (f"Authorization: Bearer {authority.sign(capability, selector, 60, time.time())}",)

    both = Capability.LIST | Capability.READ

    async def check(endpoint):
        async def ask(call, *headers):
            target = f"{CALLS}/{call}?journal=acme/{'grams' if call == 'types' else 'orders'}"
            return await exchange(endpoint, "GET", target, headers=headers)

        for headers in ((), ("Authorization: Bearer abc",), bearer(Capability.LIST)):
            assert (await ask("read", *headers)).status == 401
        assert lines(await ask("read", *bearer(both))) == MASKED_LINES
        assert lines(await ask("read", *bearer(both, "acme/orders"))) == MASKED_LINES
        assert (await ask("read", *bearer(both, "acme/clicks"))).status == 404
        for headers in ((), ("Authorization: Bearer abc",), bearer(both, "acme/orders")):
            assert b"Gram" not in (await ask("types", *headers)).body
        assert b"Gram" in (await ask("types", *bearer(both, "acme/grams"))).body

    async def scenario():
        async with (
            served(
                etcd, tmp_path, content=CONTENT, auth_keys=KEYS, audited=AuditedCalls.REFUSALS
            ) as (broker, _),
            GrpcTransport(broker.endpoint, auth_keys=KEYS) as transport,
        ):
            await fill(Client(transport))
            await check(broker.endpoint)
            async with forwarding(broker.endpoint) as console:
                await check(console)

    run(scenario(), 60)


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--console.mask", "topic=orders"),
        ("console", "--console.mask", "topic=orders: a..b"),
        ("dev", "--console.mask", "=: a"),
        ("dev", "--console.descriptors", "none.binpb"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_options_that_cannot_be_used_are_refused_at_the_start(arguments, tmp_path):
    command = [sys.executable, "-m", "gazette_sdk.cli.gazette", *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "the mask" in done.stderr or "the descriptor set none.binpb" in done.stderr
    assert "Traceback" not in done.stderr
