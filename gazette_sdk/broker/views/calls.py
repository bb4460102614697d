"""Calls that show a cluster: authorization of their callers, and their methods for the fronts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from gazette_sdk.broker.listing import Listing
from gazette_sdk.broker.replication.pipeline import Signal
from gazette_sdk.broker.service import until_end
from gazette_sdk.broker.views.events import ClusterEvents
from gazette_sdk.broker.views.heads import Heads
from gazette_sdk.broker.views.page import JournalPages
from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.rules import EVENTS_RPC, HEADS_RPC, JOURNALS_PAGE_RPC
from gazette_sdk.server.authorization import Authorization, Call
from gazette_sdk.server.grpc_server import Method


@dataclass(frozen=True, slots=True)
class ClusterViews:
    """Calls of a broker that show journals and events of the cluster.

    Attributes:
        authorization: verifies callers.
        listing: makes headers.
        pages: pages of journals.
        heads: heads of journals.
        events: streams of events.
        stopping: ends streams when it fires.
    """

    authorization: Authorization
    listing: Listing
    pages: JournalPages
    heads: Heads
    events: ClusterEvents
    stopping: Signal

    def methods(self) -> Iterator[Method]:
        """Return the methods, for gRPC and for the JSON gateway."""
        yield Method(JOURNALS_PAGE_RPC, self.page)
        yield Method(HEADS_RPC, self.find_heads)
        yield Method(EVENTS_RPC, self.stream_events)

    async def page(
        self, request: clpb.JournalsPageRequest, call: Call
    ) -> clpb.JournalsPageResponse:
        """Return a page of the journals that the caller may list."""
        claims = self.authorization.verify(call, Capability.LIST)
        async with self.authorization.bound(claims, call):
            return await self.pages.answer(request, claims, call)

    async def find_heads(self, request: clpb.HeadsRequest, call: Call) -> clpb.HeadsResponse:
        """Return the heads of journals that the caller may read."""
        claims = self.authorization.verify(call, Capability.READ)
        async with self.authorization.bound(claims, call):
            heads = await self.heads.answer(request, claims, call)
        return clpb.HeadsResponse(header=self.listing.header(), heads=heads)

    async def stream_events(
        self, request: clpb.EventsRequest, call: Call
    ) -> AsyncGenerator[clpb.Event]:
        """Yield the events of the cluster, to callers that may list all of its journals."""
        claims = verify_whole_cluster(self.authorization, call)
        timeout_s = self.authorization.remaining_s(claims)
        events = until_end(self.events.stream(request, call), timeout_s, self.stopping)
        async with aclosing(events):
            async for event in events:
                yield event


def verify_whole_cluster(authorization: Authorization, call: Call) -> Claims:
    """Return the claims of a caller that may list all journals.

    Raises:
        UnauthenticatedError: it may not.
    """
    claims = authorization.verify(call, Capability.LIST)
    if not claims.allows_every_journal:
        raise UnauthenticatedError(
            "this call shows the whole cluster: use a token with the capability LIST and without "
            "a selector"
        )
    return claims
