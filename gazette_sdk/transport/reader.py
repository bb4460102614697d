"""One Read: content of a journal from an offset, from its broker or straight from its store.

Client section 5. A broker answers a read of stored content with the fragment's URL and ends the
stream, where the request says ``do_not_proxy``; the reader then opens that URL itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import BinaryIO, TypeAlias

from gazette_sdk.errors import CallError, ClosedError, GazetteError, for_status
from gazette_sdk.fragment.remote import open_url
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import metrics
from gazette_sdk.transport.base import ReadItem, Target, Transport

__all__ = [
    "ByteReader",
    "OffsetJumpError",
    "OpenFragment",
    "SeekRequiresNewReaderError",
]

OpenFragment: TypeAlias = Callable[[str, pb.Fragment, int, str | None], BinaryIO]
"""Opens a fragment's URL at an offset, decompressed; called in a thread. The last argument is
the local root of ``file://`` URLs."""

PIECE_BYTES = 1 << 20
"""What one turn in a thread reads of a directly opened fragment: a hop to a thread costs some
50 µs, which this makes small beside decompression."""


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
    """One Read of a journal.

    Any error except :class:`OffsetJumpError` ends the reader: it is raised again by every later
    read.

    Args:
        transport: how to reach the journal.
        request: what to read. The reader works on a copy, whose ``offset`` advances.
        last_response: the last metadata of the reader before; its route is where to begin.
        file_root: local directory which stands for the root of ``file://`` fragment URLs.
        open_fragment: opens a fragment's URL.
    """

    def __init__(
        self,
        transport: Transport,
        request: pb.ReadRequest,
        *,
        last_response: pb.ReadResponse | None = None,
        file_root: str | None = None,
        open_fragment: OpenFragment = open_url,
    ) -> None:
        self.request = pb.ReadRequest()
        self.request.CopyFrom(request)
        self.response: pb.ReadResponse | None = None
        self.hint = last_response
        self._transport = transport
        self._file_root = file_root
        self._open_fragment = open_fragment
        self._items: AsyncIterator[ReadItem] | None = None
        self._direct: _DirectFragment | None = None
        self._rest = memoryview(b"")
        self._shows_metadata = False
        self._failure: Exception | None = None
        self._count = metrics.READ_BYTES.labels(request.journal).inc

    @property
    def header(self) -> pb.Header | None:
        """The header of this read or, before its first response, of the one before."""
        for response in (self.response, self.hint):
            if response is not None and response.HasField("header"):
                return response.header
        return None

    async def read(self, size_max: int = 0) -> bytes | None:
        """The next piece of content.

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
        while self.request.offset < target:
            skip = min(target - self.request.offset, len(self._rest))
            if skip:
                self._rest = self._rest[skip:]
            else:
                self._rest = memoryview(await direct.read())
                continue
            self.request.offset += skip
            direct.count_discarded(skip)
        return target

    def adjusted_offset(self, buffered_bytes: int) -> int:
        """The offset to checkpoint when the caller still holds ``buffered_bytes`` unread."""
        return self.request.offset - buffered_bytes

    async def aclose(self) -> None:
        """End the call, and close what was opened."""
        items, self._items = self._items, None
        direct, self._direct = self._direct, None
        if self._failure is None:
            self._failure = ClosedError("the reader was closed", journal=self.request.journal)
        if direct is not None:
            direct.close()
        if items is not None:
            await _close(items)

    # ------------------------------------------------------------------ parts

    async def _read(self, size_max: int) -> bytes | None:
        if self._shows_metadata:
            self._shows_metadata = False
            return b""
        if self._rest:
            return self._take(size_max)
        if self._direct is not None:
            content = await self._direct.read()
            if not content:
                return None
            self._rest = memoryview(content)
            return self._take(size_max)
        if self._items is None:
            header = self.header
            target = Target(header.route) if header is not None else Target()
            self._items = self._transport.read(self.request, target)
        item = await anext(self._items, None)
        if item is None:
            return await self._end()
        if isinstance(item, bytes):
            if not size_max or len(item) <= size_max:  # the usual case makes no copy
                self.request.offset += len(item)
                self._count(len(item))
                return item
            self._rest = memoryview(item)
            return self._take(size_max)
        return await self._receive(item, size_max)

    def _take(self, size_max: int) -> bytes:
        content = bytes(self._rest[:size_max] if size_max else self._rest)
        self._rest = self._rest[len(content) :]
        self.request.offset += len(content)
        self._count(len(content))
        if self._direct is not None:
            self._direct.count_read(len(content))
        return content

    async def _receive(self, item: pb.ReadResponse, size_max: int) -> bytes:
        """A message other than content that continues."""
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
        """Remember metadata; the header comes with the first message only."""
        if not item.HasField("header") and self.response is not None:
            if self.response.HasField("header"):
                item.header.CopyFrom(self.response.header)
        self.response = item

    async def _end(self) -> bytes | None:
        """The stream ended cleanly: go on in the fragment it named, or this is the end."""
        response = self.response
        if response is None or not response.fragment_url or self.request.metadata_only:
            return None
        file = await asyncio.to_thread(
            self._open_fragment,
            response.fragment_url,
            response.fragment,
            self.request.offset,
            self._file_root,
        )
        end = response.fragment.end
        if self.request.end_offset:
            end = min(end, self.request.end_offset)
        self._direct = _DirectFragment(file, response.fragment, self.request.offset, end)
        return await self._read(0)


class _DirectFragment:
    """A directly opened fragment, read ahead by one piece in a thread.

    Args:
        file: its content from ``begin`` on; raises if it isn't what the fragment promises.
        fragment: the fragment.
        begin: offset at which the file stands.
        end: offset at which to stop reading.
    """

    def __init__(self, file: BinaryIO, fragment: pb.Fragment, begin: int, end: int) -> None:
        labels = (fragment.journal, pb.CompressionCodec.Name(fragment.compression_codec))
        metrics.FRAGMENT_OPEN.labels(*labels).inc()
        metrics.FRAGMENT_OPEN_BYTES.labels(*labels).inc(fragment.end - fragment.begin)
        length = getattr(file, "content_length", None)
        if length is not None:
            metrics.FRAGMENT_OPEN_CONTENT_LENGTH.labels(*labels).inc(length)
        self.count_read = metrics.READ_FRAGMENT_BYTES.labels(*labels).inc
        self.count_discarded = metrics.DISCARD_FRAGMENT_BYTES.labels(*labels).inc
        self.count_discarded(begin - fragment.begin)
        self.end = end
        self._file = file
        self._stops_early = end < fragment.end
        self._left = end - begin
        self._ahead: asyncio.Task[bytes] | None = None

    async def read(self) -> bytes:
        """The next piece; empty at the end."""
        if self._ahead is None:
            self._begin_piece()
        assert self._ahead is not None
        content = await asyncio.shield(self._ahead)
        self._left -= len(content)
        if content:
            self._begin_piece()
        return content

    def _begin_piece(self) -> None:
        size = min(self._left, PIECE_BYTES)
        if size == 0 and not self._stops_early:
            size = 1  # lets the file check that it ends here
        self._ahead = asyncio.create_task(asyncio.to_thread(self._file.read, size))

    def close(self) -> None:
        """Close the file, after the piece being read in its thread."""
        if self._ahead is None or self._ahead.done():
            self._close_file()
        else:
            self._ahead.add_done_callback(lambda _: self._close_file())

    def _close_file(self) -> None:
        if self._ahead is not None and not self._ahead.cancelled():
            self._ahead.exception()  # raised to the reader, if it still wanted to know
        self._file.close()


async def _close(items: AsyncIterator[ReadItem]) -> None:
    closing = getattr(items, "aclose", None)
    if closing is not None:
        with suppress(GazetteError):
            await closing()
