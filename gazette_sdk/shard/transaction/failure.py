"""Handling of a record for which the handler raises.

Where the record has published nothing, and the store can undo what it has changed, it is left out
at once, or published as a dead letter: the transaction continues with the next record.

Else the transaction is aborted and run again from its checkpoint, in the same process: no change of
the store and no message of the first run stays. In the second run the bad record is left out, or
published as a dead letter within the transaction. That transaction ends after the record, so
that a series of bad records costs one run each.

A store may refuse its state only at the end of a transaction. That transaction is run again with
a check after each record, which finds the bad one.

Content that is no message, as bytes that cannot be decoded, is passed over in the same way, without
a second run.

Only failures that the record can be blamed for are treated so. A broker that does not answer, a
full disk and the like end the shard: the next record would meet them, too.
"""

from __future__ import annotations

import base64
import errno
import logging
import math
import re
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from gazette_sdk.errors import (
    DecodeError,
    GazetteError,
    MappingError,
    UnreadableStateError,
    UserCodeError,
    ValidationError,
)
from gazette_sdk.message.kinds.base import JsonMessage
from gazette_sdk.message.mapping import direct
from gazette_sdk.message.uuid import Envelope
from gazette_sdk.shard.application.application import DeadLetters, OnError
from gazette_sdk.shard.transaction.transaction import BadRecord, Transaction
from gazette_sdk.user_code import described, encodable, exit_within

_log = logging.getLogger(__name__)

_MACHINE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)
"""Failures of the machine, which the next record would meet, too."""

LOG_PERIOD_S = 60.0
"""Time between two lines of the log about records that were left out."""

ERROR_CHARACTERS_MAX = 2048
"""Length at which the text of an error is cut in a dead letter."""


_FAILED_CHARACTERS_MAX = 1024
"""Length at which a text is cut before its record: the status of a shard holds both."""

_RECORD = re.compile(r"; at the record of (\S+) at offset ([0-9]+)")


def at_record(text: str, journal: str, offset: int) -> str:
    """Return the text of an error with the record at which it happened."""
    if len(text) > _FAILED_CHARACTERS_MAX:
        text = f"{text[:_FAILED_CHARACTERS_MAX]} …"
    return f"{text}; at the record of {journal} at offset {offset}"


def record_of(text: str) -> BadRecord | None:
    """Return the journal and the offset of the record in the text of an error; None without one."""
    found = _RECORD.findall(text)
    return (found[-1][0], int(found[-1][1])) if found else None


class HookFailedError(GazetteError):
    """A hook of an application raised, or used a transaction in a way that is refused.

    Remedy: fix the hook; its exception is the cause of this error. Then `gazctl shards unassign`
    the failed shard, which starts it again.

    Args:
        hook: name of the hook.
        error: its exception.
    """

    def __init__(self, hook: str, error: BaseException) -> None:
        super().__init__(f"{hook}: {_text(error)}")
        self.hook = hook


class HandlerFailedError(GazetteError):
    """A handler raised for a message.

    Remedy: fix the handler; its exception is the cause of this error. ``on_error="skip"`` and
    ``shard.dead_letters(…)`` let a shard continue without such records.

    Args:
        envelope: envelope of the message.
        error: the handler's exception.

    Attributes:
        envelope: envelope of the message.
        error: the handler's exception.
    """

    def __init__(self, envelope: Envelope[Any], error: BaseException) -> None:
        super().__init__(
            at_record(f"consume: {_text(error)}", envelope.journal, envelope.begin),
            journal=envelope.journal,
            offset=envelope.begin,
        )
        self.envelope = envelope
        self.error = error


def error_of_code(error: BaseException | None) -> BaseException | None:
    """Return the exception whose traceback says where code is to be fixed.

    That is the exception of a handler or a hook, or one that no one expected. Of other errors the
    text says everything: None.
    """
    if isinstance(error, HandlerFailedError | HookFailedError):
        return error.__cause__
    return None if isinstance(error, GazetteError) else error


@dataclass
class DeadLetter(JsonMessage):
    """Record that a handler refused, as it is published to a journal of dead letters.

    Attributes:
        journal: journal of the record.
        offset: offset of its first byte.
        error: exception of the handler.
        record: the record, as JSON. Of bytes that cannot be decoded, these bytes in base64; None of
            other content that is no message, and of a record that is too long for a letter.
    """

    journal: str
    offset: int
    error: str
    record: Any


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Record that was refused by the handler, with the text of its exception."""

    error: str
    record: Any


class BadRecords:
    """Records for which the handler raised since the last transaction that was committed.

    Args:
        on_error: treatment that the application declares.

    Attributes:
        skipped: by journal, offsets between which messages are left out whatever they are.
        validates_each: the state is checked after each record, until a transaction commits.
        left_out_count: records that transactions have left out, of which the commit has begun.
    """

    __slots__ = (
        "_last",
        "_left_out",
        "_logged_at",
        "_name",
        "_on_error",
        "_open_count",
        "_refusals",
        "_undecodable",
        "_unlogged_count",
        "left_out_count",
        "skipped",
        "validates_each",
    )

    def __init__(self, on_error: OnError, name: str = "") -> None:
        self._on_error = on_error
        self._name = name
        self.left_out_count = 0
        # Of the open transaction, and since the last line of the log.
        self._open_count = self._unlogged_count = 0
        self._last = ""
        self._logged_at = -math.inf
        self._refusals: dict[BadRecord, _Refusal] = {}
        self._left_out: set[BadRecord] = set()
        self._undecodable: list[GazetteError] = []
        self.validates_each = False
        self.skipped: dict[str, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return self.validates_each or bool(self._refusals) or bool(self.skipped)

    def may_leave_out(self, error: BaseException) -> bool:
        """Return True if the transaction is to be run again without the record of a failure.

        Also if it is to be run again in order to find that record.
        """
        if self._on_error == "fail":
            return False
        if isinstance(error, UnreadableStateError):
            return not self.validates_each
        return (
            isinstance(error, HandlerFailedError)
            and (error.envelope.journal, error.envelope.begin) not in self._refusals
            and is_of_record(error.error)
        )

    def add(self, failure: HandlerFailedError | UnreadableStateError) -> None:
        """Add the record of a failure; of a state that was refused, have the record found."""
        if isinstance(failure, UnreadableStateError):
            self.validates_each = True
            return
        envelope = failure.envelope
        self._refusals[envelope.journal, envelope.begin] = _refusal(envelope, failure.error)

    def holds(self, envelope: Envelope[Any]) -> bool:
        """Return True if a message is left out."""
        record = envelope.journal, envelope.begin
        return record in self._refusals or self._skips(*record)

    def _skips(self, journal: str, offset: int) -> bool:
        begin, end = self.skipped.get(journal, (0, 0))
        return begin <= offset < end

    def leave_out(
        self, txn: Transaction[Any], envelope: Envelope[Any], error: BaseException | None = None
    ) -> None:
        """Leave a message out, and publish its dead letter if one is due.

        Args:
            txn: the open transaction.
            envelope: of the message.
            error: the handler's exception; None if it was added before, or is to be skipped.

        Raises:
            GazetteError: the journal of dead letters cannot be written.
        """
        record = envelope.journal, envelope.begin
        if error is not None:
            refusal = _refusal(envelope, error)
        elif record in self._refusals:
            refusal = self._refusals[record]
            self._left_out.add(record)
        else:
            refusal = _Refusal("skipped, as was asked for", _as_json(envelope.message))
        self._count(at_record(refusal.error, *record))
        if isinstance(self._on_error, DeadLetters):
            self._publish(txn, DeadLetter(*record, refusal.error, refusal.record))

    def _publish(self, txn: Transaction[Any], letter: DeadLetter) -> None:
        assert isinstance(self._on_error, DeadLetters), "only dead letters are published"
        letters = direct(self._on_error.journal)
        try:
            txn.publish(letter, mapping=letters)
        except ValidationError as too_long:
            # With its letter around it, a long record is longer than messages may be.
            text = f"{letter.error} (without the record: {too_long})"
            txn.publish(DeadLetter(letter.journal, letter.offset, text, None), mapping=letters)

    @property
    def letter_count(self) -> int:
        """Dead letters for the records that were left out: one for each, if any are published."""
        return self.left_out_count if isinstance(self._on_error, DeadLetters) else 0

    @property
    def passes_over(self) -> bool:
        """Content that is no message is passed over, wherever it is."""
        return self._on_error != "fail"

    def pass_over(self, error: GazetteError) -> None:
        """Note content that is no message, which the input passes over.

        Raises:
            GazetteError: it is not to be passed over.
        """
        if not self.passes_over and not self._skips(error.journal or "", error.offset or 0):
            raise error
        if isinstance(self._on_error, DeadLetters):
            self._undecodable.append(error)
        else:
            self._count(str(error))
            self._count_ended()  # no transaction may follow

    @property
    def has_undecodable(self) -> bool:
        """Dead letters of content that is no message are to be published."""
        return bool(self._undecodable)

    def publish_undecodable(self, txn: Transaction[Any]) -> None:
        """Publish dead letters of content that is no message.

        Raises:
            GazetteError: the journal of dead letters cannot be written.
        """
        for error in self._undecodable:
            self._count(str(error))
            frame = error.frame if isinstance(error, DecodeError) else None
            record = None if frame is None else base64.b64encode(frame).decode()
            self._publish(
                txn, DeadLetter(error.journal or "", error.offset or 0, _text(error), record)
            )
        self._undecodable.clear()

    def transaction_ended(self) -> None:
        """Forget the records that were left out: their transaction starts to commit."""
        for record in self._left_out:
            del self._refusals[record]
        self._left_out.clear()
        self._count_ended()

    def _count(self, text: str) -> None:
        """Count a record that the open transaction leaves out."""
        self._open_count += 1
        self._last = text

    def _count_ended(self) -> None:
        """Count what the open transaction has left out, and log it once in a while."""
        self.left_out_count += self._open_count
        self._unlogged_count += self._open_count
        self._open_count = 0
        now = time.monotonic()
        if self._unlogged_count and now >= self._logged_at + LOG_PERIOD_S:
            _log.warning(
                "shard %s: records left out: %d, the last one: %s",
                self._name, self._unlogged_count, self._last,
            )  # fmt: skip
            self._logged_at, self._unlogged_count = now, 0

    def transaction_aborted(self) -> None:
        """Note that the transaction is run again: what it left out is left out again."""
        self._left_out.clear()
        self._undecodable.clear()
        self._open_count = 0


def _refusal(envelope: Envelope[Any], error: BaseException) -> _Refusal:
    return _Refusal(_text(error), _as_json(envelope.message))


def is_of_record(error: BaseException) -> bool:
    """Return True if another record may do better."""
    if exit_within(error) is not None:
        return False
    if isinstance(error, GazetteError):
        record = ValidationError | MappingError | UnreadableStateError | UserCodeError
        return isinstance(error, record)
    if isinstance(error, OSError):
        return error.errno not in _MACHINE_ERRNOS
    return not isinstance(error, MemoryError)


def _as_json(message: Any) -> Any:
    """Return a message as values of JSON; as text where it has no such form."""
    try:
        serialized = getattr(message, "SerializeToString", None)
        if serialized is not None:
            return base64.b64encode(serialized()).decode()
        dump = getattr(message, "model_dump", None)
        values = msgspec.to_builtins(message) if dump is None else dump(mode="json")
        msgspec.json.encode(values)  # refuses lone surrogates, for example
    except BaseException:  # noqa: BLE001 - of the message's class, or values of its handler
        return _repr(message)
    return values


def _repr(message: Any) -> str:
    try:
        return encodable(repr(message))
    except BaseException:  # noqa: BLE001 - of the message's class
        return f"an object of {type(message).__name__}"


def _text(error: BaseException) -> str:
    text = described(error)
    return text if len(text) <= ERROR_CHARACTERS_MAX else text[:ERROR_CHARACTERS_MAX] + " …"
