"""Records of a transaction log, and the decision over the next step of a commit. Pure.

A transaction log is a journal of one writer. Its lines are JSON objects, each appended only if the
log ends where it was last read:

- ``{"log": 1}``: header, of which several may stand there
- ``{"decided": 7, "job": "…", "intents": ["…"], "rows": 3}``: transaction 7 is decided. Its
  messages are visible to committed readers, or will be, when its intents are written
- ``{"completing": 7}``: another commit than that which decided 7 begins to write its intents
- ``{"done": 7, "clean": true}``: they are written. ``clean``: each by one attempt only, so that
  the producers of the transaction may be used again

=========== ==================== ================= ================= =================
log ends    number wanted        stream            application       unnamed writer
=========== ==================== ================= ================= =================
new         any                  HEADER            HEADER            HEADER
header      first                DECIDE            DECIDE            DECIDE
header      later                FAIL_GAP          DECIDE
decided     own job              ACKNOWLEDGE       ACKNOWLEDGE       ACKNOWLEDGE
decided     the same, or later   COMPLETE          COMPLETE          COMPLETE
completing  the same, or later   COMPLETE          COMPLETE          COMPLETE
done        the same, or own job RETURN            RETURN            RETURN
done        the next             DECIDE            DECIDE            DECIDE
done        later                FAIL_GAP          DECIDE
any         earlier              FAIL_RIVAL        RETURN, FAIL_OLD  RETURN
=========== ==================== ================= ================= =================

A number that the log has reached is that of a repeated transaction: the log had reached it before
the first task began. Otherwise another driver has written the same number at the same time, and the
action is FAIL_RIVAL, unless the record is that of this commit.

An earlier number of an application is that of a transaction which is decided, or of one which never
was. An unnamed writer has no numbers of its own: it takes the next, and finds its own record by its
job, also in front of others.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gazette_sdk.errors import GazetteError

__all__ = [
    "HEADER",
    "Action",
    "Commit",
    "Fate",
    "LogTail",
    "Record",
    "WriterKind",
    "decide",
    "fate_of",
    "line_of",
    "parse_tail",
]

HEADER = {"log": 1}
"""First line of a log. An append at offset 0 would have no condition."""


class WriterKind(enum.Enum):
    """Kind of a writer, which says where the numbers of its transactions come from."""

    STREAM = "the micro-batches of a streaming query: successive"
    APPLICATION = "txnVersion of a batch write: ascending"
    UNNAMED = "the log: the next number"


class LastLine(enum.Enum):
    """State of a log, by its last line."""

    NEW = "the log is empty"
    HEADER = "nothing was decided"
    DECIDED = "a transaction is decided"
    COMPLETING = "another commit than its own writes the intents"
    DONE = "its intents are written"


class Action(enum.Enum):
    """Next step of a commit."""

    HEADER = "append the header, then look again"
    DECIDE = "append the record, then look again"
    ACKNOWLEDGE = "write the intents of our record, append `done`, then look again"
    COMPLETE = "write the intents of another's record, append `done`, then look again"
    RETURN = "nothing: the transaction is done"
    FAIL_GAP = "fail: transactions between the last one and this one are missing"
    FAIL_RIVAL = "fail: another driver is ahead, or has written the same number meanwhile"
    FAIL_OLD = "fail: the number is smaller than the last one, and was never used"


class Fate(enum.Enum):
    """Fate of a prepared transaction, as far as the log tells."""

    ACKNOWLEDGED = "its intents are written, once"
    LOST = "its intents will never be written"
    UNKNOWN = "its intents may be written, or written again"


@dataclass(frozen=True, slots=True)
class Record:
    """Decided transaction of a log.

    Attributes:
        number: its number.
        job: id of the commit that decided it.
        intents: base64 of the acknowledgement intents of each task.
        rows: number of its messages.
    """

    number: int
    job: str
    intents: tuple[str, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Transaction that a writer wants to be decided and acknowledged.

    Attributes:
        kind: kind of the writer.
        number: number of the transaction; None for an unnamed writer.
        job: id of this commit, which no other has.
        is_repeated: the log had reached the number when the first of its tasks began.
    """

    kind: WriterKind
    number: int | None
    job: str
    is_repeated: bool = False


@dataclass(slots=True)
class LogTail:
    """The last lines of a log.

    Attributes:
        head: offset behind them.
        begin: offset of the first one.
        last_line: what the last line says.
        number: number of the last transaction; None if there is none.
        records: decided transactions by number.
        clean: numbers whose acknowledgements were written once.
    """

    head: int
    begin: int
    last_line: LastLine = LastLine.NEW
    number: int | None = None
    records: dict[int, Record] = field(default_factory=dict)
    clean: set[int] = field(default_factory=set)

    @property
    def last(self) -> Record:
        """Return the last decided transaction."""
        assert self.number is not None
        return self.records[self.number]

    @property
    def is_undone(self) -> bool:
        """Return True if the last transaction is decided, and not done."""
        return self.last_line in {LastLine.DECIDED, LastLine.COMPLETING}

    def has_reached(self, number: int | None) -> bool:
        """Return True if a transaction of this number, or a later one, is decided."""
        return number is not None and self.number is not None and number <= self.number

    def is_enough(self, number: int | None, since: int | None = None) -> bool:
        """Return True if nothing in front of these lines matters.

        Args:
            number: a number to look for; None for the last one.
            since: an offset; records behind it matter.
        """
        if self.begin == 0:
            return True
        if self.number is None or (self.is_undone and self.number not in self.records):
            return False
        oldest = min(self.records, default=self.number + 1)
        if number is not None and number <= self.number and number < oldest:
            return False
        return since is None or self.begin <= since


def parse_tail(journal: str, content: bytes, begin: int) -> LogTail:
    """Read the last lines of a log.

    Args:
        journal: the log's name, for errors.
        content: whole lines.
        begin: offset of the first one.

    Raises:
        GazetteError: a line is no line of a log.
    """
    tail = LogTail(head=begin + len(content), begin=begin)
    for line in content.splitlines():
        try:
            _add(tail, json.loads(line))
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise GazetteError(
                f"{journal} has a line that is none of a transaction log ({line[:80]!r}): give the"
                " option transactionLog a prefix of journals which nothing else writes",
                journal=journal,
            ) from error
    return tail


def _add(tail: LogTail, line: dict[str, Any]) -> None:
    match line:
        case {"decided": int(number), "job": str(job), "intents": list(intents), "rows": int(rows)}:
            tail.records[number] = Record(number, job, tuple(intents), rows)
            tail.number, tail.last_line = number, LastLine.DECIDED
        case {"completing": int(number)}:
            tail.number, tail.last_line = number, LastLine.COMPLETING
        case {"done": int(number), "clean": bool(is_clean)}:
            tail.number, tail.last_line = number, LastLine.DONE
            if is_clean:
                tail.clean.add(number)
        case {"log": 1}:
            if tail.last_line is LastLine.NEW:
                tail.last_line = LastLine.HEADER
        case _:
            raise ValueError(line)


def line_of(entry: Record | dict[str, Any]) -> bytes:
    """Return the line of a record, or of another entry."""
    if isinstance(entry, Record):
        entry = {
            "decided": entry.number,
            "job": entry.job,
            "intents": entry.intents,
            "rows": entry.rows,
        }
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def decide(tail: LogTail, commit: Commit) -> Action:
    """Return the next step of a commit."""
    if tail.last_line is LastLine.NEW:
        return Action.HEADER
    if tail.number is None:
        is_late = commit.kind is WriterKind.STREAM and commit.number != 0
        return Action.FAIL_GAP if is_late else Action.DECIDE
    if tail.last_line is LastLine.DECIDED and tail.last.job == commit.job:
        return Action.ACKNOWLEDGE
    if commit.number is None:
        return _decide_unnamed(tail, commit.job)
    if tail.has_reached(commit.number):
        return _decide_reached(tail, commit)
    return _decide_later(tail, commit.kind, commit.number - tail.number)


def _decide_later(tail: LogTail, kind: WriterKind, distance: int) -> Action:
    if tail.is_undone:
        return Action.COMPLETE
    return Action.FAIL_GAP if kind is WriterKind.STREAM and distance > 1 else Action.DECIDE


def _decide_unnamed(tail: LogTail, job: str) -> Action:
    if tail.is_undone:
        return Action.COMPLETE
    own = any(record.job == job for record in tail.records.values())
    return Action.RETURN if own else Action.DECIDE


def _decide_reached(tail: LogTail, commit: Commit) -> Action:
    """Return the next step of a commit whose number is that of the last transaction, or earlier."""
    assert commit.number is not None
    record = tail.records.get(commit.number)
    is_own = record is not None and record.job == commit.job
    if not is_own and not commit.is_repeated:
        return Action.FAIL_RIVAL
    if commit.number == tail.number:
        return Action.COMPLETE if tail.is_undone else Action.RETURN
    if commit.kind is WriterKind.STREAM:
        return Action.FAIL_RIVAL
    return Action.FAIL_OLD if record is None else Action.RETURN


def fate_of(tail: LogTail, number: int | None, job: str, intents: str) -> Fate:
    """Return the fate of a task's prepared transaction.

    Args:
        tail: the last lines of its writer's log.
        number: its number; None for an unnamed writer.
        job: id of its commit; of no matter where there is a number.
        intents: base64 of its intents.
    """
    record = _record_of(tail.records.values(), number, job)
    if record is None:
        return Fate.UNKNOWN
    if intents not in record.intents:
        return Fate.LOST
    return Fate.ACKNOWLEDGED if record.number in tail.clean else Fate.UNKNOWN


def _record_of(records: Iterable[Record], number: int | None, job: str) -> Record | None:
    for record in records:
        if record.number == number or (number is None and record.job == job):
            return record
    return None
