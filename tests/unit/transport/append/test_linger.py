"""Linger: the pause before a further append of a journal that is being streamed to."""

from __future__ import annotations

import pytest

from gazette_sdk.transport.append.queue import LARGE_BYTES, LINGER_S, STREAMING_COUNT_MIN, Linger

NOW = 100.0


@pytest.mark.parametrize("is_in_flight", [False, True])
@pytest.mark.parametrize("count", [1, STREAMING_COUNT_MIN - 1, STREAMING_COUNT_MIN, 1000])
@pytest.mark.parametrize("length_bytes", [0, 1, LARGE_BYTES - 1, LARGE_BYTES])
@pytest.mark.parametrize("elapsed", [0.0, 0.5, 1.0, 2.0])
def test_only_small_appends_of_a_stream_wait_and_only_until_the_pause_is_over(
    is_in_flight, count, length_bytes, elapsed
):
    linger = Linger()
    linger.begun(NOW, count)
    waits = linger.wait_s(NOW + elapsed * LINGER_S, length_bytes, is_in_flight=is_in_flight)
    is_stream = is_in_flight or count >= STREAMING_COUNT_MIN
    if is_stream and length_bytes < LARGE_BYTES and elapsed < 1:
        assert waits == pytest.approx((1 - elapsed) * LINGER_S)
    else:
        assert waits == pytest.approx(0.0)


def test_the_first_append_of_a_journal_does_not_wait():
    assert Linger().wait_s(NOW, 1, is_in_flight=False) == 0


def test_a_journal_that_ran_dry_is_not_streamed_to_any_more():
    linger = Linger()
    linger.begun(NOW, STREAMING_COUNT_MIN)
    linger.ran_dry()
    assert linger.wait_s(NOW, 1, is_in_flight=False) == 0
