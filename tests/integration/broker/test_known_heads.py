"""A new primary that knows the head goes on without a store that fails."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.broker.append.preconditions import FAILURES_MAX
from gazette_sdk.broker.replication import peer_stream
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import HandCluster, crash, journal_spec
from support.etcd import run
from support.scripted_replicas import JOURNAL, without_pulses

GOES_ON_WITHIN_S = 6.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    without_pulses(monkeypatch)
    monkeypatch.setattr(peer_stream, "PEER_ANSWER_TIMEOUT_S", 1.0)


async def begun(cluster, *names):
    """A journal with some content, whose store then fails."""
    there = cluster.directory / "fragments" / "there"
    there.mkdir(parents=True)
    clients = [await cluster.start(name) for name in names]
    spec = journal_spec(JOURNAL, replication=len(names), stores=["file:///there/"])
    await clients[0].apply(spec)
    await cluster.assign(JOURNAL, *names)
    for content in (b"one, ", b"two, "):
        assert (await clients[0].append(JOURNAL, content)).status == pb.OK
    there.rename(there.with_name("away"))
    return clients


def come_back(cluster):
    """Restore the store: a broker that stops uploads what it has."""
    there = cluster.directory / "fragments" / "there"
    there.with_name("away").rename(there)


def test_a_replica_that_succeeds_a_killed_primary(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            clients = await begun(cluster, "broker-1", "broker-2", "broker-3")
            await crash(cluster.brokers.pop("broker-1"))
            for broker in cluster.brokers.values():
                broker.service.cancel_writes()  # as at the end of its connection
            clients[0] = await cluster.start("broker-4")
            await cluster.assign(JOURNAL, "broker-2", "broker-3", "broker-4")
            async with asyncio.timeout(GOES_ON_WITHIN_S):
                assert (await clients[1].append(JOURNAL, b"three, ")).status == pb.OK
            health = cluster.brokers["broker-2"]._stores.health("file:///there/")
            while health.consecutive_failures <= FAILURES_MAX:
                health.request_soon()
                await health.changed()
            for content in (b"four, ", b"five"):  # the store is known to fail
                assert (await clients[1].append(JOURNAL, content)).status == pb.OK
            for client in clients[1:]:
                assert (await client.read(JOURNAL, 5, do_not_proxy=True)).endswith(
                    b"three, four, five"
                )
            # The one that joined knows the head, too: it was synchronized.
            assert cluster.brokers["broker-4"].resolver.replica(JOURNAL).head_is_known
            come_back(cluster)

    run(scenario())


def test_a_lone_broker_that_starts_again(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            await begun(cluster, "broker-1")
            await crash(cluster.brokers.pop("broker-1"))
            client = await cluster.start("broker-1")
            await cluster.assign(JOURNAL, "broker-1")
            async with asyncio.timeout(GOES_ON_WITHIN_S):
                response = await client.append(JOURNAL, b"three")
            assert (response.status, response.commit.begin) == (pb.OK, 10)
            come_back(cluster)

    run(scenario())


def test_a_primary_that_does_not_know_the_head_waits_for_the_stores(etcd, tmp_path):
    """A journal that was never written here may have content in its store."""

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            (tmp_path / "fragments").mkdir()
            names = ["broker-1", "broker-2"]
            client, _ = [await cluster.start(name) for name in names]
            spec = journal_spec(JOURNAL, replication=2, stores=["file:///there/"])
            await client.apply(spec)
            await cluster.assign(JOURNAL, *names)
            response = await client.append(JOURNAL, b"three")
            assert response.status == pb.FRAGMENT_STORE_UNHEALTHY
            for broker in cluster.brokers.values():
                assert not broker.resolver.replica(JOURNAL).head_is_known

    run(scenario())
