"""A whole broker, alone over a real Etcd, with fragments in files."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from gazette_sdk.broker.process import Broker
from gazette_sdk.errors import CallError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import sum_of
from support.brokers import COMMIT, LIMIT_S, a_broker, crash, journal_spec, stream
from support.etcd import run

STORE = "file:///"


def stored(name, **changes):
    changes.setdefault("refresh_interval_s", 1)
    return journal_spec(name, stores=[STORE], **changes)


def test_appended_bytes_are_read_back(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(stored("a/journal", compression_codec=pb.SNAPPY))
            response = await client.append_when_ready("a/journal;with/meta", b"foo", b"bar")
            assert response.status == pb.OK
            assert (response.commit.begin, response.commit.end) == (0, 6)
            assert response.commit.sum == sum_of(hashlib.sha1(b"foobar").digest())
            assert response.commit.journal == "a/journal"
            assert response.commit.compression_codec == pb.SNAPPY
            assert response.HasField("registers")
            assert (response.total_chunks, response.delayed_chunks) == (3, 0)
            assert await client.read("a/journal") == b"foobar"
            assert await client.read("a/journal", 2, end_offset=5) == b"oba"

    run(scenario())


def test_a_blocked_read_gets_the_next_commit(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(stored("a/journal"))
            await client.append_when_ready("a/journal", b"one")
            read = client.transport.read(pb.ReadRequest(journal="a/journal", offset=3, block=True))
            waiting = asyncio.ensure_future(anext(read))
            await client.append("a/journal", b"two")
            metadata = await asyncio.wait_for(waiting, LIMIT_S)
            assert (metadata.status, metadata.offset) == (pb.OK, 3)
            assert await anext(read) == b"two"
            await read.aclose()

    run(scenario())


def test_racing_appends_are_adjacent(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(stored("a/journal", length=5000))
            await client.append_when_ready("a/journal")
            contents = [bytes([65 + n % 26]) * (2 + 37 * n) for n in range(40)]
            responses = await asyncio.gather(
                *(client.append("a/journal", c[: len(c) // 2], c[len(c) // 2 :]) for c in contents)
            )
            content = await client.read("a/journal")
            end = 0
            for response in sorted(responses, key=lambda r: r.commit.begin):
                assert response.commit.begin == end
                end = response.commit.end
            for sent, response in zip(contents, responses, strict=True):
                assert content[response.commit.begin : response.commit.end] == sent
                assert response.commit.sum == sum_of(hashlib.sha1(sent).digest())

    run(scenario())


def test_an_append_that_is_not_committed_leaves_nothing(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (broker, client):
            await client.apply(stored("a/journal"))
            await client.append_when_ready("a/journal", b"kept")
            opening = pb.AppendRequest(journal="a/journal")
            for items in (
                [b"lost"],
                [],
                [b"lost", COMMIT, b"more", COMMIT],
                [b"lost", COMMIT, COMMIT],
                [b"lost", pb.AppendRequest(journal="a/journal")],
                [b"lost", pb.AppendRequest(journal="/invalid")],
                [pb.AppendRequest(content=b"x", offset=1), COMMIT],
            ):
                with pytest.raises(CallError, match="append stream"):
                    await client.transport.append(stream(opening, *items))
            replica = broker.resolver.replica("a/journal")
            assert replica.index.summary().end == 4
            barrier = await client.append("a/journal")
            assert (barrier.commit.begin, barrier.commit.end) == (4, 4)
            assert barrier.commit.sum == sum_of(hashlib.sha1(b"").digest())
            assert await client.read("a/journal") == b"kept"

    run(scenario())


def test_a_cancelled_append_is_rolled_back_and_the_next_one_succeeds(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(stored("a/journal"))
            await client.append_when_ready("a/journal", b"kept")
            sent = asyncio.Event()

            async def hanging():
                yield pb.AppendRequest(journal="a/journal")
                yield b"lost"
                sent.set()
                await asyncio.Event().wait()

            append = asyncio.ensure_future(client.transport.append(hanging()))
            await asyncio.wait_for(sent.wait(), LIMIT_S)
            queued = asyncio.ensure_future(client.append("a/journal", b"next"))
            append.cancel()
            with pytest.raises(asyncio.CancelledError):
                await append
            assert (await asyncio.wait_for(queued, LIMIT_S)).commit.begin == 4
            assert await client.read("a/journal") == b"keptnext"

    run(scenario())


def test_a_client_that_stalls_is_given_up(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(stored("a/journal"))
            await client.append_when_ready("a/journal", b"kept")

            async def stalling():
                yield pb.AppendRequest(journal="a/journal")
                yield b"slow"
                await asyncio.Event().wait()

            with pytest.raises(CallError, match="minimum append rate"):
                await asyncio.wait_for(client.transport.append(stalling()), LIMIT_S)
            assert (await client.append("a/journal", b"!")).commit.begin == 4

    run(scenario())


def test_the_second_append_closes_the_first_fragment(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(stored("a/journal"))
            await client.append_when_ready("a/journal", b"first")
            await client.append("a/journal", b"second")
            await client.append("a/journal", b"third")
            found = await client.fragments_when("a/journal", lambda f: f and f[0].mod_time)
            assert [(f.begin, f.end) for f in found] == [(0, 5), (5, 16)]
            assert found[0].backing_store == STORE
            assert await client.read("a/journal") == b"firstsecondthird"

    run(scenario())


def test_registers_are_checked_and_changed(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(stored("a/journal"))
            owner = pb.LabelSet(labels=[pb.Label(name="owner", value="me")])
            response = await client.append_when_ready("a/journal", b"x", union_registers=owner)
            assert response.registers == owner
            other = pb.LabelSelector(
                include=pb.LabelSet(labels=[pb.Label(name="owner", value="you")])
            )
            response = await client.append("a/journal", b"y", check_registers=other)
            assert response.status == pb.REGISTER_MISMATCH
            assert response.registers == owner
            assert not response.HasField("commit")
            with pytest.raises(CallError, match="requires content"):
                await client.append("a/journal", union_registers=pb.LabelSet())

    run(scenario())


def test_a_journal_is_suspended_and_resumed_at_its_offset(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (broker, client):
            await client.apply(stored("a/journal", refresh_interval_s=1))
            await client.append_when_ready("a/journal", bytes(1024))
            response = await client.append("a/journal", suspend=pb.AppendRequest.SUSPEND_NOW)
            assert response.status == pb.SUSPENDED
            suspend = (await client.spec("a/journal")).suspend
            assert (suspend.level, suspend.offset) == (pb.JournalSpec.Suspend.PARTIAL, 1024)

            # All its fragments vanish from the store: it can be suspended fully.
            await client.fragments_when("a/journal", lambda f: f and f[0].mod_time)
            for path in (tmp_path / "fragments" / "a" / "journal").iterdir():
                path.unlink()
            await client.fragments_when("a/journal", lambda f: not f)
            response = await client.append("a/journal", suspend=pb.AppendRequest.SUSPEND_NOW)
            assert response.status == pb.SUSPENDED
            suspend = (await client.spec("a/journal")).suspend
            assert (suspend.level, suspend.offset) == (pb.JournalSpec.Suspend.FULL, 1024)
            async with asyncio.timeout(LIMIT_S):
                while broker.resolver.replica("a/journal") is not None:
                    await broker.keyspace.wait_for_update()
            for mode in ("NO_RESUME", "IF_FLUSHED", "NOW", "KEEP"):
                response = await client.append("a/journal", suspend=f"SUSPEND_{mode}")
                assert response.status == pb.SUSPENDED
            assert (await client.read_items("a/journal"))[0].status == pb.SUSPENDED

            response = await client.append_when_ready("a/journal", b"on")
            assert response.status == pb.OK
            assert (response.commit.begin, response.commit.end) == (1024, 1026)
            assert (await client.spec("a/journal")).suspend.level == pb.JournalSpec.Suspend.NONE

    run(scenario())


def test_a_crash_loses_nothing_that_was_acknowledged(etcd, tmp_path):
    async def scenario():
        sent = b""
        for generation in range(3):
            async with a_broker(etcd, tmp_path) as (broker, client):
                if generation == 0:
                    await client.apply(stored("a/journal", length=3000), journal_spec("b/no-store"))
                for journal in ("a/journal", "b/no-store"):
                    response = await client.append_when_ready(journal)
                    assert response.status == pb.OK, generation
                    assert response.commit.end == len(sent)
                for n in range(10):
                    content = b"%d/%d " % (generation, n) * (50 * n + 1)
                    for journal in ("a/journal", "b/no-store"):
                        response = await client.append(journal, content)
                        assert response.commit.begin == len(sent)
                    sent += content
                for journal in ("a/journal", "b/no-store"):
                    assert await client.read(journal) == sent
                await crash(broker)
                broker.stop = nothing  # it is gone
        async with a_broker(etcd, tmp_path) as (_, client):
            for journal in ("a/journal", "b/no-store"):
                assert (await client.append_when_ready(journal, b".")).commit.begin == len(sent)
                assert await client.read(journal) == sent + b"."

    async def nothing():
        pass

    run(scenario())


def test_a_clean_stop_stores_everything_and_the_next_start_continues(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(stored("a/journal", compression_codec=pb.GZIP))
            await client.append_when_ready("a/journal", b"before ")
        assert len(list((tmp_path / "fragments" / "a" / "journal").iterdir())) == 1
        async with a_broker(etcd, tmp_path) as (_, client):
            response = await client.append_when_ready("a/journal", b"after")
            assert (response.status, response.commit.begin) == (pb.OK, 7)
            assert await client.read("a/journal") == b"before after"

    run(scenario())


def test_a_stop_ends_also_when_the_store_is_gone(etcd, tmp_path):
    async def scenario():
        store = tmp_path / "fragments" / "sub"
        store.mkdir(parents=True)
        spec = journal_spec("a/journal", stores=["file:///sub/"])
        async with a_broker(etcd, tmp_path) as (broker, client):
            await client.apply(spec)
            await client.append_when_ready("a/journal", b"kept")
            store.rename(tmp_path / "gone")
            async with asyncio.timeout(LIMIT_S):
                await broker.stop(persist_timeout_s=0.5)
        (tmp_path / "gone").rename(store)
        async with a_broker(etcd, tmp_path) as (_, client):
            response = await client.append_when_ready("a/journal", b"!")
            assert (response.status, response.commit.begin) == (pb.OK, 4)
            assert await client.read("a/journal") == b"kept!"

    run(scenario())


def test_a_store_that_is_away_is_reported_within_seconds_and_so_is_its_return(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(
                journal_spec("a/journal", stores=["file:///away/"]), stored("b/journal")
            )
            loop = asyncio.get_running_loop()
            began = loop.time()
            response = await client.append_when_ready("a/journal", b"x")
            assert response.status == pb.FRAGMENT_STORE_UNHEALTHY
            assert "file:///away/" in response.store_health_error
            assert loop.time() - began < 5
            assert (await client.append_when_ready("b/journal", b"x")).status == pb.OK

            (tmp_path / "fragments" / "away").mkdir()
            began = loop.time()
            await client.append_until("a/journal", b"x", pb.OK)

    run(scenario())


def test_a_store_that_is_lost_is_noticed_while_appends_go_on(etcd, tmp_path):
    async def scenario():
        store = tmp_path / "fragments" / "sub"
        store.mkdir(parents=True)
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(journal_spec("a/journal", stores=["file:///sub/"]))
            await client.append_when_ready("a/journal", b"x")
            store.rename(tmp_path / "gone")
            refused = await client.append_until("a/journal", b"x", pb.FRAGMENT_STORE_UNHEALTHY)
            acknowledged = 1 + len(refused) - 1
            (tmp_path / "gone").rename(store)
            *_, response = await client.append_until("a/journal", b"x", pb.OK)
            assert response.commit.begin == acknowledged
            assert await client.read("a/journal") == b"x" * (acknowledged + 1)

    run(scenario())


def test_a_clients_stream_that_breaks_in_its_own_way_is_rolled_back(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(journal_spec("a/journal"))
            await client.append_when_ready("a/journal", b"kept")

            async def breaking():
                yield pb.AppendRequest(journal="a/journal")
                yield b"lost"
                raise LookupError("of the client's own")

            with pytest.raises(LookupError):
                await client.transport.append(breaking())
            assert (await client.append("a/journal", b"!")).commit.begin == 4
            assert await client.read("a/journal") == b"kept!"

    run(scenario())


def test_a_journal_that_is_created_again_is_another_one(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (broker, client):
            await client.apply(journal_spec("a/journal"))
            await client.append_when_ready("a/journal", b"old content")
            before = broker.resolver.replica("a/journal")
            await client.delete("a/journal")
            await client.apply(journal_spec("a/journal"))
            response = await client.append_when_ready("a/journal", b"new")
            assert (response.commit.begin, response.commit.end) == (0, 3)
            assert broker.resolver.replica("a/journal") is not before
            assert await client.read("a/journal") == b"new"

    run(scenario())


def test_offsets_that_are_asserted_and_an_index_that_is_ahead(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(stored("a/journal"))
            await client.append_when_ready("a/journal", b"0123456789")
            assert (await client.append("a/journal", b"x", offset=9)).status == (
                pb.WRONG_APPEND_OFFSET
            )
            assert (await client.append("a/journal", b"x", offset=10)).commit.begin == 10
            # A fragment appears in the store which nobody here wrote.
            content = bytes(100)
            name = f"{11:016x}-{111:016x}-{hashlib.sha1(content).hexdigest()}.raw"
            directory = tmp_path / "fragments" / "a" / "journal"
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
            await client.fragments_when("a/journal", lambda f: f and f[-1].end == 111)
            assert (await client.append("a/journal", b"y")).status == pb.INDEX_HAS_GREATER_OFFSET
            assert (await client.append("a/journal", b"y", offset=11)).status == (
                pb.WRONG_APPEND_OFFSET
            )
            reset = await client.append(
                "a/journal", offset=111, suspend=pb.AppendRequest.SUSPEND_KEEP
            )
            assert (reset.status, reset.commit.begin, reset.commit.end) == (pb.OK, 111, 111)
            assert (await client.append("a/journal", b"y")).commit.begin == 111

    run(scenario())


def test_flags_forbid_reading_or_appending(etcd, tmp_path):
    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.apply(
                journal_spec("read/only", flags=1), journal_spec("write/only", flags=2)
            )
            assert (await client.append_when_ready("read/only")).status == pb.OK
            assert (await client.append("read/only", b"x")).status == pb.NOT_ALLOWED
            assert (await client.append_when_ready("write/only", b"x")).status == pb.OK
            assert [i.status for i in await client.read_items("write/only")] == [pb.NOT_ALLOWED]
            page = await client.transport.list_fragments(pb.FragmentsRequest(journal="write/only"))
            assert page.status == pb.NOT_ALLOWED

    run(scenario())


def test_a_lone_broker_drains_at_once_and_stores_everything(etcd, tmp_path):
    """Its routes say then that no journal waits for it, but for one without a store."""

    async def scenario():
        async with a_broker(etcd, tmp_path) as (broker, client):
            await client.apply(stored("a/journal"), journal_spec("b/storeless"))
            for journal in ("a/journal", "b/storeless"):
                await client.append_when_ready(journal, b"x")
            await broker.drain()
            assert (await client.append("a/journal", b"y")).status == pb.OK
            await asyncio.wait_for(asyncio.shield(broker.ended), LIMIT_S)
        content = [path.read_bytes() for path in (tmp_path / "fragments").rglob("*.raw")]
        assert sorted(content) in ([b"xy"], [b"x", b"y"])
        async with a_broker(etcd, tmp_path, "broker-2") as (broker, _):
            assert broker._custody.last_routes.waiting == {"b/storeless"}
        async with a_broker(etcd, tmp_path) as (_, client):
            assert (await client.append_when_ready("a/journal", b"!")).commit.begin == 2
            assert (await client.append_when_ready("b/storeless", b"!")).commit.begin == 1

    run(scenario())


def test_a_broker_with_others_drains_only_without_journals(etcd, tmp_path):
    """The other one cannot be reached, so that it cannot take the journal over."""

    async def scenario():
        async with a_broker(etcd, tmp_path) as (broker, client):
            await client.apply(journal_spec("a/journal"))
            await client.append_when_ready("a/journal", b"x")
            spec = pb.BrokerSpec(journal_limit=10)
            spec.process_spec.id.zone, spec.process_spec.id.suffix = "local", "other"
            spec.process_spec.endpoint = "http://other.test:8080"
            async with etcd.client() as other:
                key = broker.keyspace.member_key("local", "other")
                revision = await other.put(key, spec.SerializeToString())
            await broker.keyspace.wait_for_revision(revision)
            await broker.drain()
            await asyncio.sleep(0.2)
            assert not broker.ended.done()
            await client.delete("a/journal")
            await asyncio.wait_for(asyncio.shield(broker.ended), LIMIT_S)

    run(scenario())


def test_a_lost_lease_ends_the_broker(etcd, tmp_path):
    async def scenario():
        broker: Broker
        async with a_broker(etcd, tmp_path) as (broker, client):
            await client.apply(journal_spec("a/journal"))
            await client.append_when_ready("a/journal", b"kept")
            async with etcd.client() as other:
                await other.revoke(broker._membership.lease)
            with pytest.raises(GazetteError, match=r"not found|keep member lease"):
                await asyncio.wait_for(asyncio.shield(broker.ended), LIMIT_S)
        async with a_broker(etcd, tmp_path) as (_, client):
            assert (await client.append_when_ready("a/journal", b"!")).commit.begin == 4

    run(scenario())
