"""State of the calls on one connection that both ends have."""

from __future__ import annotations

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.stream_frames.encoding import Kind, encode, encode_goaway

__all__ = ["Calls"]


class Calls:
    """Calls of one connection, at either end: their numbers, and how the connection ends.

    Attributes:
        leaving: GOAWAY was sent or received: no call can begin any more.
        failed: the peer broke the rules; send :meth:`goaway` and close the connection.
    """

    __slots__ = ("_newest", "_oldest", "failed", "leaving")

    def __init__(self) -> None:
        self.leaving = False
        self.failed: StreamProtocolError | None = None
        self._newest = 0
        self._oldest = 1

    @property
    def open_calls(self) -> range:
        """Numbers of the calls without STATUS, the oldest first."""
        return range(self._oldest, self._newest + 1)

    @property
    def drained(self) -> bool:
        """Return True if no call is open and none can begin. The client closes the connection."""
        return self.leaving and self._newest < self._oldest

    def ping(self, payload: bytes) -> bytes:
        """Return a PING of up to 64 bytes; the peer sends them back."""
        return encode(Kind.PING, payload)

    def pong(self, payload: bytes) -> bytes:
        """Return the answer to a :class:`Ping`."""
        return encode(Kind.PONG, payload)

    def goaway(self, reason: str) -> bytes:
        """Return a GOAWAY: no new calls begin. Open ones go on unless the rules were broken."""
        self.leaving = True
        return encode_goaway(reason)
