from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.broker.append.machine import (
    APPEND,
    ENDS,
    ContentEffect,
    ContentInput,
    ContentState,
    Effect,
    Input,
    State,
    UnexpectedInputError,
    content_step,
    step,
)

HOLDING = {
    State.START_PIPELINE,
    State.SEND_SYNC,
    State.RECV_SYNC,
    State.UPDATE_ASSIGNMENTS,
    State.VALIDATE_PRECONDITIONS,
    State.STREAM_CONTENT,
}
"""States which are entered with the pipeline's slot in hand."""

# ------------------------------------------------------------------ tables


@pytest.mark.parametrize(("state", "given_"), list(itertools.product(State, Input)))
def test_every_input_in_every_state_has_its_step_or_is_refused(state, given_):
    if (state, given_) in APPEND:
        effects, after = step(state, given_)
        assert isinstance(after, State)
        assert all(isinstance(effect, Effect) for effect in effects)
        assert state not in ENDS
    else:
        with pytest.raises(UnexpectedInputError, match=given_.name):
            step(state, given_)


@pytest.mark.parametrize(("state", "given_"), list(itertools.product(ContentState, ContentInput)))
def test_every_event_of_a_stream_has_its_step_until_it_is_decided(state, given_):
    if state is ContentState.DONE:
        with pytest.raises(UnexpectedInputError):
            content_step(state, given_)
        return
    effect, after, _ = content_step(state, given_)
    assert (after is ContentState.DONE) == (
        effect in (ContentEffect.COMMIT, ContentEffect.ROLL_BACK, ContentEffect.DENY)
    )
    if effect is ContentEffect.COMMIT:
        assert (state, given_) == (ContentState.INTENT, ContentInput.END)


def test_every_state_is_reached_and_leads_to_an_end():
    reached = {State.RESOLVE}
    while more := {s.next for (at, _), s in APPEND.items() if at in reached} - reached:
        reached |= more
    assert reached == set(State)
    leading = set(ENDS)
    while more := {at for (at, _), s in APPEND.items() if s.next in leading} - leading:
        leading |= more
    assert leading == set(State)


def test_every_state_that_waits_can_be_cancelled():
    pure = {State.AWAIT_REPLICAS}
    for state in set(State) - set(ENDS) - pure:
        assert (state, Input.CANCELLED) in APPEND


def test_no_end_is_reached_with_the_pipeline_in_hand():
    for (state, _), (effects, after) in APPEND.items():
        if after in ENDS and (state in HOLDING or state is State.UPDATE_SUSPEND):
            assert effects[-1] is Effect.RELEASE
        if after is State.READ_ACKS:
            assert effects == (Effect.RELEASE,), "the next append may follow meanwhile"


def test_whoever_waits_for_another_primary_has_let_go_of_the_pipeline():
    assert Effect.RELEASE in APPEND[State.RESOLVE, Input.REMOTE].effects


@given(st.lists(st.sampled_from(list(ContentInput)), max_size=8))
def test_a_stream_commits_only_as_content_then_the_empty_message_then_its_end(events):
    state, effect = ContentState.OPEN, ContentEffect.WAIT
    seen = []
    for event in events:
        seen.append(event)
        effect, state, _ = content_step(state, event)
        if state is ContentState.DONE:
            break
    is_whole = seen[-2:] == [ContentInput.EMPTY, ContentInput.END] and set(seen[:-2]) <= {
        ContentInput.CHUNK
    }
    assert (effect is ContentEffect.COMMIT) == is_whole
