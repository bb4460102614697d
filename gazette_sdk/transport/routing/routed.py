"""What transports to brokers share: where a call goes, what is checked, what is remembered.

A :class:`RoutedTransport` is the whole journal service over a :class:`Wire`, which carries one
call to one broker and knows nothing of routes. Requests go to the broker that a journal's route
names, where it is known (client section 7), with a token signed for just that call where keys
are configured (protocol section 12). Responses are validated where they arrive; an invalid one
never changes a route.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.errors import UnavailableError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rpc
from gazette_sdk.protocol.authorization import Authorizer, FixedToken, authority_for, claims_for
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.service import RPCS_BY_NAME, Rpc
from gazette_sdk.transport.append.append_calls import AppendCalls, RoutedLane, no_broker
from gazette_sdk.transport.append.direct import DirectRoute, DirectRoutes
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.routing.dispatcher import candidates, choose, where
from gazette_sdk.transport.routing.route_cache import RouteCache
from gazette_sdk.transport.target import (
    ANYWHERE,
    SERVICE,
    AppendItem,
    Destination,
    ReadItem,
    Target,
)
from gazette_sdk.transport.wires.base import Wire

__all__ = [
    "CHUNK_BYTES_KEY",
    "CONNECT_TIMEOUT_S",
    "MAX_RECEIVE_BYTES",
    "RECONNECT_BACKOFF_MAX_S",
    "ROLLBACK_TIMEOUT_S",
    "RoutedTransport",
]

MAX_RECEIVE_BYTES = 16 << 20
"""Greatest message a client accepts (client section 1)."""

CHUNK_BYTES_KEY = "gazette-chunk-bytes"
"""Metadata that tells our own brokers what content per message this client takes. Brokers that
don't know it send at most 32 KiB, as they always do."""

CONNECT_TIMEOUT_S = 10.0
"""What a call waits for its broker to be reachable: enough for one that is just starting."""

RECONNECT_BACKOFF_MAX_S = 5.0
"""Longest wait between two dials of a lost connection."""

ROLLBACK_TIMEOUT_S = 10.0
"""What an append that was given up waits for the broker to say that it rolled back."""

_LIST = RPCS_BY_NAME["List"]
_APPLY = RPCS_BY_NAME["Apply"]
_READ = RPCS_BY_NAME["Read"]
_APPEND = RPCS_BY_NAME["Append"]
_REPLICATE = RPCS_BY_NAME["Replicate"]
_LIST_FRAGMENTS = RPCS_BY_NAME["ListFragments"]
_HEALTH = RPCS_BY_NAME["FragmentStoreHealth"]


class RoutedTransport(Transport):
    """The journal service, over a wire.

    Args:
        address: endpoint URL of the service.
        wire: carries its calls.
        zone: the client's own zone; reads prefer brokers in it.
        cache_size: journals whose routes are remembered; 0 lets brokers proxy every call.
        cache_ttl_s: age in seconds from which a remembered route is not used any more.
        auth_keys: base64 keys of the cluster; the first signs a token for each call.
        auth_token: a ready-made bearer token; used only where no keys are given.

    Raises:
        ConfigurationError: the keys are malformed.
    """

    def __init__(
        self,
        address: str,
        wire: Wire,
        *,
        zone: str,
        cache_size: int,
        cache_ttl_s: float,
        auth_keys: str,
        auth_token: str,
    ) -> None:
        self.address = address
        self.routes = RouteCache(cache_size, cache_ttl_s)
        self.knows_routes = cache_size > 0
        self._wire = wire
        self._zone = zone
        self._primaries: dict[str, tuple[pb.Route, Destination]] = {}
        self._authorizer: Authorizer | None = None
        if auth_keys.strip():
            self._authorizer = authority_for(auth_keys)
        elif auth_token:
            self._authorizer = FixedToken(auth_token)
        sign = None if self._authorizer is None else self._authorization
        self._appends = AppendCalls(
            address, self.routes, wire, self._choose_primary, lasting=self._authorizer is None
        )
        self._directs = DirectRoutes(self.routes, self._primary_of, wire.direct_to, sign)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    # ------------------------------------------------------------------ calls

    async def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse, None]:
        """See :meth:`Transport.list`. Routes of a listing that ends are remembered."""
        rpc.validate(request)
        with _Begin(self, _LIST, None, ANYWHERE, request) as to:
            starts_snapshot = True
            async with aclosing(self._wire.list(to, request)) as responses:
                async for response in responses:
                    if starts_snapshot:  # only its first message has status and header
                        rpc.validate(response)
                        starts_snapshot = False
                    elif request.watch and not response.journals:
                        starts_snapshot = True
                    if not request.watch:
                        for journal in response.journals:
                            self.routes.update(journal.spec.name, journal.route)
                    yield response

    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:
        """See :meth:`Transport.apply`."""
        response: pb.ApplyResponse = await self._unary(_APPLY, None, ANYWHERE, request)
        return response

    async def read(
        self, request: pb.ReadRequest, target: Target = ANYWHERE
    ) -> AsyncGenerator[ReadItem, None]:
        """See :meth:`Transport.read`."""
        rpc.validate(request)
        with _Begin(self, _READ, request.journal, target, request) as to:
            expected = -1
            async with aclosing(self._wire.read(to, request)) as items:
                async for item in items:
                    if isinstance(item, bytes):
                        expected += len(item)
                        yield item
                        continue
                    if isinstance(item, tuple):
                        offset, content = item
                        if offset == expected:
                            expected += len(content)
                            yield content
                            continue
                        item = pb.ReadResponse(offset=offset, content=content)  # noqa: PLW2901
                    rpc.validate(item)
                    if item.HasField("header"):
                        self.routes.update(request.journal, item.header.route)
                    expected = item.offset + len(item.content)
                    yield item

    async def append(
        self, requests: AsyncIterator[AppendItem], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        """See :meth:`Transport.append`. No call is opened before there is a first request.

        The name's metadata is stripped, unless the caller names an exact broker: other
        implementations' brokers cannot proxy an append with metadata.
        """
        opening = await anext(requests, None)
        if not isinstance(opening, pb.AppendRequest):
            raise ValidationError("an append begins with the request that names its journal")
        journal = opening.journal
        if target.member is None and strip_meta(journal) != journal:
            stripped = pb.AppendRequest()
            stripped.CopyFrom(opening)
            stripped.journal = strip_meta(journal)
            opening = stripped
        rpc.validate(opening)
        with _Begin(self, _APPEND, journal, target, opening, needs_primary=True) as to:
            response = await self._wire.append(to, opening, requests)
            rpc.validate(response)
            self.routes.update(journal, response.header.route)
        return response

    async def append_whole(
        self, opening: pb.AppendRequest, pieces: Sequence[bytes], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        """See :meth:`Transport.append_whole`."""
        return await self._appends.whole(opening, pieces, target)

    def lane(self, opening: pb.AppendRequest) -> RoutedLane:
        """See :meth:`Transport.lane`."""
        return RoutedLane(self._appends, opening)

    async def replicate(
        self, requests: AsyncIterator[pb.ReplicateRequest], target: Target
    ) -> AsyncGenerator[pb.ReplicateResponse, None]:
        """See :meth:`Transport.replicate`. No call is opened before there is a first request."""
        opening = await anext(requests, None)
        if opening is None:
            return
        journal = opening.proposal.journal
        with _Begin(self, _REPLICATE, journal, target, opening) as to:
            async with aclosing(self._wire.replicate(to, opening, requests)) as responses:
                async for response in responses:
                    yield response

    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        """See :meth:`Transport.list_fragments`."""
        response: pb.FragmentsResponse = await self._unary(
            _LIST_FRAGMENTS, request.journal, target, request
        )
        return response

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest
    ) -> pb.FragmentStoreHealthResponse:
        """See :meth:`Transport.fragment_store_health`."""
        response: pb.FragmentStoreHealthResponse = await self._unary(
            _HEALTH, None, ANYWHERE, request
        )
        return response

    def direct(self, journal: str) -> DirectRoute | None:
        """See :meth:`Transport.direct`."""
        return self._directs.of(journal)

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`."""
        await self._wire.aclose()

    # ------------------------------------------------------------- their parts

    async def _unary(self, call: Rpc, journal: str | None, target: Target, request: Message) -> Any:
        rpc.validate(request)
        with _Begin(self, call, journal, target, request) as to:
            response = await self._wire.unary(to, request)
            rpc.validate(response)
        return response

    def _know_primary(self, target: Target, to: Destination) -> None:
        """Remember where appends of a journal go, for as long as it has this very route."""
        if to.journal is None or target.route is None or target.member is not None:
            return
        if self._authorizer is not None:
            return  # every call has a token of its own
        if len(self._primaries) > 2 * self.routes.size:
            self._primaries.clear()
        self._primaries[to.journal] = target.route, to

    def _choose_primary(
        self, journal: str, target: Target, opening: pb.AppendRequest
    ) -> Destination:
        """Where an append goes."""
        return _Begin(self, _APPEND, journal, target, opening, needs_primary=True).choose()

    def _primary_of(self, journal: str, route: pb.Route) -> Destination | None:
        """Where appends from plain code go, if the route tells."""
        peer = candidates(Target(route), needs_primary=True)[0]
        if peer == SERVICE:
            return None
        return Destination(_APPEND, journal, peer, where(peer, self.address), None)

    def _authorization(self, opening: Message) -> str | None:
        """A token that is good for just this call."""
        if self._authorizer is None:
            return None
        wanted = claims_for(opening)
        return self._authorizer.header(
            wanted.capability, wanted.selector, wanted.ttl_s, time.time()
        )


class _Begin:
    """Chooses a broker; forgets the route if the call ends as unavailable."""

    __slots__ = (
        "_call",
        "_journal",
        "_needs_primary",
        "_opening",
        "_peer",
        "_target",
        "_transport",
    )

    def __init__(
        self,
        transport: RoutedTransport,
        call: Rpc,
        journal: str | None,
        target: Target,
        opening: Message,
        *,
        needs_primary: bool = False,
    ) -> None:
        if journal is not None and target.route is None and target.member is None:
            target = Target(transport.routes.route(journal))
        self._transport = transport
        self._call = call
        self._journal = journal
        self._target = target
        self._opening = opening
        self._needs_primary = needs_primary
        self._peer = SERVICE

    def __enter__(self) -> Destination:
        return self.choose()

    def choose(self) -> Destination:
        """The broker of the call, and its token."""
        transport = self._transport
        if self._needs_primary and self._target.member is None:
            known = transport._primaries.get(self._journal or "")  # noqa: SLF001 - of this module
            if known is not None and known[0] is self._target.route:
                self._peer = known[1].peer
                return known[1]
        try:
            peers = candidates(self._target, needs_primary=self._needs_primary)
            peer = self._peer = choose(peers, transport._zone, transport._wire.health)  # noqa: SLF001
        except UnavailableError as error:
            self._forget(error)
            raise
        to = Destination(
            self._call,
            self._journal,
            peer,
            where(peer, transport.address),
            transport._authorization(self._opening),  # noqa: SLF001 - of this module
        )
        if self._needs_primary and peer is not SERVICE:
            transport._know_primary(self._target, to)  # noqa: SLF001 - of this module
        return to

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, UnavailableError):
            self._forget(error)

    def _forget(self, error: UnavailableError) -> None:
        if self._journal is not None:
            self._transport.routes.invalidate(self._journal)
        if self._peer == SERVICE and self._target.member is None:
            raise no_broker(error, self._transport.address, self._journal) from error
