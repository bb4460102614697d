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
from gazette_sdk.protocol.names import split_meta, strip_meta
from gazette_sdk.protocol.selectors import journal_selector
from gazette_sdk.transport.backoff import DELAY_S_MAX
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


@dataclass(frozen=True, slots=True)
class Opened:
    """A journal is about to be read.

    Attributes:
        journal: its name, as content is to be known under.
        content_type: its ``content-type`` label.
        offset: where reading begins; -1 for the write head.
    """

    journal: str
    content_type: str
    offset: int


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
        self._loop.call_soon_threadsafe(self._start)

    # ------------------------------------------------------ for the consumer

    def taken(self, item: Item) -> None:
        """The consumer has taken an item, and is about to work on it."""
        if isinstance(item, Content):
            # Once per chunk of content, which is many messages.
            with contextlib.suppress(RuntimeError):
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
        except Exception as error:  # the outermost boundary: the consumer raises it
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

    async def _list(self, selector: pb.LabelSelector) -> list[pb.JournalSpec]:
        try:
            async with asyncio.timeout(LISTING_TIMEOUT_S):
                listing = await list_journals(self._transport, selector)
        except TimeoutError:
            raise UnavailableError(
                f"the journals of {self._plan.text!r} could not be listed within"
                f" {LISTING_TIMEOUT_S:g} s; check the address of the broker (GAZETTE_ADDRESS, or"
                " transport=)"
            ) from None
        return [journal.spec for journal in listing.journals]

    async def _read_once(self, selector: pb.LabelSelector) -> None:
        specs = await self._list(selector)
        if not specs:
            raise JournalNotFoundError(f"no journal matches {self._plan.text!r}")
        async with asyncio.TaskGroup() as group:
            for spec in specs:
                group.create_task(self._read_in_turn(spec))

    async def _read_in_turn(self, spec: pb.JournalSpec) -> None:
        async with self._slots:
            await self._read(spec, appeared=False)

    async def _follow(self, selector: pb.LabelSelector) -> None:
        """Read the selector's journals as they come and go."""
        reads: dict[str, asyncio.Task[None]] = {}
        seen_any = False
        async with WatchedList(self._transport, selector) as watched, asyncio.TaskGroup() as group:
            while True:
                try:
                    # An unreachable broker is an error at the begin, and waited out later.
                    async with asyncio.timeout(None if seen_any else LISTING_TIMEOUT_S):
                        await watched.changed()
                except (UnauthenticatedError, ValidationError):
                    if not seen_any:
                        raise
                    continue
                except TimeoutError:
                    raise self._no_listing(watched.error) from watched.error
                except GazetteError:
                    continue  # it is tried again, and logged, by the watch
                assert watched.snapshot is not None
                listed = {each.spec.name: each.spec for each in watched.snapshot.journals}
                for name in reads.keys() - listed.keys():
                    reads.pop(name).cancel()
                    self.mailbox.put(Vanished(self._named(name)))
                for name in listed.keys() - reads.keys():
                    read = self._read(listed[name], appeared=seen_any)
                    reads[name] = group.create_task(read)
                seen_any = True

    def _no_listing(self, cause: GazetteError | None) -> UnavailableError:
        return UnavailableError(
            f"the journals of {self._plan.text!r} could not be listed within"
            f" {LISTING_TIMEOUT_S:g} s: {cause or 'no answer'}; check the address of the broker"
            " (GAZETTE_ADDRESS, or transport=)"
        )

    def _named(self, name: str) -> str:
        """The name under which content is known: with the metadata it was asked for."""
        asked = self._plan.name
        return asked if asked is not None and split_meta(asked)[0] == name else name

    async def _read(self, spec: pb.JournalSpec, *, appeared: bool) -> None:
        """Read one journal to its end, or without end.

        Args:
            spec: its spec.
            appeared: it was not there when reading began: all its content is new.
        """
        name = self._named(spec.name)
        offset = self._plan.offsets.get(name, 0 if appeared else self._plan.begin)
        end_offset = self._plan.end_offsets.get(name, 0)
        self.mailbox.put(Opened(name, value_of(spec.labels, CONTENT_TYPE), offset))
        if name in self._plan.end_offsets and end_offset <= offset:
            # A read that ends at 0 would have no end, and there is nothing to read anyway.
            self.mailbox.put(Ended(name, offset))
            return
        request = pb.ReadRequest(
            journal=name, offset=offset, block=self._plan.block, end_offset=end_offset
        )
        try:
            reader = RetryReader(self._transport, request)
            try:
                await self._move(reader, name)
            finally:
                await reader.aclose()
        except JournalNotFoundError as error:
            if self._plan.block:
                self.mailbox.put(Vanished(name))
            else:
                self.mailbox.put(Failed(error))
        except GazetteError as error:
            self.mailbox.put(Failed(error))

    async def _move(self, reader: RetryReader, name: str) -> None:
        """Move content to the mailbox until the journal's end."""
        while True:
            while self._queued_bytes >= PREFETCH_BYTES_MAX:
                self._has_room.clear()
                await self._has_room.wait()
            try:
                content = await reader.read()
            except OffsetJumpError:
                self.mailbox.put(Jumped(name, reader.offset))
                continue
            except OffsetNotYetAvailableError:
                content = None
            except SuspendedError:
                # It holds nothing to read until an append resumes it.
                content = None
                if self._plan.block:
                    await asyncio.sleep(DELAY_S_MAX)
                    continue
            if content is None:
                self.mailbox.put(Ended(name, reader.offset))
                return
            self._queued_bytes += len(content)
            self.mailbox.put(Content(name, content))
