"""Listings and stores: List with its watch, Apply, ListFragments and FragmentStoreHealth.

They answer resolved calls (broker section 14).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.read import sign_get
from gazette_sdk.cluster.broker_keys import (
    BrokerAssignment,
    BrokerKeySpace,
    JournalEntry,
    implied_route,
)
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Get
from gazette_sdk.cluster.items import ItemChange, apply_items
from gazette_sdk.errors import GazetteError, UnauthenticatedError, ValidationError
from gazette_sdk.fragment.registry import StoreHealth, StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, Claims, admit_change
from gazette_sdk.protocol.durations import (
    SECOND_NS,
    encode_varint,
    format_duration,
    to_ns,
    to_seconds,
)
from gazette_sdk.protocol.labels import (
    OF_RESTORE,
    Matcher,
    continued_revision,
    matches_journal,
    remove,
    rewrite_prefix,
    set_value,
    value_of,
)
from gazette_sdk.protocol.rules import attach_endpoints, complete, unrouted_header

PAGE_JOURNALS = 25
"""Number of journals in one message. Other tasks of the event loop run between two of them."""

SLICE_JOURNALS = 500
"""Number of journals that are visited before other tasks of the event loop run."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Identity of a snapshot, without the routes."""

    count: int
    mod_revision: int


_ROW_TAG = encode_varint(pb.ListResponse.JOURNALS_FIELD_NUMBER << 3 | 2)


@dataclass(slots=True)
class _Snapshot:
    """Journals at one moment, with what their rows are made of.

    The mirror's entries are never changed, so that rows are made of them later, a few at a time.

    Attributes:
        items: journals.
        header: header of the answer.
        assignments: assignments of journals, by name.
        endpoints: endpoints of brokers, by zone and suffix.
        routes: routes so far, by the zones, suffixes and slots of their assignments.
    """

    items: Sequence[JournalEntry]
    header: pb.Header
    assignments: dict[str, list[BrokerAssignment]]
    endpoints: dict[tuple[str, str], str]
    routes: dict[tuple[tuple[str, str, int], ...], pb.Route] = field(default_factory=dict)

    async def assign(self, entries: Sequence[BrokerAssignment]) -> None:
        """Add assignments, and let other tasks run in between."""
        async for some in _slices(entries, SLICE_JOURNALS):
            for entry in some:
                self.assignments.setdefault(entry.item, []).append(entry)

    def route(self, assignments: Sequence[BrokerAssignment]) -> pb.Route:
        """Return the route of a journal. Most journals share theirs with many others."""
        key = tuple((entry.zone, entry.suffix, entry.slot) for entry in assignments)
        route = self.routes.get(key)
        if route is None:
            route = self.routes[key] = implied_route(assignments)
            attach_endpoints(route, lambda zone, suffix: self.endpoints.get((zone, suffix)))
        return route


class _Row(NamedTuple):
    """Row of a journal, encoded, with what it was made of."""

    item: JournalEntry
    assignments: Sequence[BrokerAssignment]
    endpoints: Sequence[str]
    absent: Sequence[pb.ProcessSpec.ID]
    wire: bytes


@dataclass(frozen=True, slots=True)
class Listing:
    """List and changes of a cluster's journals.

    Attributes:
        keyspace: the mirror of Etcd.
        etcd: takes changes.
        local_id: this broker.
        allowed_stores: URLs of stores that any caller may give to its journals.
        absent_brokers: returns the brokers which a journal waits for.
    """

    keyspace: BrokerKeySpace
    etcd: Etcd
    local_id: pb.ProcessSpec.ID
    allowed_stores: Collection[str] = ()
    absent_brokers: Callable[[str], Sequence[pb.ProcessSpec.ID]] = lambda _: ()
    _rows: dict[str, _Row] = field(default_factory=dict, init=False)

    def header(self) -> pb.Header:
        """Return the header of answers without a journal."""
        known = self.keyspace.member(self.local_id.zone, self.local_id.suffix) is not None
        return unrouted_header(self.local_id if known else None, self.keyspace.header)

    def _is_of_other_etcd(self, seen: pb.Header.Etcd) -> bool:
        """Return True if a revision is of an Etcd before the cluster was restored into this one."""
        have = self.keyspace.header.cluster_id
        return bool(seen.cluster_id and have) and seen.cluster_id != have

    async def snapshots(
        self, request: pb.ListRequest, claims: Claims
    ) -> AsyncGenerator[pb.ListResponse]:
        """Yield snapshots of the journals that match the request and the caller's claims.

        A watch yields another snapshot when journals were created or deleted or a spec changed.
        Each of its snapshots ends with an empty response. It continues until it is closed.

        Args:
            request: a valid request.
            claims: the caller's.
        """
        wanted = Matcher(rewrite_prefix(request.selector))
        allowed = Matcher(rewrite_prefix(claims.selector))
        mark: _Mark | None = None
        resumed = request.watch_resume.etcd
        if request.HasField("watch_resume") and not self._is_of_other_etcd(resumed):
            await self.keyspace.wait_for_revision(resumed.revision + 1)
        while True:
            revision = self.keyspace.revision
            snapshot, all_assignments = self._snapshot(wanted.names)
            matching: list[JournalEntry] = []
            async for items in _slices(snapshot.items, SLICE_JOURNALS):
                matching += (
                    item
                    for item in items
                    if wanted.journal(item.value) and allowed.journal(item.value)
                )
            new = _Mark(len(matching), max((i.mod_revision for i in matching), default=0))
            if new != mark:
                mark = new
                await snapshot.assign(all_assignments)
                first = self._page(snapshot, matching[:PAGE_JOURNALS], header=snapshot.header)
                if request.count_brokers:
                    first.brokers = self._brokers()
                yield first
                async for journals in _slices(matching[PAGE_JOURNALS:], PAGE_JOURNALS):
                    yield self._page(snapshot, journals)
                if request.watch:
                    yield complete(pb.ListResponse())
            if not request.watch:
                return
            await self.keyspace.wait_for_revision(revision + 1)

    def _snapshot(
        self, names: Collection[str] | None
    ) -> tuple[_Snapshot, Sequence[BrokerAssignment]]:
        """Return the journals of some names, or all for None, in the order of their keys.

        Readers and shards each list their journal by its name: that must not visit all journals.

        Returns:
            the snapshot, and assignments that are not in it yet.
        """
        endpoints = {
            (entry.zone, entry.suffix): entry.value.process_spec.endpoint
            for entry in self.keyspace.members()
        }
        if names is None:
            journals = self.keyspace.items()
            if len(self._rows) > 2 * len(journals):
                self._rows.clear()  # most are of journals that were deleted
            everything = _Snapshot(journals, self.header(), {}, endpoints)
            return everything, self.keyspace.all_assignments()
        found = (self.keyspace.item(name) for name in sorted(names, key=str.encode))
        items = [item for item in found if item is not None]
        assignments = {item.id: self.keyspace.assignments(item.id) for item in items}
        return _Snapshot(items, self.header(), assignments, endpoints), ()

    def _page(
        self,
        snapshot: _Snapshot,
        journals: Sequence[JournalEntry],
        *,
        header: pb.Header | None = None,
    ) -> pb.ListResponse:
        page = complete(pb.ListResponse(header=header))
        page.MergeFromString(b"".join(self._row(item, snapshot) for item in journals))
        return page

    def _brokers(self) -> int:
        """Return the number of brokers that take journals."""
        specs = (member.value for member in self.keyspace.members())
        return sum(spec.journal_limit > 0 and not spec.exiting for spec in specs)

    def _row(self, item: JournalEntry, snapshot: _Snapshot) -> bytes:
        """Return the encoded row of a journal, which is kept until something in it changes."""
        assignments = snapshot.assignments.get(item.id, ())
        endpoints = [snapshot.endpoints.get((a.zone, a.suffix), "") for a in assignments]
        absent = self.absent_brokers(item.id)
        row = self._rows.get(item.id)
        if (
            row is None
            or row.item is not item
            or row.assignments != assignments
            or row.endpoints != endpoints
            or row.absent != absent
        ):
            wire = _encoded_row(item, snapshot.route(assignments), absent)
            row = self._rows[item.id] = _Row(item, assignments, endpoints, absent, wire)
        return row.wire

    async def apply(self, request: pb.ApplyRequest, claims: Claims) -> pb.ApplyResponse:
        """Create, change and delete journals, all in one transaction.

        Args:
            request: a valid request.
            claims: of the caller.

        Raises:
            UnauthenticatedError: a change is outside the caller's claims.
            EtcdError: Etcd failed, or refused.
        """
        compares: list[Compare] = []
        if not claims.allows_every_journal:
            compares = await self._admit(request, claims)
        changes = list(map(self._item_change, request.changes))
        applied = await apply_items(self.etcd, self.keyspace, changes, compares=compares)
        response = pb.ApplyResponse(header=self.header())
        if not applied.succeeded:
            response.status = pb.ETCD_TRANSACTION_FAILED
        response.header.etcd.revision = applied.revision
        return complete(response)

    def _item_change(self, change: pb.ApplyRequest.Change) -> ItemChange:
        name = change.delete or change.upsert.name
        value = None
        if not change.delete:
            spec = complete(change.upsert)
            item = self.keyspace.item(name)
            # A caller's spec may be older than the restore, or of a journal that was deleted.
            for label in OF_RESTORE:
                known = "" if item is None else value_of(item.value.labels, label)
                if known:
                    set_value(spec.labels, label, known)
                else:
                    remove(spec.labels, label)
            value = spec.SerializeToString()
        return ItemChange(item=name, expect_mod_revision=change.expect_mod_revision, value=value)

    async def _admit(self, request: pb.ApplyRequest, claims: Claims) -> list[Compare]:
        """Check that claims with a selector allow the changes.

        The current specs are read from Etcd, because the mirror may be old.

        Returns:
            conditions that the specs are still those that were checked.

        Raises:
            UnauthenticatedError: the claims do not allow a change.
        """
        keys = [self.keyspace.item_key(c.delete or c.upsert.name) for c in request.changes]
        found = (await self.etcd.txn((), map(Get, keys))).responses
        compares: list[Compare] = []
        for change, key, result in zip(request.changes, keys, found, strict=True):
            assert result is not None, "the response of a get"
            existing: pb.JournalSpec | None = None
            revision = 0
            if result.entries:
                (entry,) = result.entries
                revision = entry.mod_revision
                try:
                    existing = pb.JournalSpec.FromString(entry.value)
                except DecodeError as error:
                    raise UnauthenticatedError(
                        f"the spec of {change.delete or change.upsert.name} in Etcd cannot be "
                        "read; use a token without a selector to replace it"
                    ) from error
            admit_change(claims, change, existing, allowed_stores=self.allowed_stores)
            compares.append(Compare.mod_revision(key, revision))
        return compares


T = TypeVar("T")


async def _slices(items: Sequence[T], count: int) -> AsyncGenerator[Sequence[T]]:
    """Yield some items at a time, and let other tasks run in between."""
    for begin in range(0, len(items), count):
        if begin:
            await asyncio.sleep(0)
        yield items[begin : begin + count]


def _encoded_row(item: JournalEntry, route: pb.Route, absent: Sequence[pb.ProcessSpec.ID]) -> bytes:
    """Return the row of a journal, as a field of a response."""
    row = pb.ListResponse.Journal(
        spec=item.value,
        mod_revision=item.mod_revision,
        create_revision=continued_revision(item.value.labels) or item.create_revision,
        route=route,
        waiting=pb.ListResponse.Waiting(brokers=absent) if absent else None,
    )
    wire = row.SerializeToString()
    return _ROW_TAG + encode_varint(len(wire)) + wire


PAGE_LIMIT_DEFAULT: Final = 1000
"""Fragments of a page if the request has no limit."""

SIGNATURE_TTL_MAX_S: Final = 7 * 24 * 3600
"""Longest validity of a signed URL: object stores sign for no longer either."""

DELETE_PROBE_TIMEOUT_S: Final = 60.0
"""Bound of the probe of a store's permission to delete."""


async def list_page(
    request: pb.FragmentsRequest, index: Index, stores: StoreRegistry
) -> pb.FragmentsResponse:
    """Return a page of a journal's fragments, with signed URLs if they are requested.

    It waits for the first listing of the journal's stores, unless only un-stored ones are wanted,
    or what is known now. It lists them again first if that is requested.

    Args:
        request: a valid one.
        index: of the replica.
        stores: of the process.

    Returns:
        the response, without its header.

    Raises:
        ValidationError: the URLs would be valid for too long.
        StoreError: a URL cannot be signed.
    """
    if to_ns(request.signatureTTL) > SIGNATURE_TTL_MAX_S * SECOND_NS:
        raise ValidationError(
            f"invalid signatureTTL ({format_duration(to_ns(request.signatureTTL))}; expected <= "
            f"{format_duration(SIGNATURE_TTL_MAX_S * SECOND_NS)})",
            kind="invalid_signature_ttl",
        )
    if request.list_again:
        await index.list_again()
    if not (request.unstored_only or request.do_not_wait):
        await index.first_refresh.wait()
    page = index.page(
        begin_mod_time=request.begin_mod_time,
        end_mod_time=request.end_mod_time,
        token=request.next_page_token,
        limit=request.page_limit or PAGE_LIMIT_DEFAULT,
        unstored_only=request.unstored_only,
        torn_only=request.torn_only,
    )
    response = pb.FragmentsResponse(status=pb.OK, next_page_token=page.next_page_token)
    for fragment in page.fragments:
        response.fragments.add(spec=fragment)
    if request.HasField("signatureTTL"):
        ttl_s = to_seconds(request.signatureTTL)
        await asyncio.to_thread(_sign_all, stores, response, ttl_s)
    return response


async def check_store(
    request: pb.FragmentStoreHealthRequest,
    stores: StoreRegistry,
    claims: Claims,
    specs: Iterable[pb.JournalSpec],
) -> pb.FragmentStoreHealthResponse:
    """Return the health of a store and, if requested, of the permission to delete from it.

    The broker connects to the address in a store's URL. So a caller may have those stores checked
    that are named by journals its claims match. A caller who could name the store in a new
    journal of any name may have every store checked, but the broker remembers nothing of it.

    Args:
        request: a valid one.
        stores: of the process.
        claims: of the caller.
        specs: all journals.

    Returns:
        the response, without its header.

    Raises:
        UnauthenticatedError: the claims do not allow the check.
    """
    url = request.fragment_store
    if _is_named(url, claims, specs):
        error = await _check(request, stores.health(url))
    elif _is_unrestricted(claims):
        async with stores.temporary_health(url) as health:
            error = await _check(request, health)
    else:
        raise UnauthenticatedError(
            f"the token does not allow to check the fragment store {url}: no journal that it "
            "matches has this store; create the journal first, or use a token with READ and APPLY "
            "for all journals"
        )
    if error is None:
        return pb.FragmentStoreHealthResponse(status=pb.OK)
    return pb.FragmentStoreHealthResponse(
        status=pb.FRAGMENT_STORE_UNHEALTHY, store_health_error=error
    )


async def _check(request: pb.FragmentStoreHealthRequest, health: StoreHealth) -> str | None:
    """Return the reason why a store is not healthy; None if it is."""
    await health.wait_first()
    if health.error is not None or not request.check_delete:
        return health.error
    try:
        async with asyncio.timeout(DELETE_PROBE_TIMEOUT_S):
            await health.check_delete(request.check_delete_prefix)
    except TimeoutError:
        return f"the delete probe was not done within {DELETE_PROBE_TIMEOUT_S:.0f} s"
    except GazetteError as failure:
        return str(failure)
    return None


def _is_named(url: str, claims: Claims, specs: Iterable[pb.JournalSpec]) -> bool:
    """Return True if a journal that the claims match has the store."""
    selector = rewrite_prefix(claims.selector)
    return any(url in spec.fragment.stores and matches_journal(selector, spec) for spec in specs)


def _is_unrestricted(claims: Claims) -> bool:
    """Return True if the claims allow to create any journal."""
    selector = claims.selector
    is_scoped = bool(selector.include.labels or selector.exclude.labels)
    return bool(claims.capability & Capability.APPLY) and not is_scoped


def _sign_all(stores: StoreRegistry, response: pb.FragmentsResponse, ttl_s: float) -> None:
    for entry in response.fragments:
        if entry.spec.backing_store:
            entry.signed_url = sign_get(stores, entry.spec, ttl_s)
