from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cluster.lease import (
    OWNER_SILENT_TTLS,
    PAUSED_S,
    Effect,
    LeaseEnded,
    Renewal,
    RenewalAnswered,
    RenewalFailed,
    Tick,
    begin,
    step,
)

TTL_S = 6.0

STATES = {
    "answered": Renewal(TTL_S, alive_until=106, next_at=102, sent_at=100),
    "unanswered": Renewal(TTL_S, alive_until=106, next_at=104, sent_at=102, is_pending=True),
    "after a pause": Renewal(
        TTL_S, alive_until=106, next_at=112, sent_at=110, is_pending=True, pending_until=110.6
    ),
}

LATE = 106 + 2 * PAUSED_S
SILENT_AT = 102 - OWNER_SILENT_TTLS * TTL_S
"""Time of the owner's last sign of life of which a renewal at 102 is the first that is not sent."""

TABLE = [
    # state, input, time, effect, changes of the state
    ("answered", Tick(), 101, Effect.WAIT, {}),
    ("answered", Tick(), 102, Effect.SEND, {"sent_at": 102, "next_at": 104, "is_pending": True}),
    ("answered", Tick(), 105, Effect.SEND, {"sent_at": 105, "next_at": 107, "is_pending": True}),
    ("answered", Tick(), 106, Effect.LOST, {}),
    # The owner is silent: the lease runs out, unless it is alive again before.
    ("answered", Tick(SILENT_AT), 102, Effect.WAIT, {"next_at": 102.5}),
    (
        "answered",
        Tick(SILENT_AT + 0.01),
        102,
        Effect.SEND,
        {"sent_at": 102, "next_at": 104, "is_pending": True},
    ),
    ("unanswered", Tick(SILENT_AT), 104, Effect.WAIT, {"next_at": 104.5}),
    ("answered", Tick(SILENT_AT), 106, Effect.LOST, {}),
    ("answered", Tick(SILENT_AT), LATE, Effect.LOST, {}),
    # It was alive until a pause of the process, in which it had no time for signs of life.
    (
        "answered",
        Tick(105),
        105 + 10 * TTL_S,
        Effect.SEND,
        {
            "sent_at": 105 + 10 * TTL_S,
            "next_at": 107 + 10 * TTL_S,
            "is_pending": True,
            "pending_until": pytest.approx(105.6 + 10 * TTL_S),
        },
    ),
    (
        "answered",
        Tick(),
        LATE,
        Effect.SEND,
        {
            "sent_at": LATE,
            "next_at": LATE + 2,
            "is_pending": True,
            "pending_until": pytest.approx(LATE + 0.6),
        },
    ),
    ("answered", RenewalAnswered(100, TTL_S), 101, Effect.WAIT, {}),
    ("answered", RenewalAnswered(99, TTL_S), 101, Effect.WAIT, {}),
    ("answered", RenewalFailed(99), 101, Effect.WAIT, {}),
    ("answered", LeaseEnded(), 101, Effect.LOST, {}),
    ("unanswered", Tick(), 103, Effect.WAIT, {}),
    ("unanswered", Tick(), 104, Effect.SEND_ELSEWHERE, {"sent_at": 104, "next_at": 106}),
    ("unanswered", Tick(), 106, Effect.LOST, {}),
    (
        "unanswered",
        Tick(),
        LATE,
        Effect.SEND_ELSEWHERE,
        {"sent_at": LATE, "next_at": LATE + 2, "pending_until": pytest.approx(LATE + 0.6)},
    ),
    (
        "unanswered",
        RenewalAnswered(102, TTL_S),
        103,
        Effect.WAIT,
        {"alive_until": 108, "is_pending": False},
    ),
    # The answer of an earlier one prolongs the lease; the last one still has none.
    ("unanswered", RenewalAnswered(101, TTL_S), 103, Effect.WAIT, {"alive_until": 107}),
    # Etcd may grant a longer time to live than was asked for.
    (
        "unanswered",
        RenewalAnswered(102, 10.0),
        103,
        Effect.WAIT,
        {"alive_until": 112, "is_pending": False},
    ),
    ("unanswered", RenewalFailed(102), 103, Effect.WAIT, {"next_at": 103.5}),
    ("unanswered", RenewalFailed(102), 103.9, Effect.WAIT, {}),  # the next one is due earlier
    ("unanswered", RenewalFailed(101), 103, Effect.WAIT, {}),
    ("unanswered", LeaseEnded(), 103, Effect.LOST, {}),
    ("after a pause", Tick(), 110.5, Effect.WAIT, {}),
    ("after a pause", Tick(), 110.6, Effect.LOST, {}),
    ("after a pause", Tick(), 115, Effect.LOST, {}),  # a second pause
    (
        "after a pause",
        RenewalAnswered(110, TTL_S),
        110.1,
        Effect.WAIT,
        {"alive_until": 116, "is_pending": False, "pending_until": None},
    ),
    # It was sent before the pause, and its answer was read after it.
    (
        "after a pause",
        RenewalAnswered(105, TTL_S),
        110.1,
        Effect.WAIT,
        {"alive_until": 111, "pending_until": None},
    ),
    # It was sent before the pause, and had ended by its end.
    ("after a pause", RenewalAnswered(103, TTL_S), 110.1, Effect.WAIT, {"alive_until": 109}),
    ("after a pause", RenewalFailed(110), 110.1, Effect.WAIT, {"next_at": 110.6}),
    ("after a pause", LeaseEnded(), 110.1, Effect.LOST, {}),
]


@pytest.mark.parametrize(("name", "happened", "now", "effect", "changes"), TABLE)
def test_the_table(name, happened, now, effect, changes):
    state = STATES[name]
    after, found = step(state, happened, now)
    assert found is effect
    expected = {field: getattr(state, field) for field in state.__slots__} | changes
    assert {field: getattr(after, field) for field in state.__slots__} == expected


def test_the_table_has_every_state_with_every_input():
    found = {(name, type(happened)) for name, happened, *_ in TABLE}
    assert found == set(
        itertools.product(STATES, (Tick, RenewalAnswered, RenewalFailed, LeaseEnded))
    )


def test_the_first_renewal_is_sent_at_once():
    state = begin(TTL_S, 50.0)
    assert state.wake_at == 50.0
    assert step(state, Tick(), 50.0)[1] is Effect.SEND


class PausedProcess:
    """A process that is paused at times, with an Etcd that always answers at once.

    Attributes:
        etcd_until: when Etcd deletes the lease.
    """

    def __init__(self, ttl_s: float, pauses: list[tuple[float, float]], delay_s: float) -> None:
        self.pauses = pauses
        self.delay_s = delay_s
        self.etcd_until = ttl_s
        self.state = begin(ttl_s, 0.0)
        self.answers: list[tuple[float, float]] = []

    def run(self, until: float) -> bool:
        """Return True if the process still has the lease then."""
        now = 0.0
        while now < until:
            state, effect = step(self.state, self._next(now), now)
            self.state = state
            if effect is Effect.LOST:
                return False
            if effect is not Effect.WAIT:
                assert now < self.etcd_until, "Etcd has deleted the lease"
                self.etcd_until = now + state.ttl_s
                self.answers.append((now + self.delay_s, now))
            else:
                now = self._awake(
                    min([state.wake_at, *(at for at, _ in self.answers)], default=now)
                )
        return True

    def _next(self, now: float) -> Tick | RenewalAnswered:
        # Timers fire before answers are read, as after a pause of a real process.
        if now >= self.state.wake_at and self.state.pending_until is None:
            return Tick()
        if self.answers and self.answers[0][0] <= now:
            return RenewalAnswered(self.answers.pop(0)[1], self.state.ttl_s)
        return Tick()

    def _awake(self, at: float) -> float:
        for begin_at, end_at in self.pauses:
            if begin_at <= at < end_at:
                return end_at
        return at


@given(st.floats(0, 6), st.floats(0.001, 0.8))
def test_two_pauses_of_half_the_lease_shortly_after_each_other_do_not_cost_it(first, delay_s):
    second = first + 2.5 + 1.3
    process = PausedProcess(5.0, [(first, first + 2.5), (second, second + 2.5)], delay_s)
    assert process.run(20.0)


@given(st.floats(0, 6), st.floats(0.001, 0.5))
def test_a_pause_shorter_than_the_rest_of_the_lease_does_not_cost_it(first, delay_s):
    # A third of it may have passed before, and the answer comes after the delay.
    process = PausedProcess(6.0, [(first, first + 3.9 - delay_s)], delay_s)
    assert process.run(20.0)


def test_renewals_are_a_third_of_the_lease_apart_however_late_the_answers_are():
    process = PausedProcess(6.0, [], delay_s=1.9)
    sent: list[float] = []
    while len(sent) < 10:
        assert process.run(process.state.wake_at + 0.01)
        if process.state.sent_at not in sent:
            sent.append(process.state.sent_at)
    assert [b - a for a, b in itertools.pairwise(sent)] == pytest.approx([2.0] * 9)


@given(st.floats(0.0, 2.0))
def test_the_lease_of_a_silent_owner_is_kept_for_the_bound_and_ends_a_lease_later(delay_s):
    state, now, alive_until = begin(TTL_S, 0.0), 0.0, TTL_S
    sent: list[float] = []
    while True:
        state, effect = step(state, Tick(0.0), now)  # its only sign of life
        if effect is Effect.LOST:
            break
        if effect is Effect.SEND:
            sent.append(now)
            alive_until = now + TTL_S
            state, _ = step(state, RenewalAnswered(now, TTL_S), now + delay_s)
        now = max(now + delay_s if effect is Effect.SEND else now, state.wake_at)
    bound_s = OWNER_SILENT_TTLS * TTL_S
    assert bound_s - TTL_S / 3 - delay_s <= sent[-1] < bound_s
    assert alive_until <= now < bound_s + TTL_S + PAUSED_S
