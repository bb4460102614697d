"""Batches: their appends, their receipts, and the room they wait for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from operator import itemgetter

import pytest

from gazette_sdk import GazetteError, Publisher, mapping
from gazette_sdk.errors import (
    BackPressureError,
    ClosedError,
    MappingError,
    NotAllowedError,
)
from gazette_sdk.message.receipt import ReceiptTimeoutError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.memory_transport import MemoryTransport
from support.published import TO, WAIT_S, Own, bare, lines


def test_a_batch_costs_one_append_for_each_journal(orders):
    by_key = mapping.modulo("topic=orders", key=itemgetter("n"))
    with Publisher(by_key, transport=orders) as publisher:
        publisher.publish_batch([{"n": n} for n in range(4000)]).result(WAIT_S)
        assert len(orders.appends) == 4
        with publisher.transaction() as txn:
            txn.publish_batch([{"n": n} for n in range(4000)])
        assert len(orders.appends) == 12  # the acknowledgements wait until all is durable


def test_a_receipt_of_a_batch_waits_and_tells(gated):
    publisher = Publisher(TO, transport=gated)
    receipt = publisher.publish_batch([{"n": 1}, {"n": 2}])
    assert not receipt.done()
    assert "pending" in repr(receipt)
    for ask in (lambda: receipt.landed, lambda: receipt.total_chunks):
        with pytest.raises(GazetteError, match="not acknowledged yet"):
            ask()
    with pytest.raises(ReceiptTimeoutError):
        receipt.result(timeout=0.01)
    gated.opened()

    async def wait():
        async with asyncio.timeout(WAIT_S):
            return await receipt

    assert asyncio.run(wait()) is receipt
    assert receipt.length_bytes == len(gated.content_of("a/journal"))
    publisher.close()


def test_a_failed_batch_tells_why(gated):
    gated.append_faults = [pb.NOT_ALLOWED]
    publisher = Publisher(TO, transport=gated)
    receipt = publisher.publish_batch([{"n": 1}, {"n": 2}])
    gated.opened()
    with pytest.raises(NotAllowedError):
        receipt.result(WAIT_S)
    with pytest.raises(NotAllowedError):
        _ = receipt.landed
    assert "failed" in repr(receipt)
    with pytest.raises(NotAllowedError):
        publisher.close()


def test_delayed_chunks_are_told(transport):
    answers: concurrent.futures.Future[None] = concurrent.futures.Future()

    class Slow(MemoryTransport):
        async def append(self, requests, target=None):
            response = await super().append(requests)
            await asyncio.wrap_future(answers)
            response.total_chunks, response.delayed_chunks = 5, 3
            return response

    slow = Slow()
    slow.create("a/journal")
    with Publisher(TO, transport=slow) as publisher:
        one = publisher.publish({"n": 1})
        with pytest.raises(GazetteError):
            _ = one.total_chunks
        answers.set_result(None)
        one.result(WAIT_S)
        assert (one.total_chunks, one.delayed_chunks) == (5, 3)
        many = publisher.publish_batch([{"n": 1}]).result(WAIT_S)
        assert (many.total_chunks, many.delayed_chunks) == (5, 3)


def test_a_large_batch_waits_for_room(gated):
    publisher = Publisher(TO, transport=gated, pending_bytes_max=1000)
    done = threading.Event()
    messages = [{"n": n} for n in range(20_000)]

    def work():
        publisher.publish_batch(messages)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not done.wait(0.05)
    assert publisher._sender.connection().appends.pending_bytes < 400_000
    gated.opened()
    assert done.wait(WAIT_S)
    thread.join()
    publisher.close()
    assert bare(gated, "a/journal") == messages


def test_where_waiting_is_not_wanted_a_batch_is_taken_or_refused_as_a_whole(gated):
    publisher = Publisher(TO, transport=gated, pending_bytes_max=1000, when_full="raise")
    for kind in (dict, Own):
        with pytest.raises(BackPressureError, match="publish smaller batches"):
            publisher.publish_batch([kind(n=n) for n in range(1000)])
    receipt = publisher.publish_batch([{"text": "x" * 960}])
    with pytest.raises(BackPressureError, match="not acknowledged yet"):
        publisher.publish_batch([{"n": 1}])
    gated.opened()
    receipt.result(WAIT_S)
    publisher.close()
    assert len(lines(gated, "a/journal")) == 1
    with pytest.raises(ClosedError):
        publisher.publish_batch([{"n": 1}])


def test_on_the_sdks_own_loop_batches_wait_for_their_listings(transport):
    transport.create("a/journal")

    async def publish():
        publisher = Publisher(TO, transport=transport)
        async with asyncio.timeout(WAIT_S):
            first = publisher.publish({"n": 0})
            many = publisher.publish_batch([{"n": n} for n in range(1, 10)])
            last = publisher.publish({"n": 10})
            bad = publisher.publish_batch([{"to": 1}], mapping=lambda _: "no/journal")
            assert "pending" in repr(many)
            assert await many is many
            await first
            await last
            with pytest.raises(MappingError, match="no/journal"):
                await bad
            with pytest.raises(MappingError, match="no/journal"):
                await publisher.aflush()
            assert await publisher.publish_batch([{"n": 11}])
            await publisher.aclose()

    run(publish(), WAIT_S)
    assert bare(transport, "a/journal") == [{"n": n} for n in range(12)]
