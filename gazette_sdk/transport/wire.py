"""Wires: carriers of calls to brokers.

A wire carries calls to brokers that were chosen already; it has no routes. `grpc` is the wire that
every Gazette broker speaks, `stream` the fast one of this package.

A :class:`Wire` takes an append in one of three ways:

- :meth:`Wire.try_pipeline` and :meth:`Wire.open_pipeline`: appends whose content is at hand,
  several in flight, answered in order;
- :meth:`Wire.append`: content that is sent as it comes;
- :attr:`Wire.append_blocking`: a small append from plain code, without an event loop. Not every
  wire can do that.

Content messages are by far the most bytes and the plainest messages: one length-delimited field,
with an offset before it where they are read. Building and cutting them by hand spares two copies
and the message object. Whatever is not exactly of that shape takes the general path.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message import Message

from gazette_sdk.errors import (
    CallCancelledError,
    CallError,
    ConfigurationError,
    CorruptFragmentError,
    DeadlineExceededError,
    FragmentNotFoundError,
    GazetteError,
    StoreAuthorizationError,
    StoreError,
    UnauthenticatedError,
    UnavailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import decode_varint, encode_varint
from gazette_sdk.protocol.rules import SERVICE as BROKER_SERVICE
from gazette_sdk.protocol.rules import Rpc
from gazette_sdk.tracing import PARENT_KEY

ReadItem: TypeAlias = pb.ReadResponse | bytes
"""Item of a read: metadata (a response without content), or content which continues at the
offset where the item before it ended (a metadata item's ``offset``, or the end of content)."""

AppendItem: TypeAlias = pb.AppendRequest | bytes
"""Item of an append. In order: the request that names the journal, non-empty chunks of
content, and an *empty* ``AppendRequest()``, which commits. Ending without it rolls back."""

ReplicateItem: TypeAlias = pb.ReplicateRequest | bytes
"""Item of a replication: a proposal, or non-empty content that follows the content since the last
proposal. Requests with content, which other implementations send, name their place themselves."""


@dataclass(frozen=True, slots=True)
class Target:
    """Brokers to which a call may go.

    Attributes:
        route: the journal's route, if the caller has one; the transport picks a member.
        member: exactly this member.
    """

    route: pb.Route | None = None
    member: pb.ProcessSpec.ID | None = None


ANYWHERE = Target()


@dataclass(frozen=True, slots=True)
class Peer:
    """Broker that can be dialled. The configured service address is :data:`SERVICE`."""

    zone: str
    suffix: str
    endpoint: str


SERVICE = Peer("", "", "")


class Destination(NamedTuple):
    """Broker, journal and token of one call.

    Attributes:
        rpc: which call.
        journal: the journal it is about.
        peer: the broker.
        address: the service address, for messages of errors.
        authorization: the call's ``authorization``, where one is needed.
        metadata: further metadata of the call.
    """

    rpc: Rpc
    journal: str | None
    peer: Peer
    address: str
    authorization: str | None
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def where(self) -> str:
        """The broker in words."""
        return where(self.peer, self.address)


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates of a client.

    Attributes:
        trusted_ca_file: PEM file of authorities that sign server certificates; empty for the
            system's.
        cert_file: PEM file of the client's own certificate, where servers require one.
        cert_key_file: PEM file of its key.
    """

    trusted_ca_file: str = ""
    cert_file: str = ""
    cert_key_file: str = ""

    def content(self, path: str) -> bytes | None:
        """Return the content of one of the files; ``None`` for an empty path.

        Raises:
            ConfigurationError: it cannot be read.
        """
        if not path:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"cannot read the PEM file {path}: {error}") from error

    def stamps(self) -> tuple[int, ...]:
        """Return the times of modification of the files, 0 for a missing one."""
        found = []
        for path in (self.trusted_ca_file, self.cert_file, self.cert_key_file):
            try:
                found.append(Path(path).stat().st_mtime_ns if path else 0)
            except OSError:
                found.append(0)
        return tuple(found)

    def context(self, protocols: Sequence[str]) -> ssl.SSLContext:
        """Return the context for connections of the stream transport.

        Args:
            protocols: names to offer by ALPN, the best first.

        Raises:
            ConfigurationError: a file cannot be used.
        """
        for path in (self.trusted_ca_file, self.cert_file, self.cert_key_file):
            self.content(path)  # names the file that cannot be read
        try:
            context = ssl.create_default_context(cafile=self.trusted_ca_file or None)
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.cert_key_file or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"the client's certificates ({self}) cannot be used: {error}"
            ) from error
        context.set_alpn_protocols(list(protocols))
        return context


_STORE_ERRORS = {
    kind.__name__: kind
    for kind in (StoreError, StoreAuthorizationError, FragmentNotFoundError, CorruptFragmentError)
}


_CLUSTER_SERVICES = "gazette.cluster."
"""Prefix of the names of services that only members of this SDK have."""


def call_error(
    code: str,
    details: str,
    *,
    method: str,
    where: str,
    journal: str | None,
    kind: str = "",
    service: str = BROKER_SERVICE,
) -> GazetteError:
    """Return the error of a call.

    Args:
        code: name of the gRPC code.
        details: the server's text, or that of the gRPC library.
        method: name of the call.
        where: which broker it was sent to, in words.
        journal: the journal it is about.
        kind: class of the broker's error, where it sent one.
        service: full name of the service that was called. Only brokers serve journals.
    """
    text = f"{method} at {where}: {details or code}"
    if code == "UNKNOWN" and kind in _STORE_ERRORS:
        return _STORE_ERRORS[kind](text, journal=journal)
    if code == "UNAVAILABLE":
        return UnavailableError(text, journal=journal)
    if code == "UNAUTHENTICATED":
        return UnauthenticatedError(
            f"{text}; give the client the cluster's auth keys, or a token with the capability",
            journal=journal,
        )
    if code == "DEADLINE_EXCEEDED":
        return DeadlineExceededError(text, journal=journal)
    if code == "CANCELLED":
        return CallCancelledError(text, journal=journal)
    if code == "UNIMPLEMENTED":
        if service.startswith(_CLUSTER_SERVICES):
            text += (
                "; only brokers and consumers of this SDK, of its latest versions, have this call"
            )
        else:
            process = "broker" if service == BROKER_SERVICE else "consumer"
            text += f"; is this the address of a Gazette {process}?"
    return CallError(text, code=code, journal=journal)


async def as_requests(items: AsyncIterator[ReplicateItem]) -> AsyncIterator[pb.ReplicateRequest]:
    """Yield items with content as requests: with its distance to the last proposal."""
    delta = 0
    async for item in items:
        if isinstance(item, bytes):
            yield pb.ReplicateRequest(content=item, content_delta=delta)
            delta += len(item)
        else:
            yield item
            delta = 0 if item.HasField("proposal") else delta + len(item.content)


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task of a call, and wait for its end. Its error was raised elsewhere."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


Chunk: TypeAlias = tuple[int, bytes]
"""Offset and content of a read message which has nothing else."""

_APPEND_CONTENT_TAG = b"\x22"  # AppendRequest.content: field 4, length-delimited
_READ_OFFSET_TAG = 0x18  # ReadResponse.offset: field 3, varint
_READ_CONTENT_TAG = 0x3A  # ReadResponse.content: field 7, length-delimited


def content_request(content: bytes) -> bytes:
    """Encode ``AppendRequest(content=content)``."""
    return b"".join((_APPEND_CONTENT_TAG, encode_varint(len(content)), content))


def encode_append_item(item: AppendItem) -> bytes:
    """Encode one item of an append.

    An empty chunk of content would mean commit: callers never send one.
    """
    if isinstance(item, pb.AppendRequest):
        return item.SerializeToString()
    assert len(item) > 0
    return content_request(item)


def decode_read_response(data: bytes) -> pb.ReadResponse | Chunk:
    """Decode a message of a read: its offset and content if it has nothing else."""
    offset, at = 0, 0
    if data and data[0] == _READ_OFFSET_TAG:
        offset, at = decode_varint(data, 1)
    if offset >= 0 and at < len(data) and data[at] == _READ_CONTENT_TAG:
        length, at = decode_varint(data, at + 1)
        if length > 0 and at + length == len(data):
            return offset, data[at:]
    return pb.ReadResponse.FromString(data)


class Health(enum.IntEnum):
    """State of a connection, in order of preference."""

    READY = 0
    CONNECTING = 1
    IDLE = 2
    FAILED = 3


class Action(enum.Enum):
    """Action for the chosen peer."""

    USE = "use"
    WAIT = "wait until it is connected"
    FAIL = "forget the route and fail as unavailable"


def where(peer: Peer, address: str) -> str:
    """A peer in words, for messages of errors.

    Args:
        peer: the peer.
        address: the service address.
    """
    if peer == SERVICE:
        return address
    if not peer.suffix:
        return peer.endpoint  # a further address of the service
    return f"broker {peer.zone}/{peer.suffix} ({peer.endpoint})"


def action_for(peer: Peer, health: Health) -> Action:
    """Return the action for a peer. The service address is waited for, as it has no other."""
    if health is Health.READY:
        return Action.USE
    if health is Health.FAILED and peer != SERVICE:
        return Action.FAIL
    return Action.WAIT


class Marks:
    """Mark and sweep over connections: what one full period did not use may be closed.

    The service address is never swept, nor a peer with a call under way.
    """

    def __init__(self) -> None:
        self._used: set[Peer] = set()
        self._calls: dict[Peer, int] = {}

    def begin(self, peer: Peer) -> None:
        """A call to ``peer`` begins."""
        self._used.add(peer)
        self._calls[peer] = self._calls.get(peer, 0) + 1

    def end(self, peer: Peer) -> None:
        """A call to ``peer`` ended."""
        calls = self._calls[peer] - 1
        assert calls >= 0
        if calls:
            self._calls[peer] = calls
        else:
            del self._calls[peer]

    def sweep(self, peers: Iterable[Peer]) -> list[Peer]:
        """End a period: those of ``peers`` which it did not use."""
        unused = [
            peer
            for peer in peers
            if peer != SERVICE and peer not in self._used and peer not in self._calls
        ]
        self._used.clear()
        return unused


MAX_RECEIVE_BYTES = 16 << 20
"""Greatest message a client accepts (client section 1)."""

CONNECT_TIMEOUT_S = 10.0
"""Bound of the wait for a broker to be reachable: enough for one that is just starting."""

RECONNECT_BACKOFF_MAX_S = 5.0
"""Longest wait between two dials of a lost connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOptions:
    """Options of the connections of a transport.

    See :class:`~gazette_sdk.transport.router.RoutedTransport`.
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

    def carrying(self, traceparent: str) -> PreparedAppend:
        """Return the same append, whose call carries a context of a trace."""
        metadata = (*self.to.metadata, (PARENT_KEY, traceparent))
        return self._replace(to=self.to._replace(metadata=metadata))


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


AppendBlocking: TypeAlias = Callable[[Destination, bytes, bytes], BlockingCall | None]
"""Sends an append. Its arguments are the broker (not the service address), the encoded request that
names the journal, and content of one frame, which is not empty. It returns None if no connection is
idle. If it raises, nothing was sent; ``CallError`` is raised for an append that is too long."""


def _no_connection(to: Destination, opening: bytes, content: bytes) -> BlockingCall | None:  # noqa: ARG001
    return None


def _nothing_to_prepare(to: Destination) -> None:
    pass


class Wire(abc.ABC):
    """Carrier of calls to brokers that were chosen already.

    Requests are valid when they come here. Calls that end without a response raise a
    :class:`~gazette_sdk.errors.CallError`; where a broker cannot be reached, that is an
    :class:`~gazette_sdk.errors.UnavailableError`. After :meth:`aclose` they raise
    :class:`~gazette_sdk.errors.ClosedError`, and where a certificate cannot be used
    :class:`~gazette_sdk.errors.ConfigurationError`.

    Attributes:
        append_blocking: sends a whole small append of plain code on the caller's thread, without
            waiting: see :data:`AppendBlocking`. Most wires have no connections for that.
        prepare_blocking: opens a connection for it, unless there are enough. It blocks for a
            bounded time, and raises ``UnavailableError`` if the broker cannot be reached that way,
            or could not be reached lately.
    """

    append_blocking: AppendBlocking = staticmethod(_no_connection)
    prepare_blocking: Callable[[Destination], None] = staticmethod(_nothing_to_prepare)

    @abc.abstractmethod
    def health(self, peer: Peer) -> Health:
        """Return the state of the connections to a peer; one that was never dialled is idle."""

    async def reach(self, peer: Peer) -> None:  # noqa: B027 - most dial with the call
        """Dial a broker before a call, where only a dial shows how to call it.

        Raises:
            UnavailableError: the broker cannot be reached.
        """

    def unavailable(self, peer: Peer) -> None:  # noqa: B027 - most have nothing to forget
        """Note that a call to a broker ended as unavailable."""

    @abc.abstractmethod
    async def call(self, to: Destination, request: Message) -> Any:
        """Make a call of one request and one response."""

    @abc.abstractmethod
    def stream(
        self,
        to: Destination,
        opening: Message,
        requests: AsyncIterator[ReplicateItem] | None = None,
    ) -> AsyncGenerator[Any]:
        """Make a call of many responses, which keeps a connection busy while it lasts.

        Args:
            to: the broker, and which call: a listing, a read or a replication.
            opening: its first request.
            requests: further items of a replication; None of other calls.

        Yields:
            The responses. Of a read also content with its offset (:data:`Chunk`), and content that
            continues the item before (bytes).
        """

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
    def try_pipeline(self, to: Destination) -> AppendPipeline | None:
        """Return a pipeline on a connection at hand, without waiting; None if there is none."""

    @abc.abstractmethod
    async def open_pipeline(self, to: Destination) -> AppendPipeline:
        """Return a pipeline; dials where need be."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close all connections. Calls under way are cancelled."""
