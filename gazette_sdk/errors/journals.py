"""Errors of journals: statuses of a broker's responses, and journals that exist already."""

from __future__ import annotations

from typing import ClassVar

from gazette_sdk.errors.base import GazetteError

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
