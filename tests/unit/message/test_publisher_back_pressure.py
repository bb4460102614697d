"""A publisher with too much to send: it waits for room, or refuses."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.errors import (
    BackPressureError,
    ClosedError,
    ConfigurationError,
)
from gazette_sdk.message.receipt import ReceiptTimeoutError
from gazette_sdk.transport.loop import run
from support.published import WAIT_S, lines


def test_a_full_publisher_raises_where_that_is_wanted(gated):
    publisher = Publisher(
        mapping.direct("a/journal"), transport=gated, pending_bytes_max=300, when_full="raise"
    )
    receipt = publisher.publish({"text": "x" * 300})
    with pytest.raises(BackPressureError, match="not acknowledged yet"):
        publisher.publish({"text": "y"})
    gated.opened()
    receipt.result(WAIT_S)
    publisher.publish({"text": "y"}).result(WAIT_S)
    publisher.close()
    assert len(lines(gated, "a/journal")) == 2


def test_a_full_publisher_blocks_until_there_is_room(gated):
    publisher = Publisher(mapping.direct("a/journal"), transport=gated, pending_bytes_max=300)
    publisher.publish({"text": "x" * 300})
    done = threading.Event()

    def publish():
        publisher.publish({"text": "y"})
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    assert not done.wait(0.05)
    gated.opened()
    assert done.wait(WAIT_S)
    thread.join()
    publisher.close()
    assert len(lines(gated, "a/journal")) == 2


def test_a_coroutine_waits_for_room(gated):
    publisher = Publisher(
        mapping.direct("a/journal"), transport=gated, pending_bytes_max=300, when_full="raise"
    )

    async def publish():
        async with asyncio.timeout(WAIT_S):
            for n in range(10):
                await publisher.room()
                publisher.publish({"n": n, "text": "x" * 300})
                gated.opened()
            await publisher.aclose()

    asyncio.run(publish())
    assert [line["n"] for line in lines(gated, "a/journal")] == list(range(10))


def test_when_full_has_two_values(transport):
    with pytest.raises(ConfigurationError, match="'block' or 'raise'"):
        Publisher(transport=transport, when_full="drop")


def test_on_the_sdks_own_loop_too_much_is_always_an_error(gated, monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.sender.DEFERRED_MAX", 3)

    async def publish():
        publisher = Publisher(mapping.direct("a/journal"), transport=gated, pending_bytes_max=100)
        receipts = [publisher.publish({"n": n, "text": "x" * 100}) for n in range(3)]
        with pytest.raises(BackPressureError, match="wait for the first listing"):
            publisher.publish({"n": 3})
        gated.append_gate.set()
        for receipt in receipts:  # each waits for room, one after the other
            await receipt
        gated.append_gate.clear()
        last = publisher.publish({"n": 4, "text": "x" * 100})
        with pytest.raises(BackPressureError, match="not acknowledged yet"):
            publisher.publish({"n": 5})
        gated.append_gate.set()
        await last
        await publisher.aclose()
        with pytest.raises(ClosedError):
            publisher.publish({"n": 6})

    run(publish(), WAIT_S)
    assert [line["n"] for line in lines(gated, "a/journal")] == [0, 1, 2, 4]


def test_closing_wakes_who_waits_for_room(gated):
    publisher = Publisher(mapping.direct("a/journal"), transport=gated, pending_bytes_max=10)
    publisher.publish({"n": 0})
    outcome = []

    def publish():
        try:
            publisher.publish({"n": 1})
        except ClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    with pytest.raises(ReceiptTimeoutError):
        publisher.close(timeout=0.05)
    thread.join(WAIT_S)
    assert len(outcome) == 1


@pytest.mark.parametrize("opened_by", ["with", "nobody"])
def test_no_event_loop_is_blocked_by_a_full_publisher(gated, opened_by):
    """Neither its own nor another's: an error for publish(), and apublish() waits."""
    publisher = Publisher(mapping.direct("a/journal"), transport=gated, pending_bytes_max=300)
    if opened_by == "with":
        publisher.__enter__()
    publisher.publish({"n": 0, "text": "x" * 300})

    async def publish():
        with pytest.raises(BackPressureError, match="apublish"):
            publisher.publish({"n": 1})
        with pytest.raises(BackPressureError, match="apublish"):
            publisher.publish_batch([{"n": 1}])
        waiting = asyncio.create_task(publisher.apublish({"n": 2}))
        await asyncio.sleep(0)
        assert not waiting.done()
        gated.opened()
        async with asyncio.timeout(WAIT_S):
            await (await waiting)

    asyncio.run(publish())
    publisher.close()
    assert [line["n"] for line in lines(gated, "a/journal")] == [0, 2]


def test_an_awaited_publish_waits_for_the_listing_and_for_room(gated, monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.sender.DEFERRED_MAX", 2)

    async def publish():
        async with (
            asyncio.timeout(WAIT_S),
            Publisher(
                mapping.direct("a/journal"), transport=gated, pending_bytes_max=100
            ) as publisher,
        ):
            gated.append_gate.set()
            receipts = [await publisher.apublish({"n": n, "text": "x" * 100}) for n in range(8)]
            assert [receipt.journal for receipt in receipts[:1]]
            for receipt in receipts:
                await receipt

    run(publish(), WAIT_S)
    assert [line["n"] for line in lines(gated, "a/journal")] == list(range(8))
