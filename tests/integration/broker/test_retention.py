"""The primary of a journal removes what is older than its retention, and readers skip it."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from gazette_sdk.broker.metrics import RETENTION_FRAGMENTS
from gazette_sdk.errors import FragmentNotFoundError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.listing import list_journals, list_stores_again
from support.brokers import HandCluster, journal_spec
from support.etcd import run
from support.scripted_replicas import JOURNAL, without_pulses
from support.spools import until

NAMES = ("broker-1", "broker-2", "broker-3")
APPENDED = 9
LENGTH = 1024
STORED = (0, 1, 3, 5)
"""Appends with which stored fragments begin: the first one is stored at once."""
LOCAL = 7
"""Append with which the fragment in local files begins."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    without_pulses(monkeypatch)


def content_of(number):
    return b"%07d\n" % number * (LENGTH // 8)


def content_from(number):
    """Content of an append and all after it."""
    return b"".join(map(content_of, range(number, APPENDED)))


class Story:
    """A journal of three replicas, whose stores are listed every five minutes unless they ask."""

    def __init__(self, cluster, clients):
        self.cluster = cluster
        self.clients = clients
        self.store = cluster.directory / "fragments" / "there" / JOURNAL

    async def begin(self, retention_s):
        self.store.mkdir(parents=True)
        spec = journal_spec(JOURNAL, replication=3, stores=["file:///there/"], length=LENGTH)
        spec.fragment.retention.FromSeconds(retention_s)
        await self.clients[NAMES[0]].apply(spec)
        await self.cluster.assign(JOURNAL, *NAMES)
        for number in range(APPENDED):
            content = content_of(number)
            response = await self.clients[NAMES[0]].append(JOURNAL, content)
            assert (response.status, response.commit.begin) == (pb.OK, number * LENGTH)
        await until(lambda: len(self.files()) == len(STORED))
        await until(self.has_copied)

    def has_copied(self):
        """Return True if no replica asks the others any more what it may lack."""
        replicas = [self.cluster.brokers[name].resolver.replica(JOURNAL) for name in NAMES]
        return all(each._copying is None or each._copying.done() for each in replicas)

    def files(self):
        return sorted(self.store.glob("*")) if self.store.exists() else []

    def index(self, name):
        return self.cluster.brokers[name].resolver.replica(JOURNAL).index

    async def list_all(self):
        """Let all replicas list the store, as they do every five minutes."""
        for name in NAMES:
            await self.index(name).list_again()
            while len(self.index(name).local()) > 1:  # it was listed while it was written
                await self.index(name).list_again()

    def age(self, count):
        """Make the first fragments a year old."""
        for path in self.files()[:count]:
            os.utime(path, (time.time() - 365 * 86400,) * 2)

    async def read(self, name):
        """Return the content from the begin on, by its offset, as a replica serves it at once.

        The first read of a fragment that is gone fails, and lets the replica list the store.
        """
        try:
            return await self._read(name)
        except FragmentNotFoundError:
            return await self._read(name)

    async def _read(self, name):
        found: dict[int, bytes] = {}
        offset = 0
        async with asyncio.timeout(5):
            request = pb.ReadRequest(journal=JOURNAL, do_not_proxy=False)
            async for item in self.clients[name].transport.read(request):
                if isinstance(item, bytes):
                    found[offset] = found.get(offset, b"") + item
                elif item.status == pb.OK:
                    offset = item.offset  # of the content that follows
        return found


def story(etcd, tmp_path, script, *, retention_s=86400):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            told = Story(cluster, {name: await cluster.start(name) for name in NAMES})
            await told.begin(retention_s)
            await script(told)

    run(scenario())


def test_the_primary_removes_what_is_too_old(etcd, tmp_path):
    async def script(story):
        await story.list_all()
        before = RETENTION_FRAGMENTS.value
        story.age(3)
        await story.index(NAMES[1]).list_again()
        assert len(story.files()) == len(STORED), "a replica removes nothing"
        await story.index(NAMES[0]).list_again()
        await until(lambda: len(story.files()) == 1)
        await until(lambda: RETENTION_FRAGMENTS.value == before + 3)
        for name in NAMES:  # the third has not listed the store since
            found = await story.read(name)
            assert list(found) == [STORED[3] * LENGTH, LOCAL * LENGTH]
            assert b"".join(found.values()) == content_from(STORED[3])
        response = await story.clients[NAMES[0]].append(JOURNAL, b"goes on\n")
        assert (response.status, response.commit.begin) == (pb.OK, APPENDED * LENGTH)

    story(etcd, tmp_path, script)


def test_a_journal_that_keeps_everything_keeps_it(etcd, tmp_path):
    async def script(story):
        story.age(len(STORED))
        await story.list_all()
        assert len(story.files()) == len(STORED)

    story(etcd, tmp_path, script, retention_s=0)


def test_replicas_skip_what_a_rule_of_the_store_removed(etcd, tmp_path):
    """All that was stored: only what is in local files is left."""

    async def script(story):
        await story.list_all()
        for path in story.files():
            path.unlink()
        for name in NAMES:
            assert await story.read(name) == {LOCAL * LENGTH: content_from(LOCAL)}

    story(etcd, tmp_path, script)


def test_a_tool_lets_all_replicas_list_the_stores(etcd, tmp_path):
    async def script(story):
        await story.list_all()
        story.files()[0].unlink()
        for name in NAMES:
            transport = story.clients[name].transport  # which asks this broker only
            (listed,) = (await list_journals(transport, f"name={JOURNAL}")).journals
            await list_stores_again(transport, listed)
            assert story.index(name).page(limit=99).fragments[0].begin == LENGTH

    story(etcd, tmp_path, script)
