"""Members of a journal's route: proxied to, gone, too few, too many."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.errors import GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import LIMIT_S, HandCluster, Peers, journal_spec, stream
from support.etcd import run
from support.scripted_replicas import (
    JOURNAL,
    ScriptedPeer,
    without_pulses,
)
from support.vectors import cases


class RecordingPeer(Peers):
    """A primary elsewhere, which keeps what was proxied to it."""

    def __init__(self, response=None, error=None):
        super().__init__()
        self.items: list = []
        self.response, self.error = response, error
        self.began = asyncio.Event()
        self.ended_by: BaseException | None = None

    async def append(self, requests, target=None):
        try:
            async for item in requests:
                self.items.append(item)
                self.began.set()
        except BaseException as error:
            self.ended_by = error
            raise
        if self.error is not None:
            raise self.error
        return self.response


def test_an_append_is_proxied_as_it_comes(etcd, tmp_path):
    assert [c.values[0]["client"] for c in cases("broker", "append_proxy")] == [
        ["opening", "content:foobar", "empty", "half-close"],
        ["opening", "half-close"],
        ["opening", "cancel"],
    ]

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            response = pb.AppendResponse(status=pb.WRONG_APPEND_OFFSET, total_chunks=77)
            peer = RecordingPeer(response)
            await cluster.member("peer-2", peer)
            await client.apply(journal_spec(JOURNAL))
            await cluster.assign(JOURNAL, "peer-2")

            assert await client.append(f"{JOURNAL};meta", b"foobar") == response
            opening, content, commit = peer.items
            assert opening.journal == JOURNAL
            assert opening.header.process_id.suffix == "peer-2"
            assert (content, commit) == (b"foobar", pb.AppendRequest())

            peer.items, peer.error = [], UnavailableError("as the peer says")
            with pytest.raises(UnavailableError, match="as the peer says"):
                await client.transport.append(stream(pb.AppendRequest(journal=JOURNAL)))
            assert len(peer.items) == 1

            peer.began.clear()

            async def hanging():
                yield pb.AppendRequest(journal=JOURNAL)
                await asyncio.Event().wait()

            append = asyncio.ensure_future(client.transport.append(hanging()))
            await asyncio.wait_for(peer.began.wait(), LIMIT_S)
            append.cancel()
            with pytest.raises(asyncio.CancelledError):
                await append
            assert isinstance(peer.ended_by, asyncio.CancelledError)

    run(scenario())


def test_a_member_whose_key_is_gone_is_unavailable_and_the_broker_continues(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            await client.apply(journal_spec(JOURNAL))
            await cluster.assign(JOURNAL, "gone-7")
            for call in (
                client.append(JOURNAL, b"x"),
                client.read(JOURNAL),
                client.fragments(JOURNAL),
            ):
                with pytest.raises(UnavailableError):
                    await call
            await cluster.assign(JOURNAL, "broker-1")
            assert (await client.append(JOURNAL, b"x")).status == pb.OK

    run(scenario())


def test_statuses_of_journals_that_lack_members(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            await client.apply(
                journal_spec("no/primary"),
                journal_spec("no/members"),
                journal_spec("not/enough/peers", replication=2),
            )
            await cluster.assign("no/primary", None, "broker-1")
            await cluster.assign("not/enough/peers", "broker-1")
            for journal, status in (
                ("no/primary", pb.NO_JOURNAL_PRIMARY_BROKER),
                ("no/members", pb.NO_JOURNAL_PRIMARY_BROKER),
                ("not/enough/peers", pb.INSUFFICIENT_JOURNAL_BROKERS),
                ("is/unknown", pb.JOURNAL_NOT_FOUND),
                ("", pb.JOURNAL_NOT_FOUND),
            ):
                response = await client.append(journal, b"x")
                assert pb.Status.Name(response.status) == pb.Status.Name(status)
                assert response.header.process_id.suffix == "broker-1"
            with pytest.raises(GazetteError):
                await client.append("/invalid/name", b"x")

    run(scenario())


def test_the_route_is_written_once_into_every_assignment(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            peer = ScriptedPeer()
            await cluster.member("peer-2", peer)
            await client.apply(journal_spec(JOURNAL, replication=2))
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            await client.append(JOURNAL, b"x")
            broker = cluster.brokers["broker-1"]
            entries = broker.keyspace.assignments(JOURNAL)
            route = broker.keyspace.journal_route(JOURNAL)
            assert [entry.value for entry in entries] == [route, route]
            assert not any(entry.value.endpoints for entry in entries)
            # Ours still hangs on our lease, the other one on none.
            assert [entry.lease for entry in entries] == [broker.lease, 0]
            revision = broker.keyspace.revision
            await client.append(JOURNAL, b"y")
            assert broker.keyspace.revision == revision

    run(scenario())


def test_too_many_members_are_waited_for(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            await cluster.member("peer-2", ScriptedPeer())
            await client.apply(journal_spec(JOURNAL))
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            append = asyncio.ensure_future(client.append(JOURNAL, b"x"))
            async with asyncio.timeout(LIMIT_S):
                await cluster.brokers["broker-1"].keyspace.wait_for_update()
            assert not append.done()
            await cluster.assign(JOURNAL, "broker-1")
            assert (await asyncio.wait_for(append, LIMIT_S)).status == pb.OK

    run(scenario())
