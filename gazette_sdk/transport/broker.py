"""Routes of journals.

Read in this order:

- `routed`: the journal service over a wire.
- `router`: broker, token and route of each call; the route of a journal's appends.
- `route_cache`: routes as brokers sent them, and what is prepared for them.
- `dispatcher`: the broker of a call. Pure.

Transport to brokers over any wire: the whole journal service.

A :class:`RoutedTransport` has a :class:`Router`, which chooses the broker of each call, and a wire,
which carries one call to one broker and knows nothing of routes. Responses are validated where they
arrive; an invalid one never changes a route.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.errors import UnavailableError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.protocol.authorization import Authorizer, FixedToken, authority_for
from gazette_sdk.protocol.names import is_tls
from gazette_sdk.protocol.rules import RPCS_BY_NAME, Rpc
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.router import (
    DEFAULT_SIZE,
    DEFAULT_TTL_S,
    BrokerRoute,
    RouteCache,
    Router,
)
from gazette_sdk.transport.wire import (
    ANYWHERE,
    CONNECT_TIMEOUT_S,
    MAX_RECEIVE_BYTES,
    RECONNECT_BACKOFF_MAX_S,
    AppendItem,
    Destination,
    ReadItem,
    ReplicateItem,
    Target,
    Tls,
    Wire,
    WireChoice,
    WireOptions,
)

CHUNK_BYTES_KEY = "gazette-chunk-bytes"
"""Metadata that tells our own brokers what content per message this client takes. Brokers that
don't know it send at most 32 KiB, as they always do."""

ROLLBACK_TIMEOUT_S = 10.0
"""Bound of the wait for the broker's answer that an append was rolled back."""

_LIST = RPCS_BY_NAME["List"]
_APPLY = RPCS_BY_NAME["Apply"]
_READ = RPCS_BY_NAME["Read"]
_REPLICATE = RPCS_BY_NAME["Replicate"]
_LIST_FRAGMENTS = RPCS_BY_NAME["ListFragments"]
_HEALTH = RPCS_BY_NAME["FragmentStoreHealth"]


class RoutedTransport(Transport):
    """Journals over connections to brokers. Subclasses choose the wire.

    Args:
        address: endpoint URL of the service: ``http://host:port``, ``https://host:port`` or
            ``unix:///path``.
        zone: the client's own zone; reads prefer brokers in it.
        cache_size: journals whose routes are remembered; 0 lets brokers proxy every call.
        cache_ttl_s: age in seconds from which a remembered route is not used any more.
        tls: certificates, for ``https``.
        auth_keys: base64 keys of the cluster; the first signs a token for each call.
        auth_token: a ready-made bearer token; used only where no keys are given.
        authorizer: signs the tokens, instead of ``auth_keys`` and ``auth_token``.
        allow_plaintext_tokens: send tokens also to brokers without TLS that a route names, where
            the service address is ``https``. By default such a call raises
            :class:`~gazette_sdk.errors.ConfigurationError`, unless the broker is on loopback.
        max_receive_bytes: greatest message to accept.
        reconnect_backoff_max_s: longest wait between two dials of a lost connection; brokers
            among themselves use 0.5.
        connect_timeout_s: time that a call waits for a broker to be reachable.
        read_chunk_bytes: content per message or frame to ask of brokers that can choose; None
            for what suits the wire.
        call_timeout_s: time limit of an append, or a call of one request and one response; 0
            for none. The broker has it, too.

    Attributes:
        address: endpoint URL of the service.
        routes: remembered routes.
        router: chooses the broker of each call.
        wire: carries its calls.

    Raises:
        ValidationError: the address is not an endpoint URL.
        ConfigurationError: the keys are malformed.
    """

    def __init__(
        self,
        address: str,
        *,
        zone: str = "",
        cache_size: int = DEFAULT_SIZE,
        cache_ttl_s: float = DEFAULT_TTL_S,
        tls: Tls | None = None,
        auth_keys: str = "",
        auth_token: str = "",
        authorizer: Authorizer | None = None,
        allow_plaintext_tokens: bool = False,
        max_receive_bytes: int = MAX_RECEIVE_BYTES,
        reconnect_backoff_max_s: float = RECONNECT_BACKOFF_MAX_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_chunk_bytes: int | None = None,
        call_timeout_s: float = 0.0,
    ) -> None:
        self.address = address
        self.knows_routes = cache_size > 0
        self.wire = self._make_wire(
            WireOptions(
                address=address,
                tls=tls or Tls(),
                max_receive_bytes=max_receive_bytes,
                reconnect_backoff_max_s=reconnect_backoff_max_s,
                connect_timeout_s=connect_timeout_s,
                read_chunk_bytes=read_chunk_bytes,
                call_timeout_s=call_timeout_s,
            )
        )
        if authorizer is None and auth_keys.strip():
            authorizer = authority_for(auth_keys)
        elif authorizer is None and auth_token:
            authorizer = FixedToken(auth_token)
        self.routes = RouteCache(cache_size, cache_ttl_s)
        self.router = Router(
            address,
            self.wire,
            self.routes,
            zone=zone,
            authorizer=authorizer,
            requires_tls=is_tls(address) and not allow_plaintext_tokens,
        )

    @staticmethod
    @abc.abstractmethod
    def _make_wire(options: WireOptions) -> WireChoice:
        """Make the wire. Opens no connection yet.

        Raises:
            ValidationError: the address is not an endpoint URL.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    # ------------------------------------------------------------------ calls

    async def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse, None]:
        """See :meth:`Transport.list`. Routes of a listing that ends are remembered."""
        rpc.validate(request)
        to = self.router.destination(_LIST, None, ANYWHERE, request)
        async with self._wire_of(to, ANYWHERE, is_lasting=True) as wire:
            starts_snapshot = True
            async with aclosing(wire.list(to, request)) as responses:
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
        to = self.router.destination(_READ, request.journal, target, request)
        async with self._wire_of(to, target, is_lasting=True) as wire:
            expected = -1
            async with aclosing(wire.read(to, request)) as items:
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
        """See :meth:`Transport.append`. No call is opened before there is a first request."""
        opening = await anext(requests, None)
        if not isinstance(opening, pb.AppendRequest):
            raise ValidationError("an append begins with the request that names its journal")
        append = self.router.prepare_append(opening, target)
        async with self._wire_of(append.to, target) as wire:
            response = await wire.append(append, requests)
        self.router.accept(append, response)
        return response

    def append_route(self, journal: str, wake: Callable[[], None]) -> BrokerRoute:
        """See :meth:`Transport.append_route`."""
        return BrokerRoute(self.router, journal, wake)

    async def replicate(
        self, requests: AsyncIterator[ReplicateItem], target: Target
    ) -> AsyncGenerator[pb.ReplicateResponse, None]:
        """See :meth:`Transport.replicate`. No call is opened before there is a first request."""
        opening = await anext(requests, None)
        if opening is None:
            return
        if isinstance(opening, bytes):
            raise ValidationError("a replication begins with a proposal")
        to = self.router.destination(_REPLICATE, opening.proposal.journal, target, opening)
        async with (
            self._wire_of(to, target, is_lasting=True) as wire,
            aclosing(wire.replicate(to, opening, requests)) as responses,
        ):
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

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`."""
        await self.wire.aclose()

    # ------------------------------------------------------------- their parts

    async def _unary(self, call: Rpc, journal: str | None, target: Target, request: Message) -> Any:
        rpc.validate(request)
        to = self.router.destination(call, journal, target, request)
        async with self._wire_of(to, target) as wire:
            response = await wire.unary(to, request)
        rpc.validate(response)
        return response

    @asynccontextmanager
    async def _wire_of(
        self, to: Destination, target: Target, *, is_lasting: bool = False
    ) -> AsyncIterator[Wire]:
        """Choose the wire of a call; forget the route if the call ends as unavailable."""
        try:
            yield await self.wire.choose(to.peer, is_lasting=is_lasting)
        except UnavailableError as error:
            raise self.router.unavailable(to, error, target) from error
