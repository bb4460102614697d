"""The appender of a journal over a scripted route: who sends, and who receives the answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from gazette_sdk.errors import (
    NotAllowedError,
    ReentrantCallError,
    UnavailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append import appender as module
from gazette_sdk.transport.append import appender as service
from gazette_sdk.transport.append.appender import (
    INLINE_BYTES_MAX,
    AppendSender,
)
from support.scripted_appends import WAIT_S, ScriptedJournal, in_thread, until
from support.scripted_broker import append_ok, append_status

LOST = UnavailableError("the answer was lost")
AUTHOR = pb.LabelSelector()
AUTHOR.include.labels.add(name="author", value="me")
UNION = pb.LabelSet(labels=[pb.Label(name="author", value="me")])


# --------------------------------------------------------------------- sender table


def nobody_queued(journal):
    append = journal.append(b"1")
    [call] = journal.route.calls
    assert (call.content, call.thread) == (b"1", threading.current_thread().name)
    assert journal.sender is AppendSender.INLINE
    assert not append.done()
    journal.thread.turn()
    assert not journal.route.sent
    call.answer()


def nobody_queued_without_connection(journal):
    journal.route.has_connection = False
    append = journal.append(b"1")
    assert journal.sender is AppendSender.LOOP
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
    assert journal.sender is AppendSender.INLINE
    assert not second.done()
    journal.route.calls[1].answer()


def inline_queued_no_answer(journal):
    first, second = journal.append(b"1"), journal.append(b"2")
    assert journal.sender is AppendSender.LOOP
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
    until(lambda: journal.sender is AppendSender.RECEIVER)
    journal.route.calls[0].answer()
    thread.join(WAIT_S)
    assert append.done()
    assert journal.route.calls[0].received_by == thread.name


def inline_overdue(journal):
    append = journal.append(b"1")
    journal.appender.leave_to_loop()
    assert journal.sender is AppendSender.LOOP
    journal.route.calls[0].answer()
    assert append.wait(WAIT_S)
    assert journal.route.calls[0].received_by == "the loop"


def receiver_queued(journal):
    first = journal.append(b"1")
    thread = in_thread(lambda: first.wait(WAIT_S))
    until(lambda: journal.sender is AppendSender.RECEIVER)
    journal.append(b"2")
    journal.append(b"3")
    assert journal.sender is AppendSender.RECEIVER
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
    assert journal.sender is AppendSender.INLINE
    second.answer()


def receiver_answered_nothing_queued(journal):
    inline_waited_for(journal)
    assert journal.sender is AppendSender.NOBODY
    journal.append(b"2")
    assert len(journal.route.calls) == 2
    journal.route.calls[1].answer()


def loop_queued(journal):
    journal.append_on_loop(b"1")
    until(lambda: journal.route.contents() == [b"1"])
    assert journal.sender is AppendSender.LOOP
    journal.append(b"2")
    assert journal.sender is AppendSender.LOOP
    until(lambda: journal.route.contents() == [b"1", b"2"])
    assert not journal.route.calls


def loop_idle(journal):
    append = journal.append_on_loop(b"1")
    journal.answer()
    assert append.wait(WAIT_S)
    until(lambda: journal.sender is AppendSender.NOBODY)
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
        if len(cells) == 4 and cells[0] in AppendSender.__members__:
            assert cells[3] in AppendSender.__members__
            rows.append(f"{cells[0]}, {cells[1]}: {cells[2]}")
    assert rows == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_journal_is_sent_to_as_the_table_says(journal, row):
    ROWS[row](journal)
    journal.answer_all()
    until(lambda: journal.sender is AppendSender.NOBODY)


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
        assert journal.sender is AppendSender.LOOP
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
        until(lambda: journal.sender is AppendSender.NOBODY)
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
        until(lambda: journal.sender is AppendSender.LOOP)
        journal.route.calls[0].answer()
        until(append.done)  # nobody waits for it
        assert journal.route.calls[0].received_by == "the loop"
        until(lambda: not journal.service._is_sweeping)


def test_a_thread_whose_time_runs_out_leaves_the_answer_to_others(journal):
    append = journal.append(b"1")
    assert not append.wait(0.01)
    assert journal.sender is AppendSender.INLINE
    assert not append.poll()
    journal.route.calls[0].answer()
    assert append.poll()
    assert append.result().status == pb.OK


def test_what_queued_meanwhile_is_sent_though_the_receivers_time_runs_out(journal):
    first = journal.append(b"1")
    thread = in_thread(lambda: first.wait(0.2))
    until(lambda: journal.sender is AppendSender.RECEIVER)
    second = journal.append(b"2")
    thread.join(WAIT_S)
    assert not first.done()
    assert journal.sender is AppendSender.LOOP
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
    until(lambda: journal.sender is AppendSender.LOOP)
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


INTERRUPTS = [KeyboardInterrupt(), ZeroDivisionError(), ReentrantCallError("of a signal handler")]


@pytest.mark.parametrize("error", INTERRUPTS)
def test_an_interrupt_while_it_is_sent_leaves_the_append_to_the_loop(journal, error):
    journal.route.inline_error = error
    with pytest.raises(type(error)):
        journal.append(b"1")
    until(lambda: journal.route.contents() == [b"1"])
    [append] = journal.service.pending()
    journal.answer()
    assert append.wait(WAIT_S)


@pytest.mark.parametrize("error", INTERRUPTS)
def test_an_interrupt_as_its_answer_is_taken_leaves_the_answer_to_the_loop(journal, error):
    journal.route.accept_error = error
    append = journal.append(b"1")
    journal.route.calls[0].answer()
    with pytest.raises(type(error)):
        append.wait(WAIT_S)
    journal.route.accept_error = None
    assert append.wait(WAIT_S)
    append.result()
    assert journal.route.failures == []
    assert journal.route.contents() == []


def test_an_interrupt_while_it_is_waited_for_leaves_the_append_to_the_loop(journal):
    append = journal.append(b"1")
    journal.route.calls[0].answer(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        append.wait(WAIT_S)
    until(lambda: journal.route.contents() == [b"1"])
    journal.answer()
    assert append.wait(WAIT_S)
    assert append.result().status == pb.OK
