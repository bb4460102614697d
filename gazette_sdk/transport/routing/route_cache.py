"""Routes of journals, as brokers sent them lately (client section 7)."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.routing.dispatcher import members_of
from gazette_sdk.transport.target import Peer
from gazette_sdk.transport.wires.base import PreparedAppend

__all__ = ["BROKERS_MAX", "DEFAULT_SIZE", "DEFAULT_TTL_S", "NO_ROUTE", "CachedRoute", "RouteCache"]

DEFAULT_SIZE = 256
"""Journals whose routes a client remembers: some kilobytes each at the very most."""

DEFAULT_TTL_S = 3600.0
"""Routes change rarely, and a stale one is noticed by the first call that uses it."""

NO_ROUTE = pb.Route(primary=-1)
"""A miss: no members, no primary. Never changed in place."""


BROKERS_MAX = 64
"""Brokers that are remembered beside the routes: one that answers is enough."""


class CachedRoute:
    """Remembered route of a journal.

    Attributes:
        route: the route. Never changed in place.
        append: plain append of the journal at its primary, once one was prepared: broker and
            encoded opening request, without a token.
        expires_at: monotonic seconds from which it is not used any more.
    """

    __slots__ = ("_accepted", "append", "expires_at", "route")

    def __init__(self, route: pb.Route, expires_at: float) -> None:
        self.route = route
        self.append: PreparedAppend | None = None
        self.expires_at = expires_at
        self._accepted: tuple[object, ...] | None = None

    def accept(self, response: pb.AppendResponse) -> None:
        """Remember the valid response of an append that was written."""
        self._accepted = _constant_parts(response)

    def confirms(self, response: pb.AppendResponse) -> bool:
        """Return True if a response differs from the last valid one in offsets and sum alone."""
        return (
            response.status == pb.OK
            and _constant_parts(response) == self._accepted
            and response.commit.begin <= response.commit.end
            and response.HasField("registers")
        )


def _constant_parts(response: pb.AppendResponse) -> tuple[object, ...]:
    """Return all of a response but the status, the offsets and the sum."""
    commit = response.commit
    return (
        response.header,
        commit.journal,
        commit.compression_codec,
        commit.path_postfix,
        response.registers,
    )


class RouteCache:
    """Least-recently-used map of bounded size from journal to route, with an age limit.

    Keys are journal names as requested, metadata included. Any thread may use it.

    Args:
        size: greatest number of entries; 0 never remembers, so that brokers proxy every call.
        ttl_s: age in seconds from which an entry is a miss.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        size: int = DEFAULT_SIZE,
        ttl_s: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = max(size, 0)
        self.ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.RLock()  # a signal handler may publish within
        self._entries: OrderedDict[str, CachedRoute] = OrderedDict()
        self._brokers: dict[Peer, None] = {}

    @property
    def brokers(self) -> Sequence[Peer]:
        """Brokers that routes have named, the latest last, also if the routes are forgotten."""
        with self._lock:
            return tuple(self._brokers)

    def forget_broker(self, peer: Peer) -> None:
        """Forget a broker until a route names it again."""
        with self._lock:
            self._brokers.pop(peer, None)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, journal: str) -> CachedRoute | None:
        """Return the remembered entry of a journal, if there is one."""
        entry = self._entries.get(journal)
        if entry is None:
            return None
        if self._clock() > entry.expires_at:
            self.invalidate(journal)
            return None
        try:
            self._entries.move_to_end(journal)
        except KeyError:
            return None  # another thread has just forgotten it
        return entry

    def route(self, journal: str) -> pb.Route:
        """Return the remembered route, or :data:`NO_ROUTE`."""
        entry = self.get(journal)
        return NO_ROUTE if entry is None else entry.route

    def update(self, journal: str, route: pb.Route) -> None:
        """Remember a route; one without members makes the cache forget instead."""
        if not route.members:
            self.invalidate(journal)
            return
        if self.size == 0:
            return
        expires_at = self._clock() + self.ttl_s
        entry = self._entries.get(journal)
        if entry is not None and entry.route == route:
            entry.expires_at = expires_at
            return
        kept = pb.Route()
        kept.CopyFrom(route)
        with self._lock:
            self._entries[journal] = CachedRoute(kept, expires_at)
            self._entries.move_to_end(journal)
            while len(self._entries) > self.size:
                self._entries.popitem(last=False)
            for peer in members_of(kept):
                self._brokers.pop(peer, None)
                self._brokers[peer] = None
            while len(self._brokers) > BROKERS_MAX:
                del self._brokers[next(iter(self._brokers))]

    def invalidate(self, journal: str) -> None:
        """Forget a journal's route."""
        with self._lock:
            self._entries.pop(journal, None)
