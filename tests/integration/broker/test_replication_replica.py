"""Replication: what a replica answers to a primary."""

from __future__ import annotations

import asyncio
import time

import pytest

from gazette_sdk.errors import CallError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.server.authorization import Call
from support import vectors
from support.brokers import ZONE, HandCluster, journal_spec
from support.etcd import run
from support.scripted_replicas import (
    JOURNAL,
    without_pulses,
)
from support.vectors import cases, label_set, normal


@pytest.mark.parametrize("case", cases("broker", "replicate_server"))
def test_a_replica_answers(case, etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)
    authority = Authority("c2VjcmV0IGtleSBvZiB0aGUgdGVzdHM=")

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            changes = {"auth_keys": "c2VjcmV0IGtleSBvZiB0aGUgdGVzdHM="} if "claims" in case else {}
            client = await cluster.start(**changes)
            broker = cluster.brokers["broker-1"]
            await cluster.member("peer-2")
            spec = journal_spec(JOURNAL, replication=2)
            key = broker.keyspace.item_key(JOURNAL)
            await cluster.etcd.put(key, spec.SerializeToString())
            await cluster.assign(JOURNAL, "peer-2", "broker-1")

            call = Call()
            if "claims" in case:
                selector = parse_selector(case["claims"]["selector"])
                capability = Capability[case["claims"]["capability"][0]]
                call = Call(authorization=authority.header(capability, selector, 60, time.time()))
            header = pb.Header(
                process_id=pb.ProcessSpec.ID(zone=ZONE, suffix="broker-1"),
                route=broker.keyspace.journal_route(JOURNAL),
                etcd=broker.keyspace.header,
            )
            requests: asyncio.Queue[pb.ReplicateRequest | None] = asyncio.Queue()

            async def sending():
                while (request := await requests.get()) is not None:
                    yield request

            responses = broker.service.replicate(sending(), call)
            index = None
            if (replica := broker.resolver.replica(JOURNAL)) is not None:
                index = replica.index
            for step in case["trace"]:
                if "check" in step:
                    assert index.summary().end == int(step["check"].rpartition(" ")[2])
                elif step.get("P") == "half-close":
                    requests.put_nowait(None)
                elif "P" in step:
                    requests.put_nowait(request_of(step["P"], header))
                    await asyncio.sleep(0)
                elif step["A"] == "EOF":
                    assert await anext(responses, None) is None
                elif step["A"] == "gRPC error":
                    with pytest.raises(CallError):
                        await anext(responses)
                else:
                    response = await anext(responses)
                    expect = step["A"]
                    assert pb.Status.Name(response.status) == expect["status"]
                    assert response.HasField("header") == (
                        "header" in expect or "route_endpoints" in expect
                    )
                    if "route_endpoints" in expect:
                        assert not response.header.route.endpoints
                    if "fragment" in expect:
                        assert normal(response.fragment) == normal(
                            vectors.fragment(expect["fragment"])
                        )
                        assert response.registers == label_set(expect["registers"])
            await responses.aclose()
            del client
            if replica is not None:
                assert replica.spool.free
                assert replica.spool.peek().uncommitted_bytes == 0

    def request_of(value, header):
        request = pb.ReplicateRequest(acknowledge=value.get("acknowledge", False))
        if "content" in value:
            request.content = value["content"].encode()
            request.content_delta = value["content_delta"]
            return request
        proposal = {"journal": value.get("journal", JOURNAL), "compression_codec": "NONE"}
        proposal |= value.get("proposal", {})
        request.proposal.CopyFrom(vectors.fragment(proposal))
        if proposal.get("end", 0) > proposal.get("begin", 0) and "sum" not in proposal:
            request.proposal.sum.part1 = 1
        request.registers.CopyFrom(label_set(value.get("registers")))
        if "header" in value:
            request.header.CopyFrom(header)
        return request

    run(scenario())


def test_a_stream_that_does_not_begin_with_a_header_is_refused(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            await cluster.start()
            service = cluster.brokers["broker-1"].service

            async def nothing():
                return
                yield

            assert [r async for r in service.replicate(nothing(), Call())] == []

            async def headless():
                proposal = pb.Fragment(journal=JOURNAL, compression_codec=pb.NONE)
                yield pb.ReplicateRequest(proposal=proposal, acknowledge=True)

            with pytest.raises(GazetteError, match="header"):
                await anext(service.replicate(headless(), Call()))

    run(scenario())


def test_another_route_is_answered_with_ours(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            broker = cluster.brokers["broker-1"]
            await cluster.member("peer-2")
            await client.apply(journal_spec(JOURNAL, replication=2))
            await cluster.assign(JOURNAL, "peer-2", "broker-1")
            header = pb.Header(
                process_id=pb.ProcessSpec.ID(zone=ZONE, suffix="broker-1"),
                route=pb.Route(
                    members=[pb.ProcessSpec.ID(zone=ZONE, suffix="broker-1")], primary=0
                ),
                etcd=broker.keyspace.header,
            )

            async def proposing():
                yield pb.ReplicateRequest(
                    header=header,
                    proposal=pb.Fragment(journal=JOURNAL, compression_codec=pb.NONE),
                    acknowledge=True,
                )

            (response,) = [r async for r in broker.service.replicate(proposing(), Call())]
            assert response.status == pb.WRONG_ROUTE
            assert len(response.header.route.members) == 2

    run(scenario())
