"""Errors of gazette_sdk, in one tree.

::

    GazetteError
    ├── ValidationError              a value is malformed: names the field and the rule
    ├── ConfigurationError           a flag, file, address or environment value cannot be used
    │   └── MissingPackageError      a package of an extra is not installed; also an ImportError
    ├── StatusError                  a broker answered with a status other than OK
    │   ├── JournalNotFoundError, NoJournalPrimaryBrokerError, NotJournalPrimaryBrokerError,
    │   ├── InsufficientJournalBrokersError, NotJournalBrokerError, OffsetNotYetAvailableError,
    │   ├── WrongRouteError, ProposalMismatchError, EtcdTransactionFailedError, NotAllowedError,
    │   ├── WrongAppendOffsetError, IndexHasGreaterOffsetError, RegisterMismatchError,
    │   └── SuspendedError, FragmentStoreUnhealthyError
    ├── CallError                    a call ended without an answer
    │   └── UnavailableError, UnauthenticatedError, DeadlineExceededError, CallCancelledError
    ├── StoreError                   a fragment store failed
    │   └── StoreAuthorizationError, FragmentNotFoundError, CorruptFragmentError
    ├── EtcdError                    Etcd failed or refused
    │   └── EtcdUnavailableError, EtcdCompactedError, LeaseLostError
    ├── FramingError                 bytes of a journal cannot be decoded as messages
    │   └── DecodeError, DesyncError, OversizedFrameError, TornFrameError
    ├── RecoveryError                a recovery log cannot be played back or continued
    ├── FencedError                  another process has taken over a shard
    ├── CheckpointMismatchError      a checkpoint is of an earlier journal of the same name
    ├── JournalExistsError           a journal to create exists with other settings
    ├── MappingError                 a message maps to no journal
    ├── ShardStatusError             a consumer process answered with a status other than OK
    ├── StreamProtocolError          a peer broke the rules of the stream transport
    ├── ShardStoreError              the state of a shard cannot be read or written
    │   └── UnreadableStateError     a value of the state would not be read again as it is
    ├── BackPressureError            the bound of unsent messages is reached
    ├── DeliveryTimeoutError         an append was not acknowledged in time
    ├── ReentrantCallError           a call in a signal handler would wait for the call below it
    ├── UserCodeError                user code raised what ends an iteration, a task or a process
    └── ClosedError                  used after it was closed

Each error has attributes of its subject (``journal``, ``offset``, ``status``; ``None`` where they
do not apply). The text names the remedy; the docstring of each class has it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

__all__ = [
    "STATUS_NAMES",
    "BackPressureError",
    "CallCancelledError",
    "CallError",
    "CheckpointMismatchError",
    "ClosedError",
    "ConfigurationError",
    "CorruptFragmentError",
    "DeadlineExceededError",
    "DecodeError",
    "DeliveryTimeoutError",
    "DesyncError",
    "EtcdCompactedError",
    "EtcdError",
    "EtcdTransactionFailedError",
    "EtcdUnavailableError",
    "FencedError",
    "FragmentNotFoundError",
    "FragmentStoreUnhealthyError",
    "FramingError",
    "GazetteError",
    "IndexHasGreaterOffsetError",
    "InsufficientJournalBrokersError",
    "JournalExistsError",
    "JournalNotFoundError",
    "LeaseLostError",
    "MappingError",
    "MissingPackageError",
    "NoJournalPrimaryBrokerError",
    "NotAllowedError",
    "NotJournalBrokerError",
    "NotJournalPrimaryBrokerError",
    "OffsetNotYetAvailableError",
    "OversizedFrameError",
    "ProposalMismatchError",
    "RecoveryError",
    "ReentrantCallError",
    "RegisterMismatchError",
    "ShardStatusError",
    "ShardStoreError",
    "StatusError",
    "StoreAuthorizationError",
    "StoreError",
    "StreamProtocolError",
    "SuspendedError",
    "TornFrameError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnreadableStateError",
    "UserCodeError",
    "ValidationError",
    "WrongAppendOffsetError",
    "WrongRouteError",
    "check_number",
    "for_status",
    "install_text",
    "needs_extra",
]


class GazetteError(Exception):
    """Base of all errors that this package raises.

    Remedy: the text of each error names it. Catch a subclass to handle one failure, and this class
    to handle all.

    Args:
        message: the failure, and its remedy.
        journal: name of the affected journal, if any.
        offset: affected byte offset, if any.
    """

    status: ClassVar[int | None] = None

    def __init__(
        self, message: str, *, journal: str | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message)
        self.journal = journal
        self.offset = offset


class ValidationError(GazetteError):
    """A value breaks a rule.

    Remedy: change the value that the text and ``path`` name. Nothing was sent or changed.

    Args:
        reason: the rule, as text.
        kind: short stable name of the rule (``not_clean``, ``invalid_offset``, …).
        path: dotted path of the field (``spec.fragment.length``), empty for the value itself.
    """

    def __init__(
        self, reason: str, *, kind: str = "invalid", path: str = "", journal: str | None = None
    ) -> None:
        super().__init__(f"{path}: {reason}" if path else reason, journal=journal)
        self.reason = reason
        self.kind = kind
        self.path = path

    def within(self, prefix: str) -> ValidationError:
        """Return the same error for a message that holds the value under ``prefix``."""
        path = (
            f"{prefix}.{self.path}"
            if self.path and not self.path.startswith("[")
            else (prefix + self.path)
        )
        return ValidationError(self.reason, kind=self.kind, path=path, journal=self.journal)


class ConfigurationError(GazetteError):
    """A flag, file, address or environment value cannot be used.

    Remedy: change the flag, argument, file or environment variable that the text names.
    """


def check_number(name: str, value: object, least: float = 0, *, is_whole: bool = False) -> None:
    """Check the value of an argument.

    Args:
        name: name of the argument.
        value: its value.
        least: its least value.
        is_whole: True if it must be an ``int``.

    Raises:
        ConfigurationError: it is no number, or less.
    """
    is_number = isinstance(value, int if is_whole else int | float) and value is not True
    if not is_number or value is False or not value >= least:  # type: ignore[operator]
        word = "a whole number" if is_whole else "a number"
        raise ConfigurationError(f"{name}={value!r}: use {word}, at least {least}")


class MissingPackageError(ConfigurationError, ImportError):
    """A Python package that only some users need is not installed. It is an ImportError, too.

    Remedy: run the ``pip install`` line of the text, which names the extra that has the package.
    """


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Raise a MissingPackageError if an import in the block does not find a package.

    Args:
        extra: the extra of ``gazette-sdk`` that has it.
        what: what needs it, in the plural.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(install_text(error, extra, what)) from error


def install_text(error: ModuleNotFoundError, extra: str, what: str) -> str:
    """Return the text for a package that was not found; see :func:`needs_extra`."""
    package = (error.name or "").partition(".")[0]
    return (
        f"{what} need the Python package {package!r}, which is not installed; "
        f'run `pip install "gazette-sdk[{extra}]"`'
    )


class ClosedError(GazetteError):
    """A closed object was used.

    Remedy: create another one. Publishers, readers and transports cannot be opened again.
    """


class ReentrantCallError(GazetteError):
    """A call was made within another one of the same thread, for which it would wait for ever.

    Remedy: in a signal handler set a flag, and make the call in the main code; in a finalizer or a
    log handler hand the work to another thread, as with a ``queue.SimpleQueue``.
    """


class UserCodeError(GazetteError):
    """User code raised what ends an iteration, a task or the process, such as StopIteration.

    Or it returned a coroutine or a generator, of which nothing has run.

    Remedy: catch the exception in the function that the text names, and raise another one there; or
    have the function do its work before it returns.

    Args:
        message: the failure.
        error: the exception.
        index: index of the item that the function was called with, of several.

    Attributes:
        error: the exception.
        index: index of the item; None if it was called with one only.
    """

    def __init__(self, message: str, *, error: BaseException, index: int | None = None) -> None:
        super().__init__(message)
        self.error = error
        self.index = index


# ------------------------------------------------------------------ calls


class CallError(GazetteError):
    """A call ended without a response. An append may be written or not.

    Remedy: check the broker's log, and try again. A ``Publisher`` tries again by itself; committed
    readers drop duplicates.

    Args:
        message: the failure.
        code: name of the gRPC status code (``UNKNOWN``, ``INTERNAL``, …).
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "UNKNOWN",
        journal: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message, journal=journal, offset=offset)
        self.code = code


class UnavailableError(CallError):
    """The broker cannot be reached, or the connection was lost during the call.

    Remedy: check the address in the text (``GAZETTE_ADDRESS``), that the broker runs, and the
    network between.
    """

    def __init__(self, message: str, *, journal: str | None = None) -> None:
        super().__init__(message, code="UNAVAILABLE", journal=journal)


class UnauthenticatedError(CallError):
    """The token is missing, invalid or expired, or does not allow the operation.

    Remedy: give the cluster's ``auth_keys``, or a valid ``auth_token`` that has the capability and
    selects the journal. Clocks of client and broker must agree.
    """

    def __init__(self, message: str, *, journal: str | None = None) -> None:
        super().__init__(message, code="UNAUTHENTICATED", journal=journal)


class DeadlineExceededError(CallError):
    """The time-out ended before the response arrived. An append may be written or not.

    Remedy: wait longer, or check the brokers with ``gazctl journals list``.
    """

    def __init__(self, message: str, *, journal: str | None = None) -> None:
        super().__init__(message, code="DEADLINE_EXCEEDED", journal=journal)


class CallCancelledError(CallError):
    """The caller cancelled the call, or the server stopped.

    Remedy: none is needed if the caller cancelled. Otherwise try again.
    """

    def __init__(self, message: str, *, journal: str | None = None) -> None:
        super().__init__(message, code="CANCELLED", journal=journal)


class StreamProtocolError(GazetteError):
    """Violation of the rules of the stream transport, which ends the connection.

    Remedy: use client and broker of the same version, or select gRPC with ``?wire=grpc``.

    Args:
        reason: the rule, as text; a GOAWAY frame sends it to the peer.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# ------------------------------------------------------------------ journals


STATUS_NAMES = (
    "OK",
    "JOURNAL_NOT_FOUND",
    "NO_JOURNAL_PRIMARY_BROKER",
    "NOT_JOURNAL_PRIMARY_BROKER",
    "INSUFFICIENT_JOURNAL_BROKERS",
    "NOT_JOURNAL_BROKER",
    "OFFSET_NOT_YET_AVAILABLE",
    "WRONG_ROUTE",
    "PROPOSAL_MISMATCH",
    "ETCD_TRANSACTION_FAILED",
    "NOT_ALLOWED",
    "WRONG_APPEND_OFFSET",
    "INDEX_HAS_GREATER_OFFSET",
    "REGISTER_MISMATCH",
    "SUSPENDED",
    "FRAGMENT_STORE_UNHEALTHY",
)
"""Names of the statuses of a response, by number (protocol section 2)."""


class StatusError(GazetteError):
    """A broker answered with a status other than OK.

    Remedy: see the subclass of its status. The base class itself is raised for a status that this
    version does not know: use a client as new as the broker.

    Attributes:
        code: number of the status in the broker's response.
        remedy: end of the error's text.
    """

    status: ClassVar[int | None] = None
    remedy: ClassVar[str] = ""

    def __init__(
        self,
        detail: str = "",
        *,
        journal: str | None = None,
        offset: int | None = None,
        status: int | None = None,
    ) -> None:
        code = self.status if status is None else status
        self.code: int = code or 0
        known = code is not None and 0 <= code < len(STATUS_NAMES)
        name = STATUS_NAMES[code or 0] if known else f"status {code}"
        text = f"{journal}: {name}" if journal else name
        if detail:
            text += f" ({detail})"
        if self.remedy:
            text += f"; {self.remedy}"
        super().__init__(text, journal=journal, offset=offset)


class JournalNotFoundError(StatusError):
    """No such journal, or the caller's token does not select it.

    Remedy: check the name with ``gazctl journals list``. Create the journal with
    ``Journals().create(…)``, ``gazctl journals create`` or ``gazctl journals apply``.
    """

    status = STATUS_NAMES.index("JOURNAL_NOT_FOUND")
    remedy = "check the name, or create it with `gazctl journals create` or `gazctl journals apply`"


class NoJournalPrimaryBrokerError(StatusError):
    """The journal has no primary broker at the moment.

    Remedy: the SDK tries again by itself. If the error stays, check that as many brokers run as the
    journal has replicas: ``gazctl journals list --primary``.
    """

    status = STATUS_NAMES.index("NO_JOURNAL_PRIMARY_BROKER")
    remedy = "transient: try again"


class NotJournalPrimaryBrokerError(StatusError):
    """The broker is not the journal's primary, and the call does not allow it to proxy.

    Remedy: the SDK tries again with the new route by itself. Your own gRPC client sends the call to
    the primary of the response's route, or sets ``do_not_proxy`` to false.
    """

    status = STATUS_NAMES.index("NOT_JOURNAL_PRIMARY_BROKER")
    remedy = "transient: try again with a fresh route"


class InsufficientJournalBrokersError(StatusError):
    """Fewer brokers are assigned to the journal than it requires.

    Remedy: wait while brokers start. Otherwise start more brokers, or lower the journal's
    replication with ``Journals().update(…, replication=…)``.
    """

    status = STATUS_NAMES.index("INSUFFICIENT_JOURNAL_BROKERS")
    remedy = "transient while brokers start; otherwise add brokers or lower its replication"


class NotJournalBrokerError(StatusError):
    """The broker has no replica of the journal, and the call does not allow it to proxy.

    Remedy: the SDK tries again with the new route by itself. Your own gRPC client sends the call to
    a broker of the response's route, or sets ``do_not_proxy`` to false.
    """

    status = STATUS_NAMES.index("NOT_JOURNAL_BROKER")
    remedy = "transient: try again with a fresh route"


class OffsetNotYetAvailableError(StatusError):
    """A read begins after the write head, or a read that does not block arrived there.

    Remedy: read with ``block=True`` to wait for content. If the offset is of a journal that was
    created again, read with ``Reader(on_missing="begin")`` or ``"end"``.
    """

    status = STATUS_NAMES.index("OFFSET_NOT_YET_AVAILABLE")
    remedy = (
        'read with block=True to wait for it; Reader(on_missing="begin") or "end" begins elsewhere'
    )


class WrongRouteError(StatusError):
    """A replication peer has another route of the journal.

    Remedy: none is needed. Brokers repeat the replication when both know the newer route.
    """

    status = STATUS_NAMES.index("WRONG_ROUTE")


class ProposalMismatchError(StatusError):
    """A replication peer cannot adopt the proposed fragment.

    Remedy: none is needed. Brokers agree on a fragment, and repeat the replication.
    """

    status = STATUS_NAMES.index("PROPOSAL_MISMATCH")


class EtcdTransactionFailedError(StatusError):
    """Another process changed a spec since it was read.

    Remedy: list the journals again, and apply the change with their current revisions. Revision 0
    means that the journal must not exist, and -1 that the revision is not checked.
    """

    status = STATUS_NAMES.index("ETCD_TRANSACTION_FAILED")
    remedy = "list again and apply with the current revisions (0: must not exist, -1: do not check)"


class NotAllowedError(StatusError):
    """The journal's flags, or the transport, do not allow the operation.

    Remedy: check the journal's ``flags`` (``gazctl journals list -o yaml``). A transport of a
    fragment store is read-only: append through a broker.
    """

    status = STATUS_NAMES.index("NOT_ALLOWED")
    remedy = "check the journal's `flags`"


class WrongAppendOffsetError(StatusError):
    """The append gave an offset that is not the journal's write head.

    Remedy: another writer appended in the meantime. Read up to the write head, and decide again.
    """

    status = STATUS_NAMES.index("WRONG_APPEND_OFFSET")
    remedy = "somebody else appended meanwhile: read up to the head and decide again"


class IndexHasGreaterOffsetError(StatusError):
    """Stored fragments end after the write head of the brokers, so their newest content is lost.

    Remedy: start the former brokers with their spool directories again. If they are lost for good,
    run ``gazctl journals reset-head``, which accepts the loss.
    """

    status = STATUS_NAMES.index("INDEX_HAS_GREATER_OFFSET")
    remedy = "when no broker holds unpersisted content any more, run `gazctl journals reset-head`"


class RegisterMismatchError(StatusError):
    """The journal's registers do not have the values that the append requires.

    Remedy: another process has taken over. Stop this writer, or read the registers and begin anew.
    """

    status = STATUS_NAMES.index("REGISTER_MISMATCH")
    remedy = "another process holds the journal's registers"


class SuspendedError(StatusError):
    """The journal is suspended: it has no replicas at the moment.

    Remedy: append to the journal, which resumes it.
    """

    status = STATUS_NAMES.index("SUSPENDED")
    remedy = "append to it to resume it"


class FragmentStoreUnhealthyError(StatusError):
    """The first fragment store of the journal fails its checks, so appends are refused.

    Remedy: repair the store (``gazctl journals store-health URL`` names its error), then try again.
    """

    status = STATUS_NAMES.index("FRAGMENT_STORE_UNHEALTHY")
    remedy = "mend the store, then try again; `gazctl journals store-health` shows its state"


_BY_STATUS: dict[int, type[StatusError]] = {
    cls.status: cls for cls in StatusError.__subclasses__() if cls.status is not None
}


def for_status(
    status: int, detail: str = "", *, journal: str | None = None, offset: int | None = None
) -> StatusError:
    """Return the error of a response's ``status`` (any but OK)."""
    return _BY_STATUS.get(status, StatusError)(
        detail, journal=journal, offset=offset, status=status
    )


class JournalExistsError(GazetteError):
    """A journal to create exists with other settings, or its store has an earlier one's fragments.

    Remedy: leave out the settings that differ, or change the journal with ``Journals().update(…)``
    or ``gazctl journals apply``; no journal was changed. Over fragments of an earlier journal of
    the name give ``continues=True``, or remove them with the journal.
    """


# ------------------------------------------------------------------ publishing and reading messages


class FramingError(GazetteError):
    """Malformed bytes of a journal, which cannot be decoded as messages; or no known framing.

    Remedy: check that the journal's ``content-type`` label is right, and that its framing is
    registered. ``Reader(on_error="skip")`` continues after malformed bytes.
    """


class DecodeError(FramingError):
    """A complete frame whose message cannot be decoded or is invalid.

    Remedy: check the class of the messages. ``Reader(on_error="skip")``, or a function as
    ``on_error=``, continues with the next message.

    Attributes:
        frame: the frame's bytes; None where there is no such frame.
    """

    def __init__(
        self,
        message: str,
        *,
        frame: bytes | None = None,
        journal: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message, journal=journal, offset=offset)
        self.frame = frame


class DesyncError(FramingError):
    """Malformed bytes at the begin of a frame.

    Remedy: find the writer of the bytes, which did not use the journal's framing.
    ``Reader(on_error="skip")`` continues with the next frame.

    Attributes:
        skipped: number of the malformed bytes.
    """

    def __init__(
        self, message: str, *, skipped: int, journal: str | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message, journal=journal, offset=offset)
        self.skipped = skipped


class OversizedFrameError(FramingError):
    """A frame that is longer than readers take.

    Remedy: publishers of this package refuse such messages; find the writer that does not.
    ``Reader(on_error="skip")`` continues with the next frame. ``frame_bytes_max`` of the framing
    raises the limit.
    """


class TornFrameError(FramingError):
    """The journal ends within a frame.

    Remedy: wait until its writer completes it, with ``block=True``. If the writer is gone, append
    the rest or a line break.
    """


class CheckpointMismatchError(GazetteError):
    """A checkpoint is of an earlier journal of the same name, which was deleted.

    Remedy: ``Reader(on_missing="begin")`` reads the journal that exists now from its begin, and
    ``on_missing="end"`` from its write head. If the content is the same as before, pass
    ``offsets=checkpoint.offsets`` instead of the checkpoint.
    """


class MappingError(GazetteError):
    """A message maps to no journal.

    Remedy: create journals that match the selector (``Journals().create(…)``), or correct the
    mapping.
    """


class BackPressureError(GazetteError):
    """The limit of unacknowledged bytes is reached (``pending_bytes_max``).

    Remedy: wait for receipts or ``flush()``, then publish again. In a coroutine, ``await
    apublish(…)`` waits.
    """


class DeliveryTimeoutError(GazetteError):
    """An append was not acknowledged within the delivery time-out. It may be written nevertheless.

    Remedy: check the brokers (``gazctl journals list``), and publish again if readers may see a
    message twice. ``Publisher(delivery_timeout_s=…)`` sets the time-out.
    """


# ------------------------------------------------------------------ fragment stores


class StoreError(GazetteError):
    """A fragment store failed.

    Remedy: check the store with ``gazctl journals store-health URL``, and its URL and network. The
    broker tries uploads again by itself, and keeps the content in its spools.

    Args:
        message: the failure, and its remedy.
        store: URL of the store.
    """

    def __init__(
        self,
        message: str,
        *,
        store: str | None = None,
        journal: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message, journal=journal, offset=offset)
        self.store = store


class StoreAuthorizationError(StoreError):
    """The store refuses access, or its bucket or directory does not exist.

    Remedy: check the credentials of the process that uses the store, its rights, and the name of
    the bucket. Create the directory of a ``file://`` store.
    """


class FragmentNotFoundError(StoreError):
    """A fragment is not in its store.

    Remedy: if it was removed on purpose, read on through the broker: readers continue after the
    gap. Otherwise put the file back under its name.
    """


class CorruptFragmentError(StoreError):
    """A stored fragment's content does not match its name.

    Remedy: put a good copy of the file in its place, from a backup or another store, or remove it.
    Readers continue after the gap when the content after it is six hours old.
    """


# ------------------------------------------------------------------ Etcd


class EtcdError(GazetteError):
    """Etcd failed, or refused a request.

    Remedy: check Etcd's log and ``etcdctl endpoint health``.
    """


class EtcdUnavailableError(EtcdError):
    """Etcd cannot be reached.

    Remedy: check ``--etcd.address``, the certificates, and that Etcd runs.
    """


class EtcdCompactedError(EtcdError):
    """A watch requires a revision that Etcd has compacted.

    Remedy: none is needed. The watch loads all keys again, and continues.

    Attributes:
        compact_revision: the oldest revision that Etcd keeps; 0 if it is not known.
    """

    def __init__(self, message: str, *, compact_revision: int = 0) -> None:
        super().__init__(message)
        self.compact_revision = compact_revision


class LeaseLostError(EtcdError):
    """The lease of the process expired or was revoked, so other brokers took over its journals.

    Remedy: let a supervisor restart the broker. If it happens often, raise ``--etcd.lease``, and
    check the load of the machine and the network to Etcd.
    """


# ------------------------------------------------------------------ shards


class RecoveryError(GazetteError):
    """A recovery log cannot be played back, or continued.

    Remedy: if content of the log or hints were deleted, restore them from a backup. Hints are keys
    of Etcd: delete the primary ones to fall back to older ones. If the store reports changes that
    do not fit its files, correct the store. Nothing was appended.
    """


class FencedError(GazetteError):
    """Another process has taken over the shard, and this one cannot commit any more.

    Remedy: none is needed. The shard continues at its new primary, and this process stops its own.
    If no other process should run it, look for one with ``gazctl shards list``.
    """


class ShardStoreError(GazetteError):
    """The state of a shard cannot be read or written.

    Remedy: the text names the cause. The shard fails; ``gazctl shards unassign --failed`` recovers
    it elsewhere.
    """


class UnreadableStateError(ShardStoreError, TypeError):
    """A value of a shard's state would not be read again as it is.

    Remedy: put a value of the type that the store declares, without NaN and infinity where it is
    stored as JSON; or declare the type of the values. Nothing was committed. The record fails, or
    is left out as ``on_error`` says.
    """


_SHARD_STATUSES = (
    ("OK", ""),
    ("SHARD_NOT_FOUND", "check its id with `gazctl shards list`"),
    (
        "NO_SHARD_PRIMARY",
        "the shard is disabled, or too few consumer processes run; else try again",
    ),
    ("NOT_SHARD_PRIMARY", "transient: try again with a fresh route"),
    (
        "ETCD_TRANSACTION_FAILED",
        "the shard was changed meanwhile: list it again, and apply the change to that",
    ),
    ("SHARD_STOPPED", "its primary failed or moved: `gazctl shards list` shows its status"),
)
"""Statuses of the shard service and their remedies, by number."""


class ShardStatusError(GazetteError):
    """A consumer process answered with a status other than OK.

    Remedy: the text names it. A status that this version does not know: use a client as new as the
    process.

    Args:
        status: number of the status in the response.
        shard: id of the shard, if the call was about one.

    Attributes:
        code: the number.
        name: the status by name.
        shard: id of the shard; empty if the call was about several.
    """

    def __init__(self, status: int, *, shard: str = "") -> None:
        known = 0 <= status < len(_SHARD_STATUSES)
        self.name, remedy = _SHARD_STATUSES[status] if known else (f"status {status}", "")
        self.code = status
        self.shard = shard
        text = f"{shard}: {self.name}" if shard else self.name
        super().__init__(f"{text}; {remedy}" if remedy else text)
