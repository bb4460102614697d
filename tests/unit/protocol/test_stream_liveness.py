"""The clock of a peer's silence, over every state and input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.protocol.stream_calls import (
    PING_AFTER_S,
    SILENCE_MAX_S,
    STALL_MAX_S,
    STALLED_BYTES,
    Liveness,
    LivenessCheck,
)


@pytest.mark.parametrize("reading_paused", [False, True])
@pytest.mark.parametrize("unread_bytes", [0, STALLED_BYTES, STALLED_BYTES + 1])
@pytest.mark.parametrize(
    "silent_s",
    [
        0.0,
        PING_AFTER_S - 1,
        PING_AFTER_S,
        SILENCE_MAX_S - 1,
        SILENCE_MAX_S,
        STALL_MAX_S - 1,
        STALL_MAX_S,
        STALL_MAX_S + 1,
    ],
)
def test_every_state_has_its_verdict(silent_s, unread_bytes, reading_paused):
    begun = 100.0
    liveness = Liveness(begun)
    liveness.sent(unread_bytes)
    now = begun + silent_s
    verdict = liveness.check(now, reading_paused=reading_paused)
    if reading_paused:
        assert verdict is LivenessCheck.PING
        assert liveness.silent_s(now) == 0
        assert liveness.deadline == now + PING_AFTER_S
        return
    bound_s = STALL_MAX_S if unread_bytes > STALLED_BYTES else SILENCE_MAX_S
    if silent_s >= bound_s:
        assert verdict is LivenessCheck.DROP
    elif silent_s >= PING_AFTER_S:
        assert verdict is LivenessCheck.PING
        assert liveness.deadline == now + min(PING_AFTER_S, bound_s - silent_s)
    else:
        assert verdict is LivenessCheck.WAIT
        assert liveness.deadline == begun + PING_AFTER_S


def test_what_is_heard_ends_the_silence_and_what_is_unread():
    liveness = Liveness(0.0)
    liveness.sent(STALLED_BYTES + 1)
    liveness.heard(15.0)
    assert liveness.check(15.0 + PING_AFTER_S) is LivenessCheck.PING
    assert liveness.check(15.0 + SILENCE_MAX_S) is LivenessCheck.DROP


def test_a_restart_ends_the_silence_alone():
    liveness = Liveness(0.0)
    liveness.sent(STALLED_BYTES + 1)
    liveness.restart(15.0)
    assert liveness.check(15.0 + SILENCE_MAX_S) is LivenessCheck.PING
    assert liveness.check(15.0 + STALL_MAX_S) is LivenessCheck.DROP


QUARTERS = st.integers(0, 400).map(lambda count: count / 4)  # exact


@given(peer_speaks=st.lists(QUARTERS, max_size=20), unread_bytes=st.integers(0, 1 << 20))
def test_checks_at_deadlines_drop_a_peer_in_time_and_no_other(peer_speaks, unread_bytes):
    """As a driver does: check at each deadline, while the peer speaks now and then."""
    now, pings = 0.0, 0
    liveness = Liveness(now)
    for pause_s in [*peer_speaks, 1e6]:
        liveness.sent(unread_bytes)
        bound_s = STALL_MAX_S if liveness.unread_bytes > STALLED_BYTES else SILENCE_MAX_S
        heard_at = now
        while liveness.deadline < heard_at + pause_s:
            assert now - 1e-6 <= liveness.deadline <= now + PING_AFTER_S + 1e-6
            now = max(now, liveness.deadline)
            verdict = liveness.check(now)
            if verdict is LivenessCheck.DROP:
                assert bound_s <= now - heard_at < bound_s + 1e-3
                assert pings
                return
            assert now - heard_at < bound_s
            assert (verdict is LivenessCheck.PING) == (now - heard_at >= PING_AFTER_S)
            pings += verdict is LivenessCheck.PING
            assert liveness.deadline > now
        now = heard_at + pause_s
        liveness.heard(now)
    raise AssertionError
