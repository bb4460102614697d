"""Appends that are not acknowledged within the delivery time-out."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from gazette_sdk.errors import DeliveryTimeoutError, GazetteError, UnavailableError
from gazette_sdk.transport.append import appender as service
from gazette_sdk.transport.append.appender import AppendSender
from gazette_sdk.transport.append.queue import AppendQueue, QueueEffect, QueueState
from support.scripted_appends import NEVER_S, WAIT_S, ScriptedJournal, until

TIMEOUT_S = 0.1
LOST = UnavailableError("the answer was lost")


@pytest.fixture
def timed(monkeypatch):
    with ScriptedJournal(delivery_timeout_s=TIMEOUT_S, is_sticky=False) as journal:
        yield journal


def expired(append) -> bool:
    assert append.wait(WAIT_S)
    with pytest.raises(DeliveryTimeoutError, match=r"within delivery_timeout_s=0.1 seconds"):
        append.result()
    return True


def test_an_append_in_flight_expires_and_frees_its_memory(timed):
    append = timed.append_on_loop(b"1")
    until(lambda: timed.route.sent)
    assert expired(append)
    assert timed.service.pending_bytes == 0
    assert timed.route.is_given_up


def test_a_late_answer_of_an_append_that_expired_is_dropped(timed):
    append = timed.append_on_loop(b"1")
    until(lambda: timed.route.sent)
    late = timed.route.sent[0].answered
    assert expired(append)
    timed.thread.call(lambda: late(LOST))
    behind = timed.append_on_loop(b"2")
    until(lambda: len(timed.route.sent) == 2)
    timed.answer()
    assert behind.wait(WAIT_S)
    assert behind.exception() is None


def test_a_thread_that_waits_for_an_inline_append_waits_no_longer(timed):
    append = timed.append(b"1")
    assert timed.sender is AppendSender.INLINE
    begun = time.monotonic()
    assert expired(append)
    assert time.monotonic() - begun < WAIT_S
    timed.route.calls[0].answer()  # too late
    until(lambda: timed.sender is AppendSender.NOBODY)
    behind = timed.append(b"2")
    timed.route.calls[1].answer()
    assert behind.wait(WAIT_S)
    assert behind.exception() is None


def test_coroutines_wait_no_longer(timed):
    async def publish():
        await timed.append(b"1")

    with pytest.raises(DeliveryTimeoutError):
        timed.thread.call(publish)


def test_appends_expire_while_no_broker_can_be_reached(monkeypatch):
    monkeypatch.setattr(service, "SWEEP_S", NEVER_S)
    with ScriptedJournal(delivery_timeout_s=TIMEOUT_S, is_sticky=False) as journal:
        journal.route.has_connection = journal.route.is_open = False
        journal.route.open_error = LOST
        append = journal.append(b"1")
        assert expired(append)
        assert append.exception().__cause__ is LOST
        assert str(append.exception()).endswith(f"; the last attempt failed: {LOST}")


def test_appends_behind_a_future_expire(timed):
    future = asyncio.run_coroutine_threadsafe(asyncio.sleep(NEVER_S), timed.thread.loop)
    try:
        assert expired(timed.append(b"1", after=[future]))
    finally:
        future.cancel()


def test_without_a_delivery_timeout_nothing_expires(journal):
    journal.append_on_loop(b"1")
    until(lambda: journal.route.sent)
    assert journal.service._expiry is None


# ------------------------------------------------------------------ the queue


def queue_of(*times: float) -> AppendQueue:
    queue = AppendQueue("a/journal", 1)
    for queued_at in times:
        append = queue.tail()
        append.add_part(b".")
        queue.push(append)
        append.queued_at = queued_at
    return queue


@pytest.mark.parametrize("begun", range(4))
@pytest.mark.parametrize("before", [0.5, 1.5, 2.5, 3.5])
@pytest.mark.parametrize("failed", [False, True])
def test_exactly_what_was_queued_before_expires_wherever_it_is(begun, before, failed):
    queue = queue_of(1, 2, 3)
    appends = list(queue)
    for _ in range(begun):
        queue.begin()
    if failed and begun:
        queue.answered(appends[0], LOST, is_terminal=False)
    gone, effect = queue.expire(before)
    assert gone == [append for append in appends if append.queued_at < before]
    assert list(queue) == [append for append in appends if append.queued_at >= before]
    drained = failed and 1 < begun <= len(gone)
    assert effect is (QueueEffect.RETRY if drained else QueueEffect.NOTHING)
    if queue.state is QueueState.PAUSED:
        queue.resume()
    with contextlib.suppress(GazetteError):
        while (append := queue.begin()) is not None:
            assert append not in gone
