"""First precondition of an append: a listed store that is healthy (broker section 5.1).

Without the wait for the index's first refresh an empty index would make offset 0 look right on
a broker that is new to the journal. Without a healthy store, content would pile up here.

A primary that knows the head does not need the stores to find it: neither the first listing nor the
first check of the store is waited for, and a journal with several replicas goes on for some minutes
while its store fails.
"""

from __future__ import annotations

import asyncio
import contextlib

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.slot import InvalidatedError, Signal
from gazette_sdk.fragment.health import CHECK_PENDING, StoreHealth
from gazette_sdk.fragment.registry import StoreRegistry

__all__ = [
    "FAILING_TOLERATED_S",
    "FAILURES_MAX",
    "WAIT_MAX_S",
    "StoreUnhealthyError",
    "await_health",
    "is_dispensable",
]

FAILURES_MAX = 3
"""Failed checks in a row after which a store counts as unhealthy."""

FAILING_MAX_S = 2.5
"""A store that fails for this long counts as unhealthy, too: checks of one that hangs take time."""

FRESH_S = 5.0
"""An older result does not count: the store was not in use since, and may be back."""

WAIT_MAX_S = 4.0
"""Time an append waits for a store that fails for less, or was never checked: its client gets
an answer within 5 s."""

FAILING_TOLERATED_S = 600.0
"""Time for which journals with several replicas go on without their store. Until then their content
piles up on the disks of several brokers; a full disk refuses it earlier."""

_LISTING_CHECK_S = 1.0  # period of checks of a first listing: a large one takes long


class StoreUnhealthyError(Exception):
    """The store keeps failing. It becomes the status FRAGMENT_STORE_UNHEALTHY.

    Args:
        store: its URL.
        reason: why.
    """

    def __init__(self, store: str, reason: str) -> None:
        super().__init__(reason if store in reason else f"{store}: {reason}")


def _health(stores: StoreRegistry, store: str | None) -> StoreHealth | None:
    """Return the health of a store, and request its next check.

    Looked up by URL each time: an instance which failed or was swept is replaced.
    """
    if store is None:
        return None
    health = stores.health(store)
    health.request_soon()
    return health


def is_dispensable(health: StoreHealth, now: float, *, has_peers: bool) -> bool:
    """Return True if a primary that knows the head goes on without a store which is not healthy.

    Args:
        health: of the store.
        now: loop time.
        has_peers: True if other brokers have the journal's content, too.
    """
    if health.error == CHECK_PENDING:
        return True
    failing_since = now if health.failing_since is None else health.failing_since
    return has_peers and now - failing_since < FAILING_TOLERATED_S


async def await_health(
    index: Index,
    stores: StoreRegistry,
    store: str | None,
    invalidated: Signal,
    *,
    started_at: float,
    head_is_known: bool = False,
    has_peers: bool = False,
) -> None:
    """Wait for the index's first refresh, and until the journal's first store is healthy.

    With a known head only for a store that has to be healthy; see :func:`is_dispensable`.

    Args:
        index: the journal's.
        stores: all stores.
        store: URL of the journal's first; a journal without any is healthy.
        invalidated: ends the waiting.
        started_at: loop time at which the append began: its patience counts from then, so that
            appends which queued behind one another are answered together.
        head_is_known: True if the journal's head is known without the stores.
        has_peers: True if the journal has several replicas.

    Raises:
        StoreUnhealthyError: the store keeps failing, or a store cannot be listed.
        InvalidatedError: the resolution is old.
    """
    if invalidated.fired:
        raise InvalidatedError
    loop = asyncio.get_running_loop()
    deadline = started_at + WAIT_MAX_S
    while True:
        now = loop.time()
        health = _health(stores, store)
        if (
            health is None
            or health.error is None
            or (head_is_known and is_dispensable(health, now, has_peers=has_peers))
        ):
            if head_is_known or index.first_refresh.is_set():
                return
            if index.refresh_failure is not None and now >= deadline:
                raise StoreUnhealthyError(store or "", index.refresh_failure)
            # Of a listing that takes its time there is no failure: it is waited for.
            await _first_of(invalidated, max(deadline, now + _LISTING_CHECK_S), index=index)
            continue
        assert store is not None
        gives_up_at = deadline
        if health.failing_since is not None and now - health.checked_at < FRESH_S:
            gives_up_at = min(deadline, health.failing_since + FAILING_MAX_S)
            if health.consecutive_failures >= FAILURES_MAX:
                gives_up_at = now
        if now >= gives_up_at:
            raise StoreUnhealthyError(store, health.error)
        await _first_of(invalidated, gives_up_at, health=health)


async def _first_of(
    invalidated: Signal,
    until: float,
    *,
    index: Index | None = None,
    health: StoreHealth | None = None,
) -> None:
    """Wait for the first refresh, the next check or the invalidation, until a loop time at most."""
    waits: list[asyncio.Future[object]] = [asyncio.ensure_future(invalidated.wait())]
    if index is not None:
        waits.append(asyncio.ensure_future(index.first_refresh.wait()))
    if health is not None:
        waits.append(asyncio.ensure_future(health.changed()))
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if invalidated.fired:
        raise InvalidatedError
