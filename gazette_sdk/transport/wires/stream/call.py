"""Parts of a call that the asyncio and the blocking connection share: its head, and its end."""

from __future__ import annotations

import enum
from collections.abc import Mapping

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
from gazette_sdk.protocol.rules import CODE_NAMES
from gazette_sdk.protocol.stream_calls import Status
from gazette_sdk.protocol.stream_pb2 import CallHead
from gazette_sdk.transport.target import Destination
from gazette_sdk.transport.wires.call_status import call_error

__all__ = ["Call", "Ended", "Head", "malformed", "no_response", "too_long"]

ALPN = "gzt/1"
"""This wire's name in TLS."""


class Head:
    """Head of calls of one kind, encoded once.

    Args:
        timeout_s: time limit of the call, for the server; 0 for none.
        after_success: True if the call is to run only if the one before it succeeded.
        metadata: of the call.
    """

    __slots__ = ("_encoded", "_head")

    def __init__(
        self,
        *,
        timeout_s: float = 0.0,
        after_success: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        timeout_ms = max(1, round(timeout_s * 1000)) if timeout_s else 0
        self._head = CallHead(
            timeout_ms=timeout_ms, after_success=after_success, metadata=metadata or {}
        )
        self._encoded = self._head.SerializeToString()

    def encoded(self, authorization: str | None) -> bytes:
        """Return the encoded head, with a token where one is given."""
        if authorization is None:
            return self._encoded
        head = CallHead()
        head.CopyFrom(self._head)
        head.metadata["authorization"] = authorization
        return head.SerializeToString()


class Ended(enum.Enum):
    """Reason for which a call ended without a STATUS."""

    LOST = "the connection was lost"
    CLOSED = "the transport was closed"
    EXPIRED = "its time ran out"
    FAILED = "its requests failed"


class Call:
    """Call on a connection. It ends by a STATUS, or otherwise.

    Attributes:
        status: the STATUS that ended it.
        ended: why it ended otherwise.
        reason: the same in words.
    """

    # Defaults of the class: most calls set the status only.
    status: Status | None = None
    ended: Ended | None = None
    reason = ""

    @property
    def over(self) -> bool:
        """True if nothing more will come, and nothing more need be sent."""
        return self.status is not None or self.ended is not None

    def raise_failure(self, to: Destination) -> None:
        """Raise the error of a call that is over, if it has one."""
        status = self.status
        if self.ended is None and status is not None and not status.code:
            return
        where = f"{to.rpc.name} at {to.where}"
        match self.ended:
            case Ended.LOST:
                raise UnavailableError(f"{where}: {self.reason}", journal=to.journal)
            case Ended.CLOSED:
                raise ClosedError(
                    f"{to.rpc.name}: the transport was closed during the call", journal=to.journal
                )
            case Ended.EXPIRED:
                raise DeadlineExceededError(f"{where}: {self.reason}", journal=to.journal)
            case Ended.FAILED:
                raise CallCancelledError(f"{where}: its requests failed", journal=to.journal)
        assert status is not None
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


def check_alpn(agreed: str | None) -> None:
    """Check the protocol that TLS agreed on; None where there is none.

    Raises:
        StreamProtocolError: it is another one than ours.
    """
    if agreed not in {None, ALPN}:
        raise StreamProtocolError(f"it chose {agreed} in TLS")
