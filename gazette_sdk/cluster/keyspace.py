"""KeySpace: a local mirror of all keys of Etcd under one prefix (allocator section 2).

The mirror loads the prefix at a revision and then follows it by a watch. It runs on one event loop,
and applies a batch of changes without an await in between: readers always see a consistent state.
``entries`` is replaced and never modified, so that a list is an immutable snapshot.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import KeyValue, WatchBatch, WatchEvent, prefix_end
from gazette_sdk.errors import (
    ConfigurationError,
    EtcdCompactedError,
    EtcdError,
    EtcdUnavailableError,
    GazetteError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.retries import Outage, run_together

PAGE_ENTRIES = 1000
"""Number of keys in one page of a load: bounds the size of a response."""

WATCH_DELAY_S = 0.03
"""Time for which changes are gathered before they are applied together.

Observers run once per batch: this bounds their work while many keys change.
"""

RELOAD_PAUSE_S = 10.0
"""Pause before a mirror is loaded anew, after Etcd refused it."""

QUEUE_BATCHES_MAX = 1024
"""Greatest number of responses of a watch that wait; a full queue stops reading the watch."""

T_co = TypeVar("T_co", covariant=True)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry(Generic[T_co]):
    """A key of the mirror.

    ``value`` was decoded from the bytes ``raw``. ``lease`` is 0 if the key has none.
    """

    key: bytes
    value: T_co
    create_revision: int
    mod_revision: int
    version: int
    lease: int
    raw: bytes

    @classmethod
    def of(cls, kv: KeyValue, value: Any) -> Entry[Any]:
        """Return the entry of a key with its decoded value."""
        return cls(
            kv.key, value, kv.create_revision, kv.mod_revision, kv.version, kv.lease, kv.value
        )


Decoder = Callable[[KeyValue], Entry[Any]]
"""Returns the entry of a key; raises GazetteError or ValueError if it cannot be decoded."""


class Change(NamedTuple):
    """Change of one key by a batch: created (no ``old``), replaced, or deleted (no ``new``)."""

    key: bytes
    old: Entry[Any] | None
    new: Entry[Any] | None


class HistoryMark(NamedTuple):
    """Key by which the history of an Etcd is recognized.

    Attributes:
        cluster_id: of the Etcd cluster.
        revision: that was seen.
        key: key that had the greatest ``mod_revision`` of a prefix at that revision; empty if the
            prefix had none.
        mod_revision: of the key.
    """

    cluster_id: int
    revision: int
    key: bytes = b""
    mod_revision: int = 0


class Continuity(enum.Enum):
    """Relation of an Etcd to a history that was seen before."""

    SAME = "it has this history"
    OTHER = "it is another cluster, or was restored from an older backup"
    UNKNOWN = "it has compacted the revision"


class KeySpace:
    """Mirror of one prefix.

    Args:
        root: the prefix: an absolute clean path without trailing slash. Keys are matched with
            the plain string, so ``/a/b`` also matches ``/a/b-2/c``.
        decoder: decodes keys to entries. A key that it cannot decode is logged and left out, or
            keeps its earlier value.

    Attributes:
        header: cluster, member and term of the last response, and the newest revision *that
            changed this prefix* (or that was loaded). Peers wait for this revision, so other
            changes must not raise it.
        entries: all entries, sorted by key.
        changes: changes of the last load or batch, sorted by key; for observers.
        observers: called in order, without arguments, after each load and each batch.

    Raises:
        ConfigurationError: ``root`` is not clean.
    """

    def __init__(self, root: str, decoder: Decoder) -> None:
        check_root(root)
        self.root = root
        self.header = pb.Header.Etcd()
        self.entries: list[Entry[Any]] = []
        self.changes: Sequence[Change] = ()
        self.observers: list[Callable[[], None]] = []
        self._decode = decoder
        self._keys: list[bytes] = []
        self._newest: Entry[Any] | None = None  # of the greatest modification, unless it is old
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waiter_numbers = itertools.count()
        self._end: BaseException | None = None
        self._lost_at = 0.0  # monotonic time since which no watch works

    # -------------------------------------------------------------- reading

    @property
    def revision(self) -> int:
        """The newest revision that changed this prefix."""
        return self.header.revision

    def mark(self) -> HistoryMark:
        """Return the mark of the mirror's history."""
        newest = self._newest
        if newest is None or self.find(newest.key) is not newest:  # it was deleted
            newest = max(self.entries, key=lambda entry: entry.mod_revision, default=None)
            self._newest = newest
        header = self.header
        if newest is None:
            return HistoryMark(header.cluster_id, header.revision)
        return HistoryMark(header.cluster_id, header.revision, newest.key, newest.mod_revision)

    def search(self, key: bytes) -> tuple[int, bool]:
        """Return the (insertion) index of ``key`` in ``entries``, and True if it is there."""
        index = bisect_left(self._keys, key)
        return index, index < len(self._keys) and self._keys[index] == key

    def find(self, key: bytes) -> Entry[Any] | None:
        """Return the entry of ``key``."""
        index, found = self.search(key)
        return self.entries[index] if found else None

    def bounds(self, begin: bytes, end: bytes) -> tuple[int, int]:
        """Return the indices of the entries in ``[begin, end)``; an empty range when reversed."""
        first = bisect_left(self._keys, begin)
        return first, max(first, bisect_left(self._keys, end))

    def prefixed(self, prefix: bytes) -> Sequence[Entry[Any]]:
        """Return the entries whose keys begin with ``prefix``, in order."""
        first, last = self.bounds(prefix, prefix_end(prefix))
        return self.entries[first:last]

    async def wait_for_revision(self, revision: int) -> None:
        """Wait until the mirror has reached ``revision``.

        Wait only for revisions that changed this prefix: the mirror skips all others. A cancelled
        task is cancelled even if the revision is reached: it must not act on a mirror without its
        own member key.

        Raises:
            EtcdUnavailableError: the watch ended, so the mirror will not reach the revision.
        """
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        if self.header.revision >= revision:
            return
        if self._end is not None:
            raise self._end_error()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (revision, next(self._waiter_numbers), waiter))
        await waiter

    async def wait_for_update(self) -> None:
        """Wait for the next batch of changes."""
        await self.wait_for_revision(self.header.revision + 1)

    # -------------------------------------------------------------- loading

    async def load(self, etcd: Etcd, revision: int = 0) -> None:
        """Load the prefix at ``revision``; 0: the current one.

        Pass the revision of an own change under the prefix if there is one.

        Raises:
            EtcdError: Etcd failed, or is another cluster than before.
        """
        entries, header = await self._read(etcd, revision)
        keys = [entry.key for entry in entries]
        assert all(a < b for a, b in itertools.pairwise(keys)), "Etcd sends keys in order"
        changes = [
            *(Change(e.key, e, None) for e in self.entries),
            *(Change(e.key, None, e) for e in entries),
        ]
        changes.sort(key=lambda change: change.key)
        self._install(keys, entries, changes, header)

    async def _read(self, etcd: Etcd, revision: int) -> tuple[list[Entry[Any]], pb.Header.Etcd]:
        """Return the entries of the prefix at a revision, and the header of that revision."""
        if revision == 0:
            # Only the header is needed: read a key that does not exist.
            revision = (await etcd.range(b"\x00")).header.revision
        entries: list[Entry[Any]] = []
        header = self.header
        key, end = self.root.encode(), prefix_end(self.root.encode())
        has_more = True
        while has_more:
            page = await etcd.range(key, end, revision=revision, limit=PAGE_ENTRIES)
            _check_header(header, page.header)
            header = page.header
            for kv in page.entries:
                try:
                    entries.append(self._decode(kv))
                except (GazetteError, ValueError) as error:
                    _log.error("%s is ignored: %s", _text(kv.key), error)
            has_more = page.has_more
            key = page.entries[-1].key + b"\x00" if page.entries else key
        return entries, _at_revision(header, revision)

    # -------------------------------------------------------------- watching

    async def watch(self, etcd: Etcd, *, delay_s: float = WATCH_DELAY_S) -> None:
        """Follow the prefix from the loaded revision on, until cancelled.

        A watch that is lost with its connection, or because Etcd has no leader, is resumed. So is
        one of a revision that Etcd has compacted since, if no key of the prefix has changed:
        others may fill its history while this prefix is at rest.

        Args:
            etcd: the client.
            delay_s: time for which changes are gathered into one batch.

        Raises:
            EtcdError: the watch cannot be resumed: changes were compacted away, permission was
                refused, it is another cluster. Restart the process.
        """
        self._end = None
        self._lost_at = time.monotonic()
        try:
            await self._follow(etcd, delay_s)
        except BaseException as error:
            self._fail_waiters(error)
            raise

    async def keep(
        self,
        etcd: Etcd,
        what: str,
        beside: Callable[[], Coroutine[Any, Any, None]],
        *,
        delay_s: float = WATCH_DELAY_S,
    ) -> None:
        """Load and follow the prefix until cancelled, and load it anew after each error of Etcd.

        For a mirror that its owner can do without for a while.

        Args:
            etcd: the client.
            what: noun phrase of the watch, for the log.
            beside: work that is done while the prefix is followed.
            delay_s: time for which changes are gathered into one batch.
        """
        outage = Outage(_log, what)
        while True:
            pause_s = RELOAD_PAUSE_S
            try:
                await self.load(etcd)
                outage.ended()
                await run_together(beside(), self.watch(etcd, delay_s=delay_s))
            except EtcdError as error:
                outage.failed(error)
                if isinstance(error, EtcdCompactedError):
                    pause_s = 0.0
            await asyncio.sleep(pause_s)

    async def _follow(self, etcd: Etcd, delay_s: float) -> None:
        resume = self.header.revision + 1
        attempt = 0
        outage = Outage(_log, f"watch of {self.root} in Etcd")
        while True:
            await asyncio.sleep(restart_delay_s(attempt))
            attempt += 1
            queue: asyncio.Queue[WatchBatch | GazetteError] = asyncio.Queue(QUEUE_BATCHES_MAX)
            reader = asyncio.create_task(self._read_watch(etcd, resume, queue, outage))
            try:
                failure: GazetteError | None = None
                while failure is None:
                    items = [await queue.get()]
                    if delay_s > 0:
                        await asyncio.sleep(delay_s)
                    while not queue.empty():
                        items.append(queue.get_nowait())
                    if isinstance(items[-1], GazetteError):
                        failure = items[-1]
                    batches = [item for item in items if isinstance(item, WatchBatch)]
                    changing = [batch for batch in batches if batch.events]
                    if changing:
                        self.apply(changing)
                        attempt = 0
                    if batches:
                        last = batches[-1]
                        reached = (
                            last.events[-1].kv.mod_revision if last.events else last.header.revision
                        )
                        # Another member of Etcd may be after the one that was watched before.
                        resume = max(resume, reached + 1)
            finally:
                reader.cancel()
                await asyncio.wait([reader])
            if not isinstance(failure, EtcdUnavailableError):
                raise failure
            outage.failed(failure)

    async def _read_watch(
        self,
        etcd: Etcd,
        start: int,
        queue: asyncio.Queue[WatchBatch | GazetteError],
        outage: Outage,
    ) -> None:
        """Put the batches of a watch into ``queue``, and at last the error that ended it."""
        try:
            await self._check_history(etcd)
            while True:
                watch = etcd.watch(
                    self.root.encode(), start, on_created=partial(self._watching, outage)
                )
                try:
                    async with aclosing(watch) as batches:
                        async for batch in batches:
                            await queue.put(batch)
                except EtcdCompactedError:
                    entries, header = await self._read(etcd, 0)
                    if list(map(_version, entries)) != list(map(_version, self.entries)):
                        raise
                    await queue.put(WatchBatch(header, ()))
                    start = header.revision + 1
        except GazetteError as error:
            self._lost_at = self._lost_at or time.monotonic()
            await queue.put(error)

    def _watching(self, outage: Outage) -> None:
        """Note that Etcd has accepted the watch."""
        self._lost_at = 0.0
        outage.ended()

    @property
    def watch_age_s(self) -> float:
        """Seconds since the watch was lost; 0 while it works, and before it has begun."""
        return time.monotonic() - self._lost_at if self._lost_at else 0.0

    async def _check_history(self, etcd: Etcd) -> None:
        """Check that Etcd has what the mirror has, before a watch begins or is resumed.

        Raises:
            EtcdError: it has not: a watch would leave out what it has lost.
        """
        mark = self.mark()
        if await compare_history(etcd, mark, self.root) is Continuity.OTHER:
            raise EtcdError(
                f"Etcd does not have revision {mark.revision} of {self.root} any more: it was "
                "restored from an older backup, or is another one; restart the process"
            )

    # -------------------------------------------------------------- applying

    def apply(self, batches: Sequence[WatchBatch]) -> None:
        """Apply changes, then run the observers. It does no I/O itself.

        A bad value is no error: it is logged, and the key keeps its earlier value.

        Raises:
            EtcdError: the changes are those of another cluster, or older than the mirror. None
                was applied.
        """
        header = self.header
        events: list[WatchEvent] = []
        for batch in batches:
            assert batch.events, "progress notifications are not applied"
            _check_header(header, batch.header)
            first, last = (batch.events[i].kv.mod_revision for i in (0, -1))
            if first <= header.revision:
                raise EtcdError(
                    f"received watch response with first ModRevision {first}, "
                    f"which is <= last Revision {header.revision}"
                )
            if last < first:
                raise EtcdError(
                    f"received watch response with last ModRevision {last} "
                    f"less than first ModRevision {first}"
                )
            header = _at_revision(batch.header, last)
            events.extend(batch.events)

        events.sort(key=lambda event: (event.kv.key, event.kv.mod_revision))
        changes: list[Change] = []
        for key, group in itertools.groupby(events, key=lambda event: event.kv.key):
            old = new = self.find(key)
            for event in group:
                new = self._outcome(new, event)
            if new is not old:
                changes.append(Change(key, old, new))
        self._install(*self._merged(changes), changes, header)

    def _outcome(self, prev: Entry[Any] | None, event: WatchEvent) -> Entry[Any] | None:
        """Return the entry of a key after an event (the table of allocator section 2.5)."""
        kv = event.kv
        if prev is not None and kv.mod_revision <= prev.mod_revision:
            _log.warning("ignored a replayed change of %s", _text(kv.key))
            return prev
        if event.is_delete:
            if prev is None:
                _log.info("ignored the deletion of unknown %s", _text(kv.key))
            return None
        try:
            entry = self._decode(kv)
        except (GazetteError, ValueError) as error:
            kept = "ignored" if prev is None else "its old value is kept"
            _log.error("%s can not be decoded, %s: %s", _text(kv.key), kept, error)
            return prev
        if prev is None:
            if kv.create_revision != kv.mod_revision:
                _log.info("%s appears by a modification", _text(kv.key))
            elif kv.version != 1:
                _log.warning("%s was created with version %d", _text(kv.key), kv.version)
        elif kv.create_revision != prev.create_revision:
            _log.info("%s was created anew", _text(kv.key))
        elif kv.version != prev.version + 1:
            _log.info("%s skipped versions", _text(kv.key))
        return entry

    def _merged(self, changes: Iterable[Change]) -> tuple[list[bytes], list[Entry[Any]]]:
        """Return new lists with the changes, in one pass that copies the runs in between."""
        keys: list[bytes] = []
        entries: list[Entry[Any]] = []
        position = 0
        for key, old, new in changes:
            index = bisect_left(self._keys, key, position)
            keys += self._keys[position:index]
            entries += self.entries[position:index]
            position = index + (old is not None)
            if new is not None:
                keys.append(key)
                entries.append(new)
        keys += self._keys[position:]
        entries += self.entries[position:]
        return keys, entries

    def _install(
        self,
        keys: list[bytes],
        entries: list[Entry[Any]],
        changes: Sequence[Change],
        header: pb.Header.Etcd,
    ) -> None:
        """Install a new state, run the observers, and wake the tasks that wait for it."""
        if self.header.member_id and header.member_id != self.header.member_id:
            _log.info("the member of Etcd changed to %x", header.member_id)
        self._keys, self.entries, self.changes, self.header = keys, entries, changes, header
        new = [change.new for change in changes if change.new is not None]
        self._newest = max(
            new if self._newest is None else [self._newest, *new],
            key=lambda entry: entry.mod_revision,
            default=None,
        )
        self._reindex(changes)
        for observer in self.observers:
            observer()
        while self._waiters and self._waiters[0][0] <= header.revision:
            waiter = heapq.heappop(self._waiters)[2]
            if not waiter.done():
                waiter.set_result(None)

    def _reindex(self, changes: Sequence[Change]) -> None:
        """Update the look-ups of a subclass, before observers run."""

    def _fail_waiters(self, end: BaseException) -> None:
        """Fail all waiting tasks, because the watch has ended."""
        self._end = end
        waiters, self._waiters = self._waiters, []
        for _, _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(self._end_error())

    def _end_error(self) -> EtcdUnavailableError:
        reason = type(self._end).__name__
        return EtcdUnavailableError(f"the watch of {self.root} has ended ({reason})")


def _version(entry: Entry[Any]) -> tuple[bytes, int]:
    return entry.key, entry.mod_revision


def restart_delay_s(attempt: int) -> float:
    """Return the pause before the ``attempt``-th watch in a row without changes (section 2.3)."""
    if attempt < 2:
        return 0.0
    if attempt == 2:
        return 0.005
    return min(attempt - 1, 5)


def check_root(root: str) -> None:
    """Check that a prefix is a clean absolute path.

    Raises:
        ConfigurationError: it is not.
    """
    first, *parts = root.split("/")
    if root != "/" and (first or not parts or any(part in ("", ".", "..") for part in parts)):
        raise ConfigurationError(
            f"{root!r} cannot be a prefix of Etcd keys: it must be an absolute clean path "
            "without trailing slash, as /gazette/cluster"
        )


async def compare_history(etcd: Etcd, mark: HistoryMark, root: str) -> Continuity:
    """Compare the history of an Etcd with a mark.

    A revision alone does not show that Etcd went back: it may be greater again by now.

    Args:
        etcd: the client.
        mark: what was seen before.
        root: prefix of the mark's key, which this client may read.

    Raises:
        EtcdError: Etcd did not answer, or refused.
    """
    if mark.cluster_id != etcd.cluster_id:
        return Continuity.OTHER
    now = await etcd.range(mark.key or root.encode())
    if now.header.revision < mark.revision:
        return Continuity.OTHER
    if not mark.key or mark.mod_revision in {kv.mod_revision for kv in now.entries}:
        return Continuity.SAME
    try:
        then = await etcd.range(mark.key, revision=mark.mod_revision)
    except EtcdCompactedError:
        return Continuity.UNKNOWN
    is_same = [kv.mod_revision for kv in then.entries] == [mark.mod_revision]
    return Continuity.SAME if is_same else Continuity.OTHER


def _check_header(have: pb.Header.Etcd, update: pb.Header.Etcd) -> None:
    if have.cluster_id and update.cluster_id and have.cluster_id != update.cluster_id:
        raise EtcdError(
            f"etcd ClusterID mismatch (expected {have.cluster_id}, got {update.cluster_id}); "
            "this is another Etcd than before: restart the process"
        )
    if update.revision < have.revision:
        raise EtcdError(
            f"etcd Revision mismatch (expected >= {have.revision}, got {update.revision}); "
            "Etcd lost changes, was it restored from a backup? Restart the process"
        )


def _at_revision(header: pb.Header.Etcd, revision: int) -> pb.Header.Etcd:
    result = pb.Header.Etcd()
    result.CopyFrom(header)
    result.revision = revision
    return result


def _text(key: bytes) -> str:
    return key.decode("utf-8", "backslashreplace")
