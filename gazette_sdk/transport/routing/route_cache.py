"""Routes of journals, as brokers told us lately (client section 7)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["DEFAULT_SIZE", "DEFAULT_TTL_S", "NO_ROUTE", "RouteCache"]

DEFAULT_SIZE = 256
"""Journals whose routes a client remembers: some kilobytes each at the very most."""

DEFAULT_TTL_S = 3600.0
"""Routes change rarely, and a stale one is noticed by the first call that uses it."""

NO_ROUTE = pb.Route(primary=-1)
"""A miss: no members, no primary. Never changed in place."""


class RouteCache:
    """A least-recently-used map of bounded size from journal to route, with an age limit.

    Keys are journal names as requested, metadata included.

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
        self._entries: OrderedDict[str, tuple[float, pb.Route]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def route(self, journal: str) -> pb.Route:
        """The remembered route, or :data:`NO_ROUTE`."""
        entry = self._entries.get(journal)
        if entry is None:
            return NO_ROUTE
        stored_at, route = entry
        if self._clock() - stored_at > self.ttl_s:
            del self._entries[journal]
            return NO_ROUTE
        self._entries.move_to_end(journal)
        return route

    def peek(self, journal: str) -> pb.Route | None:
        """The remembered route, if there is one. Any thread may ask, as this changes nothing."""
        entry = self._entries.get(journal)
        if entry is None or self._clock() - entry[0] > self.ttl_s:
            return None
        return entry[1]

    def update(self, journal: str, route: pb.Route) -> None:
        """Remember a route; one without members makes the cache forget instead."""
        if not route.members:
            self.invalidate(journal)
            return
        if self.size == 0:
            return
        entry = self._entries.get(journal)
        if entry is not None and entry[1] == route:
            kept = entry[1]  # callers may know it by its identity
        else:
            kept = pb.Route()
            kept.CopyFrom(route)
        self._entries[journal] = (self._clock(), kept)
        self._entries.move_to_end(journal)
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)

    def invalidate(self, journal: str) -> None:
        """Forget a journal's route."""
        self._entries.pop(journal, None)
