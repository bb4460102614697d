from __future__ import annotations

import pytest

from gazette_sdk.transport import backoff
from support.vectors import cases


@pytest.mark.parametrize("case", cases("broker", "client_backoff"))
def test_delays_follow_the_vectors(case):
    assert backoff.delay_s(case["attempt"]) == case["ms"] / 1000


def test_delays_never_fall():
    delays = [backoff.delay_s(attempt) for attempt in range(-3, 20)]
    assert delays == sorted(delays)
