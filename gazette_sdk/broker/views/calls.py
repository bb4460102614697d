"""Calls that show a cluster: authorization of their callers, and their methods on each wire."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from gazette_sdk.broker.listing import Listing
from gazette_sdk.broker.replication.pipeline import Signal
from gazette_sdk.broker.service import until_end
from gazette_sdk.broker.views.events import ClusterEvents
from gazette_sdk.broker.views.heads import Heads
from gazette_sdk.broker.views.page import JournalPages
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.protocol.rules import (
    DRAIN_RPC,
    EVENTS_RPC,
    HEADS_RPC,
    JOURNALS_PAGE_RPC,
    MEMBERS_RPC,
    REPORT_RPC,
)
from gazette_sdk.server.authorization import Authorization, Call
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.server.json_gateway import BODY_BYTES_MAX, JsonStream, JsonUnary
from gazette_sdk.server.members import verify_view

HEADS_BYTES_MAX = 512 << 10
"""Greatest body that names journals whose heads are asked for: as many as one call may name."""


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
        claims = verify_view(self.authorization.authority, call.authorization)
        timeout_s = self.authorization.remaining_s(claims)
        events = until_end(self.events.stream(request, call), timeout_s, self.stopping)
        async with aclosing(events):
            async for event in events:
                yield event


def cluster_json_methods(methods: Iterable[Method]) -> Mapping[str, JsonStream | JsonUnary]:
    """Return the calls about a cluster, of the methods that a broker serves.

    Those that change nothing may be made by GET, too.
    """
    served = {method.rpc: method.serve for method in methods}
    listed = Capability.LIST
    every = {
        "/v1/journals/page": (JOURNALS_PAGE_RPC, listed, BODY_BYTES_MAX),
        "/v1/journals/heads": (HEADS_RPC, Capability.READ, HEADS_BYTES_MAX),
        "/v1/cluster/members": (MEMBERS_RPC, listed, BODY_BYTES_MAX),
        "/v1/cluster/report": (REPORT_RPC, listed, BODY_BYTES_MAX),
    }
    calls: dict[str, JsonStream | JsonUnary] = {
        path: JsonUnary(
            capability,
            rpc.request_type,
            served[rpc],
            allows_get=True,
            body_bytes_max=body_bytes_max,
        )
        for path, (rpc, capability, body_bytes_max) in every.items()
        if rpc in served
    }
    if EVENTS_RPC in served:
        calls["/v1/cluster/events"] = JsonStream(
            listed, EVENTS_RPC.request_type, served[EVENTS_RPC], allows_get=True
        )
    if DRAIN_RPC in served:
        calls["/v1/cluster/drain"] = JsonUnary(
            Capability.APPLY, DRAIN_RPC.request_type, served[DRAIN_RPC]
        )
    return calls
