"""The appender of a journal over a scripted route: its senders, its timers, its failures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time

import pytest

from gazette_sdk.errors import (
    ClosedError,
    GazetteError,
    NotAllowedError,
    RegisterMismatchError,
    UnavailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append import appender as module
from gazette_sdk.transport.append import service
from gazette_sdk.transport.append.appender import (
    INLINE_BYTES_MAX,
    LARGE_BYTES,
    STREAMING_COUNT_MIN,
    Sender,
)
from gazette_sdk.transport.append.pending import PendingAppend
from gazette_sdk.transport.append.queue import (
    IN_FLIGHT_BYTES_MAX,
    IN_FLIGHT_MAX,
    DependencyFailedError,
)
from support.scripted_appends import WAIT_S, ScriptedJournal, in_thread, until
from support.scripted_broker import append_ok, append_status

NEVER_S = 600.0
LOST = UnavailableError("the answer was lost")
AUTHOR = pb.LabelSelector()
AUTHOR.include.labels.add(name="author", value="me")
UNION = pb.LabelSet(labels=[pb.Label(name="author", value="me")])


@pytest.fixture
def journal(monkeypatch):
    """A journal; the event loop receives no inline answer by itself."""
    monkeypatch.setattr(service, "SWEEP_S", NEVER_S)
    with ScriptedJournal() as journal:
        yield journal


# --------------------------------------------------------------------- sender table


def nobody_queued(journal):
    append = journal.append(b"1")
    [call] = journal.route.calls
    assert (call.content, call.thread) == (b"1", threading.current_thread().name)
    assert journal.sender is Sender.INLINE
    assert not append.done()
    journal.thread.turn()
    assert not journal.route.sent
    call.answer()


def nobody_queued_without_connection(journal):
    journal.route.has_connection = False
    append = journal.append(b"1")
    assert journal.sender is Sender.LOOP
    until(lambda: journal.route.prepared)
    assert journal.route.prepared[0] not in {"the loop", threading.current_thread().name}
    until(lambda: journal.route.contents() == [b"1"])
    journal.answer()
    assert append.wait(WAIT_S)


def inline_queued_answer_there(journal):
    first = journal.append(b"1")
    journal.route.calls[0].answer(append_ok(0, 1))
    assert not first.done()
    second = journal.append(b"2")
    assert first.result().commit.end == 1
    assert journal.route.calls[1].content == b"2"
    assert journal.route.accepted == [append_ok(0, 1)]
    assert journal.sender is Sender.INLINE
    assert not second.done()
    journal.route.calls[1].answer()


def inline_queued_no_answer(journal):
    first, second = journal.append(b"1"), journal.append(b"2")
    assert journal.sender is Sender.LOOP
    until(lambda: journal.route.calls[0].is_waited_for)
    journal.thread.turn()
    assert not journal.route.sent, "the inline append is alone in flight"
    journal.route.calls[0].answer()
    assert first.wait(WAIT_S)
    assert journal.route.calls[0].received_by == "the loop"
    journal.answer()
    assert second.wait(WAIT_S)
    assert journal.route.contents() == [b"2"]
    assert len(journal.route.calls) == 1


def inline_waited_for(journal):
    append = journal.append(b"1")
    thread = in_thread(lambda: append.wait(WAIT_S))
    until(lambda: journal.sender is Sender.RECEIVER)
    journal.route.calls[0].answer()
    thread.join(WAIT_S)
    assert append.done()
    assert journal.route.calls[0].received_by == thread.name


def inline_overdue(journal):
    append = journal.append(b"1")
    journal.appender.leave_to_loop()
    assert journal.sender is Sender.LOOP
    journal.route.calls[0].answer()
    assert append.wait(WAIT_S)
    assert journal.route.calls[0].received_by == "the loop"


def receiver_queued(journal):
    first = journal.append(b"1")
    thread = in_thread(lambda: first.wait(WAIT_S))
    until(lambda: journal.sender is Sender.RECEIVER)
    journal.append(b"2")
    journal.append(b"3")
    assert journal.sender is Sender.RECEIVER
    journal.thread.turn()
    assert not journal.route.sent
    assert len(journal.route.calls) == 1
    journal.route.calls[0].answer()
    thread.join(WAIT_S)


def receiver_answered_more_queued(journal):
    receiver_queued(journal)
    first, second = journal.route.calls
    assert first.thread == threading.current_thread().name
    assert second.thread == first.received_by != first.thread
    assert second.content == b"23"
    assert journal.sender is Sender.INLINE
    second.answer()


def receiver_answered_nothing_queued(journal):
    inline_waited_for(journal)
    assert journal.sender is Sender.NOBODY
    journal.append(b"2")
    assert len(journal.route.calls) == 2
    journal.route.calls[1].answer()


def loop_queued(journal):
    journal.append_on_loop(b"1")
    until(lambda: journal.route.contents() == [b"1"])
    assert journal.sender is Sender.LOOP
    journal.append(b"2")
    assert journal.sender is Sender.LOOP
    until(lambda: journal.route.contents() == [b"1", b"2"])
    assert not journal.route.calls


def loop_idle(journal):
    append = journal.append_on_loop(b"1")
    journal.answer()
    assert append.wait(WAIT_S)
    until(lambda: journal.sender is Sender.NOBODY)
    journal.append(b"2")
    assert len(journal.route.calls) == 1
    journal.route.calls[0].answer()


ROWS = {
    "NOBODY, queued: send inline": nobody_queued,
    "NOBODY, queued: no connection for that: wake the event loop": nobody_queued_without_connection,
    "INLINE, queued: take the answer, if there, and send inline": inline_queued_answer_there,
    "INLINE, queued: no answer yet: leave it to the event loop": inline_queued_no_answer,
    "INLINE, waited for: receive the answer on this thread": inline_waited_for,
    "INLINE, overdue: leave it to the event loop": inline_overdue,
    "RECEIVER, queued: nothing: the receiver sends it": receiver_queued,
    "RECEIVER, answered: send inline what has queued": receiver_answered_more_queued,
    "RECEIVER, answered: nothing has queued": receiver_answered_nothing_queued,
    "LOOP, queued: nothing: the event loop sends it": loop_queued,
    "LOOP, idle: nothing": loop_idle,
}


def test_each_row_of_the_docstrings_table_has_a_test():
    rows = []
    for line in module.__doc__.splitlines():
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if len(cells) == 4 and cells[0] in Sender.__members__:
            assert cells[3] in Sender.__members__
            rows.append(f"{cells[0]}, {cells[1]}: {cells[2]}")
    assert rows == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_journal_is_sent_to_as_the_table_says(journal, row):
    ROWS[row](journal)
    journal.answer_all()
    until(lambda: journal.sender is Sender.NOBODY)


# ------------------------------------------------------------------- inline or not


@pytest.mark.parametrize(
    "options",
    [
        {"content": b""},
        {"content": bytes(INLINE_BYTES_MAX + 1)},
        {"content": b"x", "check": AUTHOR},
        {"content": b"x", "union": UNION},
    ],
    ids=["empty", "large", "check", "union"],
)
def test_such_appends_are_left_to_the_loop(journal, options):
    append = journal.append(**options)
    journal.answer()
    assert append.wait(WAIT_S)
    assert not journal.route.calls
    assert not journal.route.prepared


def test_an_append_that_waits_for_a_future_is_left_to_the_loop(journal):
    future = concurrent.futures.Future()
    append = journal.append(b"x", after=[future])
    future.set_result(None)
    journal.answer()
    assert append.wait(WAIT_S)
    assert not journal.route.calls


def test_the_longest_inline_append_is_inline(journal):
    journal.append(bytes(INLINE_BYTES_MAX))
    [call] = journal.route.calls
    call.answer()


def test_a_coroutine_of_the_loop_never_sends_inline(journal):
    async def use():
        append = journal.append(b"x")
        journal.service.call_soon(lambda: journal.route.in_flight.popleft().answered(append_ok()))
        return await append

    assert journal.thread.call(use).status == pb.OK
    assert not journal.route.calls


def test_a_coroutine_of_another_loop_sends_inline_and_the_loop_receives_the_answer(journal):
    async def use():
        append = journal.append(b"x")
        assert len(journal.route.calls) == 1
        waiting = asyncio.ensure_future(append.ended())
        await asyncio.sleep(0)
        assert journal.sender is Sender.LOOP
        journal.route.calls[0].answer()
        await waiting
        return append.result()

    assert asyncio.run(use()).status == pb.OK
    assert journal.route.calls[0].received_by == "the loop"


def test_a_connection_for_inline_appends_is_prepared_once_in_a_while(journal, monkeypatch):
    journal.route.has_connection = False
    for _ in range(5):
        append = journal.append(b"x")
        journal.answer()
        assert append.wait(WAIT_S)
        until(lambda: journal.sender is Sender.NOBODY)
    assert len(journal.route.prepared) == 1
    monkeypatch.setattr(module, "PREPARE_S", 0.0)
    journal.appender._prepare_at = 0.0
    journal.append(b"x")
    until(lambda: len(journal.route.prepared) == 2)
    journal.answer()


# ---------------------------------------------------------------- inline answers


def test_the_sweep_leaves_answers_that_nobody_receives_to_the_loop(monkeypatch):
    monkeypatch.setattr(service, "SWEEP_S", 0.01)
    with ScriptedJournal() as journal:
        append = journal.append(b"x")
        until(lambda: journal.sender is Sender.LOOP)
        journal.route.calls[0].answer()
        until(append.done)  # nobody waits for it
        assert journal.route.calls[0].received_by == "the loop"
        until(lambda: not journal.service._is_sweeping)


def test_a_thread_whose_time_runs_out_leaves_the_answer_to_others(journal):
    append = journal.append(b"1")
    assert not append.wait(0.01)
    assert journal.sender is Sender.INLINE
    assert not append.poll()
    journal.route.calls[0].answer()
    assert append.poll()
    assert append.result().status == pb.OK


def test_what_queued_meanwhile_is_sent_though_the_receivers_time_runs_out(journal):
    first = journal.append(b"1")
    thread = in_thread(lambda: first.wait(0.2))
    until(lambda: journal.sender is Sender.RECEIVER)
    second = journal.append(b"2")
    thread.join(WAIT_S)
    assert not first.done()
    assert journal.sender is Sender.LOOP
    journal.route.calls[0].answer()
    journal.answer()
    assert second.wait(WAIT_S)
    assert first.done()


def test_several_threads_wait_and_one_of_them_receives(journal):
    append = journal.append(b"1")
    threads = [in_thread(lambda: append.wait(WAIT_S)) for _ in range(4)]
    until(lambda: len(append._callbacks) == 3)
    journal.route.calls[0].answer()
    for thread in threads:
        thread.join(WAIT_S)
    assert append.done()
    assert journal.route.calls[0].received_by in {thread.name for thread in threads}


def test_a_coroutine_of_the_loop_waits_for_an_inline_append(journal):
    append = journal.append(b"1")
    waiting = asyncio.run_coroutine_threadsafe(append.ended(), journal.thread.loop)
    until(lambda: journal.sender is Sender.LOOP)
    journal.route.calls[0].answer()
    waiting.result(WAIT_S)


@pytest.mark.parametrize("error", [LOST, NotAllowedError("no")])
def test_an_inline_append_that_fails_is_tried_again_on_the_loop_or_not(journal, error):
    append = journal.append(b"1")
    journal.route.calls[0].answer(error)
    if isinstance(error, NotAllowedError):
        assert append.wait(WAIT_S)
        assert append.exception() is error
    else:
        thread = in_thread(lambda: append.wait(WAIT_S))
        until(lambda: journal.route.contents() == [b"1"])
        assert append.last_error is error
        journal.answer()
        thread.join(WAIT_S)
        assert append.result().status == pb.OK
    assert journal.route.failures == [error]


def test_a_status_of_an_inline_append_is_its_error(journal):
    append = journal.append(b"1")
    journal.route.calls[0].answer(append_status(pb.NOT_ALLOWED))
    assert append.wait(WAIT_S)
    with pytest.raises(NotAllowedError):
        append.result()
    assert len(journal.route.accepted) == 1
    with pytest.raises(NotAllowedError):
        journal.append(b"2").result()


def test_a_response_that_is_refused_is_a_failure(journal):
    journal.route.accept_error = UnavailableError("malformed")
    append = journal.append(b"1")
    journal.route.calls[0].answer()
    thread = in_thread(lambda: append.wait(WAIT_S))
    until(lambda: journal.route.contents() == [b"1"])
    journal.answer()
    thread.join(WAIT_S)
    assert journal.route.failures == [journal.route.accept_error]


def test_an_inline_append_that_cannot_be_sent_goes_to_the_loop(journal):
    journal.route.inline_error = LOST
    append = journal.append(b"1")
    until(lambda: journal.route.contents() == [b"1"])
    assert append.last_error is LOST
    journal.answer()
    assert append.wait(WAIT_S)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError()])
def test_an_interrupt_while_it_is_sent_leaves_the_append_to_the_loop(journal, error):
    journal.route.inline_error = error
    with pytest.raises(type(error)):
        journal.append(b"1")
    until(lambda: journal.route.contents() == [b"1"])
    [append] = journal.service.pending()
    journal.answer()
    assert append.wait(WAIT_S)


def test_an_interrupt_while_it_is_waited_for_leaves_the_append_to_the_loop(journal):
    append = journal.append(b"1")
    journal.route.calls[0].answer(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        append.wait(WAIT_S)
    until(lambda: journal.route.contents() == [b"1"])
    journal.answer()
    assert append.wait(WAIT_S)
    assert append.result().status == pb.OK


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


def test_a_journal_that_fails_without_sticking_takes_further_appends(monkeypatch):
    monkeypatch.setattr(service, "SWEEP_S", NEVER_S)
    with ScriptedJournal(is_sticky=False) as journal:
        failed = journal.append_on_loop(b"1")
        journal.answer(append_status(pb.NOT_ALLOWED))
        assert failed.wait(WAIT_S)
        until(lambda: journal.sender is Sender.NOBODY)
        journal.append(b"2")
        [call] = journal.route.calls
        call.answer()


def test_on_settled_is_called_under_the_lock_before_the_append_ends(monkeypatch):
    monkeypatch.setattr(service, "SWEEP_S", NEVER_S)
    seen = []

    def settled(appends, error):
        if appends:
            seen.append((len(appends), error, journal.service.lock.locked(), appends[0].done()))

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
    monkeypatch.setattr(module, "LINGER_S", 0.3)
    with ScriptedJournal() as journal:
        journal.route.has_connection = False
        yield journal


def stream_to(journal, count=STREAMING_COUNT_MIN):
    """Append so many writes as one append, which is in flight then."""

    def append():
        for _ in range(count):
            journal.append(b".")

    journal.thread.call(append)
    until(lambda: journal.route.sent)
    assert journal.route.contents() == [b"." * count]


def test_behind_an_append_of_few_writes_nothing_waits_for_more(lingering):
    stream_to(lingering, STREAMING_COUNT_MIN - 1)
    lingering.answer()
    until(lambda: lingering.sender is Sender.NOBODY)
    began_at = time.monotonic()
    lingering.append(b"x")
    until(lambda: len(lingering.route.sent) == 2)
    assert time.monotonic() - began_at < 0.25
    lingering.answer()


def test_behind_an_append_of_many_writes_further_ones_wait_for_more(lingering):
    stream_to(lingering)
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
    stream_to(lingering)
    began_at = time.monotonic()
    for _ in range(2):
        lingering.append(bytes(LARGE_BYTES // 2))
    until(lambda: len(lingering.route.sent) == 2)
    assert time.monotonic() - began_at < 0.25
    lingering.answer_all()


def test_a_stream_that_pauses_is_none_any_more(lingering):
    stream_to(lingering)
    lingering.answer()
    until(lambda: lingering.sender is Sender.NOBODY)  # the linger has ended
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
    monkeypatch.setattr(module, "LINGER_S", 0.0)
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


# ------------------------------------------------------------------------ its end


def closed(append):
    assert append.wait(WAIT_S)
    with pytest.raises(ClosedError, match="it may have been written"):
        append.result()
    return True


def test_closing_gives_up_an_inline_append_that_nobody_receives(journal):
    append = journal.append(b"1")
    journal.thread.call(journal.service.aclose)
    assert closed(append)
    assert journal.route.calls[0].given_up
    with pytest.raises(ClosedError):
        journal.append(b"2")


def test_closing_ends_the_wait_of_a_thread(journal):
    append = journal.append(b"1")
    seen = []
    thread = in_thread(lambda: seen.append(closed(append)))
    until(lambda: journal.sender is Sender.RECEIVER)
    journal.thread.call(journal.service.aclose)
    thread.join(WAIT_S)
    assert seen == [True]


def test_closing_ends_the_task_that_receives_an_inline_answer(journal):
    append = journal.append(b"1")
    journal.appender.leave_to_loop()
    until(lambda: journal.route.calls[0].is_waited_for)
    journal.thread.call(journal.service.aclose)
    assert closed(append)


def test_closing_gives_up_what_is_in_flight_and_what_queues(journal):
    appends = [journal.append_on_loop(b"1")]
    until(lambda: journal.route.sent)
    appends.append(journal.append(b"2", union=UNION))
    journal.thread.call(journal.service.aclose)
    assert all(closed(append) for append in appends)
    assert journal.route.is_given_up


@pytest.mark.parametrize("state", ["opening", "pausing", "lingering"])
def test_closing_ends_whatever_the_loop_does(monkeypatch, state):
    monkeypatch.setattr(service, "SWEEP_S", NEVER_S)
    monkeypatch.setattr(module, "LINGER_S", NEVER_S)

    async def for_ever(*_):
        await asyncio.Event().wait()

    with ScriptedJournal(pause=for_ever) as journal:
        journal.route.has_connection = False
        if state == "opening":
            journal.route.is_open = False
            monkeypatch.setattr(journal.route, "open", for_ever)
        elif state == "lingering":
            stream_to(journal)
        append = journal.append(b"x")
        if state == "pausing":
            journal.answer(LOST)
        journal.thread.turn()
        journal.thread.call(journal.service.aclose)
        assert closed(append)
        assert not [each for each in journal.thread.call(_tasks) if "appender" in each.get_name()]


def _tasks():
    return asyncio.all_tasks()


def test_appends_of_a_loop_that_has_ended_are_abandoned(journal):
    appends = [journal.append(b"1")]
    journal.thread.stop()
    appends.append(journal.append(b"2"))
    journal.service.abandon(ClosedError("the loop has ended"))
    for append in appends:
        with pytest.raises(ClosedError, match="has ended"):
            append.result()
    with pytest.raises(ClosedError):
        journal.append(b"3")
    assert journal.service.pending_bytes == 0


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_forked_child_gives_up_what_its_parent_sends(journal, is_locked):
    appends = [journal.append(b"1"), journal.append(b"2", union=UNION)]
    if is_locked:  # by a thread that does not exist in the child
        journal.service.lock.acquire()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            lock = threading.Lock()
            journal.service.forked(lock, ClosedError("the parent sends it"))
            for append in appends:
                with pytest.raises(ClosedError, match="the parent sends it"):
                    append.result()
            with pytest.raises(ClosedError):
                journal.append(b"3")
            assert not journal.route.calls[0].over
            assert not lock.locked()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if is_locked:
        journal.service.lock.release()
    journal.answer_all()
    assert all(append.result().status == pb.OK for append in appends)


# ----------------------------------------------------------------------- all at once


def test_threads_append_and_wait_while_answers_come_and_fail(monkeypatch):
    """Each append is settled once, and content appears first in the order of the appends."""
    monkeypatch.setattr(service, "SWEEP_S", 0.002)
    with ScriptedJournal(batch_bytes_max=1) as journal:
        written: list[bytes] = []
        is_over = threading.Event()

        def answer():
            turn = 0
            while not is_over.is_set():
                turn += 1
                outcome = LOST if turn % 7 == 0 else append_ok()
                calls, sent = journal.route.calls, journal.route.in_flight
                if calls and not calls[-1].over:
                    written.append(calls[-1].content)
                    calls[-1].answer(outcome)
                elif sent:
                    written.append(sent[0].content)
                    journal.answer(outcome)
                time.sleep(0.0005)

        answering = in_thread(answer)

        def work(name):
            for n in range(60):
                append = journal.append(b"%d-%d" % (name, n))
                if n % 3 == name % 3:
                    assert append.wait(WAIT_S)
                    assert append.result().status == pb.OK
                elif n % 3 == 0:
                    append.poll()
                else:
                    time.sleep(0.001)

        threads = [in_thread(lambda name=name: work(name)) for name in range(4)]
        for thread in threads:
            thread.join(3 * WAIT_S)
            assert not thread.is_alive()
        until(lambda: not journal.service.pending())
        is_over.set()
        answering.join(WAIT_S)
        firsts = list(dict.fromkeys(written))
        for name in range(4):
            mine = [content for content in firsts if content.startswith(b"%d-" % name)]
            assert mine == [b"%d-%d" % (name, n) for n in range(60)]


def test_waiting_on_the_loop_that_receives_is_refused(journal):
    append = journal.append(b"1")
    with pytest.raises(GazetteError, match="would block the event loop"):
        journal.thread.call(append.wait)
    journal.route.calls[0].answer()
    assert journal.thread.call(append.poll)
