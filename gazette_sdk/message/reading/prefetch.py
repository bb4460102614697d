"""Reads journals ahead of a reader's consumer, on the SDK's event loop.

One task per journal moves content, as it comes, into a mailbox; the consumer cuts and decodes it
in its own thread or coroutine. What lies in the mailbox is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

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
from gazette_sdk.message.reading.flow import (
    Ended,
    Failed,
    Finished,
    Flow,
    Jumped,
    Opened,
    Vanished,
)
from gazette_sdk.message.reading.plan import Plan
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, value_of
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.selectors import journal_selector
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.listing import WatchedList, list_journals
from gazette_sdk.transport.read.reader import OffsetJumpError
from gazette_sdk.transport.read.retry_reader import RetryReader

__all__ = ["Prefetch", "Replay"]

_log = logging.getLogger(__name__)

PREFETCH_BYTES_MAX = 8 << 20
"""Content of all journals which waits for the consumer: enough to keep it busy during a few
round trips, and little beside what it decodes."""

REPLAY_BYTES_MAX = 2 << 20
"""As above, for a part of a journal which is read again."""

CONCURRENT_READS_MAX = 16
"""Journals read at once where reading ends at the write heads. A reader that follows write heads
has a read under way for every journal."""

LISTING_TIMEOUT_S = 30.0
"""Bound of the wait for the first listing."""

PATIENCE_S = 30.0
"""Where reading ends at the write heads, a journal whose reads fail for so long is an error.
A reader that follows write heads tries on."""


class Replay(Flow):
    """A part of a journal which is read again."""

    def __init__(self) -> None:
        super().__init__(REPLAY_BYTES_MAX)
        self.task: asyncio.Task[None] | None = None


class Prefetch(Flow):
    """Reads what a plan says, until it is stopped.

    Args:
        plan: what to read.
        transport: how to reach the journals; None connects to ``GAZETTE_ADDRESS``, and closes
            that connection at the end.

    Attributes:
        mailbox: where items arrive.
        is_owner: the connection is its own: at the end it stays open, for parts to be read again,
            until :meth:`stopped`.
    """

    def __init__(self, plan: Plan, transport: Transport | None) -> None:
        super().__init__(PREFETCH_BYTES_MAX, plan.piece_bytes_max)
        self.is_owner = transport is None
        self._plan = plan
        self._transport = connect() if transport is None else transport
        self._slots = asyncio.Semaphore(CONCURRENT_READS_MAX)
        self._task: asyncio.Task[None] | None = None
        self._stops = False
        self._left_at: dict[tuple[str, int], int] = {}
        self._revisions = dict(plan.revisions)
        self._replays: set[asyncio.Task[None]] = set()
        self._loop.call_soon_threadsafe(self._start)

    # ------------------------------------------------------ for the consumer

    def replay(self, journal: str, begin: int, end: int) -> Replay:
        """Read a part of a journal again, beside everything else.

        Args:
            journal: its name, as content is known under.
            begin: offset of the part's first byte.
            end: offset behind its last byte.

        Returns:
            A flow of ``Content``, ``Jumped`` and at last ``Ended``, ``Failed`` or ``Finished``.
        """
        replay = Replay()
        self._loop.call_soon_threadsafe(self._start_replay, replay, journal, begin, end)
        return replay

    def stop(self) -> None:
        """End reading, from any thread; the mailbox then ends with ``Finished``."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop)

    async def stopped(self) -> None:
        """Stop, and wait until everything is closed. On the loop."""
        self._stop()
        tasks = [*self._replays, *([] if self._task is None else [self._task])]
        if tasks:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------- the loop

    def _start(self) -> None:
        if not self._stops:
            self._task = self._loop.create_task(self._run(), name=f"reader of {self._plan.text}")

    def _stop(self) -> None:
        self._stops = True
        for replay in self._replays:
            replay.cancel()
        if self._task is None:
            self.put(Finished())
        else:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            try:
                await self._read_all()
            except GazetteError as error:
                self.put(Failed(error))
            except Exception as error:  # noqa: BLE001 - the task's boundary: the consumer raises it
                _log.exception("reading %s failed", self._plan.text)
                self.put(Failed(error))
            finally:
                self.put(Finished())
            if self.is_owner:
                # Parts may have to be read again, until the consumer has taken everything.
                await self._loop.create_future()
        finally:
            if self.is_owner:
                await self._transport.aclose()

    def _start_replay(self, replay: Replay, journal: str, begin: int, end: int) -> None:
        if self._stops:
            replay.put(Finished())
            return
        task = self._loop.create_task(
            self._run_replay(replay, journal, begin, end), name=f"replay of {journal}"
        )
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)

    async def _run_replay(self, replay: Replay, journal: str, begin: int, end: int) -> None:
        request = pb.ReadRequest(
            journal=journal, offset=begin, block=self._plan.block, end_offset=end
        )
        try:
            reader = RetryReader(self._transport, request, patience_s=PATIENCE_S)
            try:
                await self._move(reader, journal, replay)
            finally:
                await reader.aclose()
        except Exception as error:  # noqa: BLE001 - the task's boundary: the consumer raises it
            error.add_note(
                f"while offsets {begin} to {end} of {journal} were read again: a transaction which"
                " was acknowledged began there"
            )
            replay.put(Failed(error))
        finally:
            replay.put(Finished())

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
            reads: dict[tuple[str, int], asyncio.Task[None]] = {}
            is_new = False
            async with asyncio.TaskGroup() as group:
                while True:
                    assert watched.snapshot is not None
                    listed = {
                        (each.spec.name, each.create_revision): each
                        for each in watched.snapshot.journals
                    }
                    for key in sorted(reads.keys() - listed.keys()):
                        ended = reads.pop(key)
                        ended.cancel()
                        await asyncio.wait([ended])
                        self.put(Vanished(self._named(key[0])))
                    for key in sorted(listed.keys() - reads.keys()):
                        read = self._read(listed[key], is_new=is_new)
                        reads[key] = group.create_task(read)
                    is_new = True
                    # Interruptions are waited out, and logged, by the watch itself.
                    with contextlib.suppress(GazetteError):
                        await watched.changed()
                    if isinstance(watched.error, ClosedError | ConfigurationError):
                        # The watch has ended, and so do all reads: the transport was closed.
                        self.put(Failed(watched.error))
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
        revision = journal.create_revision
        offset = self._plan.offsets.get(name, 0 if is_new else self._plan.begin)
        if self._revisions.setdefault(name, revision) != revision:
            # Another journal of that name was read before.
            self._revisions[name] = revision
            offset = 0
        left_at = self._left_at.get((name, revision))
        continues = left_at is not None
        if left_at is not None:
            offset = left_at
        end_offset = self._plan.end_offsets.get(name, 0)
        content_type = value_of(journal.spec.labels, CONTENT_TYPE)
        self.put(Opened(name, content_type, offset, continues, revision))
        if name in self._plan.end_offsets and end_offset <= offset:
            # A read that ends at 0 would have no end, and there is nothing to read anyway.
            self.put(Ended(name, offset))
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
                    await self._move(reader, name, self)
                finally:
                    offset = reader.offset
                    self._left_at[name, revision] = offset
                    await reader.aclose()
            except (SuspendedError, JournalNotFoundError) as error:
                if not self._plan.block:
                    self.put(Failed(error))
                    return
                # An append resumes it; or the listing, which ends this task, lags behind.
                await pause(attempt)
                attempt += 1
            except GazetteError as error:
                self.put(Failed(error))
                return
            else:
                return

    async def _move(self, reader: RetryReader, name: str, flow: Flow) -> None:
        """Move content to a flow until the journal's end."""
        while True:
            await flow.room()
            content: bytes | None
            try:
                content = await reader.read()
            except OffsetJumpError:
                flow.put(Jumped(name, reader.offset))
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
                flow.put(Ended(name, reader.offset))
                return
            if content:
                flow.put_content(name, content)
