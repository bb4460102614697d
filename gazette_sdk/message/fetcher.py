"""Coroutines that fetch the content of journals ahead of a reader's consumer.

One task per journal moves content into a bounded queue. The consumer takes it from there, and cuts,
decodes and sequences it in its own thread or coroutine.

A :class:`Plan` has the journals that a reader reads, and from which offsets to which.
:class:`Positions` finds the offset at which each read begins, and if its journal has it. The
:class:`ContentQueue` is between the coroutines and their one consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple, TypeAlias

from gazette_sdk.errors import (
    CheckpointMismatchError,
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
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import (
    CONTENT_TYPE,
    journal_selector,
    parse_selector,
    topic_hint,
    value_of,
)
from gazette_sdk.protocol.names import strip_meta, validate_journal
from gazette_sdk.retries import Outage, pause, retrying
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import (
    OffsetJumpError,
    RetryReader,
    begin_mod_time_of,
    read_metadata,
)
from gazette_sdk.transport.listing import NO_ANSWER, WatchedList, list_journals
from gazette_sdk.transport.loop import home_loop, is_running, sdk_loop

CONTENT_BYTES_MAX = 512 << 10
"""Default limit of content that is delivered as one item, unless a single read returns more."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Begin of the read of a journal.

    Attributes:
        journal: name of the journal, as the user gave it.
        content_type: its ``content-type`` label.
        offset: offset at which the read begins; -1 for the write head.
        continues: True if the read continues where an earlier read of this reader ended, because
            the journal left the listing for a while.
        create_revision: Etcd revision at which the journal was created; 0 if it is not known.
        is_new: True if the position that was given is not of this journal: the states of its
            producers are not, either.
        spec: the journal as it was listed; None if it was not.
    """

    journal: str
    content_type: str
    offset: int
    continues: bool
    create_revision: int
    is_new: bool = False
    spec: pb.JournalSpec | None = field(default=None, compare=False, repr=False)

    def at(self, offset: int) -> Opened:
        """Return the same journal, read from another offset."""
        return dataclasses.replace(self, offset=offset, continues=False)


class FetchedContent:
    """Content that continues where the journal's last item ended."""

    __slots__ = ("journal", "length_bytes", "pieces")

    def __init__(self, journal: str, content: bytes) -> None:
        self.journal = journal
        self.length_bytes = len(content)
        self.pieces = [content]


@dataclass(frozen=True, slots=True)
class Jumped:
    """Gap in a journal: its next content begins at this offset."""

    journal: str
    offset: int


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """End of the read of a journal, at its write head or at the end offset."""

    journal: str
    offset: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Error that ends all reads."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Finished:
    """End of the queue."""


Item: TypeAlias = Opened | FetchedContent | Jumped | FetchEnded | FetchFailed | Finished
"""An item of the queue."""


class ContentQueue:
    """Queue of items, with a bound of the content among them.

    Coroutines of one event loop put items. One consumer takes them: a thread, or a coroutine of
    any loop. The consumer first waits and then pops, so that an interrupt of the wait loses
    nothing.

    Args:
        loop: event loop of the coroutines that put items.
        bytes_max: limit of the content in the queue. One item more may be put.
        item_bytes_max: content up to this length is joined to the last item of its journal that
            is still in the queue: large items cost less than many small ones.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bytes_max: int,
        item_bytes_max: int = CONTENT_BYTES_MAX,
    ) -> None:
        self.loop = loop
        self.queued_bytes = 0
        self._bytes_max = bytes_max
        self._resume_bytes = bytes_max - bytes_max // 4
        self._item_bytes_max = item_bytes_max
        self._items: deque[Item] = deque()
        # Content in the queue that may grow, by journal.
        self._growing: dict[str, FetchedContent] = {}
        # Held while content is joined, or removed.
        self._lock = threading.RLock()
        self._has_room = asyncio.Event()
        self._room_awaited = False
        # A thread that waits acquires its gate twice; put() releases it. This wakes a thread
        # faster than a condition variable does.
        self._gate: threading.Lock | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---------------------------------------------------- coroutines of the loop

    @property
    def is_full(self) -> bool:
        """True if :meth:`room` would wait."""
        return self.queued_bytes >= self._bytes_max

    async def room(self) -> None:
        """Wait while the queue is full."""
        while self.is_full:
            self._has_room.clear()
            self._room_awaited = True
            if self.is_full:  # else the consumer popped an item before the flag was set
                await self._has_room.wait()

    def put(self, item: Item) -> None:
        """Add an item, and wake the consumer."""
        if not isinstance(item, FetchFailed | Finished):
            self._growing.pop(item.journal, None)
        self._items.append(item)
        self._wake()

    def put_content(self, journal: str, content: bytes) -> None:
        """Add content, to the journal's last item or as a new one, and wake the consumer."""
        length = len(content)
        with self._lock:
            self.queued_bytes += length
            last = self._growing.get(journal)
            if last is not None and last.length_bytes + length <= self._item_bytes_max:
                last.pieces.append(content)
                last.length_bytes += length
                return
            self._growing[journal] = item = FetchedContent(journal, content)
        self._items.append(item)
        self._wake()

    def _wake(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.release()
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            return
        loop = waiter.get_loop()
        if loop is self.loop:
            _resolve(waiter)
        else:
            with contextlib.suppress(RuntimeError):  # the consumer's loop is closed
                loop.call_soon_threadsafe(_resolve, waiter)

    # --------------------------------------------------------------- the consumer

    @property
    def is_empty(self) -> bool:
        """True if :meth:`pop` has nothing to remove."""
        return not self._items

    def wait(self, until: float = math.inf) -> bool:
        """Block until the queue has an item. Return False if it has none at a monotonic time."""
        while not self._items:
            gate = threading.Lock()
            gate.acquire()
            self._gate = gate
            if self._items:  # put before the gate was set
                return True
            if until == math.inf:
                gate.acquire()
                continue
            left_s = until - time.monotonic()
            if not gate.acquire(timeout=min(max(left_s, 0.0), threading.TIMEOUT_MAX)):
                return bool(self._items)
        return True

    async def wait_async(self) -> None:
        """Wait until the queue has an item. Other coroutines run at least once meanwhile."""
        if self._items:
            await asyncio.sleep(0)
        while not self._items:
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            if self._items:  # put before the waiter was set
                return
            await waiter

    def pop(self) -> Item:
        """Remove the first item. Only after :meth:`wait` or :meth:`wait_async`."""
        with self._lock:
            item = self._items.popleft()
            if not isinstance(item, FetchedContent):
                return item
            if self._growing.get(item.journal) is item:
                self._growing.pop(item.journal, None)  # put() holds no lock
            self.queued_bytes -= item.length_bytes
        # To wake the loop is expensive: it is done only where a coroutine waits for room.
        if self._room_awaited and self.queued_bytes <= self._resume_bytes:
            self._room_awaited = False
            with contextlib.suppress(RuntimeError):  # the loop is closed, and ended the reads
                self.loop.call_soon_threadsafe(self._has_room.set)
        return item


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


_log = logging.getLogger(__name__)

HEAD_LAG_MAX_S = 5.0
"""Time for which an offset after the write head is looked up again before it is missing. A broker
that just took the journal over may not have listed all its fragments."""

ATTEMPTS_MAX = 5
"""Attempts to find where a journal begins or ends. If none is answered, the read itself meets the
same failure, and has its own patience."""

ANSWER_TIMEOUT_S = 5.0
"""Time for each of them."""


class Start(NamedTuple):
    """Begin of the read of a journal.

    Attributes:
        offset: offset at which it begins; -1 for the write head.
        continues: an earlier read of this reader ended there.
        is_new: the position that was given is not of this journal.
    """

    offset: int
    continues: bool = False
    is_new: bool = False


class Positions:
    """Positions of the journals of one reader.

    Args:
        plan: what to read.
        transport: how to reach the journals.
    """

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._plan = plan
        self._transport = transport
        # By name and create revision: where the read of a journal that left the listing ended.
        self._ended_at: dict[tuple[str, int], int] = {}
        self._revisions = dict(plan.revisions)
        # Positions that the user gave, and that were not verified yet.
        self._unverified = set() if plan.is_verified else {*plan.offsets, *plan.revisions}

    def ended(self, name: str, revision: int, offset: int) -> None:
        """Note where a read of a journal ended."""
        self._ended_at[name, revision] = offset

    async def start(self, name: str, revision: int, *, is_new: bool) -> Start:
        """Return where the read of a journal begins.

        Args:
            name: name of the journal.
            revision: its create revision; 0 if it is not known.
            is_new: True if it was created after reading began: it is read from its begin.

        Raises:
            CheckpointMismatchError: the position is of an earlier journal of that name.
            OffsetNotYetAvailableError: the position is after the write head.
            GazetteError: the write head could not be found.
        """
        before = self._revisions.get(name, 0)
        self._revisions[name] = revision or before
        is_other = bool(before and revision) and before != revision
        ended_at = self._ended_at.get((name, revision))
        if ended_at is not None:
            return Start(ended_at, continues=True)
        offset = self._plan.offsets.get(name, 0 if is_new else self._plan.begin)
        if name not in self._unverified:
            if is_other or is_new or name in self._plan.offsets or self._plan.since is None:
                return Start(0 if is_other else offset)
            return Start(await self._offset_since(name, self._plan.since))
        self._unverified.discard(name)
        missing = (
            _mismatch(name, offset) if is_other else await self._behind_write_head(name, offset)
        )
        if missing is None:
            return Start(offset)
        if self._plan.on_missing == "raise":
            raise missing
        _log.warning("%s; reading begins at its %s", missing, self._plan.on_missing)
        return Start(0 if self._plan.on_missing == "begin" else -1, is_new=True)

    async def _behind_write_head(self, name: str, offset: int) -> GazetteError | None:
        """Return an error if an offset is after the write head of its journal."""
        if offset <= 0:
            return None
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + HEAD_LAG_MAX_S
        while True:
            found = await self._metadata(name, -1)
            head = 0 if found is None else max(found.write_head, found.offset)
            if found is None or head >= offset:
                return None
            if loop.time() >= ends_at:
                return OffsetNotYetAvailableError(
                    f"offset {offset} is behind the write head, which is {head}:"
                    " content was lost, or the offset is of another journal",
                    journal=name,
                    offset=offset,
                )
            await pause(1)

    async def _offset_since(self, name: str, since: datetime) -> int:
        """Return an offset before the first message since a time, by the age of fragments.

        If a broker does not answer, it is 0: decoders leave out earlier messages in any case.
        """
        found = await self._metadata(name, 0, begin_mod_time=begin_mod_time_of(since))
        return 0 if found is None else found.offset

    async def _metadata(
        self, name: str, offset: int, *, begin_mod_time: int = 0
    ) -> pb.ReadResponse | None:
        """Return metadata of a journal; None if it is suspended, or no broker answers."""
        for attempt in range(ATTEMPTS_MAX):
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    return await read_metadata(
                        self._transport, name, offset, begin_mod_time=begin_mod_time
                    )
            except (SuspendedError, JournalNotFoundError):
                break
            except (GazetteError, TimeoutError):
                await pause(attempt)
        return None


def _mismatch(name: str, offset: int) -> GazetteError:
    return CheckpointMismatchError(
        f"{name}: the checkpoint is of an earlier journal of this name, which was deleted;"
        ' Reader(on_missing="begin") reads it from its begin, and on_missing="end" from its write'
        " head; if the content is the same, give offsets=checkpoint.offsets instead",
        journal=name,
        offset=offset,
    )


Offsets: TypeAlias = Literal["begin", "end"] | Mapping[str, int] | datetime | None
"""Offsets at which a reader begins: the begin of all journals, their write heads, by journal, or
at the first message since a time."""

OnMissing: TypeAlias = Literal["raise", "begin", "end"]
"""Treatment of a position that its journal does not have: raise an error, or begin at the journal's
begin or write head instead."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Journals to read, with their offsets.

    Attributes:
        selector: label selector of the journals; None for names alone.
        names: names of journals. One beside a selector precedes it, if the journal exists.
        text: selector or name as the user gave it, for errors.
        block: follow the write heads, and the listing.
        begin: offset at which journals begin that ``offsets`` does not name; -1 is the head.
        offsets: offsets at which journals begin, by journal.
        end_offsets: offsets at which journals end, by journal.
        since: time of the first message of journals that ``offsets`` does not name; None for all.
        revisions: create revisions of journals that were read before, by journal. One that was
            created anew is read from its begin.
        item_bytes_max: limit of the content of a journal that is decoded at once.
        on_missing: treatment of an offset, or create revision, that its journal does not have.
        is_verified: True if the positions were read before, and are not verified again.
        is_fixed: True if exactly the named journals are read: one that vanishes is an error. Else
            one is waited for, and read again once it is created.
    """

    selector: pb.LabelSelector | None
    names: tuple[str, ...]
    text: str
    block: bool
    begin: int
    offsets: Mapping[str, int]
    end_offsets: Mapping[str, int]
    since: datetime | None = None
    revisions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    item_bytes_max: int = CONTENT_BYTES_MAX
    on_missing: OnMissing = "raise"
    is_verified: bool = False
    is_fixed: bool = False

    def continued(self, offsets: Mapping[str, int], opened: Mapping[str, Opened]) -> Plan:
        """Return the plan to read on after this one: new journals are read from their begin."""
        revisions = {
            **self.revisions,
            **{name: each.create_revision for name, each in opened.items() if each.create_revision},
        }
        return dataclasses.replace(
            self, begin=0, offsets=dict(offsets), revisions=revisions, is_verified=True
        )

    def restored(self, checkpoint: Checkpoint) -> Plan:
        """Return the plan to read on after a checkpoint.

        Raises:
            ConfigurationError: the plan has an offset of a journal in the checkpoint.
        """
        twice = sorted(self.offsets.keys() & checkpoint.offsets.keys())
        if twice:
            raise ConfigurationError(
                f"both checkpoint= and offsets= say where {twice[0]} begins; leave it out of"
                " offsets="
            )
        return dataclasses.replace(
            self,
            offsets={**self.offsets, **checkpoint.offsets},
            revisions=checkpoint.create_revisions,
        )


def plan_of(
    selector: str | None,
    name: str | None,
    *,
    block: bool,
    offsets: Offsets,
    end_offsets: Mapping[str, int] | None,
    on_missing: OnMissing = "raise",
) -> Plan:
    """Return the plan of a reader's arguments, see :class:`~gazette_sdk.message.Reader`.

    Raises:
        ConfigurationError: they do not go together, or are not known.
        ValidationError: the selector, or the name, is malformed.
    """
    _check_types(selector, name, offsets, end_offsets)
    if (selector is None) == (name is None):
        raise ConfigurationError(
            "a Reader takes either a selector or a name: give one, such as Reader(dict, 'topic=t')"
        )
    wanted = None
    if selector is None:
        assert name is not None
        validate_journal(name)
    elif ";" in selector:
        validate_journal(selector)
        name = selector
    else:
        wanted = parse_selector(selector)
        # A bare word may be a name, or the selector of a label's existence. It is a name if such
        # a journal exists.
        name = selector if _is_name(selector) else None
    text = selector if selector is not None else name
    assert text is not None
    begin = -1 if offsets == "end" else 0
    by_journal: Mapping[str, int] = {}
    if isinstance(offsets, str) and offsets not in {"begin", "end"}:
        raise ConfigurationError(
            f"offsets={offsets!r}: use 'begin', 'end', a mapping, or a datetime"
        )
    since = offsets if isinstance(offsets, datetime) else None
    if since is not None and since.utcoffset() is None:
        raise ConfigurationError(
            f"offsets={offsets!r} has no time zone; give it one, as datetime.now(UTC) has, or"
            " with .astimezone() if it is local time"
        )
    if offsets is not None and not isinstance(offsets, str | datetime):
        by_journal = dict(offsets)
    ends = dict(end_offsets or {})
    _check_offsets(by_journal, ends)
    if on_missing not in {"raise", "begin", "end"}:
        raise ConfigurationError(f"on_missing={on_missing!r}: use 'raise', 'begin' or 'end'")
    names = () if name is None else (name,)
    return Plan(wanted, names, text, block, begin, by_journal, ends, since, on_missing=on_missing)


def _check_offsets(begins: Mapping[str, int], ends: Mapping[str, int]) -> None:
    """Refuse what are no offsets.

    Raises:
        ConfigurationError: there is one.
    """
    for journal, offset in begins.items():
        if not isinstance(offset, int) or offset < -1:
            raise ConfigurationError(
                f"offset {offset!r} of {journal}: use a byte offset, or -1 for the write head"
            )
    for journal, offset in ends.items():
        if not isinstance(offset, int) or offset < 0:
            raise ConfigurationError(
                f"end offset {offset!r} of {journal}: use a byte offset; without one, reading ends"
                " at the write head"
            )


def _check_types(selector: object, name: object, offsets: object, end_offsets: object) -> None:
    """Refuse arguments of other types, which are likely to stand in each other's places.

    Raises:
        ConfigurationError: there is one.
    """
    for text in (selector, name):
        if text is not None and not isinstance(text, str):
            raise ConfigurationError(
                f"{text!r} is no selector or name: give the class of messages first, and then a"
                " selector, such as Reader(dict, 'topic=t')"
            )
    if offsets is not None and not isinstance(offsets, str | Mapping | datetime):
        raise ConfigurationError(
            f"offsets={offsets!r}: use 'begin', 'end', a mapping from journals to offsets, or a"
            " datetime"
        )
    if end_offsets is not None and not isinstance(end_offsets, Mapping):
        raise ConfigurationError(
            f"end_offsets={end_offsets!r}: use a mapping from journals to offsets"
        )


def _is_name(text: str) -> bool:
    if any(operator in text for operator in "=!, ()"):
        return False
    try:
        validate_journal(text)
    except ValidationError:
        return False
    return True


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
        write_heads: by journal, the last write head that a broker reported.
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
        self._ends = False  # all journals are named, and have end offsets
        self._positions = Positions(plan, transport)
        self._replays: set[asyncio.Task[None]] = set()
        self.loop.call_soon_threadsafe(self._start)

    # --------------------------------------------------------------- any thread

    def replay(self, journal: str, begin: int, end: int) -> ContentQueue:
        """Read a range of a journal again, beside everything else.

        Args:
            journal: name of the journal, as in its items.
            begin: offset of the first byte.
            end: offset after the last byte.

        Returns:
            A queue of ``FetchedContent`` and ``Jumped``, then ``FetchEnded`` or ``FetchFailed``,
            then ``Finished``.
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
                    self.queue.put(FetchFailed(_loop_closed()))
                raise
            except GazetteError as error:
                self.queue.put(FetchFailed(error))
            except Exception as error:  # noqa: BLE001 - the task's boundary: the consumer raises it
                _log.exception("reading %s failed", self._plan.text)
                self.queue.put(FetchFailed(error))
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
            queue.put(FetchFailed(error))
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
            self._ends = not missing and self._plan.end_offsets.keys() >= set(self._plan.names)
            if not missing and (self._plan.is_fixed or self._ends or not self._plan.block):
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
        return await retrying(lambda: self._list(selector), NO_ANSWER, outage=outage)

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
                        self.queue.put(FetchFailed(watched.error))
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
            self.queue.put(FetchFailed(error))
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
            self.queue.put(FetchEnded(name, offset))
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
                is_fixed = self._plan.is_fixed or self._ends
                if not self._plan.block or (is_fixed and is_deleted):
                    self.queue.put(FetchFailed(error))
                    return
                # An append resumes the journal; or the listing, which ends this task, is late.
                await pause(attempt)
                attempt += 1
            except GazetteError as error:
                self.queue.put(FetchFailed(error))
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
                queue.put(FetchEnded(name, reader.offset))
                return
            response = reader.response
            self.write_heads[name] = max(reader.offset, response.write_head if response else 0)
            queue.put_content(name, content)


def _loop_closed() -> ClosedError:
    return ClosedError(
        "the event loop that fetched was closed; make another reader, with the checkpoint or the"
        " offsets of this one"
    )
