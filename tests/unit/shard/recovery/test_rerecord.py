"""When files are recorded anew, and when hints are due."""

from __future__ import annotations

from gazette_sdk.shard.recovery.fsm import LiveNode
from gazette_sdk.shard.recovery.hints import Segment
from gazette_sdk.shard.recovery.recorder import HintsSchedule, LogUsage

MIB = 1 << 20


def node(size_bytes: int, *extents: tuple[str, int, int]) -> LiveNode:
    segments = [
        Segment(author, 1, begin, 0, 1, end, log)
        for author, (log, begin, end) in enumerate(extents, start=1)
    ]
    return LiveNode({"/path"}, segments, size_bytes)


def test_overlapping_extents_count_once() -> None:
    usage = LogUsage(
        {
            1: node(10, ("a", 0, 100)),
            2: node(10, ("a", 50, 150), ("a", 300, 400)),
            3: node(10, ("a", 60, 70), ("b", 0, 5)),
        }
    )
    assert usage.bytes_read == 150 + 100 + 5
    assert usage.bytes_live == 30


def test_a_segment_without_an_end_counts_nothing() -> None:
    assert LogUsage({1: node(10, ("a", 70, 0))}).bytes_read == 0


def test_nothing_is_recorded_anew_while_reading_costs_little() -> None:
    assert LogUsage({1: node(MIB, ("a", 0, 5 * MIB // 2))}).oldest_wasteful() is None


def test_the_oldest_file_that_spans_foreign_content_is_recorded_anew() -> None:
    nodes = {
        3: node(7 * MIB, ("a", 0, 7 * MIB + 100)),
        5: node(1, ("a", 8 * MIB, 60 * MIB)),
        4: node(1, ("a", 7 * MIB, 60 * MIB)),
    }
    usage = LogUsage(nodes)
    assert usage.oldest_wasteful() == 4
    nodes[4].links.clear()
    del nodes[4]
    usage.recorded(4, "a", 60 * MIB, 60 * MIB + 30)
    assert usage.oldest_wasteful() == 5


def test_an_author_that_goes_on_begins_another_extent() -> None:
    nodes = {1: node(10, ("a", 0, 100))}
    usage = LogUsage(nodes)
    nodes[1].segments.append(Segment(9, 8, 1000, 0, 8, 0, "a"))
    usage.recorded(1, "a", 1000, 1010)
    usage.recorded(1, "a", 1020, 1050)
    assert usage.bytes_read == 100 + 50


def test_hints_are_due_by_time_growth_and_idleness() -> None:
    schedule = HintsSchedule(now=0.0, write_head=100)

    def is_due(now: float, grown: int, live: int = 0, *, is_idle: bool = False) -> bool:
        return schedule.is_due(now, 100 + grown, live, is_idle=is_idle)

    assert not is_due(1000.0, 0)
    assert not is_due(1000.0, 0, is_idle=True)
    assert not is_due(299.0, 1)
    assert is_due(300.0, 1)
    assert not is_due(6.0, 16 * MIB - 1)
    assert is_due(6.0, 16 * MIB)
    assert not is_due(4.0, 16 * MIB)
    assert not is_due(6.0, 16 * MIB, 64 * MIB)
    assert is_due(6.0, 32 * MIB, 64 * MIB)
    assert not is_due(4.0, 1, is_idle=True)
    assert is_due(5.0, 1, is_idle=True)
    schedule.stored(5.0, 101)
    assert not is_due(305.0, 1)
    assert is_due(305.0, 2)
