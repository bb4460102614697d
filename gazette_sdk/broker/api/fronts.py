"""Interface of the journal service for the broker's fronts, and the chunking of content.

The journal service is a plain async object (see `service`). gRPC, the HTTP gateway and the JSON
gateway are thin fronts over it, which differ only in how they encode its responses.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import NamedTuple, Protocol, TypeAlias

from gazette_sdk.broker.append.common_case import StartedAppend
from gazette_sdk.errors import CorruptFragmentError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.call import Call
from gazette_sdk.transport.wire import AppendItem, ReplicateItem

__all__ = ["Chunk", "Journals", "ReadYield", "Span", "chunks"]


class Span(Protocol):
    """Committed content of a local file: ``length`` bytes at ``position`` of ``fd``."""

    @property
    def fd(self) -> int:
        """An open file descriptor, valid until the next item is requested."""

    @property
    def position(self) -> int:
        """The position in the file at which the content begins."""

    @property
    def length(self) -> int:
        """The number of bytes."""

    @property
    def metadata(self) -> pb.ReadResponse | None:
        """The metadata that precedes the content, unless it was an item of its own."""


ReadYield: TypeAlias = pb.ReadResponse | Span | bytes
"""Item of a read: metadata, or content that continues where the item before it ended."""


class Journals(Protocol):
    """Journal service, as its fronts see it.

    Each method checks the caller's authorization and then the request, and raises a
    :class:`~gazette_sdk.errors.GazetteError` for a call that fails.
    """

    def list(self, request: pb.ListRequest, call: Call) -> AsyncGenerator[pb.ListResponse]:
        """Snapshots of matching journals."""

    async def apply(self, request: pb.ApplyRequest, call: Call) -> pb.ApplyResponse:
        """Create, change, delete journals."""

    def read(self, request: pb.ReadRequest, call: Call) -> AsyncGenerator[ReadYield]:
        """Metadata and content from an offset on."""

    async def append(self, requests: AsyncIterator[AppendItem], call: Call) -> pb.AppendResponse:
        """One append; ends without an empty ``AppendRequest`` roll it back."""

    @property
    def append_now(self) -> Callable[[bytes, bytes, Call, object | None], StartedAppend | None]:
        """Append content at hand without waiting for anything, or decline.

        See :meth:`~gazette_sdk.broker.append.common_case.InlineAppends.append_now`.
        """

    async def append_acknowledged(self, started: StartedAppend) -> bytes:
        """Wait for the acknowledgement of such an append. Return the encoded response."""

    def replicate(
        self, requests: AsyncIterator[ReplicateItem], call: Call
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """A stream of replication."""

    async def list_fragments(
        self, request: pb.FragmentsRequest, call: Call
    ) -> pb.FragmentsResponse:
        """One page of fragments."""

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, call: Call
    ) -> pb.FragmentStoreHealthResponse:
        """The health of a store."""


class Chunk(NamedTuple):
    """Content of a journal, never empty.

    Attributes:
        offset: where in the journal it begins.
        content: its bytes.
    """

    offset: int
    content: bytes


async def chunks(
    items: AsyncGenerator[ReadYield], chunk_bytes: int
) -> AsyncGenerator[pb.ReadResponse | Chunk]:
    """Yield the items of a read, with content cut into chunks that carry their offsets.

    Args:
        items: of the service; closed at the end.
        chunk_bytes: greatest size of a chunk.

    Raises:
        CorruptFragmentError: a local file ends before the content it should hold.
    """
    offset = 0
    async with aclosing(items):
        async for item in items:
            if isinstance(item, pb.ReadResponse):
                offset = item.offset
                if not item.content:
                    yield item
                    continue
                item = item.content  # noqa: PLW2901 - its content is treated as any other
            if isinstance(item, bytes):
                for begin in range(0, len(item), chunk_bytes):
                    content = item[begin : begin + chunk_bytes]
                    yield Chunk(offset, content)
                    offset += len(content)
                continue
            if item.metadata is not None:
                offset = item.metadata.offset
                yield item.metadata
            position, end = item.position, item.position + item.length
            while position < end:
                content = os.pread(item.fd, min(chunk_bytes, end - position), position)
                if not content:
                    raise CorruptFragmentError(
                        f"the local file of a fragment ends {end - position} bytes early; restart "
                        "the broker, which then recovers or replaces it",
                        offset=offset,
                    )
                yield Chunk(offset, content)
                position += len(content)
                offset += len(content)
