"""Interface of a wire: calls to brokers that were chosen already. A wire has no routes.

A wire takes an append in one of three ways:

- :meth:`WireChoice.try_pipeline` and :meth:`Wire.open_pipeline`: appends whose content is at hand,
  several in flight, answered in order;
- :meth:`Wire.append`: content that is sent as it comes;
- :class:`InlineSender`: a small append from plain code, without an event loop. Not every wire has
  one.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message import Message

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.routing.dispatcher import Health
from gazette_sdk.transport.target import AppendItem, Destination, Peer, ReplicateItem
from gazette_sdk.transport.wires.grpc.codec import Chunk
from gazette_sdk.transport.wires.tls import Tls

__all__ = [
    "CONNECT_TIMEOUT_S",
    "MAX_RECEIVE_BYTES",
    "RECONNECT_BACKOFF_MAX_S",
    "Answered",
    "AppendPipeline",
    "BlockingCall",
    "InlineSender",
    "PreparedAppend",
    "Wire",
    "WireChoice",
    "WireOptions",
]

MAX_RECEIVE_BYTES = 16 << 20
"""Greatest message a client accepts (client section 1)."""

CONNECT_TIMEOUT_S = 10.0
"""Bound of the wait for a broker to be reachable: enough for one that is just starting."""

RECONNECT_BACKOFF_MAX_S = 5.0
"""Longest wait between two dials of a lost connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOptions:
    """Options of the connections of a transport.

    See :class:`~gazette_sdk.transport.routing.routed.RoutedTransport`.
    """

    address: str
    tls: Tls
    max_receive_bytes: int
    reconnect_backoff_max_s: float
    connect_timeout_s: float
    read_chunk_bytes: int | None
    call_timeout_s: float


Answered: TypeAlias = Callable[[pb.AppendResponse | Exception], None]
"""Takes the response of an append, of any status, or the error with which it ended. A callback of
the event loop."""


class PreparedAppend(NamedTuple):
    """Append whose broker, token and encoded opening request are known.

    Attributes:
        to: the broker, and the token.
        request: the opening request, valid, as it is sent.
        encoded: the same, encoded.
    """

    to: Destination
    request: pb.AppendRequest
    encoded: bytes


class AppendPipeline(abc.ABC):
    """Appends to one broker over one connection, answered in order.

    An append is written only if the one that was begun before it, and was in flight, was written.
    When none is in flight any more, the connection goes back to its pool and the pipeline is over.
    All methods belong to the event loop on which the pipeline was opened.

    Whoever opens a pipeline begins an append before it suspends, or calls :meth:`close`.

    Attributes:
        peer: the broker.
    """

    __slots__ = ()

    peer: Peer

    @property
    @abc.abstractmethod
    def in_flight(self) -> int:
        """The number of appends that are not answered yet."""

    @property
    @abc.abstractmethod
    def can_begin(self) -> bool:
        """True if a further append can begin now.

        The connection is usable, fewer appends than its capacity are in flight, and the content
        of earlier appends has left.
        """

    @abc.abstractmethod
    def begin(self, append: PreparedAppend, content: Sequence[bytes], answered: Answered) -> None:
        """Send an append. Only if :attr:`can_begin`.

        Small content is one write. More content leaves in the background, with back-pressure.

        Args:
            append: what precedes the content; it goes to the broker of this pipeline.
            content: pieces of content, none of them empty.
            answered: called once, in the order of the appends.

        Raises:
            CallError: the request is too long for the broker. Nothing of it was sent.
        """

    @abc.abstractmethod
    def when_ready(self, callback: Callable[[], None]) -> None:
        """Have a function called once the content that is leaving has left, or its append ended.

        It is called by the event loop. Check :attr:`can_begin` then: the connection may have been
        lost. A later function replaces an earlier one. Nothing calls it where no content is
        leaving: then only answers change :attr:`can_begin`.
        """

    @abc.abstractmethod
    def give_up(self) -> None:
        """Drop the answers of the appends in flight: no :data:`Answered` is called any more.

        The appends may be written nevertheless.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Return the connection of a pipeline on which nothing was begun."""


class BlockingCall(abc.ABC):
    """Append that plain code sent on a blocking connection. It has one user at a time."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def over(self) -> bool:
        """True if the append has ended, well or badly."""

    @abc.abstractmethod
    def wait(self, timeout_s: float | None) -> bool:
        """Block until the append has ended. An interruption ends it.

        Args:
            timeout_s: seconds to wait; None for any time.

        Returns:
            True if it has ended.
        """

    @abc.abstractmethod
    async def finish(self) -> None:
        """Wait on the running event loop until the append has ended. Cancelling ends it."""

    @abc.abstractmethod
    def response(self) -> pb.AppendResponse:
        """Return the response, of whatever status, of an append that has ended.

        Raises:
            CallError: it ended without a response; it may have committed.
        """

    @abc.abstractmethod
    def interrupt(self) -> None:
        """End the append soon, from any thread: the thread that waits sees it fail."""

    @abc.abstractmethod
    def give_up(self, reason: str) -> None:
        """End the append now, if it has not ended. It may commit nevertheless."""


class InlineSender(abc.ABC):
    """Sender of small appends of plain code, on the caller's own thread."""

    @abc.abstractmethod
    def append(self, to: Destination, opening: bytes, content: bytes) -> BlockingCall | None:
        """Send a whole append, without waiting. If this raises, nothing of it was sent.

        Args:
            to: the broker; not the service address.
            opening: the encoded request that names the journal.
            content: not empty, and of one frame.

        Returns:
            The append; ``None`` if no blocking connection is idle: :meth:`prepare` opens one.

        Raises:
            CallError: the append is too long for the broker.
            ClosedError: the transport is closed.
        """

    @abc.abstractmethod
    def prepare(self, to: Destination) -> None:
        """Open a blocking connection, unless there are enough. Blocks for a bounded time.

        Raises:
            UnavailableError: the broker cannot be reached that way, or could not be reached lately.
            ConfigurationError: a certificate cannot be used.
            ClosedError: the transport is closed.
        """


class WireChoice(abc.ABC):
    """Wires of one transport, and the choice of one for each broker.

    Attributes:
        inline: sends appends of plain code, where a wire can do that.
    """

    inline: InlineSender | None = None

    @abc.abstractmethod
    def health(self, peer: Peer) -> Health:
        """Return the state of the connections to a peer; one that was never dialled is idle."""

    @abc.abstractmethod
    async def choose(self, peer: Peer, *, is_lasting: bool = False) -> Wire:
        """Return the wire for a call to a broker.

        Args:
            peer: the broker.
            is_lasting: True for a read, a watch or a replication, which keep a connection busy.

        Raises:
            UnavailableError: the broker cannot be reached.
            ClosedError: the transport is closed.
            ConfigurationError: a certificate cannot be used.
        """

    @abc.abstractmethod
    def try_pipeline(self, to: Destination) -> AppendPipeline | None:
        """Return a pipeline on a connection at hand, without waiting; None if there is none."""

    def unavailable(self, peer: Peer) -> None:  # noqa: B027 - most have nothing to forget
        """Note that a call to a broker ended as unavailable."""

    def prepare_inline(self, to: Destination) -> None:
        """Open a connection for inline appends, if the broker's wire has any.

        Raises what :meth:`InlineSender.prepare` does.
        """
        if self.inline is not None:
            self.inline.prepare(to)

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close all connections. Calls under way are cancelled."""


class Wire(WireChoice):
    """Carrier of calls to brokers that were chosen already.

    Requests are valid when they come here. Calls that end without a response raise a
    :class:`~gazette_sdk.errors.CallError`.
    """

    async def choose(self, peer: Peer, *, is_lasting: bool = False) -> Wire:  # noqa: ARG002
        """See :meth:`WireChoice.choose`: there is only this one."""
        return self

    @abc.abstractmethod
    async def unary(self, to: Destination, request: Message) -> Any:
        """Make a call of one request and one response."""

    @abc.abstractmethod
    def list(self, to: Destination, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        """Yield the messages of a listing or watch."""

    @abc.abstractmethod
    def read(
        self, to: Destination, request: pb.ReadRequest
    ) -> AsyncGenerator[pb.ReadResponse | Chunk | bytes]:
        """Yield messages, content with its offset, and content that continues the item before."""

    @abc.abstractmethod
    async def append(
        self, append: PreparedAppend, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        """Make an append whose content is sent as it comes.

        Args:
            append: the opening request.
            requests: those after it. An error that it raises rolls the append back.
        """

    @abc.abstractmethod
    async def open_pipeline(self, to: Destination) -> AppendPipeline:
        """Return a pipeline; dials where need be. Raises what :meth:`WireChoice.choose` does."""

    @abc.abstractmethod
    def replicate(
        self,
        to: Destination,
        opening: pb.ReplicateRequest,
        requests: AsyncIterator[ReplicateItem],
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """Make a replication; ``requests`` are those after the opening one."""
