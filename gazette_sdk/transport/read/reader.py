"""One Read: content of a journal from an offset, from its broker or straight from its store.

Client section 5. A broker answers a read of stored content with the fragment's URL and ends the
stream, where the request says ``do_not_proxy``; the reader then opens that URL itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from gazette_sdk.errors import CallError, ClosedError, GazetteError, for_status
from gazette_sdk.fragment.content import FragmentReader
from gazette_sdk.fragment.remote import open_url
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import metrics
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.read.read_ahead import ReadAhead
from gazette_sdk.transport.target import ReadItem, Target

__all__ = [
    "ByteReader",
    "OffsetJumpError",
    "OpenFragment",
    "SeekRequiresNewReaderError",
]

OpenFragment: TypeAlias = Callable[[str, pb.Fragment, int], FragmentReader]
"""Opens a fragment's URL at an offset, decompressed; called in a thread."""


class OffsetJumpError(GazetteError):
    """Content between the requested offset and ``offset`` is gone; reading may go on there."""

    def __init__(self, journal: str, requested: int, offset: int) -> None:
        super().__init__(
            f"{journal}: offset {requested} is not available; reading goes on at {offset}",
            journal=journal,
            offset=offset,
        )
        self.requested = requested


class SeekRequiresNewReaderError(GazetteError):
    """A reader cannot move there; begin another one at the offset."""


class ByteReader:
    """Reader over one Read call.

    Any error except :class:`OffsetJumpError` ends the reader: it is raised again by every later
    read.

    Args:
        transport: how to reach the journal.
        request: what to read. The reader works on a copy, whose ``offset`` advances.
        last_response: the last metadata of the reader before; its route is where to begin.
        file_root: local directory which stands for the root of ``file://`` fragment URLs.
        open_fragment: opens a fragment's URL; by default, as the scheme of the URL says.
        opens_fragments: False to end where the stream of the broker ends, whatever URL it named.
    """

    def __init__(
        self,
        transport: Transport,
        request: pb.ReadRequest,
        *,
        last_response: pb.ReadResponse | None = None,
        file_root: Path | None = None,
        open_fragment: OpenFragment | None = None,
        opens_fragments: bool = True,
    ) -> None:
        self.request = pb.ReadRequest()
        self.request.CopyFrom(request)
        self.hint = last_response
        self._response: pb.ReadResponse | None = None
        self._header: pb.Header | None = None
        self._transport = transport
        self._open_fragment = open_fragment or partial(open_url, file_root=file_root)
        self._opens_fragments = opens_fragments
        self._items: AsyncGenerator[ReadItem, None] | None = None
        self._direct: _DirectFragment | None = None
        self._rest = memoryview(b"")
        self._shows_metadata = False
        self._failure: Exception | None = None
        self._count = metrics.READ_BYTES.labels(request.journal).inc

    @property
    def response(self) -> pb.ReadResponse | None:
        """Last metadata of this read, with its header: that comes with the first only."""
        response = self._response
        if response is not None and self._header is not None and not response.HasField("header"):
            response.header.CopyFrom(self._header)
        return response

    @property
    def header(self) -> pb.Header | None:
        """Header of this read or, before its first response, of the one before."""
        for response in (self.response, self.hint):
            if response is not None and response.HasField("header"):
                return response.header
        return None

    async def read(self, size_max: int = 0) -> bytes | None:
        """Return the next piece of content.

        Args:
            size_max: greatest length to return; 0 for as much as came at once.

        Returns:
            Content; empty when metadata arrived, which ``response`` then shows; ``None`` at the
            end of the stream. ``request.offset`` is behind what was returned.

        Raises:
            OffsetJumpError: the offset moved forward over missing content; go on reading.
            StatusError: the broker ended the read with a status other than OK.
            CallError: the call broke.
            StoreError: a directly opened fragment failed.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return await self._read(size_max)
        except OffsetJumpError:
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self._failure = error
            await self.aclose()
            raise

    async def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move forward within a directly opened fragment, by discarding.

        Raises:
            SeekRequiresNewReaderError: any other move.
        """
        target = offset + self.request.offset if whence == os.SEEK_CUR else offset
        if whence == os.SEEK_END:
            raise SeekRequiresNewReaderError("a journal has no end to seek from")
        direct = self._direct
        if direct is None or not self.request.offset <= target < direct.end:
            raise SeekRequiresNewReaderError(
                f"cannot move from offset {self.request.offset} to {target} in this read; "
                "begin another one there",
                journal=self.request.journal,
                offset=target,
            )
        while (left := target - self.request.offset) > 0:
            if not self._rest:
                self._rest = memoryview(await direct.content.read())
            skipped = min(left, len(self._rest))
            self._rest = self._rest[skipped:]
            self.request.offset += skipped
            direct.count_discarded(skipped)
        return target

    def adjusted_offset(self, buffered_bytes: int) -> int:
        """Return the offset to checkpoint when the caller still holds ``buffered_bytes`` unread."""
        return self.request.offset - buffered_bytes

    async def aclose(self) -> None:
        """End the call, and close what was opened."""
        items, self._items = self._items, None
        direct, self._direct = self._direct, None
        if self._failure is None:
            self._failure = ClosedError("the reader was closed", journal=self.request.journal)
        if direct is not None:
            await direct.content.aclose()
        if items is not None:
            with suppress(GazetteError):
                await items.aclose()

    # ------------------------------------------------------------------ parts

    async def _read(self, size_max: int) -> bytes | None:
        if self._shows_metadata:
            self._shows_metadata = False
            return b""
        if not self._rest:
            item = await self._next()
            if item is None:
                return None
            if not isinstance(item, bytes):
                return await self._receive(item, size_max)
            if not size_max or len(item) <= size_max:  # the usual case makes no copy
                return self._deliver(item)
            self._rest = memoryview(item)
        return self._take(size_max)

    async def _next(self) -> ReadItem | None:
        """Return the next item from the broker or, behind its stream, of the fragment it named."""
        if self._direct is None:
            if self._items is None:
                header = self.header
                target = Target()
                if header is not None and header.route.members:
                    target = Target(header.route)
                self._items = self._transport.read(self.request, target)
            item = await anext(self._items, None)
            if item is not None:
                return item
            self._direct = await self._open_direct()
        if self._direct is None:
            return None
        return await self._direct.content.read() or None

    def _take(self, size_max: int) -> bytes:
        content = bytes(self._rest[: size_max or None])
        self._rest = self._rest[len(content) :]
        return self._deliver(content)

    def _deliver(self, content: bytes) -> bytes:
        self.request.offset += len(content)
        self._count(len(content))
        if self._direct is not None:
            self._direct.count_read(len(content))
        return content

    async def _receive(self, item: pb.ReadResponse, size_max: int) -> bytes:
        """Take a message other than content that continues."""
        requested = self.request.offset
        if item.status != pb.OK:
            self.request.offset = max(requested, item.offset)
            self._keep(item)
            assert self._items is not None
            async for _ in self._items:
                pass
            raise for_status(item.status, journal=self.request.journal, offset=item.offset)
        if item.offset < requested:
            raise CallError(
                f"{self.request.journal}: the broker answered a read of offset {requested} with "
                f"offset {item.offset}",
                code="INTERNAL",
                journal=self.request.journal,
                offset=item.offset,
            )
        self.request.offset = item.offset
        if item.content:
            self._rest = memoryview(item.content)
        else:
            self._keep(item)
        if item.offset > requested:
            self._shows_metadata = not item.content
            raise OffsetJumpError(self.request.journal, requested, item.offset)
        return self._take(size_max) if item.content else b""

    def _keep(self, item: pb.ReadResponse) -> None:
        """Keep the last metadata; where content is written there is a lot of it."""
        if item.HasField("header"):
            self._header = item.header
        self._response = item

    async def _open_direct(self) -> _DirectFragment | None:
        """Open the fragment that the stream which just ended named, if it did."""
        response = self.response
        if response is None or not response.fragment_url or self.request.metadata_only:
            return None
        if not self._opens_fragments:
            return None
        reader = await asyncio.to_thread(
            self._open_fragment, response.fragment_url, response.fragment, self.request.offset
        )
        end = min(response.fragment.end, self.request.end_offset or response.fragment.end)
        return _DirectFragment(reader, self.request.offset, end)


class _DirectFragment:
    """Fragment that is read straight from its store.

    Args:
        reader: its content from ``begin`` on.
        begin: offset at which the reader stands.
        end: offset at which to stop.
    """

    def __init__(self, reader: FragmentReader, begin: int, end: int) -> None:
        fragment = reader.fragment
        names = (fragment.journal, pb.CompressionCodec.Name(fragment.compression_codec))
        metrics.FRAGMENT_OPEN.labels(*names).inc()
        metrics.FRAGMENT_OPEN_BYTES.labels(*names).inc(fragment.end - fragment.begin)
        self.count_read = metrics.READ_FRAGMENT_BYTES.labels(*names).inc
        self.count_discarded = metrics.DISCARD_FRAGMENT_BYTES.labels(*names).inc
        self.count_discarded(begin - fragment.begin)
        self.content = ReadAhead(reader, begin, end)
        self.end = end
