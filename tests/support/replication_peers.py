"""Peers of a replication pipeline, whose answers the test gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gazette_sdk.broker.replication.peer_stream import PeerStream
from gazette_sdk.broker.replication.pipeline import Pipeline
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.wire import ReplicateItem, as_requests
from support.spools import SpoolUser

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


def started(directory, count=2, answer_timeout_s=None):
    peers = [Peer() for _ in range(count)]
    spool = SpoolUser(directory).spool
    streams = [
        PeerStream(at, peer.serve, answer_timeout_s=answer_timeout_s)
        for at, peer in zip(PEERS[:count], peers, strict=True)
    ]
    return Pipeline(HEADER, spool, streams), peers
