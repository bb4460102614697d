"""Limits of the connections and of the concurrent calls of one peer, which is an IP address."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from gazette_sdk.errors import CallError

__all__ = [
    "PeerLimits",
    "http_refusal",
    "peer_of",
    "peer_of_splice",
    "splice_address",
]

_SPLICE = "gazette-splice"
_MAPPED = "::ffff:"  # begins an IPv4 address in the form of IPv6

PEERS_CHECKED = 1024
"""Number of peers from which on those without connections are forgotten."""


def peer_of(address: Any) -> str:
    """Return the IP address of a socket's peer; empty for a Unix socket."""
    return address[0].removeprefix(_MAPPED) if isinstance(address, tuple) and address else ""


_splices = itertools.count()


def splice_address(peer: str) -> str | None:
    """Return the address to bind a spliced connection to, so that gRPC knows its peer.

    It is a name in Linux's abstract namespace, unique and without a file. Other systems have none.
    """
    if sys.platform != "linux" or not peer:
        return None
    return f"\0{_SPLICE}-{os.getpid()}-{next(_splices)}-{peer}"


def peer_of_splice(address: str) -> str:
    """Return the IP address in the peer of a spliced gRPC call; empty if it has none."""
    kind, _, name = address.partition(":")
    if kind != "unix-abstract" or not name.startswith(_SPLICE):
        return ""
    return unquote(name.removeprefix(_SPLICE).split("-", 3)[3])


class PeerLimits:
    """Counts of connections and calls by peer. Peers without an address have no limits.

    Args:
        connections_max: greatest number of connections of one peer; 0 for no limit.
        calls_max: greatest number of concurrent calls of one peer; 0 for no limit.

    Attributes:
        calls_max: as given.
    """

    def __init__(self, *, connections_max: int = 0, calls_max: int = 0) -> None:
        self._connections_max = connections_max
        self.calls_max = calls_max
        self._connections: dict[str, weakref.WeakSet[asyncio.BaseTransport]] = {}
        self._calls: Counter[str] = Counter()

    def connected(self, transport: asyncio.BaseTransport) -> str:
        """Count a connection. Return the reason if it is refused, else the empty string."""
        peer = peer_of(transport.get_extra_info("peername"))
        if not self._connections_max or not peer:
            return ""
        if len(self._connections) >= PEERS_CHECKED:
            self._connections = {ip: open_ for ip, open_ in self._connections.items() if open_}
        found = self._connections.setdefault(peer, weakref.WeakSet())
        if len(found) >= self._connections_max:
            for other in [other for other in found if other.is_closing()]:
                found.discard(other)
        if len(found) >= self._connections_max:
            return (
                f"{peer} has {self._connections_max} connections already; close some, or raise "
                "--broker.max-peer-connections"
            )
        found.add(transport)
        return ""

    @contextlib.contextmanager
    def calling(self, peer: str) -> Iterator[None]:
        """Count a call while the context is open.

        Raises:
            CallError: RESOURCE_EXHAUSTED: the peer has too many calls.
        """
        if not self.calls_max or not peer:
            yield
            return
        if self._calls[peer] >= self.calls_max:
            raise CallError(
                f"{peer} has {self.calls_max} calls in progress already; wait for some, or raise "
                "--broker.max-peer-calls",
                code="RESOURCE_EXHAUSTED",
            )
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]


def http_refusal(reason: str) -> bytes:
    """Return the response that refuses an HTTP/1 connection, or one of gRPC.

    gRPC clients report the status of such a response, and dial again with a growing pause. After
    HTTP/2 frames that begin with SETTINGS they dial again at once, and without end.
    """
    body = reason.encode() + b"\n"
    return (
        b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: text/plain; charset=utf-8\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body
