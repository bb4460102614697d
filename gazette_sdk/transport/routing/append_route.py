"""Route of a journal's appends over the wire of its broker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.route import AppendRoute
from gazette_sdk.transport.target import SERVICE
from gazette_sdk.transport.wires.base import (
    Answered,
    AppendPipeline,
    BlockingCall,
    PreparedAppend,
    Wire,
)

__all__ = ["BrokerRoute"]


class Router(Protocol):
    """Transport that knows routes of journals.

    Attributes:
        wire: carries its calls.
    """

    wire: Wire

    def prepare_append(self, request: pb.AppendRequest) -> PreparedAppend:
        """Choose the broker of an append, and encode its opening request."""

    def accept(self, append: PreparedAppend, response: pb.AppendResponse) -> None:
        """Check a response, and learn its route."""

    def unavailable(self, append: PreparedAppend, error: UnavailableError) -> UnavailableError:
        """Forget the route to a broker that is unavailable; return the error to raise."""


class BrokerRoute(AppendRoute):
    """Route of one journal's appends to whichever broker is its primary.

    Args:
        router: the transport.
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
        if not pipeline.can_begin:
            pipeline.when_ready(self._wake)
            return False
        self._is_fresh = False
        pipeline.begin(append, content, partial(self._answered, append, answered))
        return True

    async def open(self, request: pb.AppendRequest) -> None:
        """See :class:`AppendRoute`."""
        append = self._router.prepare_append(request)
        try:
            self._pipeline = await self._router.wire.open_pipeline(append.to)
        except UnavailableError as error:
            raise self._router.unavailable(append, error) from error
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
            outcome = self._router.unavailable(append, outcome)
        answered(outcome)

    # ----------------------------------------------------------- inline appends

    def send_inline(self, content: bytes) -> BlockingCall | None:
        """See :class:`AppendRoute`."""
        append = self._inline = self._router.prepare_append(self._plain)
        if append.to.peer == SERVICE:
            return None  # the primary is not known yet
        return self._router.wire.send_inline(append, content)

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
            self._router.unavailable(self._inline, error)
