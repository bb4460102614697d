"""A StreamTransport at a scripted server, and its calls."""

from __future__ import annotations

import asyncio
import contextlib

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.stream.wire import StreamTransport
from support.scripted_broker import header as message_header
from support.scripted_stream import ScriptedStream

__all__ = ["APPLIED", "apply", "idle", "items", "obliging", "pool", "read", "served"]

APPLIED = pb.ApplyResponse(header=message_header())


@contextlib.asynccontextmanager
async def served(script, **options):
    async with ScriptedStream(script) as server:
        async with StreamTransport(server.address, **options) as transport:
            yield server, transport
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()} - server._tasks
        assert not others


async def items(*contents, commit=True):
    yield pb.AppendRequest(journal="a/journal")
    for content in contents:
        yield (await content) if isinstance(content, asyncio.Future) else content
    if commit:
        yield pb.AppendRequest()


def apply(transport):
    return transport.apply(pb.ApplyRequest())


def read(transport, **fields):
    return transport.read(pb.ReadRequest(journal="a/journal", **fields))


async def obliging(peer):
    """Answers every Apply."""
    await peer.greet()
    while True:
        peer.answer((await peer.call()).call, APPLIED)


def pool(transport):
    """The connections of this event loop."""
    return transport.wire.pools.here()


def idle(transport):
    return [c for endpoint in pool(transport)._endpoints.values() for c in endpoint.idle]
