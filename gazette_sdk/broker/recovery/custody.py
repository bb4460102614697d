"""Custody of the last bytes of journals, at one broker.

Acknowledged bytes that no store has are on the brokers of a journal's last route alone. Which
brokers these are follows from routes in Etcd and its history (`routes`, `etcd_history`), from the
heads and spools of this broker's directory (`spools`), and from peers and stores, which
are asked (`peers`, `quarantine`). A :class:`Custody` owns these sources and answers four questions:

====================================================  ============================================
may this broker continue a journal, and where?        :meth:`~Custody.continued_at`,
                                                      :meth:`~Custody.stored_end`
whom does a journal wait for?                         :meth:`~Custody.absent_brokers`,
                                                      :meth:`~Custody.waits_for`
may a spool be used, uploaded, or not?                :meth:`~Custody.take`,
                                                      :meth:`~Custody.add`,
                                                      :meth:`~Custody.is_undecided`,
                                                      :meth:`~Custody.refusal`
what is recorded with a transaction over a journal?   :meth:`~Custody.record`
====================================================  ============================================

A journal waits for the members of its last route (`routes`). If the last broker leaves, and all
content of a journal that it led is stored and listed, it withdraws the route
(:class:`Departure`): the next broker that comes continues after the stored content. The
withdrawn route has the offset where that ends, because a store may show the next broker an older
listing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from gazette_sdk.broker.append.preconditions import RecordRoute, withdraw_routes
from gazette_sdk.broker.fragments.persister import Persister
from gazette_sdk.broker.fragments.refresh import listed_journals
from gazette_sdk.broker.recovery.etcd_history import (
    EtcdHistory,
    WithheldSpools,
    withhold_missing,
    withhold_other_history,
)
from gazette_sdk.broker.recovery.peers import PeerInventory, WaitingJournals
from gazette_sdk.broker.recovery.quarantine import Quarantine, UnconfirmedSpools
from gazette_sdk.broker.recovery.routes import LastRoutes, RecordedRoutes, RouteRecorder
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.replication.pipeline import Signal
from gazette_sdk.broker.resolver import Resolver
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.broker.spool.files import CompletedSpool
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalEntry
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Operation
from gazette_sdk.cluster.keyspace import Continuity
from gazette_sdk.cluster.membership import MemberProcess
from gazette_sdk.errors import EtcdError, EtcdUnavailableError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb

RECOVERY = "recovery"
"""Task that decides about the quarantine."""

TASKS = (RECOVERY, "withheld spools", "unconfirmed spools", "waiting journals", "route recorder")
"""Names of the tasks of a custody."""

_log = logging.getLogger(__name__)


class Custody:
    """Custody of one broker. It belongs to the event loop.

    It is used in this order: :meth:`withhold_other_history` and :meth:`recover` before the broker
    joins the cluster, :meth:`load` once it has joined and its mirror is loaded, :meth:`begin` once
    it has a resolver, and :meth:`run`.

    Args:
        etcd: the client.
        keyspace: mirror of Etcd.
        directory: the spool directory.
        local_id: this broker.
        max_replication: cap of every journal's replication.
        member: runs its tasks.

    Attributes:
        last_routes: last routes of journals.
    """

    _quarantine: Quarantine
    _unconfirmed: UnconfirmedSpools
    _waiting: WaitingJournals
    _withheld: WithheldSpools
    _recorder: RouteRecorder

    def __init__(
        self,
        etcd: Etcd,
        keyspace: BrokerKeySpace,
        directory: SpoolDirectory,
        local_id: pb.ProcessSpec.ID,
        *,
        max_replication: int,
        member: MemberProcess,
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._directory = directory
        self._local_id = local_id
        self._max_replication = max_replication
        self._member = member
        self._seen_revision = 0
        self._went_back = False
        self._recovered: list[CompletedSpool] = []
        self._records = RecordedRoutes(keyspace, local_id)
        self.last_routes = LastRoutes(keyspace, self._records, max_replication)
        self._history = EtcdHistory(
            directory, keyspace, local_id, self.last_routes, max_replication
        )

    # ---------------------------------------------------------------- begin

    async def withhold_other_history(self) -> None:
        """Withhold the spool directory if Etcd does not have the history that it has seen.

        Raises:
            EtcdError: Etcd did not answer.
            OSError: the files could not be withheld.
        """
        seen = self._history.seen(self._directory)
        continuity = await withhold_other_history(
            self._etcd, self._directory, seen, self._keyspace.root
        )
        self._went_back = continuity is Continuity.OTHER
        if seen is not None and continuity is Continuity.SAME:
            self._seen_revision = seen.revision

    async def recover(self, cluster_id: int) -> None:
        """Recover heads and spools of the spool directory.

        Args:
            cluster_id: of the Etcd cluster.
        """
        self._recovered = await asyncio.to_thread(self._directory.recover, cluster_id)

    async def load(self) -> None:
        """Read what Etcd has, once this broker is announced and its mirror is loaded.

        Outdated heads are forgotten. From now on changes of Etcd are followed: heads are checked
        before replicas are made of them.

        Raises:
            EtcdError: Etcd did not answer.
            OSError: files could not be withheld.
        """
        directory, keyspace = self._directory, self._keyspace
        self._recovered = await withhold_missing(
            directory, keyspace, self._recovered, self._seen_revision
        )
        await asyncio.to_thread(directory.sweep, self._exists)
        await self._load_records()
        await self._claim_lost()
        await self.last_routes.load(self._etcd)
        await self._claim_older()
        await self._history.check(self._etcd)
        keyspace.observers += [self.last_routes.observe, self._history.observe]
        self._records.mirror.observers += [
            self.last_routes.observe_records,
            self._history.observe_records,
        ]

    def begin(
        self, resolver: Resolver, persister: Persister, inventory: PeerInventory, lease: int
    ) -> None:
        """Take the recovered spools into quarantine.

        Args:
            resolver: has this broker's replicas.
            persister: uploads spools.
            inventory: asks peers and stores.
            lease: id of this broker's lease.
        """
        keyspace, directory = self._keyspace, self._directory
        last_routes, history, records = self.last_routes, self._history, self._records

        self._unconfirmed = UnconfirmedSpools(
            replica_of=resolver.replica,
            exists=self._exists,
            is_contested=directory.is_contested,
            upload=persister.complete,
            quarantine=self._hold,
        )
        self._withheld = WithheldSpools(directory, keyspace, last_routes, self._release)
        self._waiting = WaitingJournals(
            self._etcd,
            keyspace,
            local_id=self._local_id,
            lease=lease,
            directory=directory,
            last_routes=last_routes,
            history=history,
            records=records,
            max_replication=self._max_replication,
            is_quarantined=self._is_quarantined,
        )
        self._quarantine = Quarantine(
            directory,
            self._recovered,
            exists=self._exists,
            inventory=inventory,
            # No peer may have it: it is uploaded at once, like a primary's.
            upload=lambda spool: persister.complete(replace(spool, primary=True)),
            replica_of=resolver.replica,
            upload_agreed=lambda spool: self.add(replace(spool, primary=True)),
            restores_head=self._may_restore_head,
            goes_on=last_routes.goes_on,
            continued_by=history.continued_by,
            other_members=history.other_members,
            claims=history.claims,
            are_claims_known=self._are_claims_known,
            stored_end=last_routes.stored_end,
            waits=lambda journal: bool(last_routes.absent_brokers(journal)),
            decided=self._waiting.wake,
            unverified=directory.unverified_heads(),
            is_withheld=directory.is_withheld,
        )
        self._recovered = []
        self._withheld.log()
        self._recorder = RouteRecorder(self._etcd, keyspace, records, last_routes)
        records.mirror.observers += [
            lambda: self._unconfirmed.observe(records.changed_journals()),
            self._waiting.wake,
        ]
        keyspace.observers += [
            lambda: self._quarantine.observe(keyspace.changes),
            lambda: self._unconfirmed.observe(last_routes.changed_journals()),
            self._waiting.wake,
            self._recorder.wake,
            self._withheld.wake,
        ]

    def run(self) -> None:
        """Start its tasks, :data:`TASKS`."""
        work = (
            self._quarantine.run(),
            self._withheld.run(),
            self._unconfirmed.run(),
            self._waiting.run(),
            self._recorder.run(),
        )
        for name, each in zip(TASKS, work, strict=True):
            self._member.run(name, each)

    # ------------------------------------------------------------- questions

    def continued_at(self, journal: str) -> int:
        """Return the newest revision of a journal's synchronized route without this broker.

        It is 0 if the mirror has none now.
        """
        return self._history.continued_at(journal)

    async def is_continued_in_etcd(self, item: JournalEntry) -> bool:
        """Return True if Etcd has a synchronized route of a journal without this broker.

        Raises:
            EtcdError: Etcd did not answer.
        """
        return await self._history.is_continued_in(self._etcd, item, self._records.key(item))

    def is_all_stored(self, journal: str) -> bool:
        """Return True if the last broker of a journal had stored all of its content."""
        return self.last_routes.is_withdrawn(journal)

    def stored_end(self, journal: str) -> int:
        """Return the end of a journal's content as its last broker had stored it; 0 if unknown."""
        return self.last_routes.stored_end(journal)

    def absent_brokers(self, journal: str) -> Sequence[pb.ProcessSpec.ID]:
        """Return the brokers of the last route which a journal waits for; none if it does not."""
        return self.last_routes.absent_brokers(journal)

    def waits_for(self, journal: str) -> Sequence[pb.ProcessSpec.ID]:
        """Return :meth:`absent_brokers`; none if this broker has all bytes of the journal."""
        return self._waiting.waits_for(journal)

    def take(self, item: JournalEntry) -> tuple[Sequence[CompletedSpool], Signal]:
        """Return the usable spools of a journal that was assigned; see :meth:`Quarantine.take`."""
        return self._quarantine.take(item.id, item.create_revision)

    def unverified_end(self, journal: str, create_revision: int) -> int | None:
        """Return the end of an unverified head; see :meth:`Quarantine.unverified_end`."""
        return self._quarantine.unverified_end(journal, create_revision)

    def add(self, spool: CompletedSpool) -> None:
        """Let a spool wait until all replicas have its content; it is uploaded then."""
        self._unconfirmed.add(spool)

    def is_undecided(self, journal: str, create_revision: int) -> bool:
        """Return True if a spool of a journal is in quarantine, or may not be on all replicas."""
        return self._is_quarantined(journal, create_revision) or self._unconfirmed.holds(
            journal, create_revision
        )

    def refusal(self, journal: str) -> str:
        """Return why a journal takes no appends, as its files are withheld; or an empty text."""
        return self._withheld.refusal(journal)

    def known_claims(self, item: JournalEntry) -> Sequence[Compare]:
        """Return the condition of each route; see :meth:`RecordedRoutes.known_claims`."""
        return self._records.known_claims(item)

    def record(self, item: JournalEntry, route: pb.Route | None) -> Sequence[Operation]:
        """Return the operations that record a journal's route; see :class:`RecordedRoutes`."""
        return self._records.change(item, route)

    # ------------------------------------------------------------------ end

    def look(self) -> None:
        """Decide about all spools that need not wait any more, before replicas end."""
        self._unconfirmed.look()

    def let_replicas_end(self) -> None:
        """Let replicas end without waiting for decisions. Spools in quarantine stay on disk."""
        self._quarantine.stop()

    def upload_all(self) -> None:
        """Upload all spools that wait: no other broker is there that could continue."""
        self._unconfirmed.upload_all()

    def flush(self) -> None:
        """Write the last revision of Etcd that was seen now."""
        self._history.flush()

    # --------------------------------------------------------------- inside

    async def _load_records(self) -> None:
        try:
            await self._records.mirror.load(self._etcd)
        except EtcdUnavailableError:
            raise
        except EtcdError as error:  # its roles forbid it
            _log.warning("last routes of journals are known from Etcd's history alone: %s", error)

    async def _claim_lost(self) -> None:
        """Let journals that Etcd lost wait for this broker, when they are created again."""
        lost = {
            each.journal: each.head.end
            for each in self._directory.withheld()
            if each.head is not None and self._keyspace.item(each.journal) is None
        }
        await self._claim(lost, {}, begins_history=self._went_back)

    async def _claim_older(self) -> None:
        """Let journals wait for this broker whose routes may be older than ones that Etcd lost."""
        begun_at, ends, known = self._records.history.revision, {}, {}
        for each in self._directory.withheld():
            item, last = self._keyspace.item(each.journal), self.last_routes.last(each.journal)
            if each.head is None or item is None or item.create_revision > each.mark.revision:
                continue
            if last is None or last.is_claimed or last.revision < begun_at:
                ends[item.id], known[item.id] = each.head.end, self._records.unchanged(item)
        await self._claim(ends, known)
        self.last_routes.note(ends)

    async def _claim(
        self,
        ends: Mapping[str, int],
        known: Mapping[str, Sequence[Compare]],
        *,
        begins_history: bool = False,
    ) -> None:
        """Claim journals of which this broker has the last bytes; see :class:`RecordedRoutes`."""
        if not ends and not begins_history:
            return
        try:
            if begins_history:
                seen_id = self._history.seen_id(self._directory)
                await self._records.begin_history(self._etcd, seen_id)
            await self._records.claim(self._etcd, ends, known)
        except EtcdUnavailableError:
            raise
        except EtcdError as error:  # its roles forbid it
            _log.warning("other brokers do not know that this one has withheld spools: %s", error)
        await self._load_records()

    async def _are_claims_known(self, journal: str) -> bool:
        """Return True if Etcd has no other claims to a journal than this broker knows.

        Raises:
            EtcdError: Etcd did not answer.
        """
        item = self._keyspace.item(journal)
        known = self._records.known_claims(item) if item is not None else ()
        return (await self._etcd.txn(known, [])).succeeded

    def _may_restore_head(self, journal: str) -> bool:
        """Return True if the head of this broker's spools may be where a journal continues."""
        last = self.last_routes.last(journal)
        if last is not None and last.is_claimed:
            return self._history.claims(journal)
        return self._history.was_member(journal) or self._withheld.was_released(journal)

    def _is_quarantined(self, journal: str, create_revision: int) -> bool:
        return self._quarantine.holds(journal, create_revision)

    def _exists(self, journal: str, create_revision: int) -> bool:
        item = self._keyspace.item(journal)
        return item is not None and item.create_revision == create_revision

    def _hold(self, spool: CompletedSpool) -> None:
        """Ask the others about a spool of ours, also if recovery has ended."""
        self._quarantine.hold(spool)
        self._resume_recovery()

    def _release(self, item: JournalEntry, spools: Sequence[CompletedSpool]) -> None:
        """Ask the others about the spools of a journal that were withheld."""
        self._quarantine.release((item.id, item.create_revision), spools)
        self._resume_recovery()

    def _resume_recovery(self) -> None:
        recovery = self._member.tasks.get(RECOVERY)
        if recovery is not None and recovery.done():  # None: we stop, and the next start asks
            self._member.run(RECOVERY, self._quarantine.run())


LISTED_TIMEOUT_S = 10.0
"""Bound of the wait for listings that show what was stored."""

WITHDRAWAL_TIMEOUT_S = 2.0
"""Bound of withdrawing the routes of journals."""


def is_alone(keyspace: BrokerKeySpace, local_id: pb.ProcessSpec.ID) -> bool:
    """Return True if no other broker is a member that could take journals."""
    return not any(
        (entry.zone, entry.suffix) != (local_id.zone, local_id.suffix)
        and entry.value.journal_limit > 0
        for entry in keyspace.members()
    )


async def until_none_stays(keyspace: BrokerKeySpace, local_id: pb.ProcessSpec.ID) -> None:
    """Wait until no other broker is a member that could take journals, and does not drain.

    Brokers that all drain would wait for each other for ever, such as those of one machine.
    """
    while any(
        (entry.zone, entry.suffix) != (local_id.zone, local_id.suffix)
        and entry.value.journal_limit > 0
        and not entry.value.exiting
        for entry in keyspace.members()
    ):
        await keyspace.wait_for_update()


class Departure:
    """Withdrawal of the routes of journals, when the last broker leaves.

    Args:
        etcd: takes the transaction.
        keyspace: mirror of Etcd.
        local_id: this broker.
        stores: of the process.
        persister: knows the journals whose content no store has.
        record_route: returns the changes that record a route.
        is_undecided: returns True if spools of the journal of this name and create revision are
            in quarantine, or may not be on all replicas.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: BrokerKeySpace,
        local_id: pb.ProcessSpec.ID,
        *,
        stores: StoreRegistry,
        persister: Persister,
        record_route: RecordRoute,
        is_undecided: Callable[[str, int], bool],
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._local_id = local_id
        self._stores = stores
        self._persister = persister
        self._record_route = record_route
        self._is_undecided = is_undecided

    async def withdraw_routes(self, replicas: Iterable[Replica]) -> None:
        """Withdraw the routes of journals that we led alone, and whose content is all stored.

        Args:
            replicas: those that we had. Their uploads have ended.
        """
        replicas = list(replicas)
        unlisted = await self._unlisted(replicas)
        ends = {replica.journal: _stored_end(replica) for replica in replicas}
        storeless = self._persister.storeless
        local = self._local_id
        routes = [
            (item, entry, ends.get(entry.item, 0))
            for entry in self._keyspace.local_assignments(local.zone, local.suffix)
            if entry.slot == 0
            and entry.value.members
            and entry.item not in storeless
            and entry.item not in unlisted
            and len(self._keyspace.assignments(entry.item)) == 1
            and (item := self._keyspace.item(entry.item)) is not None
            and not self._is_undecided(entry.item, item.create_revision)
        ]
        try:
            async with asyncio.timeout(WITHDRAWAL_TIMEOUT_S):
                await withdraw_routes(self._etcd, routes, self._record_route)
        except (EtcdError, TimeoutError) as error:
            _log.warning("journals wait for this broker to come back: %s", error or "no answer")

    async def _unlisted(self, replicas: Iterable[Replica]) -> AbstractSet[str]:
        """Return the journals that we led whose stores do not list all of their content soon.

        Others would continue before the end of their content.
        """
        storeless = self._persister.storeless
        ends = {
            replica.journal: end
            for replica in replicas
            if replica.is_primary
            and replica.journal not in storeless
            and (end := _local_end(replica)) > replica.index.listed_end
        }
        unlisted = ends.keys() - await listed_journals(
            ends, self._stores, self._keyspace.item, LISTED_TIMEOUT_S
        )
        for journal in sorted(unlisted):
            _log.warning(
                "%s waits for this broker to come back: its stores do not list its content up to "
                "its end, %d", journal, ends[journal],
            )  # fmt: skip
        return unlisted


def _stored_end(replica: Replica) -> int:
    """Return the end of a journal whose content is all stored."""
    return max(replica.index.listed_end, _local_end(replica))


def _local_end(replica: Replica) -> int:
    """Return the end of a replica's content. It is stored what the replica kept, too."""
    head = replica.storage.head
    return max(replica.kept_end, head.end if head is not None else 0)
