"""Fragment index of a replica: the place of every byte of its journal (broker section 10).

It has the fragments of the last listing of the stores, and the local spools which that listing
does not cover yet. Reads look up the fragment of their offset here, and wait for the next one.

A journal with several replicas is read only as far as all of them have acknowledged: what one
broker has committed may be overwritten if that broker is lost. So the index has an *acknowledged
offset*. Local content after it is known here, and hidden from reads. With durability ``persisted``
a lone replica has one, too: it acknowledges what is on disk.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gazette_sdk.broker.spool.files import ContentFile
from gazette_sdk.errors import ClosedError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb

ACKNOWLEDGED_WAIT_S = 0.25
"""Bound of the wait of a read which does not block, until a replica knows that all others have
acknowledged its content: normally some milliseconds. So a client reads what it has appended."""

FIRST_LISTING_WAIT_S = 5.0
"""Bound of the wait for the first listing of the stores, by reads which do not block, and by those
of the write head: a replica that has just started does not know what is stored. The first would
find nothing where there is content, and the others begin before it."""

OFFSET_JUMP_AGE_S = 6 * 3600
"""A read skips a gap in a journal when the fragment after it is older than this: until then a
broker may still upload the bytes of the gap."""


class Summary(NamedTuple):
    """Span of an index; all zero when it is empty.

    Attributes:
        begin: offset of the first byte.
        end: offset after the last byte.
        mod_time: modification time of the last fragment in its store, 0 if it is local.
    """

    begin: int
    end: int
    mod_time: int


_NOTHING = Summary(0, 0, 0)


class Extent(NamedTuple):
    """Span of what can be read.

    Attributes:
        begin: offset of the first byte.
        head: offset after the last byte.
        size_bytes: number of bytes between them that exist.
    """

    begin: int
    head: int
    size_bytes: int


class QueryResult(NamedTuple):
    """Place of an offset.

    Attributes:
        status: OK or OFFSET_NOT_YET_AVAILABLE.
        offset: the effective offset: the head for -1, and after a jump the offset jumped to.
        write_head: end of what can be read.
        fragment: the fragment with the offset; ``None`` unless OK. Do not change it.
        file: the fragment's local content; ``None`` where it is in a store only.
    """

    status: pb.Status
    offset: int
    write_head: int
    fragment: pb.Fragment | None = None
    file: ContentFile | None = None


class Page(NamedTuple):
    """Page of fragments.

    Attributes:
        fragments: in order. Do not change them.
        next_page_token: begin of the next fragment that matches, 0 if there is none.
    """

    fragments: Sequence[pb.Fragment]
    next_page_token: int


class Index:
    """Fragments of one journal. The index belongs to the event loop.

    Args:
        now: Unix time in seconds.

    Attributes:
        first_refresh: set once the stores have been listed.
        listing_wanted: set while a listing of the stores should release local fragments, or may
            show bytes that are missing here.
        listing_asked: set while one should begin without a pause.
        on_listing_wanted: called when one is wanted; ``None`` while no one waits for that.
        refresh_failure: why they could not be listed; None when they could, or were not yet.
        on_acknowledged: called when more is acknowledged; ``None`` while no one waits for that.
        spool_end: returns the end of the replica's spool, of which the index knows only content; -1
            before the replica has one.
        unverified_end: returns the end of a head that is unverified; ``None`` if there is none.
        skipped_to: offset at which a restore let the journal continue after a gap; 0 for none.
    """

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._all = CoverSet()
        self._local = CoverSet()
        self._files: dict[int, ContentFile] = {}  # of local fragments, by begin
        self._waiters: set[asyncio.Future[None]] = set()
        self._closed = False
        self._acknowledged: int | None = None  # None: whatever is local can be read
        self._is_reported = False
        self._unacknowledged: deque[pb.Fragment] = deque()  # forms of local fragments, by end
        self._shown: pb.Fragment | None = None  # the last of them which was acknowledged
        self._torn = CoverSet()
        self._stored_end = 0
        self._listed_through = 0  # the greatest end that a listing ever showed
        self._primary_stored = 0
        self._uploaded: set[tuple[int, int]] = set()  # spans of local fragments
        self._gaps: tuple[CoverSet, int, int] | None = None  # see _gap_bytes
        self._listings_begun = self._listings_ended = 0
        self._hole_reads: list[int] = []  # offsets at which reads wait before the write head
        self.first_refresh = asyncio.Event()
        self.listing_wanted = asyncio.Event()
        self.listing_asked = asyncio.Event()
        self.on_listing_wanted: Callable[[], None] | None = None
        self.refresh_failure: str | None = None
        self.on_acknowledged: Callable[[], None] | None = None
        self.spool_end: Callable[[], int] = lambda: -1
        self.unverified_end: Callable[[], int | None] = lambda: None
        self.skipped_to = 0

    # -------------------------------------------------------------- changes

    def commit(self, fragment: pb.Fragment, file: ContentFile) -> None:
        """Add a local fragment, or the longer form of one, which can be read at once.

        Args:
            fragment: kept as it is, not copied.
            file: its content, referenced until a listing of the stores covers the fragment.
        """
        self.add_unacknowledged(fragment, file)
        self.acknowledge(fragment.end)

    def add_unacknowledged(self, fragment: pb.Fragment, file: ContentFile) -> None:
        """Add a local fragment, or the longer form of one.

        It can be read as far as it is acknowledged; see :meth:`hold` and :meth:`acknowledge`.

        Args:
            fragment: kept as it is, not copied.
            file: its content, referenced until a listing of the stores covers the fragment.
        """
        if self._closed:
            return
        if self._local.add(fragment):
            self._files[fragment.begin] = file
            if len(self._files) > len(self._local):
                self._drop_files()
        self._all.add(fragment)
        if self._acknowledged is not None and fragment.end > self._acknowledged:
            self._unacknowledged.append(fragment)
        elif self._waiters:
            self._wake()

    def hold(self, *, end: int | None = None, is_reported: bool) -> None:
        """Hide local content which is not acknowledged, until :meth:`release`.

        Args:
            end: offset through which all replicas have acknowledged content; by default all that
                can be read now.
            is_reported: True if the primary is another broker, which reports what is acknowledged:
                later than its client.
        """
        self._is_reported = is_reported
        if end is not None:
            self._acknowledged = end
        elif self._acknowledged is None:
            self._acknowledged = self._all.end

    def acknowledge(self, end: int) -> None:
        """Show local content before ``end``: all replicas have acknowledged it."""
        if self._acknowledged is None or end <= self._acknowledged:
            return
        self._acknowledged = end
        forms = self._unacknowledged
        while forms and forms[0].end <= end:
            self._shown = forms.popleft()
        if self._waiters:
            self._wake()
        if self.on_acknowledged is not None:
            self.on_acknowledged()

    def release(self) -> None:
        """Show all local content, now and in future: this replica is the only one."""
        if self._acknowledged is not None:
            self._acknowledged, self._shown = None, None
            self._unacknowledged.clear()
            self._wake()
            if self.on_acknowledged is not None:
                self.on_acknowledged()

    def begin_listing(self) -> None:
        """Note that a listing of the stores begins: it shows what was stored before."""
        self._listings_begun += 1
        self.listing_asked.clear()

    def replace_remote(self, remote: CoverSet, torn: CoverSet | None = None) -> None:
        """Adopt a listing of all stores, and release local fragments which it covers.

        Args:
            remote: kept; the caller must not use it any more.
            torn: stored fragments without their content: the journal was appended to up to the
                last one's end.
        """
        self._torn = CoverSet() if torn is None else torn
        self._stored_end = remote.end
        self._listed_through = max(self._listed_through, remote.end)
        self._local = CoverSet.difference(self._local, remote)
        self._drop_files()
        self._uploaded &= {(fragment.begin, fragment.end) for fragment in self._local}
        for fragment in self._local:
            remote.add(fragment)
        self._all = remote
        self.refresh_failure = None
        self.first_refresh.set()
        self._end_listing()

    def note_refresh_failure(self, reason: str) -> None:
        """Note why the stores could not be listed."""
        self.refresh_failure = reason
        self._end_listing()

    def expect_stored(self, end: int) -> None:
        """Note that the primary has stored the content before ``end``: a listing should show it.

        Local fragments are released by that listing only.
        """
        self._primary_stored = max(self._primary_stored, end)
        self._judge_listing()

    def note_uploaded(self, fragment: pb.Fragment) -> None:
        """Note that a local fragment is in a store, which the next listing will show."""
        self._uploaded.add((fragment.begin, fragment.end))

    def close(self) -> None:
        """End waiting queries and release all files: the replica ends."""
        self._closed = True
        self._all, self._local = CoverSet(), CoverSet()
        self._files.clear()
        self._unacknowledged.clear()
        self._wake()

    def _end_listing(self) -> None:
        self._listings_ended = self._listings_begun
        self._judge_listing()
        self._wake()

    def _judge_listing(self) -> None:
        local = self._local
        if (
            self.listing_asked.is_set()
            or (local and local[0].end <= self._primary_stored)
            or any(not self._all.longest_overlap(offset)[1] for offset in self._hole_reads)
        ):
            self.listing_wanted.set()
            if self.on_listing_wanted is not None:
                self.on_listing_wanted()
        else:
            self.listing_wanted.clear()

    def _drop_files(self) -> None:
        begins = {fragment.begin for fragment in self._local}
        self._files = {begin: file for begin, file in self._files.items() if begin in begins}

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -------------------------------------------------------------- look-up

    def local(self) -> list[tuple[pb.Fragment, ContentFile]]:
        """Return local fragments which no listing covers yet, with their files."""
        return [(fragment, self._files[fragment.begin]) for fragment in self._local]

    @property
    def readable_end(self) -> int:
        """Offset after the last byte that can be read: the write head of reads."""
        end = self._end
        if self._acknowledged is None or end <= self._acknowledged:
            return end
        return max(self._acknowledged, self._stored_end, self._torn.end)

    @property
    def _end(self) -> int:
        """Offset after the last byte that was given, also if its fragment is torn."""
        return max(self._all.end, self._torn.end)

    @property
    def listed_end(self) -> int:
        """Offset after the last byte that the last listing of the stores showed."""
        return self._stored_end

    @property
    def acknowledged_end(self) -> int:
        """Offset through which all replicas have acknowledged content, as far as is known."""
        return sys.maxsize if self._acknowledged is None else self._acknowledged

    def summary(self) -> Summary:
        """Return the span of the index, with what is not acknowledged, and torn fragments."""
        fragments = self._all
        end = fragments.end
        if self._torn.end > end:  # no append may begin before it
            return Summary(fragments.begin if end else 0, self._torn.end, 0)
        return Summary(fragments.begin, end, fragments[-1].mod_time) if end else _NOTHING

    def extent(self) -> Extent:
        """Return the span of what can be read, and its size."""
        head, fragments = self.readable_end, self._all
        begin = min(fragments.begin, head) if fragments else head
        return Extent(begin, head, max(0, head - begin - self._gap_bytes()))

    def _gap_bytes(self) -> int:
        """Return the number of missing bytes between the first one and the last one.

        They are counted again where there is another fragment, and not while the last one grows.
        """
        fragments = self._all
        known = self._gaps
        if known is None or known[0] is not fragments or known[1] != len(fragments):
            gaps = fragments.end - fragments.begin - fragments.length_bytes()
            known = self._gaps = (fragments, len(fragments), gaps)
        return known[2]

    def unstored(self) -> CoverSet:
        """Return local fragments that are in no store, as far as this replica knows."""
        return CoverSet(
            fragment
            for fragment in self._local
            if fragment.end > self._primary_stored
            and (fragment.begin, fragment.end) not in self._uploaded
        )

    def follows(self, spool: pb.Fragment) -> bool:
        """Return True if it continues after a spool, and has every byte from there to its end.

        Not after a spool with content: then a stranger wrote what is stored after it.
        """
        offset, end = spool.end, self._all.end
        return spool.begin == offset < end and self._all.covers(offset, end)

    async def query(self, request: pb.ReadRequest) -> QueryResult:
        """Find the fragment of a read's offset; wait for it if the read blocks.

        A read which does not block waits for the first listing of the stores, if it finds nothing.

        Args:
            request: its ``offset``, ``block``, ``begin_mod_time`` and ``include_unacknowledged``
                are used.

        Raises:
            ClosedError: the replica ended.
        """
        offset, begin_mod_time, block = request.offset, request.begin_mod_time, request.block
        is_held = not request.include_unacknowledged
        if offset == -1:
            await self._await_first_listing()
        if is_held and self._is_reported and (offset == -1 or not block):
            await self._await_acknowledgement(offset)
        if offset == -1:
            offset = self.readable_end if is_held else self._end
        has_waited = self.first_refresh.is_set()
        while True:
            if self._closed:
                raise ClosedError("the journal is no longer served here; try again")
            end = self.readable_end if is_held else self._end
            if not block or offset < end:
                result = self._look_up(offset, begin_mod_time, end, block=block)
                if result.status == pb.OK or (not block and has_waited):
                    return result
                offset = result.offset
            if not block:
                await self._await_first_listing()
                has_waited = True
            elif offset < end:
                await self._change_in_hole(offset)
            else:
                await self._change()

    async def list_again(self) -> None:
        """Wait for a listing of the stores that begins from now on, or for its failure."""
        wanted = self._listings_begun + 1
        self.listing_asked.set()
        self._judge_listing()
        while self._listings_ended < wanted and not self._closed:
            await self._change()

    async def _await_first_listing(self) -> None:
        """Wait until the stores were listed, or could not be. Bounded."""
        try:
            async with asyncio.timeout(FIRST_LISTING_WAIT_S):
                while not (
                    self.first_refresh.is_set() or self.refresh_failure is not None or self._closed
                ):
                    await self._change()
        except TimeoutError:
            pass  # what is stored is not yet available

    async def _await_acknowledgement(self, offset: int) -> None:
        """Wait until what is local now is acknowledged, if a read needs that. Bounded."""
        end = self._all.end
        if not (self.readable_end < end and (offset == -1 or self.readable_end <= offset < end)):
            return
        try:
            async with asyncio.timeout(ACKNOWLEDGED_WAIT_S):
                while self.readable_end < end and not self._closed:
                    await self._change()
        except TimeoutError:
            pass  # the primary is gone, or a replica does not answer it

    def cover(self) -> CoverSet:
        """Return a copy of all fragments, with what is not acknowledged."""
        return self._all.copy()

    def page(
        self,
        *,
        begin_mod_time: int = 0,
        end_mod_time: int = 0,
        token: int = 0,
        limit: int,
        unstored_only: bool = False,
        torn_only: bool = False,
    ) -> Page:
        """Return a page of fragments (broker section 14), also of what is not acknowledged.

        Args:
            begin_mod_time: leave out stored fragments modified before this Unix second.
            end_mod_time: leave out fragments modified after it, and local ones; 0 for no bound.
            token: begin of the first fragment wanted.
            limit: how many at most.
            unstored_only: leave out what the last listing of the stores showed.
            torn_only: return the torn fragments instead, which no other page has.
        """
        found: list[pb.Fragment] = []
        fragments = self._local if unstored_only else self._torn if torn_only else self._all
        for at in range(fragments.first_from(token), len(fragments)):
            fragment = fragments[at]
            mod_time = fragment.mod_time
            if mod_time != 0 and mod_time < begin_mod_time:
                continue
            if end_mod_time != 0 and (mod_time == 0 or mod_time > end_mod_time):
                continue
            if len(found) == limit:
                return Page(found, fragment.begin)
            found.append(fragment)
        return Page(found, 0)

    def _look_up(self, offset: int, begin_mod_time: int, end: int, *, block: bool) -> QueryResult:
        """Look up an offset of what can be read, which ends at ``end``.

        Where a torn fragment is all that there is, it is found: its reading fails, and says why. A
        read that blocks waits for its content while a broker may still store it.
        """
        fragments, torn = self._all, self._torn
        while offset < end:
            at, found = fragments.longest_overlap(offset)
            if found:
                fragment = fragments[at]
            else:
                following = fragments[at] if at < len(fragments) else None
                is_final = following is not None and self._is_removed_before(
                    following, is_first=at == 0
                )
                at, is_torn = torn.longest_overlap(offset)
                if is_torn and (is_final or not block):
                    fragment = torn[at]
                elif following is not None and is_final:
                    offset = following.begin
                    continue
                else:
                    break
            mod_time = fragment.mod_time
            if mod_time != 0 and mod_time < begin_mod_time:
                offset = fragment.end
                continue
            file = self._file_of(fragment)
            if fragment.end > end:
                fragment = self._form_before(end, fragment)
            return QueryResult(pb.OK, offset, end, fragment, file)
        return QueryResult(pb.OFFSET_NOT_YET_AVAILABLE, offset, end)

    def _is_removed_before(self, fragment: pb.Fragment, *, is_first: bool) -> bool:
        """Return True if no one has the bytes before a fragment, so that reads skip them.

        Of the first fragment if it is stored, or what was stored before it is not listed any more:
        a retention removed it. Elsewhere a broker may still upload them, if it is not too late, and
        if no restore has let the journal continue there.
        """
        if 0 < fragment.begin == self.skipped_to:
            return True
        if is_first:
            return fragment.mod_time != 0 or fragment.begin <= self._listed_through
        return 0 < fragment.mod_time < self._now() - OFFSET_JUMP_AGE_S

    def _form_before(self, end: int, fragment: pb.Fragment) -> pb.Fragment:
        """Return the form which a local fragment had at ``end``, without its sum if unknown."""
        shown = self._shown
        if shown is not None and shown.begin == fragment.begin and shown.end == end:
            return shown
        form = pb.Fragment()
        form.CopyFrom(fragment)
        form.end = end
        form.sum.Clear()
        return form

    def _file_of(self, fragment: pb.Fragment) -> ContentFile | None:
        return None if fragment.mod_time != 0 else self._files.get(fragment.begin)

    async def _change_in_hole(self, offset: int) -> None:
        """Wait for a change where bytes are missing. Another broker may store them meanwhile."""
        self._hole_reads.append(offset)
        self._judge_listing()
        try:
            await self._change()
        finally:
            self._hole_reads.remove(offset)

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
