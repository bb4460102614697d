"""Replication as a call, over every wire."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.wire import Target
from support.scripted_broker import RefusalError, header, in_loop, route_to
from support.wires import CHOSEN, WAYS, over

everywhere = over(*WAYS, *CHOSEN)


@everywhere
@in_loop
async def test_replication_streams_both_ways(wire):
    proposal = pb.ReplicateRequest(
        header=header(),
        proposal=pb.Fragment(journal="a/journal", compression_codec=pb.NONE),
        acknowledge=True,
    )
    async with wire.served() as (broker, transport):

        async def on_replicate(requests):
            async for request in requests:
                if request.acknowledge:
                    yield pb.ReplicateResponse()

        broker.on_replicate = on_replicate
        queue: asyncio.Queue[pb.ReplicateRequest | None] = asyncio.Queue()

        async def requests():
            while (request := await queue.get()) is not None:
                yield request

        route = route_to(broker.address)
        responses = transport.replicate(requests(), Target(route, route.members[0]))
        for _ in range(3):
            queue.put_nowait(proposal)
            assert await anext(responses) == pb.ReplicateResponse()
        queue.put_nowait(None)
        assert await anext(responses, None) is None
        assert broker.half_closes == 1


@everywhere
@in_loop
async def test_an_error_of_replicated_requests_is_raised_to_the_one_who_reads(wire):
    async with wire.served() as (broker, transport):

        async def on_replicate(requests):
            async for _ in requests:
                yield pb.ReplicateResponse()

        async def failing():
            yield pb.ReplicateRequest(acknowledge=True)
            raise ZeroDivisionError("the source")

        broker.on_replicate = on_replicate
        with pytest.raises(ZeroDivisionError):
            async for _ in transport.replicate(failing(), Target()):
                pass


@everywhere
@in_loop
async def test_an_early_refusal_of_replication_is_reported_as_it_is(wire):
    async with wire.served() as (broker, transport):

        async def on_replicate(requests):
            await anext(requests)
            raise RefusalError(grpc.StatusCode.UNAUTHENTICATED, "no token")
            yield  # pragma: no cover - makes it a generator

        async def requests():
            for _ in range(20):
                yield pb.ReplicateRequest(content=b"x" * (128 << 10), content_delta=1)

        broker.on_replicate = on_replicate
        for _ in range(50):
            with pytest.raises(UnauthenticatedError, match="no token"):
                async for _ in transport.replicate(requests(), Target()):
                    pass
