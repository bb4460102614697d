"""What is known of a journal's content: to the brokers that serve it, and in its stores."""

from __future__ import annotations

import hashlib
import math
import sys
from typing import Final

from gazette_sdk.broker.fragments.refresh import list_stores
from gazette_sdk.broker.resolver import Resolution, Resolver
from gazette_sdk.errors import STATUS_NAMES, UnavailableError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.journal_spec import desired_replication, may_read
from gazette_sdk.transport.base import ANYWHERE, Target, Transport

__all__ = ["KnownFragments"]

_CLAIMS: Final = Claims(int(Capability.READ), pb.LabelSelector(), math.inf)


class KnownFragments:
    """Asks for the fragments of journals.

    Args:
        resolver: knows who serves a journal, and our own replicas.
        peers: carries calls to other brokers.
        local: carries calls to ourselves.
        stores: of the process.
        max_replication: cap of every journal's replication.
    """

    def __init__(
        self,
        resolver: Resolver,
        *,
        peers: Transport,
        local: Transport,
        stores: StoreRegistry,
        max_replication: int,
    ) -> None:
        self._resolver = resolver
        self._peers = peers
        self._local = local
        self._stores = stores
        self._max_replication = max_replication

    async def before(self, journal: str, end: int) -> list[pb.Fragment]:
        """The fragments that begin before an offset, some of them perhaps more than once.

        Every broker of the journal is asked, each that its replication wants: any of them may
        be the only one to have what was acknowledged. Our own replica is looked at as it is.
        The stores are listed last and by ourselves, since what a broker told just before, or
        let go of, may be there since the last listing of its own.

        Raises:
            GazetteError: somebody did not answer; or there are too few brokers, or no primary.
            OSError: a store could not be listed.
        """
        resolution = await self._resolver.resolve(
            journal, _CLAIMS, may_proxy=True, require_primary=True
        )
        if resolution.status != pb.OK:
            raise UnavailableError(STATUS_NAMES[resolution.status], journal=journal)
        spec, members = resolution.spec, resolution.header.route.members
        assert spec is not None
        if len(members) < desired_replication(spec, self._max_replication):
            raise UnavailableError("it has too few brokers", journal=journal)

        found: list[pb.Fragment] = []
        for member in members:
            if member == self._resolver.local_id:
                if resolution.replica is not None:
                    page = resolution.replica.index.page(limit=sys.maxsize)
                    found += page.fragments
            elif may_read(spec):  # where nobody may, its brokers do not tell each other
                found += await self._of_member(resolution, member, end)
        found += await list_stores(journal, spec.fragment.stores, self._stores)
        return [fragment for fragment in found if fragment.begin < end]

    async def digest(self, journal: str, begin: int, end: int) -> bytes | None:
        """SHA-1 of what readers get of a span from the primary; ``None`` if not all of it.

        Raises:
            GazetteError: it did not answer.
        """
        resolution = await self._resolver.resolve(
            journal, _CLAIMS, may_proxy=True, require_primary=True
        )
        if resolution.status != pb.OK:
            raise UnavailableError(STATUS_NAMES[resolution.status], journal=journal)
        request = pb.ReadRequest(journal=journal, offset=begin, end_offset=end, do_not_proxy=True)
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
                return None
        return found.digest() if position == end else None

    async def _of_member(
        self, resolution: Resolution, member: pb.ProcessSpec.ID, end: int
    ) -> list[pb.Fragment]:
        request = pb.FragmentsRequest(journal=resolution.journal, do_not_proxy=True)
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
