"""Transport to the content of one range, as it was planned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

from gazette_sdk.errors import FragmentNotFoundError, NotAllowedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import labels
from gazette_sdk.protocol.fragments import parse_content_path
from gazette_sdk.transport import Transport
from gazette_sdk.transport.fragment_store import FragmentStoreTransport
from gazette_sdk.transport.wire import ANYWHERE, AppendItem, ReadItem, ReplicateItem, Target
from gazette_spark.connection import open_transport
from gazette_spark.options import Options
from gazette_spark.planning import JournalRange

__all__ = ["RangeTransport"]


class RangeTransport(Transport):
    """Transport that reads one range of a journal.

    It lists the journal as it was planned, opens the store's fragments that were planned, and
    fails where content is gone since: a reader would pass over it.

    Args:
        options: options of the read.
        part: the range.
    """

    def __init__(self, options: Options, part: JournalRange) -> None:
        self._part = part
        self._inner = open_transport(options.url)
        if isinstance(self._inner, FragmentStoreTransport):
            self._inner.use_fragments(part.journal, _fragments(part))
        self._url = options.url
        self.knows_routes = self._inner.knows_routes
        self.file_root = Path(options.file_root) if options.file_root else None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Event loop to which all calls belong; None for any running loop."""
        return self._inner.loop

    async def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        """Yield the journal as it was planned."""
        del request
        spec = pb.JournalSpec(name=self._part.journal)
        labels.set_value(spec.labels, labels.CONTENT_TYPE, self._part.content_type)
        yield pb.ListResponse(journals=[pb.ListResponse.Journal(spec=spec)])

    async def read(
        self, request: pb.ReadRequest, target: Target = ANYWHERE
    ) -> AsyncGenerator[ReadItem]:
        """Read the journal.

        Raises:
            FragmentNotFoundError: content of the range is gone.
        """
        offset, is_content = request.offset, not request.metadata_only
        async with aclosing(self._inner.read(request, target)) as items:
            async for item in items:
                if not isinstance(item, pb.ReadResponse):
                    offset += len(item)
                elif is_content:
                    offset = self._checked(offset, item)
                yield item

    def _checked(self, offset: int, response: pb.ReadResponse) -> int:
        """Return the offset behind a response, which must go on at ``offset``."""
        if response.status == pb.OK:
            is_gap = any(
                begin <= offset and response.offset <= end for begin, end in self._part.gaps
            )
            if offset < response.offset and not is_gap:
                raise self._gone(offset)
            return response.offset + len(response.content)
        if response.status == pb.OFFSET_NOT_YET_AVAILABLE and offset < self._part.end:
            raise self._gone(offset)
        return offset

    def _gone(self, offset: int) -> FragmentNotFoundError:
        path = self._part.fragment_at(offset)
        held = "the fragment that held it" if path is None else f"fragment {path}, which held it,"
        return FragmentNotFoundError(
            f"{self._part.journal}: content of offset {offset} was there when the query was"
            f" planned, but {held} is gone from {self._url}; load() again to read what is there,"
            " and keep fragments for longer than queries run",
            store=self._url,
            journal=self._part.journal,
            offset=offset,
        )

    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        """List fragments as they are now."""
        return await self._inner.list_fragments(request, target)

    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:  # noqa: ARG002
        """Refused."""
        raise self._refused()

    async def append(
        self,
        requests: AsyncIterator[AppendItem],  # noqa: ARG002
        target: Target = ANYWHERE,  # noqa: ARG002
    ) -> pb.AppendResponse:
        """Refused."""
        raise self._refused()

    def replicate(
        self,
        requests: AsyncIterator[ReplicateItem],  # noqa: ARG002
        target: Target,  # noqa: ARG002
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """Refused."""
        raise self._refused()

    async def fragment_store_health(
        self,
        request: pb.FragmentStoreHealthRequest,  # noqa: ARG002
    ) -> pb.FragmentStoreHealthResponse:
        """Refused."""
        raise self._refused()

    def _refused(self) -> NotAllowedError:
        return NotAllowedError("a range of a journal can only be read", journal=self._part.journal)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


def _fragments(part: JournalRange) -> Iterator[pb.Fragment]:
    """Yield the fragments of a range as they were planned."""
    for path, mod_time in part.fragments:
        fragment = parse_content_path(part.journal, path)
        fragment.mod_time = mod_time
        yield fragment
