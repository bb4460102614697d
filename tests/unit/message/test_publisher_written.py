"""What a publisher writes: where, in which order, with which clocks, and what receipts say."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import pairwise
from operator import itemgetter

import pytest

from gazette_sdk import GazetteError, Publisher, Reader, mapping
from gazette_sdk.errors import (
    MappingError,
)
from gazette_sdk.message.uuid import OUTSIDE_TXN, Clock
from gazette_sdk.transport.loop import run
from support.published import BY_KEY, WAIT_S, Order, begun, clocks, lines
from support.vectors import group


def test_messages_are_published_by_key_and_receipts_say_where(transport):
    for index in range(4):
        transport.create(f"orders/part-{index:03d}", topic="orders")
    with Publisher(mapping=BY_KEY, transport=transport) as publisher:
        receipts = [publisher.publish(Order(f"customer-{n % 7}", n)) for n in range(50)]
        assert receipts[0].result(timeout=WAIT_S) is receipts[0]
        assert receipts[0].journal.startswith("orders/part-00")
    for index, receipt in enumerate(receipts):
        assert receipt.done()
        frame = transport.content_of(receipt.journal)[receipt.begin : receipt.end]
        assert json.loads(frame)["cents"] == index
        assert receipt.length_bytes == receipt.end - receipt.begin
        assert repr(receipt) == f"<Receipt {receipt.journal}: [{receipt.begin}, {receipt.end})>"
    found = [
        (e.message, e.producer, e.flags) for e in Reader(Order, "topic=orders", transport=transport)
    ]
    assert sorted(message.cents for message, _, _ in found) == list(range(50))
    assert {producer for _, producer, _ in found} == {publisher.producer}
    assert {flags for _, _, flags in found} == {OUTSIDE_TXN}


def test_the_publisher_works_in_a_coroutine(transport):
    transport.create("orders/part-000", topic="orders")

    async def publish():
        async with Publisher(mapping=BY_KEY, transport=transport) as publisher:
            receipt = publisher.publish(Order("ada", 250))
            assert await asyncio.wait_for(receipt, WAIT_S) is receipt
            assert await receipt is receipt
            return receipt.journal, receipt.end

    assert asyncio.run(publish()) == (
        "orders/part-000",
        len(transport.content_of("orders/part-000")),
    )


def test_a_plain_publisher_works_inside_of_a_running_loop(transport):
    transport.create("orders/part-000", topic="orders")

    async def publish():
        with Publisher(mapping=BY_KEY, transport=transport) as publisher:
            return await asyncio.wait_for(publisher.publish(Order("ada", 1)), WAIT_S)

    assert asyncio.run(publish()).begin == 0


def test_on_the_sdks_own_loop_nothing_blocks_and_the_order_is_kept(transport):
    transport.create("orders/part-000", topic="orders")
    transport.create("a/journal")

    async def publish():
        async with asyncio.timeout(WAIT_S):
            publisher = Publisher(mapping=BY_KEY, transport=transport)
            receipts = [publisher.publish(Order("ada", cents)) for cents in range(5)]
            assert not receipts[0].done()
            assert "(not mapped)" in repr(receipts[0])
            with pytest.raises(GazetteError, match="not mapped yet"):
                _ = receipts[0].journal
            with pytest.raises(GazetteError, match="await receipt"):
                receipts[0].result()
            with pytest.raises(GazetteError, match="aflush"):
                publisher.flush()
            receipts.append(publisher.publish(Order("x", 9), mapping=mapping.direct("a/journal")))
            bad = publisher.publish(Order("x", 9), mapping=mapping.direct("no/journal"))
            for receipt in receipts:
                await receipt
            assert publisher.publish(Order("ada", 5)).journal == "orders/part-000"
            with pytest.raises(MappingError, match="no/journal"):
                await bad
            with pytest.raises(MappingError, match="no/journal"):
                await publisher.aflush()
            await publisher.aclose()

    run(publish(), WAIT_S)
    assert [line["cents"] for line in lines(transport, "orders/part-000")] == list(range(6))
    assert [line["cents"] for line in lines(transport, "a/journal")] == [9]


def test_committed_messages_carry_the_clocks_of_the_vectors(transport):
    case = group("message", "publisher")[0]
    transport.create("a/journal")
    clock = Clock(case["clock_start"])
    with Publisher(mapping.direct("a/journal"), transport=transport, clock=clock) as publisher:
        for call in case["calls"]:
            _, journal, text = call.split(" ", 2)
            publisher.publish({"str": text}, mapping=mapping.direct(journal))
    for journal, expected in case["expect"].items():
        found = [
            {"clock": e.clock, "flags": e.flags, "str": e.message["str"]}
            for e in Reader(dict, name=journal, transport=transport)
        ]
        assert found == expected


def test_what_is_published_during_an_append_becomes_the_next_append(gated):
    with Publisher(mapping.direct("a/journal"), transport=gated) as publisher:
        publisher.publish({"n": 0})
        begun(gated, 1)
        receipts = [publisher.publish({"n": n}) for n in range(1, 101)]
        assert not receipts[0].done()
        with pytest.raises(GazetteError, match="not acknowledged yet"):
            _ = receipts[0].begin
        assert repr(receipts[0]) == "<Receipt a/journal: pending>"
        gated.opened()
        publisher.flush(WAIT_S)
    assert [content.count(b"\n") for _, content in gated.appends] == [1, 100]
    assert [line["n"] for line in lines(gated, "a/journal")] == list(range(101))


def test_a_batch_has_a_bounded_size(gated, monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.sender.BATCH_BYTES_MAX", 1000)
    with Publisher(mapping.direct("a/journal"), transport=gated) as publisher:
        receipts = [publisher.publish({"n": n, "text": "x" * 300}) for n in range(20)]
        gated.opened()
        publisher.flush(WAIT_S)
        assert len({receipt.append for receipt in receipts}) > 3
    assert [line["n"] for line in lines(gated, "a/journal")] == list(range(20))
    for receipt, following in pairwise(receipts):
        assert receipt.end == following.begin


def test_messages_of_many_threads_stand_in_the_order_of_their_clocks(transport):
    for index in range(3):
        transport.create(f"t/part-{index}", topic="t")
    by_thread = mapping.modulo("topic=t", key=itemgetter("n"))
    with Publisher(by_thread, transport=transport) as publisher:

        def work(thread):
            for n in range(300):
                publisher.publish({"thread": thread, "n": n})

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    total = 0
    for index in range(3):
        found = clocks(transport, f"t/part-{index}")
        assert all(one < other for one, other in pairwise(found))
        total += len(found)
    assert total == 1200


def test_two_publishers_have_two_producers(transport):
    first, second = Publisher(transport=transport), Publisher(transport=transport)
    assert first.producer != second.producer
