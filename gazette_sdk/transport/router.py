"""Broker, token and route of each call; the route of a journal's appends.

Requests go to the broker that a journal's route names, where it is known (client section 7), with a
token signed for just that call where keys are configured (protocol section 12).

A :class:`RoutedTransport` has a :class:`Router`, which chooses the broker of each call, and a wire,
which carries one call to one broker and knows nothing of routes. Responses are validated where they
arrive; an invalid one never changes a route.

The broker of a call is a pure choice (:func:`choose`) over routes and the health of connections.
The preference order is that of client section 7. Zone outranks health on purpose: with every member
of our own zone failed the call fails, and is tried again with a fresh route, rather than paying for
traffic across zones.
"""

from __future__ import annotations

import abc
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.errors import ConfigurationError, UnavailableError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.protocol.authorization import (
    Authorizer,
    FixedToken,
    authority_for,
    claims_for,
    may_be_limited,
)
from gazette_sdk.protocol.names import is_local, is_tls, strip_meta
from gazette_sdk.protocol.rules import RPCS_BY_NAME, Rpc
from gazette_sdk.tracing import caller
from gazette_sdk.transport.base import AppendRoute, Transport
from gazette_sdk.transport.wire import (
    ANYWHERE,
    CONNECT_TIMEOUT_S,
    MAX_RECEIVE_BYTES,
    RECONNECT_BACKOFF_MAX_S,
    SERVICE,
    Answered,
    AppendItem,
    AppendPipeline,
    BlockingCall,
    Destination,
    Health,
    Peer,
    PreparedAppend,
    ReadItem,
    ReplicateItem,
    Target,
    Tls,
    Wire,
    WireOptions,
    where,
)

DEFAULT_SIZE = 256
"""Journals whose routes a client remembers: some kilobytes each at the very most."""

DEFAULT_TTL_S = 3600.0
"""Routes change rarely, and a stale one is noticed by the first call that uses it."""

NO_ROUTE = pb.Route(primary=-1)
"""A miss: no members, no primary. Never changed in place."""


BROKERS_MAX = 64
"""Brokers that are remembered beside the routes: one that answers is enough."""

LAG_MAX_S = 10.0
"""Seconds for which a broker's mirror of Etcd may lag what another broker has answered. Bounded,
since an Etcd that was restored from a backup has lower revisions for good."""


class CachedRoute:
    """Remembered route of a journal.

    Attributes:
        route: the route. Never changed in place.
        append: last append that was prepared for the journal's primary: broker and encoded
            opening request, without a token.
        expires_at: monotonic seconds from which it is not used any more.
    """

    __slots__ = ("_accepted", "append", "expires_at", "route")

    def __init__(self, route: pb.Route, expires_at: float) -> None:
        self.route = route
        self.append: PreparedAppend | None = None
        self.expires_at = expires_at
        self._accepted: tuple[object, ...] | None = None

    def accept(self, response: pb.AppendResponse) -> None:
        """Remember the valid response of an append that was written."""
        self._accepted = _constant_parts(response)

    def confirms(self, response: pb.AppendResponse) -> bool:
        """Return True if a response differs from the last valid one in offsets and sum alone."""
        return (
            response.status == pb.OK
            and _constant_parts(response) == self._accepted
            and response.commit.begin <= response.commit.end
            and response.HasField("registers")
        )


def _constant_parts(response: pb.AppendResponse) -> tuple[object, ...]:
    """Return all of a response but the status, the offsets and the sum."""
    commit = response.commit
    return (
        response.header,
        commit.journal,
        commit.compression_codec,
        commit.path_postfix,
        response.registers,
    )


class RouteCache:
    """Least-recently-used map of bounded size from journal to route, with an age limit.

    Keys are journal names as requested, metadata included. Any thread may use it.

    Args:
        size: greatest number of entries; 0 never remembers, so that brokers proxy every call.
        ttl_s: age in seconds from which an entry is a miss.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        size: int = DEFAULT_SIZE,
        ttl_s: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = max(size, 0)
        self.ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.RLock()  # a signal handler may publish within
        self._entries: OrderedDict[str, CachedRoute] = OrderedDict()
        self._brokers: dict[Peer, None] = {}

    @property
    def brokers(self) -> Sequence[Peer]:
        """Brokers that routes have named, the latest last, also if the routes are forgotten."""
        with self._lock:
            return tuple(self._brokers)

    def forget_broker(self, peer: Peer) -> None:
        """Forget a broker until a route names it again."""
        with self._lock:
            self._brokers.pop(peer, None)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, journal: str) -> CachedRoute | None:
        """Return the remembered entry of a journal, if there is one."""
        entry = self._entries.get(journal)
        if entry is None:
            return None
        if self._clock() > entry.expires_at:
            self.invalidate(journal)
            return None
        try:
            self._entries.move_to_end(journal)
        except KeyError:
            return None  # another thread has just forgotten it
        return entry

    def route(self, journal: str) -> pb.Route:
        """Return the remembered route, or :data:`NO_ROUTE`."""
        entry = self.get(journal)
        return NO_ROUTE if entry is None else entry.route

    def update(self, journal: str, route: pb.Route) -> None:
        """Remember a route; one without members makes the cache forget instead."""
        if not route.members:
            self.invalidate(journal)
            return
        if self.size == 0:
            return
        expires_at = self._clock() + self.ttl_s
        entry = self._entries.get(journal)
        if entry is not None and entry.route == route:
            entry.expires_at = expires_at
            return
        kept = pb.Route()
        kept.CopyFrom(route)
        with self._lock:
            self._entries[journal] = CachedRoute(kept, expires_at)
            self._entries.move_to_end(journal)
            while len(self._entries) > self.size:
                self._entries.popitem(last=False)
            for peer in members_of(kept):
                self._brokers.pop(peer, None)
                self._brokers[peer] = None
            while len(self._brokers) > BROKERS_MAX:
                del self._brokers[next(iter(self._brokers))]

    def invalidate(self, journal: str) -> None:
        """Forget a journal's route."""
        with self._lock:
            self._entries.pop(journal, None)


class NewestRevision:
    """Newest revision of Etcd in answers of brokers. Any thread may use it.

    Each broker answers from its own mirror of Etcd. A journal that one broker has created, or
    listed, may not have reached another one yet: its answer that there is no such journal is older
    than what the client knows, and is one to retry.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest = (0, 0, 0.0)  # cluster, revision, time when it was first seen

    def compare(self, answer: Any) -> None:
        """Note the revision of a valid answer with a header.

        JOURNAL_NOT_FOUND of a mirror that lags becomes NO_JOURNAL_PRIMARY_BROKER: nothing was
        written or read, and it ends by itself.
        """
        etcd = answer.header.etcd
        cluster_id, revision, since_s = self._newest
        if etcd.revision > revision or etcd.cluster_id != cluster_id:
            self._newest = (etcd.cluster_id, etcd.revision, self._clock())
        elif (
            etcd.revision < revision
            and answer.status == pb.JOURNAL_NOT_FOUND
            and self._clock() < since_s + LAG_MAX_S
        ):
            answer.status = pb.NO_JOURNAL_PRIMARY_BROKER


def candidates(target: Target, *, needs_primary: bool) -> list[Peer]:
    """Return the peers that may serve a call, in route order; the service address if there is none.

    Members whose endpoint is empty are passed over: their key has vanished, or the other side
    never learned their address.

    Args:
        target: the route, and the exact member, that the caller names.
        needs_primary: only the route's primary will do.

    Raises:
        UnavailableError: an exact member is wanted whose endpoint the route does not have.
    """
    route = target.route
    peers = _members_of(route) if route is not None else []
    if target.member is not None:
        wanted = (target.member.zone, target.member.suffix)
        for peer in peers:
            if peer.endpoint and (peer.zone, peer.suffix) == wanted:
                return [peer]
        raise UnavailableError(
            f"no endpoint is known of broker {wanted[0]}/{wanted[1]}; it may have just left"
        )
    if needs_primary and route is not None:
        peers = [peers[route.primary]] if 0 <= route.primary < len(peers) else []
    return [peer for peer in peers if peer.endpoint] or [SERVICE]


def members_of(route: pb.Route) -> list[Peer]:
    """Return the members of a route whose endpoints it has."""
    return [peer for peer in _members_of(route) if peer.endpoint]


def _members_of(route: pb.Route) -> list[Peer]:
    if len(route.endpoints) != len(route.members):
        return []
    return [
        Peer(member.zone, member.suffix, endpoint)
        for member, endpoint in zip(route.members, route.endpoints, strict=True)
    ]


def choose(peers: Sequence[Peer], zone: str, health_of: Callable[[Peer], Health]) -> Peer:
    """Return the best of ``peers`` for a client in ``zone``; of equal ones the first."""
    if len(peers) == 1:
        return peers[0]

    def rank(peer: Peer) -> tuple[bool, Health]:
        return (peer.zone != zone, health_of(peer))

    return min(peers, key=rank)


_APPEND = RPCS_BY_NAME["Append"]


class Router:
    """Choice of the broker of each call, and of the token for it. Any thread may use it.

    Args:
        address: endpoint URL of the service.
        wire: carries the calls.
        routes: remembered routes.
        zone: the client's own zone; reads prefer brokers in it.
        authorizer: makes tokens; None for none.
        requires_tls: tokens are not sent without TLS, but to brokers on loopback.
        further_addresses: endpoint URLs to use where the first one is not reached.

    Attributes:
        wire: carries the calls.
        routes: remembered routes.
        newest: newest revision of Etcd in the answers.
    """

    def __init__(
        self,
        address: str,
        wire: Wire,
        routes: RouteCache,
        *,
        zone: str,
        authorizer: Authorizer | None,
        requires_tls: bool,
        further_addresses: Sequence[str] = (),
    ) -> None:
        self.wire = wire
        self.routes = routes
        self.newest = NewestRevision()
        self._address = address
        self._zone = zone
        self._authorizer = authorizer
        self._requires_tls = requires_tls
        self._service_has_failed = False
        self._further = [Peer("", "", each) for each in further_addresses]
        self._unreached: set[Peer] = set()  # of the further addresses, since the service failed

    def destination(
        self,
        call: Rpc,
        journal: str | None,
        target: Target,
        opening: Message,
        *,
        needs_primary: bool = False,
    ) -> Destination:
        """Choose the broker of a call, and sign its token.

        Args:
            call: which call.
            journal: the journal it is about.
            target: brokers to which it may go.
            opening: its first request.
            needs_primary: True if only the primary will do.

        Raises:
            UnavailableError: the target's member has no endpoint.
            ConfigurationError: the broker has no TLS, while the service has.
        """
        if journal is not None and target.route is None and target.member is None:
            target = Target(self.routes.route(journal))
        try:
            peers = candidates(target, needs_primary=needs_primary)
        except UnavailableError as error:
            raise self._forget(journal, SERVICE, error, target) from error
        peer = choose(peers, self._zone, self.wire.health)
        if peer == SERVICE:
            peer = self._instead_of_service()
        authorization = self._authorization(opening)
        if authorization is not None and self._requires_tls and peer != SERVICE:
            self._check_secrecy(journal, peer)
        return Destination(call, journal, peer, self._address, authorization)

    def _instead_of_service(self) -> Peer:
        """Return a broker that routes have named, once the service address has failed.

        Any broker proxies what it does not serve. One that fails is forgotten. When none is left,
        a further address is used, and at last the service address is tried again.
        """
        known = self.routes.brokers if self._service_has_failed else ()
        if known:
            return min(known, key=lambda each: each.zone != self._zone)
        return self._service_address() or SERVICE

    def _service_address(self) -> Peer | None:
        """Return the first address of the service that has not failed.

        ``None`` if all have: then each may be tried again.
        """
        if not self._service_has_failed:
            return SERVICE
        for peer in self._further:
            if peer not in self._unreached:
                return peer
        self._service_has_failed = False
        self._unreached.clear()
        return None

    def elsewhere(self, to: Destination) -> Destination | None:
        """Return the destination of a call that did not reach an address of the service.

        ``None`` if no other address is left, or the call goes to a broker that a route names.

        Raises:
            ConfigurationError: the other address has no TLS, while the first one has.
        """
        if not self._further or to.peer.suffix:
            return None
        peer = self._service_address()
        if peer is None:
            return None
        if to.authorization is not None and self._requires_tls and peer != SERVICE:
            self._check_secrecy(to.journal, peer)
        return to._replace(peer=peer)

    def prepare_append(
        self, request: pb.AppendRequest, target: Target = ANYWHERE
    ) -> PreparedAppend:
        """Choose the broker of an append, and encode its opening request.

        The last one of a journal is kept with its route, as most are alike: plain ones, and those
        of a recovery log's author. Metadata of the journal's name is stripped, unless the caller
        names an exact broker: other implementations' brokers cannot proxy an append with metadata.

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
        if cached is not None:
            target = Target(cached.route)
        if target.member is None and strip_meta(journal) != journal:
            stripped = pb.AppendRequest()
            stripped.CopyFrom(request)
            stripped.journal = strip_meta(journal)
            request = stripped
        rpc.validate(request)
        to = self.destination(_APPEND, journal, target, request, needs_primary=True)
        append = PreparedAppend(to, request, request.SerializeToString())
        if (
            cached is not None
            and to.peer != SERVICE
            and to.peer in candidates(target, needs_primary=True)  # not one in place of the service
            and request.journal == journal
        ):
            kept = pb.AppendRequest()
            kept.CopyFrom(request)
            cached.append = PreparedAppend(to._replace(authorization=None), kept, append.encoded)
        return append

    def accept(self, append: PreparedAppend, response: pb.AppendResponse) -> None:
        """Check the response of an append, and learn its route.

        Raises:
            ValidationError: the response is malformed.
        """
        journal = append.to.journal
        assert journal is not None
        cached = self.routes.get(journal)
        if cached is not None and cached.confirms(response):
            return
        rpc.validate(response)
        self.newest.compare(response)
        self.routes.update(journal, response.header.route)
        cached = self.routes.get(journal)
        if cached is not None and response.status == pb.OK:
            cached.accept(response)

    def unavailable(
        self, to: Destination, error: UnavailableError, target: Target = ANYWHERE
    ) -> UnavailableError:
        """Forget the route to a broker that is unavailable, and the broker; return the error."""
        self.wire.unavailable(to.peer)
        if to.peer == SERVICE:
            self._service_has_failed = True
        elif to.peer in self._further:
            self._unreached.add(to.peer)
        else:
            self.routes.forget_broker(to.peer)
        return self._forget(to.journal, to.peer, error, target)

    def _forget(
        self, journal: str | None, peer: Peer, error: UnavailableError, target: Target
    ) -> UnavailableError:
        if journal is not None:
            self.routes.invalidate(journal)
        is_refused = isinstance(error.__cause__, ssl.SSLCertVerificationError)
        if peer.suffix or target.member is not None or is_refused:
            return error
        hint = " (`gazette dev` starts one)" if "//localhost:" in self._address else ""
        named = " or ".join([self._address, *(each.endpoint for each in self._further)])
        return UnavailableError(
            f"{error}; check that a broker runs at {named}{hint}, or set GAZETTE_ADDRESS "
            "to the address of one",
            journal=journal,
        )

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
            f"the token is not sent to {where(peer, self._address)}: it has no TLS, while the "
            f"service {self._address} has; serve TLS on that broker, or connect with "
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


class BrokerRoute(AppendRoute):
    """Route of one journal's appends to whichever broker is its primary.

    Args:
        router: chooses the broker of each append.
        journal: name of the journal, without metadata.
        wake: called on the loop when :meth:`try_begin` may succeed that did not.
    """

    def __init__(self, router: Router, journal: str, wake: Callable[[], None]) -> None:
        self._router = router
        self._wake = wake
        self._plain = pb.AppendRequest(journal=journal)
        self._pipeline: AppendPipeline | None = None
        self._is_fresh = False  # the pipeline was opened, and nothing was begun on it
        self._inline: PreparedAppend | None = None

    def try_begin(
        self,
        request: pb.AppendRequest,
        content: Sequence[bytes],
        answered: Answered,
        traceparent: str = "",
    ) -> bool:
        """See :class:`AppendRoute`."""
        router = self._router
        append = router.prepare_append(request)
        if traceparent:
            append = append.carrying(traceparent)
        pipeline = self._pipeline
        if (
            pipeline is not None
            and self._is_fresh
            and (pipeline.peer != append.to.peer or not pipeline.can_begin)
        ):
            pipeline.close()  # the route has changed, or the connection was lost
            self._is_fresh = False
        if pipeline is None or not (self._is_fresh or pipeline.in_flight):
            pipeline = self._pipeline = router.wire.try_pipeline(append.to)
            if pipeline is None:
                return False
        elif pipeline.peer != append.to.peer:
            return False  # it goes to another broker, once those before it were answered
        elif not pipeline.can_begin:
            pipeline.when_ready(self._wake)
            return False
        self._is_fresh = False
        pipeline.begin(append, content, partial(self._answered, append, answered))
        return True

    async def open(self, request: pb.AppendRequest) -> None:
        """See :class:`AppendRoute`."""
        to = self._router.prepare_append(request).to
        try:
            await self._router.wire.reach(to.peer)
            self._pipeline = await self._router.wire.open_pipeline(to)
        except UnavailableError as error:
            raise self._router.unavailable(to, error) from error
        self._is_fresh = True

    def give_up(self) -> None:
        """See :class:`AppendRoute`."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            if self._is_fresh:
                pipeline.close()
            else:
                pipeline.give_up()
        self._is_fresh = False

    def _answered(
        self,
        append: PreparedAppend,
        answered: Answered,
        outcome: pb.AppendResponse | Exception,
    ) -> None:
        if isinstance(outcome, pb.AppendResponse):
            try:
                self._router.accept(append, outcome)
            except Exception as error:  # noqa: BLE001 - it is the outcome
                outcome = error
        elif isinstance(outcome, UnavailableError):
            outcome = self._router.unavailable(append.to, outcome)
        answered(outcome)

    # ----------------------------------------------------------- inline appends

    def send_inline(self, content: bytes, traceparent: str = "") -> BlockingCall | None:
        """See :class:`AppendRoute`."""
        router = self._router
        append = self._inline = router.prepare_append(self._plain)
        if traceparent:
            append = append.carrying(traceparent)
        if append.to.peer is SERVICE:
            return None  # the primary is not known yet
        return router.wire.append_blocking(append.to, append.encoded, content)

    def prepare_inline(self) -> None:
        """See :class:`AppendRoute`."""
        to = self._router.prepare_append(self._plain).to
        if to.peer != SERVICE:
            self._router.wire.prepare_blocking(to)

    def accept(self, response: pb.AppendResponse) -> None:
        """See :class:`AppendRoute`."""
        assert self._inline is not None
        self._router.accept(self._inline, response)

    def failed(self, error: Exception) -> None:
        """See :class:`AppendRoute`."""
        if self._inline is not None and isinstance(error, UnavailableError):
            self._router.unavailable(self._inline.to, error)


CHUNK_BYTES_KEY = "gazette-chunk-bytes"
"""Metadata that shows our own brokers what content per message this client takes. Brokers that
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
            ``unix:///path``. Or of several brokers, separated by commas: another one is used where
            the first is not reached.
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
        address: endpoint URL of the service, the first one.
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
        address, *further_addresses = address.split(",")
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
        self.may_hide_journals = may_be_limited(authorizer)
        self.routes = RouteCache(cache_size, cache_ttl_s)
        self.router = Router(
            address,
            self.wire,
            self.routes,
            zone=zone,
            authorizer=authorizer,
            requires_tls=is_tls(address) and not allow_plaintext_tokens,
            further_addresses=further_addresses,
        )

    @staticmethod
    @abc.abstractmethod
    def _make_wire(options: WireOptions) -> Wire:
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
        async with self._reached(to, ANYWHERE) as to:
            starts_snapshot = True
            async with aclosing(self.wire.stream(to, request)) as responses:
                async for response in responses:
                    if starts_snapshot:  # only its first message has status and header
                        rpc.validate(response)
                        self.router.newest.compare(response)
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
        async with self._reached(to, target) as to:
            expected = -1
            async with aclosing(self.wire.stream(to, request)) as items:
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
                        self.router.newest.compare(item)
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
        if parent := caller():
            append = append.carrying(parent)
        async with self._reached(append.to, target) as to:
            response = await self.wire.append(append._replace(to=to), requests)
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
            self._reached(to, target) as to,
            aclosing(self.wire.stream(to, opening, requests)) as responses,
        ):
            async for response in responses:
                yield response

    async def view(self, call: Rpc, request: Message) -> Any:
        """See :meth:`Transport.view`."""
        to = self.router.destination(call, None, ANYWHERE, request)
        async with self._reached(to, ANYWHERE) as to:
            return await self.wire.call(to, request)

    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        """See :meth:`Transport.list_fragments`."""
        response: pb.FragmentsResponse = await self._unary(
            _LIST_FRAGMENTS, request.journal, target, request
        )
        return response

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, target: Target = ANYWHERE
    ) -> pb.FragmentStoreHealthResponse:
        """See :meth:`Transport.fragment_store_health`."""
        response: pb.FragmentStoreHealthResponse = await self._unary(_HEALTH, None, target, request)
        return response

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`."""
        await self.wire.aclose()

    # ------------------------------------------------------------- their parts

    async def _unary(self, call: Rpc, journal: str | None, target: Target, request: Message) -> Any:
        rpc.validate(request)
        to = self.router.destination(call, journal, target, request)
        async with self._reached(to, target) as to:
            response = await self.wire.call(to, request)
        rpc.validate(response)
        self.router.newest.compare(response)
        return response

    @asynccontextmanager
    async def _reached(self, to: Destination, target: Target) -> AsyncIterator[Destination]:
        """Reach the broker of a call; forget the route if the call ends as unavailable.

        Yields:
            the broker: at a further address of the service if the first one is not reached.
        """
        is_reached = False
        while not is_reached:
            try:
                await self.wire.reach(to.peer)
                is_reached = True
            except UnavailableError as error:
                failure = self.router.unavailable(to, error, target)
                again = self.router.elsewhere(to)
                if again is None:
                    raise failure from error
                to = again
        try:
            yield to
        except UnavailableError as error:
            raise self.router.unavailable(to, error, target) from error
