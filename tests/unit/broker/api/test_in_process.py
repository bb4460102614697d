from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.errors import ClosedError
from gazette_sdk.protocol import broker_pb2 as pb
from support.scripted_broker import ScriptedBroker, in_loop, read_metadata
from support.scripted_service import ScriptedService

READ = pb.ReadRequest(journal="a/journal", block=True)


def waiting_broker():
    """A broker whose reads begin, and never go on; whose applies are not answered."""
    broker = ScriptedBroker()

    async def on_read(request):
        yield read_metadata(0, 0, 9)
        await asyncio.Event().wait()

    async def on_apply(request):
        await asyncio.Event().wait()

    broker.on_read, broker.on_apply = on_read, on_apply
    return broker


def transport():
    return InProcessTransport(ScriptedService(waiting_broker()))


async def waits():
    """Let tasks come to where they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


@in_loop
async def test_closing_ends_what_waits_and_nothing_that_its_caller_does_meanwhile():
    reached = transport()
    reading = reached.read(READ)
    await anext(reading)

    async def own_work():
        await asyncio.sleep(0.05)
        with pytest.raises(ClosedError, match="connect again"):
            await anext(reading)
        return "done"

    working = asyncio.create_task(own_work())
    applying = asyncio.create_task(reached.apply(pb.ApplyRequest()))
    await waits()
    await reached.aclose()
    with pytest.raises(ClosedError):
        await applying
    assert await working == "done"
    assert applying.cancelling() == 0


@in_loop
async def test_a_caller_who_is_cancelled_at_the_same_time_is_cancelled():
    reached = transport()
    applying = asyncio.create_task(reached.apply(pb.ApplyRequest()))
    await waits()
    await reached.aclose()
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying
