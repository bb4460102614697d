"""Recorder of routes that nobody recorded in the transaction which wrote them.

Those are routes of primaries of other implementations, and routes of a broker that was alone when
it wrote them. Records of journals that are deleted or suspended are deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from gazette_sdk.broker.recovery.last_routes import LastRoute, LastRoutes
from gazette_sdk.broker.recovery.recorded_routes import RecordedRoute, RecordedRoutes
from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Operation
from gazette_sdk.errors import EtcdError
from gazette_sdk.outage import Outage
from gazette_sdk.protocol.journal_spec import is_suspended

__all__ = ["RouteRecorder"]

RETRY_S = 10.0
"""Pause before records are loaded again, after Etcd refused it."""

SETTLING_S = 0.2
"""Pause from a change of the mirrors to the comparison: they follow one transaction apart."""

TXN_CHANGES_MAX = 100
"""Records changed by one transaction. Etcd takes 128 operations unless configured otherwise."""

_log = logging.getLogger(__name__)


class RouteRecorder:
    """Recorder of one broker. It belongs to the event loop.

    Args:
        etcd: the client.
        keyspace: mirror of the cluster. The caller adds :meth:`wake` to its observers, behind that
            of ``last_routes``.
        records: recorded routes.
        last_routes: last routes of journals.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: BrokerKeySpace,
        records: RecordedRoutes,
        last_routes: LastRoutes,
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._records = records
        self._last_routes = last_routes
        self._woken = asyncio.Event()
        self._woken.set()
        records.mirror.observers.append(self.wake)

    def wake(self) -> None:
        """Compare all journals with their records again: keys have changed."""
        self._woken.set()

    async def run(self) -> None:
        """Follow the records, and complete them, until cancelled.

        Etcd's roles may forbid that: then it is tried again now and then.
        """
        outage = Outage(_log, "watch of recorded routes")
        while True:
            try:
                await self._records.load(self._etcd)
                outage.ended()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._complete(), name="complete records")
                    group.create_task(self._records.mirror.watch(self._etcd), name="watch records")
            except* EtcdError as errors:
                outage.failed(errors.exceptions[0])
            await asyncio.sleep(RETRY_S)

    async def _complete(self) -> None:
        while True:
            await self._woken.wait()
            await asyncio.sleep(SETTLING_S)
            self._woken.clear()
            changes = self._changes()
            for begin in range(0, len(changes), TXN_CHANGES_MAX):
                some = changes[begin : begin + TXN_CHANGES_MAX]
                # If another broker was faster, its changes wake us.
                await self._etcd.txn([each[0] for each in some], [each[1] for each in some])

    def _changes(self) -> Sequence[tuple[Compare, Operation]]:
        """Return the changes that complete the records, each with its condition."""
        if not self._records.is_used:
            return ()
        changes: list[tuple[Compare, Operation]] = []
        for item in self._keyspace.items():
            last = self._last_routes.last(item.id)
            known = self._records.own_entry(item)
            if (
                last is None
                or last.is_claimed
                or (known is not None and _is_as_new(known.value, last))
            ):
                continue
            (put,) = self._records.change(item, last.route, revision=last.revision)
            revision = known.mod_revision if known is not None else 0
            changes.append((Compare.mod_revision(put.key, revision), put))
        for entry in self._records.mirror.entries:
            if self._is_over(entry.value):
                condition = Compare.mod_revision(entry.key, entry.mod_revision)
                changes.append((condition, Delete(entry.key)))
        return changes

    def _is_over(self, record: RecordedRoute) -> bool:
        """Return True if a record's journal has no last route: it is deleted, or suspended."""
        item = self._keyspace.item(record.journal)
        if record.create_revision == 0:  # claims, until the journal has a record
            return item is not None and self._records.own_entry(item) is not None
        if item is None or item.create_revision != record.create_revision:
            # The journal may be newer than our mirror of the cluster.
            return record.create_revision <= self._keyspace.revision
        return is_suspended(item.value)


def _is_as_new(record: RecordedRoute, last: LastRoute) -> bool:
    """Return True if a record need not be replaced. A slot that moved has its route anew."""
    if record.revision >= last.revision:
        return True
    known, route = record.route, last.route
    return (known.members, known.primary) == (route.members, route.primary)
