"""Appends of content that is all there, and lanes: what can be known of them before they are made.

Most appends of a journal have the same opening request. It is validated, encoded and given its
broker once, for as long as the journal has the same route.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import NamedTuple

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rpc
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.transport.append.lane import Answered, AppendLane, Content
from gazette_sdk.transport.routing.route_cache import RouteCache
from gazette_sdk.transport.target import ANYWHERE, SERVICE, Destination, Target
from gazette_sdk.transport.wires.base import AppendPipeline, PreparedAppend, Wire

__all__ = ["AppendCalls", "RoutedLane", "Way", "no_broker"]


class Way(NamedTuple):
    """What is known of an append before it is made.

    Attributes:
        journal: its name as requested, metadata included.
        route: the journal's route as it is remembered.
        to: the broker.
        request: the opening request, as it is sent.
        encoded: the same.
    """

    journal: str
    route: pb.Route | None
    to: Destination
    request: pb.AppendRequest
    encoded: bytes


class AppendCalls:
    """Makes the appends of a transport.

    Args:
        address: endpoint URL of the service.
        routes: where routes are remembered.
        wire: carries the calls.
        choose: the broker of a call of a journal, and a token for it.
        lasting: whether a choice holds while the route does, as no call needs a token of its own.
    """

    def __init__(
        self,
        address: str,
        routes: RouteCache,
        wire: Wire,
        choose: Callable[[str, Target, pb.AppendRequest], Destination],
        *,
        lasting: bool,
    ) -> None:
        self.wire = wire
        self._address = address
        self._routes = routes
        self._choose = choose
        self._lasting = lasting
        self._ways: dict[bytes, Way] = {}

    async def whole(
        self, opening: pb.AppendRequest, pieces: Sequence[bytes], target: Target
    ) -> pb.AppendResponse:
        """See :meth:`Transport.append_whole`."""
        way = self.way(opening, target)
        try:
            response = await self._append(PreparedAppend(way.to, way.request, way.encoded), pieces)
        except UnavailableError as error:
            told = self.unavailable(way, error, target)
            if told is error:
                raise
            raise told from error
        self.took(way, response)
        return response

    async def _append(self, append: PreparedAppend, pieces: Sequence[bytes]) -> pb.AppendResponse:
        pipeline = self.wire.try_pipeline(append.to) or await self.wire.open_pipeline(append.to)
        answer = asyncio.get_running_loop().create_future()

        def answered(result: pb.AppendResponse | Exception) -> None:
            if not answer.done():
                answer.set_result(result)

        pipeline.begin(append, [piece for piece in pieces if piece], answered)
        try:
            result = await answer
        except BaseException:
            pipeline.give_up()
            raise
        if isinstance(result, Exception):
            raise result
        response: pb.AppendResponse = result
        return response

    def way(self, opening: pb.AppendRequest, target: Target = ANYWHERE) -> Way:
        """Where an append goes, and what is sent.

        Raises:
            ValidationError: the request is malformed.
            UnavailableError: the target's member has no endpoint.
        """
        key = opening.SerializeToString()
        way = self._ways.get(key)
        if way is not None and target is ANYWHERE and self._routes.route(way.journal) is way.route:
            return way
        return self._found(opening, key, target)

    def _found(self, opening: pb.AppendRequest, key: bytes, target: Target) -> Way:
        """The same, from scratch."""
        journal = opening.journal
        request = opening
        if target.member is None and strip_meta(journal) != journal:
            request = pb.AppendRequest()
            request.CopyFrom(opening)
            request.journal = strip_meta(journal)
        rpc.validate(request)
        route = self._routes.route(journal)
        to = self._choose(journal, target, request)
        is_plain = opening == pb.AppendRequest(journal=journal)
        if not (is_plain and self._lasting and target is ANYWHERE and to.peer is not SERVICE):
            return Way(journal, None, to, request, request.SerializeToString())
        kept = pb.AppendRequest(journal=request.journal)
        way = Way(journal, route, to, kept, kept.SerializeToString())
        if len(self._ways) > 2 * self._routes.size:
            self._ways.clear()
        self._ways[key] = way
        return way

    def took(self, way: Way, response: pb.AppendResponse) -> None:
        """Learn of a response.

        Raises:
            ValidationError: it is malformed.
        """
        rpc.validate(response)
        self._routes.update(way.journal, response.header.route)

    def unavailable(
        self, way: Way, error: UnavailableError, target: Target = ANYWHERE
    ) -> UnavailableError:
        """Learn that a broker is unavailable; the error to raise."""
        self._routes.invalidate(way.journal)
        if way.to.peer == SERVICE and target.member is None:
            return no_broker(error, self._address, way.journal)
        return error


class RoutedLane(AppendLane):
    """A lane over whatever connection leads to the journal's broker.

    Args:
        calls: of the transport.
        opening: the request of each append.
    """

    def __init__(self, calls: AppendCalls, opening: pb.AppendRequest) -> None:
        self._calls = calls
        self._opening = opening
        self._line: AppendPipeline | None = None
        self._to: Destination | None = None
        self._is_spent = False
        self._left = asyncio.Event()

    async def begin(self, content: Content, answered: Answered) -> bool:
        """See :meth:`AppendLane.begin`."""
        calls, line = self._calls, self._line
        way = calls.way(self._opening)
        if isinstance(content, AsyncIterator):
            return False
        if line is None or not line.in_flight:
            try:
                line = self._line = calls.wire.try_pipeline(
                    way.to
                ) or await calls.wire.open_pipeline(way.to)
            except UnavailableError as error:
                told = calls.unavailable(way, error)
                if told is error:
                    raise
                raise told from error
            self._to, self._is_spent = way.to, False
        elif (
            self._is_spent or not line.can_begin or self._to is None or self._to.peer != way.to.peer
        ):
            return False  # it goes elsewhere, once those before it have arrived
        try:
            line.begin(
                PreparedAppend(way.to, way.request, way.encoded),
                content,
                partial(self._ended, way, answered),
            )
            if line.in_flight and not line.can_begin:
                self._left.clear()
                line.when_ready(self._left.set)
                await self._left.wait()
        except BaseException:
            self._is_spent = True  # nothing runs behind what was given up
            raise
        return True

    def _ended(self, way: Way, answered: Answered, result: pb.AppendResponse | Exception) -> None:
        """An append was answered, or failed."""
        self._left.set()
        if isinstance(result, pb.AppendResponse):
            try:
                self._calls.took(way, result)
            except Exception as error:  # noqa: BLE001 - it is the caller's to raise
                result = error
        elif isinstance(result, UnavailableError):
            told = self._calls.unavailable(way, result)
            if told is not result:
                told.__cause__ = result
                result = told
        answered(result)

    def give_up(self) -> None:
        """See :meth:`AppendLane.give_up`."""
        line, self._line = self._line, None
        if line is not None:
            line.give_up()


def no_broker(error: UnavailableError, address: str, journal: str | None) -> UnavailableError:
    """The error of a call to the service address, where nobody answers."""
    return UnavailableError(
        f"{error}; check that a broker runs at {address}, or set GAZETTE_ADDRESS to the address "
        "of one",
        journal=journal,
    )
