"""The queue of one journal's appends: its table, its window, and the order of what is written."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append import queue as module
from gazette_sdk.transport.append.queue import (
    IN_FLIGHT_BYTES_MAX,
    IN_FLIGHT_MAX,
    TABLE,
    AppendQueue,
    DependencyFailedError,
    QueueEffect,
    QueueEvent,
    QueueState,
)

OK = pb.AppendResponse(status=pb.OK)
LOST = UnavailableError("the answer was lost")


def queue_of(*contents: bytes) -> AppendQueue:
    queue = AppendQueue("a/journal", 1)  # each write is an append of its own
    for content in contents:
        add(queue, content)
    return queue


def add(queue, content, request=None, after=frozenset()):
    append = queue.tail(request, after)
    append.add_part(content)
    queue.push(append)
    return append


# ------------------------------------------------------------------------ table


@pytest.mark.parametrize(("state", "event"), list(itertools.product(QueueState, QueueEvent)))
def test_every_pair_of_state_and_event_is_in_the_table_or_a_bug(state, event):
    queue = AppendQueue("a/journal", 1)
    queue.state = state
    if (state, event) in TABLE:
        effect, following = TABLE[state, event]
        assert queue._step(event) is effect
        assert queue.state is following
    else:
        with pytest.raises(KeyError):
            queue._step(event)


def test_the_table_of_the_docstring_is_the_one_of_the_code():
    rows = set()
    lines = module.__doc__.splitlines()
    for line in lines:
        cells = line.split("  ")
        cells = [cell.strip() for cell in cells if cell.strip()]
        if len(cells) == 4 and cells[0] in {*QueueState.__members__, "any"}:
            states = list(QueueState) if cells[0] == "any" else [QueueState[cells[0]]]
            events = [QueueEvent[name] for name in cells[1].split(", ")]
            rows |= {
                ((state, event), (QueueEffect[cells[2]], QueueState[cells[3]]))
                for state in states
                for event in events
            }
    assert rows == set(TABLE.items())


# ----------------------------------------------------------------------- window


def test_so_many_appends_are_in_flight_at_once_and_no_more():
    queue = queue_of(*[b"x"] * (IN_FLIGHT_MAX + 2))
    begun = [queue.begin() for _ in range(IN_FLIGHT_MAX)]
    assert None not in begun
    assert queue.begin() is None
    assert queue.answered(begun[0], OK, is_terminal=False) is QueueEffect.SETTLE
    assert queue.begin() is not None


def test_so_much_content_is_in_flight_and_no_more_but_one_append_always_is():
    large = bytes(IN_FLIGHT_BYTES_MAX + 1)
    queue = queue_of(large, b"x")
    first = queue.begin()
    assert first is not None
    assert queue.begin() is None
    queue.answered(first, OK, is_terminal=False)
    assert queue.begin() is not None


def test_an_append_with_preconditions_is_alone_in_flight():
    queue = queue_of(b"1")
    checked = pb.AppendRequest(journal="a/journal", offset=7)
    add(queue, b"2", checked)
    add(queue, b"3")
    first = queue.begin()
    assert queue.begin() is None
    queue.answered(first, OK, is_terminal=False)
    second = queue.begin()
    assert second.request == checked
    assert queue.begin() is None
    queue.answered(second, OK, is_terminal=False)
    assert queue.begin().parts == [b"3"]


def test_writes_share_an_append_up_to_its_bound_if_their_requests_are_equal():
    queue = AppendQueue("a/journal", 4)
    checked = pb.AppendRequest(journal="a/journal", offset=7)
    first = add(queue, b"12")
    assert add(queue, b"34") is first
    assert add(queue, b"5") is not first
    other = add(queue, b"6", checked)
    assert add(queue, b"7", checked) is other
    assert add(queue, b"8") is not other
    assert [append.count for append in queue] == [2, 1, 2, 1]


def test_an_append_in_flight_takes_no_write():
    queue = AppendQueue("a/journal", 1 << 20)
    first = add(queue, b"1")
    assert queue.begin() is first
    assert add(queue, b"2") is not first


def test_an_append_that_could_not_be_sent_is_the_next_again():
    queue = queue_of(b"1", b"2")
    append = queue.begin()
    queue.put_back(append)
    assert queue.next is append
    assert not queue.in_flight


# ------------------------------------------------------------------------- after


def test_an_append_waits_for_its_futures_and_those_behind_wait_with_it():
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    queue = AppendQueue("a/journal", 1 << 20)
    waiting = add(queue, b"1", after=frozenset({future}))
    behind = add(queue, b"2")
    assert behind is waiting, "a write that waits for less may share it"
    assert queue.begin() is None
    assert queue.waits_for() is future
    future.set_result(None)
    assert queue.begin() is waiting
    loop.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_failed_future_fails_the_append(is_cancelled):
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    queue = AppendQueue("a/journal", 1 << 20)
    add(queue, b"1", after=frozenset({future}))
    if is_cancelled:
        future.cancel()
    else:
        future.set_exception(LOST)
    with pytest.raises(DependencyFailedError, match="a/journal"):
        queue.begin()
    loop.close()


# ---------------------------------------------------------------------- failures


def test_after_a_failure_all_in_flight_are_drained_and_sent_again_in_order():
    queue = queue_of(b"1", b"2", b"3")
    first, second = queue.begin(), queue.begin()
    assert queue.answered(first, LOST, is_terminal=False) is QueueEffect.NOTHING
    assert queue.begin() is None
    assert queue.answered(second, LOST, is_terminal=False) is QueueEffect.RETRY
    assert queue.state is QueueState.PAUSED
    assert queue.begin() is None
    assert first.last_error is second.last_error is LOST
    queue.resume()
    assert [queue.begin() for _ in range(3)] == [first, second, *list(queue)[2:]]


def test_a_terminal_failure_drains_and_fails_all():
    queue = queue_of(b"1", b"2", b"3")
    first, second = queue.begin(), queue.begin()
    error = GazetteError("for good")
    assert queue.answered(first, error, is_terminal=True) is QueueEffect.NOTHING
    assert queue.answered(second, LOST, is_terminal=False) is QueueEffect.FAIL
    assert queue.error is error
    failed = queue.fail(error, is_sticky=True)
    assert [append.parts for append in failed] == [[b"1"], [b"2"], [b"3"]]
    assert all(append.failure is error for append in failed)
    assert queue.state is QueueState.FAILED
    assert not queue


def test_a_failure_that_is_not_sticky_leaves_an_open_queue():
    queue = queue_of(b"1")
    queue.fail(GazetteError("closed"), is_sticky=False)
    assert queue.state is QueueState.OPEN
    add(queue, b"2")
    assert queue.begin().parts == [b"2"]


@given(st.data())
def test_whatever_fails_each_append_is_settled_once_and_in_order(data):
    """The model's broker writes an append only if the one before it on its connection was."""
    queue = queue_of()
    added = itertools.count()
    written: list[int] = []
    settled: list[int] = []
    is_connected = True
    in_flight: list[tuple[object, bool]] = []  # the append, and if it was written
    for _ in range(data.draw(st.integers(0, 60))):
        step = data.draw(st.sampled_from(["add", "begin", "lose", "answer", "answer", "resume"]))
        if step == "add":
            number = next(added)
            append = add(queue, b"x")
            append.context = number
        elif step == "begin" and (append := queue.begin()) is not None:
            if is_connected:
                written.append(append.context)
            in_flight.append((append, is_connected))
        elif step == "lose" and in_flight:
            is_connected = False
        elif step == "answer" and in_flight:
            append, is_written = in_flight.pop(0)
            outcome = OK if is_written and is_connected else LOST
            if queue.answered(append, outcome, is_terminal=False) is QueueEffect.SETTLE:
                settled.append(append.context)
        elif step == "resume" and queue.state is QueueState.PAUSED:
            is_connected = True
            queue.resume()
    assert settled == list(range(len(settled)))
    firsts = list(dict.fromkeys(written))
    assert firsts == sorted(firsts), "what is written first is in order"
    assert set(settled) <= set(written)
    assert [append.context for append in queue] == list(range(len(settled), next(added)))
