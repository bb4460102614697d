"""When the thread that publishes sends by itself: while messages come one by one.

And the lookout of the event loop, for answers that nobody else looks for.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.message.publishing import direct as direct_module
from gazette_sdk.message.publishing.handover import Habit, Holder
from support.direct_memory import JOURNAL, WAIT_S
from support.direct_publisher import (
    form_habit,
    gain_trust,
    nobody_looks,
    outbox_of,
    publisher,
    transport,
    until,
    wait_for,
)

__all__ = ["nobody_looks", "publisher", "transport"]

AWAY_S, EARLY_S = direct_module.AWAY_S, direct_module.EARLY_S


@pytest.fixture(autouse=True)
def _a_busy_machine_does_not_matter(monkeypatch):
    monkeypatch.setattr(direct_module, "AWAY_S", 0.5)
    monkeypatch.setattr(direct_module, "EARLY_S", 0.05)


def strengthen(publisher):
    """A habit as strong as can be."""
    for _ in range(Habit.COUNT_MAX):
        publisher.publish({"n": -1}).result(WAIT_S)


# ------------------------------------------------------------------- the habit


@pytest.mark.parametrize("break_it", ["two at once", "a batch", "a transaction"])
def test_other_uses_break_the_habit(transport, publisher, break_it, nobody_looks):
    transport.direct_faults = ["late"]
    publisher.publish({"n": 0})
    threading.Timer(0.1, transport.let_end.set).start()
    match break_it:
        case "two at once":
            publisher.publish({"n": 1}).result(WAIT_S)
        case "a batch":
            publisher.publish_batch([{"n": 1}, {"n": 2}]).result(WAIT_S)
        case "a transaction":
            with publisher.transaction() as txn:
                txn.publish({"n": 1})
    publisher.flush(WAIT_S)
    assert len(transport.direct_appends) == 1
    assert not outbox_of(publisher).habit.is_formed
    publisher.publish({"n": 9}).result(WAIT_S)
    assert len(transport.direct_appends) == 1
    assert transport.numbers() in ([0, 1, 9], [0, 1, 2, 9])


@pytest.mark.parametrize("use", ["await", "polling", "never asked"])
def test_messages_that_come_one_by_one_form_the_habit(transport, use, monkeypatch):
    monkeypatch.setattr(direct_module, "AWAY_S", AWAY_S)
    with Publisher(mapping=mapping.direct(JOURNAL), transport=transport) as publisher:
        for n in range(20):
            receipt = publisher.publish({"n": n})
            match use:
                case "await":
                    asyncio.run(wait_for(receipt))
                case "polling":
                    until(receipt.done)
                case "never asked":
                    until(lambda receipt=receipt: receipt.batch.is_done)
        assert len(transport.direct_appends) >= 20 - 2 * Habit.FORMED_COUNT
    assert transport.numbers() == list(range(20))


def test_an_early_message_waits_for_a_moment(transport, publisher, nobody_looks, monkeypatch):
    monkeypatch.setattr(direct_module, "EARLY_S", 5.0)
    strengthen(publisher)
    transport.direct_appends.clear()
    transport.direct_takes_s = 0.05
    first = publisher.publish({"n": 0})
    second = publisher.publish({"n": 1})
    assert first.batch.is_done
    assert not second.batch.is_done
    assert [call.looks for call in transport.direct_calls[-2:]] == [[0, 5.0], []]
    assert outbox_of(publisher).habit.is_formed  # it was strained, but once
    second.result(WAIT_S)
    assert transport.numbers() == [0, 1]


def test_a_second_early_message_ends_the_habit(transport, publisher, nobody_looks, monkeypatch):
    monkeypatch.setattr(direct_module, "EARLY_S", 5.0)
    strengthen(publisher)
    transport.direct_appends.clear()
    transport.direct_takes_s = 0.05
    receipts = [publisher.publish({"n": n}) for n in range(3)]
    assert len(transport.direct_appends) == 3
    assert not outbox_of(publisher).habit.is_formed
    receipts.append(publisher.publish({"n": 3}))  # the loop's, behind the one that is away
    assert len(transport.direct_appends) == 3
    for receipt in receipts:
        receipt.result(WAIT_S)
    assert transport.numbers() == [0, 1, 2, 3]


def test_an_early_message_is_handed_on_soon(transport, publisher, monkeypatch):
    monkeypatch.setattr(direct_module, "EARLY_S", EARLY_S)
    transport.direct_faults = ["late"] * 100
    waits = []
    receipts = []
    for n in range(5):
        form_habit_with(publisher, transport)
        receipts.append(publisher.publish({"n": 2 * n}))
        began_at = time.monotonic()
        receipts.append(publisher.publish({"n": 2 * n + 1}))
        waits.append(time.monotonic() - began_at)
        assert transport.direct_calls[-1].looks == [0, EARLY_S]
        assert transport.numbers() == list(range(2 * n))
        assert outbox_of(publisher).holder == Holder.LOOP
        transport.let_end.set()
        for receipt in receipts:
            receipt.result(WAIT_S)
        assert transport.numbers() == list(range(2 * n + 2))
    assert EARLY_S <= min(waits) < 10 * EARLY_S
    assert len(transport.direct_appends) == 5


def form_habit_with(publisher, transport):
    """With whatever faults are to come."""
    faults, transport.direct_faults = transport.direct_faults, []
    outbox_of(publisher).habit.broken()
    form_habit(publisher)
    transport.direct_faults = faults
    transport.let_end.clear()
    transport.direct_appends[:] = [
        each for each in transport.direct_appends if b":-1" not in each[1]
    ]


# ----------------------------------------------------------------- the lookout


def test_what_nobody_looks_for_is_called_in_within_milliseconds(transport, publisher, monkeypatch):
    monkeypatch.setattr(direct_module, "AWAY_S", AWAY_S)
    waits = []
    for n in range(10):
        form_habit(publisher)
        began_at = time.monotonic()
        receipt = publisher.publish({"n": n})
        assert not receipt.batch.is_done
        receipt.batch.done.exception(WAIT_S)
        waits.append(time.monotonic() - began_at)
    assert AWAY_S / 2 < min(waits) < 0.010
    assert transport.numbers() == list(range(10))
    assert len(transport.direct_appends) >= 10


def test_a_lasting_habit_is_seldom_looked_after(publisher, monkeypatch):
    monkeypatch.setattr(direct_module, "AWAY_S", 0.002)
    directs, looks = publisher._sender._directs, []
    look = directs._look

    def counted():
        looks.append(time.monotonic())
        look()

    monkeypatch.setattr(directs, "_look", counted)
    gain_trust(publisher)
    looks.clear()
    began_at = time.monotonic()
    while time.monotonic() < began_at + 0.3:
        publisher.publish({"n": -1}).result(WAIT_S)
    assert len(looks) <= 0.3 / (0.002 * Habit.TRUST_MAX) + 2


def test_who_breaks_a_lasting_habit_waits_once(transport, publisher, monkeypatch):
    monkeypatch.setattr(direct_module, "AWAY_S", AWAY_S)
    waits = []
    for _ in range(5):
        form_habit(publisher)
        gain_trust(publisher)
        for _ in range(2):
            began_at = time.monotonic()
            publisher.publish({"n": 0}).batch.done.exception(WAIT_S)
            waits.append(time.monotonic() - began_at)
            assert outbox_of(publisher).habit.is_formed
        assert outbox_of(publisher).habit.trust == 1
    trusted_s = AWAY_S * Habit.TRUST_MAX
    assert AWAY_S < min(waits[::2]) < trusted_s + 0.015
    assert min(waits[1::2]) < AWAY_S + 0.010


def test_who_publishes_the_next_in_time_gains_trust(transport, publisher, monkeypatch):
    monkeypatch.setattr(direct_module, "AWAY_S", 0.02)
    until(lambda: publisher.publish({"n": 0}) and outbox_of(publisher).habit.trust >= 4)
    publisher.flush(WAIT_S)


def test_a_new_habit_is_looked_after_beside_a_lasting_one(transport, publisher, monkeypatch):
    """What a journal's new caller does not look for is not late by another's trust."""
    monkeypatch.setattr(direct_module, "AWAY_S", 0.02)
    second = "a/second"
    transport.create(second)
    waits = []
    while len(waits) < 3:
        gain_trust(publisher)
        form_habit(publisher, second)
        publisher.publish({"n": -1}).result(WAIT_S)
        began_at = time.monotonic()
        receipt = publisher.publish({"n": 1}, mapping=mapping.direct(second))
        was_away = outbox_of(publisher, second).holder == Holder.AWAY
        receipt.batch.done.exception(WAIT_S)
        if was_away:  # it may not be on a busy machine
            waits.append(time.monotonic() - began_at)
    assert 0.01 < min(waits) < 0.02 * Habit.TRUST_MAX / 2


def test_the_lookout_ends_when_nothing_is_away(transport, publisher, monkeypatch):
    monkeypatch.setattr(direct_module, "AWAY_S", 0.01)
    directs = publisher._sender._directs
    for n in range(3):
        receipt = publisher.publish({"n": n})
        if n != 1:  # settled by the lookout itself
            receipt.result(WAIT_S)
        assert directs._watched
        until(lambda: not directs._watched)
        assert receipt.batch.is_done
    assert transport.numbers() == [0, 1, 2]
