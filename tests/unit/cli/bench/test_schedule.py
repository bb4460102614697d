"""When messages are due, and what a stall does to their latencies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cli.bench.report import NANOSECONDS, Histogram, Schedule, due_messages

MS = 1_000_000


class Clock:
    """Time that goes on only when somebody sleeps, or works."""

    def __init__(self, now_ns=0):
        self.now_ns = now_ns

    def __call__(self):
        return self.now_ns

    def sleep(self, seconds):
        assert seconds >= 0
        self.now_ns += max(1, round(seconds * NANOSECONDS))

    def work(self, nanoseconds):
        self.now_ns += nanoseconds


@given(
    st.floats(0.01, 1e7),
    st.integers(1, 10_000),
    st.integers(0, 1 << 50),
    st.integers(0, 10_000),
)
def test_due_by_and_due_agree(rate, count, begin, index):
    schedule = Schedule(begin, rate, count)
    index = min(index, count - 1)
    assert schedule.due_by(schedule.due_ns(index)) >= index + 1
    assert schedule.due_by(begin - 1) == 0
    due = schedule.due_by(schedule.due_ns(index))
    assert due == count or schedule.due_ns(due) > schedule.due_ns(index)


def test_every_message_becomes_due_once_in_order_and_not_early():
    clock = Clock(now_ns=5)
    schedule = Schedule(1000, rate=3000.0, count=5000)
    seen = []
    for due in due_messages(schedule, now_ns=clock, sleep=clock.sleep):
        assert schedule.due_ns(due[-1]) <= clock.now_ns
        seen += due
    assert seen == list(range(5000))
    assert clock.now_ns == pytest.approx(schedule.due_ns(4999), abs=2)


def test_a_stalled_publisher_shows_in_the_percentiles():
    # A second's stall in the middle of two seconds at 1000 messages per second. All that was due
    # meanwhile is late: half of all messages, by up to a second.
    clock, schedule = Clock(), Schedule(0, rate=1000.0, count=2000)
    corrected, naive = Histogram(), Histogram()
    for due in due_messages(schedule, now_ns=clock, sleep=clock.sleep, at_once_max=100):
        for index in due:
            sent = clock.now_ns
            clock.work(1000 * MS if index == 500 else 1000)  # what publishing it takes
            corrected.record(clock.now_ns - schedule.due_ns(index))
            naive.record(clock.now_ns - sent)
    p50, p90, p99 = (value / MS for value in corrected.quantiles([0.5, 0.9, 0.99]))
    assert p50 < 10
    assert 790 < p90 < 820
    assert 970 < p99 < 1010
    # From when it was sent, one message of two thousand was slow.
    assert naive.quantiles([0.999])[0] < MS


def test_late_messages_come_in_bounded_ranges():
    clock = Clock(now_ns=NANOSECONDS)
    ranges = due_messages(
        Schedule(0, 1000.0, 1001), now_ns=clock, sleep=clock.sleep, at_once_max=400
    )
    assert list(ranges) == [range(400), range(400, 800), range(800, 1001)]
