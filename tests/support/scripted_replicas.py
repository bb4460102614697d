"""Journals that a real broker leads, whose replicas follow a script and keep what they get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.wire import as_requests
from support import vectors
from support.brokers import LIMIT_S, Peers, journal_spec
from support.vectors import label_set, normal

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
        async for request in as_requests(requests):
            if is_repeated(request, mine):
                continue
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


def is_repeated(request: pb.ReplicateRequest, earlier: Sequence[pb.ReplicateRequest]) -> bool:
    """Return True for a proposal repeated only to tell what all replicas have acknowledged."""
    return (
        bool(earlier)
        and request.HasField("proposal")
        and not request.acknowledge
        and request.proposal == earlier[-1].proposal
        and request.registers == earlier[-1].registers
    )


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

    monkeypatch.setattr("gazette_sdk.broker.append.pulse.Pulses.run", none)
