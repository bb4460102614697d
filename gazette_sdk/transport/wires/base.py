"""What carries calls to brokers that were chosen already; it knows nothing of routes."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.direct import DirectWire
from gazette_sdk.transport.append.lane import Answered, Content
from gazette_sdk.transport.append.pieces import requests_of
from gazette_sdk.transport.routing.dispatcher import Health
from gazette_sdk.transport.target import AppendItem, Destination, Peer
from gazette_sdk.transport.wires.grpc.codec import Chunk

__all__ = ["Line", "Wire"]


class Line(Protocol):
    """A connection while it carries appends of one journal, and nothing else."""

    @property
    def in_flight(self) -> int:
        """How many appends are not answered yet. Behind the last one, the line is over."""

    @property
    def usable(self) -> bool:
        """Whether a further append can begin."""

    async def begin(
        self, to: Destination, opening: bytes, content: Content, answered: Answered
    ) -> None:
        """See :meth:`AppendLane.begin`; ``opening`` is the encoded request."""

    def give_up(self) -> None:
        """See :meth:`AppendLane.give_up`."""


class Wire(abc.ABC):
    """Carries calls to brokers that were chosen already.

    Requests are valid when they come here. Calls that end without a response raise a
    :class:`~gazette_sdk.errors.CallError`.
    """

    @abc.abstractmethod
    def health(self, peer: Peer) -> Health:
        """The state of the connection to a peer; one that was never dialled is idle."""

    @abc.abstractmethod
    async def unary(self, to: Destination, request: Message) -> Any:
        """A call of one request and one response."""

    @abc.abstractmethod
    def list(self, to: Destination, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        """The messages of a listing or watch."""

    @abc.abstractmethod
    def read(
        self, to: Destination, request: pb.ReadRequest
    ) -> AsyncGenerator[pb.ReadResponse | Chunk | bytes]:
        """Messages, content with its offset, and content that continues the item before it."""

    @abc.abstractmethod
    async def append(
        self, to: Destination, opening: pb.AppendRequest, requests: AsyncIterator[AppendItem]
    ) -> pb.AppendResponse:
        """One append; ``requests`` are those after the opening one."""

    async def append_whole(
        self, to: Destination, opening: pb.AppendRequest, encoded: bytes, pieces: Sequence[bytes]
    ) -> pb.AppendResponse:
        """One append whose content is all there; ``encoded`` is the opening request, encoded."""
        del encoded
        return await self.append(to, opening, requests_of(pieces))

    async def open_line(self, to: Destination) -> Line | None:  # noqa: ARG002 - most have none
        """A connection for the appends of one journal, if several can be in flight."""
        return None

    @abc.abstractmethod
    def replicate(
        self,
        to: Destination,
        opening: pb.ReplicateRequest,
        requests: AsyncIterator[pb.ReplicateRequest],
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """One replication; ``requests`` are those after the opening one."""

    def direct_to(self, peer: Peer) -> DirectWire | None:  # noqa: ARG002 - most have none
        """What makes appends to a peer from plain code, if it is known to work. Any thread asks."""
        return None

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close all connections. Calls under way are cancelled."""
