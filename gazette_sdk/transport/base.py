"""The one interface through which the SDK reaches journals.

A transport speaks the requests and responses of the journal service and nothing more: it returns
responses of any status. What a status means, when to try again and how to batch is the business of
the layers above (`append`, `read`, `listing`), which work over every transport.

An :class:`AppendRoute` is the way of a journal's appends from its appender to its broker.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf.message import Message

from gazette_sdk.contexts import AsyncClosable
from gazette_sdk.errors import (
    CallError,
    ClosedError,
    ConfigurationError,
    GazetteError,
    NotAllowedError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import Rpc
from gazette_sdk.tracing import CALLER
from gazette_sdk.transport.wire import (
    ANYWHERE,
    Answered,
    AppendItem,
    BlockingCall,
    ReadItem,
    ReplicateItem,
    Target,
)

CHUNK_BYTES = 128 << 10
"""Content per message of an append: far below the 4 MiB that brokers accept. More makes no
difference over loopback (measured)."""

SendAppend: TypeAlias = Callable[[AsyncIterator[AppendItem]], Awaitable[pb.AppendResponse]]


class AppendRoute(abc.ABC):
    """Way of a journal's appends to its broker, several in flight where the wire allows it.

    All methods belong to the appender's event loop, but for those of inline appends.
    """

    @abc.abstractmethod
    def try_begin(
        self,
        request: pb.AppendRequest,
        content: Sequence[bytes],
        answered: Answered,
        traceparent: str = "",
    ) -> bool:
        """Send an append after those in flight; it is written only if those are.

        Args:
            request: opening request of the append, without metadata in the journal's name.
            content: all of it, in parts.
            answered: called once, from a callback of the loop, in the order of the appends, with
                the response of any status, or the error.
            traceparent: context of its span; empty for none.

        Returns:
            False if it cannot be sent now: try again after the next answer, or, where none is
            in flight, after :meth:`open`.

        Raises:
            GazetteError: the broker cannot be chosen.
        """

    @abc.abstractmethod
    async def open(self, request: pb.AppendRequest) -> None:
        """Connect to the journal's broker, so that :meth:`try_begin` can send.

        Raises:
            CallError: the broker cannot be reached.
        """

    @abc.abstractmethod
    def give_up(self) -> None:
        """Drop the answers of those in flight. They may be written nevertheless."""

    def send_inline(self, content: bytes, traceparent: str = "") -> BlockingCall | None:  # noqa: ARG002 - most cannot
        """Send a small append without preconditions from any thread, without waiting.

        Args:
            content: all of it.
            traceparent: context of its span; empty for none.

        Returns:
            The call; None if there is no blocking connection at hand. It is sent wholly or not
            at all if this raises.

        Raises:
            GazetteError: it could not be sent.
        """
        return None

    def prepare_inline(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Open a blocking connection for later inline appends. Blocks, within a bound.

        Raises:
            GazetteError: the broker cannot be reached this way.
        """

    def accept(self, response: pb.AppendResponse) -> None:  # noqa: B027 - as above
        """Check the response of an inline append, and learn its route. Any thread may call.

        Raises:
            ValidationError: the response is malformed.
        """

    def failed(self, error: Exception) -> None:  # noqa: B027 - as above
        """Learn of the failure of an inline append. Any thread may call."""


class TaskRoute(AppendRoute):
    """Route over a transport that has nothing but streamed appends: one in flight, in a task.

    Args:
        send: appends what its requests say.
    """

    def __init__(self, send: SendAppend) -> None:
        self._send = send
        self._task: asyncio.Task[None] | None = None

    def try_begin(
        self,
        request: pb.AppendRequest,
        content: Sequence[bytes],
        answered: Answered,
        traceparent: str = "",
    ) -> bool:
        """See :class:`AppendRoute`."""
        if self._task is not None:
            return False
        self._task = asyncio.get_running_loop().create_task(
            self._append(request, content, answered, traceparent),
            name=f"append to {request.journal}",
        )
        return True

    async def open(self, request: pb.AppendRequest) -> None:
        """See :class:`AppendRoute`: the call itself connects."""

    def give_up(self) -> None:
        """See :class:`AppendRoute`."""
        if self._task is not None:
            self._task.cancel()

    async def _append(
        self,
        request: pb.AppendRequest,
        content: Sequence[bytes],
        answered: Answered,
        traceparent: str,
    ) -> None:
        CALLER.set(traceparent)  # of this task, which was made in the context of any append
        outcome: pb.AppendResponse | Exception
        try:
            outcome = await self._send(requests_of(request, content))
        except asyncio.CancelledError:
            outcome = ClosedError(f"{request.journal}: the append was cancelled")
        except Exception as error:  # noqa: BLE001 - the appender decides what it means
            outcome = error
        self._task = None
        answered(outcome)


async def requests_of(
    request: pb.AppendRequest, content: Sequence[bytes]
) -> AsyncIterator[AppendItem]:
    """Yield the opening request, the content in chunks, and the commit."""
    yield request
    for part in content:
        for begin in range(0, len(part), CHUNK_BYTES):
            yield part[begin : begin + CHUNK_BYTES]
    yield pb.AppendRequest()


def as_error(journal: str, error: Exception) -> GazetteError:
    """Return an error of the SDK for one that no one expected."""
    if isinstance(error, GazetteError):
        return error
    failure = GazetteError(
        f"{journal}: appending failed for an unexpected reason: {error!r}; the log has its"
        " traceback",
        journal=journal,
    )
    failure.__cause__ = error
    return failure


class Transport(AsyncClosable):
    """Way to reach journals. Its calls are made by coroutines.

    Calls that end without a response raise a :class:`~gazette_sdk.errors.CallError`.
    Construction does no I/O: connections are opened by the first call.

    Attributes:
        knows_routes: a read is sent to a broker that has the journal. Only then may a reader
            forbid brokers to proxy, and open stored fragments itself.
        file_root: local directory which stands for the root of brokers' ``file://`` stores; None
            where readers cannot open their files.
        may_hide_journals: listings may leave out journals that exist, as a token does not allow
            them.
    """

    knows_routes: bool = False
    file_root: Path | None = None
    may_hide_journals: bool = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Event loop to which all calls belong; None for any running loop."""
        return None

    @abc.abstractmethod
    def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        """Snapshots of journals that match the request's selector; see protocol section 3.6."""

    @abc.abstractmethod
    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:
        """Create, change and delete journals in one transaction."""

    @abc.abstractmethod
    def read(self, request: pb.ReadRequest, target: Target = ANYWHERE) -> AsyncGenerator[ReadItem]:
        """Read a journal from an offset. Closing the iterator ends the call."""

    @abc.abstractmethod
    async def append(
        self, requests: AsyncIterator[AppendItem], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        """Append to a journal, atomically. An error raised by ``requests`` rolls back."""

    def append_route(self, journal: str, wake: Callable[[], None]) -> AppendRoute:  # noqa: ARG002
        """Return the way of a journal's appends, for an appender.

        Args:
            journal: its name, without metadata.
            wake: called on the loop when the route can send that could not.
        """
        return TaskRoute(self.append)

    @abc.abstractmethod
    def replicate(
        self, requests: AsyncIterator[ReplicateItem], target: Target
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """Replicate to a peer; brokers only."""

    @abc.abstractmethod
    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        """One page of a journal's fragments."""

    @abc.abstractmethod
    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, target: Target = ANYWHERE
    ) -> pb.FragmentStoreHealthResponse:
        """The health of a fragment store, as the broker sees it."""

    async def view(self, call: Rpc, request: Message) -> Any:  # noqa: ARG002 - of those that can
        """Return the response of a call that shows the cluster.

        Args:
            call: one of those of :mod:`gazette_sdk.protocol.cluster_pb2`, of one response.
            request: its request.

        Raises:
            CallError: it failed; the code is UNIMPLEMENTED where brokers, or this transport, have
                no such call.
        """
        raise CallError(
            f"{call.name}: {type(self).__name__} reaches no broker that has this call",
            code="UNIMPLEMENTED",
        )

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close its connections. Calls under way are cancelled."""


class ReadOnlyTransport(Transport):
    """Base of transports that only list and read journals. Other calls are refused."""

    @abc.abstractmethod
    def _refused(self, what: str) -> NotAllowedError:
        """Return the error of a call that it does not have.

        Args:
            what: begin of a sentence about the call, such as ``journals are changed``.
        """

    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:  # noqa: ARG002
        """Refused."""
        raise self._refused("journals are created and changed")

    async def append(
        self,
        requests: AsyncIterator[AppendItem],  # noqa: ARG002
        target: Target = ANYWHERE,  # noqa: ARG002
    ) -> pb.AppendResponse:
        """Refused."""
        raise self._refused("journals are appended to")

    def replicate(
        self,
        requests: AsyncIterator[ReplicateItem],  # noqa: ARG002
        target: Target,  # noqa: ARG002
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """Refused."""
        raise self._refused("journals are replicated")

    async def fragment_store_health(
        self,
        request: pb.FragmentStoreHealthRequest,  # noqa: ARG002
        target: Target = ANYWHERE,  # noqa: ARG002
    ) -> pb.FragmentStoreHealthResponse:
        """Refused."""
        raise self._refused("the health of stores is checked")


def check_transport(transport: object) -> None:
    """Refuse what is no transport, such as the address of a broker.

    Args:
        transport: the transport that the user gave; None for none.

    Raises:
        ConfigurationError: it is none.
    """
    if transport is not None and not isinstance(transport, Transport):
        remedy = f"connect({transport!r})" if isinstance(transport, str) else "what connect() made"
        raise ConfigurationError(f"{transport!r} is no transport; use transport={remedy}")
