"""Errors of calls that ended with a gRPC status instead of a response."""

from __future__ import annotations

from gazette_sdk.errors import (
    CallCancelledError,
    CallError,
    CorruptFragmentError,
    DeadlineExceededError,
    FragmentNotFoundError,
    GazetteError,
    StoreAuthorizationError,
    StoreError,
    UnauthenticatedError,
    UnavailableError,
)
from gazette_sdk.protocol.rules import SERVICE

__all__ = ["call_error"]

_STORE_ERRORS = {
    kind.__name__: kind
    for kind in (StoreError, StoreAuthorizationError, FragmentNotFoundError, CorruptFragmentError)
}


def call_error(
    code: str,
    details: str,
    *,
    method: str,
    where: str,
    journal: str | None,
    kind: str = "",
    service: str = SERVICE,
) -> GazetteError:
    """Return the error of a call.

    Args:
        code: name of the gRPC code.
        details: the server's text, or that of the gRPC library.
        method: name of the call.
        where: which broker it was sent to, in words.
        journal: the journal it is about.
        kind: class of the broker's error, where it sent one.
        service: full name of the service that was called. Only brokers serve journals.
    """
    text = f"{method} at {where}: {details or code}"
    if code == "UNKNOWN" and kind in _STORE_ERRORS:
        return _STORE_ERRORS[kind](text, journal=journal)
    if code == "UNAVAILABLE":
        return UnavailableError(text, journal=journal)
    if code == "UNAUTHENTICATED":
        return UnauthenticatedError(
            f"{text}; give the client the cluster's auth keys, or a token with the capability",
            journal=journal,
        )
    if code == "DEADLINE_EXCEEDED":
        return DeadlineExceededError(text, journal=journal)
    if code == "CANCELLED":
        return CallCancelledError(text, journal=journal)
    if code == "UNIMPLEMENTED":
        process = "broker" if service == SERVICE else "consumer"
        text += f"; is this the address of a Gazette {process}?"
    return CallError(text, code=code, journal=journal)
