"""The table of a commit's next steps: every end of a log, and every commit."""

from __future__ import annotations

import itertools

import pytest

from gazette_sdk.errors import GazetteError
from gazette_spark.transaction_log import (
    Action,
    Commit,
    Fate,
    LogTail,
    Record,
    WriterKind,
    decide,
    fate_of,
    line_of,
    parse_tail,
)

HEADER = {"log": 1}
DECIDED_3 = Record(3, "other", ("aa",), 9)
DECIDED_5 = Record(5, "other", ("bb",), 9)
OWN_5 = Record(5, "own", ("bb",), 9)
DONE_3 = {"done": 3, "clean": True}
DONE_5 = {"done": 5, "clean": True}
COMPLETING_5 = {"completing": 5}

LOGS = {
    "new": [],
    "header": [HEADER],
    "decided": [HEADER, DECIDED_3, DONE_3, DECIDED_5],
    "decided, own": [HEADER, DECIDED_3, DONE_3, OWN_5],
    "completing": [HEADER, DECIDED_3, DONE_3, DECIDED_5, COMPLETING_5],
    "completing, own": [HEADER, DECIDED_3, DONE_3, OWN_5, COMPLETING_5],
    "done": [HEADER, DECIDED_3, DONE_3, DECIDED_5, DONE_5],
    "done, own": [HEADER, DECIDED_3, DONE_3, OWN_5, DONE_5],
    "done, own before": [HEADER, Record(3, "own", (), 0), DONE_3, DECIDED_5, DONE_5],
    "completing, own before": [HEADER, Record(3, "own", (), 0), DONE_3, DECIDED_5, COMPLETING_5],
    "created": [HEADER, DONE_5],
    "header of a rival behind": [HEADER, DECIDED_3, DONE_3, OWN_5, HEADER],
}

STREAM, APP, UNNAMED = WriterKind
NUMBERS = {0: "first", 3: "earlier", 4: "unused", 5: "same", 6: "next", 7: "later"}
COMMITS = [(STREAM, n) for n in NUMBERS] + [(APP, n) for n in NUMBERS] + [(UNNAMED, None)]

H, D, A, C, R = Action.HEADER, Action.DECIDE, Action.ACKNOWLEDGE, Action.COMPLETE, Action.RETURN
GAP, RIVAL, OLD = Action.FAIL_GAP, Action.FAIL_RIVAL, Action.FAIL_OLD

# numbers of a stream, then of an application: 0, 3, 4, 5, 6, 7; then an unnamed writer.
# The log had reached the number when the tasks began.
TABLE = {
    "new": [H, H, H, H, H, H, H, H, H, H, H, H, H],
    "header": [D, GAP, GAP, GAP, GAP, GAP, D, D, D, D, D, D, D],
    "decided": [RIVAL, RIVAL, RIVAL, C, C, C, OLD, R, OLD, C, C, C, C],
    "decided, own": [A, A, A, A, A, A, A, A, A, A, A, A, A],
    "completing": [RIVAL, RIVAL, RIVAL, C, C, C, OLD, R, OLD, C, C, C, C],
    "completing, own": [RIVAL, RIVAL, RIVAL, C, C, C, OLD, R, OLD, C, C, C, C],
    "done": [RIVAL, RIVAL, RIVAL, R, D, GAP, OLD, R, OLD, R, D, D, D],
    "done, own": [RIVAL, RIVAL, RIVAL, R, D, GAP, OLD, R, OLD, R, D, D, R],
    "done, own before": [RIVAL, RIVAL, RIVAL, R, D, GAP, OLD, R, OLD, R, D, D, R],
    "completing, own before": [RIVAL, RIVAL, RIVAL, C, C, C, OLD, R, OLD, C, C, C, C],
    "created": [RIVAL, RIVAL, RIVAL, R, D, GAP, OLD, OLD, OLD, R, D, D, D],
    "header of a rival behind": [A, A, A, A, A, A, A, A, A, A, A, A, A],
}

_ = RIVAL
# The log had not reached the number when the tasks began.
MEANWHILE = {
    "new": TABLE["new"],
    "header": TABLE["header"],
    "decided": [_, _, _, _, C, C, _, _, _, _, C, C, C],
    "decided, own": TABLE["decided, own"],
    "completing": [_, _, _, _, C, C, _, _, _, _, C, C, C],
    "completing, own": [_, _, _, C, C, C, _, _, _, C, C, C, C],
    "done": [_, _, _, _, D, GAP, _, _, _, _, D, D, D],
    "done, own": [_, _, _, R, D, GAP, _, _, _, R, D, D, R],
    "done, own before": [_, _, _, _, D, GAP, _, R, _, _, D, D, R],
    "completing, own before": [_, _, _, _, C, C, _, R, _, _, C, C, C],
    "created": [_, _, _, _, D, GAP, _, _, _, _, D, D, D],
    "header of a rival behind": TABLE["header of a rival behind"],
}


def tail_of(entries: list, begin: int = 0) -> LogTail:
    return parse_tail("a/log", b"".join(map(line_of, entries)), begin)


def test_the_table_has_every_log_and_every_commit():
    assert set(TABLE) == set(LOGS)
    assert {len(row) for row in TABLE.values()} == {len(COMMITS)}
    assert set(MEANWHILE) == set(LOGS)
    assert {len(row) for row in MEANWHILE.values()} == {len(COMMITS)}


@pytest.mark.parametrize(("log", "index"), list(itertools.product(LOGS, range(len(COMMITS)))))
def test_the_next_step_is_that_of_the_table(log: str, index: int):
    kind, number = COMMITS[index]
    tail = tail_of(LOGS[log])
    assert decide(tail, Commit(kind, number, "own", is_repeated=True)) is TABLE[log][index]
    assert decide(tail, Commit(kind, number, "own")) is MEANWHILE[log][index]


def test_a_tail_knows_its_head_and_what_was_done_at_the_first_attempt():
    entries = LOGS["done"]
    tail = tail_of(entries, begin=100)
    assert tail.head == 100 + sum(len(line_of(entry)) for entry in entries)
    assert tail.clean == {3, 5}
    assert tail.last == DECIDED_5
    assert tail_of([*entries[:-1], {"done": 5, "clean": False}]).clean == {3}


@pytest.mark.parametrize(
    ("entries", "number", "since", "enough"),
    [
        ([HEADER], None, None, False),
        ([DONE_5], None, None, True),
        ([COMPLETING_5], None, None, False),
        ([DECIDED_5, COMPLETING_5], None, None, True),
        ([DECIDED_5, DONE_5], 5, None, True),
        ([DECIDED_5, DONE_5], 6, None, True),
        ([DECIDED_5, DONE_5], 4, None, False),
        ([DECIDED_3, DONE_3, DECIDED_5, DONE_5], 4, None, True),
        ([DONE_5], 5, None, False),
        ([DONE_5], 6, None, True),
        ([DECIDED_5, DONE_5], None, 100, True),
        ([DECIDED_5, DONE_5], None, 99, False),
    ],
)
def test_more_of_a_log_is_read_where_what_is_in_front_matters(entries, number, since, enough):
    assert tail_of(entries, begin=100).is_enough(number, since) is enough
    assert tail_of(entries).is_enough(number, since)


@pytest.mark.parametrize(
    ("number", "job", "intents", "log", "fate"),
    [
        (5, "", "bb", "done", Fate.ACKNOWLEDGED),
        (5, "", "zz", "done", Fate.LOST),
        (5, "", "bb", "decided", Fate.UNKNOWN),
        (5, "", "zz", "decided", Fate.LOST),
        (5, "", "bb", "completing", Fate.UNKNOWN),
        (6, "", "bb", "done", Fate.UNKNOWN),
        (4, "", "bb", "done", Fate.UNKNOWN),
        (None, "own", "bb", "done, own", Fate.ACKNOWLEDGED),
        (None, "own", "zz", "done, own", Fate.LOST),
        (None, "own", "bb", "done", Fate.UNKNOWN),
        (5, "", "bb", "new", Fate.UNKNOWN),
    ],
)
def test_the_fate_of_a_prepared_transaction_is_known_only_from_its_record(
    number, job, intents, log, fate
):
    assert fate_of(tail_of(LOGS[log]), number, job, intents) is fate


def test_what_was_acknowledged_twice_has_no_known_fate():
    tail = tail_of([HEADER, DECIDED_5, {"done": 5, "clean": False}])
    assert fate_of(tail, 5, "", "bb") is Fate.UNKNOWN


@pytest.mark.parametrize("line", [b"hello\n", b'{"UUID":"x"}\n', b"[]\n", b'{"decided":"5"}\n'])
def test_a_journal_that_is_no_log_is_refused_by_its_name(line: bytes):
    with pytest.raises(GazetteError, match="a/log has a line that is none of a transaction log"):
        parse_tail("a/log", line_of(HEADER) + line, 0)
