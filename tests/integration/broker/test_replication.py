"""Replication: a real broker, and peers that follow a script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from gazette_sdk.errors import CallError, GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.selectors import parse_selector
from gazette_sdk.server.call import Call
from support import vectors
from support.brokers import COMMIT, LIMIT_S, ZONE, HandCluster, Peers, journal_spec, stream
from support.etcd import run
from support.spools import until
from support.vectors import cases, label_set, normal

JOURNAL = "a/journal"


class ScriptedPeer(Peers):
    """A member which answers proposals as the test says, and keeps what it was sent.

    It is in a sense the other half of a trace: ``answer`` is asked for each request that wants
    an acknowledgement.
    """

    def __init__(self, answer=None):
        super().__init__()
        self.streams: list[list[pb.ReplicateRequest]] = []
        self.half_closes = 0
        self.answer = answer or (lambda _: pb.ReplicateResponse())
        self.more = asyncio.Condition()

    @property
    def got(self):
        return [request for requests in self.streams for request in requests]

    async def reach(self, holds):
        async with asyncio.timeout(LIMIT_S), self.more:
            await self.more.wait_for(holds)

    async def replicate(self, requests, target) -> AsyncIterator[pb.ReplicateResponse]:
        mine: list[pb.ReplicateRequest] = []
        self.streams.append(mine)
        async for request in requests:
            mine.append(request)
            async with self.more:
                self.more.notify_all()
            if request.acknowledge:
                answer = self.answer(request)
                if isinstance(answer, asyncio.Future):
                    answer = await answer
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        async with self.more:
            self.half_closes += 1
            self.more.notify_all()


def in_short(request: pb.ReplicateRequest, trace: dict) -> dict:
    """A request, as far as a vector tells it."""
    found = {}
    if request.HasField("proposal"):
        found["proposal"] = normal(request.proposal)
        found["acknowledge"] = request.acknowledge
        if "registers" in trace:
            found["registers"] = normal(request.registers)
    else:
        found["content"] = request.content.decode()
        found["content_delta"] = request.content_delta
    if "header" in trace:
        found["header"] = request.HasField("header")
    return found


def of_vector(trace: dict) -> dict:
    expect = {k: trace[k] for k in ("content", "content_delta") if k in trace}
    if "proposal" in trace:
        expect["proposal"] = normal(vectors.fragment(trace["proposal"]))
        expect["acknowledge"] = trace.get("acknowledge", False)
        if "registers" in trace:
            expect["registers"] = normal(label_set(trace["registers"]))
    if "header" in trace:
        expect["header"] = trace["header"]
    return expect


def mismatch(value):
    return pb.ReplicateResponse(
        status=pb.PROPOSAL_MISMATCH,
        fragment=vectors.fragment(value["fragment"]),
        registers=label_set(value["registers"]),
    )


async def led(cluster, peers, **spec):
    """A journal of which our broker is primary, with scripted peers. Pulses are off."""
    client = await cluster.start()
    for suffix in peers:
        await cluster.member(suffix, peers[suffix])
    spec = journal_spec(JOURNAL, replication=1 + len(peers), **spec)
    await client.apply(spec)
    return client


def without_pulses(monkeypatch):
    async def none(_self, _replica):
        await asyncio.Event().wait()

    monkeypatch.setattr("gazette_sdk.broker.pulse.Pulses.run", none)


# ------------------------------------------------------- what a primary sends


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
    monkeypatch.setattr("gazette_sdk.broker.pipeline.PEER_ANSWER_TIMEOUT_S", 0.2)

    async def scenario():
        loop = asyncio.get_running_loop()
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await led(cluster, {"peer-2": ScriptedPeer(lambda _: loop.create_future())})
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            with pytest.raises(GazetteError, match="did not answer"):
                await asyncio.wait_for(client.append(JOURNAL, b"x"), LIMIT_S)

    run(scenario())


# ------------------------------------------------------- what a replica answers


@pytest.mark.parametrize("case", cases("broker", "replicate_server"))
def test_a_replica_answers(case, etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)
    authority = Authority("c2VjcmV0IGtleSBvZiB0aGUgdGVzdHM=")

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            changes = {"auth_keys": "c2VjcmV0IGtleSBvZiB0aGUgdGVzdHM="} if "claims" in case else {}
            client = await cluster.start(**changes)
            broker = cluster.brokers["broker-1"]
            await cluster.member("peer-2")
            spec = journal_spec(JOURNAL, replication=2)
            key = broker.keyspace.item_key(JOURNAL)
            await cluster.etcd.put(key, spec.SerializeToString())
            await cluster.assign(JOURNAL, "peer-2", "broker-1")

            call = Call()
            if "claims" in case:
                selector = parse_selector(case["claims"]["selector"])
                capability = Capability[case["claims"]["capability"][0]]
                call = Call(authorization=authority.header(capability, selector, 60, time.time()))
            header = pb.Header(
                process_id=pb.ProcessSpec.ID(zone=ZONE, suffix="broker-1"),
                route=broker.keyspace.journal_route(JOURNAL),
                etcd=broker.keyspace.header,
            )
            requests: asyncio.Queue[pb.ReplicateRequest | None] = asyncio.Queue()

            async def sending():
                while (request := await requests.get()) is not None:
                    yield request

            responses = broker.service.replicate(sending(), call)
            index = None
            if (replica := broker.resolver.replica(JOURNAL)) is not None:
                index = replica.index
            for step in case["trace"]:
                if "check" in step:
                    assert index.summary().end == int(step["check"].rpartition(" ")[2])
                elif step.get("P") == "half-close":
                    requests.put_nowait(None)
                elif "P" in step:
                    requests.put_nowait(request_of(step["P"], header))
                    await asyncio.sleep(0)
                elif step["A"] == "EOF":
                    assert await anext(responses, None) is None
                elif step["A"] == "gRPC error":
                    with pytest.raises(CallError):
                        await anext(responses)
                else:
                    response = await anext(responses)
                    expect = step["A"]
                    assert pb.Status.Name(response.status) == expect["status"]
                    assert response.HasField("header") == (
                        "header" in expect or "route_endpoints" in expect
                    )
                    if "route_endpoints" in expect:
                        assert not response.header.route.endpoints
                    if "fragment" in expect:
                        assert normal(response.fragment) == normal(
                            vectors.fragment(expect["fragment"])
                        )
                        assert response.registers == label_set(expect["registers"])
            await responses.aclose()
            del client
            if replica is not None:
                assert replica.spool.free
                assert replica.spool.peek().uncommitted_bytes == 0

    def request_of(value, header):
        request = pb.ReplicateRequest(acknowledge=value.get("acknowledge", False))
        if "content" in value:
            request.content = value["content"].encode()
            request.content_delta = value["content_delta"]
            return request
        proposal = {"journal": value.get("journal", JOURNAL), "compression_codec": "NONE"}
        proposal |= value.get("proposal", {})
        request.proposal.CopyFrom(vectors.fragment(proposal))
        if proposal.get("end", 0) > proposal.get("begin", 0) and "sum" not in proposal:
            request.proposal.sum.part1 = 1
        request.registers.CopyFrom(label_set(value.get("registers")))
        if "header" in value:
            request.header.CopyFrom(header)
        return request

    run(scenario())


def test_a_stream_that_does_not_begin_with_a_header_is_refused(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            await cluster.start()
            service = cluster.brokers["broker-1"].service

            async def nothing():
                return
                yield

            assert [r async for r in service.replicate(nothing(), Call())] == []

            async def headless():
                proposal = pb.Fragment(journal=JOURNAL, compression_codec=pb.NONE)
                yield pb.ReplicateRequest(proposal=proposal, acknowledge=True)

            with pytest.raises(GazetteError, match="header"):
                await anext(service.replicate(headless(), Call()))

    run(scenario())


def test_another_route_is_answered_with_ours(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            broker = cluster.brokers["broker-1"]
            await cluster.member("peer-2")
            await client.apply(journal_spec(JOURNAL, replication=2))
            await cluster.assign(JOURNAL, "peer-2", "broker-1")
            header = pb.Header(
                process_id=pb.ProcessSpec.ID(zone=ZONE, suffix="broker-1"),
                route=pb.Route(
                    members=[pb.ProcessSpec.ID(zone=ZONE, suffix="broker-1")], primary=0
                ),
                etcd=broker.keyspace.header,
            )

            async def proposing():
                yield pb.ReplicateRequest(
                    header=header,
                    proposal=pb.Fragment(journal=JOURNAL, compression_codec=pb.NONE),
                    acknowledge=True,
                )

            (response,) = [r async for r in broker.service.replicate(proposing(), Call())]
            assert response.status == pb.WRONG_ROUTE
            assert len(response.header.route.members) == 2

    run(scenario())


# ------------------------------------------------------- brokers among themselves


class RecordingPeer(Peers):
    """A primary elsewhere, which keeps what was proxied to it."""

    def __init__(self, response=None, error=None):
        super().__init__()
        self.items: list = []
        self.response, self.error = response, error
        self.began = asyncio.Event()
        self.ended_by: BaseException | None = None

    async def append(self, requests, target=None):
        try:
            async for item in requests:
                self.items.append(item)
                self.began.set()
        except BaseException as error:
            self.ended_by = error
            raise
        if self.error is not None:
            raise self.error
        return self.response


def test_an_append_is_proxied_as_it_comes(etcd, tmp_path):
    assert [c.values[0]["client"] for c in cases("broker", "append_proxy")] == [
        ["opening", "content:foobar", "empty", "half-close"],
        ["opening", "half-close"],
        ["opening", "cancel"],
    ]

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            response = pb.AppendResponse(status=pb.WRONG_APPEND_OFFSET, total_chunks=77)
            peer = RecordingPeer(response)
            await cluster.member("peer-2", peer)
            await client.apply(journal_spec(JOURNAL))
            await cluster.assign(JOURNAL, "peer-2")

            assert await client.append(f"{JOURNAL};meta", b"foobar") == response
            opening, content, commit = peer.items
            assert opening.journal == JOURNAL
            assert opening.header.process_id.suffix == "peer-2"
            assert (content, commit) == (b"foobar", pb.AppendRequest())

            peer.items, peer.error = [], UnavailableError("as the peer says")
            with pytest.raises(UnavailableError, match="as the peer says"):
                await client.transport.append(stream(pb.AppendRequest(journal=JOURNAL)))
            assert len(peer.items) == 1

            peer.began.clear()

            async def hanging():
                yield pb.AppendRequest(journal=JOURNAL)
                await asyncio.Event().wait()

            append = asyncio.ensure_future(client.transport.append(hanging()))
            await asyncio.wait_for(peer.began.wait(), LIMIT_S)
            append.cancel()
            with pytest.raises(asyncio.CancelledError):
                await append
            assert isinstance(peer.ended_by, asyncio.CancelledError)

    run(scenario())


def test_a_member_whose_key_is_gone_is_unavailable_and_we_go_on(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            await client.apply(journal_spec(JOURNAL))
            await cluster.assign(JOURNAL, "gone-7")
            for call in (
                client.append(JOURNAL, b"x"),
                client.read(JOURNAL),
                client.fragments(JOURNAL),
            ):
                with pytest.raises(UnavailableError):
                    await call
            await cluster.assign(JOURNAL, "broker-1")
            assert (await client.append(JOURNAL, b"x")).status == pb.OK

    run(scenario())


def test_statuses_of_journals_that_lack_members(etcd, tmp_path):
    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            await client.apply(
                journal_spec("no/primary"),
                journal_spec("no/members"),
                journal_spec("not/enough/peers", replication=2),
            )
            await cluster.assign("no/primary", None, "broker-1")
            await cluster.assign("not/enough/peers", "broker-1")
            for journal, status in (
                ("no/primary", pb.NO_JOURNAL_PRIMARY_BROKER),
                ("no/members", pb.NO_JOURNAL_PRIMARY_BROKER),
                ("not/enough/peers", pb.INSUFFICIENT_JOURNAL_BROKERS),
                ("is/unknown", pb.JOURNAL_NOT_FOUND),
                ("", pb.JOURNAL_NOT_FOUND),
            ):
                response = await client.append(journal, b"x")
                assert pb.Status.Name(response.status) == pb.Status.Name(status)
                assert response.header.process_id.suffix == "broker-1"
            with pytest.raises(GazetteError):
                await client.append("/invalid/name", b"x")

    run(scenario())


def test_the_route_is_written_once_into_every_assignment(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            peer = ScriptedPeer()
            await cluster.member("peer-2", peer)
            await client.apply(journal_spec(JOURNAL, replication=2))
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            await client.append(JOURNAL, b"x")
            broker = cluster.brokers["broker-1"]
            entries = broker.keyspace.assignments(JOURNAL)
            route = broker.keyspace.journal_route(JOURNAL)
            assert [entry.value for entry in entries] == [route, route]
            assert not any(entry.value.endpoints for entry in entries)
            # Ours still hangs on our lease, the other one on none.
            assert [entry.lease for entry in entries] == [broker.lease, 0]
            revision = broker.keyspace.revision
            await client.append(JOURNAL, b"y")
            assert broker.keyspace.revision == revision

    run(scenario())


def test_too_many_members_are_waited_for(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start()
            await cluster.member("peer-2", ScriptedPeer())
            await client.apply(journal_spec(JOURNAL))
            await cluster.assign(JOURNAL, "broker-1", "peer-2")
            append = asyncio.ensure_future(client.append(JOURNAL, b"x"))
            async with asyncio.timeout(LIMIT_S):
                await cluster.brokers["broker-1"].keyspace.wait_for_update()
            assert not append.done()
            await cluster.assign(JOURNAL, "broker-1")
            assert (await asyncio.wait_for(append, LIMIT_S)).status == pb.OK

    run(scenario())
