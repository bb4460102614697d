"""Routes of journals, as brokers sent them lately (client section 7).

Broker, token and route of each call; the route of a journal's appends.

Requests go to the broker that a journal's route names, where it is known (client section 7), with a
token signed for just that call where keys are configured (protocol section 12).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from google.protobuf.message import Message

from gazette_sdk.errors import ConfigurationError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.protocol.authorization import Authorizer, claims_for
from gazette_sdk.protocol.names import is_local, is_tls, strip_meta
from gazette_sdk.protocol.rules import RPCS_BY_NAME, Rpc
from gazette_sdk.transport.base import AppendRoute
from gazette_sdk.transport.wire import (
    ANYWHERE,
    SERVICE,
    Answered,
    AppendPipeline,
    BlockingCall,
    Destination,
    Peer,
    PreparedAppend,
    Target,
    WireChoice,
    candidates,
    choose,
    members_of,
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


class CachedRoute:
    """Remembered route of a journal.

    Attributes:
        route: the route. Never changed in place.
        append: plain append of the journal at its primary, once one was prepared: broker and
            encoded opening request, without a token.
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

    Attributes:
        wire: carries the calls.
        routes: remembered routes.
    """

    def __init__(
        self,
        address: str,
        wire: WireChoice,
        routes: RouteCache,
        *,
        zone: str,
        authorizer: Authorizer | None,
        requires_tls: bool,
    ) -> None:
        self.wire = wire
        self.routes = routes
        self._address = address
        self._zone = zone
        self._authorizer = authorizer
        self._requires_tls = requires_tls
        self._service_has_failed = False

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
        return Destination(call, journal, peer, where(peer, self._address), authorization)

    def _instead_of_service(self) -> Peer:
        """Return a broker that routes have named, once the service address has failed.

        Any broker proxies what it does not serve. One that fails is forgotten. When none is left,
        the service address is tried again.
        """
        known = self.routes.brokers if self._service_has_failed else ()
        if not known:
            self._service_has_failed = False
            return SERVICE
        return min(known, key=lambda each: each.zone != self._zone)

    def prepare_append(
        self, request: pb.AppendRequest, target: Target = ANYWHERE
    ) -> PreparedAppend:
        """Choose the broker of an append, and encode its opening request.

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
        to = self.destination(_APPEND, journal, target, request, needs_primary=True)
        append = PreparedAppend(to, request, request.SerializeToString())
        if (
            cached is not None
            and is_plain
            and to.peer in candidates(Target(cached.route), needs_primary=True)
            and to.peer != SERVICE
            and request.journal == journal
        ):
            kept = pb.AppendRequest(journal=journal)
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
        else:
            self.routes.forget_broker(to.peer)
        return self._forget(to.journal, to.peer, error, target)

    def _forget(
        self, journal: str | None, peer: Peer, error: UnavailableError, target: Target
    ) -> UnavailableError:
        if journal is not None:
            self.routes.invalidate(journal)
        if peer != SERVICE or target.member is not None:
            return error
        hint = " (`gazette dev` starts one)" if "//localhost:" in self._address else ""
        return UnavailableError(
            f"{error}; check that a broker runs at {self._address}{hint}, or set GAZETTE_ADDRESS "
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
        self, request: pb.AppendRequest, content: Sequence[bytes], answered: Answered
    ) -> bool:
        """See :class:`AppendRoute`."""
        router = self._router
        append = router.prepare_append(request)
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
            wire = await self._router.wire.choose(to.peer)
            self._pipeline = await wire.open_pipeline(to)
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

    def send_inline(self, content: bytes) -> BlockingCall | None:
        """See :class:`AppendRoute`."""
        router = self._router
        append = self._inline = router.prepare_append(self._plain)
        sender = router.wire.inline
        if sender is None or append.to.peer is SERVICE:
            return None  # the wire cannot do that, or the primary is not known yet
        return sender.append(append.to, append.encoded, content)

    def prepare_inline(self) -> None:
        """See :class:`AppendRoute`."""
        to = self._router.prepare_append(self._plain).to
        if to.peer != SERVICE:
            self._router.wire.prepare_inline(to)

    def accept(self, response: pb.AppendResponse) -> None:
        """See :class:`AppendRoute`."""
        assert self._inline is not None
        self._router.accept(self._inline, response)

    def failed(self, error: Exception) -> None:
        """See :class:`AppendRoute`."""
        if self._inline is not None and isinstance(error, UnavailableError):
            self._router.unavailable(self._inline.to, error)
