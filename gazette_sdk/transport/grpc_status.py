"""How a gRPC call really ended, and which of our errors that is."""

from __future__ import annotations

from typing import Any

import grpc

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

__all__ = ["FirstStatus", "call_error"]

_STORE_ERRORS = {
    kind.__name__: kind
    for kind in (StoreError, StoreAuthorizationError, FragmentNotFoundError, CorruptFragmentError)
}

_CORE_FAILURE = "Internal error from Core"
"""What grpcio reports of a send that failed because the call had already ended."""


class FirstStatus:
    """Remembers the status with which the *server* ended a call.

    When a server refuses a streaming call before the client has finished sending, the refusal
    arrives, then the send under way fails, and grpcio overwrites the refusal with an error of
    its own (``Internal error from Core``). The callback that runs when the call ends sees the
    refusal first.

    Args:
        call: a call of ``grpc.aio``.
    """

    def __init__(self, call: Any) -> None:
        self.code: grpc.StatusCode | None = None
        self.details = ""
        call.add_done_callback(self._ended)

    def _ended(self, call: Any) -> None:
        details = _finished(call.details()) or ""
        if self.code is None and details != _CORE_FAILURE:
            self.code, self.details = _finished(call.code()), details


def _finished(coroutine: Any) -> Any:
    """The result of a coroutine that is known not to wait."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    return None


def call_error(
    code: grpc.StatusCode,
    details: str,
    *,
    method: str,
    where: str,
    journal: str | None,
    kind: str = "",
) -> GazetteError:
    """The error of a call that ended with a gRPC status instead of a response.

    Args:
        code: the gRPC code.
        details: the server's text, or that of the gRPC library.
        method: name of the call.
        where: which broker it was sent to, in words.
        journal: the journal it is about.
        kind: class of the broker's error, where it told.
    """
    text = f"{method} at {where}: {details or code.name}"
    if code is grpc.StatusCode.UNKNOWN and kind in _STORE_ERRORS:
        return _STORE_ERRORS[kind](text, journal=journal)
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(text, journal=journal)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return UnauthenticatedError(
            f"{text}; give the client the cluster's auth keys, or a token with the capability",
            journal=journal,
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError(text, journal=journal)
    if code is grpc.StatusCode.CANCELLED:
        return CallCancelledError(text, journal=journal)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        text += "; is this the address of a Gazette broker?"
    return CallError(text, code=code.name, journal=journal)
