"""Readers are never ahead of commit: what not all replicas have acknowledged is not read."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import HandCluster, crash, journal_spec
from support.etcd import run
from support.held_replicas import HeldPeer
from support.scripted_replicas import JOURNAL, led, without_pulses
from support.spools import until


async def look(client, offset=-1, **fields):
    """The first message of a read which does not block."""
    return (await client.read_items(JOURNAL, offset, metadata_only=True, **fields))[0]


def test_an_append_that_a_peer_never_acknowledges_is_never_read(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        peer = HeldPeer()
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await led(cluster, {"peer-2": peer})
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            assert (await client.append(JOURNAL, b"first, ")).status == pb.OK
            index = cluster.brokers["broker-1"].resolver.replica(JOURNAL).index
            peer.holds = True
            appends = [
                asyncio.ensure_future(client.append(JOURNAL, content))
                for content in (b"second, ", b"third")
            ]
            await until(lambda: index.summary().end == 20)
            blocked = asyncio.ensure_future(client.read(JOURNAL, 7, block=True, end_offset=15))
            for offset in (7, 15, -1):
                found = await look(client, offset)
                assert (found.status, found.write_head) == (pb.OFFSET_NOT_YET_AVAILABLE, 7)
            assert (await client.read_items(JOURNAL, -1))[0].offset == 7
            assert await client.read(JOURNAL) == b"first, "
            # Brokers compare what they hold.
            assert (
                await client.read(JOURNAL, include_unacknowledged=True) == b"first, second, third"
            )
            assert not blocked.done()
            peer.give()
            assert (await appends[0]).commit.end == 15
            assert await blocked == b"second, "
            assert (await look(client)).write_head == 15
            found = await look(client, 8)
            assert (found.fragment.begin, found.fragment.end) == (7, 15)

            # Others lead the journal now, and never had the third: it was never read.
            blocked = asyncio.ensure_future(client.read(JOURNAL, 15, block=True))
            await cluster.assign(JOURNAL, None, "peer-2")
            peer.give(GazetteError("gone"))
            assert await blocked == b""
            with pytest.raises(GazetteError, match="gone"):
                await appends[1]

    run(scenario())


@pytest.mark.parametrize("replication", [2, 3])
def test_an_acknowledged_append_is_read_from_every_replica(
    etcd, tmp_path, monkeypatch, replication
):
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            names = [f"broker-{number}" for number in range(1, replication + 1)]
            clients = [await cluster.start(name) for name in names]
            await clients[0].apply(journal_spec(JOURNAL, replication=replication))
            await cluster.assign(JOURNAL, *names)
            expect = b""
            tails = [
                asyncio.ensure_future(
                    client.read(JOURNAL, block=True, end_offset=50, do_not_proxy=True)
                )
                for client in clients
            ]
            for number in range(5):
                content = b"%09d\n" % number
                assert (
                    await clients[number % replication].append(JOURNAL, content)
                ).status == pb.OK
                expect += content
                for client in clients:
                    assert await client.read(JOURNAL, do_not_proxy=True) == expect
                    assert (await look(client, do_not_proxy=True)).write_head == len(expect)
            assert set(await asyncio.gather(*tails)) == {expect}

    run(scenario())


def test_what_a_restarted_replica_found_is_read_once_all_have_agreed(etcd, tmp_path, monkeypatch):
    """It may have committed what no other broker has, and which others overwrite."""
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            clients = [await cluster.start(name) for name in ("broker-1", "broker-2")]
            await clients[0].apply(journal_spec(JOURNAL, replication=2))
            await cluster.assign(JOURNAL, "broker-1", "broker-2")
            assert (await clients[0].append(JOURNAL, b"content")).status == pb.OK
            for name in ("broker-1", "broker-2"):
                await crash(cluster.brokers.pop(name))

            client = await cluster.start("broker-1")
            await cluster.assign(JOURNAL, "broker-1")
            response = await client.append(JOURNAL, b"more")
            assert response.status == pb.INSUFFICIENT_JOURNAL_BROKERS
            assert (await look(client, 0)).status == pb.OFFSET_NOT_YET_AVAILABLE
            assert await client.read(JOURNAL, include_unacknowledged=True) == b"content"

            await cluster.start("broker-2")
            await cluster.assign(JOURNAL, "broker-1", "broker-2")
            response = await client.append(JOURNAL, b", and more")
            assert (response.status, response.commit.begin) == (pb.OK, 7)
            assert await client.read(JOURNAL) == b"content, and more"

    run(scenario())
