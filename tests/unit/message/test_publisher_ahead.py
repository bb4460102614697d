"""Batches of a journal that are begun before the one in front of them has ended."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.errors import ClosedError, NotAllowedError, UnavailableError
from gazette_sdk.transport.base import AppendRoute
from support.memory_transport import MemoryTransport

WAIT_S = 10.0
BY_NAME = mapping.direct("a/journal")


class LanedTransport(MemoryTransport):
    """Appends of a journal are written where they are begun, and answered when they are let.

    Attributes:
        under_way: appends without an answer, oldest first: the response, and who is told.
        most: how many were under way at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[tuple[object, object]] = []
        self.most = 0

    def append_route(self, journal, wake) -> AppendRoute:
        return _Route(self)

    def answer(self, count: int = 1, error: Exception | None = None) -> None:
        """Answer the oldest. Behind one that fails all fail, as none of them was written."""
        for _ in range(count):
            response, answered = self.under_way.pop(0)
            answered(error or response)

    def answer_all(self) -> None:
        self.answer(len(self.under_way))


class _Route(AppendRoute):
    def __init__(self, transport: LanedTransport) -> None:
        self._transport = transport

    def try_begin(self, request, content, answered, _traceparent="") -> bool:
        transport = self._transport
        transport.under_way.append((transport.write(request.journal, b"".join(content)), answered))
        transport.most = max(transport.most, len(transport.under_way))
        return True

    async def open(self, request) -> None:
        raise AssertionError("it is open")

    def give_up(self) -> None:
        self._transport.under_way.clear()


@pytest.fixture
def laned():
    transport = LanedTransport()
    transport.create("a/journal")
    return transport


def wait_until(condition) -> None:
    ends_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_at, "it did not come to that"
        time.sleep(0.001)


def numbers(transport: MemoryTransport) -> list[int]:
    return [json.loads(line)["n"] for line in transport.content_of("a/journal").splitlines()]


def test_batches_are_begun_behind_one_that_takes_its_time(laned, on_loop):
    with Publisher(BY_NAME, transport=laned) as publisher:
        receipts = []
        for number in range(8):
            receipts.append(publisher.publish({"n": number}))
            wait_until(lambda known=number: len(laned.under_way) == known + 1)
        receipts += [publisher.publish({"n": number}) for number in range(8, 100)]
        time.sleep(0.05)
        assert laned.most == 8
        assert not any(receipt.done() for receipt in receipts)
        on_loop(laned.answer, 1)
        receipts[0].result(WAIT_S)
        wait_until(lambda: len(laned.under_way) == 8)
        on_loop(laned.answer_all)
        publisher.flush(WAIT_S)
    assert numbers(laned) == list(range(100))
    assert [content.count(b"\n") for _, content in laned.appends] == [1] * 8 + [92]
    content = laned.content_of("a/journal")
    for receipt, number in zip(receipts, range(100), strict=True):
        assert json.loads(content[receipt.begin : receipt.end])["n"] == number


def test_a_quick_broker_gets_one_batch_at_a_time(transport):
    transport.create("a/journal")
    with Publisher(BY_NAME, transport=transport) as publisher:
        receipts = [publisher.publish({"n": number}) for number in range(5000)]
        publisher.flush(WAIT_S)
    assert len({receipt.append for receipt in receipts}) < 1000
    for receipt, following in pairwise(receipts):
        assert receipt.end == following.begin


def test_large_batches_wait_for_nobody_and_small_ones_for_a_while(laned, on_loop, monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.sender.BATCH_BYTES_MAX", 1000)
    monkeypatch.setattr("gazette_sdk.transport.append.queue.LINGER_S", 60.0)
    with Publisher(BY_NAME, transport=laned) as publisher:
        first = publisher.publish({"n": 0})
        wait_until(lambda: len(laned.under_way) == 1)
        on_loop(laned.answer)
        first.result(WAIT_S)
        wait_until(lambda: not publisher._sender.pending())

        def publish_all():
            for number in (1, 2, 3):
                publisher.publish_batch([{"n": number, "text": "x" * 300_000}])
            publisher.publish({"n": 4})

        on_loop(publish_all)
        wait_until(lambda: len(laned.under_way) == 3)
        time.sleep(0.05)
        assert numbers(laned) == [0, 1, 2, 3]
        on_loop(laned.answer_all)
        wait_until(lambda: len(laned.under_way) == 1)
        on_loop(laned.answer)
    assert numbers(laned) == [0, 1, 2, 3, 4]


def test_a_message_that_comes_late_is_begun_ahead_too(laned, on_loop):
    with Publisher(BY_NAME, transport=laned) as publisher:
        publisher.publish({"n": 0})
        wait_until(lambda: len(laned.under_way) == 1)
        time.sleep(0.3)
        publisher.publish({"n": 1})
        wait_until(lambda: len(laned.under_way) == 2)
        on_loop(laned.answer_all)
    assert numbers(laned) == [0, 1]


def test_over_a_route_of_one_append_at_a_time_messages_that_queue_share_the_next(
    transport, on_loop
):
    transport.create("a/journal")
    transport.append_gate = on_loop(asyncio.Event)
    with Publisher(BY_NAME, transport=transport) as publisher:
        receipts = [publisher.publish({"n": 0})]
        wait_until(lambda: transport.appends_begun == 1)
        for number in range(1, 6):
            time.sleep(0.01)
            receipts.append(publisher.publish({"n": number}))
        time.sleep(0.01)
        assert len({receipt.append for receipt in receipts}) == 2
        on_loop(transport.append_gate.set)
        publisher.flush(WAIT_S)
    assert [content.count(b"\n") for _, content in transport.appends] == [1, 5]
    content = transport.content_of("a/journal")
    for number, receipt in enumerate(receipts):
        assert json.loads(content[receipt.begin : receipt.end])["n"] == number


def test_a_terminal_failure_fails_all_behind_it(laned, on_loop):
    publisher = Publisher(BY_NAME, transport=laned)
    receipts = []
    for number in range(3):
        receipts.append(publisher.publish({"n": number}))
        wait_until(lambda known=number: len(laned.under_way) == known + 1)
    on_loop(laned.answer, 3, NotAllowedError("not to you"))
    for receipt in receipts:
        with pytest.raises(NotAllowedError):
            receipt.result(WAIT_S)
    with pytest.raises(NotAllowedError):
        publisher.flush(WAIT_S)
    again = publisher.publish({"n": 3})
    wait_until(lambda: len(laned.under_way) == 1)
    on_loop(laned.answer)
    again.result(WAIT_S)
    publisher.close(WAIT_S)


def test_what_a_transient_failure_left_is_appended_again_in_order(laned, on_loop):
    with Publisher(BY_NAME, transport=laned) as publisher:
        receipts = []
        for number in range(3):
            receipts.append(publisher.publish({"n": number}))
            wait_until(lambda known=number: len(laned.under_way) == known + 1)
        on_loop(laned.answer, 3, UnavailableError("the answers were lost"))
        wait_until(lambda: len(laned.under_way) == 3)
        on_loop(laned.answer_all)
        for receipt in receipts:
            receipt.result(WAIT_S)
    assert numbers(laned) == [0, 1, 2, 0, 1, 2]  # the same messages, under the same UUIDs
    lines = laned.content_of("a/journal").splitlines()
    assert lines[:3] == lines[3:]
    assert [receipt.begin for receipt in receipts] == [
        laned.content_of("a/journal").index(line, len(b"\n".join(lines[:3]))) for line in lines[3:]
    ]


def test_closing_gives_up_what_is_under_way(laned):
    publisher = Publisher(BY_NAME, transport=laned)
    receipts = []
    for number in range(3):
        receipts.append(publisher.publish({"n": number}))
        wait_until(lambda known=number: len(laned.under_way) == known + 1)
    with pytest.raises(TimeoutError):
        publisher.close(0.05)
    for receipt in receipts:
        with pytest.raises(ClosedError):
            receipt.result(WAIT_S)


def test_transactions_go_behind_what_is_under_way(laned, on_loop):
    async def answering() -> None:
        while True:
            await asyncio.sleep(0.01)
            laned.answer_all()

    with Publisher(BY_NAME, transport=laned) as publisher:
        publisher.publish({"n": 0})
        wait_until(lambda: len(laned.under_way) == 1)
        publisher.publish({"n": 1})
        wait_until(lambda: len(laned.under_way) == 2)
        answers = on_loop(lambda: asyncio.get_running_loop().create_task(answering()))
        with publisher.transaction() as transaction:
            transaction.publish({"n": 2})
            transaction.publish({"n": 3})
        publisher.flush(WAIT_S)
        on_loop(answers.cancel)
    lines = [json.loads(line) for line in laned.content_of("a/journal").splitlines()]
    assert [line.get("n") for line in lines] == [0, 1, 2, 3, None]
