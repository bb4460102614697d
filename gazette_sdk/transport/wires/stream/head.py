"""Heads of calls: time limit, metadata and token."""

from __future__ import annotations

from collections.abc import Mapping

from gazette_sdk.protocol.stream_frames import CallHead

__all__ = ["Head"]


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
