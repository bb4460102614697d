"""Bounds of the questions to a journal's brokers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from gazette_sdk.broker.recovery.peer_inventory import PeerInventory
from gazette_sdk.errors import UnavailableError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import journal_spec

LOCAL, FAST, SILENT = (pb.ProcessSpec.ID(zone="z", suffix=name) for name in ("a", "fast", "silent"))


class ScriptedPeers:
    """Transport of which one member never answers."""

    def __init__(self):
        self.asked = []

    async def list_fragments(self, request, target):
        assert request.do_not_wait  # for a listing of the stores
        self.asked.append(target.member.suffix)
        if target.member == SILENT:
            await asyncio.Event().wait()
        response = pb.FragmentsResponse()
        response.fragments.add().spec.CopyFrom(pb.Fragment(journal=request.journal, end=7))
        return response


class ScriptedPrimary:
    """Transport to a primary that answers a read by metadata."""

    def __init__(self, status, offset):
        self.response = pb.ReadResponse(status=status, offset=offset, write_head=5)

    async def read(self, request, target):
        assert (request.offset, request.metadata_only) == (-1, True)
        assert request.include_unacknowledged
        assert target.member == FAST
        yield self.response


class ScriptedResolver:
    """Resolver of one journal, without a replica of ours."""

    local_id = LOCAL

    def __init__(self, *members):
        self.members = members

    async def resolve(self, journal, *_, **__):
        route = pb.Route(members=self.members, primary=0)
        header = pb.Header(process_id=self.members[0], route=route)
        spec = journal_spec(journal, replication=len(self.members))
        return SimpleNamespace(
            journal=journal,
            status=pb.OK,
            spec=spec,
            header=header,
            replica=None,
            is_local=header.process_id == LOCAL,
        )


def inventory(peers, *members, answer_timeout_s):
    return PeerInventory(
        ScriptedResolver(*members),
        peers=peers,
        local=peers,
        stores=StoreRegistry(None),
        max_replication=3,
        answer_timeout_s=answer_timeout_s,
    )


def test_every_other_member_is_asked():
    peers = ScriptedPeers()

    async def scenario():
        made = inventory(peers, FAST, LOCAL, answer_timeout_s=10.0)
        assert [found.end for found in await made.fragments_of_brokers("a/journal", 10)] == [7]

    asyncio.run(scenario())
    assert peers.asked == ["fast"]


def test_a_member_without_an_answer_is_given_up_and_not_asked_again_at_once():
    peers = ScriptedPeers()

    async def scenario():
        made = inventory(peers, FAST, SILENT, answer_timeout_s=0.05)
        for _ in range(3):
            with pytest.raises(UnavailableError, match="z/silent does not answer within"):
                await asyncio.wait_for(made.fragments_of_brokers("a/journal", 10), 10)
            made._silent_until.update(dict.fromkeys(made._silent_until, 1000000000000.0))
        assert peers.asked.count("silent") == 1
        made._silent_until.clear()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(made.fragments_of_brokers("a/journal", 10), 10)
        assert peers.asked.count("silent") == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("status", "head"),
    [(pb.OK, 7), (pb.OFFSET_NOT_YET_AVAILABLE, 7), (pb.NOT_JOURNAL_BROKER, 0)],
)
def test_the_primary_tells_the_head(status, head):
    async def scenario():
        made = inventory(ScriptedPrimary(status, 7), FAST, LOCAL, answer_timeout_s=10.0)
        assert await made.head("a/journal") == head

    asyncio.run(scenario())


def test_our_own_replica_does_not_go_on_while_it_is_asked():
    made = inventory(ScriptedPrimary(pb.OK, 7), LOCAL, FAST, answer_timeout_s=10.0)
    assert asyncio.run(made.head("a/journal")) == 0
