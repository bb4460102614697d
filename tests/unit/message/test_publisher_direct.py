"""Publishing by the very thread that has the message: what it sends, who looks for the answer.

When it does is in ``test_publisher_direct_habit.py``, and how that may fail in
``test_publisher_direct_endings.py`` and ``test_publisher_direct_interrupted.py``.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from gazette_sdk import mapping
from gazette_sdk.errors import ValidationError
from gazette_sdk.message.publishing import direct as direct_module
from gazette_sdk.message.publishing.handover import Holder
from gazette_sdk.message.publishing.receipt import ReceiptTimeoutError
from gazette_sdk.transport.loop import on_sdk_loop
from support.direct_memory import JOURNAL, WAIT_S
from support.direct_publisher import (
    NEVER_S,
    form_habit,
    nobody_looks,
    outbox_of,
    publisher,
    transport,
    until,
    wait_for,
)

__all__ = ["nobody_looks", "publisher", "transport"]


@pytest.fixture(autouse=True)
def _a_busy_machine_does_not_matter(monkeypatch):
    monkeypatch.setattr(direct_module, "AWAY_S", 0.5)
    monkeypatch.setattr(direct_module, "EARLY_S", 0.05)


def here():
    return threading.current_thread().name


# ------------------------------------------------------------------ who sends


def test_the_thread_that_waits_appends(transport, publisher, nobody_looks):
    assert not transport.direct_appends
    begun = transport.appends_begun
    for n in range(20):
        receipt = publisher.publish({"n": n}).result(WAIT_S)
        assert transport.content_of(JOURNAL)[receipt.begin : receipt.end].endswith(b"\n")
        assert receipt.total_chunks == 1
        assert outbox_of(publisher).holder == Holder.NOBODY
    assert transport.appends_begun == begun
    assert {name for _, _, name in transport.direct_appends} == {here()}
    assert transport.numbers() == list(range(20))
    publisher.flush(WAIT_S)
    assert publisher._sender._pending_bytes == 0


def test_what_nobody_waits_for_leaves_at_once_by_the_thread_that_publishes(
    transport, publisher, nobody_looks, monkeypatch
):
    directs = publisher._sender._directs
    monkeypatch.setattr(directs, "_look", lambda: pytest.fail("nobody has to look"))
    begun = transport.appends_begun
    receipts = []
    for n in range(20):
        receipts.append(publisher.publish({"n": n}))
        assert transport.numbers() == list(range(n + 1))
        assert outbox_of(publisher).holder == Holder.AWAY
        assert [each.batch.is_done for each in receipts] == [True] * n + [False]
    assert transport.appends_begun == begun
    assert {name for _, _, name in transport.direct_appends} == {here()}
    assert all(call.looks == [0] for call in transport.direct_calls[:-1])  # none was waited for
    assert transport.direct_calls[-1].looks == []
    publisher.flush(WAIT_S)
    assert all(receipt.done() for receipt in receipts)
    assert [receipt.begin for receipt in receipts] == sorted(receipt.begin for receipt in receipts)
    assert publisher._sender._pending_bytes == 0


def settle_by(how, publisher, receipt):
    match how:
        case "the next":
            publisher.publish({"n": 1})
        case "result":
            receipt.result(WAIT_S)
        case "result within a time":
            receipt.result(timeout=direct_module.TIMEOUT_MIN_S)
        case "polling":
            until(receipt.done)
        case "await":
            asyncio.run(wait_for(receipt))
        case "await on the SDK's loop":
            asyncio.run(on_sdk_loop(wait_for(receipt)))
        case "flush":
            publisher.flush(WAIT_S)
        case "aflush":
            asyncio.run(publisher.aflush(WAIT_S))
        case "a batch":
            publisher.publish_batch([{"n": 1}, {"n": 2}]).result(WAIT_S)
        case "close":
            publisher.close(WAIT_S)


@pytest.mark.parametrize(
    "how",
    [
        "the next",
        "result",
        "result within a time",
        "polling",
        "await",
        "await on the SDK's loop",
        "flush",
        "aflush",
        "a batch",
        "close",
    ],
)
def test_who_settles_the_receipt_of_what_is_away(transport, publisher, nobody_looks, how):
    receipt = publisher.publish({"n": 0})
    assert not receipt.batch.is_done
    settle_by(how, publisher, receipt)
    assert receipt.batch.is_done
    assert transport.content_of(JOURNAL)[receipt.begin : receipt.end].endswith(b"\n")
    assert len(transport.direct_appends) == (2 if how == "the next" else 1)
    assert all(call.has_ended for call in transport.direct_calls[:1])
    assert transport.numbers() == {"the next": [0, 1], "a batch": [0, 1, 2]}.get(how, [0])


def test_a_thread_may_wait_for_what_another_sent(transport, publisher, nobody_looks):
    receipt = publisher.publish({"n": 0})
    waiting = threading.Thread(target=receipt.result, args=(WAIT_S,))
    waiting.start()
    waiting.join(WAIT_S)
    assert receipt.batch.is_done
    assert transport.numbers() == [0]


def test_several_threads_may_wait_for_one(transport, publisher, nobody_looks):
    transport.direct_takes_s = 0.05
    receipt = publisher.publish({"n": 0})
    threads = [threading.Thread(target=receipt.result, args=(WAIT_S,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert receipt.batch.is_done
    assert transport.numbers() == [0]
    assert outbox_of(publisher).holder == Holder.NOBODY


def test_without_such_a_transport_nothing_changes(transport, publisher):
    transport.has_direct = False
    outbox_of(publisher).way = None
    for n in range(5):
        publisher.publish({"n": n}).result(WAIT_S)
    assert not transport.direct_appends
    assert transport.numbers() == list(range(5))


def test_where_the_loop_does_not_run_nothing_is_sent_beside_it(transport, publisher, monkeypatch):
    link = publisher._sender._link

    class Resting:
        call_soon_threadsafe = link.loop.call_soon_threadsafe

        def is_running(self):
            return False

    monkeypatch.setattr(link, "loop", Resting())
    publisher.publish({"n": 0}).result(WAIT_S)
    assert not transport.direct_appends
    assert transport.numbers() == [0]


def test_a_message_that_is_large_is_the_loops(transport, publisher, nobody_looks):
    publisher.publish({"n": 0})
    large = publisher.publish({"n": 1, "text": "x" * direct_module.BYTES_MAX})
    large.result(WAIT_S)
    assert len(transport.direct_appends) == 1
    assert transport.numbers() == [0, 1]


def test_a_way_is_looked_up_again_after_a_pause(transport, publisher, monkeypatch):
    publisher.publish({"n": 0}).result(WAIT_S)
    looked_up = transport.looked_up
    publisher.publish({"n": 1}).result(WAIT_S)
    assert transport.looked_up == looked_up
    monkeypatch.setattr(direct_module, "WAY_S", 0.0)
    publisher.publish({"n": 2}).result(WAIT_S)
    assert transport.looked_up == looked_up + 1
    assert len(transport.direct_appends) == 3


def test_only_so_many_journals_are_sent_to(transport, publisher, monkeypatch, nobody_looks):
    monkeypatch.setattr(direct_module, "WATCHED_MAX", 1)
    second = "a/second"
    transport.create(second)
    form_habit(publisher, second)
    publisher.publish({"n": 0})
    publisher.publish({"n": 1}, mapping=mapping.direct(second)).result(WAIT_S)
    publisher.publish({"n": 2})
    assert {journal for journal, _, _ in transport.direct_appends} == {JOURNAL}
    assert transport.numbers() == [0, 2]
    assert transport.numbers(second) == [1]


def test_a_message_that_is_refused_changes_nothing(transport, publisher, nobody_looks):
    transport.direct_faults = ["late"]
    receipt = publisher.publish({"n": 0})
    for _ in range(3):
        with pytest.raises(ValidationError):
            publisher.publish(object())
        assert outbox_of(publisher).holder == Holder.AWAY
        assert transport.direct_calls[0].looks == []
        assert not transport.direct_calls[0].has_ended
    assert outbox_of(publisher).habit.is_formed
    transport.let_end.set()
    receipt.result(WAIT_S)
    with pytest.raises(ValidationError):
        publisher.publish(object())
    assert outbox_of(publisher).holder == Holder.NOBODY
    publisher.publish({"n": 1})
    assert len(transport.direct_appends) == 2
    assert transport.numbers() == [0, 1]


def test_a_transaction_behind_what_is_away_keeps_its_place(transport, publisher, nobody_looks):
    transport.direct_faults = ["late"]
    receipt = publisher.publish({"n": 0})
    threading.Timer(0.05, transport.let_end.set).start()
    with publisher.transaction() as txn:
        txn.publish({"n": 1})
    receipt.result(WAIT_S)
    assert len(transport.direct_appends) == 1
    assert transport.numbers()[:2] == [0, 1]


def test_what_comes_while_a_message_is_sent_is_the_loops(
    transport, publisher, nobody_looks, monkeypatch
):
    way = transport.direct(JOURNAL)
    append, receipts = way.append, []

    def meanwhile(content):
        monkeypatch.setattr(way, "append", append)
        other = threading.Thread(target=lambda: receipts.append(publisher.publish({"n": 1})))
        other.start()
        other.join(WAIT_S)
        assert outbox_of(publisher).holder == Holder.CALLER
        return append(content)

    monkeypatch.setattr(way, "append", meanwhile)
    receipts.append(publisher.publish({"n": 0}))
    for receipt in receipts:
        receipt.result(WAIT_S)
    assert len(transport.direct_appends) == 1
    assert transport.numbers() == [0, 1]
    assert not outbox_of(publisher).habit.is_formed


def gather_while_looking(transport, publisher, monkeypatch, message):
    """Another thread publishes while one looks for the answer before its own message."""
    monkeypatch.setattr(direct_module, "EARLY_S", WAIT_S)
    transport.direct_takes_s = 0.02
    receipts = [publisher.publish({"n": 0})]

    def meanwhile():
        transport.meanwhile = None
        other = threading.Thread(target=lambda: receipts.append(publisher.publish(message)))
        other.start()
        other.join(WAIT_S)
        assert outbox_of(publisher).holder == Holder.CALLER

    transport.meanwhile = meanwhile
    receipts.append(publisher.publish({"n": 1}))
    for receipt in receipts:
        receipt.result(WAIT_S)
    assert transport.numbers() == [0, 1, 2]


def test_what_gathers_before_a_message_is_sent_is_sent_with_it(
    transport, publisher, nobody_looks, monkeypatch
):
    gather_while_looking(transport, publisher, monkeypatch, {"n": 2})
    assert [content.count(b"\n") for _, content, _ in transport.direct_appends] == [1, 2]


def test_what_gathers_largely_is_the_loops(transport, publisher, nobody_looks, monkeypatch):
    text = "x" * direct_module.BYTES_MAX
    gather_while_looking(transport, publisher, monkeypatch, {"n": 2, "text": text})
    assert len(transport.direct_appends) == 1


def test_who_waits_while_a_message_is_sent_is_told_by_the_loop(
    transport, publisher, nobody_looks, monkeypatch
):
    way = transport.direct(JOURNAL)
    append, others = way.append, []

    def meanwhile(content):
        others.append(threading.Thread(target=publisher.flush, args=(WAIT_S,)))
        others[0].start()
        until(lambda: outbox_of(publisher).sent()[0].is_awaited)
        return append(content)

    monkeypatch.setattr(way, "append", meanwhile)
    receipt = publisher.publish({"n": 0})
    others[0].join(WAIT_S)
    assert receipt.batch.is_done
    assert transport.numbers() == [0]


def test_a_short_patience_rather_looks_than_waits(transport, publisher, nobody_looks):
    transport.direct_faults = ["late"]
    receipt = publisher.publish({"n": 0})
    with pytest.raises(ReceiptTimeoutError):
        receipt.result(timeout=0)
    assert transport.direct_calls[0].looks == []
    transport.let_end.set()
    receipt.result(WAIT_S)
    assert transport.numbers() == [0]


# ---------------------------------------------------------- no connection at hand


def test_where_no_connection_is_at_hand_one_is_prepared(transport, publisher, nobody_looks):
    transport.has_connection = False
    receipt = publisher.publish({"n": 0})
    assert not transport.direct_appends
    receipt.result(WAIT_S)
    until(lambda: transport.has_connection)
    assert len(transport.prepared) == 1
    assert transport.prepared[0] != here()
    assert outbox_of(publisher).habit.is_formed
    publisher.publish({"n": 1})
    assert len(transport.direct_appends) == 1
    assert transport.numbers() == [0, 1]
    assert len(transport.prepared) == 1


def test_one_connection_is_prepared_at_a_time(transport, publisher, monkeypatch):
    may_end = threading.Event()
    way = transport.direct(JOURNAL)
    prepare = way.prepare

    def slowly():
        assert may_end.wait(WAIT_S)
        prepare()

    monkeypatch.setattr(direct_module, "PREPARE_S", 0.0)
    monkeypatch.setattr(way, "prepare", slowly)
    transport.has_connection = False
    for n in range(5):
        publisher.publish({"n": n}).result(WAIT_S)
    may_end.set()
    until(lambda: not publisher._sender._directs._preparing)
    assert len(transport.prepared) == 1
    publisher.publish({"n": 5}).result(WAIT_S)
    assert len(transport.direct_appends) == 1
    assert transport.numbers() == list(range(6))


@pytest.mark.parametrize(("prepare_s", "count"), [(0.0, 3), (60.0, 1)])
def test_what_cannot_be_prepared_is_tried_again_after_a_while(
    transport, publisher, monkeypatch, prepare_s, count
):
    monkeypatch.setattr(direct_module, "PREPARE_S", prepare_s)
    transport.has_connection = False
    transport.prepare_fault = ConnectionError("nobody listens")
    for n in range(3):
        publisher.publish({"n": n}).result(WAIT_S)
        until(lambda: not publisher._sender._directs._preparing)
    assert len(transport.prepared) == count
    assert not transport.direct_appends
    assert transport.numbers() == [0, 1, 2]


def test_no_connection_behind_what_is_away(transport, publisher, nobody_looks):
    publisher.publish({"n": 0})
    transport.has_connection = False
    publisher.publish({"n": 1}).result(WAIT_S)
    assert len(transport.direct_appends) == 1
    assert transport.numbers() == [0, 1]


def test_a_connection_is_not_prepared_by_a_loop_that_has_ended(transport, publisher, monkeypatch):
    directs = publisher._sender._directs

    class Ended:
        def call_soon_threadsafe(self, *_):
            raise RuntimeError("Event loop is closed")

    monkeypatch.setattr(directs, "loop", Ended())
    directs.prepare(transport.direct(JOURNAL))
    assert transport.prepared == []


# ------------------------------------------------------------------ coroutines


@pytest.mark.parametrize("waits", [True, False])
def test_within_a_coroutine_a_message_is_sent_at_once(transport, publisher, nobody_looks, waits):
    async def main():
        for n in range(10):
            receipt = publisher.publish({"n": n})
            assert transport.numbers() == list(range(n + 1))
            if waits:
                await wait_for(receipt)
                assert receipt.done()
        await publisher.aflush(WAIT_S)

    asyncio.run(main())
    assert {name for _, _, name in transport.direct_appends} == {here()}
    assert len(transport.direct_appends) == 10


@pytest.mark.parametrize("waits", [True, False])
def test_on_the_sdks_loop_a_message_is_sent_at_once(transport, publisher, nobody_looks, waits):
    async def main():
        for n in range(10):
            receipt = publisher.publish({"n": n})
            assert transport.numbers() == list(range(n + 1))
            if waits:
                await wait_for(receipt)
        await publisher.aflush(WAIT_S)
        return here()

    name = asyncio.run(on_sdk_loop(main()))
    assert {name for _, _, name in transport.direct_appends} == {name}
    assert len(transport.direct_appends) == 10


def test_a_coroutine_does_not_wait_for_the_message_before(transport, publisher, monkeypatch):
    monkeypatch.setattr(direct_module, "EARLY_S", NEVER_S)
    transport.direct_faults = ["late"]

    async def main():
        receipts = [publisher.publish({"n": n}) for n in range(3)]
        assert transport.direct_calls[0].looks == [0]
        assert transport.numbers() == []
        transport.let_end.set()
        for receipt in receipts:
            await wait_for(receipt)

    asyncio.run(main())
    assert len(transport.direct_appends) == 1
    assert transport.numbers() == [0, 1, 2]


def test_plain_code_in_a_coroutine_may_wait(transport, publisher, nobody_looks):
    async def main():
        return publisher.publish({"n": 0}).result(WAIT_S)

    assert asyncio.run(main()).done()
    assert outbox_of(publisher).holder == Holder.NOBODY


def test_waiting_on_the_sdks_loop_is_refused(transport, publisher, nobody_looks):
    receipt = publisher.publish({"n": 0})

    async def main():
        with pytest.raises(Exception, match="block the SDK's own event loop"):
            receipt.result(WAIT_S)

    asyncio.run(on_sdk_loop(main()))
    assert outbox_of(publisher).holder == Holder.AWAY
    receipt.result(WAIT_S)
    assert transport.numbers() == [0]


def test_who_waits_for_a_settled_receipt_does_not_wait_for_the_next_one(transport, publisher):
    first = publisher.publish({"n": 0})
    claim = first.batch.claim
    transport.direct_faults = ["late"]
    publisher.publish({"n": 1})
    claim.wait(first.batch, None)  # what result() does, had it looked before the next was published
    assert first.done()
    assert outbox_of(publisher).holder is Holder.AWAY
    transport.let_end.set()


def test_news_of_the_route_are_told_once(transport, publisher):
    publisher.publish({"n": 0}).result(WAIT_S)
    looked_up = transport.looked_up
    transport.has_news = True
    publisher.publish({"n": 1}).result(WAIT_S)
    transport.has_news = False
    publisher.publish({"n": 2}).result(WAIT_S)
    publisher.publish({"n": 3}).result(WAIT_S)
    until(lambda: transport.learned == 1)
    assert transport.looked_up == looked_up + 1
