"""The stream to one peer: what breaks it, and what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gazette_sdk.broker.replication import peer_stream
from gazette_sdk.broker.replication.peer_stream import PeerStream
from gazette_sdk.broker.replication.pipeline import Pipeline
from gazette_sdk.errors import CallError, DeadlineExceededError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.wire import ReplicateItem
from support.etcd import run
from support.replication_peers import HEADER, PEERS, proposal, started
from support.spools import SpoolUser


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


@pytest.mark.parametrize(
    ("asks", "breaks", "waited_s"),
    [
        (True, "no HELLO", 1.0),
        (True, "no answer", 2.0),
        (False, "no HELLO", 0.0),
    ],
)
def test_a_broken_stream_tells_how_long_its_peer_was_waited_for(asks, breaks, waited_s):
    async def scenario():
        begun = asyncio.Event()

        async def serve(_peer, _requests):
            begun.set()
            await asyncio.sleep(0.1 if breaks == "no HELLO" else 9)
            raise UnavailableError("no HELLO")
            yield

        stream = PeerStream(PEERS[0], serve, answer_timeout_s=0.2)
        assert stream.waited_s == 0
        if asks:
            stream.expect()
        await begun.wait()
        await asyncio.wait([stream._task])
        assert stream.waited_s >= waited_s / 10 - 0.001
        assert bool(stream.waited_s) == asks

    run(scenario())


def test_an_answer_ends_the_wait_for_a_peer(directory):
    async def scenario():
        pipeline, (peer,) = started(directory, 1)
        answers = await pipeline.scatter(proposal(pipeline.spool))
        await asyncio.sleep(0.05)
        peer.ok()
        await pipeline.gather(answers)
        pipeline.fail(UnavailableError("gone"))
        await pipeline.ended()
        assert pipeline.streams[0].waited_s == 0
        await pipeline.tear_down()

    run(scenario())
