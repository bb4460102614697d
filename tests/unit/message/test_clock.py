"""Clocks of producers, by the conformance vectors."""

from __future__ import annotations

from datetime import UTC, datetime

from gazette_sdk.message.uuid import (
    TICK,
    Clock,
    Stamp,
    clock_of_unix_ns,
    time_of_clock,
    unix_100ns_of_clock,
)
from support.vectors import golden, group


def nanoseconds(time: list[int]) -> int:
    return time[0] * 10**9 + time[1]


def test_a_clock_moves_as_recorded():
    case = group("message", "clock")[0]
    clock = Clock(case["start"])
    for step in case["steps"]:
        if "tick" in step:
            assert clock.tick() == step["expect"]
        else:
            clock.update(nanoseconds(step["update_unix"]))
            assert clock.value == step["expect"]
        for key, holds in {
            "expect_equal_to_clock_of": lambda other: clock.value == other,
            "expect_less_than_clock_of": lambda other: clock.value < other,
            "expect_greater_than_clock_of": lambda other: clock.value > other,
        }.items():
            if key in step:
                assert holds(clock_of_unix_ns(nanoseconds(step[key])))
        if "expect_as_time" in step:
            assert unix_100ns_of_clock(clock.value) == nanoseconds(step["expect_as_time"]) // 100


def test_the_epoch_and_the_tick_are_those_of_the_vectors():
    case = group("message", "clock")[1]
    assert clock_of_unix_ns(0) == case["clock_of_unix_epoch"]
    assert case["tick_increment"] == TICK


def test_golden_clock_values_are_met():
    recorded = golden("consumer/messages/uuids.json")
    values = next(value for key, value in recorded.items() if key.startswith("clock_zero"))
    moment = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    unix_ns = int(moment.timestamp()) * 10**9 + 123456789
    clock = Clock()
    met = [clock.tick(), clock.tick()]
    clock.update(unix_ns)
    met.append(clock.value)
    met.append(clock.tick())
    clock.update(unix_ns + 100)
    met.append(clock.value)
    assert [str(value) for value in met] == values


def test_a_stamp_ticks_by_the_wall_clock_and_never_repeats():
    stamp = Stamp(bytes(6))
    values = []
    for _ in range(1000):
        stamp.tick_now()
        values.append(stamp.clock)
    assert values == sorted(set(values))
    assert abs(time_of_clock(values[0]).timestamp() - datetime.now(UTC).timestamp()) < 60


def test_a_stamp_far_ahead_of_the_wall_clock_only_ticks():
    stamp = Stamp(bytes(6))
    stamp.clock = ahead = clock_of_unix_ns(2**62)
    stamp.tick_now()
    assert stamp.clock == ahead + TICK
