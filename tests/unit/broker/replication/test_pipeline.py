"""The pipeline: appends scattered to the peers, and their answers gathered."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.broker.replication.pipeline import judge_acks
from gazette_sdk.errors import CallError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from support.etcd import run
from support.replication_peers import HEADER, PEERS, proposal, started

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
        pipeline._report_timer.cancel()
        pipeline._report_now()
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


def test_a_pipeline_that_ends_before_its_answers_leaves_peers_untold(directory):
    async def scenario():
        pipeline, (peer,) = started(directory, 1)
        assert not pipeline.peers_may_be_ahead
        await pipeline.scatter(proposal(pipeline.spool))
        await pipeline.scatter_content(b"one", 0)
        answers = await pipeline.propose(
            pipeline.spool.next(), pipeline.spool.registers, acknowledge=True
        )
        await pipeline.tear_down()
        assert pipeline.peers_may_be_ahead
        peer.ok()
        peer.ok()
        await pipeline.acknowledged(answers)
        assert pipeline.peers_may_be_ahead
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
        assert not pipeline.peers_may_be_ahead
        await pipeline.ended()

    run(scenario())
