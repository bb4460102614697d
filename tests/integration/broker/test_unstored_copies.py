"""Replicas that join copy what is in no store, so that as many brokers may be lost again."""

from __future__ import annotations

import shutil

import pytest

from gazette_sdk.broker.fragments import refresh as unstored
from gazette_sdk.broker.metrics import UNSTORED_MISSING
from gazette_sdk.broker.replication import peer_stream
from gazette_sdk.cli.journals.list import unstored_of
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import HandCluster, crash, journal_spec
from support.etcd import run
from support.scripted_replicas import JOURNAL, without_pulses
from support.spools import until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    without_pulses(monkeypatch)
    monkeypatch.setattr(peer_stream, "PEER_ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(unstored, "DELAY_S", 0.01)


class Story:
    """A journal whose store fails, and brokers that are lost with their disks."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.clients = {}
        self.expect = b""
        self.store = cluster.directory / "fragments" / "there"

    async def start(self, name):
        self.clients[name] = await self.cluster.start(name)

    async def begin(self, *names):
        self.store.mkdir(parents=True)
        for name in names:
            await self.start(name)
        spec = journal_spec(JOURNAL, replication=len(names), stores=["file:///there/"], length=2000)
        await self.clients[names[0]].apply(spec)
        await self.cluster.assign(JOURNAL, *names)
        await self.append(names[0], 1)
        self.store.rename(self.store.with_name("away"))

    async def append(self, name, count=6):
        for _ in range(count):
            content = b"%07d\n" % len(self.expect) * 125
            response = await self.clients[name].append(JOURNAL, content)
            assert (response.status, response.commit.begin) == (pb.OK, len(self.expect))
            self.expect += content

    async def lose(self, name):
        """Kill a broker, and its disk."""
        await crash(self.cluster.brokers.pop(name))
        for broker in self.cluster.brokers.values():
            broker.service.cancel_writes()  # as at the end of its connection
        shutil.rmtree(self.cluster.directory / f"spools-{name}")

    async def whole(self, name):
        """Wait until a broker has all un-stored content."""
        replica = self.cluster.brokers[name].resolver.replica(JOURNAL)
        await until(lambda: replica.index.cover().covers(0, len(self.expect)))

    async def unstored(self, name):
        """Return the result of ``gazctl journals list --unstored``."""
        request = pb.ListRequest(selector=pb.LabelSelector())
        (listing,) = [each async for each in self.clients[name].transport.list(request)]
        return (await unstored_of(self.cluster.peers, listing))[JOURNAL]

    def come_back(self):
        self.store.with_name("away").rename(self.store)


def story(etcd, tmp_path, script):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            await script(Story(cluster))

    run(scenario())


@pytest.mark.parametrize("replication", [2, 3])
def test_brokers_that_are_lost_one_after_the_other_lose_nothing(etcd, tmp_path, replication):
    async def script(story):
        names = [f"broker-{number}" for number in range(1, replication + 1)]
        await story.begin(*names)
        for number in range(replication + 1, replication + 4):
            await story.append(names[0])
            await story.lose(names.pop(0))
            names.append(f"broker-{number}")
            await story.start(names[-1])
            await story.cluster.assign(JOURNAL, *names)
            await story.append(names[0])
            await story.whole(names[-1])
            await until(lambda: UNSTORED_MISSING.value(JOURNAL) == 0)
            assert (await story.unstored(names[0])).holders == replication
        for name in names:  # none of the first is left
            assert await story.clients[name].read(JOURNAL, do_not_proxy=True) == story.expect
        story.come_back()

    story(etcd, tmp_path, script)


def test_copies_survive_a_restart_and_are_stored_when_the_store_is_back(etcd, tmp_path):
    async def script(story):
        await story.begin("broker-1", "broker-2")
        await story.append("broker-1")
        await story.start("broker-3")
        await story.cluster.assign(JOURNAL, "broker-1", "broker-3")
        await story.append("broker-1", 1)
        await story.whole("broker-3")
        await story.lose("broker-1")
        await crash(story.cluster.brokers.pop("broker-2"))
        await crash(story.cluster.brokers.pop("broker-3"))
        await story.start("broker-3")
        story.come_back()
        await story.start("broker-4")
        await story.cluster.assign(JOURNAL, "broker-3", "broker-4")
        await story.append("broker-3", 1)
        assert await story.clients["broker-3"].read(JOURNAL) == story.expect

        def stored():
            ends = [path.name.split("-")[1] for path in story.store.rglob("*.raw")]
            return max((int(end, 16) for end in ends), default=0)

        await until(lambda: stored() >= len(story.expect) - 2000)

    story(etcd, tmp_path, script)


def test_a_copy_that_fails_is_made_again(etcd, tmp_path, monkeypatch):
    async def script(story):
        broken = [b"other bytes", GazetteError("its link broke")]
        await story.begin("broker-1", "broker-2")
        await story.append("broker-1")
        await story.start("broker-3")
        joiner = story.cluster.brokers["broker-3"]
        read = joiner._peers.read

        async def failing(request, target):
            failure = broken.pop() if broken else None
            if isinstance(failure, Exception):
                raise failure
            async for item in read(request, target):
                yield failure[: len(item)] if failure and isinstance(item, bytes) else item

        monkeypatch.setattr(joiner._peers, "read", failing)
        await story.cluster.assign(JOURNAL, "broker-1", "broker-3")
        await story.append("broker-1", 1)
        await until(lambda: not broken)
        await story.whole("broker-3")
        found = await story.clients["broker-3"].read(JOURNAL, do_not_proxy=True)
        assert found == story.expect
        story.come_back()

    story(etcd, tmp_path, script)
