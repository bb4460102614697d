"""The first precondition of an append: its journal's index and store are known (broker 5.1).

Without the wait for the index's first refresh an empty index would make offset 0 look right on
a broker that is new to the journal. Without a healthy store, content would pile up here.
"""

from __future__ import annotations

import asyncio

from gazette_sdk.broker.index import Index
from gazette_sdk.broker.slot import InvalidatedError, Signal
from gazette_sdk.fragment.health import StoreHealth
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["FAILURES_MAX", "WAIT_MAX_S", "StoreUnhealthyError", "await_health"]

FAILURES_MAX = 3
"""Failed checks in a row after which a store counts as unhealthy, whoever asked for them."""

WAIT_MAX_S = 4.0
"""How long an append waits for a store that has failed less often, or was never checked: its
client gets an answer within 5 s."""


class StoreUnhealthyError(Exception):
    """The store keeps failing. It becomes the status FRAGMENT_STORE_UNHEALTHY.

    Args:
        store: its URL.
        reason: why.
    """

    def __init__(self, store: str, reason: str) -> None:
        super().__init__(f"{store}: {reason}")


async def await_health(
    index: Index,
    stores: StoreRegistry,
    spec: pb.JournalSpec,
    invalidated: Signal,
    *,
    started_at: float,
) -> None:
    """Return when the index had its first refresh, and the journal's first store is healthy.

    Args:
        index: the journal's.
        stores: all stores.
        spec: the journal's; an empty list of stores is healthy.
        invalidated: ends the waiting.
        started_at: loop time at which the append began: its patience counts from then, so that
            appends which queued behind one another are answered together.

    Raises:
        StoreUnhealthyError: the store keeps failing.
        InvalidatedError: the resolution is old.
    """
    if invalidated.fired:
        raise InvalidatedError
    url = spec.fragment.stores[0] if spec.fragment.stores else None
    while True:
        # Looked up by URL each time: an instance which failed or was swept is replaced.
        health = stores.health(url) if url is not None else None
        if health is not None:
            health.request_soon()
        if health is None or health.error is None:
            if index.first_refresh.is_set():
                return
            await _first_of(invalidated, None, index=index)
            continue
        assert url is not None
        patience_s = started_at + WAIT_MAX_S - asyncio.get_running_loop().time()
        if health.consecutive_failures >= FAILURES_MAX or patience_s <= 0:
            raise StoreUnhealthyError(url, health.error)
        await _first_of(invalidated, patience_s, health=health)


async def _first_of(
    invalidated: Signal,
    timeout_s: float | None,
    *,
    index: Index | None = None,
    health: StoreHealth | None = None,
) -> None:
    """Wait for the index's first refresh or the store's next check, or the invalidation."""
    waits: list[asyncio.Future[object]] = [asyncio.ensure_future(invalidated.wait())]
    if index is not None:
        waits.append(asyncio.ensure_future(index.first_refresh.wait()))
    if health is not None:
        waits.append(asyncio.ensure_future(health.changed()))
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if invalidated.fired:
        raise InvalidatedError
