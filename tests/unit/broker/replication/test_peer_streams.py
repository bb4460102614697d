"""The streams and calls to all peers."""

from __future__ import annotations

import asyncio
import gc

import pytest

from gazette_sdk.broker.replication.peer_stream import PeerStreams
from gazette_sdk.errors import CallError, UnavailableError
from support.etcd import run
from support.replication_peers import PEERS, Peer


def test_streams_to_one_peer_break_together_and_are_reported_once_each(directory):
    async def scenario():
        reported = []
        streams = PeerStreams(on_broken=lambda peer, error, _: reported.append((peer, error)))
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


def test_a_call_has_ended_when_its_caller_gave_it_up():
    """It may read from a generator that the caller closes next."""

    async def scenario():
        streams, ended = PeerStreams(), []

        async def slow_to_end():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                ended.append(True)

        call = asyncio.ensure_future(streams.until_gone(PEERS[0], slow_to_end()))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert ended

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


def test_calls_to_a_former_primary_end_if_they_do_not_end_soon():
    """It finishes its append in progress; if it is cut off from us, its answer never comes."""

    async def scenario():
        streams = PeerStreams()
        answer = asyncio.get_running_loop().create_future()

        async def answered():
            return await answer

        async def frozen():
            await asyncio.Event().wait()

        peer = PEERS[0]
        former = asyncio.ensure_future(streams.until_gone(peer, frozen(), "a/journal"))
        finishing = asyncio.ensure_future(streams.until_gone(peer, answered(), "a/journal"))
        other = asyncio.ensure_future(streams.until_gone(peer, frozen(), "another/journal"))
        await asyncio.sleep(0)
        streams.lead_no_more(peer.zone, peer.suffix, "a/journal", 0.01)
        again = asyncio.ensure_future(streams.until_gone(peer, frozen(), "a/journal"))
        answer.set_result("answer")
        assert await finishing == "answer"
        with pytest.raises(UnavailableError, match="leads the journal no more"):
            await former
        for call in (other, again):
            assert not call.done()
            call.cancel()
        await asyncio.wait([other, again])

    run(scenario())
