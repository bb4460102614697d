"""The one interface through which the SDK reaches journals.

A transport speaks the requests and responses of the journal service and nothing more: it
returns responses of any status. What a status means, when to try again and how to batch is the
business of the layers above (`appender`, `reader`, `listing`), which work over every transport.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.direct import DirectJournal
from gazette_sdk.transport.append.lane import AppendLane
from gazette_sdk.transport.append.pieces import requests_of
from gazette_sdk.transport.target import ANYWHERE, AppendItem, ReadItem, Target

__all__ = ["ANYWHERE", "AppendItem", "ReadItem", "Target", "Transport"]


class Transport(abc.ABC):
    """A way to reach journals.

    Calls that end without a response raise a :class:`~gazette_sdk.errors.CallError`.
    Construction does no I/O: connections are opened by the first call.

    Attributes:
        knows_routes: whether it sends a read to a broker that has the journal. Only then may a
            reader forbid brokers to proxy, and open stored fragments itself.
        loop: event loop to which all calls belong; None: any running loop.
    """

    knows_routes: bool = False
    loop: asyncio.AbstractEventLoop | None = None

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

    async def append_whole(
        self, opening: pb.AppendRequest, pieces: Sequence[bytes], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        """Append content that is all there, and commit: :meth:`append`, where possible for less.

        Args:
            opening: the request that names the journal.
            pieces: the content, in order.
            target: where to send it.
        """

        async def requests() -> AsyncIterator[AppendItem]:
            yield opening
            async for item in requests_of(pieces):
                yield item

        return await self.append(requests(), target)

    def lane(self, opening: pb.AppendRequest) -> AppendLane | None:  # noqa: ARG002 - most have none
        """A way to have several appends of a journal in flight, where the transport has one.

        Args:
            opening: the request of each of them, valid, without the name's metadata.
        """
        return None

    @abc.abstractmethod
    def replicate(
        self, requests: AsyncIterator[pb.ReplicateRequest], target: Target
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

    def direct(self, journal: str) -> DirectJournal | None:  # noqa: ARG002 - most have none
        """A way to append from plain code without the event loop, if there is one just now.

        Any thread may ask. Most transports have none; others only for a journal that was
        appended to lately.

        Args:
            journal: its name, without metadata.
        """
        return None

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close its connections. Calls under way are cancelled."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
