"""Refresh of a replica's index from its journal's stores, and retention (broker section 11).

:func:`listed_journals` finds the journals whose listings show all of their content, so that other
brokers may continue them. A store may list an object some time after it has stored it: a broker
that takes over a journal without any other replica learns its head from a listing, and one without
the last fragments would make it give their offsets again.

:class:`UnstoredCopies` copies un-stored content from the other replicas to a new one. A replica
that joins gets appends from then on. What was appended before is in the stores, or on the other
replicas only: those bytes have one holder less than the journal's replication. So whenever the
replicas agreed, ours asks the others for their un-stored fragments, and copies those that it lacks:
then as many brokers as required may be lost again. A copy is a spool like any other, with a log of
its own.

:class:`Retention` removes stored fragments that are older than their journal's retention, at its
primary. Fragments are removed from the begin of the journal on, so that readers skip to the first
one that is left, and never meet a gap. The last fragment stays whatever its age: it shows where the
journal ends. Of recovery logs the age does not count, since old parts of them may hold live state:
the consumer sets the offset before which no recovery reads. A fragment is stored for two intervals
of listings at least, so that all replicas see that it was.

A fragment's age is a matter of the store's clock. A broker whose clock is wrong must not remove
what is young. So the time is the wall time, or that of the store if this is earlier: of its newest
object, and of what has passed since it was listed. Where nothing is written to a store, nothing of
it is removed until the broker has run for as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Final, Literal, NamedTuple

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.metrics import RETENTION_BYTES, RETENTION_FRAGMENTS, UNSTORED_MISSING
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.resolver import Resolution, Resolver
from gazette_sdk.broker.spool.files import Commit, CommitLog, CompletedSpool, ContentFile, write_all
from gazette_sdk.cluster.broker_keys import JournalEntry
from gazette_sdk.errors import STATUS_NAMES, GazetteError, UnavailableError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.fragment.listing import StoredFragment, list_stored
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.durations import to_seconds
from gazette_sdk.protocol.fragments import digest_of, length_of
from gazette_sdk.protocol.labels import CONTENT_TYPE, RECOVERY_LOG, needed_from, values_of
from gazette_sdk.retries import Outage, Waits
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import for_each
from gazette_sdk.transport.wire import Target

PAUSE_S: Final = 0.5
"""Pause before the stores of a journal are listed again."""

CONCURRENT_MAX: Final = 16
"""Listings at once."""

_log = logging.getLogger(__name__)


async def listed_journals(
    ends: Mapping[str, int],
    stores: StoreRegistry,
    journal_of: Callable[[str], JournalEntry | None],
    timeout_s: float,
) -> set[str]:
    """Return the journals whose stores list content up to an offset, or soon do.

    Args:
        ends: offsets by journal.
        stores: of the process.
        journal_of: returns a journal's current key; ``None`` once it is deleted.
        timeout_s: bound of the wait.
    """
    listed: set[str] = set()
    room = asyncio.Semaphore(CONCURRENT_MAX)

    async def look(journal: str) -> None:
        while (entry := journal_of(journal)) is not None:
            try:
                async with room:
                    found = await list_stores(journal, entry.value.fragment.stores, stores)
            except (GazetteError, OSError) as error:
                _log.warning(
                    "cannot list the fragments of %s: %s",
                    journal,
                    error,
                    extra={"journal": journal},
                )
            else:
                if max((fragment.end for fragment in whole_of(found)), default=0) >= ends[journal]:
                    listed.add(journal)
                    return
            await asyncio.sleep(PAUSE_S)

    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*map(look, ends))
    except TimeoutError:
        pass  # the rest is not listed
    return listed


CONCURRENT_JOURNALS_MAX: Final = 4
"""Journals whose un-stored content is copied at a time, each from one peer: appends go first."""

CONCURRENT_QUESTIONS_MAX: Final = 32
"""Journals whose peers are asked at a time: more than are copied, as a peer may be frozen."""

DELAY_S: Final = 1.0
"""Pause before the peers are asked: by then a primary has stored what was closed, if it can."""

RETRY_S_MIN: Final = 0.25
RETRY_S_MAX: Final = 5.0
"""Bounds of the pause after a failed round."""

LIST_TIMEOUT_S: Final = 10.0
"""Bound of a listing of the stores."""

PEER_TIMEOUT_S: Final = 2.0
"""Bound of an answer of a peer, which has it in memory. What the others have does not wait for one
that is frozen."""

SILENCE_S_MAX: Final = 5.0
"""Longest wait for the next bytes of a fragment: its peer may be frozen."""

COPY_TIMEOUT_S: Final = 300.0
"""Bound of one fragment's copy: that of an upload."""

_CLAIMS: Final = Claims(int(Capability.READ), pb.LabelSelector(), math.inf)


class Holding(NamedTuple):
    """Un-stored fragment of a peer.

    Attributes:
        member: the peer.
        fragment: what it has.
    """

    member: pb.ProcessSpec.ID
    fragment: pb.Fragment


def missing_of(holdings: Iterable[Holding], have: CoverSet, end: int) -> list[Holding]:
    """Return the fewest holdings that add the bytes which are not there, by offset.

    Args:
        holdings: of all peers.
        have: what is there; it is changed.
        end: offset through which all replicas agree. Fragments that end after it are written
            still, or may be overwritten.
    """
    final = [holding for holding in holdings if holding.fragment.end <= end]
    final.sort(key=lambda holding: (holding.fragment.begin, -holding.fragment.end))
    missing = []
    for holding in final:
        fragment = holding.fragment
        if not have.covers(fragment.begin, fragment.end):
            have.add(fragment)
            missing.append(holding)
    return missing


class UnstoredCopies:
    """Copier of un-stored content. It belongs to the event loop.

    Args:
        resolver: has the routes of journals.
        peers: carries calls to other brokers.
    """

    def __init__(self, resolver: Resolver, peers: Transport) -> None:
        self._resolver = resolver
        self._peers = peers
        self._questions = asyncio.Semaphore(CONCURRENT_QUESTIONS_MAX)
        self._room = asyncio.Semaphore(CONCURRENT_JOURNALS_MAX)
        self._turns: dict[tuple[str, str], asyncio.Lock] = {}  # one journal at a time per peer

    async def run(self, replica: Replica) -> None:
        """Copy what a replica lacks, until it has all, or until it is cancelled."""
        outage = Outage(_log, f"copy of the un-stored content of {replica.journal}")
        await asyncio.sleep(DELAY_S)
        pause_s = RETRY_S_MIN
        while replica.copies_wanted:
            replica.copies_wanted = False
            if replica.index.cover().covers(0, replica.agreed_begin):
                continue
            missing = UNSTORED_MISSING.cell(replica.journal)
            missing.value = missing.value or math.inf  # until the peers have answered
            try:
                await self._copy_missing(replica)
            except (GazetteError, OSError, TimeoutError) as error:
                outage.failed(str(error) or "no answer in time")
                replica.copies_wanted = True
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_S_MAX)
        outage.ended()
        UNSTORED_MISSING.remove(replica.journal)

    async def _copy_missing(self, replica: Replica) -> None:
        """Copy what the peers have and this replica lacks.

        Raises:
            GazetteError: a peer did not answer, or what it has cannot be read. What the others
                have is copied nevertheless.
            OSError: our disk refuses it.
            TimeoutError: a peer did not answer in time.
        """
        resolution = await self._resolver.resolve(
            replica.journal, _CLAIMS, may_proxy=True, require_primary=False
        )
        if resolution.status != pb.OK or resolution.replica is not replica:
            return
        end = replica.agreed_begin
        local_id = self._resolver.local_id
        members = [each for each in resolution.header.route.members if each != local_id]
        # Before the stores are listed: what a peer does not tell any more is stored by then.
        async with self._questions:
            answers = await asyncio.gather(
                *(self._unstored_of(resolution, member, end) for member in members),
                return_exceptions=True,
            )
        holdings: list[Holding] = []
        failure: Exception | None = None
        for answer in answers:
            if isinstance(answer, GazetteError | TimeoutError):
                failure = failure or answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                holdings += answer
        await self._list_stores(replica)
        missing = missing_of(holdings, replica.index.cover(), end)
        left = sum(length_of(holding.fragment) for holding in missing)
        for holding in missing:
            UNSTORED_MISSING.cell(replica.journal).value = left
            member = holding.member
            turn = self._turns.setdefault((member.zone, member.suffix), asyncio.Lock())
            async with self._room, turn, asyncio.timeout(COPY_TIMEOUT_S):
                replica.adopt(await self._copy(replica, resolution, holding))
            left -= length_of(holding.fragment)
        if missing:
            _log.info(
                "copied %d un-stored fragments of %s from its other replicas",
                len(missing), replica.journal, extra={"journal": replica.journal},
            )  # fmt: skip
        if failure is not None:
            raise failure

    async def _list_stores(self, replica: Replica) -> None:
        """Let the index see what is stored by now. Bounded; the refresh reports failures."""
        index = replica.index
        if index.first_refresh.is_set() and index.refresh_failure is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIST_TIMEOUT_S):
                    await index.list_again()

    async def _unstored_of(
        self, resolution: Resolution, member: pb.ProcessSpec.ID, end: int
    ) -> list[Holding]:
        """Return the un-stored fragments of a peer.

        Raises:
            GazetteError: it does not answer, or not with them.
            TimeoutError: it does not answer in time.
        """
        request = pb.FragmentsRequest(
            journal=resolution.journal, do_not_proxy=True, unstored_only=True
        )
        target = _address(request.header, resolution, member)
        found: list[Holding] = []
        while True:
            async with asyncio.timeout(PEER_TIMEOUT_S):
                response = await self._peers.list_fragments(request, target)
            if response.status != pb.OK:
                raise UnavailableError(
                    f"broker {member.zone}/{member.suffix} answers {STATUS_NAMES[response.status]}",
                    journal=resolution.journal,
                )
            found += [
                Holding(member, entry.spec)
                for entry in response.fragments
                if not entry.spec.mod_time  # brokers of other implementations list all
            ]
            request.next_page_token = response.next_page_token
            if not 0 < response.next_page_token < end:
                return found

    async def _copy(
        self, replica: Replica, resolution: Resolution, holding: Holding
    ) -> CompletedSpool:
        fragment, storage = holding.fragment, replica.storage
        registers = replica.spool.peek().registers
        now = datetime.now(UTC)
        file, log = storage.create(fragment.begin, fragment.compression_codec)
        try:
            await self._receive(file, resolution, holding)
            self._commit(log, fragment, now, registers)
            if storage.persisted:
                await asyncio.to_thread(storage.sync, file, log.fd, is_new=True)
        except BaseException:
            file.discard()
            raise
        finally:
            log.close()
        return CompletedSpool(
            fragment, registers, now, file, storage.create_revision, primary=False
        )

    def _commit(
        self, log: CommitLog, fragment: pb.Fragment, now: datetime, registers: pb.LabelSet
    ) -> None:
        # If the journal has ended here, then with these registers.
        encoded = registers.SerializeToString(deterministic=True)
        first_append_us = round(now.timestamp() * 1e6)
        log.append(Commit(fragment.end, digest_of(fragment.sum), first_append_us, encoded))

    async def _receive(self, file: ContentFile, resolution: Resolution, holding: Holding) -> None:
        """Write a fragment's content into a file, and verify it."""
        member, fragment = holding
        request = pb.ReadRequest(
            journal=resolution.journal,
            offset=fragment.begin,
            end_offset=fragment.end,
            do_not_proxy=True,
            include_unacknowledged=True,
        )
        target = _address(request.header, resolution, member)
        found, offset = hashlib.sha1(usedforsecurity=False), fragment.begin
        loop = asyncio.get_running_loop()
        async with (
            asyncio.timeout(SILENCE_S_MAX) as silence,
            aclosing(self._peers.read(request, target)) as items,
        ):
            async for item in items:
                silence.reschedule(loop.time() + SILENCE_S_MAX)
                if isinstance(item, bytes):
                    write_all(file.fd, item, offset - fragment.begin)
                    found.update(item)
                    offset += len(item)
                elif item.status != pb.OK or item.offset != offset:
                    break
        if offset != fragment.end or found.digest() != digest_of(fragment.sum):
            raise UnavailableError(
                f"broker {member.zone}/{member.suffix} has {offset - fragment.begin} of "
                f"{length_of(fragment)} bytes from {fragment.begin} on; asking again",
                journal=resolution.journal,
            )


def _address(header: pb.Header, resolution: Resolution, member: pb.ProcessSpec.ID) -> Target:
    """Write the header of a call to a member, and return where it goes."""
    header.CopyFrom(resolution.header)
    header.process_id.CopyFrom(member)
    return Target(route=resolution.header.route, member=member)


FIRST_RETRY_S_MAX: Final = 2.0
"""Longest pause before the first successful listing, which appends wait for."""

_FIRST_DELAY_S: Final = 0.25

WANTED_PAUSE_S: Final = 1.0
"""Least pause before a listing that the primary's uploads, or missing bytes, ask for. It is doubled
when a listing does not show yet what is wanted."""

_WANTED_PAUSES_OF_A_LISTING: Final = 10
"""The pause is at least so many times as long as the last listing took: a large one is rare."""


async def refresh_index(
    journal: str,
    index: Index,
    stores: StoreRegistry,
    journal_of: Callable[[str], JournalEntry | None],
    listed: Callable[[str, Sequence[StoredFragment]], None] = lambda _journal, _found: None,
    *,
    retention: Callable[[], Retention | None] = lambda: None,
    waits: Waits | None = None,
    jitter: Callable[[], float] = random.random,
) -> None:
    """List a journal's stores periodically, until it is deleted or this is cancelled.

    The second listing comes early, after a random part of the interval. So the stores of journals
    that were created or assigned together are not all listed at once from then on, and threads are
    free for other work.

    The next listing comes sooner where the index wants one; see :attr:`Index.listing_wanted`.

    A listing is adopted as a whole or not at all: a part of it could release local files that are
    the only copy.

    Args:
        journal: its name.
        index: adopts each listing.
        stores: of the process.
        journal_of: returns a journal's current key; ``None`` once it is deleted.
        listed: called with the journal and what a listing found, before the index adopts it.
        retention: returns what removes aged fragments; ``None`` while we are not the primary.
        waits: waits of many journals.
        jitter: a random number of [0, 1).
    """
    loop, waits = asyncio.get_running_loop(), waits or Waits()
    failures, wanted_pause_s = 0, WANTED_PAUSE_S
    outage = Outage(_log, f"listing of the fragments of {journal}")
    while (entry := journal_of(journal)) is not None:
        fragments = entry.value.fragment
        interval_s = to_seconds(fragments.refresh_interval)
        is_first = not index.first_refresh.is_set()
        delay_s, began_at = interval_s * (jitter() if is_first else 1.0), loop.time()
        index.begin_listing()
        try:
            stored = await list_stores(journal, fragments.stores, stores)
        except (GazetteError, OSError) as error:
            delay_s = retry_delay(failures, interval_s, is_first=is_first)
            failures += 1
            index.note_refresh_failure(str(error))
            outage.failed(error)
        else:
            outage.ended()
            failures = 0
            listed(journal, stored)
            _adopt(index, stored)  # which releases local files, also of what is removed next
            if (remover := retention()) is not None:
                left, aged = remover.split(entry.value, stored)
                if aged:
                    _adopt(index, left)  # before they are removed: reads skip them
                    await remover.remove(entry.value, aged)
        wanted_pause_s = wanted_pause_s * 2 if index.listing_wanted.is_set() else WANTED_PAUSE_S
        listing_s = loop.time() - began_at
        least_s = max(wanted_pause_s, _WANTED_PAUSES_OF_A_LISTING * listing_s)
        await _pause(index, delay_s, least_s, waits)


def _adopt(index: Index, stored: Sequence[StoredFragment]) -> None:
    index.replace_remote(
        CoverSet(whole_of(stored)), CoverSet(each.fragment for each in stored if each.is_torn)
    )


async def _pause(index: Index, delay_s: float, wanted_pause_s: float, waits: Waits) -> None:
    """Pause until the next listing; for less where the index wants one, or asks for it."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    until = began_at + min(wanted_pause_s, delay_s)
    while (left_s := began_at + delay_s - loop.time()) > 0:
        if not index.listing_wanted.is_set():
            if not await _is_wanted(index, left_s, waits):
                return
        elif loop.time() >= until or index.listing_asked.is_set():
            return
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await index.listing_asked.wait()


async def _is_wanted(index: Index, timeout_s: float, waits: Waits) -> bool:
    """Wait until the index wants a listing. Return False after the timeout.

    It costs no task and no timer, as there is one wait per journal.
    """
    wanted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not wanted.done():
            wanted.set_result(True)

    ending = waits.add(wanted, timeout_s)
    index.on_listing_wanted = wake
    try:
        return await wanted
    finally:
        ending.discard()
        index.on_listing_wanted = None


async def list_stores(
    journal: str, urls: Sequence[str], stores: StoreRegistry
) -> list[StoredFragment]:
    """Return what a journal's stores have, also torn objects, in the order of the stores.

    Raises:
        GazetteError: a store could not be listed.
    """
    found: list[StoredFragment] = []
    for url in list(urls):
        found += await stores.in_thread(url, partial(_list, stores, url, journal))
    return found


def whole_of(stored: Iterable[StoredFragment]) -> list[pb.Fragment]:
    """Return the fragments of a listing which are not torn."""
    return [each.fragment for each in stored if not each.is_torn]


def retry_delay(failures: int, interval_s: float, *, is_first: bool) -> float:
    """Return the seconds until a failed listing is tried again.

    Args:
        failures: consecutive failures before.
        interval_s: the journal's refresh interval.
        is_first: True if none ever succeeded, so that appends wait for it.
    """
    if not is_first:
        return interval_s
    return min(interval_s, FIRST_RETRY_S_MAX, _FIRST_DELAY_S * 2.0 ** min(failures, 8))


def _list(stores: StoreRegistry, url: str, journal: str) -> list[StoredFragment]:
    return list_stored(stores.get(url), journal)


REMOVALS_MAX: Final = 8
"""Concurrent removals of one journal."""

LISTINGS_MIN: Final = 2
"""Least age of a fragment that is removed, in refresh intervals of its journal."""


class Aged(NamedTuple):
    """Parts of a listing.

    Attributes:
        left: what stays.
        aged: what is older than the retention, and is before everything that stays.
    """

    left: list[StoredFragment]
    aged: list[StoredFragment]


def split_aged(
    spec: pb.JournalSpec, stored: Sequence[StoredFragment], now_of: Callable[[str], float]
) -> Aged:
    """Split the stored fragments of a journal by its retention.

    Args:
        spec: the journal's.
        stored: the listing of all of its stores.
        now_of: returns the time of a store by its URL, in Unix seconds.
    """
    least_s = LISTINGS_MIN * to_seconds(spec.fragment.refresh_interval)
    retention_s = to_seconds(spec.fragment.retention)
    if RECOVERY_LOG in values_of(spec.labels, CONTENT_TYPE):
        until, retention_s = needed_from(spec.labels), 0.0
    else:
        until = sys.maxsize if retention_s > 0 else 0
    if not until or not stored:
        return Aged(list(stored), [])
    end = max(each.fragment.end for each in stored)

    def stays(fragment: pb.Fragment) -> bool:
        age_s = now_of(fragment.backing_store) - fragment.mod_time
        return fragment.end == end or fragment.end > until or age_s < max(retention_s, least_s)

    begin = min(each.fragment.begin for each in stored if stays(each.fragment))
    parts = Aged([], [])
    for each in stored:
        is_aged = each.fragment.end <= begin and not stays(each.fragment)
        (parts.aged if is_aged else parts.left).append(each)
    return parts


class Retention:
    """Remover of aged fragments of a broker's journals. It belongs to the event loop.

    Args:
        stores: of the process.
        mode: ``true``; or ``dry-run`` to log what would be removed, or ``false``.
        now: Unix time in seconds.
    """

    def __init__(
        self,
        stores: StoreRegistry,
        mode: Literal["true", "false", "dry-run"],
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._stores = stores
        self._mode = mode
        self._now = now
        self._store_times: dict[str, float] = {}  # Unix time at time 0 of the loop, at least
        self._shown: dict[str, int] = {}  # number of fragments that a dry run has shown
        self._outages: dict[str, Outage] = {}

    def split(self, spec: pb.JournalSpec, stored: Sequence[StoredFragment]) -> Aged:
        """Split a listing that has just ended; see :func:`split_aged`."""
        loop_s = asyncio.get_running_loop().time()
        self._note_times(loop_s, (each.fragment for each in stored))
        if self._mode == "false":
            return Aged(list(stored), [])

        def now_of(store: str) -> float:
            return min(self._now(), self._store_times.get(store, -math.inf) + loop_s)

        parts = split_aged(spec, stored, now_of)
        if self._mode == "dry-run":
            if self._shown.get(spec.name, 0) != len(parts.aged):
                self._shown[spec.name] = len(parts.aged)
                _log_removal("%d fragments of %s would be removed (%d bytes)", spec, parts.aged)
            return Aged(list(stored), [])
        return parts

    async def remove(self, spec: pb.JournalSpec, aged: Sequence[StoredFragment]) -> None:
        """Remove fragments from their stores. What fails is in the next listing again."""
        outage = self._outages.setdefault(
            spec.name, Outage(_log, f"removal of fragments of {spec.name} beyond its retention")
        )

        gone: list[StoredFragment] = []
        failures = 0

        async def remove(each: StoredFragment) -> None:
            nonlocal failures
            try:
                if await self._stores.remove(each.fragment):
                    gone.append(each)
            except (GazetteError, OSError) as error:
                failures += 1
                outage.failed(f"{error}; let brokers delete there, or use --broker.prune=false")

        await for_each(aged, remove, REMOVALS_MAX)
        RETENTION_FRAGMENTS.value += len(gone)
        RETENTION_BYTES.value += sum(length_of(each.fragment) for each in gone)
        if not failures:
            outage.ended()
        if gone:
            _log_removal("%d fragments of %s are removed (%d bytes)", spec, gone)
        if not outage.is_open:
            del self._outages[spec.name]

    def _note_times(self, loop_s: float, fragments: Iterable[pb.Fragment]) -> None:
        times = self._store_times
        for fragment in fragments:
            store, at = fragment.backing_store, fragment.mod_time - loop_s
            if at > times.get(store, -math.inf):
                times[store] = at


def _log_removal(text: str, spec: pb.JournalSpec, aged: Sequence[StoredFragment]) -> None:
    size = sum(length_of(each.fragment) for each in aged)
    is_log = RECOVERY_LOG in values_of(spec.labels, CONTENT_TYPE)
    reason = "no recovery needs them" if is_log else "they are older than its retention"
    _log.info(f"{text}: {reason}", len(aged), spec.name, size, extra={"journal": spec.name})
