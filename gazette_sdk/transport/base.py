"""The one interface through which the SDK reaches journals.

A transport speaks the requests and responses of the journal service and nothing more: it
returns responses of any status. What a status means, when to try again and how to batch is the
business of the layers above (`append`, `read`, `listing`), which work over every transport.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

from gazette_sdk.contexts import AsyncClosable
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.route import AppendRoute, TaskRoute
from gazette_sdk.transport.target import ANYWHERE, AppendItem, ReadItem, ReplicateItem, Target

__all__ = [
    "ANYWHERE",
    "AppendItem",
    "ReadItem",
    "ReplicateItem",
    "Target",
    "Transport",
    "check_transport",
]


class Transport(AsyncClosable):
    """Way to reach journals. Its calls are made by coroutines.

    Calls that end without a response raise a :class:`~gazette_sdk.errors.CallError`.
    Construction does no I/O: connections are opened by the first call.

    Attributes:
        knows_routes: a read is sent to a broker that has the journal. Only then may a reader
            forbid brokers to proxy, and open stored fragments itself.
        file_root: local directory which stands for the root of brokers' ``file://`` stores; None
            where readers cannot open their files.
    """

    knows_routes: bool = False
    file_root: Path | None = None

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
        self, request: pb.FragmentStoreHealthRequest
    ) -> pb.FragmentStoreHealthResponse:
        """The health of a fragment store, as the broker sees it."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close its connections. Calls under way are cancelled."""


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
