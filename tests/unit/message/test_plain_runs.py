"""Plain runs: found in arrays as one finds them message by message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.message.runs import Message, Run
from gazette_sdk.message.sequencer import (
    BLOCKED,
    Outcome,
    Sequencer,
    count_outcomes,
    last_clocks,
    plain_prefix,
)
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from support.sequencing import feed, run_of, states

O, C, A, X = OUTSIDE_TXN, CONTINUE_TXN, ACK_TXN, 0x7  # noqa: E741 - as tables write them

stamps = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 12), st.sampled_from([O, O, C, C, A, X])),
    max_size=12,
)
floors = st.dictionaries(st.integers(1, 3), st.integers(0, 6) | st.just(BLOCKED))


def arrays(rows):
    return (
        np.array([row[0] for row in rows], np.uint64),
        np.array([row[1] for row in rows], np.uint64),
        np.array([row[2] for row in rows], np.uint16),
    )


def naive_prefix(rows, floors) -> int:
    """Message by message, what :func:`plain_prefix` finds in arrays."""
    low = {producer: floors.get(producer, -1) for producer in range(4)}
    whole, open_by = 0, None
    for index, (producer, clock, flags) in enumerate(rows):
        if clock == 0:
            if open_by is not None:
                return whole
            whole = index + 1
            continue
        if clock <= low[producer] or open_by not in (None, producer):
            return whole
        low[producer] = clock
        if flags == C:
            open_by = producer
        elif flags == A:
            open_by, whole = None, index + 1
        elif open_by is not None:
            return whole
        else:
            whole = index + 1
    return whole


@settings(max_examples=200)
@given(stamps, floors)
def test_plain_prefixes_are_those_found_one_by_one(rows, floors):
    def floor_of(producer):
        return floors.get(producer, -1)

    found = plain_prefix(*arrays(rows), floor_of)
    assert found == naive_prefix(rows, floors)
    # If more follows, what ends within a transaction may be plain.
    ended = [*rows, (rows[-1][0], 100, A)] if rows and rows[-1][2] == C and rows[-1][1] else rows
    is_plain_so_far = naive_prefix(ended, floors) == len(ended)
    if is_plain_so_far:
        found = len(rows)
    assert plain_prefix(*arrays(rows), floor_of, more=True) == found


ascending = st.lists(
    st.tuples(st.integers(1, 1 << 48), st.integers(0, 2), st.sampled_from([O, C, A])),
    min_size=1,
    max_size=60,
)


@given(ascending, st.integers(1, 5))
def test_producers_are_told_apart(rows, few):
    rows = [
        (producer % (few * 7) + 1, index + 1 if kind else 0, O)
        for index, (producer, kind, _) in enumerate(rows)
    ]
    producers, clocks, flags = arrays(rows)
    last = last_clocks(producers, clocks)
    assert plain_prefix(producers, clocks, flags, lambda _: -1) == len(rows)
    assert dict(last) == {producer: clock for producer, clock, _ in rows if clock}


def test_nothing_is_plain_in_nothing():
    assert plain_prefix(*arrays([]), lambda _: -1) == 0
    assert last_clocks(*arrays([(0, 0, O)] * 3)[:2]) == []


def test_outcomes_are_counted_as_queueing_counts_them():
    rows = [(1, 1, C), (1, 2, C), (1, 3, A), (1, 4, A), (2, 9, C), (2, 10, A), (0, 0, C), (1, 5, X)]
    assert count_outcomes(*arrays(rows)[1:]) == [
        (C, Outcome.CONTINUE_BEGIN_SPAN, 2),
        (C, Outcome.CONTINUE_EXTEND_SPAN, 1),
        (A, Outcome.ACK_COMMIT_RING, 2),
        (A, Outcome.ACK_EMPTY, 1),
        (O, Outcome.OUTSIDE_COMMIT, 1),
        (X, Outcome.OUTSIDE_COMMIT, 1),
    ]
    assert count_outcomes(*arrays([(1, 1, O)] * 4)[1:]) == [(O, Outcome.OUTSIDE_COMMIT, 4)]


# ------------------------------------------------------- as the Sequencer asks


def run_from(rows) -> Run[int]:
    return run_of(
        [
            Message("a/journal", index * 10, index * 10 + 10, producer, clock, flags, index)
            for index, (producer, clock, flags) in enumerate(rows)
        ]
    )


def test_a_long_run_is_plain_up_to_where_it_is_not():
    rows = [(1 + index % 3, index + 1, O) for index in range(5000)]
    sequencer: Sequencer[int] = Sequencer()
    assert sequencer.plain_count(run_from(rows)) == 5000
    assert sequencer.plain_count(run_from(rows), 4999) == 1
    assert sequencer.plain_count(run_from(rows), 5000) == 0
    rows[4000] = (2, 7, O)
    assert sequencer.plain_count(run_from(rows)) == 4000
    rows[100] = (2, 7, O)
    assert sequencer.plain_count(run_from(rows)) == 100


def test_a_transaction_longer_than_what_is_looked_at_first_is_plain():
    rows = [(1, index + 1, C) for index in range(999)] + [(1, 1000, A)]
    sequencer: Sequencer[int] = Sequencer()
    assert sequencer.plain_count(run_from(rows)) == 1000
    assert sequencer.plain_count(run_from(rows[:-1])) == 0


def test_a_long_transaction_behind_plain_messages_is_plain():
    rows = [(1, index + 1, C) for index in range(1000)]
    rows[9] = (1, 10, A)
    rows[-1] = (1, 1000, A)
    assert Sequencer[int]().plain_count(run_from(rows)) == 1000


def test_nothing_is_plain_of_a_producer_with_an_open_sequence():
    sequencer: Sequencer[int] = Sequencer()
    rows = [(1, 1, C), (2, 1, O), (2, 2, O), (1, 2, O)]
    run = run_from(rows)
    assert sequencer.plain_count(run) == 0
    list(feed(sequencer, {}, run.messages(0, 1)))
    assert sequencer.plain_count(run, 1) == 2
    assert sequencer.plain_count(run, 3) == 0


def test_nothing_is_plain_while_a_sequence_is_delivered():
    run = run_from([(1, 1, O), (1, 2, O)])
    sequencer: Sequencer[int] = Sequencer()
    sequencer.queue(run.messages(0, 1)[0])
    assert sequencer.plain_count(run, 1) == 0
    with pytest.raises(RuntimeError):
        sequencer.commit_run(run, 1, 2)
    with pytest.raises(RuntimeError):
        sequencer.checkpoint_within(run, 1, 2)


def test_committing_nothing_changes_nothing():
    run = run_from([(1, 1, O)])
    sequencer: Sequencer[int] = Sequencer()
    sequencer.commit_run(run, 0, 0)
    assert sequencer.offsets == {}


def test_a_checkpoint_within_before_anything_was_taken_names_the_journal():
    run = run_from([(1, 1, O), (1, 2, O)])
    sequencer: Sequencer[int] = Sequencer()
    sequencer.offsets["a/journal"] = -1
    assert sequencer.checkpoint_within(run, 1, 1).offsets == {"a/journal": 10}
    assert sequencer.offsets == {"a/journal": -1}
    sequencer.offsets["a/journal"] = 3
    assert sequencer.checkpoint_within(run, 1, 1).offsets == {"a/journal": 3}
    assert sequencer.checkpoint_within(run, 2, 2).offsets == {"a/journal": 3}


def test_a_checkpoint_within_a_transaction_names_what_is_left_of_it():
    run = run_from([(1, 1, O), (2, 1, C), (2, 2, C), (2, 3, C), (2, 4, A), (1, 2, O)])
    found = Sequencer[int]().checkpoint_within(run, 0, 3)
    assert found.offsets == {"a/journal": 40}
    assert states(found) == {
        ("a/journal", b"\0\0\0\0\0\1", 1, -1),
        ("a/journal", b"\0\0\0\0\0\2", 2, 30),
    }
