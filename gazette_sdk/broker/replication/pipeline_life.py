"""Begin and end of a replica's pipeline, which owns the replica's spool in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.replication.peer_stream import OpenStream
from gazette_sdk.broker.replication.peer_streams import PeerStreams
from gazette_sdk.broker.replication.pipeline import Pipeline
from gazette_sdk.broker.resolver import Resolution
from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import ReplicateItem, Target

__all__ = ["start_pipeline", "tear_down_pipeline"]


async def start_pipeline(
    replica: Replica, resolution: Resolution, peers: Transport, streams: PeerStreams
) -> Pipeline:
    """Return a new pipeline over a route, not synchronized yet. The caller owns its slot.

    Args:
        replica: ours.
        resolution: of the journal, to us.
        peers: carries replication.
        streams: those of this broker.

    Raises:
        InvalidatedError: the resolution is old.
        UnavailableError: another stream did not release our spool in time.
    """
    header = resolution.header
    try:
        async with asyncio.timeout(streams.answer_timeout_s):
            spool = await replica.spool.take(resolution.invalidated)
    except TimeoutError:
        raise UnavailableError(
            "the journal's former primary still holds our replica; try again",
            journal=resolution.journal,
        ) from None
    open_stream = _opener(peers, header.route)
    peer_streams = [
        streams.open(member, open_stream)
        for member in header.route.members
        if member != header.process_id
    ]
    if peer_streams:
        replica.index.hold(is_told=False)
    return Pipeline(
        header,
        spool,
        peer_streams,
        acknowledged_end=replica.index.readable_end,
        on_acknowledged=replica.acknowledge,
    )


async def tear_down_pipeline(replica: Replica, pipeline: Pipeline) -> None:
    """Release the spool, and let the streams end in the background.

    A new pipeline tells the peers what this one cannot tell any more: a pulse makes it.
    """
    replica.ready = None
    try:
        await pipeline.tear_down()
    finally:
        replica.spool.put(pipeline.spool)
    replica.in_background(pipeline.ended())
    if pipeline.may_leave_untold and replica.want_pulse is not None:
        replica.want_pulse()


def _opener(peers: Transport, route: pb.Route) -> OpenStream:
    def open_stream(
        peer: pb.ProcessSpec.ID, requests: AsyncIterator[ReplicateItem]
    ) -> AsyncIterator[pb.ReplicateResponse]:
        return peers.replicate(requests, Target(route=route, member=peer))

    return open_stream
