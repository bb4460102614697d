"""Preconditions of an append: a route that is written, a healthy store; else the proxy.

An append whose journal has another primary is proxied to it (broker section 4).

The store must be listed and healthy (broker section 5.1). Without the wait for the index's first
refresh an empty index would make offset 0 look right on a broker that is new to the journal.
Without a healthy store, content would pile up here.

A primary that knows the head does not need the stores to find it: neither the first listing nor the
first check of the store is waited for, and a journal with several replicas continues for some
minutes while its store fails.

The primary writes its synchronized route to Etcd, or the journal's suspension. The last broker
withdraws the routes of journals that it leaves with all of their content stored. Each transaction
that changes a journal's last route changes its record, too (`routes`). Every transaction compares
the keys of its resolution (protocol section 13.2). It fails if one of them has changed since: then
the resolution is old by at least one revision.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.replication.pipeline import InvalidatedError, Signal
from gazette_sdk.broker.resolver import Resolution
from gazette_sdk.cluster.broker_keys import (
    BrokerAssignment,
    JournalEntry,
    is_consistent,
    route_value,
    withdrawn_route,
)
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Operation, Put, TxnResult
from gazette_sdk.errors import UnavailableError
from gazette_sdk.fragment.registry import CHECK_PENDING, StoreHealth, StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import complete
from gazette_sdk.tracing import CALLER
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import AppendItem, Target

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
"""Time for which journals with several replicas continue without their store. Until then their
content piles up on the disks of several brokers; a full disk refuses it earlier."""

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


def continues_without(health: StoreHealth, now: float, *, has_peers: bool) -> bool:
    """Return True if a primary that knows the head continues without a store which is not healthy.

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

    With a known head only for a store that has to be healthy; see :func:`continues_without`.

    Args:
        index: the journal's.
        stores: all stores.
        store: URL of the journal's first; a journal without any is healthy.
        invalidated: ends the waiting.
        started_at: loop time at which the append began: its patience counts from then, so that
            appends which queued after one another are answered together.
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
            or (head_is_known and continues_without(health, now, has_peers=has_peers))
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


TXN_ROUTES_MAX = 50
"""Routes withdrawn by one transaction, each with its record. Etcd takes 128 operations unless
configured otherwise."""

RecordRoute: TypeAlias = Callable[[JournalEntry, pb.Route | None], Sequence[Operation]]
"""Returns the operations that record a journal's last route, or delete its record."""


async def write_route(
    etcd: Etcd, resolution: Resolution, record: RecordRoute, known: Sequence[Compare] = ()
) -> TxnResult | None:
    """Advertise that the resolved route has synchronized.

    Args:
        etcd: the client.
        resolution: of the journal, whose primary we are.
        record: records the route.
        known: further conditions: what else the route rests on.

    Returns:
        the result; ``None`` when nothing was to be written.
    """
    if is_consistent(resolution.assignments):
        return None
    assert resolution.item is not None
    value = route_value(resolution.header.route)
    return await etcd.txn(
        [
            *(
                Compare.mod_revision(entry.key, entry.mod_revision)
                for entry in resolution.assignments
            ),
            *known,
        ],
        # The lease stays the assigned member's: an assignment dies with its member.
        [
            *(Put(entry.key, value, ignore_lease=True) for entry in resolution.assignments),
            *record(resolution.item, resolution.header.route),
        ],
    )


async def withdraw_routes(
    etcd: Etcd, routes: Sequence[tuple[JournalEntry, BrokerAssignment, int]], record: RecordRoute
) -> None:
    """State that journals have no content but what is stored: their last member leaves.

    So a journal does not wait for this broker afterwards, but continues after its stored content. A
    journal whose assignment has changed keeps its route.

    Args:
        etcd: the client.
        routes: the journals, each with its only assignment, and the end of its stored content.
        record: records that the route is withdrawn.

    Raises:
        EtcdError: Etcd failed.
    """
    for begin in range(0, len(routes), TXN_ROUTES_MAX):
        some = routes[begin : begin + TXN_ROUTES_MAX]
        changes: list[Operation] = []
        for item, entry, stored_end in some:
            withdrawn = withdrawn_route(stored_end)
            changes.append(Put(entry.key, withdrawn.SerializeToString(), ignore_lease=True))
            changes += record(item, withdrawn)
        await etcd.txn(
            [Compare.mod_revision(entry.key, entry.mod_revision) for _, entry, _ in some], changes
        )


async def write_suspend(
    etcd: Etcd, resolution: Resolution, suspend: pb.JournalSpec.Suspend, record: RecordRoute
) -> int:
    """Write a journal's suspension into its spec.

    Args:
        etcd: the client.
        resolution: of the journal.
        suspend: its new suspension.
        record: deletes the record of its route, which ends with the suspension.

    Returns:
        the revision to resolve at.
    """
    assert resolution.item is not None
    item = resolution.item
    spec = pb.JournalSpec()
    spec.CopyFrom(item.value)
    spec.suspend.CopyFrom(suspend)
    result = await etcd.txn(
        [
            Compare.mod_revision(entry.key, entry.mod_revision)
            for entry in (item, *resolution.assignments)
        ],
        [Put(item.key, complete(spec).SerializeToString()), *record(item, None)],
    )
    return result.revision if result.succeeded else resolution.revision + 1


async def proxy_append(
    peers: Transport,
    resolution: Resolution,
    request: pb.AppendRequest,
    items: AsyncIterator[AppendItem],
    traceparent: str,
) -> pb.AppendResponse:
    """Relay an append to the journal's primary, and return its response.

    Args:
        peers: carries the append.
        resolution: of the journal, to another broker.
        request: the opening request.
        items: what follows it.
        traceparent: context of its span; empty for none.

    Raises:
        UnavailableError: the primary's address is unknown: its member key is gone.
    """
    header = resolution.header
    if not header.route.endpoints[header.route.primary]:
        raise UnavailableError(
            "the journal's primary is gone from Etcd; try again", journal=resolution.journal
        )
    opening = pb.AppendRequest()
    opening.CopyFrom(request)
    opening.journal = resolution.journal
    opening.header.CopyFrom(header)
    target = Target(route=header.route, member=header.process_id)
    CALLER.set(traceparent)  # in the task of this call
    return await peers.append(_after(opening, items), target)


async def _after(
    opening: pb.AppendRequest, items: AsyncIterator[AppendItem]
) -> AsyncIterator[AppendItem]:
    yield opening
    async for item in items:
        yield item
