"""Futures of appends: who waits, who is called back, and what happens at the same moment."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.queue import PendingAppend, all_ended, any_ended
from support.scripted_appends import WAIT_S, LoopThread, in_thread, until
from support.scripted_broker import in_loop

OK = pb.AppendResponse(status=pb.OK)
LOST = UnavailableError("the answer was lost")
REQUEST = pb.AppendRequest(journal="a/journal")


def pending(**options) -> PendingAppend:
    return PendingAppend(REQUEST, **options)


class Receiver:
    """Receiver that settles the append, if it shall."""

    is_receiving_here = False

    def __init__(self, outcome=None):
        self.outcome = outcome
        self.timeouts = []
        self.left = 0

    def receive(self, append, timeout_s):
        self.timeouts.append(timeout_s)
        if self.outcome is not None:
            append.settle(self.outcome)

    def leave_to_loop(self):
        self.left += 1


@pytest.fixture
def two_loops():
    loops = [LoopThread(), LoopThread()]
    yield loops
    for each in loops:
        each.stop()


# ----------------------------------------------------------------------- content


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=5))))
def test_parts_and_writes_keep_their_order_and_are_counted(pieces):
    append = pending()
    for is_part, piece in pieces:
        if is_part:
            append.add_part(piece)
        else:
            append.content += piece
            append.length_bytes += len(piece)
    whole = b"".join(piece for _, piece in pieces)
    assert append.length_bytes == len(whole)
    assert b"".join(append.seal()) == whole
    assert append.length_bytes == len(whole)
    append.settle(OK)
    assert append.length_bytes == 0
    assert append.seal() == []


def test_a_placeholder_names_no_journal():
    assert PendingAppend().journal == ""
    assert pending().journal == "a/journal"


# ----------------------------------------------------------------------- outcomes


def test_the_result_is_the_response_or_the_error():
    append = pending()
    assert not append.done()
    assert not append.cancelled()
    assert append.exception() is None
    with pytest.raises(GazetteError, match="a/journal: the append is not acknowledged yet"):
        append.result()
    append.settle(OK)
    assert append.done()
    assert append.exception() is None
    assert append.result() is OK
    failed = pending()
    failed.settle(LOST)
    assert failed.exception() is LOST
    with pytest.raises(UnavailableError, match="lost"):
        failed.result()


def test_an_append_ends_once():
    append = pending()
    append.settle(OK)
    with pytest.raises(AssertionError):
        append.settle(LOST)
    assert append.result() is OK


# ----------------------------------------------------------------------- callbacks


def test_callbacks_are_called_once_with_the_append_sooner_or_later():
    append = pending()
    called = []
    append.add_done_callback(called.append)
    append.add_done_callback(called.append)
    forgotten = []
    append.add_done_callback(forgotten.append)
    append.forget(forgotten.append)
    append.forget(forgotten.append)
    assert not called
    append.settle(OK)
    assert called == [append, append]
    append.add_done_callback(called.append)
    assert called == [append] * 3
    assert forgotten == []


def test_a_callback_that_is_added_as_the_append_ends_is_called_once():
    for _ in range(300):
        append = pending()
        called = []
        begin = threading.Barrier(3)

        def add(append=append, called=called, begin=begin):
            begin.wait(WAIT_S)
            for n in range(3):
                append.add_done_callback(lambda _, n=n: called.append(n))

        def settle(append=append, begin=begin):
            begin.wait(WAIT_S)
            append.settle(OK)

        threads = [in_thread(add), in_thread(add), in_thread(settle)]
        for thread in threads:
            thread.join(WAIT_S)
        assert sorted(called) == [0, 0, 1, 1, 2, 2]


# ------------------------------------------------------------------------ threads


def test_threads_wait_until_it_ends():
    append = pending()
    seen = []
    threads = [in_thread(lambda: seen.append(append.wait())) for _ in range(5)]
    until(lambda: len(append._callbacks) == 5)
    append.settle(OK)
    for thread in threads:
        thread.join(WAIT_S)
    assert seen == [True] * 5
    assert append.wait(0)


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.02])
def test_a_thread_whose_time_runs_out_is_not_called_any_more(timeout_s):
    append = pending()
    began_at = time.monotonic()
    assert not append.wait(timeout_s)
    assert time.monotonic() - began_at >= timeout_s
    assert append._callbacks == []
    append.settle(OK)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e30])
def test_a_thread_may_wait_longer_than_any_lock(timeout_s):
    append = pending()
    threading.Timer(0.05, append.settle, (OK,)).start()
    assert append.wait(timeout_s)


def test_threads_whose_time_runs_out_as_it_ends():
    for n in range(200):
        append = pending()
        seen = []
        thread = in_thread(lambda a=append, s=seen, n=n: s.append(a.wait(n * 1e-5)))
        time.sleep(n * 1e-5)
        append.settle(OK)
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert seen in ([True], [False])
        assert append.wait(0)


def test_who_waits_receives_and_who_polls_looks_without_waiting():
    receiver = Receiver()
    append = pending(receiver=receiver)
    assert not append.poll()
    assert not append.wait(0.01)
    assert receiver.timeouts == [0.0, 0.01]
    receiver.outcome = OK
    assert append.poll()
    assert append.wait()
    assert receiver.timeouts == [0.0, 0.01, 0.0], "nobody receives for one that has ended"


@pytest.mark.parametrize("outcome", [OK, LOST])
def test_a_thread_that_receives_the_answer_waits_for_nothing_else(outcome):
    receiver = Receiver(outcome)
    append = pending(receiver=receiver)
    assert append.wait()
    assert receiver.timeouts == [None]
    assert append.outcome is outcome


def test_an_append_that_has_ended_leaves_its_receiver_alone():
    receiver = Receiver()
    append = pending(receiver=receiver)
    append.settle(OK)
    append.call_in()
    assert append.wait()
    assert append.poll()
    asyncio.run(append.ended())
    assert receiver.timeouts == []
    assert receiver.left == 0


def test_waiting_on_the_loop_that_receives_is_refused_unless_it_has_ended(two_loops):
    own, other = two_loops
    append = pending(loop=own.loop)
    with pytest.raises(GazetteError, match="await receipt"):
        own.call(lambda: append.wait(0.01))
    assert not own.call(append.poll)
    assert not other.call(lambda: append.wait(0.01))
    append.settle(OK)
    assert own.call(append.wait)


# --------------------------------------------------------------------- coroutines


def test_coroutines_of_two_loops_and_threads_wait_for_one_append(two_loops):
    receiver = Receiver()
    append = pending(receiver=receiver, loop=two_loops[0].loop)

    async def use():
        return await append

    waiting = [
        asyncio.run_coroutine_threadsafe(use(), each.loop) for each in two_loops for _ in range(3)
    ]
    until(lambda: len(append._callbacks) == 6)
    assert receiver.left == 6
    thread = in_thread(append.wait)
    until(lambda: len(append._callbacks) == 7)
    in_thread(lambda: append.settle(OK))
    assert [each.result(WAIT_S) for each in waiting] == [OK] * 6
    thread.join(WAIT_S)
    assert append._callbacks == []


@in_loop
async def test_a_coroutine_gets_the_error():
    append = pending()
    asyncio.get_running_loop().call_soon(append.settle, LOST)
    with pytest.raises(UnavailableError, match="lost"):
        await append
    await append.ended()


@in_loop
async def test_a_waiter_that_is_cancelled_cancels_nothing():
    append = pending()
    waiting = asyncio.create_task(append.ended())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert append._callbacks == []
    assert not append.done()
    append.settle(OK)
    assert await append is OK


@in_loop
async def test_a_waiter_that_is_cancelled_as_the_append_ends():
    append = pending()
    waiting = asyncio.create_task(append.ended())
    await asyncio.sleep(0)
    append.settle(OK)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


def test_an_append_may_end_when_the_loop_that_waits_has_been_closed():
    append = pending()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(append.ended())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    in_thread(lambda: append.settle(OK)).join(WAIT_S)
    assert append.result() is OK
    waiting.get_coro().close()
    waiting._log_destroy_pending = False


# ------------------------------------------------------------------ several appends


@in_loop
async def test_any_ended_waits_for_the_first_and_forgets_the_others():
    receiver = Receiver()
    appends = [pending(receiver=receiver) for _ in range(3)]
    await any_ended([])
    waiting = asyncio.create_task(any_ended(appends))
    await asyncio.sleep(0)
    assert receiver.left == 3
    assert not waiting.done()
    in_thread(lambda: appends[1].settle(LOST))
    await waiting
    assert not any(append._callbacks for append in appends)
    await any_ended(appends)


@in_loop
async def test_all_ended_waits_for_all_within_a_time():
    appends = [pending() for _ in range(3)]
    assert not await all_ended(appends, 0.01)
    assert await all_ended([])
    waiting = asyncio.create_task(all_ended(appends, WAIT_S))
    for outcome, append in zip((OK, LOST, OK), reversed(appends), strict=True):
        await asyncio.sleep(0)
        assert not waiting.done()
        append.settle(outcome)
    assert await waiting
    assert await all_ended(appends, 0)


@in_loop
async def test_one_append_that_ends_as_it_begins_to_be_waited_for():
    for _ in range(200):
        append = pending()
        thread = in_thread(lambda append=append: append.settle(OK))
        async with asyncio.timeout(WAIT_S):
            await any_ended([append])
            await append
        await asyncio.to_thread(thread.join, WAIT_S)
