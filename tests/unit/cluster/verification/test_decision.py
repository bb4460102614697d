"""The table of verifications, over every state and input."""

from __future__ import annotations

from itertools import product

import pytest

from gazette_sdk.cluster.verification import ENDS, NOTHING_LISTENS, VERIFICATION, Input, State, step

BETWEEN = [state for state in State if state not in ENDS]


@pytest.mark.parametrize(("state", "given"), list(product(State, Input)))
def test_every_pair_has_a_next_state_or_cannot_happen(state, given):
    if (state, given) in VERIFICATION:
        assert step(state, given) is VERIFICATION[state, given]
        assert state not in ENDS
    else:
        with pytest.raises(AssertionError, match="cannot happen"):
            step(state, given)


@pytest.mark.parametrize("state", BETWEEN)
def test_every_state_can_be_left_for_an_end(state):
    seen, todo = set(), [state]
    while todo:
        each = todo.pop()
        if each not in seen:
            seen.add(each)
            todo += [after for (before, _), after in VERIFICATION.items() if before is each]
    assert seen & ENDS


def paths(state, so_far=()):
    """All ways from a state to an end which enter no state twice."""
    if state in ENDS:
        yield state, so_far
        return
    for (before, given), after in VERIFICATION.items():
        if before is state and after not in {each for each, _ in so_far} | {state}:
            yield from paths(after, (*so_far, (state, given)))


def test_a_broker_is_deposed_only_if_nothing_listens_and_it_leaves_the_challenge_unanswered():
    found = [path for end, path in paths(State.DIAL) if end is State.DEPOSED]
    assert found
    for path in found:
        given = dict(path)
        assert given[State.DIAL_AGAIN] in NOTHING_LISTENS
        assert given[State.AWAIT_ANSWER] is Input.UNANSWERED
        assert given[State.DIAL_LAST] in NOTHING_LISTENS
        assert given[State.CONDEMN] is Input.CONFIRMED


@pytest.mark.parametrize("given", [Input.UNCLEAR, Input.FAILED])
def test_what_is_unclear_or_fails_is_left_to_the_lease(given):
    for (_, each), after in VERIFICATION.items():
        if each is given:
            assert after is State.UNDECIDED


def test_an_answer_always_saves_the_suspect():
    for (_, given), after in VERIFICATION.items():
        if given is Input.ANSWERED:
            assert after is State.ALIVE
