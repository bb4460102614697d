"""Whom a primary asks before it replaces a replica."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.broker.failover.decision import Input
from gazette_sdk.broker.failover.rebuilder import Rebuilder
from gazette_sdk.broker.replication.peer_streams import PeerStreams
from gazette_sdk.cluster.broker_keys import JournalAllocation
from gazette_sdk.errors import DeadlineExceededError, UnavailableError
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
        rebuilder.failed(frozen, DeadlineExceededError("no answer"), waited_s=10.0)
        found = {each.suffix: each.is_reached for each in await rebuilder._candidates()}
        assert found == {"broker-b": False, "broker-c": True, "broker-d": False}
        assert sorted(dialled) == sorted([endpoints["c"], endpoints["d"]])
        await asyncio.sleep(0)
        await rebuilder.aclose()

    run(scenario())


@pytest.mark.parametrize(
    ("error", "waited_s", "is_reached", "is_cut", "is_dialled"),
    [
        (DeadlineExceededError("no answer"), 10.0, True, True, False),
        (DeadlineExceededError("no answer"), 5.0, True, False, False),
        (UnavailableError("no HELLO"), 1.0, False, False, False),
        (UnavailableError("no HELLO"), 9.0, False, False, True),
        (UnavailableError("no HELLO"), 9.5, False, True, True),
        # It had to wait for somebody else before it refused.
        (UnavailableError("try again"), 9.5, True, False, True),
        (UnavailableError("refused"), 0.0, False, False, False),
    ],
)
def test_a_link_is_cut_by_the_wait_for_its_peer_whatever_ended_that(
    error, waited_s, is_reached, is_cut, is_dialled
):
    async def scenario():
        mirror, dialled = Mirror(), []
        mirror.put(dict(mirror.member(f"broker-{name}") for name in "ab"))

        async def dial(endpoint):
            dialled.append(endpoint)
            return Input.REACHED if is_reached else Input.UNCLEAR

        rebuilder = Rebuilder(
            None,
            mirror.keyspace,
            JournalAllocation(9),
            pb.ProcessSpec.ID(zone=ZONE, suffix="broker-a"),
            PeerStreams(answer_timeout_s=10.0),
            ttl_s=20.0,
            dial=dial,
        )
        peer = pb.ProcessSpec.ID(zone=ZONE, suffix="broker-b")
        rebuilder.failed(peer, error, waited_s=waited_s)
        for _ in range(3):
            await asyncio.sleep(0.001)
        assert rebuilder._is_cut((ZONE, "broker-b")) == is_cut
        assert bool(dialled) == is_dialled
        await rebuilder.aclose()

    run(scenario())


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_member_that_answers_while_it_is_dialled_is_reached(is_heard):
    async def scenario():
        mirror, streams = Mirror(), PeerStreams()
        mirror.put(dict(mirror.member(f"broker-{name}") for name in "ab"))

        async def dial(_):
            if is_heard:
                streams._heard_at[ZONE, "broker-b"] = asyncio.get_running_loop().time()
            return Input.UNCLEAR

        rebuilder = Rebuilder(
            None,
            mirror.keyspace,
            JournalAllocation(9),
            pb.ProcessSpec.ID(zone=ZONE, suffix="broker-a"),
            streams,
            ttl_s=5.0,
            dial=dial,
        )
        assert [each.is_reached for each in await rebuilder._candidates()] == [is_heard]

    run(scenario())
