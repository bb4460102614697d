"""Reads journals ahead of a reader's consumer, on the SDK's event loop.

One task per journal moves content, as it comes, into a mailbox; the consumer cuts and decodes it
in its own thread or coroutine. What lies in the mailbox is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    GazetteError,
    JournalNotFoundError,
    OffsetNotYetAvailableError,
    SuspendedError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.message.mailbox import Mailbox
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, value_of
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.selectors import journal_selector
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.listing import WatchedList, list_journals
from gazette_sdk.transport.loop import sdk_loop
from gazette_sdk.transport.reader import OffsetJumpError
from gazette_sdk.transport.retry_reader import RetryReader

__all__ = [
    "Content",
    "Ended",
    "Failed",
    "Finished",
    "Item",
    "Jumped",
    "Opened",
    "Plan",
    "Prefetch",
    "Vanished",
]

_log = logging.getLogger(__name__)

PREFETCH_BYTES_MAX = 8 << 20
"""Content of all journals which waits for the consumer: enough to keep it busy during a few
round trips, and little beside what it decodes."""

CONCURRENT_READS_MAX = 16
"""Journals read at once where reading ends at the write heads. A reader that follows write heads
has a read under way for every journal."""

LISTING_TIMEOUT_S = 30.0
"""Bound of the wait for the first listing."""

PATIENCE_S = 30.0
"""Where reading ends at the write heads, a journal whose reads fail for so long is an error.
A reader that follows write heads tries on."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A journal is about to be read.

    Attributes:
        journal: its name, as content is to be known under.
        content_type: its ``content-type`` label.
        offset: where reading begins; -1 for the write head.
        continues: content goes on where it ended before the journal vanished for a while.
    """

    journal: str
    content_type: str
    offset: int
    continues: bool


@dataclass(frozen=True, slots=True)
class Content:
    """Content which continues where the journal's last item ended."""

    journal: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Jumped:
    """The journal's next content begins at this offset."""

    journal: str
    offset: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The journal was read to its write head or the wanted end, at this offset."""

    journal: str
    offset: int


@dataclass(frozen=True, slots=True)
class Vanished:
    """The journal was deleted, or does not match the selector any more."""

    journal: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Reading failed. Without a journal, all of it."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more comes."""


Item: TypeAlias = Opened | Content | Jumped | Ended | Vanished | Failed | Finished
"""What the consumer takes from the mailbox."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to read.

    Attributes:
        selector: label selector of the journals; None where a name alone is meant.
        name: name of a journal, which is meant if it exists.
        text: selector or name as the user gave it, for errors.
        block: follow the write heads, and the listing.
        begin: offset at which journals begin that ``offsets`` doesn't name; -1 is the head.
        offsets: where to begin, by journal.
        end_offsets: where to end, by journal.
    """

    selector: pb.LabelSelector | None
    name: str | None
    text: str
    block: bool
    begin: int
    offsets: Mapping[str, int]
    end_offsets: Mapping[str, int]


class Prefetch:
    """Reads what a plan says, until it is stopped.

    Args:
        plan: what to read.
        transport: how to reach the journals; None connects to ``GAZETTE_ADDRESS``, and closes
            that connection at the end.

    Attributes:
        mailbox: where items arrive.
    """

    def __init__(self, plan: Plan, transport: Transport | None) -> None:
        self.mailbox: Mailbox[Item] = Mailbox()
        self._plan = plan
        self._owned = transport is None
        self._transport = connect() if transport is None else transport
        self._loop = sdk_loop()
        self._queued_bytes = 0
        self._has_room = asyncio.Event()
        self._slots = asyncio.Semaphore(CONCURRENT_READS_MAX)
        self._task: asyncio.Task[None] | None = None
        self._stops = False
        self._left_at: dict[tuple[str, int], int] = {}
        self._loop.call_soon_threadsafe(self._start)

    # ------------------------------------------------------ for the consumer

    def drop(self, item: Item) -> None:
        """The consumer is done with the mailbox's first item."""
        self.mailbox.drop()
        if isinstance(item, Content):
            # Once per chunk of content, which is many messages.
            with contextlib.suppress(RuntimeError):  # the loop has ended, and reading with it
                self._loop.call_soon_threadsafe(self._release, len(item.content))

    def stop(self) -> None:
        """End reading, from any thread; the mailbox then ends with ``Finished``."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop)

    async def stopped(self) -> None:
        """Stop, and wait until everything is closed. On the loop."""
        self._stop()
        if self._task is not None:
            await asyncio.wait([self._task])

    # ------------------------------------------------------------- the loop

    def _start(self) -> None:
        if not self._stops:
            self._task = self._loop.create_task(self._run(), name=f"reader of {self._plan.text}")

    def _stop(self) -> None:
        self._stops = True
        if self._task is None:
            self.mailbox.put(Finished())
        else:
            self._task.cancel()

    def _release(self, length_bytes: int) -> None:
        self._queued_bytes -= length_bytes
        if self._queued_bytes < PREFETCH_BYTES_MAX:
            self._has_room.set()

    async def _run(self) -> None:
        try:
            await self._read_all()
        except GazetteError as error:
            self.mailbox.put(Failed(error))
        except Exception as error:  # noqa: BLE001 - the task's boundary: the consumer raises it
            _log.exception("reading %s failed", self._plan.text)
            self.mailbox.put(Failed(error))
        finally:
            self.mailbox.put(Finished())
            if self._owned:
                await self._transport.aclose()

    async def _read_all(self) -> None:
        selector = self._plan.selector
        if self._plan.name is not None:
            found = await self._list(journal_selector(strip_meta(self._plan.name)))
            if found or selector is None:
                if not found:
                    raise JournalNotFoundError(journal=self._plan.text)
                selector = journal_selector(strip_meta(self._plan.name))
        assert selector is not None
        if self._plan.block:
            await self._follow(selector)
        else:
            await self._read_once(selector)

    async def _list(self, selector: pb.LabelSelector) -> list[pb.ListResponse.Journal]:
        try:
            async with asyncio.timeout(LISTING_TIMEOUT_S):
                return list((await list_journals(self._transport, selector)).journals)
        except TimeoutError:
            raise self._no_listing(None) from None

    def _no_listing(self, cause: GazetteError | None) -> UnavailableError:
        return UnavailableError(
            f"the journals of {self._plan.text!r} could not be listed within"
            f" {LISTING_TIMEOUT_S:g} s: {cause or 'no answer'}; check the address of the broker"
            " (GAZETTE_ADDRESS, or transport=)"
        )

    async def _read_once(self, selector: pb.LabelSelector) -> None:
        journals = await self._list(selector)
        if not journals:
            raise JournalNotFoundError(f"no journal matches {self._plan.text!r}")
        async with asyncio.TaskGroup() as group:
            for journal in journals:
                group.create_task(self._read_in_turn(journal))

    async def _read_in_turn(self, journal: pb.ListResponse.Journal) -> None:
        async with self._slots:
            await self._read(journal, is_new=False)

    async def _follow(self, selector: pb.LabelSelector) -> None:
        """Read the selector's journals as they come and go."""
        async with WatchedList(self._transport, selector) as watched:
            await self._first_listing(watched)
            reads: dict[str, asyncio.Task[None]] = {}
            is_new = False
            async with asyncio.TaskGroup() as group:
                while True:
                    assert watched.snapshot is not None
                    listed = {each.spec.name: each for each in watched.snapshot.journals}
                    for name in sorted(reads.keys() - listed.keys()):
                        reads.pop(name).cancel()
                        self.mailbox.put(Vanished(self._named(name)))
                    for name in sorted(listed.keys() - reads.keys()):
                        read = self._read(listed[name], is_new=is_new)
                        reads[name] = group.create_task(read)
                    is_new = True
                    # Interruptions are waited out, and logged, by the watch itself.
                    with contextlib.suppress(GazetteError):
                        await watched.changed()
                    if isinstance(watched.error, ClosedError | ConfigurationError):
                        # The watch has ended, and so do all reads: the transport was closed.
                        self.mailbox.put(Failed(watched.error))
                        return

    async def _first_listing(self, watched: WatchedList) -> None:
        """Wait for it: at the begin, unlike later, an unreachable broker is an error."""
        try:
            async with asyncio.timeout(LISTING_TIMEOUT_S):
                while watched.snapshot is None:
                    try:
                        await watched.changed()
                    except (
                        ClosedError,
                        ConfigurationError,
                        UnauthenticatedError,
                        ValidationError,
                    ):
                        raise
                    except GazetteError:
                        continue
        except TimeoutError:
            raise self._no_listing(watched.error) from watched.error

    def _named(self, name: str) -> str:
        """The name under which content is known: with the metadata it was asked for."""
        asked = self._plan.name
        return asked if asked is not None and strip_meta(asked) == name else name

    async def _read(self, journal: pb.ListResponse.Journal, *, is_new: bool) -> None:
        """Read one journal to its end, or without end.

        Args:
            journal: the journal, as listed.
            is_new: it was not there when reading began, and is read from its begin.
        """
        name = self._named(journal.spec.name)
        offset = self._plan.offsets.get(name, 0 if is_new else self._plan.begin)
        left_at = self._left_at.get((name, journal.create_revision))
        continues = left_at is not None
        if left_at is not None:
            offset = left_at
        end_offset = self._plan.end_offsets.get(name, 0)
        content_type = value_of(journal.spec.labels, CONTENT_TYPE)
        self.mailbox.put(Opened(name, content_type, offset, continues))
        if name in self._plan.end_offsets and end_offset <= offset:
            # A read that ends at 0 would have no end, and there is nothing to read anyway.
            self.mailbox.put(Ended(name, offset))
            return
        attempt = 0
        while True:
            request = pb.ReadRequest(
                journal=name, offset=offset, block=self._plan.block, end_offset=end_offset
            )
            try:
                reader = RetryReader(
                    self._transport, request, patience_s=None if self._plan.block else PATIENCE_S
                )
                try:
                    await self._move(reader, name)
                finally:
                    offset = reader.offset
                    self._left_at[name, journal.create_revision] = offset
                    await reader.aclose()
            except (SuspendedError, JournalNotFoundError) as error:
                if not self._plan.block:
                    self.mailbox.put(Failed(error))
                    return
                # An append resumes it; or the listing, which ends this task, lags behind.
                await pause(attempt)
                attempt += 1
            except GazetteError as error:
                self.mailbox.put(Failed(error))
                return
            else:
                return

    async def _move(self, reader: RetryReader, name: str) -> None:
        """Move content to the mailbox until the journal's end."""
        while True:
            while self._queued_bytes >= PREFETCH_BYTES_MAX:
                self._has_room.clear()
                await self._has_room.wait()
            content: bytes | None
            try:
                content = await reader.read()
            except OffsetJumpError:
                self.mailbox.put(Jumped(name, reader.offset))
                continue
            except OffsetNotYetAvailableError:
                head = reader.response.write_head if reader.response is not None else 0
                if reader.offset < head:
                    raise OffsetNotYetAvailableError(
                        f"its content from offset {reader.offset} on is in no store, although it"
                        f" goes on to {head}: a fragment is on its way, or was removed; to pass"
                        " over it, list `gazctl journals fragments` and give offsets= behind it",
                        journal=name,
                        offset=reader.offset,
                    ) from None
                content = None
            except SuspendedError:
                if self._plan.block:
                    raise
                content = None  # it holds nothing that could be read
            if content is None:
                self.mailbox.put(Ended(name, reader.offset))
                return
            self._queued_bytes += len(content)
            self.mailbox.put(Content(name, content))
