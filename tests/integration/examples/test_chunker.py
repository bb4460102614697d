"""A chunker of stream_sum finds sums that are wrong, repeated or late, and waits out outages."""

from __future__ import annotations

import asyncio

import pytest

from examples.stream_sum.chunker import Chunker, WrongSumError
from examples.stream_sum.messages import SUMS, TO_SUMS, Chunk, Sum, key_of
from gazette_sdk import Publisher, Reader
from gazette_sdk.errors import UnavailableError
from gazette_sdk.transport import loop as sdk_loop
from support import stream_sum

TIMEOUT_S = 60.0


async def publish_sums(transport, again, change):
    """Publish the sum of each stream that ends, changed, and so many times."""
    found = {}
    chunks = "app.gazette.dev/message-type=stream_sum.Chunk"
    async with Publisher(mapping=TO_SUMS, transport=transport) as publisher:
        async for envelope in Reader(Chunk, chunks, block=True, transport=transport):
            key = key_of(envelope.message)
            if found.setdefault(key, Sum(tuple(key))).add(envelope.message):
                for _ in range(again):
                    await publisher.apublish(change(found[key]))


def chunk(cluster, *, timeout_s=TIMEOUT_S, again=1, change=lambda found: found):
    """Run a chunker beside something that sums; return the chunker."""
    cluster.apply(stream_sum.journals(replication=1))

    async def run():
        chunker = Chunker(cluster.transport, chunks=2, timeout_s=timeout_s)
        summing = asyncio.create_task(publish_sums(cluster.transport, again, change))
        try:
            await chunker.run(workers=2, count=3)
        finally:
            summing.cancel()
            await asyncio.wait([summing])
        return chunker

    return sdk_loop.run(run(), TIMEOUT_S)


def test_right_sums_are_counted_although_brokers_were_away(gazette, monkeypatch):
    real = gazette.transport.list
    refused = []

    def refusing(request):
        named = [label.value for label in request.selector.include.labels]
        if named == [SUMS] and not refused:
            refused.append(request)
            raise UnavailableError("no broker is there yet")
        return real(request)

    monkeypatch.setattr(gazette.transport, "list", refusing)
    chunker = chunk(gazette)
    assert chunker.count == 6
    assert 0 < chunker.latest_s < TIMEOUT_S
    assert refused


def test_a_wrong_sum_is_found(gazette):
    def change(found):
        return Sum(found.id, found.seq_no, found.value ^ 1)

    with pytest.raises(WrongSumError, match="and has to be"):
        chunk(gazette, change=change)


def test_a_sum_that_comes_again_is_found(gazette):
    with pytest.raises(WrongSumError, match="was delivered again"):
        chunk(gazette, again=2)


def test_a_late_sum_is_found(gazette):
    with pytest.raises(WrongSumError, match=r"is not there after 0\.3 s"):
        chunk(gazette, timeout_s=0.3, again=0)
