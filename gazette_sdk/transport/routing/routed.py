"""Transport to brokers over any wire: broker of each call, token, checks, remembered routes.

A :class:`RoutedTransport` is the whole journal service over a :class:`Wire`, which carries one
call to one broker and knows nothing of routes. Requests go to the broker that a journal's route
names, where it is known (client section 7), with a token signed for just that call where keys
are configured (protocol section 12). Responses are validated where they arrive; an invalid one
never changes a route.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.errors import ConfigurationError, UnavailableError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rpc
from gazette_sdk.protocol.authorization import Authorizer, FixedToken, authority_for, claims_for
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.service import RPCS_BY_NAME, Rpc
from gazette_sdk.protocol.urls import is_local, is_tls
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.routing.append_route import BrokerRoute
from gazette_sdk.transport.routing.dispatcher import candidates, choose, where
from gazette_sdk.transport.routing.route_cache import RouteCache
from gazette_sdk.transport.target import (
    ANYWHERE,
    SERVICE,
    AppendItem,
    Destination,
    Peer,
    ReadItem,
    Target,
)
from gazette_sdk.transport.wires.base import PreparedAppend, Wire

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
"""Bound of the wait for a broker to be reachable: enough for one that is just starting."""

RECONNECT_BACKOFF_MAX_S = 5.0
"""Longest wait between two dials of a lost connection."""

ROLLBACK_TIMEOUT_S = 10.0
"""Bound of the wait for the broker's answer that an append was rolled back."""

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
        allow_plaintext_tokens: send tokens to brokers of an ``https`` service without TLS, too.

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
        allow_plaintext_tokens: bool,
    ) -> None:
        self.address = address
        self._requires_tls = is_tls(address) and not allow_plaintext_tokens
        self.routes = RouteCache(cache_size, cache_ttl_s)
        self.knows_routes = cache_size > 0
        self.wire = wire
        self._zone = zone
        self._authorizer: Authorizer | None = None
        if auth_keys.strip():
            self._authorizer = authority_for(auth_keys)
        elif auth_token:
            self._authorizer = FixedToken(auth_token)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    # ------------------------------------------------------------------ calls

    async def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse, None]:
        """See :meth:`Transport.list`. Routes of a listing that ends are remembered."""
        rpc.validate(request)
        with self._call(_LIST, None, ANYWHERE, request) as to:
            starts_snapshot = True
            async with aclosing(self.wire.list(to, request)) as responses:
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
        with self._call(_READ, request.journal, target, request) as to:
            expected = -1
            async with aclosing(self.wire.read(to, request)) as items:
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
        append = self.prepare_append(opening, target)
        try:
            response = await self.wire.append(append, requests)
        except UnavailableError as error:
            raise self.unavailable(append, error, target) from error
        self.accept(append, response)
        return response

    def append_route(self, journal: str, wake: Callable[[], None]) -> BrokerRoute:
        """See :meth:`Transport.append_route`."""
        return BrokerRoute(self, journal, wake)

    async def replicate(
        self, requests: AsyncIterator[pb.ReplicateRequest], target: Target
    ) -> AsyncGenerator[pb.ReplicateResponse, None]:
        """See :meth:`Transport.replicate`. No call is opened before there is a first request."""
        opening = await anext(requests, None)
        if opening is None:
            return
        journal = opening.proposal.journal
        with self._call(_REPLICATE, journal, target, opening) as to:
            async with aclosing(self.wire.replicate(to, opening, requests)) as responses:
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

    # ------------------------------------------------------- of append routes

    def prepare_append(
        self, request: pb.AppendRequest, target: Target = ANYWHERE
    ) -> PreparedAppend:
        """Choose the broker of an append, and encode its opening request. Any thread may call.

        What is the same for every plain append of a journal is kept with its route. Metadata of
        the journal's name is stripped, unless the caller names an exact broker: other
        implementations' brokers cannot proxy an append with metadata.

        Raises:
            ValidationError: the request is malformed.
            UnavailableError: the target's member has no endpoint.
        """
        journal = request.journal
        cached = self.routes.get(journal) if target is ANYWHERE else None
        if cached is not None and cached.append is not None and cached.append.request == request:
            append = cached.append
            if self._authorizer is None:
                return append
            return append._replace(
                to=append.to._replace(authorization=self._authorization(request))
            )
        is_plain = request == pb.AppendRequest(journal=journal)
        if target.member is None and strip_meta(journal) != journal:
            stripped = pb.AppendRequest()
            stripped.CopyFrom(request)
            stripped.journal = strip_meta(journal)
            request = stripped
        rpc.validate(request)
        to = self._destination(_APPEND, journal, target, request, needs_primary=True)
        append = PreparedAppend(to, request, request.SerializeToString())
        if cached is not None and is_plain and to.peer != SERVICE and request.journal == journal:
            kept = pb.AppendRequest(journal=journal)
            cached.append = PreparedAppend(to._replace(authorization=None), kept, append.encoded)
        return append

    def accept(self, append: PreparedAppend, response: pb.AppendResponse) -> None:
        """Check the response of an append, and learn its route. Any thread may call.

        Raises:
            ValidationError: the response is malformed.
        """
        journal = append.to.journal
        assert journal is not None
        cached = self.routes.get(journal)
        if cached is not None and cached.confirms(response):
            return
        rpc.validate(response)
        self.routes.update(journal, response.header.route)
        cached = self.routes.get(journal)
        if cached is not None and response.status == pb.OK:
            cached.accepted = response

    def unavailable(
        self, append: PreparedAppend, error: UnavailableError, target: Target = ANYWHERE
    ) -> UnavailableError:
        """Forget the route to a broker that is unavailable; return the error to raise."""
        return self._forget(append.to.journal, append.to.peer, target, error)

    # ------------------------------------------------------------- their parts

    async def _unary(self, call: Rpc, journal: str | None, target: Target, request: Message) -> Any:
        rpc.validate(request)
        with self._call(call, journal, target, request) as to:
            response = await self.wire.unary(to, request)
            rpc.validate(response)
        return response

    @contextmanager
    def _call(
        self, call: Rpc, journal: str | None, target: Target, opening: Message
    ) -> Iterator[Destination]:
        """Choose the broker of a call; forget the route if it ends as unavailable."""
        to = self._destination(call, journal, target, opening)
        try:
            yield to
        except UnavailableError as error:
            raise self._forget(journal, to.peer, target, error) from error

    def _destination(
        self,
        call: Rpc,
        journal: str | None,
        target: Target,
        opening: Message,
        *,
        needs_primary: bool = False,
    ) -> Destination:
        """Choose the broker of a call, and sign its token.

        Raises:
            UnavailableError: the target's member has no endpoint.
            ConfigurationError: the broker has no TLS, while the service has.
        """
        if journal is not None and target.route is None and target.member is None:
            target = Target(self.routes.route(journal))
        try:
            peers = candidates(target, needs_primary=needs_primary)
        except UnavailableError as error:
            raise self._forget(journal, SERVICE, target, error) from error
        peer = choose(peers, self._zone, self.wire.health)
        authorization = self._authorization(opening)
        if authorization is not None and self._requires_tls and peer != SERVICE:
            self._check_secrecy(journal, peer)
        return Destination(call, journal, peer, where(peer, self.address), authorization)

    def _check_secrecy(self, journal: str | None, peer: Peer) -> None:
        """Refuse to send a token without TLS to a broker that a route names.

        Raises:
            ConfigurationError: it would be readable on the network.
        """
        if is_tls(peer.endpoint) or is_local(peer.endpoint):
            return
        if journal is not None:
            self.routes.invalidate(journal)
        raise ConfigurationError(
            f"the token is not sent to {where(peer, self.address)}: it has no TLS, while the "
            f"service {self.address} has; serve TLS on that broker, or connect with "
            "allow_plaintext_tokens=True"
        )

    def _authorization(self, opening: Message) -> str | None:
        """Return a token that is good for just this call; None where none is needed."""
        if self._authorizer is None:
            return None
        wanted = claims_for(opening)
        return self._authorizer.header(
            wanted.capability, wanted.selector, wanted.ttl_s, time.time()
        )

    def _forget(
        self, journal: str | None, peer: Peer, target: Target, error: UnavailableError
    ) -> UnavailableError:
        """Forget the route to a broker that is unavailable; return the error to raise."""
        if journal is not None:
            self.routes.invalidate(journal)
        if peer != SERVICE or target.member is not None:
            return error
        return UnavailableError(
            f"{error}; check that a broker runs at {self.address}, or set GAZETTE_ADDRESS to the "
            "address of one",
            journal=journal,
        )
