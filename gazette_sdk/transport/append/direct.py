"""Appends from plain code that do without the event loop, where a transport can.

An optional capability: :meth:`Transport.direct` gives it for a journal whose primary is known
and spoken to over a wire that has blocking connections. Whoever uses it still owns the decision
what a failure means, and goes back to the event loop for every one.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from typing import Protocol

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rpc
from gazette_sdk.transport import metrics
from gazette_sdk.transport.routing.route_cache import RouteCache
from gazette_sdk.transport.target import Destination, Peer

__all__ = ["DirectCall", "DirectJournal", "DirectRoute", "DirectRoutes", "DirectWire"]


class DirectCall(abc.ABC):
    """An append that was sent. It belongs to one caller at a time."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def over(self) -> bool:
        """Whether it has ended, well or badly."""

    @abc.abstractmethod
    def wait(self, timeout_s: float | None) -> bool:
        """Block until it has ended; whether it has. An interruption ends it.

        Args:
            timeout_s: seconds; None for any time.
        """

    @abc.abstractmethod
    async def finish(self) -> None:
        """Go on waiting on an event loop. Cancelling ends it."""

    @abc.abstractmethod
    def response(self) -> pb.AppendResponse:
        """The response of an append that has ended, of whatever status.

        Raises:
            CallError: it ended without a response; it may have committed.
        """

    @abc.abstractmethod
    def interrupt(self) -> None:
        """End it soon, from any thread: whoever waits sees it fail."""

    @abc.abstractmethod
    def give_up(self, reason: str) -> None:
        """End it now, if it has not. It may commit nevertheless."""


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


class DirectWire(Protocol):
    """Makes appends to brokers that were chosen already."""

    def append(self, to: Destination, opening: bytes, content: bytes) -> DirectCall | None:
        """See :meth:`DirectJournal.append`; ``opening`` is the encoded request."""

    def prepare(self, to: Destination) -> None:
        """See :meth:`DirectJournal.prepare`."""


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
        wire: DirectWire,
        authorization: Callable[[], str | None] | None,
    ) -> None:
        assert to.journal is not None
        self.route = route
        self.to = to
        self._wire = wire
        self._routes = routes
        self._journal = to.journal
        self._authorization = authorization
        self._opening = pb.AppendRequest(journal=to.journal).SerializeToString()
        self._good: _Good | None = None
        self._count = metrics.APPEND_BYTES.labels(to.journal).inc

    def append(self, content: bytes) -> DirectCall | None:
        """See :class:`DirectJournal`."""
        to = self.to
        if self._authorization is not None:
            to = to._replace(authorization=self._authorization())
        call = self._wire.append(to, self._opening, content)
        if call is not None:
            self._count(len(content))
        return call

    def prepare(self) -> None:
        """See :class:`DirectJournal`."""
        self._wire.prepare(self.to)

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
        direct_to: what makes appends to a peer from plain code, if it is known to work.
        sign: makes the token of an append; None where none is needed.
    """

    def __init__(
        self,
        routes: RouteCache,
        primary_of: Callable[[str, pb.Route], Destination | None],
        direct_to: Callable[[Peer], DirectWire | None],
        sign: Callable[[pb.AppendRequest], str | None] | None,
    ) -> None:
        self._routes = routes
        self._primary_of = primary_of
        self._direct_to = direct_to
        self._sign = sign
        self._known: dict[str, DirectRoute] = {}

    def of(self, journal: str) -> DirectRoute | None:
        """See :meth:`Transport.direct`."""
        route = self._routes.peek(journal)
        if route is None:
            return None
        known = self._known.get(journal)
        if known is not None and known.route is route:
            return None if self._direct_to(known.to.peer) is None else known
        to = self._primary_of(journal, route)
        wire = None if to is None else self._direct_to(to.peer)
        if to is None or wire is None:
            return None
        if len(self._known) > 2 * self._routes.size:
            self._known.clear()
        sign = None
        if self._sign is not None:
            sign = partial(self._sign, pb.AppendRequest(journal=journal))
        found = self._known[journal] = DirectRoute(self._routes, route, to, wire, sign)
        return found
