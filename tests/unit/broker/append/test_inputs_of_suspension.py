from __future__ import annotations

import itertools

import pytest

from gazette_sdk.broker.append.machine import (
    Suspension,
    is_dirty,
    judge_suspension,
    may_carry_content,
)
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import journal_spec

Level = pb.JournalSpec.Suspend
Mode = pb.AppendRequest
NOW = 1_700_000_000.0
OLD = int(NOW) - 25 * 3600


def judge(level, mode, *, empty=False, mod_time=OLD, head=1024):
    spec = journal_spec("a/journal")
    spec.suspend.level = level
    return judge_suspension(
        spec, mode, head=head, index_is_empty=empty, index_mod_time=mod_time, now=NOW
    )


@pytest.mark.parametrize("level", [Level.PARTIAL, Level.FULL])
def test_resume_writes_level_none_at_the_head(level):
    found = judge(level, Mode.SUSPEND_RESUME)
    assert found == Suspension(write=Level(level=Level.NONE, offset=1024))


@pytest.mark.parametrize("level", [Level.NONE, Level.PARTIAL, Level.FULL])
def test_no_resume_is_refused_by_any_suspension(level):
    assert judge(level, Mode.SUSPEND_NO_RESUME).refused == (level != Level.NONE)


@pytest.mark.parametrize("level", [Level.NONE, Level.PARTIAL, Level.FULL])
def test_keep_changes_nothing(level):
    assert judge(level, Mode.SUSPEND_KEEP) == Suspension()


@pytest.mark.parametrize(
    ("mode", "level"),
    list(
        itertools.product([Mode.SUSPEND_IF_FLUSHED, Mode.SUSPEND_NOW], [Level.NONE, Level.PARTIAL])
    ),
)
def test_an_empty_index_is_suspended_fully(mode, level):
    found = judge(level, mode, empty=True, mod_time=0)
    assert found == Suspension(write=Level(level=Level.FULL, offset=1024))


@pytest.mark.parametrize(
    ("mode", "mod_time", "suspends"),
    [
        (Mode.SUSPEND_NOW, 0, True),
        (Mode.SUSPEND_IF_FLUSHED, 0, False),
        (Mode.SUSPEND_IF_FLUSHED, int(NOW) - 3600, False),
        (Mode.SUSPEND_IF_FLUSHED, OLD, True),
    ],
)
def test_a_journal_with_content_is_suspended_partially_when_it_is_flushed_or_forced(
    mode, mod_time, suspends
):
    found = judge(Level.NONE, mode, mod_time=mod_time)
    if suspends:
        assert found == Suspension(
            write=Level(level=Level.PARTIAL, offset=1024), close_fragment=True
        )
    else:
        assert found == Suspension()


@pytest.mark.parametrize("mode", [Mode.SUSPEND_IF_FLUSHED, Mode.SUSPEND_NOW])
def test_a_suspended_journal_goes_on_to_answer_suspended(mode):
    assert judge(Level.PARTIAL, mode) == Suspension(is_suspended=True)


def test_the_flush_interval_says_how_old_is_flushed():
    spec = journal_spec("a/journal", flush_interval_s=60)
    assert is_dirty(spec, int(NOW) - 59, NOW)
    assert not is_dirty(spec, int(NOW) - 61, NOW)
    assert is_dirty(spec, 0, NOW)


def test_only_resume_and_no_resume_carry_content():
    assert [may_carry_content(mode) for mode in sorted(Mode.Suspend.values())] == [
        True,
        True,
        False,
        False,
        False,
    ]
