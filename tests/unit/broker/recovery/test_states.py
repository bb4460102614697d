from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

from gazette_sdk.broker.recovery import states
from gazette_sdk.broker.recovery.states import (
    HEAD,
    SPOOL,
    SPOOL_ENDS,
    HeadInput,
    HeadState,
    SpoolEffect,
    SpoolInput,
    SpoolState,
    head_step,
    spool_step,
)

QUARANTINE = {SpoolState.UNCONTESTED, SpoolState.CONTESTED}
DECIDING = {
    SpoolState.COMPARING,
    SpoolState.CLOSING,
    SpoolState.TRUNCATING,
    SpoolState.RENAMING,
}


def written_table(table):
    """A table as the docstring of the module has it."""
    rows = [("state", "input", "effect", "next state")]
    rows += [
        (state.value, given.value, effect.value, after.value)
        for (state, given), (effect, after) in table.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    rule = "  ".join("=" * width for width in widths)
    return "\n".join(["", rule, lines[0], rule, *lines[1:], rule, ""])


@pytest.mark.parametrize("table", [HEAD, SPOOL], ids=["head", "spool"])
def test_the_docstring_has_the_tables(table):
    assert written_table(table) in states.__doc__


@pytest.mark.parametrize(
    ("table", "step", "pairs"),
    [
        (HEAD, head_step, list(itertools.product(HeadState, HeadInput))),
        (SPOOL, spool_step, list(itertools.product(SpoolState, SpoolInput))),
    ],
    ids=["head", "spool"],
)
def test_every_input_in_every_state_has_its_step_or_is_refused(table, step, pairs):
    assert set(table) <= set(pairs)
    for state, given in pairs:
        if (state, given) in table:
            assert step(state, given) == table[state, given]
            assert state not in SPOOL_ENDS
        else:
            with pytest.raises(AssertionError, match=f"{given.name} cannot happen"):
                step(state, given)


@pytest.mark.parametrize("inputs", [HeadInput, SpoolInput])
def test_every_input_of_the_tables_is_given_by_some_module(inputs):
    """A row that no code looks up would document what the broker does not do."""
    assert states.__file__ is not None
    broker = Path(states.__file__).parents[1]
    given = {
        node.attr
        for file in broker.rglob("*.py")
        if file != Path(states.__file__)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == inputs.__name__
    }
    assert given == set(inputs.__members__)


def test_a_head_is_forgotten_by_everything_that_makes_it_outdated():
    for given in (HeadInput.CONTINUED_BY_OTHERS, HeadInput.JOURNAL_DELETED):
        for state in HeadState:
            assert head_step(state, given)[1] is HeadState.ABSENT


def test_no_head_is_known_without_a_history():
    for state in HeadState:
        assert head_step(state, HeadInput.HISTORY_LOST)[1] is not HeadState.KNOWN


def test_every_state_of_a_spool_is_reached_and_leads_to_an_end():
    reached = {SpoolState.FOUND}
    while more := {after for (at, _), (_, after) in SPOOL.items() if at in reached} - reached:
        reached |= more
    assert reached == set(SpoolState)
    leading = set(SPOOL_ENDS)
    while more := {at for (at, _), (_, after) in SPOOL.items() if after in leading} - leading:
        leading |= more
    assert leading == set(SpoolState)


def test_a_spool_is_used_only_from_quarantine_and_then_ends():
    for (state, _), (effect, after) in SPOOL.items():
        assert (effect is SpoolEffect.USE) == (after is SpoolState.IN_USE)
        if after is SpoolState.IN_USE:
            assert state in QUARANTINE | DECIDING


def test_only_contested_spools_lose_bytes():
    """Others may have acknowledged other bytes only if they continued the journal."""
    changes = {
        SpoolEffect.COMPARE,
        SpoolEffect.COMPARE_SHARED,
        SpoolEffect.TRUNCATE,
        SpoolEffect.SET_SUPERSEDED_ASIDE,
    }
    for (state, _), (effect, after) in SPOOL.items():
        if effect in changes or after in DECIDING:
            assert state in {SpoolState.CONTESTED, SpoolState.COMPARING, SpoolState.CLOSING}


def test_a_failure_returns_a_spool_to_quarantine():
    for state in QUARANTINE | DECIDING:
        effect, after = spool_step(state, SpoolInput.FAILED)
        assert effect is SpoolEffect.CONTINUE_WAITING
        assert after is (state if state in QUARANTINE else SpoolState.CONTESTED)


def test_a_verified_spool_enters_quarantine_uncontested():
    for (state, _), (_, after) in SPOOL.items():
        if state is SpoolState.FOUND and after not in SPOOL_ENDS:
            assert after is SpoolState.UNCONTESTED
