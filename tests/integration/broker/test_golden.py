"""Recordings of a real broker's List, Apply and Append, played again against ours.

Requests are those recorded, to the byte; so are responses, but for what differs between any two
runs: revisions and Etcd's ids. What concerns gRPC itself (limits of messages, half-closes) stands
with the gRPC front.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os

import pytest
from google.protobuf import json_format

from gazette_sdk.errors import CallError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import complete
from gazette_sdk.server.authorization import Call
from support.brokers import LIMIT_S, a_broker, journal_spec
from support.etcd import run
from support.vectors import golden

AS_RECORDED = {
    "suffix": "broker-1",
    "zone": "zone-a",
    "endpoint": "http://127.0.0.1:28081",
}


def message(kind, recorded):
    if "wire" in recorded:
        return kind.FromString(base64.b64decode(recorded["wire"]))
    return json_format.ParseDict(recorded["json"], kind())


def code_of(error):
    return error.code if isinstance(error, CallError) else "UNKNOWN"


async def outcome(call):
    """The code a call ends with, and its answer if that is OK."""
    try:
        return "OK", await call
    except GazetteError as error:
        return code_of(error), None


async def all_of(responses):
    return [response async for response in responses]


def same(ours, recorded):
    """Whether a response equals the recorded one, to the byte, but for what varies."""
    expect = message(type(ours), recorded)
    assert ours.HasField("header") == expect.HasField("header")
    if ours.header.etcd.revision:
        for name in ("cluster_id", "member_id", "revision", "raft_term"):
            assert getattr(ours.header.etcd, name) > 0
        expect.header.etcd.CopyFrom(ours.header.etcd)
    assert ours == expect
    assert ours.SerializeToString(deterministic=True) == expect.SerializeToString(
        deterministic=True
    )


# ------------------------------------------------------------------- Append

SKIPPED = {
    "message over 4 MiB": "a limit of the gRPC server",
    "client cancels mid-append": "a cancellation; see test_lone_broker",
    "rate limited journal": "see the test of its own",
    "store is unhealthy": "deliberately otherwise: FRAGMENT_STORE_UNHEALTHY within seconds",
    "client stalls after a chunk": "see the test of its own",
    "client stalls after the opening message": "see the test of its own",
    "client commits but does not half-close": "see the test of its own",
}


class Played:
    """The journals of the recording, and what its states ask for."""

    def __init__(self, broker, client, root):
        self.broker, self.client, self.root = broker, client, root

    async def set_up(self):
        store = {"stores": ["file:///"], "refresh_interval_s": 1}
        snappy = {"compression_codec": pb.SNAPPY, "refresh_interval_s": 1}
        await self.client.apply(
            journal_spec("append/reg", **snappy),
            journal_spec("append/ro", flags=1, **snappy),
            journal_spec("append/wo", flags=2, **snappy),
            journal_spec("append/slow", max_append_rate=2000, **snappy),
            journal_spec("append/index", **store),
            journal_spec("suspend/empty", **snappy),
            journal_spec("suspend/data", **store),
            journal_spec("suspend/data2", **store),
        )
        for journal in ("append/index", "append/reg", "suspend/empty", "append/ro", "append/slow"):
            assert (await self.client.append_when_ready(journal)).status == pb.OK
        await self.client.append_when_ready("append/index", b"0123456789")
        await self.client.append_when_ready("suspend/data", b"some content\n")
        await self.client.append("suspend/data", b"more content\n")
        await self.client.append_when_ready("suspend/data2", b"some content\n")

    async def before(self, name):
        client = self.client
        if name == "index ahead, no offset":
            content = bytes(100)
            directory = self.root / "append" / "index"
            directory.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha1(content).hexdigest()
            (directory / f"{10:016x}-{110:016x}-{digest}.raw").write_bytes(content)
            await client.fragments_when("append/index", lambda f: f and f[-1].end == 110)
        elif name == "(read) of a PARTIAL journal":
            await client.fragments_when("suspend/data", lambda f: all(x.mod_time for x in f))
        elif name == "mode IF_FLUSHED, all persisted more than 24 h ago":
            await client.append("suspend/data2")  # which closes its first fragment
            await client.fragments_when("suspend/data2", lambda f: f and f[0].mod_time)
            for path in (self.root / "suspend" / "data2").iterdir():
                os.utime(path, (1_700_000_000, 1_700_000_000))
            await client.fragments_when("suspend/data2", lambda f: f[0].mod_time == 1_700_000_000)
        elif name == "mode IF_FLUSHED on a PARTIAL journal whose fragments are gone":
            for path in (self.root / "suspend" / "data2").iterdir():
                path.unlink()
            await client.fragments_when("suspend/data2", lambda f: not f)

    async def after(self, name):
        """Let assignments follow a suspension or a resumption, as the recording's pauses did."""
        journal = {
            "mode IF_FLUSHED again": "suspend/empty",
            "mode RESUME on a FULL journal": "suspend/empty",
            "mode IF_FLUSHED on a PARTIAL journal whose fragments are gone": "suspend/data2",
            "resume a FULL journal at its offset": "suspend/data2",
        }.get(name)
        if journal is None:
            return
        keyspace = self.broker.keyspace
        async with asyncio.timeout(LIMIT_S):
            while (keyspace.item(journal).value.suspend.level == 2) == bool(
                keyspace.assignments(journal)
            ):
                await keyspace.wait_for_update()

    async def append(self, case):
        async def requests():
            for position, recorded in enumerate(case["requests"]):
                request = message(pb.AppendRequest, recorded)
                if request.HasField("header") and request.header.etcd.cluster_id > 1:
                    request.header.etcd.cluster_id = self.broker.keyspace.header.cluster_id
                    if request.header.etcd.revision < 1 << 40:
                        request.header.etcd.revision = self.broker.keyspace.revision
                is_chunk = position and request.content and len(request.ListFields()) == 1
                yield request.content if is_chunk else request

        call = Call(timeout_s=0.3 if case["code"] == "DEADLINE_EXCEEDED" else LIMIT_S)
        return await self.broker.service.append(requests(), call)


def test_appends_are_as_recorded(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path, **AS_RECORDED) as (broker, client):
            played = Played(broker, client, tmp_path / "fragments")
            await played.set_up()
            count = 0
            for case in golden("broker/grpc_append.json"):
                name = case["name"]
                if name in SKIPPED or name.startswith("("):
                    continue
                await played.before(name)
                code, response = await outcome(played.append(case))
                assert code == case["code"], (name, response)
                if response is not None:
                    (recorded,) = case["responses"]
                    same(response, recorded)
                await played.after(name)
                count += 1
            assert count == 82

    run(scenario(), timeout_s=60)


def test_a_rate_limited_append_is_delayed_as_recorded(etcd, tmp_path):
    (case,) = (c for c in golden("broker/grpc_append.json") if c["name"] == "rate limited journal")

    async def scenario():
        async with a_broker(etcd, tmp_path, **AS_RECORDED) as (broker, client):
            played = Played(broker, client, tmp_path / "fragments")
            await played.set_up()
            response = await played.append(case)
            expect = message(pb.AppendResponse, case["responses"][0])
            assert response.commit == expect.commit
            assert response.total_chunks == expect.total_chunks
            assert (response.delayed_chunks > 0) == (expect.delayed_chunks > 0)

    run(scenario())


@pytest.mark.parametrize(
    "name",
    [
        "client stalls after a chunk",
        "client stalls after the opening message",
        "client commits but does not half-close",
    ],
)
def test_a_client_that_stalls_is_answered_in_the_recorded_time(name, etcd, tmp_path):
    (case,) = (c for c in golden("broker/grpc_append.json") if c["name"] == name)

    async def scenario():
        async with a_broker(etcd, tmp_path, **AS_RECORDED) as (broker, client):
            await client.apply(journal_spec("append/reg"))
            await client.append_when_ready("append/reg")

            async def requests():
                for position, recorded in enumerate(case["requests"]):
                    request = message(pb.AppendRequest, recorded)
                    yield request.content if position and request.content else request
                await asyncio.Event().wait()

            loop = asyncio.get_running_loop()
            began = loop.time()
            with pytest.raises(GazetteError) as caught:
                await broker.service.append(requests(), Call())
            assert code_of(caught.value) == case["code"]
            assert 0.5 < loop.time() - began < case["seconds_to_answer"] + 1

    run(scenario())


# ------------------------------------------------------------- List, Apply


def test_changes_are_as_recorded(etcd, tmp_path):
    async def scenario():
        revisions = {}
        async with a_broker(etcd, tmp_path, **AS_RECORDED) as (broker, _):
            for case in golden("broker/grpc_apply.json"):
                name = case["name"]
                (recorded,) = case["requests"]
                if recorded.get("json") is None:
                    continue  # no message at all: the gRPC front's
                request = message(pb.ApplyRequest, recorded)
                for change in request.changes:
                    expect = change.expect_mod_revision
                    if expect > 0:
                        change.expect_mod_revision = revisions.get(expect, 1 << 40)
                code, response = await outcome(broker.service.apply(request, Call()))
                assert code == case["code"], name
                if response is not None:
                    same(response, case["responses"][0])
                    recorded_at = message(pb.ApplyResponse, case["responses"][0])
                    if response.status == pb.OK:
                        revisions[recorded_at.header.etcd.revision] = response.header.etcd.revision

    run(scenario(), timeout_s=60)


def journals_of(responses):
    return [
        complete(journal.spec)
        for recorded in responses
        for journal in message(pb.ListResponse, recorded).journals
    ]


def test_listings_are_as_recorded(etcd, tmp_path):
    everything = golden("broker/grpc_list.json")

    async def scenario():
        async with a_broker(etcd, tmp_path, **AS_RECORDED) as (broker, client):
            unary = [c for c in everything if "trace" not in c and "requests" in c]
            (full,) = (c for c in unary if c["name"].startswith("all, 38 journals"))
            compared = 0
            for case in unary:
                if case is full:
                    specs = journals_of(full["responses"])
                    await client.apply(*specs)
                    for spec in specs:
                        await client.append_when_ready(spec.name)
                request = message(pb.ListRequest, case["requests"][0])
                if request.watch or case["name"] == "client does not half-close":
                    continue
                code, responses = await outcome(all_of(broker.service.list(request, Call())))
                assert code == case["code"], case["name"]
                if responses is not None:
                    assert len(responses) == len(case["responses"])
                    for ours, recorded in zip(responses, case["responses"], strict=True):
                        expect = message(pb.ListResponse, recorded)
                        for mine, theirs in zip(ours.journals, expect.journals, strict=True):
                            assert mine.mod_revision >= mine.create_revision > 0
                            theirs.mod_revision = mine.mod_revision
                            theirs.create_revision = mine.create_revision
                        as_expected = {"wire": base64.b64encode(expect.SerializeToString())}
                        same(ours, as_expected)
                compared += 1
            assert compared > 25

    run(scenario(), timeout_s=60)
