"""Listing: List, with its watch, and Apply (broker section 14)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from gazette_sdk.broker.authorize import admit_change
from gazette_sdk.cluster.apply_items import ItemChange, apply_items
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalEntry
from gazette_sdk.cluster.etcd import Compare, Etcd, Get
from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.non_null_fields import complete
from gazette_sdk.protocol.routes import attach_endpoints, unrouted_header
from gazette_sdk.protocol.selectors import Matcher, rewrite_prefix

__all__ = ["PAGE_JOURNALS", "Listing"]

PAGE_JOURNALS = 25
"""Number of journals in one message."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Identity of a snapshot, without the routes."""

    count: int
    mod_revision: int


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

    def header(self) -> pb.Header:
        """Return the header of answers without a journal."""
        known = self.keyspace.member(self.local_id.zone, self.local_id.suffix) is not None
        return unrouted_header(self.local_id if known else None, self.keyspace.header)

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
        if request.HasField("watch_resume"):
            await self.keyspace.wait_for_revision(request.watch_resume.etcd.revision + 1)
        while True:
            revision = self.keyspace.revision
            matching = [
                item
                for item in self._named(wanted.names)
                if wanted.journal(item.value) and allowed.journal(item.value)
            ]
            new = _Mark(len(matching), max((i.mod_revision for i in matching), default=0))
            if new != mark:
                mark = new
                # Built without an await in between: one snapshot has one revision.
                pages = self._pages(matching)
                if request.count_brokers:
                    pages[0].brokers = self._brokers()
                for page in pages:
                    yield page
                if request.watch:
                    yield complete(pb.ListResponse())
            if not request.watch:
                return
            await self.keyspace.wait_for_revision(revision + 1)

    def _named(self, names: Collection[str] | None) -> Iterable[JournalEntry]:
        """Return the journals of some names, or all for None, in the order of their keys.

        Readers and shards each list their journal by its name: that must not visit all journals.
        """
        if names is None:
            return self.keyspace.items()
        found = (self.keyspace.item(name) for name in sorted(names, key=str.encode))
        return [item for item in found if item is not None]

    def _pages(self, matching: Sequence[JournalEntry]) -> list[pb.ListResponse]:
        pages = [pb.ListResponse(header=self.header())]
        for begin in range(0, len(matching), PAGE_JOURNALS):
            if begin:
                pages.append(pb.ListResponse())
            pages[-1].journals.extend(map(self._journal, matching[begin : begin + PAGE_JOURNALS]))
        return [complete(page) for page in pages]

    def _brokers(self) -> int:
        """Return the number of brokers that take journals."""
        specs = (member.value for member in self.keyspace.members())
        return sum(spec.journal_limit > 0 and not spec.exiting for spec in specs)

    def _journal(self, item: JournalEntry) -> pb.ListResponse.Journal:
        route = self.keyspace.journal_route(item.id)
        attach_endpoints(route, self.keyspace.endpoint)
        absent = self.absent_brokers(item.id)
        return pb.ListResponse.Journal(
            spec=item.value,
            mod_revision=item.mod_revision,
            create_revision=item.create_revision,
            route=route,
            waiting=pb.ListResponse.Waiting(brokers=absent) if absent else None,
        )

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
        applied = await apply_items(
            self.etcd, self.keyspace, list(map(_item_change, request.changes)), compares=compares
        )
        response = pb.ApplyResponse(header=self.header())
        if not applied.succeeded:
            response.status = pb.ETCD_TRANSACTION_FAILED
        response.header.etcd.revision = applied.revision
        return complete(response)

    async def _admit(self, request: pb.ApplyRequest, claims: Claims) -> list[Compare]:
        """Check that claims with a selector allow the changes.

        The current specs are read from Etcd, because the mirror may be behind.

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


def _item_change(change: pb.ApplyRequest.Change) -> ItemChange:
    return ItemChange(
        item=change.delete or change.upsert.name,
        expect_mod_revision=change.expect_mod_revision,
        value=None if change.delete else complete(change.upsert).SerializeToString(),
    )
