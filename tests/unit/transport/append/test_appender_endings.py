"""The end of an appender: closed, its loop ended, or forked; and all kinds of threads at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time

import pytest

from gazette_sdk.errors import (
    ClosedError,
    GazetteError,
    UnavailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append import appender as service
from gazette_sdk.transport.append import queue as linger
from gazette_sdk.transport.append.appender import (
    AppendSender,
)
from gazette_sdk.transport.append.queue import any_ended
from gazette_sdk.transport.loop import new_lock
from support.scripted_appends import NEVER_S, WAIT_S, ScriptedJournal, in_thread, until
from support.scripted_broker import append_ok

LOST = UnavailableError("the answer was lost")
AUTHOR = pb.LabelSelector()
AUTHOR.include.labels.add(name="author", value="me")
UNION = pb.LabelSet(labels=[pb.Label(name="author", value="me")])


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
    until(lambda: journal.sender is AppendSender.RECEIVER)
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
    monkeypatch.setattr(linger, "LINGER_S", NEVER_S)

    async def for_ever(*_):
        await asyncio.Event().wait()

    with ScriptedJournal(pause=for_ever) as journal:
        journal.route.has_connection = False
        if state == "opening":
            journal.route.is_open = False
            monkeypatch.setattr(journal.route, "open", for_ever)
        elif state == "lingering":
            journal.stream()
        append = journal.append(b"x")
        if state == "pausing":
            journal.answer(LOST)
        journal.thread.turn()
        journal.thread.call(journal.service.aclose)
        assert closed(append)
        assert not [each for each in journal.thread.call(_tasks) if "appender" in each.get_name()]


def _tasks():
    return asyncio.all_tasks()


WAYS = {
    "wait": lambda _, append: append.wait(WAIT_S),
    "poll": lambda _, append: append.poll(),
    "await": lambda _, append: asyncio.run(append.ended()),
    "any_ended": lambda _, append: asyncio.run(any_ended([append])),
    "append": lambda journal, _: journal.append(b"2").poll(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sender", [AppendSender.INLINE, AppendSender.LOOP])
def test_appends_of_a_loop_that_has_ended_fail(journal, sender, way):
    if sender is AppendSender.INLINE:
        append = journal.append(b"1")
    else:
        append = journal.append_on_loop(b"1")
        until(lambda: journal.route.sent)
        journal.thread.turn()
    assert journal.sender is sender
    journal.thread.stop()
    assert not append.done()
    with contextlib.suppress(ClosedError):
        WAYS[way](journal, append)
    with pytest.raises(ClosedError, match=r"event loop .* has ended"):
        append.result()
    with pytest.raises(ClosedError, match=r"event loop .* has ended"):
        journal.append(b"3")
    assert journal.service.pending_bytes == 0
    assert all(call.given_up for call in journal.route.calls)


def test_a_thread_receives_its_answer_though_the_loop_has_ended(journal):
    append = journal.append(b"1")
    thread = in_thread(lambda: append.wait(WAIT_S))
    until(lambda: journal.sender is AppendSender.RECEIVER)
    journal.thread.stop()
    journal.route.calls[0].answer()
    thread.join(WAIT_S)
    assert append.result().status == pb.OK


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_forked_child_gives_up_what_its_parent_sends(journal, is_locked):
    appends = [journal.append(b"1"), journal.append(b"2", union=UNION)]
    if is_locked:  # by a thread that does not exist in the child
        journal.service.lock.acquire()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            lock = new_lock()
            journal.service.forked(lock, ClosedError("the parent sends it"))
            for append in appends:
                with pytest.raises(ClosedError, match="the parent sends it"):
                    append.result()
            with pytest.raises(ClosedError):
                journal.append(b"3")
            assert not journal.route.calls[0].over
            assert not lock._is_owned()
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


def test_an_outage_is_logged_when_it_begins_and_when_it_is_over(journal, caplog):
    append = journal.append_on_loop(b"1")
    for attempt in range(1, 6):
        until(lambda attempt=attempt: journal.route.contents() == [b"1"] * attempt)
        journal.answer(LOST)
    until(lambda: journal.route.contents() == [b"1"] * 6)
    journal.answer()
    assert append.wait(WAIT_S)
    first, last = (text for text in caplog.messages if text.startswith("append to a/journal"))
    assert "failed, and is tried again until it succeeds: the answer was lost" in first
    assert "works again after an outage of" in last
    assert "(4 failures)" in last, "the first failure of an append is usual when a broker ends"
