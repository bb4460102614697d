"""Transaction log of a writer: what it has decided, in a journal of its own.

Every line is appended with the offset at which the log was seen to end. If that is not its end any
more, somebody else wrote, or an earlier attempt did, and the log is looked at again.

Its lines are JSON objects, each appended only if the log ends where it was last read:

- ``{"log": 1}``: header, of which several may stand there
- ``{"decided": 7, "job": "…", "intents": ["…"], "rows": 3}``: transaction 7 is decided. Its
  messages are visible to committed readers, or will be, when its intents are written
- ``{"completing": 7}``: another commit than that which decided 7 begins to write its intents
- ``{"done": 7, "clean": true}``: they are written. ``clean``: each by one attempt only, so that
  the producers of the transaction may be used again

The next step of a commit is a pure decision:

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

import asyncio
import base64
import enum
import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from gazette_sdk.errors import (
    CallError,
    ConfigurationError,
    DeliveryTimeoutError,
    GazetteError,
    JournalNotFoundError,
    UnauthenticatedError,
    WrongAppendOffsetError,
)
from gazette_sdk.journals import Journals
from gazette_sdk.message import AckIntents
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import MANAGED_BY
from gazette_sdk.retries import pause, pause_append
from gazette_sdk.transport import Transport
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.journal_reader import OffsetJumpError, RetryReader
from gazette_sdk.transport.listing import list_journals

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
    """Fate of a prepared transaction, as far as the log has it."""

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
        head: offset after them.
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
            since: an offset; records after it matter.
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


logger = logging.getLogger(__name__)

MANAGER = "gazette-spark"
"""Value of the label ``managed-by`` of logs."""

WINDOW_BYTES = 64 << 10
"""The end of the log that is read first. What matters is usually its last line."""

TIMEOUT_S = 120.0
"""Bound of an append or a read, in seconds, as of messages of a Publisher."""

ACKNOWLEDGED_AT_ONCE = 32
"""Journals whose acknowledgements are written at the same time."""

NOT_FOUND_ATTEMPTS_MAX = 5
"""A journal that was just created may not be known to its broker yet."""


def intents_text(intents: AckIntents) -> str:
    """Return intents as the text of a record."""
    return base64.b64encode(intents.to_bytes()).decode()


def intents_of(text: str) -> AckIntents:
    """Return the intents of the text of a record."""
    return AckIntents.from_bytes(base64.b64decode(text))


@dataclass(frozen=True, slots=True)
class _Written:
    """Outcome of an append: offset after it, and whether there was one attempt only."""

    end: int
    is_clean: bool


class TransactionLog:
    """Transaction log of one writer. Its methods are coroutines, of any event loop.

    Args:
        transport: how to reach the cluster.
        journal: name of the log.
        selector: label selector of the journals that the writer writes; a new log is made like
            the first of them.

    Attributes:
        journal: name of the log.
    """

    def __init__(self, transport: Transport, journal: str, selector: str) -> None:
        self._transport = transport
        self.journal = journal
        self._selector = selector

    async def commit(self, commit: Commit, intents: Collection[str], rows: int) -> None:
        """Decide a transaction and acknowledge it, unless that is done.

        Transactions that are decided are completed first. Returns when the transaction of this
        number is acknowledged, be it this one or another of the same number.

        Args:
            commit: the transaction.
            intents: text of the intents of each of its tasks.
            rows: number of its messages.

        Raises:
            GazetteError: another driver is ahead, or has written the same number meanwhile;
                earlier transactions are missing; or a call failed. What is decided then is
                completed by the next commit.
        """
        since: int | None = None
        attempts = 0
        while True:
            tail = await self._look(commit.number, since)
            since = tail.head if since is None else since
            match decide(tail, commit):
                case Action.HEADER:
                    await self._append_line(0, HEADER)
                case Action.DECIDE:
                    number = _next_number(tail) if commit.number is None else commit.number
                    await self._append_line(
                        tail.head, Record(number, commit.job, tuple(intents), rows)
                    )
                case Action.ACKNOWLEDGE:
                    attempts += 1
                    is_clean = await self.acknowledge(tail.last) and attempts == 1
                    await self._append_line(tail.head, {"done": tail.number, "clean": is_clean})
                case Action.COMPLETE:
                    await self._complete(tail)
                case Action.RETURN:
                    return
                case failure:
                    raise self._failure(failure, tail, commit)

    async def complete(self) -> int | None:
        """Complete the last transaction, if it is decided and not done.

        Returns:
            Its number; None if there is nothing to complete.
        """
        completed = None
        while (tail := await self.read()) and tail.is_undone:
            completed = tail.number
            await self._complete(tail)
        return completed

    async def create(self, after: int) -> None:
        """Create the log of a stream whose log is lost, or which had another sink before.

        Args:
            after: number of the last micro-batch that is done.

        Raises:
            ConfigurationError: the log has records.
        """
        while True:
            tail = await self._look(after, None)
            if tail.number == after and not tail.records:
                return
            if tail.number is not None:
                raise ConfigurationError(
                    f"{self.journal} has records, the last of transaction {tail.number}; delete"
                    " the journal first, if you are sure that nobody needs it"
                )
            entry = {"done": after, "clean": False} if tail.head else HEADER
            await self._append_line(tail.head, entry)

    async def read(
        self, number: int | None = None, since: int | None = None, *, bytes_max: int | None = None
    ) -> LogTail:
        """Return the end of the log, which is appended to by no one at this moment.

        Args:
            number: a transaction to look for; None for the last one.
            since: an offset, after which all records are returned.
            bytes_max: bound of the search for the number; None for none.

        Raises:
            JournalNotFoundError: there is no log.
            GazetteError: it cannot be read.
        """
        barrier = await self._append(self.journal, b"")
        window = WINDOW_BYTES
        while True:
            tail = await self._read_window(max(0, barrier.end - window), barrier.end)
            is_far = bytes_max is not None and window >= bytes_max
            if tail.is_enough(None if is_far else number, since):
                return tail
            window *= 4

    async def acknowledge(self, record: Record) -> bool:
        """Write the intents of a record, those of a journal at once.

        Returns:
            True if each was written by one attempt.
        """
        frames: dict[str, bytearray] = defaultdict(bytearray)
        for text in record.intents:
            for journal, frame in intents_of(text).items():
                frames[journal] += frame
        limit = asyncio.Semaphore(ACKNOWLEDGED_AT_ONCE)

        async def write(journal: str, content: bytes) -> bool:
            async with limit:
                for attempt in range(NOT_FOUND_ATTEMPTS_MAX):
                    try:
                        return (await self._append(journal, content)).is_clean
                    except JournalNotFoundError:
                        await pause(attempt)
            logger.warning(
                "%s was deleted: messages of transaction %s of %s that were written to it are gone",
                journal,
                record.number,
                self.journal,
            )
            return True

        written = await asyncio.gather(
            *(write(journal, bytes(content)) for journal, content in frames.items()),
            return_exceptions=True,
        )
        for outcome in written:
            if isinstance(outcome, BaseException):
                outcome.add_note(
                    f"Transaction {record.number} of {self.journal} is decided, and not"
                    " acknowledged everywhere; the next commit of its writer completes it."
                )
                raise outcome
        return all(written)

    # ------------------------------------------------------------------ steps

    async def _look(self, number: int | None, since: int | None) -> LogTail:
        """Return the end of the log, which is created if there is none."""
        for attempt in range(NOT_FOUND_ATTEMPTS_MAX):
            try:
                return await self.read(number, since)
            except JournalNotFoundError:
                await self._create_journal()
                await pause(attempt)
        return await self.read(number, since)

    async def _complete(self, tail: LogTail) -> None:
        head: int | None = tail.head
        if tail.last_line is LastLine.DECIDED:
            head = await self._append_line(tail.head, {"completing": tail.number})
        if head is not None:
            await self.acknowledge(tail.last)
            await self._append_line(head, {"done": tail.number, "clean": False})

    async def _append_line(self, head: int, entry: Record | dict[str, Any]) -> int | None:
        """Append a line if the log ends at ``head``; return its new end, None if it does not."""
        try:
            return (await self._append(self.journal, line_of(entry), offset=head)).end
        except WrongAppendOffsetError:
            return None

    async def _append(self, journal: str, content: bytes, *, offset: int = 0) -> _Written:
        attempts = 1
        refused = ""

        async def again(attempt: int) -> None:
            nonlocal attempts
            attempts += 1
            await pause_append(attempt)

        request = pb.AppendRequest(journal=journal, offset=offset)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    try:
                        response = await append(self._transport, request, [content], pause=again)
                    except UnauthenticatedError:
                        raise
                    except CallError as error:  # brokers that stop refuse appends so
                        refused = f"; the last one: {error}"
                        await again(attempts)
                    else:
                        return _Written(response.commit.end, is_clean=attempts == 1)
        except TimeoutError:
            raise DeliveryTimeoutError(
                f"{journal}: no append succeeded within {TIMEOUT_S:g} s{refused}; check the brokers"
                " with `gazctl journals list`, and start the job again",
                journal=journal,
            ) from None

    async def _read_window(self, begin: int, end: int) -> LogTail:
        """Return the whole lines between two offsets, of which the second ends a line."""
        if begin == end:
            return parse_tail(self.journal, b"", begin)
        request = pb.ReadRequest(journal=self.journal, offset=begin, end_offset=end, block=True)
        pieces: list[bytes] = []
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                aclosing(RetryReader(self._transport, request)) as reader,
            ):
                while (piece := await reader.read()) is not None:
                    pieces.append(piece)
        except TimeoutError:
            raise DeliveryTimeoutError(
                f"{self.journal}: not read within {TIMEOUT_S:g} s; check the brokers with `gazctl"
                " journals list`, and start the job again",
                journal=self.journal,
            ) from None
        except OffsetJumpError as jump:
            raise GazetteError(
                f"{self.journal}: content at offset {begin} is gone ({jump}); a transaction log"
                " may have no retention: bring its fragments back, or let the writer begin another"
                " log with another transactionLog",
                journal=self.journal,
                offset=begin,
            ) from jump
        content = b"".join(pieces)
        skipped = content.find(b"\n") + 1 if begin > 0 else 0
        return parse_tail(self.journal, content[skipped:], begin + skipped)

    async def _create_journal(self) -> None:
        """Create the log like the first of the journals that the writer writes."""
        listing = await list_journals(self._transport, self._selector)
        if not listing.journals:
            raise JournalNotFoundError(
                f"no journal matches {self._selector!r}; create one with `Journals().create` or"
                " `gazctl journals create`"
            )
        like = listing.journals[0].spec
        await Journals(self._transport).acreate(
            self.journal,
            partitions=0,
            replication=like.replication,
            stores=list(like.fragment.stores),
            labels={MANAGED_BY: MANAGER},
        )

    def _failure(self, failure: Action, tail: LogTail, commit: Commit) -> GazetteError:
        number, log = commit.number, self.journal
        last = "has no transaction" if tail.number is None else f"ends with {tail.number}"
        if failure is Action.FAIL_RIVAL and commit.kind is WriterKind.APPLICATION:
            text = (
                f"{log}: another job has written txnVersion {tail.number} while this one wrote"
                f" {number}, of which no row is visible; let one job of a txnAppId write at a time,"
                " each with a txnVersion of its own"
            )
        elif failure is Action.FAIL_RIVAL and number == tail.number:
            text = (
                f"{log}: another driver has written micro-batch {number} at the same time: two"
                " drivers run the same query; stop one of them, and go on with the checkpoint of"
                " the other"
            )
        elif failure is Action.FAIL_RIVAL:
            text = (
                f"{log} {last}, which is behind micro-batch {number} of this query: another driver"
                " runs the same query, or its checkpoint is an old copy; stop one of them, and use"
                " the newest checkpoint"
            )
        elif failure is Action.FAIL_GAP:
            assert number is not None
            writer = log.rpartition("/")[2]
            text = (
                f"{log} {last}, and the query is at micro-batch {number}: the log is lost, or the"
                f" query had another sink before; if all before {number} is written, begin the log"
                f" with `gazette spark transactions create {writer} --after {number - 1}`"
            )
        else:
            text = (
                f"{log} {last}, and txnVersion {number} was never written: use ascending values of"
                " txnVersion"
            )
        return GazetteError(text, journal=log)


def _next_number(tail: LogTail) -> int:
    return 0 if tail.number is None else tail.number + 1
