"""Blocking reads at a replica that has just joined, of bytes that it lacks and its peers have."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from functools import partial

import pytest

from gazette_sdk.broker.fragments import refresh as unstored
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import HandCluster, journal_spec
from support.etcd import run
from support.scripted_replicas import JOURNAL, without_pulses
from support.spools import until

FIRST = ("broker-1", "broker-2", "broker-3")
JOINER = "broker-4"
READ_S_MAX = 5.0
"""Bound of a read: the usual second, and as much as a busy machine takes."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    without_pulses(monkeypatch)


class Story:
    """A journal of three replicas, whose stores are listed every five minutes."""

    def __init__(self, cluster, clients):
        self.cluster = cluster
        self.clients = clients
        self.store = cluster.directory / "fragments" / "there"
        self.content = b""

    async def begin(self, replication):
        self.store.mkdir()
        spec = journal_spec(JOURNAL, replication=replication, stores=["file:///there/"])
        await self.clients[FIRST[0]].apply(spec)
        await self.cluster.assign(JOURNAL, *FIRST[:replication])
        for _ in range(5):
            await self.append(FIRST[0])

    async def append(self, name):
        content = b"%07d\n" % len(self.content) * 125
        response = await self.clients[name].append(JOURNAL, content)
        assert (response.status, response.commit.begin) == (pb.OK, len(self.content))
        self.content += content

    async def join(self, *members):
        """Let the joiner take the place of a broker that goes on uploading what it has."""
        await self.cluster.assign(JOURNAL, *members, JOINER)
        await self.append(members[0])

    def store_fails(self):
        self.store.rename(self.store.with_name("away"))

    def store_is_back(self):
        self.store.with_name("away").rename(self.store)

    def is_waiting(self):
        """Return True if a read of the joiner waits, and it has listed the stores."""
        index = self.cluster.brokers[JOINER].resolver.replica(JOURNAL).index
        return index.first_refresh.is_set() and index._hole_reads

    async def read(self):
        """Read all at the joiner as soon as it has joined; return the seconds that it took."""
        begin, found = time.monotonic(), b""
        request = pb.ReadRequest(journal=JOURNAL, block=True, end_offset=len(self.content))
        async with asyncio.timeout(READ_S_MAX + 5):
            async for item in self.clients[JOINER].transport.read(request):
                found += item if isinstance(item, bytes) else b""
        assert found == self.content
        return time.monotonic() - begin


def story(etcd, tmp_path, script, *, replication=3):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            told = Story(cluster, {name: await cluster.start(name) for name in (*FIRST, JOINER)})
            await told.begin(replication)
            await script(told)

    run(scenario())


def test_bytes_that_are_in_no_store_are_read_when_they_were_copied(etcd, tmp_path):
    async def script(told):
        told.store_fails()
        await told.join(*FIRST[:2])
        took_s = await told.read()
        told.store_is_back()
        assert took_s < READ_S_MAX

    story(etcd, tmp_path, script)


def test_bytes_that_peers_stored_since_the_joiner_listed_are_read_soon(etcd, tmp_path):
    async def script(told):
        await told.join(*FIRST[:2])
        assert await told.read() < READ_S_MAX

    story(etcd, tmp_path, script)


def test_bytes_of_a_former_replica_are_read_when_it_has_stored_them(etcd, tmp_path):
    async def script(told):
        held = []
        for name in FIRST[:2]:
            broker = told.cluster.brokers[name]
            replica = broker.resolver.replica(JOURNAL)
            hold = partial(_hold, held, broker.persister.complete)
            replica._parts = dataclasses.replace(replica._parts, complete=hold)
        await told.join(FIRST[0])
        await told.cluster.assign(JOURNAL, JOINER, FIRST[2])  # before it has copied anything
        await told.append(JOINER)
        reading = asyncio.create_task(told.read())
        await until(lambda: told.is_waiting() and len(held) >= 2)
        for upload in held:
            upload()
        assert await reading < READ_S_MAX

    story(etcd, tmp_path, script, replication=2)


def _hold(held, complete, spool):
    held.append(partial(complete, spool))


@pytest.mark.parametrize("call", ["list_fragments", "read"])
def test_bytes_of_one_peer_are_copied_while_another_one_is_frozen(
    etcd, tmp_path, monkeypatch, call
):
    monkeypatch.setattr(unstored, "SILENCE_S_MAX", 0.5)
    frozen = FIRST[1]

    async def script(told):
        peers = told.cluster.brokers[JOINER]._peers
        list_fragments, read = peers.list_fragments, peers.read

        async def list_or_hang(request, target):
            if target.member.suffix == frozen and (call == "list_fragments" or was_frozen):
                await asyncio.Event().wait()
            return await list_fragments(request, target)

        async def read_or_hang(request, target):
            if target.member.suffix == frozen:
                was_frozen.append(True)
                await asyncio.Event().wait()
            async for item in read(request, target):
                yield item

        was_frozen = []
        monkeypatch.setattr(peers, "list_fragments", list_or_hang)
        monkeypatch.setattr(peers, "read", read_or_hang)
        told.store_fails()
        await told.join(frozen, FIRST[0])
        took_s = await told.read()
        told.store_is_back()
        assert took_s < READ_S_MAX

    story(etcd, tmp_path, script)
