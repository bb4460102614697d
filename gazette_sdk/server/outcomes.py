"""Outcomes of calls: errors of services as gRPC status codes, the same on every wire."""

from __future__ import annotations

import logging
from typing import NamedTuple

from gazette_sdk.errors import CallError, GazetteError, StoreError
from gazette_sdk.protocol.rules import CODE_NAMES
from gazette_sdk.user_code import described, text_of

__all__ = ["CODES", "MAX_DETAILS", "SUCCESS", "Outcome", "malformed", "outcome_of"]

_log = logging.getLogger(__name__)

MAX_DETAILS = 2048
"""Greatest length of an error's text: gRPC sends it as a trailer, whose size is bounded."""

CODES = {name: number for number, name in enumerate(CODE_NAMES)}
"""Numbers of gRPC's status codes."""


class Outcome(NamedTuple):
    """Status of a call that has ended.

    Attributes:
        code: name of a gRPC status code.
        text: the reason of a failure.
        kind: name of the error's class, where the client needs it: that of a store's error.
    """

    code: str
    text: str = ""
    kind: str = ""

    @property
    def number(self) -> int:
        """The code's number."""
        return CODES[self.code]


SUCCESS = Outcome("OK")


def outcome_of(error: Exception, path: str) -> Outcome:
    """Return the outcome of a call that raised, and log it.

    A :class:`CallError` keeps its code. Every other error, also a bug, is UNKNOWN.

    Args:
        error: what the service raised.
        path: of the method.
    """
    if not isinstance(error, GazetteError):
        _log.error("call failed unexpectedly", extra={"method": path}, exc_info=error)
        return Outcome("UNKNOWN", described(error)[:MAX_DETAILS])
    code, text = "UNKNOWN", text_of(error)
    if isinstance(error, CallError) and CODES.get(error.code):
        code = error.code
    _log.debug("call failed", extra={"method": path, "err": text})
    kind = type(error).__name__ if isinstance(error, StoreError) else ""
    return Outcome(code, text[:MAX_DETAILS], kind)


def malformed(path: str) -> CallError:
    """Return the error of bytes that are no request."""
    return CallError(f"bytes received are no request of {path}", code="INTERNAL")
