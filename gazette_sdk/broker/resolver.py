"""Which brokers serve a journal, and the replicas which this one has (broker section 3).

The resolver watches the KeySpace. After each batch of changes it keeps, creates, replaces and
stops this broker's replicas, so that they are those of the assignments at every moment. A call is
resolved against the same mirror: its journal, its route, whether it is for us.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from gazette_sdk.broker.metrics import WRITE_HEAD
from gazette_sdk.broker.recovery.etcd_history import is_without
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.slot import Signal
from gazette_sdk.cluster.broker_keys import BrokerAssignment, BrokerKeySpace, JournalEntry
from gazette_sdk.cluster.item_keyspace import AssignmentEntry, ItemEntry
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.routes import attach_endpoints, route_of
from gazette_sdk.protocol.selectors import matches_journal

__all__ = ["MISSING_ID", "Resolution", "Resolver", "StoppingError"]

MISSING_ID = pb.ProcessSpec.ID(zone="local-BrokerSpec", suffix="missing-from-Etcd")
"""What we call ourselves once our member key is gone. A draining broker can still proxy."""

_ADMITTED_MOST = 4096
"""Journals and selectors that are remembered to match; a change in Etcd forgets them, too."""

_log = logging.getLogger(__name__)


class StoppingError(GazetteError):
    """This broker stops, while Etcd still routes the journal to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Resolution:
    """Where a call belongs, at one revision of Etcd. It is shared: do not change its messages.

    Attributes:
        journal: name, without metadata.
        status: OK, or the status to answer.
        header: of the answer, or of the proxied request.
        spec: the journal's, ``None`` if there is none (or the caller may not see it).
        item: the journal's key; ``None`` likewise.
        assignments: the journal's, in key order.
        replica: ours, whenever we have one.
        invalidated: fires when this resolution is old; of our replica.
        is_local: whether the process responsible is this one.
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
        """The revision of Etcd it was made at."""
        return self.header.etcd.revision


class Resolver:
    """Resolves journals, and owns this broker's replicas.

    Args:
        keyspace: mirror of Etcd. It is observed from the construction on.
        local_id: this broker.
        make_replica: makes the replica of a journal that was assigned to us, given the journal
            and our replica of it that is still being shut down, if there is one.
    """

    def __init__(
        self,
        keyspace: BrokerKeySpace,
        local_id: pb.ProcessSpec.ID,
        make_replica: Callable[[JournalEntry, Replica | None], Replica],
    ) -> None:
        self._keyspace = keyspace
        self._local_id = local_id
        self._make_replica = make_replica
        self._replicas: dict[str, Replica] = {}
        self._ending: dict[asyncio.Task[None], Replica] = {}
        self._stopped = False
        self._known: dict[tuple[str, bool, bool], Resolution] = {}
        self._admitted: set[tuple[str, bytes]] = set()  # journals and selectors that match them
        keyspace.observers.append(self.refresh)

    @property
    def replicas(self) -> Sequence[Replica]:
        """This broker's replicas, in the order of their journals' names."""
        return [replica for _, replica in sorted(self._replicas.items())]

    def replica(self, journal: str) -> Replica | None:
        """This broker's replica of a journal."""
        return self._replicas.get(journal)

    # ------------------------------------------------------------- replicas

    def refresh(self) -> None:
        """Bring the replicas in line with the KeySpace; called after each batch of changes."""
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
        """Journals which the last changes of the KeySpace are about."""
        touched: dict[str, None] = {}
        for change in self._keyspace.changes:
            match change.new or change.old:
                case AssignmentEntry(item=journal) | ItemEntry(id=journal):
                    touched[journal] = None
        return touched

    def _reconcile(self, journal: str, replica: Replica | None) -> Replica | None:
        """The replica of a journal as its keys are now: the one there is, a new one, none."""
        item = self._keyspace.item(journal)
        assignments = self._keyspace.assignments(journal)
        # Of several assignments of the journal to us the first one counts.
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
        """Stop all replicas, in the background; nothing resolves to us any more."""
        self._stopped = True
        self._known.clear()
        gone, self._replicas = list(self._replicas.values()), {}
        self._shut_down(gone)

    async def shutdowns(self, *, primaries: bool = False) -> None:
        """Return when every replica that was stopped has been shut down.

        Args:
            primaries: look only at those whose primary we were: no other broker can hold them up.
        """
        while ending := [
            task for task, replica in self._ending.items() if replica.is_primary or not primaries
        ]:
            await asyncio.wait(ending)

    def _predecessor(self, item: JournalEntry, replica: Replica | None) -> Replica | None:
        """Our replica of the very same journal which a new one has to wait for."""
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
        # First tell all who wait for them to resolve again: so that waiters and the shutdown do
        # not race for the spool.
        for replica in gone:
            replica.signal.fire()
        for replica in gone:
            _log.info("stopping the replica of %s", replica.journal)
            ending = replica.shut_down(
                is_replaced=partial(self._is_replaced, replica.journal),
                is_succeeded=partial(self._is_succeeded, replica.journal),
            )
            task = asyncio.get_running_loop().create_task(
                ending, name=f"shut down {replica.journal}"
            )
            self._ending[task] = replica
            task.add_done_callback(self._shut_down_ended)

    def _is_replaced(self, journal: str) -> bool:
        """Whether we have another replica of a journal than the one that is shut down."""
        return journal in self._replicas

    def _is_succeeded(self, journal: str) -> bool:
        """Whether others synchronized a route of the journal in which we are not."""
        return any(
            is_without(entry.value, self._local_id) for entry in self._keyspace.assignments(journal)
        )

    def _shut_down_ended(self, task: asyncio.Task[None]) -> None:
        del self._ending[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)

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
        """Where a call for ``journal`` belongs.

        Args:
            journal: its name, with or without metadata.
            claims: what the caller may see.
            may_proxy: whether another broker may be asked.
            require_primary: whether only the journal's primary will do.
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
        """What :meth:`resolve` would return at once, if it did so before and nothing changed."""
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
        """Whether claims let a caller see a journal. Looked up where it was found out before."""
        selector = claims.selector.SerializeToString()
        if not selector:
            return True
        if (item.id, selector) in self._admitted:
            return True
        if not matches_journal(claims.selector, item.value):
            return False
        if len(self._admitted) >= _ADMITTED_MOST:
            self._admitted.clear()
        self._admitted.add((item.id, selector))
        return True

    @property
    def local_id(self) -> pb.ProcessSpec.ID:
        """This broker's id, or a placeholder when its member key is gone."""
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
        assignments = keyspace.assignments(journal) if item is not None else []
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
