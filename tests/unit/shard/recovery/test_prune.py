"""Pruning: what hints still need."""

from __future__ import annotations

from typing import Any

import pytest

from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.hints import Segment
from gazette_sdk.shard.recovery.log import PrunePlan, ShardHints, overlaps
from support.recovery_logs import hints, segment
from support.vectors import group

VECTORS = group("message", "prune")


def segment_of(first_offset: int, last_offset: int) -> Segment:
    return Segment(1, 1, first_offset, 0, 1, last_offset, "a/log")


def test_overlaps_are_those_of_the_vectors() -> None:
    group_ = VECTORS["overlap"]
    segments = [segment_of(*each) for each in group_["segments"]]
    for case in group_["cases"]:
        assert overlaps(*case["fragment"], segments) is case["expect_overlap"]
    segments.append(segment_of(*group_["with_extra_segment"]))
    for case in group_["cases_with_extra"]:
        assert overlaps(*case["fragment"], segments) is case["expect_overlap"]


def test_a_log_without_segments_keeps_everything() -> None:
    assert overlaps(0, 10, [])
    assert not PrunePlan().is_prunable("a/log", 0, 10)


def test_a_fragment_without_an_end_reaches_every_segment_behind_its_begin() -> None:
    assert overlaps(10, 0, [segment_of(50, 60)])
    assert not overlaps(60, 0, [segment_of(50, 60)])


@pytest.mark.parametrize("case", VECTORS["folding"], ids=lambda case: case["source"][-8:])
def test_hints_are_folded_as_the_vectors_say(case: dict[str, Any]) -> None:
    plan = PrunePlan()
    steps = case.get("steps") or [{"fold": each} for each in case["hints_in_order"]]
    for step in steps:
        plan.fold(hints(step["fold"]))
        if "expect" in step:
            assert plan.segments == expected(step["expect"])
    if "expect" in case:
        assert plan.segments == expected(case["expect"])
    for then in case.get("then", ()):
        begin, end = then["fragment"]
        assert plan.is_prunable("a/log", begin, end) is not then["expect_overlap"]


def expected(value: dict[str, list[dict[str, Any]]]) -> dict[str, list[Segment]]:
    return {log: [segment(each) for each in segments] for log, segments in value.items()}


def hints_at(first_offset: int, log: str = "a/log") -> pb.FSMHints:
    one = pb.Segment(
        author=1, first_seq_no=5, last_seq_no=6, first_offset=first_offset, last_offset=900
    )
    return pb.FSMHints(log=log, live_nodes=[pb.FnodeSegments(fnode=5, segments=[one])])


def test_the_oldest_hints_of_all_shards_are_the_horizon() -> None:
    plan = PrunePlan.of(
        [
            ShardHints("one", "a/log", [hints_at(300), hints_at(200)]),
            ShardHints("fork", "a/log", [hints_at(500)]),
            ShardHints("other", "b/log", [hints_at(700, "b/log")]),
        ]
    )
    assert plan.is_prunable("a/log", 0, 200)
    assert not plan.is_prunable("a/log", 0, 201)
    assert plan.is_prunable("b/log", 0, 700)
    assert not plan.kept


@pytest.mark.parametrize("missing", [None, pb.FSMHints(log="a/log")])
def test_a_shard_with_an_empty_slot_keeps_its_log(missing: pb.FSMHints | None) -> None:
    plan = PrunePlan.of(
        [
            ShardHints("one", "a/log", [hints_at(300), missing]),
            ShardHints("other", "b/log", [hints_at(700, "b/log")]),
        ]
    )
    assert not plan.is_prunable("a/log", 0, 1)
    assert "one" in plan.kept["a/log"]
    assert plan.is_prunable("b/log", 0, 700)
