"""What a front knows of one call beside its request."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FOREIGN_CHUNK_BYTES", "MAX_CHUNK_BYTES", "Call"]

FOREIGN_CHUNK_BYTES = 32736
"""Greatest content of one read message toward clients that did not ask for more: with its
envelope such a message stays below 32 KiB, which is what other implementations' readers hold."""

MAX_CHUNK_BYTES = 1 << 20
"""Greatest content of one read message toward clients that ask for more."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a front (gRPC, HTTP, in-process) tells a service of one call.

    Attributes:
        authorization: value of the caller's ``authorization`` metadata or header.
        timeout_s: seconds which the caller is ready to wait, where it said so.
        chunk_bytes: greatest content of one read message.
    """

    authorization: str | None = None
    timeout_s: float | None = None
    chunk_bytes: int = FOREIGN_CHUNK_BYTES
