"""Publishing by the very thread that waits: what is held, who appends it, what of failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.errors import (
    BackPressureError,
    ClosedError,
    GazetteError,
    NotAllowedError,
)
from gazette_sdk.message.publishing import direct as direct_module
from gazette_sdk.message.publishing import receipt as receipt_module
from gazette_sdk.message.publishing.handover import Habit, Holder
from gazette_sdk.message.publishing.receipt import ReceiptTimeoutError
from gazette_sdk.protocol import broker_pb2 as pb
from support.direct_memory import DirectMemoryTransport

WAIT_S = 10.0
JOURNAL = "a/journal"


HOLD_S = direct_module.HOLD_S


@pytest.fixture(autouse=True)
def _a_busy_machine_does_not_matter(monkeypatch):
    monkeypatch.setattr(receipt_module, "PROMPT_S", 5.0)
    monkeypatch.setattr(direct_module, "HOLD_S", 0.5)


@pytest.fixture
def transport():
    made = DirectMemoryTransport()
    made.create(JOURNAL)
    return made


@pytest.fixture
def publisher(transport):
    """A publisher with the habit: its next message is held."""
    with Publisher(mapping=mapping.direct(JOURNAL), transport=transport) as made:
        form_habit(made)
        yield made
        transport.let_end.set()


def form_habit(publisher, journal=JOURNAL):
    for number in range(200):
        publisher.publish({"n": -1 - number}, mapping=mapping.direct(journal)).result(WAIT_S)
        if outbox(publisher, journal).habit.is_formed:  # on a busy machine answers may be too quick
            return
    raise AssertionError


def outbox(publisher, journal=JOURNAL):
    return publisher._sender.outboxes[journal]


def numbers(transport):
    lines = transport.content_of(JOURNAL).splitlines()
    return [n for n in (json.loads(line).get("n", -1) for line in lines) if n >= 0]


def until(condition):
    ends_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


# --------------------------------------------------------------------- the habit


def test_the_thread_that_waits_appends(transport, publisher):
    assert not transport.direct_appends
    begun = transport.appends_begun
    for n in range(20):
        receipt = publisher.publish({"n": n}).result(WAIT_S)
        assert transport.content_of(JOURNAL)[receipt.begin : receipt.end].endswith(b"\n")
        assert receipt.total_chunks == 1
    assert transport.appends_begun == begun
    assert {name for _, _, name in transport.direct_appends} == {threading.current_thread().name}
    assert numbers(transport) == list(range(20))
    publisher.flush(WAIT_S)
    assert publisher._sender._pending_bytes == 0


def test_without_such_a_transport_nothing_changes(transport, publisher):
    transport.has_direct = False
    outbox(publisher).way = None
    for n in range(5):
        publisher.publish({"n": n}).result(WAIT_S)
    assert not transport.direct_appends
    assert numbers(transport) == list(range(5))


@pytest.mark.parametrize("break_it", ["two at once", "await", "batch", "never asked"])
def test_other_uses_break_the_habit(transport, publisher, break_it, on_loop):
    match break_it:
        case "two at once":
            publisher.publish({"n": 0})
            publisher.publish({"n": 1}).result(WAIT_S)
        case "await":
            asyncio.run(_wait_for(publisher.publish({"n": 0})))
        case "batch":
            publisher.publish({"n": 0})
            publisher.publish_batch([{"n": 1}, {"n": 2}]).result(WAIT_S)
        case "never asked":
            receipt = publisher.publish({"n": 0})
            until(receipt.done)
    assert not transport.direct_appends
    assert not outbox(publisher).habit.is_formed
    publisher.publish({"n": 9}).result(WAIT_S)
    assert not transport.direct_appends
    assert numbers(transport) in ([0, 9], [0, 1, 9], [0, 1, 2, 9])


async def _wait_for(receipt):
    async with asyncio.timeout(WAIT_S):
        await receipt


def test_what_nobody_asks_for_leaves_within_milliseconds(transport, publisher, monkeypatch):
    monkeypatch.setattr(direct_module, "HOLD_S", HOLD_S)
    waits = []
    for n in range(10):
        form_habit(publisher)
        transport.direct_appends.clear()
        began_at = time.monotonic()
        receipt = publisher.publish({"n": n})
        receipt.batch.done.exception(WAIT_S)
        waits.append(time.monotonic() - began_at)
        assert not transport.direct_appends
    assert min(waits) < 0.010
    assert numbers(transport) == list(range(10))


def gain_trust(publisher):
    """Keep the habit for as long as it takes to be trusted most."""
    ends_at = time.monotonic() + WAIT_S
    while outbox(publisher).habit.trust < Habit.TRUST_MAX:
        assert time.monotonic() < ends_at
        publisher.publish({"n": -1}).result(WAIT_S)


def test_a_lasting_habit_is_seldom_looked_after(publisher, monkeypatch):
    monkeypatch.setattr(direct_module, "HOLD_S", 0.002)
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
    monkeypatch.setattr(direct_module, "HOLD_S", HOLD_S)
    waits = []
    for _ in range(5):
        form_habit(publisher)
        gain_trust(publisher)
        for _ in range(2):
            form_habit(publisher)
            began_at = time.monotonic()
            publisher.publish({"n": 0}).batch.done.exception(WAIT_S)
            waits.append(time.monotonic() - began_at)
        assert outbox(publisher).habit.trust == 1
    trusted_s = HOLD_S * Habit.TRUST_MAX
    assert HOLD_S < min(waits[::2]) < trusted_s + 0.015
    assert min(waits[1::2]) < HOLD_S + 0.010


def test_a_caller_who_comes_late_is_trusted_less(publisher, monkeypatch):
    monkeypatch.setattr(direct_module, "HOLD_S", 0.01)
    gain_trust(publisher)
    monkeypatch.setattr(receipt_module, "PROMPT_S", 0.0)
    publisher.publish({"n": 0}).result(WAIT_S)
    assert outbox(publisher).habit.is_formed
    assert outbox(publisher).habit.trust == 1


def test_a_new_habit_is_looked_after_beside_a_lasting_one(transport, publisher, monkeypatch):
    """What a journal's new caller does not ask for is not late by another's trust."""
    monkeypatch.setattr(direct_module, "HOLD_S", 0.02)
    second = "a/second"
    transport.create(second)
    waits = []
    while len(waits) < 3:
        gain_trust(publisher)
        form_habit(publisher, second)
        publisher.publish({"n": -1}).result(WAIT_S)
        began_at = time.monotonic()
        receipt = publisher.publish({"n": 1}, mapping=mapping.direct(second))
        was_held = outbox(publisher, second).holder == Holder.HELD
        receipt.batch.done.exception(WAIT_S)
        if was_held:  # it may not be on a busy machine
            waits.append(time.monotonic() - began_at)
    assert 0.01 < min(waits) < 0.02 * Habit.TRUST_MAX / 2


def test_a_caller_who_is_always_late_is_served_by_the_loop(transport, publisher, monkeypatch):
    monkeypatch.setattr(receipt_module, "PROMPT_S", 0.0)
    for n in range(Habit.COUNT_MAX):
        publisher.publish({"n": n}).result(WAIT_S)
    assert len(transport.direct_appends) == 1
    assert numbers(transport) == list(range(Habit.COUNT_MAX))


def test_the_lookout_ends_when_nothing_is_held(publisher, monkeypatch):
    monkeypatch.setattr(direct_module, "LOOKOUT_S", 0.01)
    publisher.publish({"n": 0}).result(WAIT_S)
    assert publisher._sender._directs._watched
    until(lambda: not publisher._sender._directs._watched)
    publisher.publish({"n": 1}).result(WAIT_S)
    assert publisher._sender._directs._watched


def test_a_message_that_is_large_is_the_loops(transport, publisher):
    publisher.publish({"n": 0, "text": "x" * (direct_module.BYTES_MAX)}).result(WAIT_S)
    assert not transport.direct_appends


def test_within_a_coroutine_nothing_is_held(transport, publisher):
    async def main():
        publisher.publish({"n": 0})
        assert outbox(publisher).holder != Holder.HELD

    asyncio.run(main())
    publisher.flush(WAIT_S)
    assert not transport.direct_appends


def test_a_transaction_behind_a_held_message_keeps_its_place(transport, publisher):
    publisher.publish({"n": 0})
    with publisher.transaction() as txn:
        txn.publish({"n": 1})
    assert not transport.direct_appends
    assert numbers(transport)[:2] == [0, 1]


def test_a_short_patience_rather_looks_than_appends(transport, publisher):
    receipt = publisher.publish({"n": 0})
    with pytest.raises(ReceiptTimeoutError):
        receipt.result(timeout=0)
    receipt.result(WAIT_S)
    assert not transport.direct_appends


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("fault", ["refused", "unsent", "lost", pb.NO_JOURNAL_PRIMARY_BROKER])
def test_the_loop_goes_on_with_what_a_caller_could_not_append(transport, publisher, fault):
    transport.direct_faults = [fault]
    receipt = publisher.publish({"n": 0}).result(WAIT_S)
    assert numbers(transport) == ([0, 0] if fault == "lost" else [0])
    assert receipt.batch.was_retried == (fault in {"unsent", "lost"})
    assert len(transport.failures) == (0 if isinstance(fault, int) else 1)
    if fault == "lost":  # the same bytes, and so the same UUID
        first, second = transport.content_of(JOURNAL).splitlines()[-2:]
        assert first == second
    publisher.publish({"n": 1}).result(WAIT_S)
    assert numbers(transport)[-2:] == [0, 1]
    assert outbox(publisher).habit.is_formed is False


def test_what_gathers_behind_a_failure_follows_it(transport, publisher):
    transport.direct_faults = ["lost"]
    transport.direct_takes_s = 0.05
    receipt = publisher.publish({"n": 0})
    waiting = threading.Thread(target=receipt.result)
    waiting.start()
    until(lambda: outbox(publisher).holder == Holder.CALLER)
    others = [publisher.publish({"n": n}) for n in (1, 2)]
    for other in others:
        other.result(WAIT_S)
    waiting.join(WAIT_S)
    assert numbers(transport) == [0, 0, 1, 2]


def test_what_gathers_behind_a_caller_is_the_loops(transport, publisher):
    transport.direct_takes_s = 0.02
    receipt = publisher.publish({"n": 0})
    waiting = threading.Thread(target=receipt.result)
    waiting.start()
    until(lambda: outbox(publisher).holder == Holder.CALLER)
    publisher.publish({"n": 1}).result(WAIT_S)
    waiting.join(WAIT_S)
    assert len(transport.direct_appends) == 1
    assert numbers(transport) == [0, 1]


def test_a_failure_for_good_is_the_receipts(transport, publisher):
    transport.direct_faults = [pb.NOT_ALLOWED]
    transport.append_faults = [pb.NOT_ALLOWED]
    with pytest.raises(NotAllowedError):
        publisher.publish({"n": 0}).result(WAIT_S)
    with pytest.raises(NotAllowedError):
        publisher.flush(WAIT_S)
    assert publisher._sender._pending_bytes == 0
    publisher.publish({"n": 1}).result(WAIT_S)
    assert numbers(transport) == [1]


def test_a_route_in_the_response_is_learned_on_the_loop(transport, publisher):
    transport.has_news = True
    publisher.publish({"n": 0}).result(WAIT_S)
    until(lambda: transport.learned == 1)


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
    assert numbers(transport) == ([0, 1] if fault == "late" else [0, 0, 1])


def test_an_interrupted_caller_leaves_its_message_to_the_loop(transport, publisher):
    transport.direct_faults = ["late, unsent"]
    receipt = publisher.publish({"n": 0})
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        receipt.result(WAIT_S)
    receipt.result(WAIT_S)
    assert numbers(transport) == [0]
    assert receipt.batch.was_retried


def test_a_mistake_of_ours_leaves_the_message_to_the_loop(transport, publisher):
    transport.direct_faults = ["raises"]
    receipt = publisher.publish({"n": 0})
    with pytest.raises(ZeroDivisionError):
        receipt.result(WAIT_S)
    receipt.result(WAIT_S)
    assert numbers(transport) == [0]


def test_an_interruption_while_handing_over_leaves_the_message_to_the_loop(
    transport, publisher, monkeypatch
):
    directs = publisher._sender._directs
    wake, interruptions = directs.wake, [KeyboardInterrupt]

    def interrupted(outboxes):
        if interruptions:
            raise interruptions.pop()
        wake(outboxes)

    monkeypatch.setattr(directs, "wake", interrupted)
    transport.direct_faults = ["refused"]
    receipt = publisher.publish({"n": 0})
    with pytest.raises(KeyboardInterrupt):
        receipt.result(WAIT_S)
    receipt.result(WAIT_S)
    assert numbers(transport) == [0]


def test_asking_for_the_task_twice_harms_nothing(transport, publisher):
    for n in range(20):
        publisher.publish({"n": n})
        for _ in range(3):
            publisher._sender._wake([outbox(publisher)])
    publisher.flush(WAIT_S)
    assert numbers(transport) == list(range(20))


def test_where_the_loop_has_ended_a_failure_is_for_good(transport, publisher, monkeypatch):
    def ended(outboxes):
        raise RuntimeError("Event loop is closed")

    receipt = publisher.publish({"n": 0})
    transport.direct_faults = ["late, unsent"]
    transport.direct_takes_s = 0.05
    with monkeypatch.context() as patched:
        patched.setattr(publisher._sender._directs, "wake", ended)
        with pytest.raises(ClosedError):
            receipt.result(timeout=0.06)
    assert publisher._sender._pending_bytes == 0
    with pytest.raises(ClosedError):
        publisher.flush(WAIT_S)


# -------------------------------------------------------------------------- ends


def test_flush_and_close_send_what_is_held(transport):
    publisher = Publisher(mapping=mapping.direct(JOURNAL), transport=transport)
    form_habit(publisher)
    publisher.publish({"n": 0})
    publisher.flush(WAIT_S)
    assert numbers(transport) == [0]
    form_habit(publisher)
    publisher.publish({"n": 1})
    publisher.close(WAIT_S)
    assert numbers(transport) == [0, 1]
    with pytest.raises(ClosedError):
        publisher.publish({"n": 2})


@pytest.mark.parametrize("waits", ["publish", "room", "refused"])
def test_who_wants_room_does_not_wait_for_who_holds_it(transport, monkeypatch, waits):
    monkeypatch.setattr(direct_module, "HOLD_S", 1000.0)
    publisher = Publisher(
        mapping=mapping.direct(JOURNAL),
        transport=transport,
        pending_bytes_max=1,
        when_full="raise" if waits == "refused" else "block",
    )
    with publisher:
        form_habit(publisher)
        receipt = publisher.publish({"n": 0})
        assert outbox(publisher).holder == Holder.HELD
        if waits == "publish":
            publisher.publish({"n": 1}).result(WAIT_S)
        elif waits == "room":
            asyncio.run(_wait_for_room(publisher))
        else:
            with pytest.raises(BackPressureError):
                publisher.publish({"n": 1})
        until(receipt.done)


async def _wait_for_room(publisher):
    async with asyncio.timeout(WAIT_S):
        await publisher.room()


def test_close_gives_up_what_a_caller_is_appending(transport):
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
    until(lambda: outbox(publisher).holder == Holder.CALLER)
    with pytest.raises(ReceiptTimeoutError):
        publisher.close(timeout=0.05)
    waiting.join(WAIT_S)
    assert [type(error) for error in errors] == [ClosedError]
    assert numbers(transport) == []


def test_a_forked_child_does_not_send_what_its_parent_holds(transport, publisher):
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
    assert numbers(transport) == [0]


def test_threads_that_wait_and_threads_that_do_not_keep_order(transport, publisher):
    transport.direct_faults = ["lost", None, "refused", None, None, "unsent"] * 50

    def run(name, waits):
        for n in range(200):
            receipt = publisher.publish({"n": n, "by": name})
            if waits:
                receipt.result(WAIT_S)

    threads = [threading.Thread(target=run, args=(n, n % 3 != 2)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    publisher.flush(WAIT_S)
    seen = {}
    uuids = set()
    for line in transport.content_of(JOURNAL).splitlines():
        message = json.loads(line)
        if message["n"] >= 0 and message["UUID"] not in uuids:
            uuids.add(message["UUID"])
            seen.setdefault(message["by"], []).append(message["n"])
    assert seen == {n: list(range(200)) for n in range(6)}
    assert publisher._sender._pending_bytes == 0
