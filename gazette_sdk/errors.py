"""Errors of gazette_sdk, in one tree.

::

    GazetteError
    ├── ValidationError              a value is malformed: names the field and the rule
    ├── ConfigurationError           a flag, file, address or environment value cannot be used
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
    │   └── DecodeError, DesyncError, TornFrameError
    ├── CheckpointMismatchError      a checkpoint is of an earlier journal of the same name
    ├── JournalExistsError           a journal to create exists with other settings
    ├── MappingError                 a message maps to no journal
    ├── StreamProtocolError          a peer broke the rules of the stream transport
    ├── BackPressureError            the bound of unsent messages is reached
    ├── DeliveryTimeoutError         an append was not acknowledged in time
    └── ClosedError                  used after it was closed

Each error has attributes of its subject (``journal``, ``offset``, ``status``; ``None`` where they
do not apply), and its text names the remedy where there is one.
"""

from __future__ import annotations

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
    "NoJournalPrimaryBrokerError",
    "NotAllowedError",
    "NotJournalBrokerError",
    "NotJournalPrimaryBrokerError",
    "OffsetNotYetAvailableError",
    "ProposalMismatchError",
    "RegisterMismatchError",
    "StatusError",
    "StoreAuthorizationError",
    "StoreError",
    "StreamProtocolError",
    "SuspendedError",
    "TornFrameError",
    "UnauthenticatedError",
    "UnavailableError",
    "ValidationError",
    "WrongAppendOffsetError",
    "WrongRouteError",
    "for_status",
]


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


class GazetteError(Exception):
    """Base of all errors that this package raises.

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
    """A flag, file, address or environment value cannot be used."""


class JournalExistsError(GazetteError):
    """A journal to create exists with other settings. Update it, or give its settings."""


# ------------------------------------------------------------------ statuses


class StatusError(GazetteError):
    """A broker answered with a status other than OK."""

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
    """No such journal, or it is hidden from the caller."""

    status = STATUS_NAMES.index("JOURNAL_NOT_FOUND")
    remedy = "check the name, or create it with `gazctl journals create` or `gazctl journals apply`"


class NoJournalPrimaryBrokerError(StatusError):
    """The journal has no primary right now. Transient."""

    status = STATUS_NAMES.index("NO_JOURNAL_PRIMARY_BROKER")
    remedy = "transient: try again"


class NotJournalPrimaryBrokerError(StatusError):
    """The broker is not the journal's primary, and may not proxy."""

    status = STATUS_NAMES.index("NOT_JOURNAL_PRIMARY_BROKER")
    remedy = "transient: try again with a fresh route"


class InsufficientJournalBrokersError(StatusError):
    """Fewer brokers are assigned to the journal than it requires."""

    status = STATUS_NAMES.index("INSUFFICIENT_JOURNAL_BROKERS")
    remedy = "transient while brokers start; otherwise add brokers or lower its replication"


class NotJournalBrokerError(StatusError):
    """The broker has no replica of the journal, and may not proxy."""

    status = STATUS_NAMES.index("NOT_JOURNAL_BROKER")
    remedy = "transient: try again with a fresh route"


class OffsetNotYetAvailableError(StatusError):
    """A read that does not block reached the write head, or an offset is behind it."""

    status = STATUS_NAMES.index("OFFSET_NOT_YET_AVAILABLE")
    remedy = (
        'read with block=True to wait for it; Reader(on_missing="begin") or "end" begins elsewhere'
    )


class WrongRouteError(StatusError):
    """A replication peer resolves another route."""

    status = STATUS_NAMES.index("WRONG_ROUTE")


class ProposalMismatchError(StatusError):
    """A replication peer cannot adopt the proposed fragment."""

    status = STATUS_NAMES.index("PROPOSAL_MISMATCH")


class EtcdTransactionFailedError(StatusError):
    """Another process changed a spec in between."""

    status = STATUS_NAMES.index("ETCD_TRANSACTION_FAILED")
    remedy = "list again and apply with the current revisions (0: must not exist, -1: do not check)"


class NotAllowedError(StatusError):
    """The journal's flags forbid the operation."""

    status = STATUS_NAMES.index("NOT_ALLOWED")
    remedy = "check the journal's `flags`"


class WrongAppendOffsetError(StatusError):
    """The append named an offset that is not the journal's head."""

    status = STATUS_NAMES.index("WRONG_APPEND_OFFSET")
    remedy = "somebody else appended meanwhile: read up to the head and decide again"


class IndexHasGreaterOffsetError(StatusError):
    """Stored fragments reach past the brokers' write head."""

    status = STATUS_NAMES.index("INDEX_HAS_GREATER_OFFSET")
    remedy = "when no broker holds unpersisted content any more, run `gazctl journals reset-head`"


class RegisterMismatchError(StatusError):
    """The journal's registers are not as the append requires."""

    status = STATUS_NAMES.index("REGISTER_MISMATCH")
    remedy = "another process holds the journal's registers"


class SuspendedError(StatusError):
    """The journal is suspended."""

    status = STATUS_NAMES.index("SUSPENDED")
    remedy = "append to it to resume it"


class FragmentStoreUnhealthyError(StatusError):
    """The journal's first fragment store keeps failing its checks."""

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


# --------------------------------------------------------------------- calls


class CallError(GazetteError):
    """A call ended without an answer; an append may or may not have happened.

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
    """The broker could not be reached, or went away in the middle of the call."""

    def __init__(self, message: str, *, journal: str | None = None) -> None:
        super().__init__(message, code="UNAVAILABLE", journal=journal)


class UnauthenticatedError(CallError):
    """The token is missing, bad or expired, or lacks a capability."""

    def __init__(self, message: str, *, journal: str | None = None) -> None:
        super().__init__(message, code="UNAUTHENTICATED", journal=journal)


class DeadlineExceededError(CallError):
    """The caller's time ran out before the answer came."""

    def __init__(self, message: str, *, journal: str | None = None) -> None:
        super().__init__(message, code="DEADLINE_EXCEEDED", journal=journal)


class CallCancelledError(CallError):
    """The caller cancelled the call, or the server stopped."""

    def __init__(self, message: str, *, journal: str | None = None) -> None:
        super().__init__(message, code="CANCELLED", journal=journal)


# -------------------------------------------------------------------- stores


class StoreError(GazetteError):
    """A fragment store failed.

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
    """The store refused: permissions are missing, or its bucket or directory does not exist."""


class FragmentNotFoundError(StoreError):
    """A fragment is not in its store (any more)."""


class CorruptFragmentError(StoreError):
    """A stored fragment's content does not match its name."""


# ---------------------------------------------------------------------- etcd


class EtcdError(GazetteError):
    """Etcd failed, or refused a request."""


class EtcdUnavailableError(EtcdError):
    """Etcd could not be reached."""


class EtcdCompactedError(EtcdError):
    """A watch asked for a revision that Etcd no longer keeps."""


class LeaseLostError(EtcdError):
    """The process's lease expired or was revoked: its peers have removed it already."""


# ------------------------------------------------------------------ messages


class FramingError(GazetteError):
    """Malformed bytes of a journal: they cannot be decoded as messages."""


class DecodeError(FramingError):
    """A frame is whole, but its message cannot be decoded or is invalid."""


class DesyncError(FramingError):
    """Malformed bytes at the begin of a frame; ``skipped`` of them were skipped."""

    def __init__(
        self, message: str, *, skipped: int, journal: str | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message, journal=journal, offset=offset)
        self.skipped = skipped


class TornFrameError(FramingError):
    """The journal ends in the middle of a frame."""


class CheckpointMismatchError(GazetteError):
    """A checkpoint is of an earlier journal of the same name, which was deleted.

    Remedy: ``Reader(on_missing="begin")`` reads the journal that exists now from its begin, and
    ``on_missing="end"`` from its write head. If the content is the same as before, pass
    ``offsets=checkpoint.offsets`` instead of the checkpoint.
    """


class MappingError(GazetteError):
    """A message maps to no journal."""


class StreamProtocolError(GazetteError):
    """Violation of the rules of the stream transport, which ends the connection.

    Args:
        reason: the rule, as text; a GOAWAY frame sends it to the peer.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BackPressureError(GazetteError):
    """The bound of unsent messages is reached. Wait until some are sent, then continue."""


class DeliveryTimeoutError(GazetteError):
    """An append was not acknowledged within the delivery time-out. It may be written nevertheless.

    Remedy: look at the brokers (``gazctl journals list``), and publish again if readers may see a
    message twice; ``delivery_timeout_s=`` of a publisher sets the time.
    """


class ClosedError(GazetteError):
    """A closed object was used."""
