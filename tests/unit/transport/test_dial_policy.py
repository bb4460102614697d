"""The back-off of a broker that cannot be reached."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import UnavailableError
from gazette_sdk.transport.backoff import DialPolicy

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
