"""Segments, and sets of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.shard.recovery.hints import Segment, SegmentSet, merge
from support.recovery_logs import segment
from support.vectors import group

VECTORS = group("message", "segments")


def segments(values: list[dict[str, Any]]) -> list[Segment]:
    return [segment(value) for value in values]


def test_a_valid_segment_is_accepted() -> None:
    valid = VECTORS["validation"]["valid"]
    segment(valid).validate()
    segment({**valid, "last_offset": 0}).validate()


@pytest.mark.parametrize("case", VECTORS["validation"]["cases"])
def test_a_malformed_segment_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        segment({**VECTORS["validation"]["valid"], **case["set"]}).validate()
    if "error" in case:
        assert case["error"] in str(caught.value)


def test_the_last_offset_is_behind_the_first() -> None:
    with pytest.raises(ValidationError, match="LastOffset"):
        segment({**VECTORS["validation"]["valid"], "first_offset": 9, "last_offset": 9}).validate()


@pytest.mark.parametrize("case", VECTORS["reduce"]["cases"], ids=lambda case: case["name"])
def test_two_segments_merge_alike_in_any_order(case: dict[str, Any]) -> None:
    a, b = segment(case["a"]), segment(case["b"])
    for left, right in ((a, b), (b, a)):
        if "expect" in case:
            assert merge(left, right) == segment(case["expect"])
        elif case["error"] == "not reducible":
            assert merge(left, right) is None
        else:
            with pytest.raises(ValidationError, match=case["error"]):
                merge(left, right)


@pytest.mark.parametrize("case", VECTORS["set_add"], ids=lambda case: case["name"])
def test_segments_are_added_in_any_order(case: dict[str, Any]) -> None:
    for order in itertools.permutations(segments(case["add_in_any_order"])):
        found = SegmentSet(segments(case["initial"]))
        for added in order:
            found.add(added)
        assert list(found) == segments(case["expect"])


@pytest.mark.parametrize("case", VECTORS["set_add_errors"]["cases"])
def test_a_contradiction_is_refused_and_changes_nothing(case: dict[str, Any]) -> None:
    found = SegmentSet(segments(VECTORS["set_add_errors"]["initial"]))
    with pytest.raises(ValidationError) as caught:
        found.add(segment(case["add"]))
    assert str(caught.value).startswith(case["error_prefix"])
    assert list(found) == segments(VECTORS["set_add_errors"]["initial"])


@pytest.mark.parametrize("case", VECTORS["intersect"]["cases"])
def test_segments_with_content_in_a_range_are_found(case: dict[str, Any]) -> None:
    all_segments = segments(VECTORS["intersect"]["set"])
    begin, end = case["expect_index_range"]
    found = SegmentSet(all_segments).intersect(case["first_offset"], case["last_offset"])
    assert found == all_segments[begin:end]
