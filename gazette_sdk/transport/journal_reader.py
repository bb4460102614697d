"""Reads of journals: one Read, reads without end, and metadata without content.

One Read (client section 5) has content from an offset on. A broker answers a read of stored content
with the fragment's URL and ends the stream, where the request says ``do_not_proxy``; the reader
then opens that URL itself, and a thread decompresses the fragment ahead of it.

Reads without end (client section 6) are begun again where the last one broke. Each begins at the
offset after what was delivered, and where the last response said that the journal is served. Once
no broker is reached there, others are asked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeAlias

from prometheus_client import Counter

from gazette_sdk.errors import (
    CallCancelledError,
    CallError,
    ClosedError,
    ConfigurationError,
    CorruptFragmentError,
    FragmentNotFoundError,
    GazetteError,
    InsufficientJournalBrokersError,
    JournalNotFoundError,
    NotJournalBrokerError,
    OffsetNotYetAvailableError,
    StoreError,
    SuspendedError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
    for_status,
)
from gazette_sdk.fragment.content import FragmentReader
from gazette_sdk.fragment.listing import open_url
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.retries import Outage, Pause, pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import ReadItem, Target

CLOCK_SKEW_S = 60
"""Fragments are searched that were stored up to this long before a time: clocks of publishers may
be ahead of those of brokers and stores."""


async def read_metadata(
    transport: Transport, journal: str, offset: int, *, begin_mod_time: int = 0
) -> pb.ReadResponse:
    """Return the first metadata of a read that does not wait for content.

    Its ``offset`` is that of the first content at the offset or after it; its ``write_head`` is
    the end of the journal. Its status is ``OK``, or ``OFFSET_NOT_YET_AVAILABLE`` if there is no
    content from the offset on.

    Args:
        transport: how to reach the journal.
        journal: its name.
        offset: where to look; -1 for the write head.
        begin_mod_time: pass over fragments stored before this Unix second.

    Raises:
        StatusError: the broker answered another status.
        CallError: the call failed.
    """
    request = pb.ReadRequest(
        journal=journal, offset=offset, metadata_only=True, begin_mod_time=begin_mod_time
    )
    async with aclosing(transport.read(request)) as responses:
        async for response in responses:
            assert isinstance(response, pb.ReadResponse)  # the request asks for no content
            if response.status not in (pb.OK, pb.OFFSET_NOT_YET_AVAILABLE):
                raise for_status(response.status, journal=journal)
            return response
    raise CallError(f"{journal}: a read ended without a response", journal=journal)


def begin_mod_time_of(since: datetime) -> int:
    """Return the least time at which fragments with messages since a time are stored."""
    return max(0, int(since.timestamp()) - CLOCK_SKEW_S)


AHEAD_BYTES_MAX = 2 << 20
"""Bytes which may wait for the reader. The thread ends its turn when there is as much, and begins
the next one when half of it is taken: a fast reader never stops it, a slow one holds no thread."""

PIECE_BYTES = 1 << 20
"""Bytes to ask for at once; the codec may give less."""


class ReadAhead:
    """Queue of pieces of a fragment's content, up to an offset. Belongs to the running event loop.

    Args:
        reader: content of the fragment from ``begin`` on; closed with this object.
        begin: journal offset at which the reader stands.
        end: journal offset at which to stop. At the fragment's own end, the reader is asked
            once more, so that it checks that its content ends there as well.
    """

    def __init__(self, reader: FragmentReader, begin: int, end: int) -> None:
        self.end = end
        self._reader = reader
        self._left = end - begin
        self._checks_end = end == reader.fragment.end
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._turn: asyncio.Task[None] | None = None
        # Shared with the thread, under the lock.
        self._lock = threading.Lock()
        self._pieces: deque[bytes] = deque()
        self._ahead_bytes = 0
        self._failure: Exception | None = None
        self._is_finished = False
        self._is_closed = False

    async def read(self) -> bytes:
        """Return the next piece; empty at the end.

        Raises:
            StoreError: the store failed, or its content is not what the fragment promises.
        """
        while True:
            with self._lock:
                piece = self._pieces.popleft() if self._pieces else b""
                self._ahead_bytes -= len(piece)
                is_finished, failure = self._is_finished, self._failure
                self._arrived.clear()
            if not is_finished and self._ahead_bytes <= AHEAD_BYTES_MAX // 2:
                self._begin_turn()
            if piece:
                return piece
            if failure is not None:  # what came before it was delivered first
                raise failure
            if is_finished:
                return b""
            await self._arrived.wait()

    async def aclose(self) -> None:
        """Close the fragment; after the turn that reads it, where one is under way."""
        with self._lock:
            self._is_closed = True
        if self._turn is None or self._turn.done():
            await asyncio.to_thread(self._reader.close)
        else:
            self._turn.add_done_callback(self._close_behind)

    def _begin_turn(self) -> None:
        if self._turn is None or self._turn.done():
            self._turn = asyncio.create_task(asyncio.to_thread(self._read_turn))
            # A reader who found nothing while the turn was ending begins the next one then.
            self._turn.add_done_callback(lambda _: self._arrived.set())

    def _read_turn(self) -> None:
        """In a thread, and one turn at a time: read until enough is ahead."""
        while True:
            with self._lock:
                if self._is_closed or self._is_finished or self._ahead_bytes >= AHEAD_BYTES_MAX:
                    return
            piece, failure = b"", None
            try:
                piece = self._read_piece()
            except Exception as error:  # noqa: BLE001 - handed to the reader, after the pieces
                failure = error
            with self._lock:
                was_empty = not self._pieces
                if piece:
                    self._pieces.append(piece)
                    self._ahead_bytes += len(piece)
                else:
                    self._is_finished, self._failure = True, failure
            if was_empty:
                self._loop.call_soon_threadsafe(self._arrived.set)

    def _read_piece(self) -> bytes:
        if self._left > 0:
            piece = self._reader.read(min(self._left, PIECE_BYTES))
            self._left -= len(piece)
            return piece
        if self._checks_end:
            self._reader.read(1)
        return b""

    def _close_behind(self, turn: asyncio.Task[None]) -> None:
        turn.get_loop().run_in_executor(None, self._reader.close)


OpenFragment: TypeAlias = Callable[[str, pb.Fragment, int], FragmentReader]
"""Opens a fragment's URL at an offset, decompressed; called in a thread."""


class OffsetJumpError(GazetteError):
    """Content between the requested offset and ``offset`` is gone; reading may continue there."""

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
        self._count = READ_BYTES.labels(request.journal).inc

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
            end of the stream. ``request.offset`` is after what was returned.

        Raises:
            OffsetJumpError: the offset moved forward over missing content; continue reading.
            StatusError: the broker ended the read with a status other than OK.
            CallError: the call broke.
            StoreError: a directly opened fragment failed.
        """
        if self._failure is not None:
            raise self._failure
        try:
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

    async def _next(self) -> ReadItem | None:
        """Return the next item from the broker or, after its stream, of the fragment it named."""
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
        FRAGMENT_OPEN.labels(*names).inc()
        FRAGMENT_OPEN_BYTES.labels(*names).inc(fragment.end - fragment.begin)
        self.count_read = READ_FRAGMENT_BYTES.labels(*names).inc
        self.count_discarded = DISCARD_FRAGMENT_BYTES.labels(*names).inc
        self.count_discarded(begin - fragment.begin)
        self.content = ReadAhead(reader, begin, end)
        self.end = end


logger = logging.getLogger(__name__)

READ_BYTES = Counter("gazette_read_bytes", "Bytes of journals delivered.", ["journal"])

FRAGMENT_OPEN = Counter("gazette_fragment_open", "Fragments opened directly.", ["journal", "codec"])
FRAGMENT_OPEN_BYTES = Counter(
    "gazette_fragment_open_bytes",
    "Uncompressed length of fragments opened directly.",
    ["journal", "codec"],
)
FRAGMENT_OPEN_CONTENT_LENGTH = Counter(
    "gazette_fragment_open_content_length",
    "Content length of fragments opened directly, where the store told it.",
    ["journal", "codec"],
)
READ_FRAGMENT_BYTES = Counter(
    "gazette_read_fragment_bytes",
    "Uncompressed bytes read of fragments opened directly, without skipped ones.",
    ["journal", "codec"],
)
DISCARD_FRAGMENT_BYTES = Counter(
    "gazette_discard_fragment_bytes",
    "Uncompressed bytes skipped in fragments opened directly, while seeking.",
    ["journal", "codec"],
)

NOT_FOUND_ATTEMPTS_MAX = 3
"""A journal that was just created may not have reached the broker yet; after this many failed
attempts it really does not exist."""

UNREACHED_MAX = 2
"""After so many attempts in a row which reached no broker, the route of the last response is given
up: the broker that it prefers may be frozen or dead."""

CORRUPT_ATTEMPTS_MAX = 3
"""A damaged fragment may be one in transit, or a good copy may be elsewhere; after this many
further attempts it really is damaged."""

GONE_ATTEMPTS_MAX = 3
"""A fragment that was replaced is found under its new name by another attempt; after this many
further attempts of a reader whose patience is limited it really is gone."""


class RetryReader:
    """Reader of a journal across broken calls, moving brokers, and fragments.

    Where the transport knows routes, stored fragments are opened straight from their store, by
    the URLs that brokers hand out; where they cannot be (``file://`` without a ``file_root``),
    brokers are asked for their content.

    Args:
        transport: how to reach the journal.
        request: what to read; ``offset`` -1 is the write head. One that says ``do_not_proxy``
            insists on direct reads.
        file_root: local directory which stands for the root of ``file://`` fragment URLs; None
            for that of the transport.
        pause: waits between attempts.
        patience_s: longest time without any progress, in seconds, after which the last failure is
            raised; None tries on until the reader is cancelled.
        new_reader: begins one read; for readers over something else than a transport.

    Raises:
        ValidationError: the request is malformed.
    """

    def __init__(
        self,
        transport: Transport,
        request: pb.ReadRequest,
        *,
        file_root: Path | None = None,
        pause: Pause = pause,
        patience_s: float | None = None,
        new_reader: Callable[[pb.ReadRequest, pb.ReadResponse | None], ByteReader] | None = None,
    ) -> None:
        rpc.validate(request)
        self.block = request.block
        self._pause = pause
        self._new_reader = new_reader or (
            lambda request, last: ByteReader(
                transport,
                request,
                last_response=last,
                file_root=file_root or transport.file_root,
                opens_fragments=self._opens_fragments,
            )
        )
        self._opens_fragments = True
        self._may_proxy = not request.do_not_proxy
        if transport.knows_routes and self._may_proxy:
            direct = pb.ReadRequest(do_not_proxy=True)
            direct.MergeFrom(request)
            request = direct
        self._reader = self._new_reader(request, None)
        self._is_broken = False
        self._cancelled = asyncio.Event()
        self._attempt = 0
        self._unreached = 0  # attempts in a row which reached no broker
        self._patience_s = patience_s
        self._failing_since: float | None = None
        self._outage = Outage(logger, f"read of {request.journal}")
        self._begun_at = request.offset  # of the read under way
        self._task: asyncio.Task[object] | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def journal(self) -> str:
        """Name of the journal, as requested."""
        return self._reader.request.journal

    @property
    def offset(self) -> int:
        """Offset after the delivered content."""
        return self._reader.request.offset

    @property
    def response(self) -> pb.ReadResponse | None:
        """Last metadata: fragment, write head and header of the content being read."""
        return self._reader.response or self._reader.hint

    def adjusted_offset(self, buffered_bytes: int) -> int:
        """Return the offset to checkpoint when the caller still holds ``buffered_bytes`` unread."""
        return self._reader.adjusted_offset(buffered_bytes)

    async def read(self, size_max: int = 0) -> bytes | None:
        """Return the next content.

        Args:
            size_max: greatest length to return; 0 for as much as came at once.

        Returns:
            Content, never empty; ``None`` once the request's ``end_offset`` is reached.

        Raises:
            OffsetJumpError: content is missing; continue reading at the new offset.
            OffsetNotYetAvailableError: the write head is reached, and ``block`` is off. A
                later read looks again.
            SuspendedError: the journal is suspended.
            JournalNotFoundError: it does not exist.
            CorruptFragmentError: a stored fragment is damaged.
            CallCancelledError: :meth:`cancel` was called.
        """
        if self._cancelled.is_set():
            raise self._cancellation()
        self._task = asyncio.current_task()
        self._is_idle.clear()
        try:
            while True:
                content = await self._attempt_read(size_max)
                if content is None or content:
                    return content
        except asyncio.CancelledError:
            task = self._task
            if self._cancelled.is_set() and task is not None and task.uncancel() == 0:
                raise self._cancellation() from None
            raise
        finally:
            self._task = None
            self._is_idle.set()

    async def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset; begins another read there where the current one cannot move.

        Raises:
            ValidationError: from the end, as a journal has none; or before offset 0.
        """
        if whence == os.SEEK_END:
            raise ValidationError(
                "a journal has no end to seek from; read offset -1 for its write head",
                kind="whence",
                journal=self.journal,
            )
        target = self.offset + offset if whence == os.SEEK_CUR else offset
        if target < 0:
            raise ValidationError(
                f"cannot seek to offset {target}", kind="invalid_offset", journal=self.journal
            )
        try:
            return await self._reader.seek(target)
        except SeekRequiresNewReaderError:
            await self._restart(target)
            return target

    async def adjusted_seek(self, offset: int, buffer: bytearray) -> None:
        """Move to an offset, for a caller with unread content in ``buffer``.

        Content is dropped from the front of the buffer where that is enough; else the buffer
        is emptied and the reader moves.
        """
        delta = offset - self.adjusted_offset(len(buffer))
        if 0 <= delta <= len(buffer):
            del buffer[:delta]
            return
        buffer.clear()
        await self.seek(offset)

    def cancel(self) -> None:
        """End reading for good; a read under way raises ``CallCancelledError``."""
        if not self._cancelled.is_set():
            self._cancelled.set()
            if self._task is not None:
                self._task.cancel()

    async def aclose(self) -> None:
        """End the read under way, and close what it opened."""
        self.cancel()
        await self._is_idle.wait()
        await self._reader.aclose()

    # ------------------------------------------------------------------ parts

    async def _attempt_read(self, size_max: int) -> bytes | None:  # noqa: C901 - one story
        """Return content, or nothing if this attempt failed; ``None`` at the wanted end."""
        end_offset = self._reader.request.end_offset
        if end_offset and self.offset >= end_offset:
            return None
        if self._is_broken:
            await self._restart(self.offset)
        self._is_broken = True  # unless it turns out otherwise; also for a caller that gives up
        try:
            content = await self._reader.read(size_max)
        except OffsetJumpError:
            self._is_broken = False
            self._attempt = 0
            raise
        except (GazetteError, OSError) as error:
            self._unreached = self._unreached + 1 if isinstance(error, UnavailableError) else 0
            if not self._mends(error) or self._is_too_late():
                self._attempt = 0
                self._failing_since = None
                raise
        else:
            self._unreached = 0
            if content is None or content:
                self._failing_since = None
            if content is not None:
                if self._outage.is_open:
                    self._outage.ended()
                self._is_broken = False
                self._attempt = 0 if content else self._attempt
                return content
            if end_offset and self.offset >= end_offset:
                return None
            if self._reader.response is not None:
                # The usual end at a hand-off, a token's expiry or a fragment's end.
                self._attempt = -1
        await self._pause(self._attempt)
        self._attempt += 1
        return b""

    def _mends(self, error: GazetteError | OSError) -> bool:
        """Return True if another attempt may succeed after ``error``."""
        if isinstance(error, OffsetNotYetAvailableError):
            return self.block
        if self._opens_fragments and self._may_proxy and _is_out_of_reach(error):
            # From now on also where a proxied stream ends early, as its broker stops.
            self._opens_fragments = self._reader.request.do_not_proxy = False
            self._attempt = -1
            return True
        if isinstance(error, SuspendedError | ClosedError | ConfigurationError):
            return False
        if self._is_at_fault(error):
            return False
        if isinstance(error, JournalNotFoundError):
            if self._reader.request.HasField("header") or self._attempt > NOT_FOUND_ATTEMPTS_MAX:
                return False
        elif isinstance(error, NotJournalBrokerError | InsufficientJournalBrokersError):
            if self._attempt > 0:
                self._outage.failed(error)
        else:
            self._outage.failed(error)
        return True

    def _is_at_fault(self, error: GazetteError | OSError) -> bool:
        """Return True if a fragment, or the credentials, are at fault, and not their transfer."""
        if isinstance(error, CorruptFragmentError):
            # Read from its middle on, no one would notice that it is damaged.
            return self.offset != self._begun_at or self._attempt >= CORRUPT_ATTEMPTS_MAX
        if isinstance(error, FragmentNotFoundError):
            return self._patience_s is not None and self._attempt >= GONE_ATTEMPTS_MAX
        # Nothing was ever read: a mistake to report, not a token that ran out.
        return isinstance(error, UnauthenticatedError) and self.response is None

    def _is_too_late(self) -> bool:
        """Return True if attempts have failed for as long as they may."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        return self._patience_s is not None and now - self._failing_since >= self._patience_s

    async def _restart(self, offset: int) -> None:
        ended = self._reader
        await ended.aclose()
        request = pb.ReadRequest()
        request.CopyFrom(ended.request)
        request.offset = offset
        self._begun_at = offset
        request.block = self.block
        last = ended.response or ended.hint
        if last is not None and self._unreached >= UNREACHED_MAX:
            last = _without_route(last)
        self._reader = self._new_reader(request, last)
        self._is_broken = False

    def _cancellation(self) -> CallCancelledError:
        return CallCancelledError(f"read of {self.journal} was cancelled", journal=self.journal)


def _without_route(response: pb.ReadResponse) -> pb.ReadResponse:
    """Return metadata without the brokers that it names."""
    copied = pb.ReadResponse()
    copied.CopyFrom(response)
    if copied.HasField("header"):
        copied.header.route.Clear()
    return copied


def _is_out_of_reach(error: GazetteError | OSError) -> bool:
    """Return True if a fragment cannot be opened from here, while brokers may be able to."""
    return isinstance(error, ConfigurationError | StoreError) and not isinstance(
        error, CorruptFragmentError
    )
