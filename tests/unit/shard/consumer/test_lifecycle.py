from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.shard.consumer.lifecycle import (
    Effect,
    Input,
    Lifecycle,
    State,
    Transition,
    transition,
)

# Written a second time, by hand: state, input, effect, next state.
EXPECTED = {
    ("IDLE", "STARTED"): ("PLAY", "BACKFILL"),
    ("IDLE", "STARTED_WITHOUT_LOG"): ("REPORT_STANDBY", "STANDBY"),
    ("BACKFILL", "TAILING"): ("REPORT_STANDBY", "STANDBY"),
    ("BACKFILL", "PROMOTED"): ("TAKE_OVER", "TAKING_OVER"),
    ("STANDBY", "PROMOTED"): ("TAKE_OVER", "TAKING_OVER"),
    ("TAKING_OVER", "TAILING"): ("NONE", "TAKING_OVER"),
    ("TAKING_OVER", "RECOVERED"): ("OPEN_STORE", "OPENING"),
    ("OPENING", "RESTORED"): ("SERVE", "PRIMARY"),
    ("PRIMARY", "INPUT_ENDED"): ("RESTORE", "PRIMARY"),
    **{
        (state, "ERROR"): ("REPORT_FAILURE", "FAILED")
        for state in ("IDLE", "BACKFILL", "STANDBY", "TAKING_OVER", "OPENING", "PRIMARY")
    },
    **{
        (state, "CANCELLED"): ("SHUT_DOWN", "STOPPED")
        for state in ("IDLE", "BACKFILL", "STANDBY", "TAKING_OVER", "OPENING", "PRIMARY", "FAILED")
    },
    **{("FAILED", event.name): ("NONE", "FAILED") for event in Input if event.name != "CANCELLED"},
    **{("STOPPED", event.name): ("NONE", "STOPPED") for event in Input},
}


@pytest.mark.parametrize(("state", "event"), list(product(State, Input)))
def test_every_input_in_every_state(state, event):
    expected = EXPECTED.get((state.name, event.name))
    if expected is None:
        with pytest.raises(ValueError, match=f"state {state.name} cannot have"):
            transition(state, event)
    else:
        effect, following = expected
        assert transition(state, event) == Transition(Effect[effect], State[following])


@given(st.lists(st.sampled_from(Input)))
def test_a_life_never_leaves_its_end_and_serves_only_behind_a_restored_store(events):
    life = Lifecycle()
    effects = []
    for event in events:
        before = life.state
        try:
            effects.append(life.advance(event))
        except ValueError:
            assert life.state is before
            continue
        if before is State.STOPPED:
            assert life.state is State.STOPPED
    if Effect.SERVE in effects:
        order = [Effect.TAKE_OVER, Effect.OPEN_STORE, Effect.SERVE]
        assert [effect for effect in effects if effect in order] == order
    assert effects.count(Effect.SHUT_DOWN) <= 1
    assert effects.count(Effect.REPORT_FAILURE) <= 1
