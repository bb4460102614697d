from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.broker.recovery.spools import closed_gaps, compare, is_ahead
from gazette_sdk.broker.recovery.states import SpoolInput
from gazette_sdk.protocol import broker_pb2 as pb

OURS = pb.Fragment(journal="a/journal", begin=10, end=50)


def others(*spans):
    return [
        pb.Fragment(journal="a/journal", begin=begin, end=end, sum=pb.SHA1Sum(part1=1))
        for begin, end in spans
    ]


@pytest.mark.parametrize(
    ("known", "gaps", "shared"),
    [
        ([], [], []),
        ([(0, 10)], [], []),  # nothing behind ours
        ([(0, 30)], [], []),
        ([(60, 70)], [(10, 50)], []),
        ([(50, 70)], [(10, 50)], []),
        ([(30, 70)], [(10, 30)], []),
        ([(0, 30), (50, 70)], [(30, 50)], [(10, 30)]),
        ([(0, 30), (40, 70)], [(30, 40)], [(10, 30)]),
        ([(10, 20), (15, 30), (40, 45), (48, 70)], [(30, 40), (45, 48)], [(10, 20), (20, 30),
                                                                         (40, 45)]),
        ([(20, 30), (45, 48)], [(10, 20), (30, 45)], [(20, 30)]),
    ],
)  # fmt: skip
def test_gaps_that_a_spool_closes(known, gaps, shared):
    closing = closed_gaps(OURS, others(*known))
    assert (list(closing.gaps), list(closing.shared)) == (gaps, shared)


@pytest.mark.parametrize(
    ("known", "given_", "end"),
    [
        ([], SpoolInput.NOT_HELD, 50),
        ([(0, 10), (50, 70)], SpoolInput.NOT_HELD, 50),
        ([(30, 70)], SpoolInput.HELD_FROM_WITHIN, 30),  # the gap is its beginning
        ([(0, 30)], SpoolInput.HELD_FROM_BEGIN, 10),
        ([(0, 30), (50, 70)], SpoolInput.CLOSES_GAP, 10),
        ([(20, 30), (50, 70)], SpoolInput.CLOSES_GAP, 20),
    ],
)
def test_the_input_that_an_inventory_gives(known, given_, end):
    assert compare(OURS, others(*known)) == (given_, end)


@pytest.mark.parametrize(
    ("head", "gaps", "expected"),
    [
        (0, [], (SpoolInput.HELD_FROM_BEGIN, 10)),
        (30, [], (SpoolInput.HELD_FROM_BEGIN, 10)),  # others may write where ours are
        (50, [(30, 50)], (SpoolInput.CLOSES_GAP, 10)),
        (60, [(30, 50)], (SpoolInput.CLOSES_GAP, 10)),
    ],
)
def test_bytes_before_the_head_that_nobody_else_has_are_a_gap(head, gaps, expected):
    known = others((0, 30))
    assert list(closed_gaps(OURS, known, head).gaps) == gaps
    assert compare(OURS, known, head) == expected
    assert closed_gaps(OURS, others((0, 50)), head=50).gaps == []


@pytest.mark.parametrize(
    ("differs_at", "expected"),
    [
        (None, (SpoolInput.NOT_HELD, 50)),
        (40, (SpoolInput.HELD_FROM_WITHIN, 40)),
        (10, (SpoolInput.OTHER_BYTES, 10)),
    ],
)
def test_a_spool_is_valid_up_to_the_last_gap_before_a_difference(differs_at, expected):
    closing = closed_gaps(OURS, others((0, 30), (40, 45), (50, 70)))
    assert closing.judge(OURS, differs_at) == expected


def test_a_spool_is_cut_behind_its_last_gap():
    closing = closed_gaps(OURS, others((0, 30), (40, 70)))
    assert closing.judge(OURS, None) == (SpoolInput.HELD_FROM_WITHIN, 40)


@pytest.mark.parametrize(
    ("known", "expected"), [([], True), ([(0, 49)], True), ([(0, 50)], False), ([(60, 70)], False)]
)
def test_a_spool_is_ahead_of_those_that_end_before_it(known, expected):
    assert is_ahead(OURS, others(*known)) is expected


SPANS = st.lists(
    st.tuples(st.integers(0, 70), st.integers(1, 30)).map(lambda at: (at[0], at[0] + at[1]))
)


@given(SPANS)
def test_gaps_are_what_only_we_have_before_what_others_have(spans):
    held = {at for begin, end in spans for at in range(begin, end)}
    last = max(held, default=0)
    closing = closed_gaps(OURS, others(*spans))
    gaps = {at for begin, end in closing.gaps for at in range(begin, end)}
    assert gaps == {at for at in range(10, 50) if at not in held and at < last}
    shared = {at for begin, end in closing.shared for at in range(begin, end)}
    last_gap = max(gaps, default=0)
    assert shared == {at for at in range(10, 50) if at in held and at < last_gap}
