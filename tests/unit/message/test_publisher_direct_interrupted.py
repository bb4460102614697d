"""Publishing by the very thread that has the message, which is interrupted at any point.

Whatever was added is sent, in order: once, or again with the same UUID where nobody can know.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.message.publishing import direct as direct_module
from gazette_sdk.message.publishing import sender as sender_module
from gazette_sdk.message.publishing.batch import Batch
from gazette_sdk.message.publishing.direct import Caller, Directs
from gazette_sdk.message.publishing.handover import Holder, Input
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.publishing.sender import Sender
from gazette_sdk.transport.loop import run
from support.direct_memory import JOURNAL, WAIT_S
from support.direct_publisher import (
    NEVER_S,
    form_habit,
    outbox_of,
    publisher,
    transport,
    until,
)

__all__ = ["publisher", "transport"]


@pytest.fixture(autouse=True)
def _nobody_looks_in_time(monkeypatch):
    monkeypatch.setattr(direct_module, "AWAY_S", NEVER_S)
    monkeypatch.setattr(direct_module, "EARLY_S", 0.01)


class Interruption:
    """Interrupts a method's next call in the main thread, before or after it did its work.

    Args:
        owner: the class.
        name: the method.
        comes: before or after.
        given: only of a call with this argument.
    """

    def __init__(self, monkeypatch, owner, name, comes, given=None):
        self.is_due = True
        original = getattr(owner, name)

        def interrupted(this, *args, **kwargs):
            is_now = (
                self.is_due
                and threading.current_thread() is threading.main_thread()
                and (given is None or given in args)
            )
            if is_now and comes == "before":
                self.is_due = False
                raise KeyboardInterrupt
            result = original(this, *args, **kwargs)
            if is_now:
                self.is_due = False
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(owner, name, interrupted)


def prepare(transport, state):
    """How what is away ends, and what becomes of the next."""
    match state:
        case "late" | "late, lost" | "lost" | "unsent":
            transport.direct_faults = [state]
        case "soon":
            transport.direct_takes_s = 0.005
        case "next refused":
            transport.direct_faults = [None, "refused"]
        case "next broken":
            transport.direct_faults = [None, "broken"]


def check_all_is_well(transport, publisher, expected, wait_s=WAIT_S):
    """All that is expected is there, in order, no oftener than it was sent, and nothing else."""
    transport.let_end.set()
    publisher.flush(wait_s)
    assert [message["n"] for message in transport.distinct()] == expected
    assert all(transport.numbers().count(n) <= 1 + sent_by_callers(transport, n) for n in expected)
    assert publisher._sender._pending_bytes == 0
    until(lambda: outbox_of(publisher).holder == Holder.NOBODY)
    assert outbox_of(publisher).handed is None
    assert outbox_of(publisher).call is None
    form_habit(publisher)
    publisher.publish({"n": 99}).result(WAIT_S)
    assert transport.numbers()[-1] == 99


def sent_by_callers(transport, n):
    return sum(b'"n":%d}' % n in content for _, content, _ in transport.direct_appends)


def check_no_call_is_left(transport):
    """Each was waited for, or given up: else its connection is lost to others."""
    assert [call.has_ended for call in transport.direct_calls] == [True] * len(
        transport.direct_calls
    )


# ------------------------------------------------------------------ in publish()

PUBLISH_POINTS = {
    "take": (Directs, "take"),
    "begin": (Caller, "begin"),
    "take next": (Caller, "_take_next"),
    "outbox take": (Outbox, "take"),
    "step to send": (Outbox, "step", Input.ADDED_TO_SEND),
    "send": (Caller, "send"),
    "received": (Caller, "_received"),
    "settle": (Sender, "_settle"),
    "send taken": (Caller, "_send"),
    "content": (Batch, "whole_content"),
    "step sent": (Outbox, "step", Input.SENT),
    "watch": (Directs, "watch"),
    "hand on": (Caller, "_hand_on"),
    "step handed on": (Outbox, "step", Input.HANDED_ON),
    "wake": (Sender, "_wake"),
    "prepare": (Directs, "prepare"),
}
STATES = (
    "nothing",
    "answered",
    "soon",
    "late",
    "late, lost",
    "lost",
    "unsent",
    "broken",
    "next refused",
)


def interrupt(monkeypatch, publisher, point, comes):
    """An interruption at a point of the tables."""
    sender, directs = publisher._sender, publisher._sender._directs
    owner, name, *given = {**PUBLISH_POINTS, **RESULT_POINTS}[point]
    made = Interruption(monkeypatch, owner, name, comes, *given)
    monkeypatch.setattr(directs, "wake", sender._wake)  # they were bound before
    monkeypatch.setattr(directs, "settle", sender._settle)
    return made


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("at", [f"{c} {p}" for p in PUBLISH_POINTS for c in ("before", "after")])
def test_publish_interrupted_at_a_point(transport, publisher, monkeypatch, at, state):
    comes, point = at.split(" ", 1)
    prepare(transport, state)
    expected = [1, 2]
    if state != "nothing":
        expected = [0, 1, 2]
        publisher.publish({"n": 0})
        assert outbox_of(publisher).holder == Holder.AWAY
    if point == "prepare":
        transport.has_connection = False
    due = interrupt(monkeypatch, publisher, point, comes)
    try:
        publisher.publish({"n": 1})
    except KeyboardInterrupt:
        assert not due.is_due
    else:
        assert due.is_due  # it has no such point
    due.is_due = False
    publisher.publish({"n": 2})
    check_all_is_well(transport, publisher, expected)
    check_no_call_is_left(transport)


@pytest.mark.parametrize("fault", ["interrupted", "interrupted, sent"])
@pytest.mark.parametrize("state", ["nothing", "answered", "soon"])
def test_publish_interrupted_while_it_sends(transport, publisher, fault, state):
    prepare(transport, state)
    if state != "nothing":
        publisher.publish({"n": 0})
    transport.direct_faults = [fault]
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({"n": 1})
    publisher.publish({"n": 2})
    check_all_is_well(transport, publisher, [1, 2] if state == "nothing" else [0, 1, 2])
    copies = 2 if fault == "interrupted, sent" else 1
    assert transport.numbers().count(1) == copies
    check_no_call_is_left(transport)


def test_publish_interrupted_while_it_looks(transport, publisher):
    transport.direct_faults = ["wait interrupted"]
    receipt = publisher.publish({"n": 0})
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({"n": 1})
    publisher.publish({"n": 2})
    check_all_is_well(transport, publisher, [0, 1, 2])
    check_no_call_is_left(transport)
    assert transport.numbers().count(0) == 2
    assert receipt.batch.was_retried


@pytest.mark.parametrize("fault", ["late", "late, unsent"])
def test_publish_interrupted_by_a_signal_while_it_waits(transport, publisher, monkeypatch, fault):
    monkeypatch.setattr(direct_module, "EARLY_S", WAIT_S)
    transport.direct_faults = [fault]
    receipt = publisher.publish({"n": 0})
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({"n": 1})
    check_all_is_well(transport, publisher, [0, 1])
    check_no_call_is_left(transport)
    assert receipt.batch.was_retried


def test_publish_interrupted_again_and_again(transport, publisher):
    """At any point that a signal finds."""
    count, is_over = 0, threading.Event()
    transport.direct_takes_s = 0.0001
    transport.direct_faults = [None, None, None, None, None, "late, unsent"] * 1000
    transport.let_end.set()

    def interrupt_often():
        while not is_over.wait(0.003):
            os.kill(os.getpid(), signal.SIGINT)

    interrupted = []
    before = signal.signal(signal.SIGINT, _interrupt)
    interrupting = threading.Thread(target=interrupt_often)
    interrupting.start()
    ends_at = time.monotonic() + 1.5
    try:
        while time.monotonic() < ends_at:
            count += 1
            try:
                publisher.publish({"n": count})
            except KeyboardInterrupt:
                interrupted.append(count)
    finally:
        is_over.set()
        interrupting.join(WAIT_S)
        signal.signal(signal.SIGINT, before)
    publisher.flush(WAIT_S)
    numbers = [message["n"] for message in transport.distinct()]
    assert numbers == sorted(numbers)
    # What an interruption met before it was added is not there.
    assert set(range(1, count + 1)) - set(numbers) <= set(interrupted)
    # Nothing is thought to be pending for ever: there would be ever less room.
    assert publisher._sender._pending_bytes <= 0
    check_no_call_is_left(transport)


def _interrupt(_number, frame):
    """Only what the publisher does, not the test around it; nor what it does about that.

    Nor what others do on its behalf: they may have locks of their own.
    """
    is_ours = "gazette_sdk" in frame.f_code.co_filename
    files, names = set(), set()
    while frame is not None:
        files.add(Path(frame.f_code.co_filename).name)
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    if is_ours and "sender.py" in files and not names & {"interrupted", "_interrupted"}:
        raise KeyboardInterrupt


def test_publish_interrupted_while_it_tells_others(transport, publisher, monkeypatch):
    transport.direct_takes_s = 0.1
    monkeypatch.setattr(direct_module, "EARLY_S", WAIT_S)
    receipt = publisher.publish({"n": 0})
    tell, others = sender_module.resolve, []

    def interrupted(future, outcome):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        tell(future, outcome)

    def meanwhile():
        if not others:
            others.append(threading.Thread(target=lambda: receipt.batch.done.result(WAIT_S)))
            others[0].start()
            until(lambda: receipt.batch.is_awaited)

    transport.meanwhile = meanwhile
    with monkeypatch.context() as patched:
        patched.setattr(sender_module, "resolve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish({"n": 1})
    transport.meanwhile = None
    try:
        check_all_is_well(transport, publisher, [0, 1])
        others[0].join(1.0)
        assert not others[0].is_alive()
    finally:
        if receipt.batch.is_done and not receipt.batch.done.done():
            tell(receipt.batch.done, receipt.batch.outcome)
        others[0].join(WAIT_S)


# --------------------------------------------------------------- the event loop


def test_an_interruption_while_the_loop_is_asked_for(transport, monkeypatch, request):
    """Of an outbox to which no caller has sent anything yet."""
    publisher = Publisher(mapping=mapping.direct(JOURNAL), transport=transport)
    publisher.publish({"n": 0}).result(WAIT_S)
    request.addfinalizer(lambda: shut(publisher))
    Interruption(monkeypatch, Sender, "_wake", "before")
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({"n": 1})
    publisher.publish({"n": 2})
    check_all_is_well(transport, publisher, [0, 1, 2], wait_s=2.0)


def shut(publisher):
    """Close it, and wait for nothing."""
    publisher._sender.refuse_more()
    run(publisher._shut(), WAIT_S)


@pytest.mark.parametrize("comes", ["before", "after"])
def test_an_interruption_does_not_end_the_lookout(transport, publisher, monkeypatch, comes):
    monkeypatch.setattr(direct_module, "AWAY_S", 0.01)
    directs = publisher._sender._directs
    loop = publisher._sender._link.loop

    class Interrupting:
        def call_soon_threadsafe(self, *args):
            directs.loop = loop
            if comes == "after":
                loop.call_soon_threadsafe(*args)
            raise KeyboardInterrupt

    outbox_of(publisher).way = transport.direct(JOURNAL)
    outbox_of(publisher).sent_at = time.monotonic()
    directs.loop = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        publisher.publish({"n": 0})
    for n in (1, 2):
        receipt = publisher.publish({"n": n})
        receipt.batch.done.exception(1.0)
    check_all_is_well(transport, publisher, [0, 1, 2])


# ------------------------------------------------------------------- in result()

RESULT_POINTS = {
    "wait": (Caller, "wait"),
    "step claimed": (Outbox, "step", Input.CLAIMED),
    "begin": (Caller, "begin"),
    "received": (Caller, "_received"),
    "settle": (Sender, "_settle"),
    "leave": (Caller, "_leave"),
    "rest": (Outbox, "rest"),
    "hand on": (Caller, "_hand_on"),
    "step handed on": (Outbox, "step", Input.HANDED_ON),
    "wake": (Sender, "_wake"),
}
RESULT_STATES = ("answered", "soon", "late", "late, lost", "lost", "unsent", "gathered")


@pytest.mark.parametrize("state", RESULT_STATES)
@pytest.mark.parametrize("at", [f"{c} {p}" for p in RESULT_POINTS for c in ("before", "after")])
def test_result_interrupted_at_a_point(transport, publisher, monkeypatch, at, state):
    comes, point = at.split(" ", 1)
    prepare(transport, state)
    receipt = publisher.publish({"n": 0})
    gathered = []
    if state == "gathered":
        gather_meanwhile(publisher, transport, gathered)
    due = interrupt(monkeypatch, publisher, point, comes)
    try:
        receipt.result(0.06 if state.startswith("late") else WAIT_S)
    except KeyboardInterrupt:
        assert not due.is_due
    except TimeoutError:
        assert state.startswith("late")
    due.is_due = False
    transport.meanwhile = None
    publisher.publish({"n": 2})
    check_all_is_well(transport, publisher, [0, *gathered, 2])
    assert receipt.batch.is_done
    check_no_call_is_left(transport)


def gather_meanwhile(publisher, transport, gathered):
    """Another message is added while the answer is waited for."""

    def meanwhile():
        other = threading.Thread(target=publisher.publish, args=({"n": 1},))
        other.start()
        other.join(WAIT_S)
        gathered.append(1)

    transport.meanwhile = meanwhile


def test_result_interrupted_by_a_signal(transport, publisher):
    transport.direct_faults = ["late, unsent"]
    receipt = publisher.publish({"n": 0})
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        receipt.result(WAIT_S)
    receipt.result(WAIT_S)
    assert transport.numbers() == [0]
    assert receipt.batch.was_retried
    check_no_call_is_left(transport)


def test_result_interrupted_while_handing_over(transport, publisher, monkeypatch):
    directs = publisher._sender._directs
    wake, interruptions = directs.wake, [KeyboardInterrupt]

    def interrupted(outboxes):
        if interruptions:
            raise interruptions.pop()
        wake(outboxes)

    monkeypatch.setattr(directs, "wake", interrupted)
    transport.direct_faults = ["unsent"]
    receipt = publisher.publish({"n": 0})
    with pytest.raises(KeyboardInterrupt):
        receipt.result(WAIT_S)
    receipt.result(WAIT_S)
    assert transport.numbers() == [0]
