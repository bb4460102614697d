"""What a killed primary had for itself alone never shadows what was acknowledged after it."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.broker.recovery import etcd_history, quarantine
from gazette_sdk.broker.recovery.peers import PeerInventory
from gazette_sdk.broker.replication import peer_stream
from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import LIMIT_S, HandCluster, crash, journal_spec, without_waiting
from support.etcd import run
from support.scripted_replicas import JOURNAL, without_pulses
from support.spools import until

FIRST, LOST, NEXT = b"first,second,", b"lost,", b"acknowledged"
BEGIN, HEAD = len(b"first,"), len(FIRST)  # of the spool which is being written


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    without_pulses(monkeypatch)
    monkeypatch.setattr(quarantine, "PAUSE_S_MAX", 0.1)


class Story:
    """A cluster of which a primary is killed, and comes back."""

    def __init__(self, cluster, monkeypatch):
        self.cluster = cluster
        self._monkeypatch = monkeypatch
        self.clients = {}
        self.store = cluster.directory / "fragments" / "store"
        self.store.mkdir(parents=True)

    async def begin(self, *members, replication, contents=(FIRST[:BEGIN], FIRST[BEGIN:])):
        for number in (1, 2, 3):
            await self.start(f"broker-{number}")
        await self.apply(replication)
        await self.cluster.assign(JOURNAL, *members)
        for content in contents:
            assert (await self["broker-1"].append(JOURNAL, content)).status == pb.OK
        if len(contents) > 1:  # the second one closed the first one's fragment
            await self.until_stored((0, BEGIN))

    async def apply(self, replication, **fields):
        spec = journal_spec(
            JOURNAL, replication=replication, stores=["file:///store/"], refresh_interval_s=1
        )
        await self["broker-2"].apply(spec, **fields)

    def __getitem__(self, broker):
        return self.clients[broker]

    async def start(self, broker):
        self.clients[broker] = await self.cluster.start(broker)

    async def stop(self, broker):
        await self.cluster.brokers.pop(broker).stop()

    async def crash(self, broker="broker-1"):
        await crash(self.cluster.brokers.pop(broker))

    async def crash_in_the_middle(self):
        """Kill the primary when it has committed an append that it could not send."""
        replica = self.cluster.brokers["broker-1"].resolver.replica(JOURNAL)
        with self._monkeypatch.context() as patch:  # what is sent stays in the socket's buffer
            patch.setattr(peer_stream.PeerStream, "send", lambda *_: None)
            lost = asyncio.ensure_future(self["broker-1"].append(JOURNAL, LOST))
            async with asyncio.timeout(LIMIT_S):
                while replica.spool.peek().fragment.end != len(FIRST + LOST):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        replica.pipeline.peek().fail(UnavailableError("its process is gone"))
        await self.crash()
        for broker in self.cluster.brokers.values():
            broker.service.cancel_writes()  # as at the end of its connection
        await asyncio.wait([lost])
        assert lost.exception() is not None

    async def go_on(self, *members, at=HEAD, content=NEXT):
        await self.cluster.assign(JOURNAL, *members)
        async with asyncio.timeout(LIMIT_S):
            response = await self[members[0]].append(JOURNAL, *[content] * bool(content))
        assert (response.status, response.commit.begin) == (pb.OK, at)

    @property
    def quarantined(self):
        return self.cluster.brokers["broker-1"]._custody._quarantine._entries

    async def decided(self):
        async with asyncio.timeout(LIMIT_S):
            await self.cluster.brokers["broker-1"]._member.tasks["recovery"]

    def stored(self):
        found = (self.cluster.directory / "fragments").rglob("*-*-*.raw")
        return sorted(
            tuple(int(part, 16) for part in path.name.split("-")[:2])
            for path in found
            if not path.name.startswith(".")
        )

    async def until_stored(self, *spans):
        async with asyncio.timeout(LIMIT_S):
            while not set(spans) <= set(self.stored()):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)

    def fail_store(self):
        self.store.rename(self.store.with_suffix(".unreachable"))
        self.store.symlink_to(self.store.name)  # to itself

    def heal_store(self):
        self.store.unlink()
        self.store.with_suffix(".unreachable").rename(self.store)

    def put_aside(self):
        return list((self.cluster.directory / "spools-broker-1").rglob("*.content.superseded"))

    async def stays(self, expect, *brokers, for_s=1.5):
        """Check that brokers serve the acknowledged bytes, over refreshes of the stores."""
        async with asyncio.timeout(for_s + LIMIT_S):
            for broker in brokers:  # which may have to list the stores before
                while (found := await self[broker].read(JOURNAL)) != expect:
                    assert expect.startswith(found)
                    await asyncio.sleep(0.1)
            for _ in range(round(for_s / 0.25)):
                for broker in brokers:
                    assert await self[broker].read(JOURNAL) == expect
                await asyncio.sleep(0.25)


def story(etcd, tmp_path, monkeypatch, script):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            await script(Story(cluster, monkeypatch))

    run(scenario())


@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_tail_of_a_killed_primary_is_not_used(etcd, tmp_path, monkeypatch, begins_anew):
    """The others go on with their spool; or, where one of them is new, with another one."""

    async def script(story):
        members = ["broker-1", "broker-2"] + ["broker-3"] * (not begins_anew)
        await story.begin(*members, replication=len(members))
        await story.crash_in_the_middle()
        await story.apply(2, expect=-1)
        await story.go_on("broker-2", "broker-3")
        await story.stays(FIRST + NEXT, "broker-2", for_s=0.5)
        await story.start("broker-1")
        await story.decided()
        assert len(story.put_aside()) == 1
        await story.stays(FIRST + NEXT, "broker-1", "broker-2")

        await story.go_on("broker-1", "broker-2", at=len(FIRST + NEXT), content=b"!")
        await story.stays(FIRST + NEXT + b"!", "broker-2", for_s=1.5)

    story(etcd, tmp_path, monkeypatch, script)


def test_a_broker_joins_again_while_the_store_fails(etcd, tmp_path, monkeypatch):
    """Beside a broker which is new, so that it could never list the store."""

    async def script(story):
        await story.begin("broker-1", "broker-2", replication=2)
        await story.crash_in_the_middle()
        story.fail_store()
        await story.go_on("broker-2", "broker-3")
        await story.start("broker-1")
        await story.apply(3, expect=-1)
        await story.go_on("broker-2", "broker-3", "broker-1", at=len(FIRST + NEXT), content=b"!")
        assert len(story.put_aside()) == 1
        story.heal_store()
        await story.stays(FIRST + NEXT + b"!", "broker-1", "broker-2", "broker-3")

    story(etcd, tmp_path, monkeypatch, script)


def test_nothing_is_stored_while_all_who_went_on_are_away(etcd, tmp_path, monkeypatch):
    """Nobody who is there knows what they acknowledged at these offsets."""

    async def script(story):
        await story.begin("broker-1", "broker-2", replication=2)
        await story.crash_in_the_middle()
        await story.go_on("broker-2", "broker-3")
        await story.crash("broker-2")
        await story.crash("broker-3")
        await story.start("broker-1")
        await story.start("broker-4")
        await story.cluster.assign(JOURNAL, "broker-4", "broker-1")
        await asyncio.sleep(1.5)
        assert max(story.stored()) <= (BEGIN, HEAD)
        assert story.quarantined
        await story.start("broker-2")
        async with asyncio.timeout(LIMIT_S):
            while (await story["broker-2"].append(JOURNAL, b"!")).status != pb.OK:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await story.decided()
        await story.stays(FIRST + NEXT + b"!", "broker-1", "broker-2")

    story(etcd, tmp_path, monkeypatch, script)


def test_a_spool_that_is_contested_during_the_start_is_not_used(etcd, tmp_path, monkeypatch):
    async def script(story):
        await story.begin("broker-1", "broker-2", replication=2)
        await story.crash_in_the_middle()
        await story.start("broker-1")
        await story.go_on("broker-2", "broker-3")
        await story.decided()
        assert len(story.put_aside()) == 1
        await story.stays(FIRST + NEXT, "broker-1", "broker-2")

    story(etcd, tmp_path, monkeypatch, script)


def test_who_comes_back_before_the_others_go_on_brings_all_of_it(etcd, tmp_path, monkeypatch):
    async def script(story):
        await story.begin("broker-1", "broker-2", replication=2)
        await story.crash_in_the_middle()
        await story.start("broker-1")
        await story.go_on("broker-2", "broker-1", at=len(FIRST + LOST))
        await story.decided()
        await story.stays(FIRST + LOST + NEXT, "broker-1")
        await story["broker-2"].fragments_when(JOURNAL, lambda found: found[0].backing_store)
        await story.stays(FIRST + LOST + NEXT, "broker-2", for_s=1)

    story(etcd, tmp_path, monkeypatch, script)


def test_the_beginning_that_nobody_else_has_is_used(etcd, tmp_path, monkeypatch):
    async def script(story):
        await story.begin("broker-1", "broker-2", replication=2)
        await story.crash_in_the_middle()
        # The other copy is not stored, and then lost.
        monkeypatch.setattr(story.cluster.brokers["broker-2"].persister, "_start", lambda *_: 0)
        await story.go_on("broker-2", "broker-3")
        await story.crash("broker-2")
        await story.start("broker-1")
        await story.cluster.assign(JOURNAL, "broker-3", "broker-1")
        await story.decided()
        assert story.put_aside() == []
        await story.until_stored((BEGIN, len(FIRST)))
        assert story.stored() == [(0, BEGIN), (BEGIN, len(FIRST))]
        await story["broker-3"].fragments_when(JOURNAL, lambda found: len(found) == 3)
        await story.stays(FIRST + NEXT, "broker-3")

    story(etcd, tmp_path, monkeypatch, script)


def test_what_a_former_primary_has_not_stored_yet_is_asked_for(etcd, tmp_path, monkeypatch):
    """It had handed the journal over to a broker that was dead, and is a member again."""
    without_waiting(monkeypatch)

    async def script(story):
        await story.begin("broker-1", "broker-2", replication=2)
        await story.crash_in_the_middle()
        await story.go_on("broker-2", "broker-3")
        await story.cluster.assign(JOURNAL, None, "broker-3")
        persister = story.cluster.brokers["broker-2"].persister
        async with asyncio.timeout(LIMIT_S):
            while not persister.pending:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)
        await story.crash("broker-3")
        await story.start("broker-1")
        await story.cluster.assign(JOURNAL, "broker-1", "broker-2")
        await story.decided()
        response = await story["broker-1"].append(JOURNAL, b"!")
        assert (response.status, response.commit.begin) == (pb.OK, len(FIRST + NEXT))
        await story.stays(FIRST + NEXT + b"!", "broker-1", "broker-2")
        assert (BEGIN, len(FIRST + LOST)) not in story.stored()

    story(etcd, tmp_path, monkeypatch, script)


def test_a_spool_that_nobody_wrote_anew_is_stored(etcd, tmp_path, monkeypatch):
    without_waiting(monkeypatch)

    async def script(story):
        await story.begin("broker-1", replication=1, contents=(FIRST,))
        await story.crash()
        await story.go_on("broker-2", at=0, content=b"")
        await story.start("broker-1")
        await story.decided()
        await story["broker-2"].fragments_when(JOURNAL, len)
        assert story.stored() == [(0, len(FIRST))]
        await story.stays(FIRST, "broker-1", "broker-2", for_s=1)

    story(etcd, tmp_path, monkeypatch, script)


def test_with_replication_1_the_bytes_of_the_other_broker_count(
    etcd, tmp_path, monkeypatch, caplog
):
    without_waiting(monkeypatch)

    async def script(story):
        await story.begin("broker-1", replication=1, contents=(FIRST,))
        await story.crash()
        await story.go_on("broker-2", at=0)
        caplog.clear()
        await story.start("broker-1")
        await story.decided()
        (aside,) = story.put_aside()
        assert aside.read_bytes() == FIRST
        told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert len(told) == 1
        assert f"offsets 0 to {len(FIRST)} of {JOURNAL} in" in told[0]
        await story.stays(NEXT, "broker-1", "broker-2")

    story(etcd, tmp_path, monkeypatch, script)


def test_spools_stay_in_quarantine_while_the_journal_has_no_primary(etcd, tmp_path, monkeypatch):
    """Also over a stop and a crash."""

    async def script(story):
        await story.begin("broker-1", "broker-2", replication=2)
        await story.crash_in_the_middle()
        await story.go_on("broker-2", "broker-3")
        await story.cluster.assign(JOURNAL, None, "broker-3", "broker-2")
        for end in (story.stop, story.crash, None):
            await story.start("broker-1")
            await until(lambda: sum(map(len, story.quarantined.values())) == 1)
            await asyncio.sleep(0.5)
            assert sum(map(len, story.quarantined.values())) == 1
            assert (BEGIN, len(FIRST + LOST)) not in story.stored()
            if end is not None:
                await end("broker-1")
        await story.cluster.assign(JOURNAL, "broker-2", "broker-3")
        await story.decided()
        assert len(story.put_aside()) == 1
        await story.stays(FIRST + NEXT, "broker-1", "broker-2", "broker-3")
        await story.stop("broker-1")
        assert (BEGIN, len(FIRST + LOST)) not in story.stored()

    story(etcd, tmp_path, monkeypatch, script)


def test_a_primary_appends_when_its_own_spools_are_decided(etcd, tmp_path, monkeypatch):
    async def script(story):
        await story.begin("broker-1", "broker-2", replication=2)
        await story.crash_in_the_middle()
        await story.go_on("broker-2", "broker-3")
        ask, may_ask = PeerInventory.fragments_of_brokers, asyncio.Event()

        async def later(*args):
            await may_ask.wait()
            return await ask(*args)

        monkeypatch.setattr(PeerInventory, "fragments_of_brokers", later)
        await story.start("broker-1")
        await story.cluster.assign(JOURNAL, "broker-1", "broker-3")
        early = asyncio.ensure_future(story["broker-1"].append(JOURNAL, b"!"))
        await asyncio.sleep(0.3)
        assert not early.done()
        assert (await story["broker-3"].fragments(JOURNAL))[-1].end == len(FIRST + NEXT)
        may_ask.set()
        async with asyncio.timeout(LIMIT_S):
            response = await early
        assert (response.status, response.commit.begin) == (pb.OK, len(FIRST + NEXT))
        # Others have all of it, so that a slow comparison is not waited for.
        await until(lambda: len(story.put_aside()) == 1)
        await story.stays(FIRST + NEXT + b"!", "broker-3", for_s=1.5)

    story(etcd, tmp_path, monkeypatch, script)


@pytest.mark.parametrize("others_wrote", [False, True])
def test_without_a_history_spools_of_every_journal_are_contested(
    etcd, tmp_path, monkeypatch, others_wrote
):
    if others_wrote:
        without_waiting(monkeypatch)

    async def script(story):
        await story.begin("broker-1", replication=1, contents=(FIRST,))
        await story.crash()
        if others_wrote:
            await story.go_on("broker-2", at=0)

        async def compacted(*_):  # what it answers then; a test of its own makes it so
            return None

        monkeypatch.setattr(etcd_history, "journals_continued_by_others", compacted)
        await story.start("broker-1")
        if not others_wrote:
            await story.cluster.assign(JOURNAL, "broker-1")
        await story.decided()
        assert len(story.put_aside()) == others_wrote
        await story.stays(NEXT if others_wrote else FIRST, "broker-1", for_s=1.5)
        if not others_wrote:  # its route is the last one that Etcd has
            response = await story["broker-1"].append(JOURNAL, b"!")
            assert (response.status, response.commit.begin) == (pb.OK, len(FIRST))

    story(etcd, tmp_path, monkeypatch, script)
