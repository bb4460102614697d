"""Waits between attempts of a call and between dials of a broker, and the log of an outage."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk import retries
from gazette_sdk.errors import CallError, UnauthenticatedError, UnavailableError
from gazette_sdk.retries import DialPolicy, Outage, Waits, retrying
from support.vectors import cases

FAILURE = UnavailableError("nobody there")


def test_a_broker_may_be_dialled_at_first():
    policy = DialPolicy(0.1, 5.0)
    assert policy.may_dial(0.0)
    assert policy.wait_s(0.0) == 0
    assert policy.failure is None


def test_the_wait_doubles_up_to_its_bound():
    policy = DialPolicy(0.5, 3.0)
    now, waits = 10.0, []
    for _ in range(40):
        policy.failed(now, FAILURE)
        waits.append(policy.wait_s(now))
        now = policy.dial_after
    assert waits == [0.5, 1.0, 2.0] + [3.0] * 37


@given(
    inputs=st.lists(st.tuples(st.sampled_from(["failed", "succeeded", "wait"]), st.floats(0, 9))),
    first_s=st.floats(0.01, 1),
    max_s=st.floats(1, 60),
)
def test_every_input_in_every_state(inputs, first_s, max_s):
    policy, now, in_a_row = DialPolicy(first_s, max_s), 0.0, 0
    for kind, pause_s in inputs:
        now += pause_s
        if kind == "failed":
            policy.failed(now, FAILURE)
            in_a_row += 1
            assert policy.dial_after == now + min(first_s * 2 ** (in_a_row - 1), max_s)
        elif kind == "succeeded":
            policy.succeeded()
            in_a_row = 0
        assert policy.may_dial(now) == (policy.wait_s(now) == 0) == (now >= policy.dial_after)
        assert (policy.failure is FAILURE) == (in_a_row > 0)
        assert 0 <= policy.wait_s(now) <= max_s + 1e-6


@pytest.mark.parametrize("case", cases("broker", "client_backoff"))
def test_delays_follow_the_vectors(case):
    assert retries.delay_s(case["attempt"]) == case["ms"] / 1000


def test_delays_never_fall():
    delays = [retries.delay_s(attempt) for attempt in range(-3, 20)]
    assert delays == sorted(delays)


def test_an_outage_is_logged_when_it_begins_and_when_it_is_over(caplog):
    outage = Outage(logging.getLogger("a"), "read of a/journal")
    outage.ended()
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            outage.failed(f"error {number}")
        outage.ended()
        outage.ended()
    first, last = (record.getMessage() for record in caplog.records)
    assert first == "read of a/journal failed, and is tried again until it succeeds: error 0"
    assert last.startswith("read of a/journal works again after an outage of 0.0 s")
    assert last.endswith("(100 failures)")


def test_a_second_outage_is_logged_again(caplog):
    outage = Outage(logging.getLogger("a"), "read of a/journal")
    for _ in range(2):
        outage.failed("error")
        outage.ended()
    assert len(caplog.records) == 4
    assert "(1 failure)" in caplog.records[-1].getMessage()


def test_work_that_failed_together_leaves_its_caller_able_to_try_again():
    """A task group leaves it marked as cancelled, before Python 3.13."""

    async def fail():
        await asyncio.sleep(0)
        raise OSError("refused")

    async def scenario():
        task = asyncio.current_task()
        ended = []

        async def wait():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        for _ in range(2):
            with pytest.raises(OSError, match="refused"):
                await retries.run_together(wait(), fail())
            assert task.cancelling() == 0
        assert ended == [True, True]
        assert await retries.run_together() == []
        assert await retries.run_together(*(asyncio.sleep(0, each) for each in "ab")) == ["a", "b"]

    asyncio.run(scenario())


def test_a_cancellation_is_not_lost_to_work_that_fails_at_the_same_moment():
    rounds = []

    async def fail(cancelled):
        cancelled.cancel()
        raise OSError

    async def attempts():
        while True:
            rounds.append(1)
            try:
                await retries.run_together(fail(asyncio.current_task()))
            except OSError:
                await asyncio.sleep(0.01)

    async def scenario():
        async with asyncio.timeout(20):
            task = asyncio.create_task(attempts())
            await asyncio.wait([task])
            assert task.cancelled()

    asyncio.run(scenario())
    assert len(rounds) == 1


class Call:
    """A call with these outcomes: errors, and at last a result."""

    def __init__(self, *outcomes: object) -> None:
        self.left = list(outcomes)
        self.pauses: list[int] = []

    async def __call__(self) -> object:
        outcome = self.left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def pause(self, attempt: int) -> None:
        self.pauses.append(attempt)


def test_a_call_is_made_again_until_it_succeeds(caplog):
    call = Call(UnavailableError("away"), UnavailableError("away"), 7)
    outage = Outage(logging.getLogger("a"), "call")
    retried = (UnavailableError,)
    assert asyncio.run(retrying(call, retried, outage=outage, pause=call.pause)) == 7
    assert call.pauses == [0, 1]
    assert not outage.is_open
    assert [record.getMessage().partition(" after")[0] for record in caplog.records] == [
        "call failed, and is tried again until it succeeds: away",
        "call works again",
    ]


def test_other_errors_and_final_ones_end_it():
    for error in (ValueError("other"), UnauthenticatedError("no token")):
        call = Call(error, 7)
        final = (UnauthenticatedError,)
        with pytest.raises(type(error)):
            asyncio.run(retrying(call, (CallError,), final=final, pause=call.pause))
        assert call.left == [7]


def test_after_its_patience_the_error_is_raised(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(retries.time, "monotonic", lambda: now_s)
    call = Call(*[UnavailableError(f"away {number}") for number in range(9)])

    async def pause(_: int) -> None:
        nonlocal now_s
        now_s += 1

    with pytest.raises(UnavailableError, match="away 3"):
        asyncio.run(retrying(call, (CallError,), patience_s=3, pause=pause))


def test_waits_that_end_within_a_second_share_a_timer():
    async def scenario():
        loop = asyncio.get_running_loop()
        timers = []
        loop.call_at = lambda when, ring, *given: timers.append((when, ring, given))
        waits = Waits()
        now = loop.time()
        futures = [loop.create_future() for _ in range(1000)]
        endings = [waits.add(future, 60.0 + number / 1000) for number, future in enumerate(futures)]
        assert len(timers) <= 2
        assert all(now + 59.0 <= when <= now + 61.5 for when, _, _ in timers)
        futures[0].set_result(True)
        futures[1].cancel()
        endings[2].discard()
        for _, ring, arguments in timers:
            ring(*arguments)
        assert futures[0].result() is True
        assert not futures[2].done()
        assert [future.result() for future in futures[3:]] == [False] * 997

    asyncio.run(scenario())


def test_a_wait_that_is_renewed_costs_its_task_no_turn():
    async def scenario():
        loop, waits = asyncio.get_running_loop(), Waits()
        renewed, failing, discarded = (loop.create_future() for _ in range(3))
        left = [60.0, 0.001, 0.002, 0.0]

        def fail():
            raise ValueError("a bug")

        waits.add(renewed, 0.001, lambda: left.pop(0))
        waits.add(failing, 0.001, fail)
        waits.add(discarded, 60.0).discard()
        async with asyncio.timeout(5):
            with pytest.raises(ValueError, match="a bug"):
                await failing
        ((at, group),) = waits._by_end.items()
        assert [each.ended for each in group] == [renewed]
        waits._end(at)  # as its timer does
        async with asyncio.timeout(5):
            assert await renewed is False
        assert not left
        assert not discarded.done()

    asyncio.run(scenario())


@pytest.mark.parametrize("timeout_s", [0.0, 0.001, 0.05])
def test_a_short_wait_has_a_timer_of_its_own(timeout_s):
    async def scenario():
        loop, waits = asyncio.get_running_loop(), Waits()
        begun, wait = loop.time(), loop.create_future()
        waits.add(wait, timeout_s)
        async with asyncio.timeout(5):
            assert await wait is False
        assert loop.time() - begun >= timeout_s - 0.001

    asyncio.run(scenario())
