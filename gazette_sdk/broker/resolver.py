"""Resolver: the route of a journal, and this broker's replicas (broker section 3).

The resolver observes the KeySpace. After each batch of changes it creates, replaces and stops
this broker's replicas according to the assignments. A call is resolved against the same mirror:
its journal, its route, and the broker to serve it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from gazette_sdk.broker.metrics import WRITE_HEAD
from gazette_sdk.broker.recovery.etcd_history import is_route_without
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.slot import Signal
from gazette_sdk.cluster.broker_keys import BrokerAssignment, BrokerKeySpace, JournalEntry
from gazette_sdk.cluster.item_keyspace import AssignmentEntry, ItemEntry
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.routes import attach_endpoints, equivalent, route_of
from gazette_sdk.protocol.selectors import matches_journal

__all__ = ["MISSING_ID", "Resolution", "Resolver", "StoppingError"]

MISSING_ID = pb.ProcessSpec.ID(zone="local-BrokerSpec", suffix="missing-from-Etcd")
"""Our id once our member key is removed: a draining broker can still proxy."""

_ADMITTED_MAX = 4096
"""Bound of the cached pairs of journal and matching selector; changes of Etcd clear them."""

_log = logging.getLogger(__name__)


class StoppingError(GazetteError):
    """Error of a broker that stops while Etcd still routes the journal to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Resolution:
    """Route of a call at one revision of Etcd. It is shared: do not change its messages.

    Attributes:
        journal: name, without metadata.
        status: OK, or the status to answer.
        header: of the answer, or of the proxied request.
        spec: the journal's, ``None`` if there is none (or the caller may not see it).
        item: the journal's key; ``None`` likewise.
        assignments: the journal's, in key order.
        replica: ours, whenever we have one.
        invalidated: signal of our replica, which fires when this resolution is outdated.
        is_local: True if this broker serves the call.
    """

    journal: str
    status: pb.Status
    header: pb.Header
    spec: pb.JournalSpec | None
    item: JournalEntry | None
    assignments: Sequence[BrokerAssignment]
    replica: Replica | None
    invalidated: Signal | None
    is_local: bool

    @property
    def revision(self) -> int:
        """Revision of Etcd at which it was made."""
        return self.header.etcd.revision


class Resolver:
    """Resolver of journals, and owner of this broker's replicas.

    Args:
        keyspace: mirror of Etcd, observed from the construction on.
        local_id: this broker.
        make_replica: makes the replica of a journal that was assigned to us, from the journal
            and our replica of it that is still shutting down, if there is one.
        is_continued: returns True if a journal has a synchronized route without this broker; by
            default every route counts.
    """

    def __init__(
        self,
        keyspace: BrokerKeySpace,
        local_id: pb.ProcessSpec.ID,
        make_replica: Callable[[JournalEntry, Replica | None], Replica],
        is_continued: Callable[[str], bool] | None = None,
    ) -> None:
        self._keyspace = keyspace
        self._local_id = local_id
        self._make_replica = make_replica
        self._is_continued = is_continued or self._has_route_without_us
        self._replicas: dict[str, Replica] = {}
        self._ending: dict[asyncio.Task[None], Replica] = {}
        self._stopped = False
        self._known: dict[tuple[str, bool, bool], Resolution] = {}
        self._admitted: set[tuple[str, bytes]] = set()  # journals and selectors that match them
        keyspace.observers.append(self.refresh)

    @property
    def replicas(self) -> Sequence[Replica]:
        """This broker's replicas, by journal name."""
        return [replica for _, replica in sorted(self._replicas.items())]

    def replica(self, journal: str) -> Replica | None:
        """Return this broker's replica of a journal."""
        return self._replicas.get(journal)

    # ------------------------------------------------------------- replicas

    def refresh(self) -> None:
        """Update the replicas after a batch of changes of the KeySpace."""
        self._known.clear()
        self._admitted.clear()
        if self._stopped:
            return
        started: list[Replica] = []
        gone: list[Replica] = []
        for journal in self._touched():
            before = self._replicas.get(journal)
            after = self._reconcile(journal, before)
            if after is before:
                continue
            if before is not None:
                gone.append(before)
                del self._replicas[journal]
            if after is not None:
                started.append(after)
                self._replicas[journal] = after
            else:
                WRITE_HEAD.remove(journal)
        self._shut_down(gone)
        for replica in started:
            replica.start()

    def _touched(self) -> Iterable[str]:
        """Return the journals of the last changes of the KeySpace."""
        touched: dict[str, None] = {}
        for change in self._keyspace.changes:
            match change.new or change.old:
                case AssignmentEntry(item=journal) | ItemEntry(id=journal):
                    touched[journal] = None
        return touched

    def _reconcile(self, journal: str, replica: Replica | None) -> Replica | None:
        """Return the replica that a journal's keys require: the current one, a new one, none."""
        item = self._keyspace.item(journal)
        assignments = self._keyspace.assignments(journal)
        # The first one of several assignments to us is used.
        local = next(
            (
                entry
                for entry in assignments
                if entry.zone == self._local_id.zone and entry.suffix == self._local_id.suffix
            ),
            None,
        )
        if item is None or local is None:
            return None
        is_primary = local.slot == 0
        if replica is None or not replica.continues(item, is_primary=is_primary):
            replica = self._make_replica(item, self._predecessor(item, replica))
        replica.update(item, assignments, is_primary=is_primary)
        return replica

    def stop_local(self) -> None:
        """Stop all replicas in the background. Nothing resolves to us any more."""
        self._stopped = True
        self._known.clear()
        gone, self._replicas = list(self._replicas.values()), {}
        self._shut_down(gone)

    async def shutdowns(self, *, primaries: bool = False) -> None:
        """Wait until the replicas that were stopped have shut down.

        Args:
            primaries: only those of journals whose primary we were: they wait for no other broker.
        """
        while ending := [
            task for task, replica in self._ending.items() if replica.is_primary or not primaries
        ]:
            await asyncio.wait(ending)

    def _predecessor(self, item: JournalEntry, replica: Replica | None) -> Replica | None:
        """Return our replica of the very same journal that a new one has to wait for."""
        for candidate in (replica, *reversed(self._ending.values())):
            if (
                candidate is not None
                and candidate.journal == item.id
                and candidate.create_revision == item.create_revision
            ):
                return candidate
        return None

    def _shut_down(self, gone: Sequence[Replica]) -> None:
        """Shut replicas down in the background."""
        # First make all waiters resolve again, so that they do not race with the shutdown for
        # the spool.
        for replica in gone:
            replica.signal.fire()
        for replica in gone:
            _log.info("stopping the replica of %s", replica.journal)
            ending = replica.shut_down(
                is_replaced=partial(self._is_replaced, replica.journal),
                is_continued=partial(self._is_continued, replica.journal),
            )
            task = asyncio.get_running_loop().create_task(
                ending, name=f"shut down {replica.journal}"
            )
            self._ending[task] = replica
            task.add_done_callback(self._shut_down_ended)

    def _is_replaced(self, journal: str) -> bool:
        """Return True if we have another replica of a journal than the one that shuts down."""
        return journal in self._replicas

    def _has_route_without_us(self, journal: str) -> bool:
        """Return True if the journal has a synchronized route without this broker."""
        return any(
            is_route_without(entry.value, self._local_id)
            for entry in self._keyspace.assignments(journal)
        )

    def _shut_down_ended(self, task: asyncio.Task[None]) -> None:
        del self._ending[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)

    def has_route(self, replica: Replica, route: pb.Route) -> bool:
        """Return True if the journal of our replica has this route.

        It has none for a replica that was replaced, or that is not assigned to us any more.
        """
        if self._replicas.get(replica.journal) is not replica and not self._stopped:
            return False
        return equivalent(self._keyspace.journal_route(replica.journal), route)

    def member_revision(self, member: pb.ProcessSpec.ID) -> int:
        """Return the create revision of a broker's member key; 0 if it is no member."""
        entry = self._keyspace.member(member.zone, member.suffix)
        return 0 if entry is None else entry.create_revision

    # ----------------------------------------------------------- resolution

    async def resolve(
        self,
        journal: str,
        claims: Claims,
        *,
        may_proxy: bool,
        require_primary: bool,
        min_revision: int = 0,
        proxy_header: pb.Header | None = None,
    ) -> Resolution:
        """Resolve a call for ``journal``.

        Args:
            journal: its name, with or without metadata.
            claims: the caller's.
            may_proxy: another broker may serve the call.
            require_primary: only the journal's primary may serve the call.
            min_revision: wait until our mirror of Etcd has reached this revision.
            proxy_header: header of the broker that proxied the call to us.

        Raises:
            StoppingError: our replicas have been stopped.
            GazetteError: the header is of another cluster or for another process.
        """
        if proxy_header is not None:
            self._check_header(proxy_header)
            min_revision = max(min_revision, proxy_header.etcd.revision)
        if min_revision > self._keyspace.header.revision:
            await self._keyspace.wait_for_revision(min_revision)

        name = strip_meta(journal)
        item = self._keyspace.item(name)
        if item is not None and not self._admits(claims, item):
            return self._resolve(name, None, may_proxy=may_proxy, require_primary=require_primary)
        known = self._known.get((name, may_proxy, require_primary))
        if known is None:
            known = self._resolve(name, item, may_proxy=may_proxy, require_primary=require_primary)
            if item is not None:
                self._known[name, may_proxy, require_primary] = known
        return known

    def known(
        self,
        journal: str,
        claims: Claims,
        *,
        may_proxy: bool,
        require_primary: bool,
        min_revision: int = 0,
    ) -> Resolution | None:
        """Return the cached result of :meth:`resolve`; ``None`` if there is none."""
        resolution = self._known.get((journal, may_proxy, require_primary))
        if (
            resolution is None
            or resolution.item is None
            or (min_revision and min_revision > resolution.revision)
            or not self._admits(claims, resolution.item)
        ):
            return None
        return resolution

    def _admits(self, claims: Claims, item: JournalEntry) -> bool:
        """Return True if claims match a journal; matches are cached."""
        selector = claims.selector.SerializeToString()
        if not selector:
            return True
        if (item.id, selector) in self._admitted:
            return True
        if not matches_journal(claims.selector, item.value):
            return False
        if len(self._admitted) >= _ADMITTED_MAX:
            self._admitted.clear()
        self._admitted.add((item.id, selector))
        return True

    @property
    def local_id(self) -> pb.ProcessSpec.ID:
        """This broker's id, or a placeholder when its member key is removed."""
        zone, suffix = self._local_id.zone, self._local_id.suffix
        return MISSING_ID if self._keyspace.member(zone, suffix) is None else self._local_id

    def _check_header(self, header: pb.Header) -> None:
        ours = self._keyspace.header.cluster_id
        if header.etcd.cluster_id != ours:
            raise GazetteError(
                f"the request comes from another Etcd cluster ({header.etcd.cluster_id}, "
                f"ours is {ours}): check the brokers' --etcd.address"
            )
        process, local = header.process_id, self.local_id
        if (process.zone or process.suffix) and process != local:
            raise GazetteError(
                f"the request is for broker {process.zone}/{process.suffix}, "
                f"and this is {local.zone}/{local.suffix}"
            )

    def _resolve(
        self, journal: str, item: JournalEntry | None, *, may_proxy: bool, require_primary: bool
    ) -> Resolution:
        keyspace, local_id = self._keyspace, self.local_id
        assignments = _distinct(keyspace.assignments(journal)) if item is not None else []
        route = route_of((a.zone, a.suffix, a.slot) for a in assignments)
        attach_endpoints(route, keyspace.endpoint)

        process_id = pb.ProcessSpec.ID()
        if require_primary:
            if route.primary >= 0:
                process_id = route.members[route.primary]
        elif local_id in route.members:
            process_id = local_id
        is_local = process_id == local_id
        if is_local and self._stopped:
            raise StoppingError(
                "this broker is stopping; try again, another one takes its journals",
                journal=journal,
            )

        status: pb.Status
        if item is None:
            status = pb.JOURNAL_NOT_FOUND
        elif item.value.suspend.level == pb.JournalSpec.Suspend.FULL:
            status = pb.SUSPENDED
        elif require_primary and route.primary < 0:
            status = pb.NO_JOURNAL_PRIMARY_BROKER
        elif not route.members:
            status = pb.INSUFFICIENT_JOURNAL_BROKERS
        elif not may_proxy and not is_local:
            status = pb.NOT_JOURNAL_PRIMARY_BROKER if require_primary else pb.NOT_JOURNAL_BROKER
        else:
            status = pb.OK

        header = pb.Header(
            process_id=process_id if status == pb.OK else local_id,
            route=route,
            etcd=keyspace.header,
        )
        replica = self._replicas.get(journal) if item is not None else None
        return Resolution(
            journal=journal,
            status=status,
            header=header,
            spec=item.value if item is not None else None,
            item=item,
            assignments=assignments,
            replica=replica,
            invalidated=replica.signal if replica is not None else None,
            is_local=is_local or status != pb.OK,
        )


def _distinct(assignments: list[BrokerAssignment]) -> list[BrokerAssignment]:
    """Return assignments with one of each broker: the one of its least slot.

    A broker may have two for a moment, when it takes a journal over while the allocator adds it.
    """
    least: dict[tuple[str, str], BrokerAssignment] = {}
    for entry in assignments:
        known = least.setdefault((entry.zone, entry.suffix), entry)
        if entry.slot < known.slot:
            least[entry.zone, entry.suffix] = entry
    return assignments if len(least) == len(assignments) else list(least.values())
