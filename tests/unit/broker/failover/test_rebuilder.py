"""Whom a primary asks before it replaces a replica."""

from __future__ import annotations

import asyncio

from gazette_sdk.broker.failover.decision import Input
from gazette_sdk.broker.failover.rebuilder import Rebuilder
from gazette_sdk.broker.replication.peer_streams import PeerStreams
from gazette_sdk.cluster.broker_keys import JournalAllocation
from gazette_sdk.errors import DeadlineExceededError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import ZONE, Mirror
from support.etcd import run


def test_a_member_whose_link_is_cut_is_no_candidate_and_is_not_dialled():
    """A frozen one accepts the connection, and the dial would take its whole bound."""

    async def scenario():
        mirror, dialled = Mirror(), []
        mirror.put(dict(mirror.member(f"broker-{name}") for name in "abcd"))

        async def dial(endpoint):
            dialled.append(endpoint)
            return Input.REACHED if endpoint != endpoints["d"] else Input.UNCLEAR

        rebuilder = Rebuilder(
            None,
            mirror.keyspace,
            JournalAllocation(9),
            pb.ProcessSpec.ID(zone=ZONE, suffix="broker-a"),
            PeerStreams(),
            ttl_s=5.0,
            dial=dial,
        )
        endpoints = {name: mirror.keyspace.endpoint(ZONE, f"broker-{name}") for name in "bcd"}
        frozen = pb.ProcessSpec.ID(zone=ZONE, suffix="broker-b")
        rebuilder.failed(frozen, DeadlineExceededError("no answer"))
        found = {each.suffix: each.is_reached for each in await rebuilder._candidates()}
        assert found == {"broker-b": False, "broker-c": True, "broker-d": False}
        assert sorted(dialled) == sorted([endpoints["c"], endpoints["d"]])
        await asyncio.sleep(0)
        await rebuilder.aclose()

    run(scenario())
