"""Errors of calls on the stream transport."""

from __future__ import annotations

from typing import Protocol

from google.protobuf.message import DecodeError

from gazette_sdk.errors import (
    CallCancelledError,
    CallError,
    ClosedError,
    DeadlineExceededError,
    GazetteError,
    StreamProtocolError,
    UnavailableError,
)
from gazette_sdk.protocol.status_codes import CODE_NAMES
from gazette_sdk.protocol.stream_calls import Status
from gazette_sdk.transport.target import Destination
from gazette_sdk.transport.wires.call_status import call_error
from gazette_sdk.transport.wires.stream.open_call import Ended

__all__ = ["EndedCall", "malformed", "no_response", "raise_failure", "too_long"]


class EndedCall(Protocol):
    """Call that is over: by its STATUS, or otherwise, for a reason."""

    @property
    def status(self) -> Status | None:
        """The STATUS that ended it."""

    @property
    def ended(self) -> Ended | None:
        """The reason why it ended without."""

    @property
    def reason(self) -> str:
        """The same in words."""


def raise_failure(to: Destination, call: EndedCall) -> None:
    """Raise the error of a call that is over, if it has one."""
    where = f"{to.rpc.name} at {to.where}"
    match call.ended:
        case Ended.LOST:
            raise UnavailableError(f"{where}: {call.reason}", journal=to.journal)
        case Ended.CLOSED:
            raise ClosedError(
                f"{to.rpc.name}: the transport was closed during the call", journal=to.journal
            )
        case Ended.EXPIRED:
            raise DeadlineExceededError(f"{where}: {call.reason}", journal=to.journal)
        case Ended.FAILED:
            raise CallCancelledError(f"{where}: its requests failed", journal=to.journal)
    status = call.status
    assert status is not None
    if status.code:
        raise call_error(
            CODE_NAMES[status.code],
            status.text,
            method=to.rpc.name,
            where=to.where,
            journal=to.journal,
            kind=status.kind,
        )


def too_long(to: Destination, error: StreamProtocolError) -> GazetteError:
    """Return the error of a request that is too long for the server."""
    return CallError(
        f"{to.rpc.name} at {to.where}: {error}", code="RESOURCE_EXHAUSTED", journal=to.journal
    )


def malformed(to: Destination, error: DecodeError) -> GazetteError:
    """Return the error of a response that is no message."""
    return CallError(
        f"{to.rpc.name} at {to.where}: a response is malformed: {error}",
        code="INTERNAL",
        journal=to.journal,
    )


def no_response(to: Destination) -> GazetteError:
    """Return the error of a call that succeeded without a response."""
    return CallError(f"{to.rpc.name} at {to.where}: ended without a response", journal=to.journal)
