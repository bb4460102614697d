"""Un-stored content of journals, and how many brokers have it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from gazette_sdk.cli.concurrency import for_each
from gazette_sdk.cli.journals.selection import is_fully_suspended
from gazette_sdk.errors import STATUS_NAMES, GazetteError, UnavailableError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import Target

__all__ = ["Unstored", "unstored_of", "unstored_spans"]

_log = logging.getLogger(__name__)

MEMBER_TIMEOUT_S = 5.0
"""A broker that does not answer for this long counts as one that has nothing."""


@dataclass(frozen=True, slots=True)
class Unstored:
    """Content of a journal that is in no store.

    Attributes:
        length_bytes: of the content; None if it is unknown.
        holders: of each byte at least so many brokers have it; None without such content.
    """

    length_bytes: int | None = None
    holders: int | None = None


async def unstored_of(transport: Transport, listing: pb.ListResponse) -> dict[str, Unstored]:
    """Return the un-stored content of listed journals, by name. All their brokers are asked."""
    found = await for_each(listing.journals, partial(_unstored, transport))
    names = [journal.spec.name for journal in listing.journals]
    return dict(zip(names, found, strict=True))


def unstored_spans(local: Sequence[CoverSet], stored: CoverSet) -> Unstored:
    """Return what is in no store, and how many brokers have each byte of it.

    Args:
        local: un-stored fragments of each broker.
        stored: fragments that some broker found in a store.
    """
    bounds = sorted(
        {bound for cover in (*local, stored) for each in cover for bound in (each.begin, each.end)}
    )
    length_bytes, holders = 0, None
    for begin, end in pairwise(bounds):
        count = sum(cover.covers(begin, end) for cover in local)
        if count and not stored.covers(begin, end):
            length_bytes += end - begin
            holders = count if holders is None else min(holders, count)
    return Unstored(length_bytes, holders)


async def _unstored(transport: Transport, journal: pb.ListResponse.Journal) -> Unstored:
    route = journal.route
    if is_fully_suspended(journal.spec):
        return Unstored(0)
    # The primary first: what is appended after its answer is left out.
    members = sorted(range(len(route.members)), key=lambda index: index != route.primary)
    local: list[CoverSet] = []
    end: int | None = None
    for index in members:
        found = await _fragments(transport, journal, index, unstored_only=True)
        if found is not None:
            end = max((each.end for each in found), default=0) if end is None else end
            local.append(CoverSet(_before(end, each) for each in found if not each.mod_time))
    if not local:
        return Unstored()
    stored = CoverSet()
    first = unstored_spans(local, stored)
    if first.length_bytes and (first.holders or 0) < len(route.members):
        # Brokers list the stores at different times: one may have seen what another has not.
        begin = min(each.begin for cover in local for each in cover)
        for index in members:
            found = await _fragments(transport, journal, index, token=begin)
            for each in found or ():
                if each.mod_time:
                    stored.add(each)
    return unstored_spans(local, stored)


def _before(end: int, fragment: pb.Fragment) -> pb.Fragment:
    fragment.end = min(fragment.end, max(end, fragment.begin))
    return fragment


async def _fragments(
    transport: Transport,
    journal: pb.ListResponse.Journal,
    index: int,
    *,
    token: int = 0,
    unstored_only: bool = False,
) -> list[pb.Fragment] | None:
    """Return the fragments of one broker; None if it does not answer."""
    name, member = journal.spec.name, journal.route.members[index]
    request = pb.FragmentsRequest(
        journal=name, do_not_proxy=True, next_page_token=token, unstored_only=unstored_only
    )
    target = Target(route=journal.route, member=member)
    found: list[pb.Fragment] = []
    try:
        async with asyncio.timeout(MEMBER_TIMEOUT_S):
            while True:
                response = await transport.list_fragments(request, target)
                if response.status != pb.OK:
                    raise UnavailableError(STATUS_NAMES[response.status], journal=name)
                found += [entry.spec for entry in response.fragments]
                request.next_page_token = response.next_page_token
                if not response.next_page_token:
                    return found
    except (GazetteError, TimeoutError) as error:
        reason = str(error) or f"no answer within {MEMBER_TIMEOUT_S:g} s"
        extra = {"journal": name, "broker": f"{member.zone}/{member.suffix}", "err": reason}
        _log.warning("a broker does not tell what it has", extra=extra)
        return None
