"""Handling of a record for which the handler raises.

The transaction is aborted and run again from its checkpoint, in the same process: no change of the
store and no message of the first run stays. In the second run the bad record is left out, or
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
from dataclasses import dataclass
from typing import Any

import msgspec

from gazette_sdk.errors import (
    GazetteError,
    MappingError,
    UnreadableStateError,
    UserCodeError,
    ValidationError,
)
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.kinds.base import JsonMessage
from gazette_sdk.message.mapping import direct
from gazette_sdk.shard.application.application import DeadLetters, OnError
from gazette_sdk.shard.transaction.transaction import BadRecord, Transaction
from gazette_sdk.user_code import described, encodable, exit_within

_log = logging.getLogger(__name__)

_MACHINE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)
"""Failures of the machine, which the next record would meet, too."""

ERROR_CHARACTERS_MAX = 2048
"""Length at which the text of an error is cut in a dead letter."""


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
            f"consume: {_text(error)}; at the record of {envelope.journal} at offset"
            f" {envelope.begin}",
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
        record: the record, as JSON; None of content that is no message, and of a record that is too
            long for a letter.
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
        validates_each: the state is checked after each record, until a transaction commits.
    """

    __slots__ = ("_left_out", "_on_error", "_refusals", "_undecodable", "validates_each")

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error
        self._refusals: dict[BadRecord, _Refusal] = {}
        self._left_out: set[BadRecord] = set()
        self._undecodable: list[GazetteError] = []
        self.validates_each = False

    def __bool__(self) -> bool:
        return self.validates_each or bool(self._refusals)

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
            and _is_of_record(error.error)
        )

    def add(self, failure: HandlerFailedError | UnreadableStateError) -> None:
        """Add the record of a failure; of a state that was refused, have the record found."""
        if isinstance(failure, UnreadableStateError):
            self.validates_each = True
            return
        envelope = failure.envelope
        refusal = _Refusal(_text(failure.error), _as_json(envelope.message))
        self._refusals[envelope.journal, envelope.begin] = refusal

    def holds(self, envelope: Envelope[Any]) -> bool:
        """Return True if a message is left out."""
        return (envelope.journal, envelope.begin) in self._refusals

    def leave_out(self, txn: Transaction[Any], envelope: Envelope[Any]) -> None:
        """Leave a message out, and publish its dead letter if one is due.

        Raises:
            GazetteError: the journal of dead letters cannot be written.
        """
        record = envelope.journal, envelope.begin
        if isinstance(self._on_error, DeadLetters):
            refusal = self._refusals[record]
            letters = direct(self._on_error.journal)
            letter = DeadLetter(*record, refusal.error, refusal.record)
            try:
                txn.publish(letter, mapping=letters)
            except ValidationError as error:
                # With its letter around it, a long record is longer than messages may be.
                text = f"{refusal.error} (without the record: {error})"
                txn.publish(DeadLetter(*record, text, None), mapping=letters)
        self._left_out.add(record)

    @property
    def passes_over(self) -> bool:
        """Content that is no message is passed over, instead of failing the shard."""
        return self._on_error != "fail"

    def pass_over(self, error: GazetteError) -> None:
        """Note content that is no message, which the input passes over."""
        if isinstance(self._on_error, DeadLetters):
            self._undecodable.append(error)
        else:
            _log.warning("passed over: %s", error)

    @property
    def has_undecodable(self) -> bool:
        """Dead letters of content that is no message are to be published."""
        return bool(self._undecodable)

    def publish_undecodable(self, txn: Transaction[Any]) -> None:
        """Publish a dead letter, without the record, of content that is no message.

        Raises:
            GazetteError: the journal of dead letters cannot be written.
        """
        assert isinstance(self._on_error, DeadLetters), "only dead letters are published"
        for error in self._undecodable:
            letter = DeadLetter(error.journal or "", error.offset or 0, _text(error), None)
            txn.publish(letter, mapping=direct(self._on_error.journal))
        self._undecodable.clear()

    def transaction_ended(self) -> None:
        """Forget the records that were left out: their transaction starts to commit."""
        for record in self._left_out:
            del self._refusals[record]
        self._left_out.clear()

    def transaction_aborted(self) -> None:
        """Note that the transaction is run again: what it left out is left out again."""
        self._left_out.clear()
        self._undecodable.clear()


def _is_of_record(error: BaseException) -> bool:
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
