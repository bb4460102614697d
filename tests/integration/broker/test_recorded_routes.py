"""Last routes of journals, recorded in Etcd beside the cluster: who has a journal's last bytes."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.cluster import etcd as etcd_module
from gazette_sdk.cluster.etcd_messages import prefix_end
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import LIMIT_S, HandCluster, crash, journal_spec
from support.etcd import run

JOURNAL = "a/journal"
RECORDS = b"/gazette_sdk/routes/"


def spec(**fields):
    return journal_spec(JOURNAL, stores=["file:///"], refresh_interval_s=1, **fields)


async def records(cluster):
    """Return the recorded members of each journal."""
    found = await cluster.etcd.range(RECORDS, prefix_end(RECORDS))
    return {
        kv.key.decode().rpartition("/routes/gazette/cluster/")[2].partition("#")[0]: [
            member.suffix for member in pb.Header.FromString(kv.value).route.members
        ]
        for kv in found.entries
    }


async def recorded(cluster, expected):
    """Return when these are the records."""
    async with asyncio.timeout(LIMIT_S):
        while await records(cluster) != expected:  # noqa: ASYNC110 - keys of another prefix
            await asyncio.sleep(0.05)


async def compact(cluster):
    """Let Etcd forget all history."""
    revision = await cluster.etcd.put(b"/elsewhere", b"")
    request = etcd_module.rpc.CompactionRequest(revision=revision, physical=True)
    await cluster.etcd._call(cluster.etcd._kv.Compact, request)


async def goes_on(client, content, at):
    """Append until it is taken."""
    async with asyncio.timeout(LIMIT_S):
        response = await client.append(JOURNAL, content)
        while response.status != pb.OK:
            await asyncio.sleep(0.02)
            response = await client.append(JOURNAL, content)
    assert response.commit.begin == at


def test_a_lone_broker_records_nothing_until_another_one_joins(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start("broker-1")
            await client.apply(spec())
            await cluster.assign(JOURNAL, "broker-1")
            assert (await client.append(JOURNAL)).status == pb.OK
            assert await records(cluster) == {}
            await cluster.start("broker-2")
            await recorded(cluster, {JOURNAL: ["broker-1"]})

            await client.apply(spec(replication=2), expect=-1)
            await cluster.assign(JOURNAL, "broker-1", "broker-2")
            await goes_on(client, b"one", at=0)
            # With the transaction that writes the route.
            assert await records(cluster) == {JOURNAL: ["broker-1", "broker-2"]}
            await client.delete(JOURNAL)
            await recorded(cluster, {})

    run(scenario())


def test_a_route_that_another_implementation_wrote_is_recorded(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start("broker-1")
            await cluster.member("broker-2")
            await client.apply(spec())
            await cluster.assign(JOURNAL, "broker-2")
            other = pb.ProcessSpec.ID(zone="local", suffix="broker-2")
            key = cluster.brokers["broker-1"].keyspace.assignment_key(
                JOURNAL, "local", "broker-2", 0
            )
            await cluster.etcd.put(key, pb.Route(members=[other], primary=0).SerializeToString())
            await recorded(cluster, {JOURNAL: ["broker-2"]})

    run(scenario())


@pytest.mark.parametrize("others_are_there", [True, False])
@pytest.mark.parametrize("contents", [(b"before",), (b"first,", b"second"), ()])
def test_without_a_history_the_holder_goes_on_by_the_record(
    etcd, tmp_path, contents, others_are_there
):
    """With content that is not stored, with stored content, and without any."""

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            second = await cluster.start("broker-2")
            client = await cluster.start("broker-1")
            await client.apply(spec())
            await cluster.assign(JOURNAL, "broker-1")
            assert (await client.append(JOURNAL)).status == pb.OK
            for content in contents:
                assert (await client.append(JOURNAL, content)).status == pb.OK
            if len(contents) > 1:  # the second one closed the first one's fragment
                await client.fragments_when(JOURNAL, lambda found: found and found[0].mod_time)
            await crash(cluster.brokers.pop("broker-1"))
            if not others_are_there:
                await crash(cluster.brokers.pop("broker-2"))
            await compact(cluster)
            if not others_are_there:
                second = await cluster.start("broker-2")
            await cluster.assign(JOURNAL, "broker-2")
            response = await second.append(JOURNAL, b"x")
            assert response.status == pb.INSUFFICIENT_JOURNAL_BROKERS
            assert "have its last bytes: local/broker-1" in response.store_health_error
            broker = await cluster.start("broker-1")
            whole = b"".join(contents)
            await goes_on(second, b"!", at=len(whole))
            assert await broker.read(JOURNAL) == whole + b"!"

    run(scenario())


def test_without_a_history_a_head_is_not_used_where_the_store_has_more(etcd, tmp_path):
    """Another implementation's broker may have gone on while none of ours was there."""

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            await cluster.start("broker-2")
            client = await cluster.start("broker-1")
            await client.apply(spec())
            await cluster.assign(JOURNAL, "broker-1")
            for content in (b"one,", b"two,"):
                assert (await client.append(JOURNAL, content)).status == pb.OK
            await client.fragments_when(JOURNAL, lambda found: found and found[0].mod_time)
            for name in ("broker-1", "broker-2"):
                await crash(cluster.brokers.pop(name))
            (stored,) = tmp_path.rglob("0000000000000000-0000000000000004-*")
            later = "0000000000000008-000000000000000c-da39a3ee5e6b4b0d3255bfef95601890afd80709"
            stored.with_name(later + stored.suffix).write_bytes(b"else")
            await compact(cluster)
            client = await cluster.start("broker-1")
            await cluster.assign(JOURNAL, "broker-1")
            response = await client.append(JOURNAL, b"x")
            async with asyncio.timeout(LIMIT_S):
                while response.status != pb.INDEX_HAS_GREATER_OFFSET:
                    assert response.status != pb.OK
                    response = await client.append(JOURNAL, b"x")

    run(scenario())
