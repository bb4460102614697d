"""A reader that pauses for longer than silence is borne is not taken for a silent one."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import stream_calls as stream_liveness
from gazette_sdk.server import stream as stream_connection
from gazette_sdk.server import stream_server
from support.scripted_broker import in_loop, read_metadata
from support.wires import NETWORK, over

CHUNK_BYTES = 128 << 10
SILENCE_S = 0.4
PAUSE_S = 2.5 * SILENCE_S


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """Either end asks after half a bound for a sign of life, which is 20 s otherwise."""
    monkeypatch.setattr(stream_liveness, "PING_AFTER_S", SILENCE_S / 2)
    monkeypatch.setattr(stream_liveness, "SILENCE_MAX_S", SILENCE_S)
    monkeypatch.setattr(stream_liveness, "STALL_MAX_S", SILENCE_S)
    monkeypatch.setattr(stream_server, "TICK_S", SILENCE_S / stream_connection.SILENT_TICKS_MAX)


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param(200, id="while more waits than buffers hold"),
        pytest.param(8, id="while some waits at its own end"),
        pytest.param(1, id="while nothing waits"),
    ],
)
@over(*NETWORK)  # within a process nobody has to show that it lives
@in_loop
async def test_a_pause_loses_no_content_and_costs_no_further_call(chunks, wire):
    contents = [bytes([number]) * CHUNK_BYTES for number in range(chunks)]
    resumed = asyncio.Event()
    async with wire.served() as (broker, transport):

        async def on_read(request):
            yield read_metadata(0, 0, 1 << 30)
            for number, content in enumerate(contents):
                yield pb.ReadResponse(offset=number * CHUNK_BYTES, content=content)
            await resumed.wait()  # as a read that follows the head
            yield pb.ReadResponse(offset=chunks * CHUNK_BYTES, content=b"later")

        broker.on_read = on_read
        request = pb.ReadRequest(journal="a/journal", block=True)
        async with aclosing(transport.read(request)) as reading:
            await anext(reading)
            content = await anext(reading)
            await asyncio.sleep(PAUSE_S)
            resumed.set()
            async for item in reading:
                content += item
                if content.endswith(b"later"):
                    break
        assert content == b"".join(contents) + b"later"
        assert len(broker.received) == 1
