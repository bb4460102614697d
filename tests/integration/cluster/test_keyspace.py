from __future__ import annotations

import asyncio
import contextlib
import logging
from urllib.parse import urlsplit

import pytest

from gazette_sdk.cluster import etcd as etcd_module
from gazette_sdk.cluster import keyspace as module
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Delete, Put
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.cluster.keyspace import Entry, KeySpace
from gazette_sdk.errors import EtcdCompactedError, EtcdError, EtcdUnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing.tcp_proxy import TcpProxy
from support.etcd import run, within
from support.spools import until
from support.vectors import group


def decode(kv):
    return Entry.of(kv, int(kv.value))


def values(keyspace):
    return {entry.key.decode(): entry.value for entry in keyspace.entries}


@contextlib.asynccontextmanager
async def following(keyspace, client, delay_s=0.0):
    watch = asyncio.create_task(keyspace.watch(client, delay_s=delay_s))
    try:
        yield watch
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


def test_load_and_watch(etcd):
    vector = group("allocator", "keyspace")["load_and_watch"]

    async def scenario():
        async with etcd.client() as client:
            for key, value in vector["puts_before"]:
                revision = await client.put(key.encode(), value.encode())
            await client.put(*(part.encode() for part in vector["put_after_that_revision"]))

            keyspace, calls = KeySpace(vector["root"], decode), []
            keyspace.observers.append(lambda: calls.append(keyspace.revision))
            await keyspace.load(client, revision)
            assert values(keyspace) == vector["after_load"]
            assert keyspace.revision == revision
            assert calls == [revision]

            async with following(keyspace, client) as watch:
                await keyspace.wait_for_revision(revision + 1)
                for verb, key, *value in vector["then"]:
                    change = (
                        Put(key.encode(), value[0].encode())
                        if verb == "put"
                        else Delete(key.encode())
                    )
                    await keyspace.wait_for_revision((await client.txn([], [change])).revision)
            assert values(keyspace) == vector["final"]
            assert calls == list(range(revision, keyspace.revision + 1))
            assert watch.cancelled()
            with pytest.raises(EtcdUnavailableError, match=r"the watch of .* has ended"):
                await keyspace.wait_for_update()

    run(scenario())


def test_a_load_without_a_revision_takes_that_of_the_store_and_reads_all_pages(etcd, monkeypatch):
    monkeypatch.setattr(module, "PAGE_ENTRIES", 3)

    async def scenario():
        async with etcd.client() as client:
            for number in range(8):
                await client.put(b"/root/%d" % number, b"%d" % number)
            last = await client.put(b"/elsewhere", b"")
            keyspace = KeySpace("/root", decode)
            await keyspace.load(client)
            assert list(values(keyspace).values()) == list(range(8))
            assert keyspace.revision == last
            # Once more over what is there, with one key less.
            await client.delete(b"/root/0")
            await keyspace.load(client)
            assert list(values(keyspace).values()) == list(range(1, 8))

    run(scenario())


def test_many_changes_within_the_delay_are_one_batch(etcd):
    async def scenario():
        async with etcd.client() as client:
            keyspace, batches = KeySpace("/root", decode), []
            await keyspace.load(client)
            keyspace.observers.append(lambda: batches.append(len(keyspace.changes)))
            async with following(keyspace, client, delay_s=0.2):
                for number in range(20):
                    revision = await client.put(b"/root/%02d" % number, b"1")
                await keyspace.wait_for_revision(revision)
            assert sum(batches) == 20
            assert len(batches) <= 2

    run(scenario())


def test_a_watch_resumes_over_broken_connections_without_loss_or_repetition(etcd):
    async def scenario():
        async with TcpProxy(urlsplit(etcd.address).port) as proxy, etcd.client() as writer:
            client = await Etcd.connect(f"http://127.0.0.1:{proxy.port}")
            keyspace, seen = KeySpace("/root", decode), []
            await keyspace.load(client)
            keyspace.observers.append(
                lambda: seen.extend(change.new.mod_revision for change in keyspace.changes)
            )
            written = []
            async with following(keyspace, client):
                for number in range(30):
                    written.append(await writer.put(b"/root/k%d" % number, b"%d" % number))
                    if number % 5 == 0:
                        proxy.reset()
                await keyspace.wait_for_revision(written[-1])
            assert sorted(seen) == written
            await client.aclose()

    run(scenario())


def test_a_watch_resumes_when_etcd_was_killed_and_started_again(tmp_path, caplog):
    async def scenario():
        server = EtcdServer(tmp_path)
        await server.start()
        client = await Etcd.connect(server.endpoint)
        try:
            keyspace = KeySpace("/root", decode)
            await keyspace.load(client, await client.put(b"/root/a", b"1"))
            async with following(keyspace, client):
                await keyspace.wait_for_revision(await client.put(b"/root/a", b"2"))
                ages.append(keyspace.watch_age_s)
                server.kill()
                await until(lambda: keyspace.watch_age_s > 0)
                await server.start()
                await keyspace.wait_for_revision(await client.put(b"/root/a", b"3"))
                ages.append(keyspace.watch_age_s)
            assert values(keyspace) == {"/root/a": 3}
        finally:
            await client.aclose()
            await server.stop()

    ages = []
    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert ages == [0, 0]
    first, last = caplog.messages
    assert first.startswith("watch of /root in Etcd failed, and is tried again until it succeeds:")
    assert last.startswith("watch of /root in Etcd works again after an outage of")


async def compact(client, revision):
    request = etcd_module.rpc.CompactionRequest(revision=revision, physical=True)
    await client._call(client._kv.Compact, request)


def test_a_watch_resumes_after_a_compaction_if_its_prefix_is_as_it_was(etcd, monkeypatch):
    """Other applications of one Etcd fill its history while this prefix is at rest."""

    async def scenario():
        starts = []
        async with etcd.client() as client:
            keyspace = KeySpace("/root", decode)
            await keyspace.load(client, await client.put(b"/root/k", b"1"))
            for _ in range(3):
                last = await client.put(b"/other", b"")
            await compact(client, last)
            watch = client.watch

            def recorded(prefix, start, **options):
                starts.append(start)
                return watch(prefix, start, **options)

            monkeypatch.setattr(client, "watch", recorded)
            async with following(keyspace, client):
                await until(lambda: starts == [last - 2, last + 1])
                await keyspace.wait_for_revision(await client.put(b"/root/k", b"2"))
            assert values(keyspace) == {"/root/k": 2}

    run(scenario())


def test_a_mirror_that_is_kept_is_loaded_anew_whatever_ended_its_watch(etcd, caplog, monkeypatch):
    async def scenario():
        async with etcd.client() as client:
            keyspace = KeySpace("/root", decode)
            rounds = []

            async def beside():
                rounds.append(keyspace.revision)

            refusals = ["compacted", "forbidden"]
            watch = keyspace.watch

            async def refusing(etcd, *, delay_s):
                if not refusals:
                    return await watch(etcd, delay_s=delay_s)
                if refusals.pop(0) == "forbidden":
                    raise EtcdError("etcdserver: permission denied")
                await client.put(b"/root/k", b"2")
                await compact(client, await client.put(b"/other", b""))
                return await watch(etcd, delay_s=delay_s)

            monkeypatch.setattr(keyspace, "watch", refusing)
            monkeypatch.setattr(module, "RELOAD_PAUSE_S", 0.05)
            await client.put(b"/root/k", b"1")
            kept = asyncio.create_task(keyspace.keep(client, "watch of keys", beside))
            await until(lambda: len(rounds) == 3)
            await keyspace.wait_for_revision(await client.put(b"/root/k", b"3"))
            assert values(keyspace) == {"/root/k": 3}
            kept.cancel()
            await asyncio.wait([kept])
            assert kept.cancelled()

    with caplog.at_level(logging.WARNING):
        run(scenario())
    reasons = [text for text in caplog.messages if text.startswith("watch of keys failed")]
    assert ["compacted" in text for text in reasons] == [True, False]


def test_a_watch_that_fell_behind_a_compaction_ends(etcd):
    async def scenario():
        async with etcd.client() as client:
            first = await client.put(b"/root/k", b"1")
            keyspace = KeySpace("/root", decode)
            await keyspace.load(client, first)
            await client.put(b"/root/k", b"2")
            last = await client.put(b"/root/k", b"3")
            await compact(client, last)
            waiting = asyncio.create_task(keyspace.wait_for_update())
            with pytest.raises(EtcdCompactedError):
                await within(keyspace.watch(client))
            with pytest.raises(EtcdUnavailableError, match="EtcdCompactedError"):
                await waiting

    run(scenario())


def test_progress_leaves_the_revision_alone_and_moves_the_place_to_resume_at(monkeypatch):
    async def scenario():
        starts, third = [], asyncio.Event()

        class Quiet:
            """An Etcd that tells only of progress, and loses the connection at once."""

            cluster_id = 0

            async def range(self, _key, **_):
                return etcd_module.RangeResult(
                    pb.Header.Etcd(revision=100), (), has_more=False, count=0
                )

            async def watch(self, _prefix, start, **_):
                starts.append(start)
                yield module.WatchBatch(pb.Header.Etcd(revision=start + 9), ())
                if len(starts) == 3:
                    third.set()
                    await asyncio.get_running_loop().create_future()
                raise EtcdUnavailableError("lost")

        keyspace = KeySpace("/root", decode)
        keyspace.header = pb.Header.Etcd(revision=5)
        async with following(keyspace, Quiet()):
            await within(third.wait())
        assert starts == [6, 16, 26]
        assert keyspace.revision == 5

    run(scenario())
