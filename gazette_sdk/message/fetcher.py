"""Coroutines that fetch the content of journals ahead of a reader's consumer.

One task per journal moves content into a bounded queue. The consumer takes it from there, and
cuts, decodes and sequences it in its own thread or coroutine.
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
from gazette_sdk.message.plan import (
    ContentQueue,
    Ended,
    Failed,
    Finished,
    Jumped,
    Opened,
    Plan,
    Positions,
)
from gazette_sdk.outage import Outage
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, journal_selector, topic_hint, value_of
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import OffsetJumpError, RetryReader
from gazette_sdk.transport.listing import NO_ANSWER, WatchedList, list_journals
from gazette_sdk.transport.loop import home_loop, is_running, sdk_loop

_log = logging.getLogger(__name__)

AHEAD_BYTES_MAX = 8 << 20
"""Limit of the content of all journals that waits for the consumer: enough to keep it busy during
a few round trips, and little beside what it decodes."""

REPLAY_BYTES_MAX = 2 << 20
"""As above, for a range of a journal that is read again."""

CONCURRENT_READS_MAX = 16
"""Limit of journals read at once where reading ends at the write heads. A reader that follows
write heads has a read under way for every journal."""

LISTING_TIMEOUT_S = 30.0
"""Limit of the wait for the first listing."""

FAILING_MAX_S = 30.0
"""A journal whose reads fail for so long is an error, if reading ends at the write heads.
A reader that follows write heads tries again without end."""


def reading_loop(transport: Transport, *, blocks: bool) -> asyncio.AbstractEventLoop:
    """Return the event loop on which journals are fetched: the only place that chooses it.

    Args:
        transport: how to reach the journals.
        blocks: plain code iterates, which also happens where a loop runs (notebooks).
    """
    if blocks:
        return transport.loop or sdk_loop()
    return home_loop(transport.loop)


class Fetcher:
    """Fetches the journals of a plan, until it is stopped.

    Args:
        plan: what to read.
        transport: how to reach the journals.
        loop: event loop on which it fetches, see :func:`reading_loop`.
        owns_transport: the transport is closed by :meth:`close`, and not before: ranges may have
            to be read again.

    Attributes:
        queue: queue of what was fetched.
        owns_transport: the transport is its own.
        write_heads: by journal, the write head as the last answer of a broker told it.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        owns_transport: bool = False,
    ) -> None:
        self.owns_transport = owns_transport
        self.write_heads: dict[str, int] = {}
        self._plan = plan
        self.loop = loop
        self._transport = transport
        self.queue = ContentQueue(self.loop, AHEAD_BYTES_MAX, plan.item_bytes_max)
        self._slots = asyncio.Semaphore(CONCURRENT_READS_MAX)
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._positions = Positions(plan, transport)
        self._replays: set[asyncio.Task[None]] = set()
        self.loop.call_soon_threadsafe(self._start)

    # --------------------------------------------------------------- any thread

    def replay(self, journal: str, begin: int, end: int) -> ContentQueue:
        """Read a range of a journal again, beside everything else.

        Args:
            journal: name of the journal, as in its items.
            begin: offset of the first byte.
            end: offset behind the last byte.

        Returns:
            A queue of ``Content`` and ``Jumped``, then ``Ended`` or ``Failed``, then
            ``Finished``.
        """
        queue = ContentQueue(self.loop, REPLAY_BYTES_MAX)
        self.loop.call_soon_threadsafe(self._start_replay, queue, journal, begin, end)
        return queue

    def stop(self) -> None:
        """End all reads, without waiting for that. The queue then ends with ``Finished``."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and ended the reads
            self.loop.call_soon_threadsafe(self._stop)

    def close(self) -> None:
        """End all reads, and wait until everything is closed, unless that blocked the loop."""
        if is_running(self.loop) or not self.loop.is_running():
            self.stop()
        else:
            asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()

    async def aclose(self) -> None:
        """End all reads, and wait until everything is closed, in a coroutine of any loop."""
        if is_running(self.loop):
            await self._close()
        elif self.loop.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(), self.loop))

    # ------------------------------------------------------------- the loop

    def _start(self) -> None:
        if not self._is_stopped:
            self._task = self.loop.create_task(self._run(), name=f"reader of {self._plan.text}")

    def _stop(self) -> None:
        self._is_stopped = True
        for replay in self._replays:
            replay.cancel()
        if self._task is None:
            self.queue.put(Finished())
        else:
            self._task.cancel()

    async def _close(self) -> None:
        self._stop()
        tasks = [*self._replays, *([] if self._task is None else [self._task])]
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self) -> None:
        try:
            try:
                await self._fetch()
            except asyncio.CancelledError:
                if not self._is_stopped:
                    self.queue.put(Failed(_loop_closed()))
                raise
            except GazetteError as error:
                self.queue.put(Failed(error))
            except Exception as error:  # noqa: BLE001 - the task's boundary: the consumer raises it
                _log.exception("reading %s failed", self._plan.text)
                self.queue.put(Failed(error))
            finally:
                self.queue.put(Finished())
            if self.owns_transport:
                # Ranges may have to be read again, until the consumer has taken everything.
                await self.loop.create_future()
        finally:
            if self.owns_transport:
                await self._transport.aclose()

    def _start_replay(self, queue: ContentQueue, journal: str, begin: int, end: int) -> None:
        if self._is_stopped:
            queue.put(Finished())
            return
        task = self.loop.create_task(
            self._run_replay(queue, journal, begin, end), name=f"replay of {journal}"
        )
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)

    async def _run_replay(self, queue: ContentQueue, journal: str, begin: int, end: int) -> None:
        request = pb.ReadRequest(
            journal=journal, offset=begin, block=self._plan.block, end_offset=end
        )
        try:
            reader = RetryReader(self._transport, request, patience_s=FAILING_MAX_S)
            try:
                await self._move(reader, journal, queue)
            finally:
                await reader.aclose()
        except Exception as error:  # noqa: BLE001 - the task's boundary: the consumer raises it
            error.add_note(
                f"while offsets {begin} to {end} of {journal} were read again: a transaction which"
                " was acknowledged began there"
            )
            queue.put(Failed(error))
        finally:
            queue.put(Finished())

    # ---------------------------------------------------------------- listings

    async def _fetch(self) -> None:
        selector = self._plan.selector
        if self._plan.names:
            named = journal_selector(*self._plan.names)
            is_patient = self._plan.is_fixed and self._plan.block
            listed = await (self._list_patiently(named) if is_patient else self._list(named))
            found = {each.spec.name: each for each in listed}
            missing = [name for name in self._plan.names if strip_meta(name) not in found]
            if missing and selector is None:
                raise JournalNotFoundError(journal=missing[0])
            if self._plan.is_fixed:
                await self._fetch_all(
                    [(found[strip_meta(name)], name) for name in self._plan.names]
                )
                return
            if not missing:
                selector = named
        assert selector is not None
        if self._plan.block:
            await self._follow(selector)
        else:
            await self._fetch_to_heads(selector)

    async def _list(self, selector: pb.LabelSelector) -> list[pb.ListResponse.Journal]:
        try:
            async with asyncio.timeout(LISTING_TIMEOUT_S):
                return list((await list_journals(self._transport, selector)).journals)
        except TimeoutError:
            raise self._no_listing(None) from None

    async def _list_patiently(self, selector: pb.LabelSelector) -> list[pb.ListResponse.Journal]:
        """List journals, trying again without end while no broker can be reached."""
        outage = Outage(_log, f"listing {self._plan.text}")
        attempt = 0
        while True:
            try:
                listed = await self._list(selector)
            except NO_ANSWER as error:
                outage.failed(error)
            else:
                outage.ended()
                return listed
            await pause(attempt)
            attempt += 1

    def _no_listing(self, cause: GazetteError | None) -> UnavailableError:
        return UnavailableError(
            f"the journals of {self._plan.text!r} could not be listed within"
            f" {LISTING_TIMEOUT_S:g} s: {cause or 'no answer'}; check the address of the broker"
            " (GAZETTE_ADDRESS, or transport=)"
        )

    async def _fetch_to_heads(self, selector: pb.LabelSelector) -> None:
        """Fetch the journals of a selector up to their write heads."""
        journals = await self._list(selector)
        if not journals:
            text = self._plan.text
            raise JournalNotFoundError(f"no journal matches {text!r}{topic_hint(text)}")
        await self._fetch_all([(journal, self._asked(journal)) for journal in journals])

    async def _fetch_all(self, journals: list[tuple[pb.ListResponse.Journal, str]]) -> None:
        """Fetch journals, each under a name, to their ends: some at once, if they have any."""
        slots = contextlib.nullcontext() if self._plan.block else self._slots

        async def fetch(journal: pb.ListResponse.Journal, name: str) -> None:
            async with slots:
                await self._fetch_journal(journal, name, is_new=False)

        async with asyncio.TaskGroup() as group:
            for journal, name in journals:
                group.create_task(fetch(journal, name))

    def _asked(self, journal: pb.ListResponse.Journal) -> str:
        """Return the name of a journal, with the metadata that the user gave."""
        name = journal.spec.name
        return next((asked for asked in self._plan.names if strip_meta(asked) == name), name)

    async def _follow(self, selector: pb.LabelSelector) -> None:
        """Fetch the journals of a selector as they are created and deleted."""
        async with WatchedList(self._transport, selector) as watched:
            await self._first_listing(watched)
            if watched.snapshot is not None and not watched.snapshot.journals:
                _log.warning(
                    "no journal matches %s; the reader waits for one: create it, or check the"
                    " selector and the address of the broker%s",
                    self._plan.text,
                    topic_hint(self._plan.text),
                )
            fetches: dict[tuple[str, int], asyncio.Task[None]] = {}
            is_new = False
            async with asyncio.TaskGroup() as group:
                while True:
                    assert watched.snapshot is not None
                    listed = {
                        (each.spec.name, each.create_revision): each
                        for each in watched.snapshot.journals
                    }
                    for key in sorted(fetches.keys() - listed.keys()):
                        ended = fetches.pop(key)
                        ended.cancel()
                        await asyncio.wait([ended])
                    for key in sorted(listed.keys() - fetches.keys()):
                        journal = listed[key]
                        fetch = self._fetch_journal(journal, self._asked(journal), is_new=is_new)
                        fetches[key] = group.create_task(fetch)
                    is_new = True
                    # The watch itself tries again after an error, and logs it.
                    with contextlib.suppress(GazetteError):
                        await watched.changed()
                    if isinstance(watched.error, ClosedError | ConfigurationError):
                        # The transport was closed, so that the watch and all reads have ended.
                        self.queue.put(Failed(watched.error))
                        return

    async def _first_listing(self, watched: WatchedList) -> None:
        """Wait for the first listing. Unlike later, an unreachable broker is an error."""
        try:
            async with asyncio.timeout(LISTING_TIMEOUT_S):
                while watched.snapshot is None:
                    try:
                        await watched.changed()
                    except (
                        ClosedError,
                        ConfigurationError,
                        UnauthenticatedError,
                        UnavailableError,
                        ValidationError,
                    ):
                        raise
                    except GazetteError:
                        continue
        except TimeoutError:
            raise self._no_listing(watched.error) from watched.error

    # ------------------------------------------------------------- one journal

    async def _fetch_journal(
        self, journal: pb.ListResponse.Journal, name: str, *, is_new: bool
    ) -> None:
        """Fetch one journal to its end, or without end.

        Args:
            journal: the journal, as listed.
            name: its name, with metadata.
            is_new: True if it was created after reading began: it is read from its begin.
        """
        revision = journal.create_revision
        try:
            start = await self._positions.start(name, revision, is_new=is_new)
        except GazetteError as error:
            self.queue.put(Failed(error))
            return
        offset = start.offset
        end_offset = self._plan.end_offsets.get(name, 0)
        content_type = value_of(journal.spec.labels, CONTENT_TYPE)
        spec = journal.spec
        self.queue.put(
            Opened(name, content_type, offset, start.continues, revision, start.is_new, spec)
        )
        if name in self._plan.end_offsets and end_offset <= offset:
            # A read with the end offset 0 has no end, and there is nothing to read.
            self.queue.put(Ended(name, offset))
            return
        attempt = 0
        while True:
            request = pb.ReadRequest(
                journal=name, offset=offset, block=self._plan.block, end_offset=end_offset
            )
            try:
                reader = RetryReader(
                    self._transport, request, patience_s=None if self._plan.block else FAILING_MAX_S
                )
                try:
                    await self._move(reader, name, self.queue)
                finally:
                    offset = reader.offset
                    self._positions.ended(name, revision, offset)
                    await reader.aclose()
            except (SuspendedError, JournalNotFoundError) as error:
                is_deleted = isinstance(error, JournalNotFoundError)
                if not self._plan.block or (self._plan.is_fixed and is_deleted):
                    self.queue.put(Failed(error))
                    return
                # An append resumes the journal; or the listing, which ends this task, is late.
                await pause(attempt)
                attempt += 1
            except GazetteError as error:
                self.queue.put(Failed(error))
                return
            else:
                return

    async def _move(self, reader: RetryReader, name: str, queue: ContentQueue) -> None:
        """Move content from a reader to a queue, until the reader ends."""
        while True:
            if queue.is_full:
                await queue.room()
            content: bytes | None
            try:
                content = await reader.read()
            except OffsetJumpError:
                queue.put(Jumped(name, reader.offset))
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
                content = None  # the journal holds nothing to read
            if content is None:
                queue.put(Ended(name, reader.offset))
                return
            response = reader.response
            self.write_heads[name] = max(reader.offset, response.write_head if response else 0)
            queue.put_content(name, content)


def _loop_closed() -> ClosedError:
    return ClosedError(
        "the event loop that fetched was closed; make another reader, with the checkpoint or the"
        " offsets of this one"
    )
