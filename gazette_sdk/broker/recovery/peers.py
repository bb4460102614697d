"""Peers in a recovery: what they hold of a journal, and journals that wait for them.

:class:`PeerInventory` has a journal's content outside of this broker: on its peers and in its
stores. By :class:`WaitingJournals` a broker that is back over its spool directory takes over again
the journals that wait for it.

A journal waits while none of its present brokers was a member of its last route (`routes`). A
broker whose spool directory has all of its acknowledged bytes takes the primary's place, in one
transaction, and so ends the wait. The allocator moves the journal later if it wants to. It may also
add this broker at the same moment, since its transaction does not depend on ours: then the second
assignment of this broker is deleted again.

The directory has all acknowledged bytes of a journal if its head is known, no one continued the
journal since (`etcd_history`), and this broker is a member of the last route: a replica that joins
knows the head before the route with it is written, and others continue without it if it never is.
Or if the broker that used the directory before is a member of the last route, and no head was ever
known here: that is the only trace of a journal without content.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Final

from gazette_sdk.broker.fragments.refresh import list_stores, whole_of
from gazette_sdk.broker.recovery.etcd_history import EtcdHistory
from gazette_sdk.broker.recovery.routes import LastRoutes, RecordedRoutes
from gazette_sdk.broker.resolver import Resolution, Resolver
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.cluster.broker_keys import BrokerAssignment, BrokerKeySpace, route_value
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Operation, Put
from gazette_sdk.errors import STATUS_NAMES, EtcdError, UnavailableError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.journal_spec import desired_replication, may_read
from gazette_sdk.retries import Outage
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import ANYWHERE, Target

LISTING_TIMEOUT_S: Final = 2.0
"""Default bound of a broker's answer."""

_CLAIMS: Final = Claims(int(Capability.READ), pb.LabelSelector(), math.inf)


class PeerInventory:
    """Fragments and bytes that the brokers and stores of a journal have.

    Args:
        resolver: has the routes of journals, and our own replicas.
        peers: carries calls to other brokers.
        local: carries calls to ourselves.
        stores: of the process.
        max_replication: cap of every journal's replication.
        answer_timeout_s: bound of the answer of one broker. All of a journal are asked at once. One
            that did not answer is not asked again within this time, so that it delays a round over
            many journals only once.
    """

    def __init__(
        self,
        resolver: Resolver,
        *,
        peers: Transport,
        local: Transport,
        stores: StoreRegistry,
        max_replication: int,
        answer_timeout_s: float = LISTING_TIMEOUT_S,
    ) -> None:
        self._resolver = resolver
        self._peers = peers
        self._local = local
        self._stores = stores
        self._max_replication = max_replication
        self._answer_timeout_s = answer_timeout_s
        self._silent_until: dict[tuple[str, str], float] = {}  # loop times, by zone and suffix

    async def fragments_of_brokers(self, journal: str, end: int) -> list[pb.Fragment]:
        """Return the fragments before an offset that brokers know; some may be listed twice.

        Every broker that the journal's replication requires is asked: any of them may be the
        only one that has acknowledged bytes. One that could not list the stores yet answers
        without them. The index of our own replica is read directly.

        Raises:
            GazetteError: a broker did not answer, or there are too few brokers, or no primary.
        """
        resolution = await self._resolve(journal)
        spec, members = resolution.spec, resolution.header.route.members
        assert spec is not None
        if len(members) < desired_replication(spec, self._max_replication):
            raise UnavailableError("it has too few brokers", journal=journal)

        found: list[pb.Fragment] = []
        if resolution.replica is not None:
            found += resolution.replica.index.page(limit=sys.maxsize).fragments
        if may_read(spec):  # peers refuse to list a journal that no one may read
            peers = [member for member in members if member != self._resolver.local_id]
            asked = [self._fragments_in_time(resolution, member, end) for member in peers]
            # All are awaited, so that none continues asking after an error.
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(answer, BaseException):
                    raise answer
                found += answer
        return [fragment for fragment in found if fragment.begin < end]

    async def fragments_of_stores(self, journal: str, end: int) -> list[pb.Fragment]:
        """Return the stored fragments before an offset, for which the stores are listed.

        To be called after :meth:`fragments_of_brokers`: a broker may have uploaded a fragment
        since it was asked.

        Raises:
            GazetteError: a store could not be listed, or the journal has no primary.
            OSError: a store could not be listed.
        """
        spec = (await self._resolve(journal)).spec
        assert spec is not None
        found = await list_stores(journal, spec.fragment.stores, self._stores)
        return [fragment for fragment in whole_of(found) if fragment.begin < end]

    async def head(
        self,
        journal: str,
        members: Iterable[pb.ProcessSpec.ID],
        unverified_end: int | None = None,
    ) -> int | None:
        """Return the offset at which members of a journal continue with it.

        It may be after all bytes that anybody has: replicas learn the offset of bytes which only
        their primary has.

        Args:
            journal: its name.
            members: those to ask which are members now.
            unverified_end: end of our unverified head, if we are a member of the last route. All
                its members have every acknowledged byte. If all of them have started again, each
                is in quarantine: then the one whose head is the least waits for none of them.

        Returns:
            the greatest end of their spools; ``None`` if one of them does not tell it, since it is
            of another implementation. Also ``None`` if they have nothing and are fewer than the
            journal requires: their disks may be new.

        Raises:
            GazetteError: a broker did not answer, or does not know yet where it continues.
        """
        resolution = await self._resolve(journal)
        assert resolution.spec is not None
        present = resolution.header.route.members
        members = [each for each in members if each in present]
        answers = await asyncio.gather(*(self._spool_end_of(resolution, each) for each in members))
        is_foreign, in_quarantine, greatest = False, 0, 0
        for member, answer in zip(members, answers, strict=True):
            if answer is None:
                is_foreign = True
            elif answer.spool_end >= 0:
                greatest = max(answer.spool_end, greatest)
            elif (
                unverified_end is not None
                and answer.HasField("unverified_end")
                and unverified_end <= answer.unverified_end
            ):
                in_quarantine += 1
            else:
                raise UnavailableError(
                    f"the spools of broker {member.zone}/{member.suffix} are in quarantine",
                    journal=journal,
                )
        if is_foreign:
            return None
        required = desired_replication(resolution.spec, self._max_replication)
        return greatest if greatest or len(answers) - in_quarantine >= required else None

    async def _spool_end_of(
        self, resolution: Resolution, member: pb.ProcessSpec.ID
    ) -> pb.ReadResponse | None:
        """Return the answer of a broker of ours; ``None`` if it is of another implementation.

        Raises:
            GazetteError: it did not answer, or has no replica of the journal.
        """
        request = pb.ReadRequest(
            journal=resolution.journal,
            offset=-1,
            metadata_only=True,
            do_not_proxy=True,
            include_unacknowledged=True,
            header=resolution.header,
        )
        request.header.process_id.CopyFrom(member)
        target = Target(route=resolution.header.route, member=member)
        async with aclosing(self._peers.read(request, target)) as items:
            async for item in items:
                if isinstance(item, bytes):
                    break
                if item.status not in {pb.OK, pb.OFFSET_NOT_YET_AVAILABLE}:
                    raise UnavailableError(
                        f"broker {member.zone}/{member.suffix} answers {STATUS_NAMES[item.status]}",
                        journal=resolution.journal,
                    )
                return item if item.HasField("spool_end") else None
        return None

    async def digest(self, journal: str, begin: int, end: int) -> bytes | None:
        """Return the SHA-1 of a span as the primary has it; ``None`` if it is not complete.

        Raises:
            GazetteError: the primary did not answer.
        """
        resolution = await self._resolve(journal)
        request = pb.ReadRequest(
            journal=journal,
            offset=begin,
            end_offset=end,
            do_not_proxy=False,  # for what is stored, too
            include_unacknowledged=True,
        )
        reads: Transport = self._local
        target = ANYWHERE
        if not resolution.is_local:
            header = resolution.header
            request.header.CopyFrom(header)
            reads, target = self._peers, Target(route=header.route, member=header.process_id)
        found, position = hashlib.sha1(usedforsecurity=False), begin
        async for item in reads.read(request, target):
            if isinstance(item, bytes):
                found.update(item)
                position += len(item)
            elif item.status != pb.OK or item.offset != position:
                break
        return found.digest() if position == end else None

    async def _resolve(self, journal: str) -> Resolution:
        resolution = await self._resolver.resolve(
            journal, _CLAIMS, may_proxy=True, require_primary=True
        )
        if resolution.status != pb.OK:
            raise UnavailableError(STATUS_NAMES[resolution.status], journal=journal)
        return resolution

    async def _fragments_in_time(
        self, resolution: Resolution, member: pb.ProcessSpec.ID, end: int
    ) -> list[pb.Fragment]:
        """Return the fragments of a member, which has to answer in time."""
        key, loop = (member.zone, member.suffix), asyncio.get_running_loop()
        silent = UnavailableError(
            f"broker {member.zone}/{member.suffix} does not answer within "
            f"{self._answer_timeout_s:g} s",
            journal=resolution.journal,
        )
        if self._silent_until.get(key, 0.0) > loop.time():
            raise silent
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                found = await self._fragments_of(resolution, member, end)
        except TimeoutError:
            self._silent_until[key] = loop.time() + self._answer_timeout_s
            raise silent from None
        self._silent_until.pop(key, None)
        return found

    async def _fragments_of(
        self, resolution: Resolution, member: pb.ProcessSpec.ID, end: int
    ) -> list[pb.Fragment]:
        request = pb.FragmentsRequest(
            journal=resolution.journal, do_not_proxy=True, do_not_wait=True
        )
        request.header.CopyFrom(resolution.header)
        request.header.process_id.CopyFrom(member)
        target = Target(route=resolution.header.route, member=member)
        found: list[pb.Fragment] = []
        while True:
            response = await self._peers.list_fragments(request, target)
            if response.status != pb.OK:
                raise UnavailableError(
                    f"broker {member.zone}/{member.suffix} answers {STATUS_NAMES[response.status]}",
                    journal=resolution.journal,
                )
            found += [entry.spec for entry in response.fragments]
            request.next_page_token = response.next_page_token
            if not 0 < response.next_page_token < end:
                return found


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
        keyspace: mirror of Etcd. The caller adds :meth:`wake` to its observers, after those of
            ``last_routes`` and ``history``.
        local_id: this broker.
        lease: id of its lease.
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
        lease: int,
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
        if head is not None:
            return self._history.is_or_was_member(journal)
        return (
            self._history.was_member(journal)
            and not self._is_quarantined(journal, item.create_revision)
            and not self._directory.has_former_head(journal, item.create_revision)
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
            changes.append(Put(key, route_value(alone), self._lease))
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
