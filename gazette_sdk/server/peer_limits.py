"""Limits of clients: connections and calls of each peer, processor time of all unknown ones.

A peer is an IP address. An unknown client has no good token, or has not shown it yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from gazette_sdk.errors import CallError

__all__ = ["PeerLimits", "UnknownCost", "UnknownShare", "http_refusal", "peer_of"]

_MAPPED = "::ffff:"  # begins an IPv4 address in the form of IPv6

PEERS_CHECKED = 1024
"""Number of peers from which on those without connections are forgotten."""


def peer_of(address: Any) -> str:
    """Return the IP address of a socket's peer; empty for a Unix socket."""
    return address[0].removeprefix(_MAPPED) if isinstance(address, tuple) and address else ""


class PeerLimits:
    """Counts of connections and calls by peer. Peers without an address have no limits.

    Args:
        connections_max: greatest number of connections of one peer; 0 for no limit.
        calls_max: greatest number of concurrent calls of one peer; 0 for no limit.
        calls_remedy: end of the error of one call more.

    Attributes:
        calls_max: as given.
    """

    def __init__(
        self,
        *,
        connections_max: int = 0,
        calls_max: int = 0,
        calls_remedy: str = "or raise --broker.max-peer-calls",
    ) -> None:
        self._connections_max = connections_max
        self.calls_max = calls_max
        self._calls_remedy = calls_remedy
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
                f"{peer} has {self.calls_max} calls in progress already; wait for some, "
                f"{self._calls_remedy}",
                code="RESOURCE_EXHAUSTED",
            )
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]


UNKNOWN_SHARE = 0.2
"""Part of a core that unknown clients get."""

UNKNOWN_CREDIT_S = 0.2
"""Processor time that they may use at once, after a pause: for probes of health, and for clients
that all connect again when a server has started."""

UNKNOWN_DEBT_S = 0.5
"""Greatest processor time that is held against them, so that a flood soon is forgotten."""


class UnknownCost(float, Enum):
    """Processor time of an unknown client's steps, in seconds, as measured."""

    CONNECTION = 0.00025
    GRPC_CONNECTION = 0.0005
    GRPC_CALL = 0.001
    HTTP_REQUEST = 0.0006
    STREAM_FRAME = 0.00002


class UnknownShare:
    """Share of a core that clients without a good token get together.

    Their steps are counted with fixed costs. Once they have used more than their share, connections
    are accepted slowly, and their requests and calls wait. What a client with a good token cost
    before that was known is given back.

    Args:
        now: monotonic time in seconds.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._debt_s = -UNKNOWN_CREDIT_S
        self._at_s = now()

    def spend(self, cost_s: float) -> None:
        """Count a step; give it back if its cost is negative."""
        debt_s = self._debt_now() + cost_s
        self._debt_s = max(-UNKNOWN_CREDIT_S, min(debt_s, UNKNOWN_DEBT_S))

    @property
    def delay_s(self) -> float:
        """Seconds until the next step may be made."""
        return max(0.0, self._debt_now() / UNKNOWN_SHARE)

    def _debt_now(self) -> float:
        now_s = self._now()
        self._debt_s = max(-UNKNOWN_CREDIT_S, self._debt_s - (now_s - self._at_s) * UNKNOWN_SHARE)
        self._at_s = now_s
        return self._debt_s


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
