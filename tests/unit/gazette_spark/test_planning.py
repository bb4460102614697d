"""Planning: content of journals to ranges, and filters to what they leave out."""

import datetime as dt
import random
import time
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    In,
    IsNotNull,
    LessThanOrEqual,
    StringStartsWith,
)

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_spark import planning
from gazette_spark.options import Options
from gazette_spark.planning import JournalContent, Piece, Pruning, admitted, ranges_of, tasks_of
from support.spark_stores import batch_rows, random_history, store_history

MIB = 1 << 20
OLD = 1_700_000_000


def content(*spans: tuple[int, int], mod_time: int = OLD, codec: int = pb.GZIP) -> JournalContent:
    spec = pb.JournalSpec(name="a/part")
    fragments = [
        pb.Fragment(
            journal="a/part", begin=begin, end=end, compression_codec=codec, mod_time=mod_time
        )
        for begin, end in spans
    ]
    return JournalContent(spec, 0, CoverSet(fragments))


def spans(found: JournalContent, pruning: Pruning | None = None, **given: str):
    options = Options.parse({"store": "file:///", "journals": "a/", **given})
    return [(part.begin, part.end) for part in ranges_of([found], options, pruning or Pruning())]


def test_adjacent_fragments_are_joined_to_ranges_of_tasks():
    found = content(*((i * 40 * MIB, (i + 1) * 40 * MIB) for i in range(7)))
    assert spans(found, isolation="uncommitted") == [
        (0, 120 * MIB),
        (120 * MIB, 240 * MIB),
        (240 * MIB, 280 * MIB),
    ]
    assert spans(found) == [(0, 280 * MIB)]


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([], []),
        ([1], [1]),
        ([1000] * 16, [1] * 16),
        ([1000] * 1000, [31] * 32 + [8]),  # 31 begins of 4 MiB, and their content, in 128 MiB
        ([12 * MIB] * 8, [1] * 8),
        ([200 * MIB, 1000, 1000, 200 * MIB], [1, 2, 1]),
        ([1000] * 8 + [120 * MIB] + [1000] * 8, [2] * 4 + [1] + [2] * 4),
    ],
)
def test_small_ranges_share_tasks(lengths: list[int], counts: list[int]):
    ranges = [
        planning.JournalRange(f"a/part-{at}", 0, length, "application/x-ndjson")
        for at, length in enumerate(lengths)
    ]
    tasks = tasks_of(ranges)
    assert [part for task in tasks for part in task.ranges] == ranges
    assert [len(task.ranges) for task in tasks] == counts


def test_overlapping_fragments_are_read_once_and_ranges_do_not_span_gaps():
    found = content((10, 30), (20, 50), (70, 90))
    assert spans(found, isolation="uncommitted") == [(10, 50), (70, 90)]
    options = Options.parse({"store": "file:///", "journals": "a/"})
    [part] = ranges_of([found], options, Pruning())
    assert (part.begin, part.end, part.gaps) == (10, 90, ((50, 70),))


def test_a_committed_range_ends_at_a_gap_that_may_still_be_filled():
    assert spans(content((10, 30), (50, 70), mod_time=int(time.time()))) == [(10, 30)]
    assert spans(content((10, 30), (50, 70), mod_time=0)) == [(10, 30)]


def test_offsets_bound_the_ranges():
    found = content((10, 30), (30, 50))
    begun = {"begin": '{"a/part": 20}', "end": '{"a/part": 40}'}
    assert spans(found, **begun) == spans(found, isolation="uncommitted", **begun) == [(20, 40)]
    assert spans(found, end='{"a/part": 10}') == []


def test_only_large_uncompressed_lines_are_split():
    large = [(0, 300 * MIB)]
    parts = spans(content(*large, codec=pb.NONE), isolation="uncommitted")
    assert parts[0][0] == 0
    assert parts[-1][1] == 300 * MIB
    assert len(parts) == 3
    assert spans(content(*large), isolation="uncommitted") == large
    binary = {"framing": "application/x-protobuf-fixed", "isolation": "uncommitted"}
    assert spans(content(*large, codec=pb.NONE), **binary) == large
    assert spans(content(*large, codec=pb.NONE)) == large


def test_the_parts_of_a_split_fragment_hold_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planning, "RANGE_BYTES", 500)
    history = random_history(random.Random(3), "a/part", 60)
    store_history(tmp_path, history, [20, len(history.messages)])
    rows = batch_rows(tmp_path, isolation="uncommitted")
    assert [row["n"] for row in rows] == [message.item for message in history.messages]


def test_filters_leave_out_journals_and_ranges():
    found = content(*((i * 120 * MIB, (i + 1) * 120 * MIB) for i in range(3)))
    read = {"isolation": "uncommitted"}

    def kept(*filters):
        return spans(found, Pruning.of(filters), **read)

    every = spans(found, **read)
    assert kept(IsNotNull(("_offset",)), EqualTo(("cents",), 3)) == every
    assert kept(EqualTo(("_journal",), "a/part")) == kept(In(("_journal",), ("a/part",))) == every
    assert kept(EqualTo(("_journal",), "a/other")) == []
    assert kept(StringStartsWith(("_journal",), "b/")) == []
    assert kept(GreaterThan(("_offset",), 130 * MIB)) == every[1:]
    assert kept(LessThanOrEqual(("_offset",), 130 * MIB)) == every[:2]
    assert kept(EqualTo(("_offset",), 130 * MIB)) == every[1:2]
    stored = dt.datetime.fromtimestamp(OLD, dt.UTC)
    assert kept(GreaterThan(("_time",), stored)) == every
    assert kept(GreaterThan(("_time",), stored + dt.timedelta(minutes=2))) == []


def test_filters_of_metadata_columns_of_other_types_leave_out_nothing():
    found = content(*((i * 120 * MIB, (i + 1) * 120 * MIB) for i in range(3)))
    every = spans(found, isolation="uncommitted")
    for given in (
        EqualTo(("_journal",), b"a/part"),
        In(("_journal",), (b"a/part", None)),
        GreaterThan(("_offset",), "130000000"),
        GreaterThan(("_offset",), float("nan")),
        LessThanOrEqual(("_offset",), float("nan")),
        LessThanOrEqual(("_offset",), None),
        LessThanOrEqual(("_offset",), False),
        GreaterThan(("_time",), dt.date(2030, 1, 1)),
        GreaterThan(("_time",), "2030-01-01"),
        GreaterThan(("_time",), None),
    ):
        assert spans(found, Pruning.of([given]), isolation="uncommitted") == every
    exact = Pruning.of([GreaterThan(("_offset",), Decimal("125829120.5"))])
    assert spans(found, exact, isolation="uncommitted") == every[1:]
    assert spans(found, Pruning.of([In(("_journal",), ("a/part", None))])) == spans(found)


# ------------------------------------------------------------------ admission


def pieces(*found: tuple[int, int, int]) -> list[Piece]:
    return [Piece(begin, end, pb.Fragment(mod_time=stored)) for begin, end, stored in found]


def test_journals_advance_together_in_the_order_of_storing_until_the_limit():
    unread = {
        "a": pieces((0, 100, 5), (100, 200, 9)),
        "b": pieces((50, 150, 7), (150, 170, 0)),
    }
    assert admitted(unread, None) == {"a": 200, "b": 170}
    assert admitted(unread, 1) == {"a": 100}
    assert admitted(unread, 100) == {"a": 100}
    assert admitted(unread, 101) == {"a": 100, "b": 150}
    assert admitted(unread, 201) == {"a": 200, "b": 150}
    assert admitted({"a": []}, 1) == {}


@pytest.mark.parametrize("option", ["begin", "end"])
def test_an_offset_of_a_journal_that_is_not_selected_is_refused(option):
    with pytest.raises(ConfigurationError, match=f"option '{option}' names b/part.*'a/'"):
        spans(content((0, 10)), **{option: '{"a/part": 3, "b/part": 5}'})
