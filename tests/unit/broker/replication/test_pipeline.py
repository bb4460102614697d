from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from gazette_sdk.broker.append.machine import Input
from gazette_sdk.broker.replication import peer_stream
from gazette_sdk.broker.replication.agreement import judge_acks, judge_sync
from gazette_sdk.broker.replication.peer_stream import PeerStream
from gazette_sdk.broker.replication.peer_streams import PeerStreams
from gazette_sdk.broker.replication.pipeline import Pipeline
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.errors import CallError, DeadlineExceededError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.target import ReplicateItem
from gazette_sdk.transport.wires.replicate_items import as_requests
from support.etcd import run
from support.spools import SpoolUser
from support.vectors import build, cases, label_set

PEERS = [pb.ProcessSpec.ID(zone="A", suffix="one1"), pb.ProcessSpec.ID(zone="C", suffix="three")]
LOCAL = pb.ProcessSpec.ID(zone="B", suffix="two2")
HEADER = pb.Header(
    process_id=LOCAL,
    route=pb.Route(members=[PEERS[0], LOCAL, PEERS[1]], primary=1),
    etcd=pb.Header.Etcd(cluster_id=1, member_id=2, revision=100, raft_term=3),
)


class Peer:
    """A peer as its stream sees it: what it got, and answers that the test gives."""

    def __init__(self) -> None:
        self.got: list[pb.ReplicateRequest] = []
        self.answers: asyncio.Queue[pb.ReplicateResponse | Exception | None] = asyncio.Queue()
        self.half_closed = asyncio.Event()
        self.arrived = asyncio.Condition()

    async def serve(
        self, _: pb.ProcessSpec.ID, requests: AsyncIterator[ReplicateItem]
    ) -> AsyncIterator[pb.ReplicateResponse]:
        reading = asyncio.ensure_future(self._read(requests))
        try:
            while (answer := await self.answers.get()) is not None:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    async def _read(self, requests: AsyncIterator[ReplicateItem]) -> None:
        async for request in as_requests(requests):
            self.got.append(request)
            async with self.arrived:
                self.arrived.notify_all()
        self.half_closed.set()
        self.answers.put_nowait(None)

    async def received(self, count: int) -> list[pb.ReplicateRequest]:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.got) >= count)
        return self.got

    def ok(self) -> None:
        self.answers.put_nowait(pb.ReplicateResponse())


def proposal(spool, *, acknowledge=True):
    return pb.ReplicateRequest(
        proposal=spool.next(), registers=spool.registers, acknowledge=acknowledge
    )


@pytest.fixture
def directory(tmp_path):
    with SpoolDirectory(tmp_path / "spools") as made:
        yield made


def started(directory, count=2, answer_timeout_s=None):
    peers = [Peer() for _ in range(count)]
    spool = SpoolUser(directory).spool
    streams = [
        PeerStream(at, peer.serve, answer_timeout_s=answer_timeout_s)
        for at, peer in zip(PEERS[:count], peers, strict=True)
    ]
    return Pipeline(HEADER, spool, streams), peers


# ------------------------------------------------------------- scatter, gather


def test_the_first_proposal_carries_the_header_as_each_peer_should_see_it(directory):
    async def scenario():
        pipeline, peers = started(directory)
        answers = await pipeline.scatter(proposal(pipeline.spool))
        for peer in peers:
            peer.ok()
        await pipeline.gather(answers)
        await pipeline.scatter(proposal(pipeline.spool, acknowledge=False))
        for at, peer in zip(PEERS, peers, strict=True):
            first, second = await peer.received(2)
            assert first.header.process_id == at
            assert first.header.route == HEADER.route
            assert first.deprecated_journal == "a/journal"
            assert not second.HasField("header")
            assert not second.deprecated_journal
        await pipeline.tear_down()
        await pipeline.ended()

    run(scenario())


def test_appends_are_pipelined_and_each_gets_its_own_answers(directory):
    async def scenario():
        pipeline, (first, second) = started(directory)
        synced = await pipeline.scatter(proposal(pipeline.spool))
        first.ok(), second.ok()
        assert judge_acks(PEERS, await pipeline.gather(synced)) is None

        waiting = []
        for content in (b"one", b"two"):
            await pipeline.scatter_content(content, 0)
            answers = await pipeline.scatter(proposal(pipeline.spool))
            waiting.append(asyncio.ensure_future(pipeline.gather(answers)))
        # Both were sent before either is acknowledged.
        got = await first.received(5)
        assert [bool(r.content) for r in got] == [False, True, False, True, False]
        assert [r.proposal.end for r in got if r.HasField("proposal")] == [0, 3, 6]
        assert not any(w.done() for w in waiting)

        first.ok(), second.ok()
        assert judge_acks(PEERS, await waiting[0]) is None
        refusal = pb.ReplicateResponse(status=pb.PROPOSAL_MISMATCH)
        first.answers.put_nowait(refusal), second.ok()
        error = judge_acks(PEERS, await waiting[1])
        assert isinstance(error, CallError)
        assert "PROPOSAL_MISMATCH" in str(error)
        await pipeline.tear_down()
        await pipeline.ended()

    run(scenario())


def test_answers_of_a_cancelled_append_are_not_taken_for_those_of_the_next(directory):
    async def scenario():
        pipeline, (peer,) = started(directory, 1)
        lost = asyncio.ensure_future(
            pipeline.gather(await pipeline.scatter(proposal(pipeline.spool)))
        )
        await peer.received(1)
        lost.cancel()
        await asyncio.wait([lost])
        next_answers = await pipeline.scatter(proposal(pipeline.spool))
        peer.answers.put_nowait(pb.ReplicateResponse(status=pb.WRONG_ROUTE))
        peer.ok()
        (answer,) = await pipeline.gather(next_answers)
        assert answer.status == pb.OK
        await pipeline.tear_down()
        await pipeline.ended()

    run(scenario())


def test_a_broken_peer_fails_the_pipeline_and_the_others_are_still_served(directory):
    async def scenario():
        pipeline, (broken, healthy) = started(directory)
        answers = await pipeline.scatter(proposal(pipeline.spool))
        broken.answers.put_nowait(UnavailableError("gone"))
        healthy.ok()
        first, second = await pipeline.gather(answers)
        assert isinstance(first, UnavailableError)
        assert second.status == pb.OK
        assert pipeline.error is first

        await pipeline.scatter_content(b"baz", 0)
        answers = await pipeline.scatter(
            pb.ReplicateRequest(
                proposal=pipeline.spool.fragment,
                registers=pipeline.spool.registers,
                acknowledge=True,
            )
        )
        got = await healthy.received(3)
        assert (got[1].content, got[2].acknowledge) == (b"baz", True)
        assert len(broken.got) <= 1
        healthy.ok()
        first, second = await pipeline.gather(answers)
        assert isinstance(first, UnavailableError)
        assert second.status == pb.OK
        await pipeline.tear_down()
        await healthy.half_closed.wait()
        await pipeline.ended()

    run(scenario())


def test_a_peer_that_ends_its_stream_early_is_an_error(directory):
    async def scenario():
        pipeline, (peer,) = started(directory, 1)
        answers = await pipeline.scatter(proposal(pipeline.spool))
        peer.answers.put_nowait(None)
        (answer,) = await pipeline.gather(answers)
        assert isinstance(answer, CallError)
        (late,) = await pipeline.gather(await pipeline.scatter(proposal(pipeline.spool)))
        assert late is answer
        await pipeline.tear_down()
        await pipeline.ended()

    run(scenario())


def test_an_answer_that_nobody_asked_for_breaks_the_stream(directory):
    async def scenario():
        pipeline, (peer,) = started(directory, 1)
        peer.ok()
        await pipeline.ended()
        assert "an answer without a request" in str(pipeline.error)
        await pipeline.tear_down()

    run(scenario())


def test_a_peer_that_does_not_answer_is_given_up(directory):
    async def scenario():
        pipeline, (_, healthy) = started(directory, answer_timeout_s=0.05)
        answers = await pipeline.scatter(proposal(pipeline.spool))
        healthy.ok()
        first, second = await pipeline.gather(answers)
        assert isinstance(first, DeadlineExceededError)
        assert second.status == pb.OK
        assert pipeline.error is first
        await pipeline.tear_down()
        await pipeline.ended()

    run(scenario())


def test_an_overdue_answer_breaks_the_stream_though_nobody_waits_for_it(directory):
    async def scenario():
        pipeline, (_, healthy) = started(directory, answer_timeout_s=0.1)
        for _ in range(3):
            await pipeline.scatter(proposal(pipeline.spool))
            healthy.ok()
        await asyncio.wait([pipeline.streams[0]._task])
        assert isinstance(pipeline.error, DeadlineExceededError)
        await pipeline.tear_down()
        await pipeline.ended()

    run(scenario())


def test_an_append_waits_for_peers_that_read_slower_than_it_sends(directory, monkeypatch):
    monkeypatch.setattr(peer_stream, "SEND_BUFFER_BYTES", 10)

    async def scenario():
        reading = asyncio.Event()

        async def slow(
            _: pb.ProcessSpec.ID, requests: AsyncIterator[ReplicateItem]
        ) -> AsyncIterator[pb.ReplicateResponse]:
            await reading.wait()
            async for _request in requests:
                pass
            return
            yield

        spool = SpoolUser(directory).spool
        pipeline = Pipeline(HEADER, spool, [PeerStream(PEERS[0], slow)])
        await pipeline.scatter_content(bytes(10), 0)
        sending = asyncio.ensure_future(pipeline.scatter_content(bytes(10), 10))
        await asyncio.sleep(0)
        assert not sending.done()
        reading.set()
        await sending
        await pipeline.tear_down()
        await pipeline.ended()
        assert spool.uncommitted_bytes == 0

    run(scenario())


def test_a_peer_that_takes_no_content_is_given_up(directory, monkeypatch):
    monkeypatch.setattr(peer_stream, "SEND_BUFFER_BYTES", 10)

    async def scenario():
        async def stuck(_peer, _requests):
            await asyncio.Event().wait()
            yield

        spool = SpoolUser(directory).spool
        stream = PeerStream(PEERS[0], stuck, answer_timeout_s=0.05)
        pipeline = Pipeline(HEADER, spool, [stream])
        await pipeline.scatter_content(bytes(20), 0)
        assert isinstance(pipeline.error, DeadlineExceededError)
        await pipeline.tear_down()
        await pipeline.ended()

    run(scenario())


def test_streams_to_one_peer_break_together_and_are_reported_once_each(directory):
    async def scenario():
        reported = []
        streams = PeerStreams(on_broken=lambda peer, error: reported.append((peer, error)))
        peers = [Peer() for _ in range(3)]
        opened = [
            streams.open(at, peer.serve)
            for at, peer in zip([PEERS[0], PEERS[0], PEERS[1]], peers, strict=True)
        ]
        answers = [stream.expect() for stream in opened]
        gone = UnavailableError("gone")
        streams.fail(PEERS[0].zone, PEERS[0].suffix, gone)
        streams.fail("no", "such peer", gone)
        assert [answer.done() for answer in answers] == [True, True, False]
        assert await answers[0] is gone
        await opened[0].ended()
        await opened[1].ended()
        assert reported == [(PEERS[0], gone)] * 2
        opened[2].half_close()
        peers[2].ok()
        await opened[2].ended()
        assert len(reported) == 2
        assert not streams._open

    run(scenario())


def test_tearing_down_rolls_back_and_half_closes(directory):
    async def scenario():
        pipeline, (peer,) = started(directory, 1)
        synced = await pipeline.scatter(proposal(pipeline.spool))
        peer.ok()
        await pipeline.gather(synced)
        await pipeline.scatter_content(b"uncommitted", 0)
        spool = await pipeline.tear_down()
        assert spool.uncommitted_bytes == 0
        await pipeline.ended()
        assert peer.half_closed.is_set()
        assert pipeline.error is None

    run(scenario())


def test_without_peers_there_is_nobody_to_wait_for(directory):
    async def scenario():
        pipeline, _ = started(directory, 0)
        assert await pipeline.gather(await pipeline.scatter(proposal(pipeline.spool))) == []
        await pipeline.scatter_content(b"x", 0)
        await pipeline.scatter(proposal(pipeline.spool))
        assert pipeline.spool.fragment.end == 1
        await pipeline.tear_down()
        await pipeline.ended()

    run(scenario())


@pytest.mark.parametrize("count", [0, 2])
def test_a_proposal_goes_to_everybody_and_is_committed_by_us(count, directory):
    async def scenario():
        pipeline, peers = started(directory, count)
        synced = await pipeline.scatter(proposal(pipeline.spool))
        for peer in peers:
            peer.ok()
        await pipeline.gather(synced)
        await pipeline.scatter_content(b"content", 0)
        spool = pipeline.spool
        following = spool.next()
        answers = await pipeline.propose(following, spool.registers, acknowledge=True)
        assert spool.fragment is following
        assert len(answers) == count
        for peer in peers:
            *_, last = await peer.received(3)
            assert (last.proposal, last.acknowledge) == (following, True)
            peer.ok()
        await pipeline.gather(answers)
        assert await pipeline.propose(spool.fragment, spool.registers, acknowledge=False) == []
        await pipeline.tear_down()
        await pipeline.ended()

    run(scenario())


def test_our_own_spool_never_refuses(directory):
    async def scenario():
        pipeline, _ = started(directory, 0)
        wrong = pb.Fragment(journal="a/journal", begin=0, end=5, compression_codec=pb.NONE)
        with pytest.raises(AssertionError, match="our own spool"):
            await pipeline.scatter(pb.ReplicateRequest(proposal=wrong))

    run(scenario())


def test_a_pipeline_serves_exactly_its_route(directory):
    async def scenario():
        pipeline, _ = started(directory, 0)
        same = pb.Header()
        same.CopyFrom(HEADER)
        same.route.endpoints.extend(["http://a", "", "http://c"])
        assert pipeline.serves(HEADER)
        assert pipeline.serves(same)
        same.route.primary = 0
        assert not pipeline.serves(same)

    run(scenario())


# ------------------------------------------------------------- classification


def answer_of(value):
    response = pb.ReplicateResponse(status=pb.Status.Value(value["status"]))
    if "route" in value:
        response.header.route.CopyFrom(build(pb.Route, value["route"]))
        response.header.etcd.revision = value["revision"]
    if "fragment" in value:
        response.fragment.CopyFrom(build(pb.Fragment, value["fragment"]))
        response.registers.CopyFrom(label_set(value["registers"]))
    return response


@pytest.mark.parametrize("case", cases("broker", "gather_sync"))
def test_synchronization_outcomes(case):
    peers = [
        pb.ProcessSpec.ID(zone="A", suffix="1"),
        pb.ProcessSpec.ID(zone="C", suffix="3"),
    ]
    route = pb.Route(
        members=[peers[0], pb.ProcessSpec.ID(zone="B", suffix="2"), peers[1]], primary=1
    )
    header = pb.Header(route=route, etcd=pb.Header.Etcd(revision=100))
    answers = [answer_of(case["responses"][name]) for name in "AC"]
    sync = judge_sync(header, peers, case["spool_end"], answers)
    expect = case["expect"]
    assert (sync.input is Input.FAILED) == expect["error"]
    assert sync.roll_to == expect["roll_to"]
    assert sync.read_through == expect["read_through_revision"]
    if expect["roll_registers"] is None:
        assert sync.registers is None
    else:
        assert sync.registers == label_set(expect["roll_registers"])
    if expect["error"]:
        assert ["AC"[index] for index in sync.failed] == expect["error_peers"]
        assert sync.error is not None
    else:
        assert sync.input is (Input.ROLL if expect["roll_to"] else Input.LATER)


def sync_of(*answers, head=10):
    return judge_sync(HEADER, PEERS, head, answers)


def mismatch(begin, end, registers=None):
    return pb.ReplicateResponse(
        status=pb.PROPOSAL_MISMATCH,
        fragment=pb.Fragment(begin=begin, end=end),
        registers=registers,
    )


OK = pb.ReplicateResponse()


def test_agreement_is_everybodys():
    assert sync_of(OK, OK).input is Input.AGREED
    assert sync_of(OK, UnavailableError("gone")).input is Input.FAILED
    assert sync_of(OK, pb.ReplicateResponse(status=pb.NOT_JOURNAL_BROKER)).input is Input.FAILED


def test_a_mismatch_at_offset_zero_is_answered_by_another_round():
    found = sync_of(mismatch(0, 0), OK, head=0)
    assert (found.input, found.roll_to, found.registers) == (Input.ROLL, 0, None)


def test_a_peer_behind_us_is_an_error():
    assert sync_of(mismatch(0, 5), OK).input is Input.FAILED


@pytest.mark.parametrize("swapped", [False, True])
def test_the_largest_end_wins_whatever_the_order(swapped):
    label = pb.LabelSet(labels=[pb.Label(name="a", value="1")])
    answers = [mismatch(0, 30, label), mismatch(0, 20)]
    found = sync_of(*(reversed(answers) if swapped else answers))
    assert (found.input, found.roll_to, found.registers) == (Input.ROLL, 30, label)


def test_the_largest_later_revision_is_resolved_at():
    def elsewhere(revision):
        response = pb.ReplicateResponse(status=pb.WRONG_ROUTE)
        response.header.etcd.revision = revision
        response.header.route.primary = -1
        return response

    found = sync_of(elsewhere(200), elsewhere(300))
    assert (found.input, found.read_through) == (Input.LATER, 300)
    assert sync_of(elsewhere(100), OK).input is Input.FAILED


# ----------------------------------------------- what is acknowledged, and stored


def test_peers_are_told_with_the_next_request_or_soon_by_the_last_proposal(directory):
    async def scenario():
        pipeline, (peer, _) = started(directory)
        pipeline.acknowledged_end = 0
        await pipeline.scatter(proposal(pipeline.spool))
        (first,) = await peer.received(1)
        assert (first.HasField("acknowledged_through"), first.acknowledged_through) == (True, 0)

        await pipeline.scatter_content(b"one", 0)
        await pipeline.scatter(proposal(pipeline.spool))
        pipeline.tell_acknowledged(3)
        pipeline.tell_stored(2)
        content, commit, told = (await peer.received(4))[1:]
        assert not content.HasField("acknowledged_through")
        assert not commit.HasField("acknowledged_through")
        assert (told.acknowledged_through, told.stored_through) == (3, 2)
        assert (told.proposal, told.registers) == (commit.proposal, commit.registers)
        assert not told.acknowledge

        # In the middle of an append it would roll back.
        await pipeline.scatter_content(b"two", 0)
        pipeline.tell_acknowledged(4)
        pipeline.tell_acknowledged(3)
        pipeline._telling.cancel()
        pipeline._tell_now()
        await pipeline.scatter_content(b"three", 3)
        more = (await peer.received(6))[4:]
        assert [(r.content, r.acknowledged_through) for r in more] == [(b"two", 0), (b"three", 0)]
        await pipeline.scatter(proposal(pipeline.spool))
        assert (await peer.received(7))[6].acknowledged_through == 4

        # Whoever goes on without this primary knows as much as it did.
        pipeline.tell_acknowledged(11)
        await pipeline.tear_down()
        assert (await peer.received(8))[7].acknowledged_through == 11
        pipeline.fail(UnavailableError("over"))
        await pipeline.ended()

    run(scenario())


def test_the_error_of_a_call_that_its_caller_gave_up_is_not_reported():
    async def scenario():
        streams, reported = PeerStreams(), []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))

        async def breaking():
            try:
                await asyncio.Event().wait()
            finally:
                raise CallError("the connection is gone")

        call = asyncio.ensure_future(streams.until_gone(PEERS[0], breaking()))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        del call
        await asyncio.sleep(0.01)
        gc.collect()
        assert not reported
        assert not streams._calls

    run(scenario())


def test_a_call_to_a_peer_ends_when_the_peer_has_left():
    async def scenario():
        streams = PeerStreams()

        async def frozen():
            await asyncio.Event().wait()

        async def answered():
            return "answer"

        async def refused():
            raise CallError("no")

        assert await streams.until_gone(PEERS[0], answered()) == "answer"
        with pytest.raises(CallError, match="no"):
            await streams.until_gone(PEERS[0], refused())
        calls = [
            asyncio.ensure_future(streams.until_gone(peer, frozen()))
            for peer in (PEERS[0], PEERS[0], PEERS[1])
        ]
        await asyncio.sleep(0)
        streams.fail(PEERS[0].zone, PEERS[0].suffix, UnavailableError("left"))
        for call in calls[:2]:
            with pytest.raises(UnavailableError, match="left"):
                await call
        assert not calls[2].done()
        calls[2].cancel()
        await asyncio.wait([calls[2]])
        assert calls[2].cancelled()
        assert not streams._calls

    run(scenario())


def test_a_pipeline_that_ends_before_its_answers_leaves_peers_untold(directory):
    async def scenario():
        pipeline, (peer,) = started(directory, 1)
        assert not pipeline.may_leave_untold
        await pipeline.scatter(proposal(pipeline.spool))
        await pipeline.scatter_content(b"one", 0)
        answers = await pipeline.propose(
            pipeline.spool.next(), pipeline.spool.registers, acknowledge=True
        )
        await pipeline.tear_down()
        assert pipeline.may_leave_untold
        peer.ok()
        peer.ok()
        await pipeline.acknowledged(answers)
        assert pipeline.may_leave_untold
        await pipeline.ended()

    run(scenario())


def test_a_pipeline_that_told_what_all_have_leaves_nothing_untold(directory):
    async def scenario():
        pipeline, (peer,) = started(directory, 1)
        await pipeline.scatter(proposal(pipeline.spool))
        await pipeline.scatter_content(b"one", 0)
        answers = await pipeline.propose(
            pipeline.spool.next(), pipeline.spool.registers, acknowledge=True
        )
        peer.ok()
        peer.ok()
        await pipeline.acknowledged(answers)
        await pipeline.tear_down()
        assert not pipeline.may_leave_untold
        await pipeline.ended()

    run(scenario())
