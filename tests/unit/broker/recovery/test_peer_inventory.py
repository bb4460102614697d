"""Bounds of the questions to a journal's brokers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from gazette_sdk.broker.recovery.peers import PeerInventory
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


class Unverified(NamedTuple):
    """Spools in quarantine, with the end of the unverified head."""

    end: int | None


class ScriptedSpools:
    """Transport to members of which each tells the end of its spool, or does not."""

    def __init__(self, **ends):
        self.ends = ends

    async def read(self, request, target):
        assert (request.offset, request.metadata_only) == (-1, True)
        assert request.include_unacknowledged
        assert request.header.process_id == target.member
        response = pb.ReadResponse(status=pb.OFFSET_NOT_YET_AVAILABLE, offset=5, write_head=5)
        end = self.ends[target.member.suffix]
        if end == "no replica":
            yield pb.ReadResponse(status=pb.NOT_JOURNAL_BROKER)
            return
        if isinstance(end, Unverified):
            response.spool_end = -1
            if end.end is not None:
                response.unverified_end = end.end
        elif end is not None:
            response.spool_end = end
        yield response


class ScriptedResolver:
    """Resolver of one journal, without a replica of ours."""

    local_id = LOCAL

    def __init__(self, *members):
        self.members = members

    async def resolve(self, journal, *_, **__):
        header = pb.Header(route=pb.Route(members=self.members, primary=0))
        spec = journal_spec(journal, replication=len(self.members))
        return SimpleNamespace(
            journal=journal, status=pb.OK, spec=spec, header=header, replica=None
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
    ("ends", "head"),
    [
        ({"fast": 7, "silent": 0}, 7),
        ({"fast": 7, "silent": None}, None),  # of another implementation
    ],
)
def test_the_head_is_the_greatest_end_of_the_spools_of_those_asked(ends, head):
    async def scenario():
        made = inventory(ScriptedSpools(**ends), FAST, LOCAL, SILENT, answer_timeout_s=10.0)
        assert await made.head("a/journal", [FAST, SILENT]) == head

    asyncio.run(scenario())


def test_members_as_many_as_the_journal_requires_tell_that_it_is_empty():
    made = inventory(ScriptedSpools(fast=0, silent=0), FAST, SILENT, answer_timeout_s=10.0)
    assert asyncio.run(made.head("a/journal", [FAST, SILENT])) == 0


def test_a_member_without_a_replica_does_not_count_as_one_of_another_implementation():
    """It has just started again."""
    made = inventory(ScriptedSpools(fast="no replica"), FAST, LOCAL, answer_timeout_s=10.0)
    with pytest.raises(UnavailableError, match="z/fast answers NOT_JOURNAL_BROKER"):
        asyncio.run(made.head("a/journal", [FAST]))


def test_only_members_tell_the_head():
    made = inventory(ScriptedSpools(fast=7), FAST, LOCAL, answer_timeout_s=10.0)
    assert asyncio.run(made.head("a/journal", [FAST, SILENT])) == 7
    assert asyncio.run(made.head("a/journal", [SILENT])) is None


def test_fewer_members_than_the_journal_requires_do_not_tell_that_it_is_empty():
    """Their disks may be new."""
    made = inventory(ScriptedSpools(fast=0), FAST, LOCAL, answer_timeout_s=10.0)
    assert asyncio.run(made.head("a/journal", [FAST, SILENT])) is None


def test_the_head_of_a_member_with_spools_in_quarantine_is_not_known_yet():
    made = inventory(ScriptedSpools(fast=-1), FAST, LOCAL, answer_timeout_s=10.0)
    with pytest.raises(UnavailableError, match="z/fast are in quarantine"):
        asyncio.run(made.head("a/journal", [FAST]))


@pytest.mark.parametrize(
    ("ours", "fast", "silent", "head"),
    [
        (7, Unverified(7), Unverified(7), None),  # all have started again
        (7, Unverified(9), Unverified(7), None),
        (7, Unverified(7), 0, None),  # its disk is new
        (7, Unverified(7), 8, 8),  # one has decided
        (7, Unverified(7), None, None),  # one is of another implementation
    ],
)
def test_the_least_unverified_head_waits_for_no_other_one(ours, fast, silent, head):
    async def scenario():
        spools = ScriptedSpools(fast=fast, silent=silent)
        made = inventory(spools, FAST, LOCAL, SILENT, answer_timeout_s=10.0)
        assert await made.head("a/journal", [FAST, SILENT], ours) == head

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("ours", "fast"),
    [(7, Unverified(6)), (7, Unverified(None)), (None, Unverified(7)), (None, Unverified(None))],
)
def test_other_spools_in_quarantine_are_waited_for(ours, fast):
    async def scenario():
        made = inventory(ScriptedSpools(fast=fast, silent=9), FAST, SILENT, answer_timeout_s=10.0)
        with pytest.raises(UnavailableError, match="spools of broker z/fast are in quarantine"):
            await made.head("a/journal", [FAST, SILENT], ours)

    asyncio.run(scenario())
