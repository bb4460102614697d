"""Inventory of a journal's content outside of this broker: on its peers and in its stores."""

from __future__ import annotations

import asyncio
import hashlib
import math
import sys
from collections.abc import Iterable
from contextlib import aclosing
from typing import Final

from gazette_sdk.broker.fragments.refresh import list_stores, whole_of
from gazette_sdk.broker.resolver import Resolution, Resolver
from gazette_sdk.errors import STATUS_NAMES, UnavailableError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.journal_spec import desired_replication, may_read
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import ANYWHERE, Target

__all__ = ["LISTING_TIMEOUT_S", "PeerInventory"]

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
        if may_read(spec):  # peers refuse to list a journal that nobody may read
            peers = [member for member in members if member != self._resolver.local_id]
            asked = [self._fragments_in_time(resolution, member, end) for member in peers]
            # All are awaited, so that none goes on asking after an error.
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

    async def head(self, journal: str, members: Iterable[pb.ProcessSpec.ID]) -> int | None:
        """Return the offset at which members of a journal go on with it.

        It may be behind all bytes that anybody has: replicas learn the offset of bytes which only
        their primary has.

        Args:
            journal: its name.
            members: those to ask which are members now.

        Returns:
            the greatest end of their spools; ``None`` if one of them does not tell it, since it is
            of another implementation. Also ``None`` if they have nothing and are fewer than the
            journal requires: their disks may be new.

        Raises:
            GazetteError: a broker did not answer, or does not know yet where it goes on.
        """
        resolution = await self._resolve(journal)
        assert resolution.spec is not None
        present = resolution.header.route.members
        asked = [self._spool_end_of(resolution, each) for each in members if each in present]
        greatest = 0
        for end in await asyncio.gather(*asked):
            if end is None:
                return None
            greatest = max(end, greatest)
        required = desired_replication(resolution.spec, self._max_replication)
        return greatest if greatest or len(asked) >= required else None

    async def _spool_end_of(self, resolution: Resolution, member: pb.ProcessSpec.ID) -> int | None:
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
                if isinstance(item, bytes) or not item.HasField("spool_end"):
                    break
                if item.spool_end < 0:
                    raise UnavailableError(
                        f"the spools of broker {member.zone}/{member.suffix} are in quarantine",
                        journal=resolution.journal,
                    )
                return item.spool_end
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
