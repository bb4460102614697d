"""Writes of a journal's primary to Etcd: its synchronized route, and its suspension.

The last broker withdraws the routes of journals that it leaves with all of their content stored.
Each transaction that changes a journal's last route changes its record, too (`recorded_routes`).

Every transaction compares the keys of its resolution (protocol section 13.2). It fails if one of
them has changed since: then the resolution is old by at least one revision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

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
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import complete

__all__ = ["RecordRoute", "withdraw_routes", "write_route", "write_suspend"]

TXN_ROUTES_MAX = 50
"""Routes withdrawn by one transaction, each with its record. Etcd takes 128 operations unless
configured otherwise."""

RecordRoute: TypeAlias = Callable[[JournalEntry, pb.Route | None], Sequence[Operation]]
"""Returns the operations that record a journal's last route, or delete its record."""


async def write_route(etcd: Etcd, resolution: Resolution, record: RecordRoute) -> TxnResult | None:
    """Advertise that the resolved route has synchronized.

    Args:
        etcd: the client.
        resolution: of the journal, whose primary we are.
        record: records the route.

    Returns:
        the result; ``None`` when nothing was to be written.
    """
    if is_consistent(resolution.assignments):
        return None
    assert resolution.item is not None
    value = route_value(resolution.header.route)
    return await etcd.txn(
        [Compare.mod_revision(entry.key, entry.mod_revision) for entry in resolution.assignments],
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

    So a journal does not wait for this broker afterwards, but goes on behind its stored content. A
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
