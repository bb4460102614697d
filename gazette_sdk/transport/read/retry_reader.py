"""Content of a journal without end: reads that are begun again where the last one broke.

Client section 6. Each read begins at the offset behind what was delivered, and where the last
response said that the journal is served. Once no broker is reached there, others are asked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from gazette_sdk.errors import (
    CallCancelledError,
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
)
from gazette_sdk.outage import Outage
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.transport.backoff import Pause, pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.read.reader import (
    ByteReader,
    OffsetJumpError,
    SeekRequiresNewReaderError,
)

__all__ = ["RetryReader"]

logger = logging.getLogger(__name__)

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
        """Offset behind the delivered content."""
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
            OffsetJumpError: content is missing; go on reading at the new offset.
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
            # Read from its middle on, nobody would notice that it is damaged.
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
