"""Replicas whose former primary is silent, and primaries whose peers are."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.authorization import Call
from support.brokers import LIMIT_S, ZONE, HandCluster, journal_spec
from support.etcd import run
from support.scripted_replicas import JOURNAL, ScriptedPeer, led, without_pulses
from support.spools import until


class Primary:
    """A primary that is only a member key, and its Replicate stream to a real replica."""

    def __init__(self, cluster: HandCluster) -> None:
        self.cluster = cluster
        self.broker = cluster.brokers["broker-1"]
        self._requests: asyncio.Queue[pb.ReplicateRequest | None] = asyncio.Queue()
        self._responses = self.broker.service.replicate(self._sent(), Call())
        self._header = pb.Header(
            process_id=pb.ProcessSpec.ID(zone=ZONE, suffix="broker-1"),
            route=self.broker.keyspace.journal_route(JOURNAL),
            etcd=self.broker.keyspace.header,
        )

    async def _sent(self):
        while (request := await self._requests.get()) is not None:
            yield request

    def propose(self, fragment: pb.Fragment | None = None) -> asyncio.Task[pb.ReplicateResponse]:
        """Send a proposal, by default one that changes nothing. Return the future answer."""
        fragment = fragment or self.replica.spool.peek().fragment
        request = pb.ReplicateRequest(proposal=fragment, acknowledge=True)
        if self._header is not None:
            request.header.CopyFrom(self._header)
            self._header = None
        self._requests.put_nowait(request)
        return self.answer()

    def send_content(self) -> None:
        self._requests.put_nowait(pb.ReplicateRequest(content=b"not committed"))

    def answer(self) -> asyncio.Task[pb.ReplicateResponse]:
        return asyncio.ensure_future(anext(self._responses))

    @property
    def replica(self):
        return self.broker.resolver.replica(JOURNAL)

    async def leave(self) -> None:
        """End its lease: Etcd deletes its keys."""
        keyspace = self.broker.keyspace
        revision = await self.cluster.etcd.delete(keyspace.member_key(ZONE, "peer-2"))
        await keyspace.wait_for_revision(revision)


@asynccontextmanager
async def followed(etcd, directory, answer_timeout_s=None):
    """Run a replica that has synchronized with its primary."""
    async with HandCluster(etcd, directory, answer_timeout_s=answer_timeout_s) as cluster:
        client = await cluster.start()
        await cluster.member("peer-2")
        await cluster.member("peer-3", ScriptedPeer())
        await client.apply(journal_spec(JOURNAL, replication=2))
        await cluster.assign(JOURNAL, "peer-2", "broker-1")
        primary = Primary(cluster)
        async with asyncio.timeout(LIMIT_S):
            assert (await primary.propose()).status == pb.OK
        yield cluster, client, primary


def test_a_frozen_primary_that_left_does_not_keep_the_spool_from_its_successor(
    etcd, tmp_path, monkeypatch
):
    without_pulses(monkeypatch)

    async def scenario():
        # Far longer than the test may take: only the departure ends the stream.
        async with followed(etcd, tmp_path, answer_timeout_s=1000) as (cluster, client, primary):
            primary.send_content()
            stale = primary.answer()
            await until(lambda: primary.replica.spool.peek().uncommitted_bytes == 13)
            await primary.leave()
            await cluster.assign(JOURNAL, "broker-1", "peer-3")
            with pytest.raises(UnavailableError, match="another route"):
                await asyncio.wait_for(stale, LIMIT_S)
            response = await asyncio.wait_for(client.append(JOURNAL, b"x"), LIMIT_S)
            assert (response.status, response.commit.begin, response.commit.end) == (pb.OK, 0, 1)

    run(scenario())


def test_a_primary_that_lives_ends_its_append_behind_a_change_of_the_route(
    etcd, tmp_path, monkeypatch
):
    without_pulses(monkeypatch)

    async def scenario():
        async with followed(etcd, tmp_path, answer_timeout_s=1000) as (cluster, _, primary):
            replica = primary.replica
            await cluster.assign(JOURNAL, "peer-3", "broker-1")
            assert primary.replica is replica
            assert (await asyncio.wait_for(primary.propose(), LIMIT_S)).status == pb.OK
            assert not replica.spool.free
            # Its key goes while its stream is already on another route.
            stale = primary.answer()
            await primary.leave()
            await cluster.assign(JOURNAL, "broker-1", "peer-3")
            with pytest.raises(UnavailableError, match="another route"):
                await asyncio.wait_for(stale, LIMIT_S)
            assert replica.spool.free

    run(scenario())


def test_a_silent_primary_keeps_the_spool_for_a_bounded_time_only(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with followed(etcd, tmp_path, answer_timeout_s=0.5) as (cluster, _, primary):
            stale = primary.answer()
            await cluster.assign(JOURNAL, "peer-3", "broker-1")
            with pytest.raises(UnavailableError, match="another route"):
                await asyncio.wait_for(stale, LIMIT_S)
            assert primary.replica.spool.free

    run(scenario())


def test_a_change_that_leaves_the_route_as_it_is_ends_no_stream(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with followed(etcd, tmp_path, answer_timeout_s=0.01) as (_, client, primary):
            signal = primary.replica.signal
            spec = journal_spec(JOURNAL, replication=2, stores=["file:///"])
            await client.apply(spec, expect=-1)
            await until(lambda: signal.fired)
            await primary.leave()  # nor does the departure alone, as long as the route is the same
            for _ in range(3):
                await asyncio.sleep(0.02)
                assert (await asyncio.wait_for(primary.propose(), LIMIT_S)).status == pb.OK

    run(scenario())


def test_a_late_proposal_of_a_primary_that_leads_again_moves_no_head(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with followed(etcd, tmp_path) as (cluster, _, primary):
            late = Primary(cluster)  # of before the change, and held up in the network
            primary.answer().cancel()
            await cluster.assign(JOURNAL, "peer-3", "broker-1")
            # It gives up what others lack, and leads the journal again over the same route.
            await cluster.assign(JOURNAL, "peer-2", "broker-1")
            async with asyncio.timeout(LIMIT_S):
                ahead = pb.Fragment(journal=JOURNAL, end=32, compression_codec=pb.NONE)
                ahead.sum.part1 = 1
                assert (await late.propose(ahead)).status == pb.WRONG_ROUTE
                assert late.replica.spool.peek().fragment.end == 0
                assert (await Primary(cluster).propose()).status == pb.OK

    run(scenario())


def test_a_primary_whose_spool_is_not_released_answers_in_bounded_time(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path, answer_timeout_s=0.1) as cluster:
            client = await led(cluster, {"peer-2": ScriptedPeer()})
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            replica = cluster.brokers["broker-1"].resolver.replica(JOURNAL)
            spool = await replica.spool.take()
            with pytest.raises(UnavailableError, match="try again"):
                await asyncio.wait_for(client.append(JOURNAL, b"x"), LIMIT_S)
            replica.spool.put(spool)
            assert (await client.append(JOURNAL, b"x")).status == pb.OK

    run(scenario())


def test_a_synchronization_ends_where_the_journal_gets_another_route(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        loop = asyncio.get_running_loop()
        silent = ScriptedPeer(lambda _: loop.create_future())
        async with HandCluster(etcd, tmp_path, answer_timeout_s=1000) as cluster:
            client = await led(cluster, {"peer-2": silent})
            await cluster.member("peer-3", ScriptedPeer())
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            append = asyncio.ensure_future(client.append(JOURNAL, b"x"))
            await silent.reach(lambda: len(silent.got) == 1)
            # The same route, though its keys changed: the answers are still awaited.
            spec = journal_spec(JOURNAL, replication=2, stores=["file:///"])
            replica = cluster.brokers["broker-1"].resolver.replica(JOURNAL)
            signal = replica.signal
            await client.apply(spec, expect=-1)
            await until(lambda: signal.fired)
            assert len(silent.streams) == 1
            await cluster.assign(JOURNAL, "broker-1", "peer-3")
            response = await asyncio.wait_for(append, LIMIT_S)
            assert (response.status, response.commit.end) == (pb.OK, 1)
            # Nothing waits for the silent peer at the end of the test.
            for broker in cluster.brokers.values():
                broker.service._appends.streams.fail(ZONE, "peer-2", UnavailableError("gone"))

    run(scenario())
