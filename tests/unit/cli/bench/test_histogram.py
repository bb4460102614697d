"""Latencies in bounded memory."""

from __future__ import annotations

import math
import sys

from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cli.bench.report import Histogram

SHARES = [0.5, 0.9, 0.99, 0.999, 1.0]


def recorded(values):
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


@given(st.lists(st.integers(0, (1 << 44) - 1), min_size=1, max_size=300))
def test_quantiles_are_those_of_the_sorted_values_to_a_hundredth(values):
    histogram = recorded(values)
    values.sort()
    for share, found in zip(SHARES, histogram.quantiles(SHARES), strict=True):
        exact = values[max(math.ceil(share * len(values)), 1) - 1]
        assert exact <= found <= exact * 1.01
    assert histogram.max == values[-1]
    assert histogram.mean == sum(values) / len(values)


@given(st.lists(st.integers(0, 255), min_size=1))
def test_small_values_are_exact(values):
    assert recorded(values).quantiles([1.0]) == [max(values)]
    assert recorded(values).quantiles([0.5]) == [sorted(values)[(len(values) + 1) // 2 - 1]]


def test_nothing_recorded_is_zero():
    assert Histogram().quantiles(SHARES) == [0] * len(SHARES)
    assert Histogram().mean == 0


def test_what_is_out_of_range_is_counted_at_its_ends():
    histogram = recorded([-5, 1 << 60])
    assert histogram.quantiles([0.5, 1.0]) == [0, (1 << 44) - 1]
    assert histogram.max == 1 << 60


def test_memory_does_not_grow_with_values():
    histogram = recorded([1])
    before = sys.getsizeof(histogram._counts)
    for value in range(0, 1 << 40, 1 << 24):
        histogram.record(value)
    assert sys.getsizeof(histogram._counts) == before
