"""Errors of calls, which end without an answer, and of their connections."""

from __future__ import annotations

from gazette_sdk.errors.base import GazetteError


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
