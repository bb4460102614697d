"""A broker over an Etcd that was restored from an older backup: a real Etcd, and its own tools."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.broker.process import Broker
from gazette_sdk.broker.recovery import etcd_history
from gazette_sdk.broker.recovery.etcd_history import RevisionFile
from gazette_sdk.broker.recovery.quarantine import Quarantine
from gazette_sdk.broker.recovery.routes import RecordedRoutes, RouteRecorder
from gazette_sdk.broker.spool.directory import SpoolDirectory, accept_etcd
from gazette_sdk.cluster import etcd as etcd_module
from gazette_sdk.cluster.etcd_server import EtcdServer, find_etcd
from gazette_sdk.cluster.keyspace import Entry, HistoryMark, KeySpace
from gazette_sdk.errors import EtcdError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing.cluster import EtcdFixture
from support.brokers import LIMIT_S, Client, HandCluster, a_broker, config_for, crash, journal_spec
from support.etcd import run
from support.spools import until

SAME, OTHER = "same cluster id", "other cluster id"
COMPACTED = "same cluster id, more revisions than before, and no history"


class RestorableEtcd:
    """An Etcd with a backup."""

    def __init__(self, directory: Path) -> None:
        self.server = EtcdServer(directory / "etcd", sync_writes=False)
        self._snapshot = directory / "snapshot.db"

    async def save(self) -> None:
        await _tool("etcdctl", "--endpoints", self.server.endpoint, "snapshot", "save",
                    self._snapshot)  # fmt: skip

    async def restore(self, which: str = SAME) -> None:
        """End the server, and start one over the backup, at the same port."""
        await asyncio.to_thread(self.server.kill)
        data = self.server.data_dir / "data"
        await asyncio.to_thread(shutil.rmtree, data)
        token = "another" if which == OTHER else "etcd-cluster"
        peer = "unix://peer:0"
        await _tool(
            "etcdutl", "snapshot", "restore", self._snapshot, "--data-dir", data,
            "--name", "embedded", "--initial-cluster", f"embedded={peer}",
            "--initial-advertise-peer-urls", peer, "--initial-cluster-token", token,
        )  # fmt: skip
        await self.server.start()
        if which == COMPACTED:
            async with EtcdFixture(self.server).client() as client:
                for number in range(20):
                    last = await client.put(b"/elsewhere", b"%d" % number)
                compaction = etcd_module.rpc.CompactionRequest(revision=last, physical=True)
                await client._call(client._kv.Compact, compaction)


async def _tool(name: str, *arguments: object) -> None:
    path = find_etcd().with_name(name)
    command = [str(path), *map(str, arguments)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)


@pytest.fixture
def restorable(tmp_path, monkeypatch):
    monkeypatch.setattr(etcd_history, "POLL_S", 0.05)
    made = RestorableEtcd(tmp_path)
    made.server.start_blocking()
    yield made
    made.server.stop_blocking()


SPOOLS = [b"acknowledged", b"and after", b"before "]
"""Content of the spools that the broker has: no store has any."""


@contextlib.asynccontextmanager
async def crashed_broker(restorable, tmp_path, *, has_seen_all=True):
    """A broker that acknowledged bytes before and after the backup, and was killed then.

    Its directory has seen what Etcd had then, or in the end what it had at the backup: the last
    second is not written.
    """
    fixture = EtcdFixture(restorable.server)
    broker = Broker(config_for(fixture, tmp_path))
    await broker.start()
    client = Client(InProcessTransport(broker.service))
    await client.apply(journal_spec("a/known"))
    await client.append_when_ready("a/known", b"before ")
    await restorable.save()
    broker._custody.flush()
    revision = tmp_path / "spools-broker-1" / "revision"
    seen = revision.read_bytes()
    await client.append_when_ready("a/known", b"and after")
    await client.apply(journal_spec("b/new"))
    await client.append_when_ready("b/new", b"acknowledged")
    broker._custody.flush()
    await crash(broker)
    if not has_seen_all:
        revision.write_bytes(seen)
    yield fixture


def contents(tmp_path):
    found = []
    for path in (tmp_path / "spools-broker-1" / "journals").glob("*/*.content"):
        with contextlib.suppress(FileNotFoundError):  # the broker has just removed it
            found.append(path.read_bytes())
    return sorted(found)


@pytest.mark.parametrize("which", [SAME, OTHER, COMPACTED])
def test_acknowledged_bytes_outlive_an_etcd_that_goes_back(which, restorable, tmp_path, caplog):

    async def scenario():
        async with crashed_broker(restorable, tmp_path) as fixture:
            assert contents(tmp_path) == SPOOLS
            await restorable.restore(which)

            async with a_broker(fixture, tmp_path) as (broker, client):
                assert set(SPOOLS) <= set(contents(tmp_path))
                text = caplog.text
                assert "stay in" in text
                assert f"gazette spools accept {tmp_path}/spools-broker-1" in text
                if which != COMPACTED:
                    # What Etcd knows is served when an operator has accepted it.
                    status = pb.INSUFFICIENT_JOURNAL_BROKERS
                    refused = await client.append_until("a/known", b"!", status)
                    assert "gazette spools accept" in refused[-1].store_health_error

                # What it does not know comes back with its spec.
                await client.apply(journal_spec("b/new"))
                answer = (await client.append_until("b/new", b"!", pb.OK))[-1]
                assert answer.commit.begin == len(b"acknowledged")
                assert await client.read("b/new") == b"acknowledged!"
                if which != COMPACTED:
                    assert set(SPOOLS) <= set(contents(tmp_path))
                    assert accept_etcd(tmp_path / "spools-broker-1") == 1
                answer = (await client.append_until("a/known", b"!", pb.OK))[-1]
                assert answer.commit.begin == len(b"before and after")
                assert await client.read("a/known") == b"before and after!"
                assert not broker._spools.withheld()
                assert not broker._spools.take_acceptance()

            async with a_broker(fixture, tmp_path) as (broker, client):
                assert not broker._spools.withheld()
                for journal in ("a/known", "b/new"):
                    await client.append_until(journal, b"?", pb.OK)
                assert await client.read("a/known") == b"before and after!?"
                assert await client.read("b/new") == b"acknowledged!?"

    caplog.set_level(logging.ERROR, "gazette_sdk.broker.recovery.etcd_history")
    run(scenario(), timeout_s=90)


def test_an_etcd_that_went_back_is_recognized_when_it_has_more_revisions_again(
    restorable, tmp_path
):
    async def scenario():
        async with crashed_broker(restorable, tmp_path) as fixture:
            await restorable.restore()
            async with fixture.client() as client:
                for number in range(100):
                    await client.put(b"/elsewhere", b"%d" % number)
            for _ in range(2):  # also after a start that decided nothing
                async with a_broker(fixture, tmp_path) as (broker, _):
                    names = {each.journal for each in broker._spools.withheld()}
                    assert names == {"a/known", "b/new"}
            assert contents(tmp_path) == SPOOLS

    run(scenario(), timeout_s=60)


def test_bytes_of_a_journal_that_was_created_in_the_last_second_outlive_an_older_etcd(
    restorable, tmp_path
):
    """Etcd has all that the directory has seen, so it counts as the same."""

    async def scenario():
        async with crashed_broker(restorable, tmp_path, has_seen_all=False) as fixture:
            await restorable.restore()
            async with a_broker(fixture, tmp_path) as (broker, client):
                assert {each.journal for each in broker._spools.withheld()} == {"b/new"}
                await client.append_until("a/known", b"!", pb.OK)
                assert await client.read("a/known") == b"before and after!"
                await client.apply(journal_spec("b/new"))
                await client.append_until("b/new", b"!", pb.OK)
                assert await client.read("b/new") == b"acknowledged!"

    run(scenario(), timeout_s=90)


def test_no_replica_begins_without_bytes_that_are_just_being_released(
    restorable, tmp_path, monkeypatch
):
    """The disk is done with them, and the loop, which is busy, hears of it later."""
    in_background, is_assigned = SpoolDirectory.in_background, asyncio.Event()
    delayed = []

    async def heard_late(directory, work):
        was_withheld = len(directory._withheld)
        found = await in_background(directory, work)
        if isinstance(found, list) and was_withheld:
            delayed.append(found)
            async with asyncio.timeout(LIMIT_S):
                await is_assigned.wait()
            await asyncio.sleep(0.1)  # the replica that could begin
        return found

    monkeypatch.setattr(SpoolDirectory, "in_background", heard_late)

    async def scenario():
        async with crashed_broker(restorable, tmp_path, has_seen_all=False) as fixture:
            await restorable.restore()
            async with a_broker(fixture, tmp_path) as (broker, client):
                await client.apply(journal_spec("b/new"))
                await until(lambda: delayed and broker.keyspace.assignments("b/new"))
                is_assigned.set()
                answer = (await client.append_until("b/new", b"!", pb.OK))[-1]
                assert answer.commit.begin == len(b"acknowledged")
                assert await client.read("b/new") == b"acknowledged!"

    run(scenario(), timeout_s=90)


def test_a_journal_that_was_deleted_meanwhile_leaves_no_spools(restorable, tmp_path):
    async def scenario():
        async with crashed_broker(restorable, tmp_path) as fixture:
            async with fixture.client() as client:
                for kv in (await client.range(b"/", b"0")).entries:
                    if kv.key.endswith(b"/b/new"):
                        await client.delete(kv.key)
            async with a_broker(fixture, tmp_path) as (broker, _):
                assert not broker._spools.withheld()
                await until(lambda: b"acknowledged" not in contents(tmp_path))

    run(scenario(), timeout_s=60)


@pytest.mark.parametrize("has_watched", [True, False])
def test_a_mirror_does_not_go_on_over_an_etcd_that_went_back(restorable, has_watched):
    async def scenario():
        fixture = EtcdFixture(restorable.server)
        async with fixture.client() as client:
            await client.put(b"/root/one", b"1")
            await restorable.save()
            last = await client.put(b"/root/two", b"2")
            mirror = KeySpace("/root", lambda kv: Entry.of(kv, kv.value))
            await mirror.load(client, last)
            if has_watched:
                watch = asyncio.create_task(mirror.watch(client))
                later = await client.put(b"/root/three", b"3")
                await mirror.wait_for_revision(later)  # the mirror has its watch
            await restorable.restore()
            if not has_watched:
                watch = asyncio.create_task(mirror.watch(client))
            with pytest.raises(EtcdError, match="restored from an older backup"):
                async with asyncio.timeout(LIMIT_S):
                    await watch

    run(scenario(), timeout_s=60)


def test_a_journal_that_is_created_again_at_another_broker_goes_on_at_the_one_with_its_bytes(
    etcd, tmp_path, monkeypatch
):
    monkeypatch.setattr(etcd_history, "POLL_S", 0.05)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            await begun_journal(cluster, b"acknowledged")
            keyspace = cluster.brokers["broker-1"].keyspace
            await crash(cluster.brokers.pop("broker-1"))
            await lose_journal(cluster, keyspace, "b/new", "broker-1")

            await cluster.start("broker-1")
            other = await cluster.start("broker-2")
            await other.apply(journal_spec("b/new"))
            await cluster.assign("b/new", "broker-2")
            answer = (await other.append_until("b/new", b"!", pb.OK, limit_s=LIMIT_S))[-1]
            assert answer.commit.begin == len(b"acknowledged")
            assert await other.read("b/new") == b"acknowledged!"

    run(scenario())


@pytest.mark.parametrize("first", ["broker-1", "broker-2"])
def test_a_journal_that_is_created_again_never_goes_on_at_an_older_head(
    etcd, tmp_path, monkeypatch, first
):
    """Broker 2 was away while others continued, and is the one that gets the journal."""
    monkeypatch.setattr(etcd_history, "POLL_S", 0.05)
    second = {"broker-1": "broker-2", "broker-2": "broker-1"}[first]

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            keyspace = await continued_journal(cluster)
            await lose_journal(cluster, keyspace, "b/new", "broker-1", "broker-2")

            await cluster.start(first)
            await cluster.start(second)
            client = Client(InProcessTransport(cluster.brokers["broker-2"].service))
            await client.apply(journal_spec("b/new"))
            await cluster.assign("b/new", "broker-2")
            answer = (await client.append_until("b/new", b"!", pb.OK, limit_s=LIMIT_S))[-1]
            assert answer.commit.begin == len(b"old and newer")
            assert await client.read("b/new") == b"old and newer!"

    run(scenario())


def test_the_greatest_claims_count_though_a_broker_hears_of_them_after_the_journal(etcd, tmp_path):
    """They are older than the journal, and the watch of claims may be late."""

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start("broker-1")
            await client.apply(journal_spec("b/new"))
            broker = cluster.brokers["broker-1"]

            async def claim(suffix, end):
                await RecordedRoutes(broker.keyspace, local(suffix)).claim(
                    cluster.etcd, {"b/new": end}, {}
                )

            def claimed_by():
                last = broker._custody.last_routes.last("b/new")
                return [each.suffix for each in last.route.members] if last else []

            # As if the journal were newer than all claims.
            await claim("broker-2", 3)
            await until(lambda: claimed_by() == ["broker-2"])
            known = broker._custody.last_routes._known
            known["b/new"] = known["b/new"]._replace(revision=1 << 40)
            await claim("broker-3", 13)
            await until(lambda: claimed_by() == ["broker-3"])
            await claim("broker-4", 5)
            await claim("broker-5", 13)
            await until(lambda: claimed_by() == ["broker-3", "broker-5"])

    run(scenario())


def test_a_claimant_that_hears_late_of_greater_claims_stores_nothing_before(
    etcd, tmp_path, monkeypatch
):
    """Broker 2 has another end of the journal, a shorter one, and its watch is late."""
    monkeypatch.setattr(etcd_history, "POLL_S", 0.05)
    run_recorder, decide = RouteRecorder.run, Quarantine._decide
    hears, decisions = asyncio.Event(), []

    async def run_late(recorder):
        if recorder._records._local_id.suffix == "broker-2":
            await hears.wait()
        await run_recorder(recorder)

    async def decide_and_note(quarantine, key):
        try:
            await decide(quarantine, key)
        finally:
            if quarantine._directory.root.name == "spools-broker-2":
                decisions.append(key)

    spec = journal_spec("b/new", stores=["file:///"], refresh_interval_s=1)
    store = tmp_path / "store"
    store.mkdir()

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await begun_journal(cluster, b"old", spec, file_root=store)
            keyspace = cluster.brokers["broker-1"].keyspace
            shutil.copytree(tmp_path / "spools-broker-1", tmp_path / "spools-broker-2")
            await client.append_when_ready("b/new", b" and newer")
            cluster.brokers["broker-1"]._custody.flush()
            await crash(cluster.brokers.pop("broker-1"))
            client = await cluster.start("broker-2", file_root=store)
            await cluster.assign("b/new", "broker-2")
            await client.append_when_ready("b/new", b" or so")
            cluster.brokers["broker-2"]._custody.flush()
            await crash(cluster.brokers.pop("broker-2"))
            await lose_journal(cluster, keyspace, "b/new", "broker-1", "broker-2")

            monkeypatch.setattr(RouteRecorder, "run", run_late)
            monkeypatch.setattr(Quarantine, "_decide", decide_and_note)
            client = await cluster.start("broker-2", file_root=store)
            await cluster.start("broker-1", file_root=store)
            await client.apply(spec)
            await cluster.assign("b/new", "broker-2")
            second = cluster.brokers["broker-2"]
            await until(
                lambda: (
                    len(decisions) > 2 or (decisions and not second._custody._quarantine._entries)
                )
            )
            hears.set()
            answer = (await client.append_until("b/new", b"!", pb.OK, limit_s=LIMIT_S))[-1]
            assert answer.commit.begin == len(b"old and newer")
            assert await client.read("b/new") == b"old and newer!"
        stored = [path.read_bytes() for path in store.rglob("b/new/*")]
        assert stored
        assert not [content for content in stored if b"or so" in content]

    run(scenario())


@pytest.mark.parametrize("first", ["broker-1", "broker-2"])
def test_a_journal_of_an_older_etcd_goes_on_at_the_broker_that_continued_it_since(
    etcd, tmp_path, monkeypatch, first
):
    """Etcd has only the route of broker 2, which had not begun the journal's end."""
    monkeypatch.setattr(etcd_history, "POLL_S", 0.05)
    second = {"broker-1": "broker-2", "broker-2": "broker-1"}[first]

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            keyspace = await continued_journal(cluster)
            await see_more(cluster, keyspace, "broker-1", "broker-2")

            await cluster.start(first)
            await cluster.start(second)
            client = Client(InProcessTransport(cluster.brokers["broker-2"].service))
            await cluster.assign("b/new", "broker-2")
            status = pb.INSUFFICIENT_JOURNAL_BROKERS
            refused = await client.append_until("b/new", b"!", status)
            assert "gazette spools accept" in refused[-1].store_health_error
            for suffix in ("broker-2", "broker-1"):
                assert accept_etcd(tmp_path / f"spools-{suffix}") == 1
            answer = (await client.append_until("b/new", b"!", pb.OK, limit_s=LIMIT_S))[-1]
            assert answer.commit.begin == len(b"old and newer")
            assert await client.read("b/new") == b"old and newer!"

    run(scenario())


def test_a_broker_without_bytes_of_a_journal_asks_for_acceptance_of_an_older_etcd(
    etcd, tmp_path, monkeypatch
):
    """Etcd has the journal, and not the route of broker 1, which is away."""
    monkeypatch.setattr(etcd_history, "POLL_S", 0.05)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start("broker-2")
            await client.apply(journal_spec("b/new"))
            keyspace = cluster.brokers["broker-2"].keyspace
            await until(lambda: keyspace.item("b/new") is not None)
            await crash(cluster.brokers.pop("broker-2"))
            await see_more(cluster, keyspace, "broker-2")

            client = await cluster.start("broker-2")
            await cluster.assign("b/new", "broker-2")
            status = pb.INSUFFICIENT_JOURNAL_BROKERS
            refused = await client.append_until("b/new", b"!", status)
            assert "gazette spools accept" in refused[-1].store_health_error
            assert accept_etcd(tmp_path / "spools-broker-2") == 0
            await client.append_until("b/new", b"!", pb.OK, limit_s=LIMIT_S)
            assert await client.read("b/new") == b"!"
            assert accept_etcd(tmp_path / "spools-broker-2") is None

    run(scenario())


def test_a_broker_that_comes_late_claims_no_journal_that_others_have_continued(
    etcd, tmp_path, monkeypatch
):
    """Broker 2 has more bytes than broker 1 had, and the operator did not wait for it."""
    monkeypatch.setattr(etcd_history, "POLL_S", 0.05)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await begun_journal(cluster, b"old")
            keyspace = cluster.brokers["broker-1"].keyspace
            await client.append_when_ready("b/new", b" and newer")
            spools = tmp_path / "spools-broker-1"
            await crash(cluster.brokers.pop("broker-1"))
            shutil.copytree(spools, tmp_path / "spools-broker-2")
            await see_more(cluster, keyspace, "broker-1", "broker-2")

            client = await cluster.start("broker-1")
            await cluster.member("broker-3")  # so that routes are recorded
            await cluster.assign("b/new", "broker-1")
            assert accept_etcd(spools) == 1
            await client.append_until("b/new", b"!", pb.OK, limit_s=LIMIT_S)
            late = cluster.brokers["broker-1"]
            await cluster.start("broker-2")
            records = cluster.brokers["broker-2"]._custody._records
            assert records.history.id == late._custody._records.history.id
            claims = records.claims("b/new")
            assert claims is None or local("broker-2") not in claims.value.route.members
            await client.append_until("b/new", b"!", pb.OK, limit_s=LIMIT_S)
            assert await client.read("b/new") == b"old and newer!!"

    run(scenario())


async def begun_journal(cluster, content, spec=None, **changes):
    """Return a client of broker 1, which has a new journal with this content."""
    client = await cluster.start("broker-1", **changes)
    await client.apply(spec or journal_spec("b/new"))
    await cluster.assign("b/new", "broker-1")
    await client.append_when_ready("b/new", content)
    return client


async def continued_journal(cluster):
    """Return the mirror of broker 1, which has crashed: it had more of a journal than broker 2."""
    client = await begun_journal(cluster, b"old")
    keyspace = cluster.brokers["broker-1"].keyspace
    shutil.copytree(cluster.directory / "spools-broker-1", cluster.directory / "spools-broker-2")
    await client.append_when_ready("b/new", b" and newer")
    await crash(cluster.brokers.pop("broker-1"))
    return keyspace


async def lose_journal(cluster, keyspace, journal, *suffixes):
    """Let Etcd be as one that was restored from a backup of before a journal."""
    await cluster.etcd.delete(keyspace.item_key(journal))
    await see_more(cluster, keyspace, *suffixes)


async def see_more(cluster, keyspace, *suffixes):
    """Let brokers have seen more of Etcd than it has: it was restored from a backup."""
    for suffix in suffixes:
        seen = RevisionFile(cluster.directory / f"spools-{suffix}" / "revision", local(suffix))
        seen.write_later(HistoryMark(keyspace.header.cluster_id, 1 << 40))
        seen.flush()


def local(suffix):
    return pb.ProcessSpec.ID(zone="local", suffix=suffix)
