"""Journals whose acknowledged bytes only absent brokers have wait for them, and then go on."""

from __future__ import annotations

import asyncio
import math

import pytest

from gazette_sdk.broker.append import append as append_module
from gazette_sdk.broker.append.preconditions import write_route
from gazette_sdk.broker.fragments import refresh
from gazette_sdk.broker.recovery import custody
from gazette_sdk.broker.recovery.routes import LastRoutes, RecordedRoutes
from gazette_sdk.cluster import etcd as etcd_module
from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from support.brokers import LIMIT_S, HandCluster, crash, journal_spec
from support.etcd import run

JOURNAL = "a/journal"
EVERYTHING = Claims(2**32 - 1, pb.LabelSelector(), math.inf)


def spec(**fields):
    return journal_spec(JOURNAL, stores=["file:///"], refresh_interval_s=1, **fields)


async def killed_holder(cluster, *contents, replication=1):
    """A journal of broker-1 (and broker-2), which are killed; broker-3 and broker-4 live."""
    for number in (1, 2, 3, 4):
        client = await cluster.start(f"broker-{number}")
    await client.apply(spec(replication=replication))
    holders = [f"broker-{number + 1}" for number in range(replication)]
    await cluster.assign(JOURNAL, *holders)
    assert (await client.append(JOURNAL)).status == pb.OK
    for content in contents:
        assert (await client.append(JOURNAL, content)).status == pb.OK
    if len(contents) > 1:  # the second one closed the first one's fragment
        await client.fragments_when(JOURNAL, lambda found: found and found[0].mod_time)
    for holder in holders:
        await crash(cluster.brokers.pop(holder))
    await cluster.assign(JOURNAL, *("broker-3", "broker-4")[:replication])
    return client


async def refused(client, name="local/broker-1", **fields):
    response = await client.append(JOURNAL, b"x", **fields)
    assert response.status == pb.INSUFFICIENT_JOURNAL_BROKERS
    assert f"only brokers that are away have its last bytes: {name}" in response.store_health_error


async def goes_on(client, content, at):
    """Append until it is taken; everything else has to be refused."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            response = await client.append(JOURNAL, content)
            if response.status == pb.OK:
                break
            assert response.status in {
                pb.INSUFFICIENT_JOURNAL_BROKERS,
                pb.NO_JOURNAL_PRIMARY_BROKER,
            }
            await asyncio.sleep(0.02)
    assert response.commit.begin == at


@pytest.mark.parametrize("contents", [(b"before",), (b"first,", b"second"), ()])
def test_the_holder_takes_its_journal_over_when_it_is_back(etcd, tmp_path, contents):
    """With content that is not stored, with stored content, and without any."""

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await killed_holder(cluster, *contents)
            await refused(client)
            whole = b"".join(contents)
            await refused(client, offset=0)
            broker = await cluster.start("broker-1")
            await goes_on(client, b"!", at=len(whole))
            assert await broker.read(JOURNAL) == whole + b"!"
            (entry,) = cluster.brokers["broker-3"].keyspace.assignments(JOURNAL)
            assert (entry.suffix, entry.slot) == ("broker-1", 0)
            assert entry.lease == cluster.brokers["broker-1"].lease

    run(scenario())


def test_another_id_over_the_same_directory_takes_it_over_too(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await killed_holder(cluster, b"before")
            await refused(client)
            await cluster.start("broker-9", spool_dir=tmp_path / "spools-broker-1")
            await goes_on(client, b"!", at=len(b"before"))
            assert await client.read(JOURNAL) == b"before!"

    run(scenario())


def test_another_id_that_is_assigned_by_chance_just_goes_on(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await killed_holder(cluster, b"before")
            await cluster.assign(JOURNAL)
            await cluster.start("broker-9", spool_dir=tmp_path / "spools-broker-1")
            await cluster.assign(JOURNAL, "broker-9")
            await goes_on(client, b"!", at=len(b"before"))
            assert await client.read(JOURNAL) == b"before!"

    run(scenario())


def test_with_replication_2_one_of_the_holders_suffices(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await killed_holder(cluster, b"before", replication=2)
            await refused(client)
            new = await cluster.start("broker-9", spool_dir=tmp_path / "spools-broker-2")
            await goes_on(client, b"!", at=len(b"before"))
            members = cluster.brokers["broker-3"].keyspace.journal_route(JOURNAL).members
            assert [member.suffix for member in members] == ["broker-4", "broker-9"]

            # The other one comes back: its spool is the same, and it changes nothing.
            await cluster.start("broker-1")
            async with asyncio.timeout(LIMIT_S):
                await cluster.brokers["broker-1"]._member.tasks["recovery"]
            members = cluster.brokers["broker-3"].keyspace.journal_route(JOURNAL).members
            assert [member.suffix for member in members] == ["broker-4", "broker-9"]
            assert await new.read(JOURNAL) == b"before!"

    run(scenario())


def test_a_holder_among_the_members_ends_the_wait(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await killed_holder(cluster, b"before", replication=2)
            await refused(client)
            await cluster.start("broker-1")
            await goes_on(client, b"!", at=len(b"before"))

    run(scenario())


def test_the_operator_gives_up_what_is_not_stored(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            first, second = b"stored,", b"only on its disk"
            client = await killed_holder(cluster, first, second)
            await client.fragments_when(JOURNAL, lambda found: found and found[0].mod_time)
            await refused(client)
            response = await client.append(JOURNAL, offset=99)
            assert response.status == pb.WRONG_APPEND_OFFSET
            await refused(client)  # which has not ended the wait
            keyspace = cluster.brokers["broker-3"].keyspace
            assert [each.raw for each in keyspace.assignments(JOURNAL)] == [b""]

            keep = pb.AppendRequest.SUSPEND_KEEP
            response = await client.append(JOURNAL, offset=len(first), suspend=keep)
            assert response.status == pb.OK
            await goes_on(client, b"anew", at=len(first))
            await cluster.start("broker-1")
            async with asyncio.timeout(LIMIT_S):
                await cluster.brokers["broker-1"]._member.tasks["recovery"]
            assert await client.read(JOURNAL) == first + b"anew"

    run(scenario())


def test_a_broker_that_starts_later_knows_from_the_history_what_is_waited_for(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            await killed_holder(cluster, b"before")
            later = await cluster.start("broker-5")
            await cluster.assign(JOURNAL, "broker-5")
            await refused(later)

    run(scenario())


def test_a_journal_that_was_created_again_does_not_wait(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await killed_holder(cluster, b"before")
            await refused(client)
            await cluster.assign(JOURNAL)  # broker-3 would be the first one of the new journal
            await client.delete(JOURNAL)
            await client.apply(spec())
            await cluster.assign(JOURNAL, "broker-4")
            await goes_on(client, b"new", at=0)
            later = await cluster.start("broker-1")
            assert await later.read(JOURNAL) == b"new"

    run(scenario())


def test_a_suspended_journal_does_not_wait(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            for number in (1, 2):
                client = await cluster.start(f"broker-{number}")
            await client.apply(spec())
            await cluster.assign(JOURNAL, "broker-1")
            await client.append(JOURNAL, b"before")
            await client.append(JOURNAL, suspend=pb.AppendRequest.SUSPEND_NOW)
            await crash(cluster.brokers.pop("broker-1"))
            await cluster.assign(JOURNAL, "broker-2")
            response = await client.append(JOURNAL, b"!")
            assert (response.status, response.commit.begin) == (pb.OK, len(b"before"))

    run(scenario())


def test_the_history_is_read_from_where_etcd_compacted_it(etcd):
    async def scenario():
        async with etcd.client() as client:
            keyspace = BrokerKeySpace("/compacted")
            lease = await client.grant(60)

            async def put(journal, *members, lease=0):
                value = pb.Route(members=members, primary=0).SerializeToString()
                key = keyspace.assignment_key(journal, "z", members[0].suffix, 0)
                return await client.put(key, value, lease=lease)

            one, two = (pb.ProcessSpec.ID(zone="z", suffix=name) for name in ("one", "two"))
            for journal in ("a/before", "b/both", "c/later"):
                value = journal_spec(journal).SerializeToString()
                await client.put(keyspace.item_key(journal), value)
            await put("b/both", one, lease=lease)
            compacted_at = await put("a/before", one, lease=lease)
            await put("b/both", two, lease=lease)
            await put("c/later", two, lease=lease)
            await client.revoke(lease)
            last = await client.put(b"/compacted/members/mine", b"")
            await keyspace.load(client, last)
            request = etcd_module.rpc.CompactionRequest(revision=compacted_at, physical=True)
            await client._call(client._kv.Compact, request)

            routes = LastRoutes(keyspace, RecordedRoutes(keyspace, one))
            await routes.load(client)
            assert list(routes.absent_brokers("a/before")) == [one]
            assert list(routes.absent_brokers("b/both")) == [two]
            assert list(routes.absent_brokers("c/later")) == [two]
            assert routes.waiting == {"a/before", "b/both", "c/later"}

            request = etcd_module.rpc.CompactionRequest(revision=last, physical=True)
            await client._call(client._kv.Compact, request)
            routes = LastRoutes(keyspace, RecordedRoutes(keyspace, one))
            await routes.load(client)
            assert routes.waiting == set()

    run(scenario())


def test_a_journal_whose_route_was_withdrawn_goes_on_behind_its_stored_content(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start("broker-1")
            await client.apply(spec())
            await cluster.assign(JOURNAL, "broker-1")
            for content in (b"first,", b"second,"):
                await client.append(JOURNAL, content)
            await cluster.brokers.pop("broker-1").stop()  # it is the only one
            client = await cluster.start("broker-2")
            await cluster.assign(JOURNAL, "broker-2")
            await goes_on(client, b"third", at=len(b"first,second,"))
            assert await client.read(JOURNAL) == b"first,second,third"

            # From now on it is broker-2 that others wait for.
            await cluster.start("broker-3")
            await crash(cluster.brokers.pop("broker-2"))
            client = await cluster.start("broker-1")
            await cluster.assign(JOURNAL, "broker-1")
            await refused(client, "local/broker-2")
            await cluster.start("broker-2")
            await goes_on(client, b"!", at=len(b"first,second,third"))
            assert await client.read(JOURNAL) == b"first,second,third!"

    run(scenario())


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "never"])
def test_a_journal_waits_if_the_store_does_not_list_its_last_content(
    is_late, etcd, tmp_path, monkeypatch
):
    """A listing without it would make others give its offsets again."""
    list_now, listings = refresh._list, []

    def lagging(stores, url, journal):
        listings.append(journal)
        found = list_now(stores, url, journal)
        is_listed = is_stopping and is_late and len(listings) > 3
        return (
            found if is_listed else [each for each in found if each.fragment.end <= len(b"first,")]
        )

    monkeypatch.setattr(refresh, "_list", lagging)
    monkeypatch.setattr(custody, "LISTED_TIMEOUT_S", 10.0 if is_late else 0.5)
    is_stopping = False

    async def scenario():
        nonlocal is_stopping
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start("broker-1")
            await client.apply(spec())
            await cluster.assign(JOURNAL, "broker-1")
            for content in (b"first,", b"second,"):
                await client.append(JOURNAL, content)
            listings.clear()
            is_stopping = True
            await cluster.brokers.pop("broker-1").stop()
            client = await cluster.start("broker-2")
            await cluster.assign(JOURNAL, "broker-2")
            if not is_late:
                await refused(client)
                await cluster.start("broker-1")
            await goes_on(client, b"third", at=len(b"first,second,"))

    run(scenario())


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "never"])
def test_the_next_broker_waits_for_the_listing_of_what_the_last_one_had_stored(
    is_late, etcd, tmp_path, monkeypatch
):
    """A store may show it an older listing than the broker that left has seen."""
    list_now, listings = refresh._list, []

    def lagging(stores, url, journal):
        found = list_now(stores, url, journal)
        if not has_left or (is_late and len(listings) > 2):
            return found
        listings.append(journal)
        return [each for each in found if each.fragment.end <= len(b"first,")]

    monkeypatch.setattr(refresh, "_list", lagging)
    monkeypatch.setattr(append_module, "WAIT_MAX_S", 20.0 if is_late else 0.5)
    has_left = False

    async def scenario():
        nonlocal has_left
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start("broker-1")
            await client.apply(spec())
            await cluster.assign(JOURNAL, "broker-1")
            for content in (b"first,", b"second,"):
                await client.append(JOURNAL, content)
            await cluster.brokers.pop("broker-1").stop()
            has_left = True
            client = await cluster.start("broker-2")
            await cluster.assign(JOURNAL, "broker-2")
            if is_late:
                await goes_on(client, b"third", at=len(b"first,second,"))
                return
            answers = await client.append_until(
                JOURNAL, b"no", pb.INSUFFICIENT_JOURNAL_BROKERS, limit_s=LIMIT_S
            )
            text = answers[-1].store_health_error
            assert "list its content up to 6, and its last broker had stored it up to 13" in text
            assert "gazctl journals reset-head" in text
            assert (await client.append(JOURNAL, b"no", offset=3)).status == pb.WRONG_APPEND_OFFSET
            answer = await client.append(JOURNAL, b"given up", offset=6)
            assert (answer.status, answer.commit.begin) == (pb.OK, 6)
            await goes_on(client, b"!", at=len(b"first,given up"))

    run(scenario())


def test_a_second_assignment_by_the_allocator_is_deleted(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await killed_holder(cluster, b"before")
            broker = await cluster.start("broker-1")
            await goes_on(client, b"!", at=len(b"before"))
            keyspace = cluster.brokers["broker-1"].keyspace
            second = keyspace.assignment_key(JOURNAL, "local", "broker-1", 1)
            await cluster.etcd.put(second, b"", lease=cluster.brokers["broker-1"].lease)
            assert (await broker.append(JOURNAL, b"!")).status == pb.OK
            async with asyncio.timeout(LIMIT_S):
                while (await cluster.etcd.range(second)).entries:
                    await keyspace.wait_for_update()
            await goes_on(client, b"!", at=len(b"before!!"))

    run(scenario())


def test_a_route_is_written_only_once(etcd, tmp_path):
    """The value that a takeover writes is the whole route of a journal of one member."""

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await killed_holder(cluster, b"before")
            broker = await cluster.start("broker-1")
            await goes_on(client, b"!", at=len(b"before"))
            resolution = await cluster.brokers["broker-1"].resolver.resolve(
                JOURNAL, EVERYTHING, may_proxy=False, require_primary=True
            )
            assert await write_route(cluster.etcd, resolution, lambda *_: ()) is None
            assert await broker.read(JOURNAL, 6) == b"!"

    run(scenario())
