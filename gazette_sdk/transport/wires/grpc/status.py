"""Status with which a server ended a gRPC call."""

from __future__ import annotations

from typing import Any

import grpc

__all__ = ["FirstStatus"]

_CORE_FAILURE = "Internal error from Core"
"""Details that grpcio reports of a send that failed because the call had already ended."""


class FirstStatus:
    """First status of a call: the one with which the *server* ended it.

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
    """Return the result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    return None
