"""Appender of a journal on its event loop: window, failures, linger, and awaited futures."""

from __future__ import annotations

import concurrent.futures
import time

import pytest

from gazette_sdk.errors import (
    RegisterMismatchError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append import appender as service
from gazette_sdk.transport.append import queue as linger
from gazette_sdk.transport.append.appender import AppendSender
from gazette_sdk.transport.append.queue import (
    IN_FLIGHT_BYTES_MAX,
    IN_FLIGHT_MAX,
    LARGE_BYTES,
    STREAMING_COUNT_MIN,
    DependencyFailedError,
    PendingAppend,
)
from support.scripted_appends import NEVER_S, WAIT_S, ScriptedJournal, until
from support.scripted_broker import append_ok, append_status

LOST = UnavailableError("the answer was lost")
AUTHOR = pb.LabelSelector()
AUTHOR.include.labels.add(name="author", value="me")
UNION = pb.LabelSet(labels=[pb.Label(name="author", value="me")])


# ---------------------------------------------------------------- on the loop


def test_so_many_are_in_flight_and_what_queues_behind_shares_an_append(journal):
    appends = []
    for n in range(IN_FLIGHT_MAX):
        appends.append(journal.append_on_loop(b"%d" % n))
        until(lambda n=n: len(journal.route.sent) == n + 1)
    appends += [journal.append(b"x") for _ in range(5)]
    journal.thread.turn()
    assert len(journal.route.in_flight) == IN_FLIGHT_MAX
    journal.answer()
    until(lambda: len(journal.route.sent) == IN_FLIGHT_MAX + 1)
    assert journal.route.contents()[-1] == b"xxxxx"
    journal.answer_all()
    assert all(append.done() for append in appends)


def test_much_content_in_flight_keeps_others_back(journal):
    journal.append_on_loop(bytes(IN_FLIGHT_BYTES_MAX))
    journal.append_on_loop(b"x")
    journal.thread.turn()
    assert len(journal.route.sent) == 1
    journal.answer()
    until(lambda: len(journal.route.sent) == 2)


def test_a_route_that_cannot_send_is_opened_first(journal):
    journal.route.is_open = False
    append = journal.append_on_loop(b"1")
    journal.answer()
    assert append.wait(WAIT_S)
    assert journal.route.opened == 1


def test_a_route_that_cannot_be_opened_is_tried_again(journal):
    journal.route.is_open = False
    journal.route.open_error = LOST
    append = journal.append_on_loop(b"1")
    until(lambda: journal.route.opened > 2)
    assert append.last_error is LOST
    journal.route.open_error = None
    journal.answer()
    assert append.wait(WAIT_S)


def test_a_route_with_little_room_is_used_again_when_it_wakes_the_appender(journal):
    journal.route.capacity = 1
    journal.append_on_loop(b"1")
    journal.append_on_loop(b"2")
    journal.thread.turn()
    assert journal.route.contents() == [b"1"]
    journal.route.capacity = 2
    journal.thread.call(journal.route.wake)
    until(lambda: journal.route.contents() == [b"1", b"2"])
    assert journal.route.opened == 0


def test_a_failure_waits_for_those_in_flight_and_all_are_sent_again_in_order(journal):
    appends = []
    for n in range(3):
        appends.append(journal.append_on_loop(b"%d" % n))
        until(lambda n=n: len(journal.route.sent) == n + 1)
    journal.answer(LOST)
    appends.append(journal.append(b"3"))
    journal.thread.turn()
    assert len(journal.route.sent) == 3
    journal.answer()
    journal.answer(LOST)
    until(lambda: journal.route.contents()[3:] == [b"0", b"1", b"2", b"3"])
    assert [append.last_error for append in appends] == [LOST, LOST, LOST, None]
    journal.answer_all()
    assert all(append.result().status == pb.OK for append in appends)


def test_a_register_mismatch_fails_all_behind_it_and_the_journal(journal):
    fenced = journal.append(b"1", check=AUTHOR)
    until(lambda: journal.route.sent)
    assert journal.route.sent[0].request.check_registers == AUTHOR
    behind = journal.append(b"2", union=UNION)
    assert fenced is not behind
    journal.answer(append_status(pb.REGISTER_MISMATCH))
    for append in (fenced, behind):
        assert append.wait(WAIT_S)
        with pytest.raises(RegisterMismatchError):
            append.result()
    assert journal.append(b"3").done()
    assert len(journal.route.sent) == 1


def test_an_append_that_changes_registers_needs_content(journal):
    with pytest.raises(ValidationError, match="needs content"):
        journal.appender.append(b"", union=UNION)
    assert not journal.appender.pending()


def test_a_journal_that_fails_without_sticking_takes_further_appends(monkeypatch):
    monkeypatch.setattr(service, "SWEEP_S", NEVER_S)
    with ScriptedJournal(is_sticky=False) as journal:
        failed = journal.append_on_loop(b"1")
        journal.answer(append_status(pb.NOT_ALLOWED))
        assert failed.wait(WAIT_S)
        until(lambda: journal.sender is AppendSender.NOBODY)
        journal.append(b"2")
        [call] = journal.route.calls
        call.answer()


def test_on_settled_is_called_under_the_lock_before_the_append_ends(monkeypatch):
    monkeypatch.setattr(service, "SWEEP_S", NEVER_S)
    seen = []

    def settled(appends, error):
        if appends:
            seen.append((len(appends), error, journal.service.lock._is_owned(), appends[0].done()))

    with ScriptedJournal(on_settled=settled) as journal:
        append = journal.append(b"1")
        journal.route.calls[0].answer()
        assert append.wait(WAIT_S)
        failed = journal.append_on_loop(b"2")
        journal.answer(append_status(pb.NOT_ALLOWED))
        assert failed.wait(WAIT_S)
        assert seen[0] == (1, None, True, False)
        assert seen[1] == (1, failed.exception(), True, False)
        assert journal.service.pending_bytes == 0


# ------------------------------------------------------------------------ linger


@pytest.fixture
def lingering(monkeypatch):
    """A journal whose appender lingers for long."""
    monkeypatch.setattr(service, "SWEEP_S", NEVER_S)
    monkeypatch.setattr(linger, "LINGER_S", 0.3)
    with ScriptedJournal() as journal:
        journal.route.has_connection = False
        yield journal


def test_behind_an_append_of_few_writes_nothing_waits_for_more(lingering):
    lingering.stream(STREAMING_COUNT_MIN - 1)
    lingering.answer()
    until(lambda: lingering.sender is AppendSender.NOBODY)
    began_at = time.monotonic()
    lingering.append(b"x")
    until(lambda: len(lingering.route.sent) == 2)
    assert time.monotonic() - began_at < 0.25
    lingering.answer()


def test_behind_an_append_of_many_writes_further_ones_wait_for_more(lingering):
    lingering.stream()
    began_at = time.monotonic()
    lingering.append(b"1")
    lingering.answer()
    lingering.append(b"2")
    lingering.thread.turn()
    lingering.append(b"3")
    assert len(lingering.route.sent) == 1
    until(lambda: len(lingering.route.sent) == 2)
    assert lingering.route.contents()[-1] == b"123"
    assert time.monotonic() - began_at > 0.25
    lingering.answer()


def test_a_large_append_waits_for_no_more(lingering):
    lingering.stream()
    began_at = time.monotonic()
    for _ in range(2):
        lingering.append(bytes(LARGE_BYTES // 2))
    until(lambda: len(lingering.route.sent) == 2)
    assert time.monotonic() - began_at < 0.25
    lingering.answer_all()


def test_a_stream_that_pauses_is_none_any_more(lingering):
    lingering.stream()
    lingering.answer()
    until(lambda: lingering.sender is AppendSender.NOBODY)  # the linger has ended
    began_at = time.monotonic()
    lingering.append(b"x")
    until(lambda: len(lingering.route.sent) == 2)
    assert time.monotonic() - began_at < 0.25
    lingering.answer()


def test_the_loop_that_awaits_more_is_woken_by_the_next_write(journal):
    journal.append_on_loop(b"1")
    until(lambda: journal.appender._is_awaiting_more)
    for n in range(2, 5):
        journal.append(b"%d" % n)
        until(lambda n=n: len(journal.route.sent) == n)
    assert journal.route.contents() == [b"1", b"2", b"3", b"4"]


# ------------------------------------------------------------------------- after


def asyncio_future(journal):
    future = journal.thread.call(journal.thread.loop.create_future)
    return future, lambda: journal.thread.call(lambda: future.set_result(None))


def concurrent_future(_journal):
    future = concurrent.futures.Future()
    return future, lambda: future.set_result(None)


def pending_append(_journal):
    future = PendingAppend(pb.AppendRequest(journal="other/journal"))
    return future, lambda: future.settle(append_ok())


FUTURES = [asyncio_future, concurrent_future, pending_append]


@pytest.mark.parametrize("kind", FUTURES)
def test_an_append_waits_for_a_future_and_those_behind_wait_with_it(journal, kind):
    future, end = kind(journal)
    ahead = journal.append_on_loop(b"0")
    until(lambda: journal.route.contents() == [b"0"])
    waiting = journal.append(b"1", after=[future])
    behind = journal.append(b"2", union=UNION)
    journal.answer()
    assert ahead.wait(WAIT_S)
    journal.thread.turn()
    assert journal.route.contents() == [b"0"]
    end()
    until(lambda: journal.route.contents() == [b"0", b"1"])
    assert not behind.done()
    journal.answer()
    journal.answer()
    assert waiting.wait(WAIT_S)
    assert behind.wait(WAIT_S)
    assert journal.route.contents() == [b"0", b"1", b"2"]


@pytest.mark.parametrize("kind", FUTURES)
def test_an_append_waits_for_all_its_futures(journal, kind):
    first, end_first = kind(journal)
    second, end_second = kind(journal)
    append = journal.append(b"1", after=[first, second])
    end_first()
    journal.thread.turn()
    assert not journal.route.sent
    end_second()
    journal.answer()
    assert append.wait(WAIT_S)


def test_a_future_that_has_succeeded_holds_nothing(journal):
    future = concurrent.futures.Future()
    future.set_result(None)
    append = journal.append(b"1", after=[future])
    journal.answer()
    assert append.wait(WAIT_S)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_future_that_fails_fails_the_append_and_all_behind_it(journal, is_cancelled):
    future = concurrent.futures.Future()
    waiting = journal.append(b"1", after=[future])
    behind = journal.append(b"2", union=UNION)
    if is_cancelled:
        future.cancel()
    else:
        future.set_exception(LOST)
    for append in (waiting, behind):
        assert append.wait(WAIT_S)
        with pytest.raises(DependencyFailedError, match=r"lost|cancelled"):
            append.result()
    with pytest.raises(DependencyFailedError):
        journal.append(b"3").result()
    assert not journal.route.sent


def test_a_future_that_fails_leaves_the_appends_ahead_alone(journal, monkeypatch):
    monkeypatch.setattr(linger, "LINGER_S", 0.0)
    ahead = journal.append_on_loop(b"0")
    until(lambda: journal.route.sent)
    future = concurrent.futures.Future()
    waiting = journal.append(b"1", after=[future])
    future.set_exception(LOST)
    journal.thread.turn()
    assert not ahead.done()
    journal.answer()
    assert ahead.wait(WAIT_S)
    assert ahead.result().status == pb.OK
    assert waiting.wait(WAIT_S)
    with pytest.raises(DependencyFailedError):
        waiting.result()
