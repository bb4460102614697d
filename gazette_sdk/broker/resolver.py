"""Resolver: the route of a journal, and this broker's replicas (broker section 3).

The resolver observes the KeySpace. After each batch of changes it creates, replaces and stops
this broker's replicas according to the assignments. A call is resolved against the same mirror:
its journal, its route, and the broker to serve it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gazette_sdk.broker.metrics import WRITE_HEAD
from gazette_sdk.broker.recovery.etcd_history import is_route_without
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.replication.pipeline import Signal
from gazette_sdk.cluster.broker_keys import (
    BrokerAssignment,
    BrokerKeySpace,
    JournalEntry,
    implied_route,
)
from gazette_sdk.cluster.items import LocalIdentity, LocalItems
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.labels import matches_journal
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.rules import attach_endpoints, equivalent, route_of

MISSING_ID = pb.ProcessSpec.ID(zone="local-BrokerSpec", suffix="missing-from-Etcd")
"""Our id once our member key is removed: a draining broker can still proxy."""

_ADMITTED_MAX = 4096
"""Bound of the cached pairs of journal and matching selector; changes of Etcd clear them."""


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
        continued_at: returns the newest revision of a synchronized route of a journal that is
            without this broker; 0 if there is none. By default every route counts.
    """

    def __init__(
        self,
        keyspace: BrokerKeySpace,
        local_id: pb.ProcessSpec.ID,
        make_replica: Callable[[JournalEntry, Replica | None], Replica],
        continued_at: Callable[[str], int] | None = None,
    ) -> None:
        self._keyspace = keyspace
        self._local_id = local_id
        self._continued_at = continued_at or self._route_without_us_at
        self._identity = LocalIdentity(keyspace, local_id, missing_id=MISSING_ID, kind="broker")
        self._replicas = LocalItems[pb.JournalSpec, pb.Route, Replica](
            keyspace,
            local_id,
            make=make_replica,
            shut_down=self._shut_down,
            removed=WRITE_HEAD.remove,
            kind="replica",
        )
        self._known: dict[tuple[str, bool, bool], Resolution] = {}
        self._admitted: set[tuple[str, bytes]] = set()  # journals and selectors that match them
        keyspace.observers.append(self.refresh)

    @property
    def replicas(self) -> Sequence[Replica]:
        """This broker's replicas, by journal name."""
        return self._replicas.all()

    def replica(self, journal: str, create_revision: int | None = None) -> Replica | None:
        """Return this broker's replica of a journal, if it has one.

        Args:
            journal: its name.
            create_revision: of the journal; a replica of another creation is not returned. None
                for any.
        """
        found = self._replicas.get(journal)
        if found is not None and create_revision not in {None, found.create_revision}:
            return None
        return found

    # ------------------------------------------------------------- replicas

    def refresh(self) -> None:
        """Update the replicas after a batch of changes of the KeySpace."""
        self._known.clear()
        self._admitted.clear()
        self._replicas.refresh()

    def stop_local(self) -> None:
        """Stop all replicas in the background. Nothing resolves to us any more."""
        self._known.clear()
        self._replicas.stop()

    async def shutdowns(self, *, primaries: bool = False) -> None:
        """Wait until the replicas that were stopped have shut down.

        Args:
            primaries: only those of journals whose primary we were: they wait for no other broker.
        """
        await self._replicas.shutdowns(primaries=primaries)

    def _shut_down(self, journal: str, replica: Replica) -> Coroutine[Any, Any, None]:
        return replica.shut_down(
            is_replaced=lambda: self._replicas.get(journal) is not None,
            continued_at=partial(self._continued_at, journal),
        )

    def _route_without_us_at(self, journal: str) -> int:
        """Return the newest revision of a synchronized route without this broker; 0 for none."""
        without = (
            entry.mod_revision
            for entry in self._keyspace.assignments(journal)
            if is_route_without(entry.value, self._local_id)
        )
        return max(without, default=0)

    def has_route(self, replica: Replica, header: pb.Header) -> bool:
        """Return True if the journal of our replica has the route, and the primary, of a header.

        It has none for a replica that was replaced, or that is not assigned to us any more. Nor if
        its primary was replaced since, and leads the journal again: a request of its former time
        may name bytes that it has given up.
        """
        if self._replicas.get(replica.journal) is not replica and not self._replicas.is_stopped:
            return False
        assignments = self._keyspace.assignments(replica.journal)
        led_since = max((each.create_revision for each in assignments if each.slot == 0), default=0)
        is_former = header.etcd.revision < led_since
        return not is_former and equivalent(implied_route(assignments), header.route)

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
            self._identity.check_header(proxy_header)
            min_revision = max(min_revision, proxy_header.etcd.revision)
        if min_revision > self._keyspace.header.revision:
            await self._keyspace.wait_for_revision(min_revision)

        known = partial(
            self.known, claims=claims, may_proxy=may_proxy, require_primary=require_primary
        )
        found = known(journal) or known(name := strip_meta(journal))
        if found is not None:
            return found
        item = self._keyspace.item(name)
        if item is not None and not self._admits(claims, item):
            item = None
        found = self._resolve(name, item, may_proxy=may_proxy, require_primary=require_primary)
        if item is not None:
            self._known[name, may_proxy, require_primary] = found
        return found

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

    def is_current(self, resolution: object, replica: Replica) -> bool:
        """Return True if an append to our replica that resolves now would find the same.

        The route is that of ``resolution``, which found the replica, and so is the journal's spec.
        """
        if not isinstance(resolution, Resolution) or self._replicas.is_stopped:
            return False
        item, current = resolution.item, self._keyspace.item(replica.journal)
        return (
            item is not None
            and current is not None
            and item.mod_revision == current.mod_revision
            and resolution.invalidated is replica.signal
            and not replica.signal.fired
            and self._replicas.get(replica.journal) is replica
        )

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
        return self._identity.local_id

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
        if is_local and self._replicas.is_stopped:
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
