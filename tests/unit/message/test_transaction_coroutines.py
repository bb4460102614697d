"""Transactions in coroutines: on a loop of the program's own, and on the SDK's."""

from __future__ import annotations

import asyncio
from operator import itemgetter

import pytest

from gazette_sdk import GazetteError, Publisher, mapping
from gazette_sdk.errors import (
    ConfigurationError,
    MappingError,
)
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN
from gazette_sdk.transport.loop import run
from support.published import WAIT_S, begun
from support.transactions import by_to, committed, flags


def test_in_a_coroutine_save_may_be_one(two):
    order = []

    async def save(intents):
        await asyncio.sleep(0)
        order.append((list(intents), flags(two, "one/journal")))

    async def publish():
        async with Publisher(by_to, transport=two) as publisher:
            async with publisher.transaction(save=save) as txn:
                txn.publish({"to": "one/journal", "n": 1})

            async def fail():
                async with publisher.transaction(save=save) as txn:
                    txn.publish({"to": "one/journal", "n": 2})
                    raise KeyError("mine")

            with pytest.raises(KeyError):
                await fail()

    asyncio.run(publish())
    assert order == [(["one/journal"], [CONTINUE_TXN])]
    assert [m["n"] for m in committed(two, "one/journal")] == [1]


def test_on_the_sdks_own_loop_transactions_wait_for_listings(transport):
    for index in range(2):
        transport.create(f"orders/part-{index}", topic="orders")
    by_n = mapping.modulo("topic=orders", key=itemgetter("n"))

    async def publish():
        publisher = Publisher(by_n, transport=transport)
        async with asyncio.timeout(WAIT_S):
            async with publisher.transaction() as txn:
                receipt = txn.publish({"n": 0})
                batch = txn.publish_batch([{"n": n} for n in range(1, 9)])
                assert not receipt.done()
                assert not batch.done()
                assert batch.count == 8
            assert receipt.done()
            assert sum(each.count for each in batch.landed.values()) == 8

            async def fail():
                async with publisher.transaction() as txn:
                    txn.publish({"n": 9})
                    txn.publish({"n": 10}, mapping=mapping.direct("no/journal"))

            with pytest.raises(MappingError):
                await fail()
            with pytest.raises(GazetteError, match="async with"), publisher.transaction():
                pass
            again = publisher.acknowledge(txn.intents)
            assert await again is again
            await publisher.aclose()

    run(publish(), WAIT_S)
    found = [m["n"] for j in range(2) for m in committed(transport, f"orders/part-{j}")]
    assert sorted(found) == list(range(9))


def test_on_the_sdks_own_loop_intents_wait_for_their_journals(two):
    with (
        Publisher(by_to, transport=two) as publisher,
        publisher.transaction(save=lambda _: None) as txn,
    ):
        txn.publish({"to": "one/journal"})
        txn.publish({"to": "two/journal"})

    async def publish():
        publisher = Publisher(transport=two)
        async with asyncio.timeout(WAIT_S):
            receipt = publisher.acknowledge(txn.intents)
            assert not receipt.done()
            assert receipt.count == 2
            assert (await receipt).journals == ("one/journal", "two/journal")
            lost = publisher.acknowledge({"no/journal": b"{}\n"})
            with pytest.raises(MappingError, match="intents name a journal"):
                await lost
            with pytest.raises(MappingError):
                await publisher.aclose()

    run(publish(), WAIT_S)
    assert flags(two, "one/journal") == [CONTINUE_TXN, ACK_TXN, ACK_TXN]
    assert len(committed(two, "one/journal")) == 1


def test_an_interrupted_commit_is_rolled_back_without_waiting(gated):
    async def publish():
        publisher = Publisher(by_to, transport=gated)

        async def transact():
            async with publisher.transaction(save=lambda _: None) as txn:
                txn.publish({"to": "a/journal"})

        task = asyncio.create_task(transact())
        await asyncio.to_thread(begun, gated, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gated.opened()
        await publisher.aclose()

    asyncio.run(publish())
    assert flags(gated, "a/journal") == [CONTINUE_TXN, ACK_TXN]
    assert committed(gated, "a/journal") == []


def test_an_interruption_while_acknowledging_says_that_it_is_decided(gated):
    async def publish():
        publisher = Publisher(by_to, transport=gated)

        async def transact():
            async with publisher.transaction() as txn:
                txn.publish({"to": "a/journal"})

        task = asyncio.create_task(transact())
        await asyncio.to_thread(begun, gated, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert "was being acknowledged" in caught.value.__notes__[0]
        gated.opened()
        await publisher.aclose()

    asyncio.run(publish())
    assert committed(gated, "a/journal") == [{"to": "a/journal"}]


def test_plain_code_cannot_await_what_save_returns(two):
    async def save(_):
        raise AssertionError("nobody awaits it")

    with (
        Publisher(by_to, transport=two) as publisher,
        pytest.raises(ConfigurationError, match="async with"),
        publisher.transaction(save=save) as txn,
    ):
        txn.publish({"to": "one/journal"})
