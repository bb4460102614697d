"""Replication: what a primary sends to its replicas, and what it makes of their answers."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.errors import CallError, GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import COMMIT, LIMIT_S, HandCluster, journal_spec
from support.etcd import run
from support.scripted_replicas import (
    JOURNAL,
    ScriptedPeer,
    in_short,
    led,
    mismatch,
    of_vector,
    without_pulses,
)
from support.spools import until
from support.vectors import cases, label_set


def test_peers_ahead_are_joined_and_content_follows(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)
    case = cases("broker", "replication_traces")[0].values[0]
    trace = case["trace"]
    answers = [step["A"] for step in trace if "A" in step]

    async def scenario():
        given = list(answers)
        agree = asyncio.get_running_loop().create_future()

        def answer(request):
            found = given.pop(0)
            if "fragment" in found:
                return mismatch(found)
            return agree

        peer = ScriptedPeer(answer)
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await led(cluster, {"peer-2": peer}, compression_codec=pb.SNAPPY)
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            append = asyncio.ensure_future(
                client.append(
                    JOURNAL,
                    b"foo",
                    b"bar",
                    union_registers=label_set([{"name": "after", "value": ""}]),
                    subtract_registers=label_set([{"name": "before", "value": ""}]),
                )
            )
            await peer.reach(lambda: len(peer.got) == 2)
            # Before the peer agrees the spec gets another codec: it takes effect at a roll.
            spec = journal_spec(JOURNAL, replication=2, compression_codec=pb.GZIP)
            await client.apply(spec, expect=-1)
            agree.set_result(pb.ReplicateResponse())
            response = await append
            assert response.status == pb.OK
            assert (response.commit.begin, response.commit.end) == (2048, 2054)
            assert response.registers == label_set([{"name": "after", "value": ""}])
            sent = [step["P"] for step in trace if "P" in step]
            got = [in_short(r, t) for r, t in zip(peer.got, sent, strict=True)]
            assert got == [of_vector(t) for t in sent]
            assert peer.got[0].header.process_id.suffix == "peer-2"
            assert peer.got[0].deprecated_journal == JOURNAL

    run(scenario())


def test_two_appends_are_sent_before_either_is_acknowledged(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)
    case = cases("broker", "replication_traces")[1].values[0]
    sent = [step["P"] for step in case["trace"] if "P" in step]

    async def scenario():
        held = asyncio.get_running_loop().create_future()

        def answer(request):
            return held if request.proposal.end else pb.ReplicateResponse()

        peer = ScriptedPeer(answer)
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await led(cluster, {"peer-2": peer}, compression_codec=pb.SNAPPY)
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            first = asyncio.ensure_future(client.append(JOURNAL, b"first"))
            await peer.reach(lambda: len(peer.got) >= 3)
            second = asyncio.ensure_future(client.append(JOURNAL, b"second"))
            # A peer reads one request after the other: what the second append sends waits in
            # the stream, so the order is looked at once it is let go.
            replica = cluster.brokers["broker-1"].resolver.replica(JOURNAL)
            await until(lambda: replica.spool.peek().fragment.end == 11)
            assert not first.done()
            assert not second.done()
            held.set_result(pb.ReplicateResponse())
            assert ((await first).commit.begin, (await first).commit.end) == (0, 5)
            assert ((await second).commit.begin, (await second).commit.end) == (5, 11)
            got = [in_short(r, t) for r, t in zip(peer.got, sent, strict=True)]
            assert got == [of_vector(t) for t in sent]

    run(scenario())


def test_a_later_route_is_resolved_and_the_old_streams_are_closed(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)
    case = cases("broker", "replication_traces")[2].values[0]
    sent = [step["P"] for step in case["trace"] if "P" in step]

    async def scenario():
        later = 0
        rounds = 0

        def answer(request):
            nonlocal rounds
            rounds += 1
            if rounds == 1:
                return mismatch(next(s["A"] for s in case["trace"] if "A" in s))
            if rounds == 2:
                response = pb.ReplicateResponse(status=pb.WRONG_ROUTE)
                response.header.route.primary = -1
                response.header.etcd.revision = later
                return response
            return pb.ReplicateResponse()

        peer = ScriptedPeer(answer)
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await led(cluster, {"peer-2": peer}, compression_codec=pb.SNAPPY)
            later = await cluster.assign(JOURNAL, "broker-1", "peer-2") + 1
            append = asyncio.ensure_future(client.append(JOURNAL, b"x"))
            await peer.reach(lambda: peer.half_closes == 1)
            got = [in_short(r, t) for r, t in zip(peer.streams[0], sent, strict=True)]
            assert got == [of_vector(t) for t in sent]
            assert not append.done()
            await cluster.member("other-9")  # which makes the revision come
            response = await append
            assert (response.status, response.commit.begin) == (pb.OK, 892)
            assert len(peer.streams) == 2

    run(scenario())


@pytest.mark.parametrize(
    "case",
    [p for p in cases("broker", "append_stream_events") if "one_peer_broken" not in p.values[0]],
)
def test_events_of_the_clients_stream(case, etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        peer = ScriptedPeer()

        def answer(request):
            # The peer is ahead: so we begin where the vector does.
            if request.proposal.end == 0:
                value = {
                    "fragment": {"journal": JOURNAL, "begin": 0, "end": 2054},
                    "registers": [{"name": "after", "value": ""}],
                }
                return mismatch(value)
            return pb.ReplicateResponse()

        peer.answer = answer
        flags = pb.JournalSpec.Flag.Value(case.get("flags", "NOT_SPECIFIED"))
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await led(cluster, {"peer-2": peer}, compression_codec=pb.GZIP, flags=flags)
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            assert (await client.append(JOURNAL)).status == pb.OK
            before = len(peer.got)

            async def items():
                yield pb.AppendRequest(journal=JOURNAL)
                for event in case["events"]:
                    kind, _, rest = event.partition(":")
                    if kind == "content":
                        yield rest.encode()
                    elif event == "empty":
                        yield COMMIT
                    elif event == "read error":
                        raise UnavailableError("the client is gone")
                    elif event.startswith("message"):
                        yield pb.AppendRequest(journal=event.split("'")[1])
                    else:
                        assert event == "half-close"

            if case["expect"] == "grpc error":
                with pytest.raises(CallError):
                    await client.transport.append(items())
            else:
                assert (await client.transport.append(items())).status == pb.OK
            got = peer.got[before:]
            assert [in_short(r, t) for r, t in zip(got, case["peer"], strict=True)] == [
                of_vector(t) for t in case["peer"]
            ]
            # The pipeline goes on, without another synchronization.
            assert (await client.append(JOURNAL)).commit.begin == 2054
            assert len(peer.streams) == 1

    run(scenario())


def test_a_broken_peer_discards_the_pipeline_and_the_next_append_starts_another(
    etcd, tmp_path, monkeypatch
):
    without_pulses(monkeypatch)

    async def scenario():
        broken = ScriptedPeer()
        healthy = ScriptedPeer()
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await led(cluster, {"peer-2": broken, "peer-3": healthy})
            await cluster.assign(JOURNAL, "broker-1", "peer-2", "peer-3")
            assert (await client.append(JOURNAL, b"one")).status == pb.OK
            broken.answer = lambda _: UnavailableError("made unavailable")
            with pytest.raises(UnavailableError):
                await client.append(JOURNAL, b"two")
            broken.answer = lambda _: pb.ReplicateResponse()
            response = await client.append(JOURNAL, b"three")
            assert response.status == pb.OK
            # What was committed to our own spool before the peer broke stays committed.
            assert response.commit.begin == 6
            assert len(broken.streams) == len(healthy.streams) == 2
            assert healthy.half_closes == 1

    run(scenario())


@pytest.mark.parametrize("status", ["NOT_JOURNAL_BROKER", "PROPOSAL_MISMATCH"])
def test_an_unexpected_status_fails_the_append(status, etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        peer = ScriptedPeer()
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await led(cluster, {"peer-2": peer})
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            if status == "PROPOSAL_MISMATCH":
                assert (await client.append(JOURNAL)).status == pb.OK
            peer.answer = lambda _: pb.ReplicateResponse(status=status)
            with pytest.raises(CallError, match=status):
                await client.append(JOURNAL, b"x")

    run(scenario())


def test_replicas_that_never_agree_end_in_an_error(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        def answer(request):
            end = request.proposal.end
            value = {"fragment": {"journal": JOURNAL, "begin": end, "end": end}, "registers": []}
            return mismatch(value)

        async with HandCluster(etcd, tmp_path) as cluster:
            client = await led(cluster, {"peer-2": ScriptedPeer(answer)})
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            with pytest.raises(CallError, match="do not agree"):
                await client.append(JOURNAL, b"x")

    run(scenario())


def test_a_silent_peer_fails_the_append_in_bounded_time(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        loop = asyncio.get_running_loop()
        async with HandCluster(etcd, tmp_path, answer_timeout_s=0.2) as cluster:
            client = await led(cluster, {"peer-2": ScriptedPeer(lambda _: loop.create_future())})
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            with pytest.raises(GazetteError, match="did not answer"):
                await asyncio.wait_for(client.append(JOURNAL, b"x"), LIMIT_S)

    run(scenario())


@pytest.mark.parametrize("ending", ["stopped", "not assigned any more"])
@pytest.mark.parametrize("codec", [pb.NONE, pb.GZIP])
def test_what_no_replica_acknowledged_is_not_stored_by_a_primary_that_goes(
    etcd, tmp_path, monkeypatch, ending, codec
):
    without_pulses(monkeypatch)

    async def scenario():
        def answer(request):
            if request.proposal.end > 8:
                return asyncio.get_running_loop().create_future()
            return pb.ReplicateResponse()

        peer = ScriptedPeer(answer)
        async with HandCluster(etcd, tmp_path, answer_timeout_s=0.3) as cluster:
            spec = {"compression_codec": codec, "stores": ["file:///"]}
            client = await led(cluster, {"peer-2": peer}, **spec)
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            for content in (b"all ", b"have"):
                assert (await client.append(JOURNAL, content)).status == pb.OK
            lost = asyncio.ensure_future(client.append(JOURNAL, b" not this"))
            broker = cluster.brokers["broker-1"]
            replica = broker.resolver.replica(JOURNAL)
            await until(lambda: replica.spool.peek().fragment.end == 17)
            if ending == "stopped":
                await broker.stop()
            else:
                await cluster.assign(JOURNAL, "peer-2")
                await broker.resolver.shutdowns()
                await broker.persister.finish()
            with pytest.raises(GazetteError):
                await lost
            stored = sorted((tmp_path / "fragments").rglob("0*-*"))
            spans = [[int(part, 16) for part in path.name.split("-")[:2]] for path in stored]
            assert spans == [[0, 4], [4, 8]]  # the first one is closed early

    run(scenario())
