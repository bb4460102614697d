"""Metadata of one call, as its front received them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gazette_sdk.errors import CallError

CHUNK_BYTES_METADATA = "gazette-chunk-bytes"
"""Metadata with which a client of ours asks for bigger read messages."""

PROXY_HEADER_METADATA = "x-proxyheader"
"""Metadata, or HTTP header, of an application's call that another process forwards: the header of
its resolution, as JSON."""

FOREIGN_CHUNK_BYTES = 32736
"""Greatest content of one read message toward clients that did not ask for more: with its
envelope such a message stays below 32 KiB, which is what other implementations' readers hold."""

MAX_CHUNK_BYTES = 1 << 20
"""Greatest content of one read message toward clients that ask for more."""


@dataclass(frozen=True, slots=True)
class Call:
    """Metadata of one call, which a front (gRPC, HTTP, in-process) gives to the service.

    Attributes:
        authorization: value of the caller's ``authorization`` metadata or header.
        timeout_s: seconds which the caller is ready to wait; ``None`` for no limit.
        chunk_bytes: greatest content of one read message.
        peer: IP address of the caller; empty if it is unknown.
        proxy_header: header of the process that forwards the call, as JSON; None if none does.
    """

    authorization: str | None = None
    timeout_s: float | None = None
    chunk_bytes: int = FOREIGN_CHUNK_BYTES
    peer: str = ""
    proxy_header: str | None = None


def call_of(
    metadata: Iterable[tuple[str, str]],
    *,
    timeout_s: float | None,
    chunk_bytes: int,
    peer: str = "",
) -> Call:
    """Return the call that metadata describe.

    Args:
        metadata: names, in lower case, and values.
        timeout_s: seconds which the caller is ready to wait.
        chunk_bytes: greatest content of a read message where the caller does not say.
        peer: IP address of the caller.

    Raises:
        CallError: a size is no number.
    """
    authorization = proxy_header = None
    for key, value in metadata:
        if key == "authorization":
            authorization = value
        elif key == PROXY_HEADER_METADATA:
            proxy_header = value
        elif key == CHUNK_BYTES_METADATA:
            if not value.isascii() or not value.isdigit():
                raise CallError(
                    f"metadata {CHUNK_BYTES_METADATA} must be a number of bytes, not {value!r}",
                    code="INVALID_ARGUMENT",
                )
            chunk_bytes = min(max(int(value[:20]), FOREIGN_CHUNK_BYTES), MAX_CHUNK_BYTES)
    return Call(authorization, timeout_s, chunk_bytes, peer, proxy_header)
