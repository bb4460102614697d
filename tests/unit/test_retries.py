"""Waits between attempts of a call and between dials of a broker, and the log of an outage."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk import retries
from gazette_sdk.errors import UnavailableError
from gazette_sdk.retries import DialPolicy, Outage
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


def test_a_cancellation_is_not_lost_to_a_group_that_fails_at_the_same_moment():
    """Before Python 3.13 the group raises its errors alone, and the loop would go round again."""
    rounds = []

    async def fail(cancelled):
        cancelled.cancel()
        raise OSError

    async def attempts():
        outage = Outage(logging.getLogger("a"), "watch")
        while True:
            rounds.append(1)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail(asyncio.current_task()))
            except* OSError as errors:
                outage.failed(errors)
            await outage.pause(0.01)

    async def scenario():
        async with asyncio.timeout(20):
            task = asyncio.create_task(attempts())
            await asyncio.wait([task])
            assert task.cancelled()

    asyncio.run(scenario())
    assert len(rounds) == 1
