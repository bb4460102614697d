"""Writes of a journal's primary to Etcd: its synchronized route, and its suspension.

The last broker withdraws the routes of journals that it leaves with all of their content stored.

Every transaction compares the keys of its resolution (protocol section 13.2). It fails if one of
them has changed since: then the resolution is old by at least one revision.
"""

from __future__ import annotations

from collections.abc import Sequence

from gazette_sdk.broker.resolver import Resolution
from gazette_sdk.cluster.broker_keys import (
    WITHDRAWN_ROUTE,
    BrokerAssignment,
    is_consistent,
    route_value,
)
from gazette_sdk.cluster.etcd import Compare, Etcd, Put
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.non_null_fields import complete

__all__ = ["withdraw_routes", "write_route", "write_suspend"]

TXN_PUTS_MAX = 100
"""Routes withdrawn by one transaction. Etcd takes 128 operations unless configured otherwise."""


async def write_route(etcd: Etcd, resolution: Resolution) -> int | None:
    """Advertise that the resolved route has synchronized.

    Args:
        etcd: the client.
        resolution: of the journal, whose primary we are.

    Returns:
        the revision to resolve at; ``None`` when nothing was to be written.
    """
    if is_consistent(resolution.assignments):
        return None
    value = route_value(resolution.header.route)
    result = await etcd.txn(
        [Compare.mod_revision(entry.key, entry.mod_revision) for entry in resolution.assignments],
        # The lease stays the assigned member's: an assignment dies with its member.
        [Put(entry.key, value, ignore_lease=True) for entry in resolution.assignments],
    )
    return result.revision if result.succeeded else resolution.revision + 1


async def withdraw_routes(etcd: Etcd, entries: Sequence[BrokerAssignment]) -> None:
    """State that journals have no content but what is stored: their last member leaves.

    So a journal does not wait for this broker afterwards, but goes on behind its stored content. A
    journal whose assignment has changed keeps its route.

    Args:
        etcd: the client.
        entries: assignments of the journals, each of them the journal's only one.

    Raises:
        EtcdError: Etcd failed.
    """
    for begin in range(0, len(entries), TXN_PUTS_MAX):
        some = entries[begin : begin + TXN_PUTS_MAX]
        await etcd.txn(
            [Compare.mod_revision(entry.key, entry.mod_revision) for entry in some],
            [Put(entry.key, WITHDRAWN_ROUTE, ignore_lease=True) for entry in some],
        )


async def write_suspend(etcd: Etcd, resolution: Resolution, suspend: pb.JournalSpec.Suspend) -> int:
    """Write a journal's suspension into its spec.

    Args:
        etcd: the client.
        resolution: of the journal.
        suspend: its new suspension.

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
        [Put(item.key, complete(spec).SerializeToString())],
    )
    return result.revision if result.succeeded else resolution.revision + 1
