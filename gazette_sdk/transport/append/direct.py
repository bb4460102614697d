"""Appends from plain code that do without the event loop, where a transport can.

An optional capability: :meth:`Transport.direct` gives it for a journal whose primary is known
and spoken to over a wire that has blocking connections. Whoever uses it still owns the decision
what a failure means, and goes back to the event loop for every one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rpc
from gazette_sdk.transport import metrics
from gazette_sdk.transport.routing.route_cache import RouteCache
from gazette_sdk.transport.target import Destination
from gazette_sdk.transport.wires.base import BlockingCall, PreparedAppend, Wire

__all__ = ["DirectCall", "DirectJournal", "DirectRoute", "DirectRoutes"]


DirectCall = BlockingCall


class DirectJournal(Protocol):
    """Appends to one journal. Any thread may make them, and several at once."""

    def append(self, content: bytes) -> DirectCall | None:
        """Send an append, without waiting. If this raises, nothing of it was sent.

        Args:
            content: not empty, and of one frame.

        Returns:
            The append; ``None`` where there is no connection for it at hand.

        Raises:
            CallError: it could not be sent.
            ClosedError: the transport is closed.
        """

    def prepare(self) -> None:
        """Open a connection for a later append. Blocks, for a bounded time.

        Raises:
            UnavailableError: the broker cannot be reached that way.
            ConfigurationError: a certificate cannot be used.
            ClosedError: the transport is closed.
        """

    def failed(self, error: Exception) -> None:
        """Learn of an append's failure. Only on the transport's event loop."""

    def check(self, response: pb.AppendResponse) -> bool:
        """Whether an append's response tells another route, to :meth:`learn`. Any thread asks.

        Raises:
            ValidationError: the response breaks a rule of the protocol.
        """

    def learn(self, response: pb.AppendResponse) -> None:
        """Take the route of a response. Only on the transport's event loop."""


class DirectRoute:
    """Appends to a journal whose primary is known. See :class:`DirectJournal`.

    Args:
        routes: where its route is remembered.
        route: as it stands there.
        to: the primary.
        wire: makes the calls.
        authorization: signs a token for each call; None where none is needed.

    Attributes:
        route: the journal's route.
        to: the primary.
    """

    __slots__ = (
        "_authorization",
        "_count",
        "_good",
        "_journal",
        "_opening",
        "_request",
        "_routes",
        "_wire",
        "route",
        "to",
    )

    def __init__(
        self,
        routes: RouteCache,
        route: pb.Route,
        to: Destination,
        wire: Wire,
        authorization: Callable[[], str | None] | None,
    ) -> None:
        assert to.journal is not None
        self.route = route
        self.to = to
        self._wire = wire
        self._routes = routes
        self._journal = to.journal
        self._authorization = authorization
        self._request = pb.AppendRequest(journal=to.journal)
        self._opening = self._request.SerializeToString()
        self._good: _Good | None = None
        self._count = metrics.APPEND_BYTES.labels(to.journal).inc

    def append(self, content: bytes) -> DirectCall | None:
        """See :class:`DirectJournal`."""
        to = self.to
        if self._authorization is not None:
            to = to._replace(authorization=self._authorization())
        call = self._wire.send_inline(PreparedAppend(to, self._request, self._opening), content)
        if call is not None:
            self._count(len(content))
        return call

    def prepare(self) -> None:
        """See :class:`DirectJournal`."""
        self._wire.prepare_inline(self.to)

    def failed(self, error: Exception) -> None:
        """See :class:`DirectJournal`."""
        if isinstance(error, UnavailableError):
            self._routes.invalidate(self._journal)

    def check(self, response: pb.AppendResponse) -> bool:
        """See :class:`DirectJournal`."""
        if self._good is not None and self._good.is_like(response):
            return False
        rpc.validate(response)
        if response.header.route != self.route:
            return True
        self._good = _Good(response) if response.status == pb.OK else None
        return False

    def learn(self, response: pb.AppendResponse) -> None:
        """See :class:`DirectJournal`."""
        self._routes.update(self._journal, response.header.route)


class _Good:
    """What is checked of a response, as it was in one of status OK that was valid."""

    __slots__ = ("_codec", "_header", "_journal", "_postfix", "_registers")

    def __init__(self, response: pb.AppendResponse) -> None:
        commit = response.commit
        self._header = response.header
        self._registers = response.registers
        self._journal = commit.journal
        self._codec = commit.compression_codec
        self._postfix = commit.path_postfix

    def is_like(self, response: pb.AppendResponse) -> bool:
        """Whether all that is checked is the same in another."""
        commit = response.commit
        return (
            commit.begin <= commit.end
            and response.status == pb.OK
            and response.header == self._header
            and commit.journal == self._journal
            and commit.compression_codec == self._codec
            and commit.path_postfix == self._postfix
            and response.HasField("registers")
            and response.registers == self._registers
        )


class DirectRoutes:
    """The direct ways to journals, as far as there are any. Any thread may ask.

    Args:
        routes: where routes are remembered.
        primary_of: the primary of a journal's route, if that tells one. Without a token.
        wire: makes the appends.
        sign: makes the token of an append; None where none is needed.
    """

    def __init__(
        self,
        routes: RouteCache,
        primary_of: Callable[[str, pb.Route], Destination | None],
        wire: Wire,
        sign: Callable[[pb.AppendRequest], str | None] | None,
    ) -> None:
        self._routes = routes
        self._primary_of = primary_of
        self._wire = wire
        self._sign = sign
        self._known: dict[str, DirectRoute] = {}

    def of(self, journal: str) -> DirectRoute | None:
        """See :meth:`Transport.direct`."""
        route = self._routes.peek(journal)
        if route is None:
            return None
        known = self._known.get(journal)
        if known is not None and known.route is route:
            return known if self._wire.can_inline(known.to.peer) else None
        to = self._primary_of(journal, route)
        wire = self._wire
        if to is None or not wire.can_inline(to.peer):
            return None
        if len(self._known) > 2 * self._routes.size:
            self._known.clear()
        sign = None
        if self._sign is not None:
            sign = partial(self._sign, pb.AppendRequest(journal=journal))
        found = self._known[journal] = DirectRoute(self._routes, route, to, wire, sign)
        return found
