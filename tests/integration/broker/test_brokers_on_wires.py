"""Brokers among themselves: replication and proxied calls, over every way they can take.

The way by itself is the stream wire where the other end speaks it, and gRPC where it doesn't, as
brokers of other implementations.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time

import pytest

from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import authority_for
from gazette_sdk.server.authorization import Call
from gazette_sdk.transport.stream import wire as choice
from support.brokers import COMMIT, LIMIT_S, Client, HandCluster, journal_spec, stream
from support.etcd import run
from support.spools import until
from support.wired_brokers import WiredCluster

JOURNAL = "a/journal"
KEYS = "c2VjcmV0IGtleSBvZiB0aGUgdGVzdHM="

WAYS = {
    "in process": HandCluster,
    "by themselves": WiredCluster,
    "grpc": functools.partial(WiredCluster, wire="grpc"),
    "to others of grpc only": functools.partial(WiredCluster, grpc_only={"broker-2"}),
}


@pytest.fixture(params=WAYS)
def brokers(request, etcd, tmp_path):
    """Makes a cluster whose brokers reach each other in one of the ways."""
    return functools.partial(WAYS[request.param], etcd, tmp_path)


@pytest.fixture(params=[way for way in WAYS if way != "in process"])
def wired(request, etcd, tmp_path):
    """The same, over a wire."""
    return functools.partial(WAYS[request.param], etcd, tmp_path)


def without_pulses(monkeypatch):
    async def none(_self, _replica):
        await asyncio.Event().wait()

    monkeypatch.setattr("gazette_sdk.broker.append.pulse.Pulses.run", none)


async def replicated(cluster, **changes):
    """A journal of two brokers; clients of both."""
    one = await cluster.start("broker-1", **changes)
    two = await cluster.start("broker-2", **changes)
    await one.apply(journal_spec(JOURNAL, replication=2))
    await cluster.assign(JOURNAL, "broker-1", "broker-2")
    return one, two


async def elsewhere(cluster):
    """A journal whose only broker is the second; clients of both."""
    one, two = await cluster.start("broker-1"), await cluster.start("broker-2")
    await one.apply(journal_spec(JOURNAL))
    await cluster.assign(JOURNAL, "broker-2")
    return one, two


def test_two_brokers_replicate_and_each_serves_the_others_journal(brokers):
    async def scenario():
        async with brokers() as cluster:
            one, two = await cluster.start("broker-1"), await cluster.start("broker-2")
            await one.apply(
                journal_spec("journal/one", replication=2),
                journal_spec("journal/two", replication=2),
            )
            await cluster.assign("journal/one", "broker-1", "broker-2")
            await cluster.assign("journal/two", "broker-2", "broker-1")
            for journal, content in (("journal/one", b"foo"), ("journal/two", b"bar")):
                response = await one.append(journal + ";some/meta", content)
                assert response.status == pb.OK
                assert len(response.header.route.members) == 2
            for client in (one, two):
                assert await client.read("journal/one", do_not_proxy=True) == b"foo"
                assert await client.read("journal/two", do_not_proxy=True) == b"bar"

    run(scenario())


def test_a_replica_that_joins_continues_at_the_head(brokers):
    async def scenario():
        async with brokers() as cluster:
            one = await cluster.start("broker-1")
            await one.apply(journal_spec(JOURNAL))
            await cluster.assign(JOURNAL, "broker-1")
            await one.append(JOURNAL, b"before")
            two = await cluster.start("broker-2")
            await one.apply(journal_spec(JOURNAL, replication=2), expect=-1)
            await cluster.assign(JOURNAL, "broker-1", "broker-2")
            response = await two.append(JOURNAL, b"after")
            assert (response.status, response.commit.begin) == (pb.OK, 6)
            assert await two.read(JOURNAL, 6, do_not_proxy=True) == b"after"

            # Then it takes over, and nothing is lost or written twice.
            await cluster.assign(JOURNAL, "broker-2", "broker-1")
            response = await one.append(JOURNAL, b"!")
            assert (response.status, response.commit.begin) == (pb.OK, 11)
            assert response.header.process_id.suffix == "broker-2"
            assert await two.read(JOURNAL, 6, do_not_proxy=True) == b"after!"
            for name in ("broker-1", "broker-2"):
                broker = cluster.brokers[name]
                led_since = max(
                    each.create_revision for each in broker.keyspace.assignments(JOURNAL)
                )
                assert broker.resolver.replica(JOURNAL).joined_revision >= led_since

    run(scenario())


def test_calls_for_other_brokers_are_proxied(brokers):
    async def scenario():
        async with brokers() as cluster:
            one, _ = await cluster.start("broker-1"), await cluster.start("broker-2")
            await one.apply(journal_spec(JOURNAL))
            await cluster.assign(JOURNAL, "broker-2")
            response = await one.append(f"{JOURNAL};with/meta", b"content")
            assert response.status == pb.OK
            assert response.header.process_id.suffix == "broker-2"
            assert await one.read(JOURNAL) == b"content"
            assert [(f.begin, f.end) for f in await one.fragments(JOURNAL)] == [(0, 7)]
            refused = await one.append(JOURNAL, b"x", do_not_proxy=True)
            assert refused.status == pb.NOT_JOURNAL_PRIMARY_BROKER
            assert refused.header.process_id.suffix == "broker-1"
            (answer,) = await one.read_items(JOURNAL, do_not_proxy=True)
            assert answer.status == pb.NOT_JOURNAL_BROKER

    run(scenario())


def test_an_append_under_way_keeps_its_resolution(brokers):
    async def scenario():
        async with brokers() as cluster:
            one, _ = await cluster.start("broker-1"), await cluster.start("broker-2")
            await one.apply(journal_spec(JOURNAL))
            await cluster.assign(JOURNAL, "broker-1")
            await one.append(JOURNAL)
            began, go_on = asyncio.Event(), asyncio.Event()

            async def slow():
                yield pb.AppendRequest(journal=JOURNAL)
                yield b"first!"
                began.set()
                await go_on.wait()
                yield COMMIT

            under_way = asyncio.ensure_future(one.transport.append(slow()))
            await asyncio.wait_for(began.wait(), LIMIT_S)
            queued = asyncio.ensure_future(one.append(JOURNAL, b"second"))
            await cluster.assign(JOURNAL, "broker-2", "broker-1")
            go_on.set()
            response = await under_way
            assert (response.commit.begin, response.commit.end) == (0, 6)
            assert response.header.process_id.suffix == "broker-1"
            # The queued one waits until the route has one member again, and then is proxied. The
            # new primary learns the head of the old one, which is a replica by now.
            await one.apply(journal_spec(JOURNAL, replication=2), expect=-1)
            response = await asyncio.wait_for(queued, LIMIT_S)
            assert (response.status, response.commit.begin, response.commit.end) == (pb.OK, 6, 12)
            assert response.header.process_id.suffix == "broker-2"

    run(scenario())


# ------------------------------------------------------------------ which wire


@pytest.mark.parametrize(
    ("way", "streams"),
    [("by themselves", True), ("grpc", False), ("to others of grpc only", False)],
)
def test_brokers_speak_the_stream_wire_to_those_who_know_it(way, streams, etcd, tmp_path):
    async def scenario():
        async with WAYS[way](etcd, tmp_path) as cluster:
            one, two = await replicated(cluster)
            assert (await one.append(JOURNAL, b"content")).status == pb.OK
            assert (cluster.streams_at("broker-2") > 0) == streams
            assert await two.read(JOURNAL, do_not_proxy=True) == b"content"
            # In the other direction it is another choice.
            assert (await two.append(JOURNAL, b"proxied")).status == pb.OK
            assert (cluster.streams_at("broker-1") > 0) == (way != "grpc")

    run(scenario())


def test_brokers_with_keys_sign_what_they_send_each_other(wired):
    async def scenario():
        async with wired() as cluster:
            await cluster.start("broker-1", auth_keys=KEYS)
            await cluster.start("broker-2", auth_keys=KEYS)
            service = cluster.brokers["broker-1"].service
            signed = InProcessTransport(service, authority_for(KEYS))
            one = Client(signed)
            await one.apply(journal_spec(JOURNAL, replication=2))
            await cluster.assign(JOURNAL, "broker-2", "broker-1")
            response = await one.append(JOURNAL, b"content")
            assert (response.status, response.commit.end) == (pb.OK, 7)
            assert await one.read(JOURNAL) == b"content"

    run(scenario())


def test_replicas_of_many_journals_need_no_connection_for_each(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)
    monkeypatch.setattr(choice, "LASTING_MAX", 3)

    async def scenario():
        async with WiredCluster(etcd, tmp_path) as cluster:
            one, two = await cluster.start("broker-1"), await cluster.start("broker-2")
            names = [f"many/{number}" for number in range(8)]
            await one.apply(*(journal_spec(name, replication=2) for name in names))
            for name in names:
                await cluster.assign(name, "broker-1", "broker-2")
            for name in names * 2:
                assert (await one.append(name, b"content")).status == pb.OK
            assert cluster.streams_at("broker-2") == 3
            for name in names:
                assert await two.read(name, do_not_proxy=True) == b"content" * 2

    run(scenario())


# ------------------------------------------------------------- content of any size


@pytest.mark.parametrize("size", [0, 70_000, 5 << 20])
def test_appends_of_any_size_are_proxied_and_replicated_whole(size, wired):
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    chunks = [content[begin : begin + 100_000] for begin in range(0, size, 100_000)]

    async def scenario():
        async with wired() as cluster:
            one, two = await replicated(cluster)
            for client in (one, two):  # by the primary, and through the replica
                response = await client.append(JOURNAL, *chunks)
                assert response.status == pb.OK
            for client in (one, two):
                assert await client.read(JOURNAL, do_not_proxy=True) == content * 2

    run(scenario())


# ------------------------------------------------- deadlines, cancellation, roll-backs


def test_a_proxied_append_that_is_given_up_is_rolled_back_and_lets_the_next_go(wired):
    async def scenario():
        async with wired() as cluster:
            one, two = await elsewhere(cluster)

            async def hanging():
                yield pb.AppendRequest(journal=JOURNAL)
                yield b"lost"
                await asyncio.Event().wait()

            append = asyncio.ensure_future(one.transport.append(hanging()))
            replica = cluster.brokers["broker-2"].resolver.replica(JOURNAL)
            await until(lambda: not replica.spool.free and replica.spool.peek().uncommitted_bytes)
            append.cancel()
            with pytest.raises(asyncio.CancelledError):
                await append
            began = time.monotonic()
            response = await asyncio.wait_for(one.append(JOURNAL, b"kept"), LIMIT_S)
            assert (response.commit.begin, response.commit.end) == (0, 4)
            assert time.monotonic() - began < 3
            assert await two.read(JOURNAL) == b"kept"

    run(scenario())


def test_a_proxied_append_without_commit_is_rolled_back(wired):
    async def scenario():
        async with wired() as cluster:
            one, two = await elsewhere(cluster)
            with pytest.raises(GazetteError):
                await one.transport.append(stream(pb.AppendRequest(journal=JOURNAL), b"lost"))
            assert (await one.append(JOURNAL, b"kept")).commit.begin == 0
            assert await two.read(JOURNAL) == b"kept"

    run(scenario())


@pytest.mark.parametrize("more", [(b"more", COMMIT), (COMMIT,)], ids=["content", "a commit"])
def test_a_proxied_append_that_goes_on_behind_its_commit_is_rolled_back(more, wired):
    async def scenario():
        async with wired() as cluster:
            one, two = await elsewhere(cluster)
            append = stream(pb.AppendRequest(journal=JOURNAL), b"lost", COMMIT, *more)
            with pytest.raises(GazetteError, match="after the empty message"):
                await one.transport.append(append)
            assert (await one.append(JOURNAL, b"kept")).commit.begin == 0
            assert await two.read(JOURNAL) == b"kept"

    run(scenario())


def test_a_call_whose_time_is_over_ends_at_the_broker_it_was_passed_to(wired):
    async def scenario():
        async with wired() as cluster:
            one, _ = await elsewhere(cluster)
            assert (await one.append(JOURNAL)).status == pb.OK
            replica = cluster.brokers["broker-2"].resolver.replica(JOURNAL)
            service = cluster.brokers["broker-1"].service

            async def hanging():
                yield pb.AppendRequest(journal=JOURNAL)
                yield b"lost"
                await asyncio.Event().wait()

            with pytest.raises(GazetteError) as caught:
                await service.append(hanging(), Call(timeout_s=0.5))
            assert caught.value.code == "DEADLINE_EXCEEDED"
            assert (await one.append(JOURNAL, b"kept")).commit.begin == 0
            assert replica.spool.peek().uncommitted_bytes == 0

    run(scenario())


def test_a_proxied_read_follows_the_journal_and_ends_with_its_caller(wired):
    async def scenario():
        async with wired() as cluster:
            one, two = await elsewhere(cluster)
            reading = one.transport.read(pb.ReadRequest(journal=JOURNAL, block=True))
            got = b""
            for number in range(3):
                await two.append(JOURNAL, b"%d" % number)
                while len(got) <= number:
                    item = await asyncio.wait_for(anext(reading), LIMIT_S)
                    got += item if isinstance(item, bytes) else b""
            assert got == b"012"
            await reading.aclose()
            active = cluster.servers["broker-2"].grpc.active  # of every front
            await until(lambda: not [call for call in active if call.path.endswith("/Read")])

    run(scenario())


# ------------------------------------------------------------- peers that fail


def test_a_peer_that_answers_no_more_fails_the_append_in_bounded_time(wired, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with wired() as cluster:
            one, two = await replicated(cluster, answer_timeout_s=0.5)
            assert (await one.append(JOURNAL, b"one")).status == pb.OK
            cluster.proxies["broker-2"].cut("answers")
            with pytest.raises(GazetteError, match="did not answer"):
                await asyncio.wait_for(one.append(JOURNAL, b"two"), LIMIT_S)
            # It wakes up, and the journal goes on by another stream.
            cluster.proxies["broker-2"].heal()
            begin = (await _appended(one, b"three")).commit.begin
            for client in (one, two):
                assert (await client.read(JOURNAL, do_not_proxy=True)).startswith(b"one")
                assert await client.read(JOURNAL, begin, do_not_proxy=True) == b"three"

    run(scenario())


def test_a_peer_whose_connections_break_is_reached_again(wired, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with wired() as cluster:
            one, two = await replicated(cluster)
            begins = {}
            for number in range(5):
                text = b"(%d)" % number
                begins[text] = (await _appended(one, text)).commit.begin
                cluster.proxies["broker-2"].reset()
            await _appended(one, b"!")
            content = await one.read(JOURNAL, do_not_proxy=True)
            assert sorted(begins.values()) == list(begins.values())
            for text, begin in begins.items():
                # What failed may stand between them, and need not be at the replica.
                assert content[begin:].startswith(text)
                assert (await two.read(JOURNAL, begin, do_not_proxy=True)).startswith(text)

    run(scenario())


def test_a_peer_that_takes_connections_and_says_nothing_is_unavailable(wired, monkeypatch):
    """A process that is stopped: its kernel goes on to accept."""
    without_pulses(monkeypatch)
    monkeypatch.setattr(choice, "HELLO_TIMEOUT_S", 0.2)

    async def scenario():
        async with wired() as cluster:
            one, two = [
                await cluster.start(name, answer_timeout_s=0.7) for name in ("broker-1", "broker-2")
            ]
            await one.apply(journal_spec(JOURNAL, replication=2))
            cluster.proxies["broker-2"].cut()
            await cluster.assign(JOURNAL, "broker-1", "broker-2")
            with pytest.raises(GazetteError):
                await asyncio.wait_for(one.append(JOURNAL, b"lost"), LIMIT_S)
            cluster.proxies["broker-2"].reset()
            cluster.proxies["broker-2"].heal()
            begin = (await _appended(one, b"kept")).commit.begin
            for client in (one, two):
                assert await client.read(JOURNAL, begin, do_not_proxy=True) == b"kept"

    run(scenario())


async def _appended(client, content):
    """An append, tried until it succeeds. Only one that failed may be there as well."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(GazetteError):
                response = await client.append(JOURNAL, content)
                assert response.status == pb.OK
                return response
            await asyncio.sleep(0.05)
