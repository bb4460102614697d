"""Waiting journals: a broker that is back over its spool directory takes them over again.

A journal waits while none of its present brokers was a member of its last route (`last_routes`). A
broker whose spool directory has all of its acknowledged bytes takes the primary's place, in one
transaction, and so ends the wait. The allocator moves the journal later if it wants to. It may also
add this broker at the same moment, since its transaction does not depend on ours: then the second
assignment of this broker is deleted again.

The directory has all acknowledged bytes of a journal if its head is known and nobody continued the
journal since (`etcd_history`); or if the broker that used the directory before is a member of the
last route, which is the only trace of a journal without content.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from gazette_sdk.broker.recovery.etcd_history import EtcdHistory
from gazette_sdk.broker.recovery.last_routes import LastRoutes
from gazette_sdk.broker.recovery.recorded_routes import RecordedRoutes
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.cluster.broker_keys import BrokerAssignment, BrokerKeySpace, route_value
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Operation, Put
from gazette_sdk.errors import EtcdError
from gazette_sdk.outage import Outage
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import desired_replication

__all__ = ["WaitingJournals", "replaced"]

RETRY_S = 1.0
"""Pause before a transaction that failed is tried again, unless the mirror changes earlier."""

CONCURRENT_MAX = 16
"""Transactions at once."""

WATCHED_S = 30.0
"""Time after a takeover in which a second assignment is looked for: a call of the allocator to Etcd
ends within a third of it."""

_SLOTS = 16
"""Slots, from 0 on, that are checked for another assignment of this broker."""

_log = logging.getLogger(__name__)


class WaitingJournals:
    """Waiting journals of which this broker has all acknowledged bytes.

    Args:
        etcd: takes the transactions.
        keyspace: mirror of Etcd. The caller adds :meth:`wake` to its observers, behind those of
            ``last_routes`` and ``history``.
        local_id: this broker.
        lease: returns the id of its lease.
        directory: its spools and heads.
        last_routes: last routes of journals.
        history: validity of heads.
        records: recorded routes.
        max_replication: cap of every journal's replication.
        is_quarantined: returns True if spools of the journal of this name and create revision are
            in quarantine.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: BrokerKeySpace,
        *,
        local_id: pb.ProcessSpec.ID,
        lease: Callable[[], int],
        directory: SpoolDirectory,
        last_routes: LastRoutes,
        history: EtcdHistory,
        records: RecordedRoutes,
        max_replication: int,
        is_quarantined: Callable[[str, int], bool],
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._local_id = local_id
        self._lease = lease
        self._directory = directory
        self._last_routes = last_routes
        self._history = history
        self._records = records
        self._max_replication = max_replication
        self._is_quarantined = is_quarantined
        self._woken = asyncio.Event()
        self._taken: dict[str, float] = {}  # journals, and the loop time of their takeover
        self._outage = Outage(_log, "takeover of journals that wait for this broker")

    def wake(self) -> None:
        """Look at all journals again: keys or heads have changed."""
        self._woken.set()

    def waits_for(self, journal: str) -> Sequence[pb.ProcessSpec.ID]:
        """Return the brokers that a journal waits for; none if it does not, or if we have it."""
        absent = self._last_routes.absent_brokers(journal)
        return () if not absent or self.has_all_of(journal) else absent

    def has_all_of(self, journal: str) -> bool:
        """Return True if the spool directory has all acknowledged bytes of a waiting journal."""
        item = self._keyspace.item(journal)
        if item is None:
            return False
        head = self._directory.head(
            journal,
            create_revision=item.create_revision,
            cluster_id=self._keyspace.header.cluster_id,
        )
        return head is not None or (
            self._history.was_member(journal)
            and not self._is_quarantined(journal, item.create_revision)
        )

    async def run(self) -> None:
        """Take over journals that wait for this broker, until cancelled."""
        room = asyncio.Semaphore(CONCURRENT_MAX)
        while True:
            self._woken.clear()
            work = [self._take(each, room) for each in filter(self._is_due, self._waiting())]
            work += [self._delete_second(each, room) for each in self._taken_lately()]
            done = await asyncio.gather(*work)
            pause_s = None if all(done) else RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()

    def _waiting(self) -> Sequence[str]:
        return sorted(self._last_routes.waiting)

    def _taken_lately(self) -> Sequence[str]:
        now = asyncio.get_running_loop().time()
        self._taken = {name: at for name, at in self._taken.items() if now < at + WATCHED_S}
        return list(self._taken)

    def _is_due(self, journal: str) -> bool:
        member = self._keyspace.member(self._local_id.zone, self._local_id.suffix)
        if member is None or member.value.exiting or member.value.journal_limit == 0:
            return False
        assignments = self._keyspace.assignments(journal)
        is_primary = any(self._is_ours(each) and each.slot == 0 for each in assignments)
        return (
            journal in self._last_routes.waiting
            and bool(assignments)  # the allocator makes the first one
            and not is_primary
            and self.has_all_of(journal)
        )

    async def _take(self, journal: str, room: asyncio.Semaphore) -> bool:
        """Take the primary's place. Return False if it has to be tried again."""
        async with room:
            item, assignments = self._keyspace.item(journal), self._keyspace.assignments(journal)
            if item is None or not self._is_due(journal):
                return True
            zone, suffix = self._local_id.zone, self._local_id.suffix
            member = self._keyspace.member(zone, suffix)
            assert member is not None, "it is due"
            # The route of ourselves alone tells other brokers with all bytes that we have them.
            # Nothing is appended over it unless the journal requires no more.
            alone = pb.Route(members=[self._local_id], primary=0)
            gone = replaced(assignments, self._local_id)
            key = self._keyspace.assignment_key(journal, zone, suffix, 0)
            changes: list[Operation] = [Delete(entry.key) for entry in gone]
            changes.append(Put(key, route_value(alone), self._lease()))
            if desired_replication(item.value, self._max_replication) <= 1:
                changes += self._records.change(item, alone)
            compares = [
                Compare.mod_revision(entry.key, entry.mod_revision)
                for entry in (item, member, *assignments)
            ]
            ours = {entry.slot for entry in assignments if self._is_ours(entry)}
            compares += [
                Compare.mod_revision(self._keyspace.assignment_key(journal, zone, suffix, slot), 0)
                for slot in range(_SLOTS)
                if slot not in ours
            ]
            if not await self._write(compares, changes):
                return False
            self._taken[journal] = asyncio.get_running_loop().time()
            _log.warning(
                "%s waited for this broker, which has all of its bytes, and goes on here in the "
                "place of %s",
                journal,
                ", ".join(f"{each.zone}/{each.suffix}" for each in gone),
            )
            return True

    async def _delete_second(self, journal: str, room: asyncio.Semaphore) -> bool:
        """Delete assignments of this broker beside that of the primary, if there are any."""
        async with room:
            ours = [each for each in self._keyspace.assignments(journal) if self._is_ours(each)]
            ours.sort(key=lambda entry: entry.slot)
            if len(ours) < 2:
                return True
            compares = [Compare.mod_revision(entry.key, entry.mod_revision) for entry in ours]
            return await self._write(compares, [Delete(entry.key) for entry in ours[1:]])

    async def _write(self, compares: Sequence[Compare], changes: Sequence[Operation]) -> bool:
        """Run a transaction, and wait until the mirror has it. Return True if it succeeded."""
        try:
            result = await self._etcd.txn(compares, changes)
            if result.succeeded:
                await self._keyspace.wait_for_revision(result.revision)
        except EtcdError as error:
            self._outage.failed(error)
            return False
        self._outage.ended()
        return result.succeeded

    def _is_ours(self, entry: BrokerAssignment) -> bool:
        return (entry.zone, entry.suffix) == (self._local_id.zone, self._local_id.suffix)


def replaced(
    assignments: Sequence[BrokerAssignment], local_id: pb.ProcessSpec.ID
) -> list[BrokerAssignment]:
    """Return the assignments that go when this broker becomes the primary of a waiting journal.

    They are that of the primary, or of the first member if there is no primary, and our own. The
    allocator adds members again if there are too few.
    """
    first = min(assignments, key=lambda entry: entry.slot)
    return [
        entry
        for entry in assignments
        if entry is first or (entry.zone, entry.suffix) == (local_id.zone, local_id.suffix)
    ]
