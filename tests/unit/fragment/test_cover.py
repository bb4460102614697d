from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.fragment import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb
from support.vectors import cases

OFFSETS = st.integers(0, 60)
SPANS = st.tuples(OFFSETS, OFFSETS).map(sorted).map(tuple)


def cover(spans):
    return CoverSet(pb.Fragment(begin=begin, end=end) for begin, end in spans)


def spans(of):
    return [(fragment.begin, fragment.end) for fragment in of]


@pytest.mark.parametrize("case", cases("broker", "cover_set_add"))
def test_adding_follows_the_vectors(case):
    made = CoverSet()
    for add in case["adds"]:
        changed = made.add(pb.Fragment(begin=add["begin"], end=add["end"]))
        assert changed == add["updated"], add
    assert spans(made) == [tuple(span) for span in case["expect"]]


@pytest.mark.parametrize("case", cases("broker", "cover_set_longest_overlap"))
def test_the_longest_overlap_follows_the_vectors(case):
    found = cover(case["set"]).longest_overlap(case["offset"])
    assert found == (case["index"], case["found"])


@pytest.mark.parametrize("case", cases("broker", "cover_set_difference"))
def test_the_difference_follows_the_vectors(case):
    left = CoverSet.difference(cover(case["a"]), cover(case["b"]))
    assert spans(left) == [tuple(span) for span in case["expect"]]


@pytest.mark.parametrize("case", cases("broker", "cover_set_bounds"))
def test_the_bounds_follow_the_vectors(case):
    made = cover(case["adds"])
    assert (made.begin, made.end) == (case["begin"], case["end"])


def test_a_fragment_of_the_same_span_replaces_the_one_before():
    made = CoverSet([pb.Fragment(begin=1, end=5, mod_time=1)])
    assert made.add(pb.Fragment(begin=1, end=5, mod_time=2))
    assert [fragment.mod_time for fragment in made] == [2]


def test_dropping_all_shadowed_entries_at_the_end():
    made = cover([(0, 10), (10, 20), (20, 30), (30, 40)])
    assert made.add(pb.Fragment(begin=5, end=50))
    assert spans(made) == [(0, 10), (5, 50)]


def test_a_gap_of_one_byte_is_no_cover():
    assert not cover([(0, 10), (11, 20)]).covers(5, 15)
    assert cover([(0, 10), (10, 20)]).covers(5, 15)
    assert cover([]).covers(5, 5)


def test_it_is_a_sequence_with_copies_of_its_own():
    made = cover([(0, 5), (5, 9)])
    copied = made.copy()
    assert copied == made
    copied.add(pb.Fragment(begin=9, end=12))
    assert len(made) == 2
    assert spans(copied[1:]) == [(5, 9), (9, 12)]
    assert copied[-1].end == 12
    assert copied != made
    assert made != [1]
    assert made.first_from(1) == 1
    assert repr(made) == "CoverSet([0, 5), [5, 9))"


@given(st.lists(SPANS, max_size=40))
def test_no_fragment_lies_inside_of_another_and_no_byte_is_lost(given_spans):
    made = cover(given_spans)
    kept = spans(made)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(kept))
    held = {offset for begin, end in given_spans for offset in range(begin, end)}
    assert {offset for begin, end in kept for offset in range(begin, end)} == held


@given(st.lists(SPANS, max_size=30), SPANS)
def test_adding_changes_nothing_but_what_it_says(given_spans, span):
    made = cover(given_spans)
    before = spans(made)
    changed = made.add(pb.Fragment(begin=span[0], end=span[1]))
    if changed:
        assert span in spans(made)
        assert [s for s in before if s not in spans(made)] == [
            s for s in before if s != span and span[0] <= s[0] and s[1] <= span[1]
        ]
    else:
        assert spans(made) == before
        assert span[0] == span[1] or any(s[0] <= span[0] and span[1] <= s[1] for s in before)


@given(st.lists(SPANS, max_size=30), OFFSETS)
def test_the_longest_overlap_is_the_best_of_all(given_spans, offset):
    made = cover(given_spans)
    index, found = made.longest_overlap(offset)
    holding = [s for s in spans(made) if s[0] <= offset < s[1]]
    assert found == bool(holding)
    if found:
        assert spans(made)[index] == max(holding, key=lambda s: s[1])
    else:
        later = [s for s in spans(made) if s[0] > offset]
        assert spans(made)[index : index + 1] == later[:1]


@given(st.lists(SPANS, max_size=20), st.lists(SPANS, max_size=20))
def test_the_difference_leaves_what_is_not_held_byte_by_byte(left, right):
    a, b = cover(left), cover(right)
    held = {offset for begin, end in spans(b) for offset in range(begin, end)}
    expect = [s for s in spans(a) if not set(range(*s)) <= held]
    assert spans(CoverSet.difference(a, b)) == expect
