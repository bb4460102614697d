"""Validity of a broker's heads by the history of Etcd."""

from __future__ import annotations

import asyncio

from gazette_sdk.broker.recovery.etcd_history import (
    RevisionFile,
    is_route_without,
    journals_continued_by_others,
)
from gazette_sdk.cluster import etcd as etcd_module
from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.cluster.keyspace import HistoryMark
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import LIMIT_S, HandCluster, crash, journal_spec, without_waiting
from support.etcd import run
from support.spools import until

OURS = pb.ProcessSpec.ID(zone="local", suffix="ours")
OTHER = pb.ProcessSpec.ID(zone="local", suffix="other")


def route(*members):
    return pb.Route(members=members, primary=0)


def test_only_a_synchronized_route_shows_that_others_continued():
    assert not is_route_without(pb.Route(primary=-1), OURS)
    assert not is_route_without(route(OURS, OTHER), OURS)
    assert is_route_without(route(OTHER), OURS)


def test_a_route_of_too_few_members_does_not_count():
    third = pb.ProcessSpec.ID(zone="local", suffix="third")
    assert not is_route_without(route(OTHER), OURS, 2)
    assert is_route_without(route(OTHER, third), OURS, 2)
    assert is_route_without(route(OTHER), OURS, 0)


def test_the_history_ignores_routes_of_too_few_members_unless_the_spec_changed_later(etcd):
    async def scenario():
        async with etcd.client() as client:
            keyspace = BrokerKeySpace("/short")

            async def put_spec(journal):
                value = journal_spec(journal, replication=2).SerializeToString()
                return await client.put(keyspace.item_key(journal), value)

            async def put(journal, *members):
                key = keyspace.assignment_key(journal, "local", "other", 0)
                await client.put(key, route(*members).SerializeToString())

            since = await put_spec("a/short")
            await put_spec("b/whole")
            await put_spec("c/changed-later")
            await put_spec("d/ours-then-short")
            third = pb.ProcessSpec.ID(zone="local", suffix="third")
            await put("a/short", OTHER)
            await put("b/whole", OTHER, third)
            await put("c/changed-later", OTHER)
            await put("d/ours-then-short", OTHER, OURS)
            await put("d/ours-then-short", OTHER)
            last = await put_spec("c/changed-later")
            await keyspace.load(client, last)
            found = await journals_continued_by_others(client, keyspace, OURS, since)
            assert found == {"b/whole", "c/changed-later"}

    run(scenario())


def test_the_history_shows_which_journals_others_continued(etcd):
    async def scenario():
        async with etcd.client() as client:
            keyspace = BrokerKeySpace("/root")

            async def put(journal, member, *members):
                key = keyspace.assignment_key(journal, member.zone, member.suffix, 0)
                value = route(*members).SerializeToString() if members else b""
                return await client.put(key, value)

            first = await put("a/before", OTHER, OTHER)
            since = await put("b/ours", OURS, OURS)
            await put("c/passed", OTHER, OTHER)
            await put("d/caught-up", OTHER, OTHER)
            await put("d/caught-up", OURS, OURS, OTHER)
            await put("e/assigned", OTHER)
            await put("f/left", OURS, OURS, OTHER)
            await put("f/left", OTHER, OTHER)
            await client.put(b"/root/assign/nonsense", b"\xff\xff")
            await client.put(b"/root/assign/g/bad#local#other#0", b"\xff\xff")
            last = await client.put(b"/root/members/mine", b"")
            await keyspace.load(client, last)
            # What comes later is the mirror's business.
            await put("h/later", OTHER, OTHER)

            found = await journals_continued_by_others(client, keyspace, OURS, since)
            assert found == {"c/passed", "f/left"}
            assert await journals_continued_by_others(client, keyspace, OURS, last) == set()
            everything = await journals_continued_by_others(client, keyspace, OURS, first - 1)
            assert everything == {"a/before", "c/passed", "f/left"}

    run(scenario())


def test_without_a_history_no_head_is_valid(etcd):
    async def scenario():
        async with etcd.client() as client:
            keyspace = BrokerKeySpace("/root")
            since = await client.put(b"/root/one", b"")
            last = await client.put(b"/root/two", b"")
            await keyspace.load(client, last)
            request = etcd_module.rpc.CompactionRequest(revision=last, physical=True)
            await client._call(client._kv.Compact, request)
            assert await journals_continued_by_others(client, keyspace, OURS, since - 5) is None

    run(scenario())


def test_the_revision_file_is_of_one_cluster(tmp_path):
    async def scenario():
        revision_file = RevisionFile(tmp_path / "revision")
        assert revision_file.read(7) == 0
        revision_file.write_later(HistoryMark(7, 41))
        revision_file.write_later(HistoryMark(7, 42))
        revision_file.flush()
        revision_file.flush()
        again = RevisionFile(tmp_path / "revision")
        assert again.read(7) == 42
        assert again.read(8) == 0
        (tmp_path / "revision").write_text("nonsense")
        assert again.read(7) == 0

    run(scenario())


def test_a_revision_file_is_written_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("gazette_sdk.broker.recovery.etcd_history.WRITE_DELAY_S", 0.01)

    async def scenario():
        revision_file = RevisionFile(tmp_path / "revision")
        revision_file.write_later(HistoryMark(7, 41))
        await until(lambda: revision_file.read(7) == 41)

    run(scenario())


def test_a_journal_which_others_went_on_with_is_not_continued_at_the_old_head(
    etcd, tmp_path, monkeypatch
):
    without_waiting(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            one = await cluster.start("broker-1")
            await one.apply(journal_spec("a/moved"), journal_spec("b/kept"))
            for journal in ("a/moved", "b/kept"):
                await cluster.assign(journal, "broker-1")
                await one.append(journal, b"before")
            await cluster.brokers.pop("broker-1").stop()

            # While it is away another broker serves one of its journals, and leaves.
            other = await cluster.start("broker-2")
            await cluster.assign("a/moved", "broker-2")
            assert (await other.append("a/moved")).status == pb.OK

            one = await cluster.start("broker-1")
            await cluster.assign("b/kept", "broker-1")
            assert (await one.append("b/kept", b"!")).commit.begin == 6
            broker = cluster.brokers["broker-1"]
            revision = broker.keyspace.item("a/moved").create_revision
            cluster_id = broker.keyspace.header.cluster_id
            assert (
                broker._spools.head("a/moved", create_revision=revision, cluster_id=cluster_id)
                is None
            )

    run(scenario())


def test_a_member_that_starts_before_the_others_writes_no_route(etcd, tmp_path):
    """All are killed, and one that has nothing of the journal is there first."""

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            for number in (1, 2, 3):
                client = await cluster.start(f"broker-{number}")
            await client.apply(journal_spec("a/journal", replication=2))
            await cluster.assign("a/journal", "broker-1", "broker-2")
            assert (await client.append("a/journal", b"before")).status == pb.OK
            for number in (1, 2, 3):
                await crash(cluster.brokers.pop(f"broker-{number}"))

            client = await cluster.start("broker-3")
            await cluster.assign("a/journal", "broker-3")
            status = (await client.append("a/journal", b"x")).status
            assert status == pb.INSUFFICIENT_JOURNAL_BROKERS
            keyspace = cluster.brokers["broker-3"].keyspace
            assert [each.raw for each in keyspace.assignments("a/journal")] == [b""]

            await cluster.start("broker-1")
            await cluster.start("broker-2")
            await cluster.assign("a/journal", "broker-3", "broker-1")
            response = await client.append("a/journal", b"!")
            assert (response.status, response.commit.begin) == (pb.OK, len(b"before"))
            assert await client.read("a/journal", 6) == b"!"

    run(scenario())


def test_a_head_is_forgotten_while_the_broker_lives_too(etcd, tmp_path, monkeypatch):
    without_waiting(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            one = await cluster.start("broker-1")
            await cluster.start("broker-2")
            await one.apply(journal_spec("a/moved"))
            await cluster.assign("a/moved", "broker-1")
            await one.append("a/moved", b"before")
            broker = cluster.brokers["broker-1"]
            await cluster.assign("a/moved")
            await broker.resolver.shutdowns()
            entry = broker.keyspace.item("a/moved")
            known = {
                "create_revision": entry.create_revision,
                "cluster_id": broker.keyspace.header.cluster_id,
            }
            assert broker._spools.head("a/moved", **known).end == 6
            await cluster.assign("a/moved", "broker-2")
            assert (await one.append("a/moved", b"x")).status == pb.OK
            async with asyncio.timeout(LIMIT_S):
                while broker._spools.head("a/moved", **known) is not None:
                    await broker.keyspace.wait_for_update()

    run(scenario())
