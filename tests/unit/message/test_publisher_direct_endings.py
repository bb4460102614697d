"""Publishing by the very thread that has the message: what of failures, and of the end."""

from __future__ import annotations

import asyncio
import os
import random
import threading

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.errors import (
    BackPressureError,
    ClosedError,
    GazetteError,
    NotAllowedError,
)
from gazette_sdk.message.publishing import direct as direct_module
from gazette_sdk.message.publishing.handover import Holder
from gazette_sdk.message.publishing.receipt import ReceiptTimeoutError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.direct_memory import JOURNAL, WAIT_S
from support.direct_publisher import (
    NEVER_S,
    form_habit,
    outbox_of,
    publisher,
    transport,
    until,
    wait_for,
)

__all__ = ["publisher", "transport"]

NOT_PRIMARY = pb.NOT_JOURNAL_PRIMARY_BROKER


@pytest.fixture(autouse=True)
def _nobody_looks_in_time(monkeypatch):
    monkeypatch.setattr(direct_module, "AWAY_S", NEVER_S)
    monkeypatch.setattr(direct_module, "EARLY_S", 0.05)


# ---------------------------------------------------------------------- failures


def look_by(finder, publisher, receipt):
    """Somebody looks for the answer of what is away."""
    match finder:
        case "result":
            receipt.result(WAIT_S)
        case "the next":
            publisher.publish({"n": 1}).result(WAIT_S)
        case "await":
            asyncio.run(wait_for(receipt))
        case "flush":
            publisher.flush(WAIT_S)
    receipt.result(WAIT_S)


@pytest.mark.parametrize("finder", ["result", "the next", "await", "flush"])
@pytest.mark.parametrize("fault", ["refused", "broken", "unsent", "lost", "odd", NOT_PRIMARY])
def test_the_loop_goes_on_with_what_a_caller_could_not_append(transport, publisher, fault, finder):
    transport.direct_faults = [fault]
    receipt = publisher.publish({"n": 0})
    look_by(finder, publisher, receipt)
    behind = [1] if finder == "the next" else []
    assert transport.numbers() == ([0, 0, *behind] if fault == "lost" else [0, *behind])
    assert receipt.batch.was_retried == (fault in {"broken", "unsent", "lost", "odd"})
    assert len(transport.failures) == (0 if isinstance(fault, int) else 1)
    assert len({message["UUID"] for message in transport.messages()}) == 1 + len(behind)
    publisher.publish({"n": 2}).result(WAIT_S)
    assert transport.numbers()[-1] == 2
    assert publisher._sender._pending_bytes == 0


@pytest.mark.parametrize(
    "finder",
    [
        "result",
        "the next",
        "await",
        "flush",
    ],
)
@pytest.mark.parametrize("fault", ["unsent", "lost", NOT_PRIMARY])
def test_a_failure_ends_the_habit_and_the_way(transport, publisher, fault, finder):
    transport.direct_faults = [fault]
    look_by(finder, publisher, publisher.publish({"n": 0}))
    assert not outbox_of(publisher).habit.is_formed
    looked_up = transport.looked_up
    form_habit(publisher)
    publisher.publish({"n": 2}).result(WAIT_S)
    assert transport.looked_up == looked_up + 1
    assert transport.direct_appends[-1][1].count(b'"n":2') == 1


@pytest.mark.parametrize("fault", ["refused", "broken"])
def test_a_way_that_fails_at_once_is_looked_up_again(transport, publisher, fault):
    transport.direct_faults = [fault]
    publisher.publish({"n": 0}).result(WAIT_S)
    looked_up = transport.looked_up
    form_habit(publisher)
    publisher.publish({"n": 2}).result(WAIT_S)
    assert transport.looked_up == looked_up + 1


def test_what_gathers_behind_a_failure_follows_it(transport, publisher):
    transport.direct_faults = ["lost"]
    transport.direct_takes_s = 0.1
    receipt = publisher.publish({"n": 0})
    waiting = threading.Thread(target=receipt.result)
    waiting.start()
    until(lambda: outbox_of(publisher).holder == Holder.CALLER)
    others = [publisher.publish({"n": n}) for n in (1, 2)]
    for other in others:
        other.result(WAIT_S)
    waiting.join(WAIT_S)
    assert transport.numbers() == [0, 0, 1, 2]


def test_what_gathers_behind_who_waits_is_the_loops(transport, publisher):
    transport.direct_takes_s = 0.1
    receipt = publisher.publish({"n": 0})
    waiting = threading.Thread(target=receipt.result)
    waiting.start()
    until(lambda: outbox_of(publisher).holder == Holder.CALLER)
    publisher.publish({"n": 1}).result(WAIT_S)
    waiting.join(WAIT_S)
    assert len(transport.direct_appends) == 1
    assert transport.numbers() == [0, 1]


def test_a_failure_for_good_is_the_receipts(transport, publisher):
    transport.direct_faults = [pb.NOT_ALLOWED]
    transport.append_faults = [pb.NOT_ALLOWED]
    with pytest.raises(NotAllowedError):
        publisher.publish({"n": 0}).result(WAIT_S)
    with pytest.raises(NotAllowedError):
        publisher.flush(WAIT_S)
    assert publisher._sender._pending_bytes == 0
    publisher.publish({"n": 1}).result(WAIT_S)
    assert transport.numbers() == [1]


def test_a_failure_for_good_takes_the_next_message_with_it(transport, publisher):
    """The next was published to follow it."""
    transport.direct_faults = [pb.NOT_ALLOWED]
    transport.append_faults = [pb.NOT_ALLOWED]
    receipts = [publisher.publish({"n": n}) for n in range(2)]
    for receipt in receipts:
        with pytest.raises(NotAllowedError):
            receipt.result(WAIT_S)
    with pytest.raises(NotAllowedError):
        publisher.flush(WAIT_S)
    assert publisher._sender._pending_bytes == 0
    assert transport.numbers() == []


@pytest.mark.parametrize("finder", ["result", "the next"])
def test_a_route_in_the_response_is_learned_on_the_loop(transport, publisher, finder):
    transport.has_news = True
    receipt = publisher.publish({"n": 0})
    look_by(finder, publisher, receipt)
    until(lambda: transport.learned >= 1)


def test_a_route_is_not_learned_by_a_loop_that_has_ended(transport, publisher, monkeypatch):
    class Ended:
        def call_soon_threadsafe(self, *_):
            raise RuntimeError("Event loop is closed")

    transport.has_news = True
    receipt = publisher.publish({"n": 0})
    monkeypatch.setattr(publisher._sender._directs, "loop", Ended())
    receipt.result(WAIT_S)
    assert transport.learned == 0
    assert transport.numbers() == [0]


@pytest.mark.parametrize("fault", ["late", "late, lost"])
def test_a_caller_whose_time_runs_out_leaves_its_append_to_the_loop(transport, publisher, fault):
    transport.direct_faults = [fault]
    receipt = publisher.publish({"n": 0})
    with pytest.raises(ReceiptTimeoutError):
        receipt.result(timeout=0.06)
    assert not receipt.done()
    behind = publisher.publish({"n": 1})
    transport.let_end.set()
    receipt.result(WAIT_S)
    behind.result(WAIT_S)
    # The append that was under way is waited for, not repeated, unless its answer is lost.
    assert transport.numbers() == ([0, 1] if fault == "late" else [0, 0, 1])


@pytest.mark.parametrize("fault", ["late", "late, lost", "late, unsent"])
def test_what_an_early_message_finds_late_is_waited_for_by_the_loop(transport, publisher, fault):
    transport.direct_faults = [fault]
    receipts = [publisher.publish({"n": n}) for n in range(4)]
    assert transport.numbers() == []
    transport.let_end.set()
    for receipt in receipts:
        receipt.result(WAIT_S)
    assert transport.numbers() == ([0] if fault == "late, lost" else []) + [0, 1, 2, 3]
    assert len(transport.direct_appends) == 1


def test_a_mistake_of_ours_leaves_the_message_to_the_loop(transport, publisher):
    transport.direct_faults = ["raises"]
    with pytest.raises(ZeroDivisionError):
        publisher.publish({"n": 0})
    publisher.publish({"n": 1}).result(WAIT_S)
    assert transport.numbers() == [0, 1]


@pytest.mark.parametrize("finder", ["result", "the next"])
def test_a_mistake_with_a_response_leaves_the_message_to_the_loop(
    transport, publisher, finder, monkeypatch
):
    receipt = publisher.publish({"n": 0})
    with monkeypatch.context() as patched:
        patched.setattr(transport.direct(JOURNAL), "check", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            look_by(finder, publisher, receipt)
    publisher.flush(WAIT_S)
    assert transport.numbers() == ([0, 0, 1] if finder == "the next" else [0, 0])
    assert len(transport.distinct()) == (2 if finder == "the next" else 1)
    assert receipt.batch.was_retried


def test_asking_for_the_task_twice_harms_nothing(transport, publisher):
    for n in range(20):
        publisher.publish({"n": n})
        for _ in range(3):
            publisher._sender._wake([outbox_of(publisher)])
    publisher.flush(WAIT_S)
    assert transport.numbers() == list(range(20))


def test_where_the_loop_has_ended_a_failure_is_for_good(transport, publisher, monkeypatch):
    def ended(outboxes):
        raise RuntimeError("Event loop is closed")

    transport.direct_faults = ["late, unsent"]
    receipt = publisher.publish({"n": 0})
    with monkeypatch.context() as patched:
        patched.setattr(publisher._sender._directs, "wake", ended)
        with pytest.raises(ClosedError):
            receipt.result(timeout=0.06)
    assert publisher._sender._pending_bytes == 0
    assert transport.direct_calls[0].is_given_up
    with pytest.raises(ClosedError):
        publisher.flush(WAIT_S)


def test_where_the_loop_has_ended_the_next_message_fails_with_it(transport, publisher, monkeypatch):
    def ended(outboxes):
        raise RuntimeError("Event loop is closed")

    transport.direct_faults = ["late, unsent"]
    first = publisher.publish({"n": 0})
    with monkeypatch.context() as patched:
        patched.setattr(publisher._sender._directs, "wake", ended)
        second = publisher.publish({"n": 1})
    for receipt in (first, second):
        with pytest.raises(ClosedError):
            receipt.result(WAIT_S)
    assert publisher._sender._pending_bytes == 0
    with pytest.raises(ClosedError):
        publisher.flush(WAIT_S)


# -------------------------------------------------------------------------- ends


def test_flush_and_close_see_to_what_is_away(transport):
    publisher = Publisher(mapping=mapping.direct(JOURNAL), transport=transport)
    form_habit(publisher)
    first = publisher.publish({"n": 0})
    publisher.flush(WAIT_S)
    assert first.batch.is_done
    second = publisher.publish({"n": 1})
    publisher.close(WAIT_S)
    assert second.batch.is_done
    assert transport.numbers() == [0, 1]
    assert len(transport.direct_appends) == 2
    with pytest.raises(ClosedError):
        publisher.publish({"n": 2})


@pytest.mark.parametrize("waits", ["publish", "room", "refused"])
def test_who_wants_room_does_not_wait_for_who_has_it(transport, waits):
    publisher = Publisher(
        mapping=mapping.direct(JOURNAL),
        transport=transport,
        pending_bytes_max=1,
        when_full="raise" if waits == "refused" else "block",
    )
    with publisher:
        form_habit(publisher)
        receipt = publisher.publish({"n": 0})
        assert outbox_of(publisher).holder == Holder.AWAY
        if waits == "publish":
            publisher.publish({"n": 1}).result(WAIT_S)
        elif waits == "room":
            asyncio.run(_wait_for_room(publisher))
        else:
            with pytest.raises(BackPressureError):
                publisher.publish({"n": 1})
        until(lambda: receipt.batch.is_done)
    assert transport.numbers() == ([0, 1] if waits == "publish" else [0])


async def _wait_for_room(publisher):
    async with asyncio.timeout(WAIT_S):
        await publisher.room()


def test_close_gives_up_what_is_away(transport):
    publisher = Publisher(mapping=mapping.direct(JOURNAL), transport=transport)
    form_habit(publisher)
    transport.direct_faults = ["late, unsent"]
    receipt = publisher.publish({"n": 0})
    with pytest.raises(ReceiptTimeoutError):
        publisher.close(timeout=0.05)
    with pytest.raises(ClosedError):
        receipt.result(WAIT_S)
    assert transport.direct_calls[0].is_given_up
    assert transport.numbers() == []


def test_to_give_up_before_anybody_called_it_in(transport, publisher):
    transport.direct_faults = ["late, unsent"]
    receipt = publisher.publish({"n": 0})
    publisher._sender.refuse_more()
    run(publisher._shut(), WAIT_S)
    with pytest.raises(ClosedError):
        receipt.result(WAIT_S)
    assert transport.direct_calls[0].is_given_up
    assert publisher._sender._pending_bytes == 0


def test_close_gives_up_what_a_caller_waits_for(transport):
    publisher = Publisher(mapping=mapping.direct(JOURNAL), transport=transport)
    form_habit(publisher)
    transport.direct_faults = ["late, unsent"]
    receipt = publisher.publish({"n": 0})
    errors = []

    def wait():
        try:
            receipt.result()
        except GazetteError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: outbox_of(publisher).holder == Holder.CALLER)
    with pytest.raises(ReceiptTimeoutError):
        publisher.close(timeout=0.05)
    waiting.join(WAIT_S)
    assert [type(error) for error in errors] == [ClosedError]
    assert transport.numbers() == []


def test_close_while_a_caller_sends(transport, monkeypatch):
    publisher = Publisher(mapping=mapping.direct(JOURNAL), transport=transport)
    form_habit(publisher)
    way = transport.direct(JOURNAL)
    append = way.append

    def meanwhile(content):
        call = append(content)
        closing = threading.Thread(target=close)
        closing.start()
        closing.join(WAIT_S)
        return call

    def close():
        with pytest.raises(ReceiptTimeoutError):
            publisher.close(timeout=0.05)

    monkeypatch.setattr(way, "append", meanwhile)
    transport.direct_faults = ["late, unsent"]
    receipt = publisher.publish({"n": 0})
    with pytest.raises(ClosedError):
        receipt.result(WAIT_S)
    assert transport.direct_calls[0].has_ended
    assert publisher._sender._pending_bytes == 0


def test_close_while_a_caller_looks_before_it_sends(transport, monkeypatch):
    monkeypatch.setattr(direct_module, "EARLY_S", WAIT_S)
    publisher = Publisher(mapping=mapping.direct(JOURNAL), transport=transport)
    form_habit(publisher)
    transport.direct_faults = ["late"]
    first = publisher.publish({"n": 0})

    def meanwhile():
        if transport.direct_calls[0].looks[-1] == 0:
            return
        closing = threading.Thread(target=close)
        closing.start()
        closing.join(WAIT_S)
        transport.let_end.set()

    def close():
        with pytest.raises(ReceiptTimeoutError):
            publisher.close(timeout=0.05)

    transport.meanwhile = meanwhile
    second = publisher.publish({"n": 1})
    first.result(WAIT_S)
    with pytest.raises(ClosedError):
        second.result(WAIT_S)
    assert transport.numbers() == [0]
    assert publisher._sender._pending_bytes == 0


def test_a_forked_child_leaves_what_is_away_to_its_parent(transport, publisher):
    receipt = publisher.publish({"n": 0})
    child = os.fork()
    if child == 0:
        try:
            receipt.result(1)
        except ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    receipt.result(WAIT_S)
    assert transport.numbers() == [0]


# ----------------------------------------------------------------------- threads

KINDS = ("publishes", "waits", "awaits", "mixes", "publishes a lot", "on the SDK's loop")
COUNT = 150


def _publish_as(kind, publisher, by):
    chosen = random.Random(by)
    for n in range(COUNT):
        receipt = publisher.publish({"n": n, "by": by})
        what = chosen.choice(KINDS[:3]) if kind == "mixes" else kind
        if what == "waits":
            receipt.result(WAIT_S)
        elif what == "awaits":
            asyncio.run(wait_for(receipt))
        elif kind == "mixes" and chosen.random() < 0.1:
            until(receipt.done)


async def _publish_in_coroutine(publisher, by, *, waits):
    for n in range(COUNT):
        receipt = publisher.publish({"n": n, "by": by})
        if waits:
            await wait_for(receipt)
        elif n % 10 == 0:
            await asyncio.sleep(0.001)


def _run(kind, publisher, by):
    if kind == "on the SDK's loop":
        run(_publish_in_coroutine(publisher, by, waits=by % 2 == 0), 60)
    elif kind == "awaits":
        asyncio.run(_publish_in_coroutine(publisher, by, waits=True))
    elif kind == "publishes a lot":
        asyncio.run(_publish_in_coroutine(publisher, by, waits=False))
    else:
        _publish_as(kind, publisher, by)


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_threads_of_two_kinds_keep_their_order(transport, publisher, monkeypatch, first, second):
    keep_order(transport, publisher, monkeypatch, [first, second])


def test_threads_of_all_kinds_keep_their_order(transport, publisher, monkeypatch):
    keep_order(transport, publisher, monkeypatch, KINDS)


def keep_order(transport, publisher, monkeypatch, kinds):
    monkeypatch.setattr(direct_module, "AWAY_S", 0.002)
    monkeypatch.setattr(direct_module, "EARLY_S", 0.001)
    faults = ["lost", None, None, None, None, "refused", None, None, None, None, "unsent"]
    transport.direct_faults = [*faults, None, None, None, None] * 50
    threads = [
        threading.Thread(target=_run, args=(kind, publisher, by)) for by, kind in enumerate(kinds)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    publisher.flush(WAIT_S)
    seen = {}
    for message in transport.distinct():
        seen.setdefault(message["by"], []).append(message["n"])
    assert seen == {by: list(range(COUNT)) for by in range(len(kinds))}
    assert transport.direct_appends
    assert publisher._sender._pending_bytes == 0
    assert all(call.has_ended for call in transport.direct_calls)
    until(lambda: outbox_of(publisher).holder == Holder.NOBODY)
