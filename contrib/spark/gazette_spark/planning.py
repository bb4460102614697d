"""Planning of reads: content of journals to ranges, and ranges to tasks.

The content is that of one moment: the fragments of each journal, in order, and the gaps between.
All that follows from it is pure.

Ranges end where fragments end. Fragments end between appends, and no message spans two appends, so
that uncommitted ranges are decoded independently. A committed range is a whole journal: which of
its messages are committed depends on those before and after.

Admission decides how much of each journal the next micro-batch reads.

:class:`Pruning` finds the ranges of journals that hold no wanted row, by the filters that Spark
pushes down. Ranges are left out, and no rows: every filter is handed back to Spark, which applies
it again. A schema may give metadata columns other types, which may be less exact. Filters of those
leave out nothing.
"""

from __future__ import annotations

import datetime as dt
import heapq
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, TypeVar

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from gazette_sdk.errors import (
    CallCancelledError,
    ConfigurationError,
    DeadlineExceededError,
    GazetteError,
    JournalNotFoundError,
    SuspendedError,
)
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.framing.base import framing_for
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path, parse_content_path
from gazette_sdk.protocol.labels import CONTENT_TYPE, parse_selector, value_of
from gazette_sdk.retries import retrying
from gazette_sdk.transport import Transport
from gazette_sdk.transport.append.append import TRANSIENT
from gazette_sdk.transport.fragment_store import GAP_AGE_S
from gazette_sdk.transport.journal_reader import begin_mod_time_of
from gazette_sdk.transport.listing import list_all_fragments, list_journals
from gazette_sdk.transport.loop import for_each
from gazette_spark.options import Options, open_transport

T = TypeVar("T")

FAILING_MAX_S = 30.0
"""Time for which a call of the driver that fails is made again."""

STOPPING: tuple[type[GazetteError], ...] = (CallCancelledError, DeadlineExceededError)
"""Errors of a broker that was reached, and stops or is late."""

TRANSIENT_OR_STOPPING = (*TRANSIENT, *STOPPING)
"""Errors of brokers that cannot be reached, are too few, or stop."""


async def list_patiently(transport: Transport, selector: pb.LabelSelector | str) -> pb.ListResponse:
    """Return the journals that match a selector, also where a broker stops meanwhile.

    Raises:
        GazetteError: they could not be listed. Without any broker this is an error at once.
    """
    return await patiently(lambda: list_journals(transport, selector), STOPPING)


async def patiently(
    call: Callable[[], Awaitable[T]],
    repeated: tuple[type[GazetteError], ...] = TRANSIENT_OR_STOPPING,
) -> T:
    """Return the result of a call, which is made again for half a minute while it fails.

    Args:
        call: makes the call.
        repeated: errors after which it is made again.

    Raises:
        GazetteError: it failed for so long, or by another error.
    """
    return await retrying(call, repeated, patience_s=FAILING_MAX_S)


CONCURRENT_LISTINGS_MAX = 16
"""Limit of journals whose fragments are listed at once."""

_JSON = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Piece:
    """Content ``[begin, end)`` of a journal that one fragment holds."""

    begin: int
    end: int
    fragment: pb.Fragment


@dataclass(frozen=True, slots=True)
class JournalContent:
    """Content of a journal.

    Attributes:
        spec: the journal, as it was listed.
        created: Etcd revision at which it was created; 0 if it is not known.
        cover: its fragments. One without a modification time is not stored yet.
    """

    spec: pb.JournalSpec
    created: int
    cover: CoverSet

    @property
    def name(self) -> str:
        """Name of the journal."""
        return self.spec.name

    @property
    def labels(self) -> tuple[tuple[str, str], ...]:
        """Labels of the journal. Several values of one label are joined by commas."""
        values: dict[str, list[str]] = {}
        for label in self.spec.labels.labels:
            values.setdefault(label.name, []).append(label.value)
        return tuple((name, ",".join(found)) for name, found in values.items())

    def content_type(self, options: Options) -> str:
        """Return the content type of the journal's framing."""
        return options.content_type or value_of(self.spec.labels, CONTENT_TYPE) or _JSON

    def pieces(self, begin: int, end: int | None = None) -> Iterator[Piece]:
        """Yield content between two offsets, each byte once, in order."""
        cover = self.cover
        at, _ = cover.longest_overlap(begin)
        for index in range(at, len(cover)):
            fragment = cover[index]
            begin = max(begin, fragment.begin)
            stop = fragment.end if end is None else min(end, fragment.end)
            if begin < stop:
                yield Piece(begin, stop, fragment)
                begin = stop
            elif fragment.begin >= stop:
                return

    def gaps(self, begin: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the parts between two offsets that no fragment holds."""
        found = []
        for piece in self.pieces(begin, end):
            if piece.begin > begin:
                found.append((begin, piece.begin))
            begin = piece.end
        return tuple(found)

    def readable_end(self, begin: int) -> int:
        """Return the end of the content that can be read in order from an offset.

        Content that is missing before a fragment of less than six hours may still be stored by
        another broker, so that readers wait for it; older gaps are passed over.
        """
        end = begin
        is_first = self.cover.begin >= begin
        for piece in self.pieces(begin):
            stored = piece.fragment.mod_time
            is_gap = piece.begin > end and not is_first
            if is_gap and (not stored or stored > time.time() - GAP_AGE_S):
                return end
            end, is_first = piece.end, False
        return end


async def list_content(options: Options) -> list[JournalContent]:
    """Return the content of all journals that the options select; see :func:`content_of`."""
    async with open_transport(options.url) as transport:
        return await content_of(transport, options)


async def content_of(transport: Transport, options: Options) -> list[JournalContent]:
    """Return the content of all journals that the options select.

    Raises:
        JournalNotFoundError: there is none.
        GazetteError: the broker, or the store, failed.
    """
    listing = await list_patiently(transport, parse_selector(selector_of(options)))
    if not listing.journals:
        raise JournalNotFoundError(
            f"no journal matches {options.journals!r} at {options.url}; check the option"
            " 'journals', and the address or the store"
        )

    async def fetch(journal: pb.ListResponse.Journal) -> JournalContent:
        cover = await fragments_of(transport, journal.spec.name)
        return JournalContent(journal.spec, journal.create_revision, cover)

    return await for_each(listing.journals, fetch, CONCURRENT_LISTINGS_MAX)


async def fragments_of(transport: Transport, journal: str, *, begin: int = 0) -> CoverSet:
    """Return the fragments of a journal that begin at an offset or after it."""
    request = pb.FragmentsRequest(journal=journal, next_page_token=begin)
    try:
        response = await patiently(lambda: list_all_fragments(transport, request))
    except SuspendedError:
        return CoverSet()  # it holds nothing to read
    return CoverSet(fragment.spec for fragment in response.fragments)


def selector_of(options: Options) -> str:
    """Return the label selector of a read's journals."""
    if not options.is_store:
        return options.journals
    is_prefix = options.journals.endswith("/")
    return f"prefix={options.journals}" if is_prefix else f"name={options.journals}"


def admitted(pieces: Mapping[str, Iterable[Piece]], limit_bytes: int | None) -> dict[str, int]:
    """Return the offset up to which each journal is read next.

    Pieces are taken over all journals in the order in which they were stored, so that journals
    advance together in event time, until the limit is used up. At least one piece is taken, and
    pieces are not divided.

    Args:
        pieces: content that is not read yet by journal, in the order of each journal.
        limit_bytes: limit in bytes; None for no limit.

    Returns:
        Offsets by journal. Journals of which nothing is read are not in it.
    """
    ends: dict[str, int] = {}
    iterators = {name: iter(found) for name, found in pieces.items()}
    waiting: list[tuple[float, str, int, int]] = []

    def add_next(name: str) -> None:
        piece = next(iterators[name], None)
        if piece is not None:
            stored = piece.fragment.mod_time or math.inf
            heapq.heappush(waiting, (stored, name, piece.begin, piece.end))

    for name in iterators:
        add_next(name)
    left = math.inf if limit_bytes is None else limit_bytes
    while waiting and left > 0:
        _, name, begin, end = heapq.heappop(waiting)
        ends[name] = end
        left -= end - begin
        add_next(name)
    return ends


@dataclass(slots=True)
class Pruning:
    """Limits of the rows that filters keep.

    Attributes:
        journals: names of journals; None for all.
        prefixes: prefixes that journals' names must have.
        begin: least offset of a row.
        end: greatest offset of a row; None for no limit.
        since: least time of a row; None for no limit.
    """

    journals: frozenset[str] | None = None
    prefixes: list[str] = field(default_factory=list)
    begin: int = 0
    end: int | None = None
    since: dt.datetime | None = None

    @classmethod
    def of(cls, filters: Iterable[Filter]) -> Pruning:
        """Return the limits of filters that must all be true. Others than these are left out."""
        found = cls()
        for each in filters:
            attribute = getattr(each, "attribute", None)
            if isinstance(attribute, tuple) and len(attribute) == 1:
                {
                    "_journal": found._add_journal,
                    "_offset": found._add_offset,
                    "_time": found._add_time,
                }.get(attribute[0], lambda _: None)(each)
        return found

    def keeps_journal(self, name: str) -> bool:
        """Return True if rows of a journal may be wanted."""
        is_named = self.journals is None or name in self.journals
        return is_named and all(name.startswith(prefix) for prefix in self.prefixes)

    def keeps_range(self, begin: int, end: int) -> bool:
        """Return True if rows at offsets of ``[begin, end)`` may be wanted."""
        return end > self.begin and (self.end is None or begin <= self.end)

    def _add_journal(self, given: Filter) -> None:
        if isinstance(given, EqualTo | In):
            value: Any = given.value
            names = frozenset([value] if isinstance(given, EqualTo) else value)
            if all(isinstance(name, str | None) for name in names):
                self.journals = names if self.journals is None else self.journals & names
        elif isinstance(given, StringStartsWith) and isinstance(given.value, str):
            self.prefixes.append(given.value)

    def _add_offset(self, given: Filter) -> None:
        if type(getattr(given, "value", None)) not in {int, Decimal}:
            return
        if isinstance(given, EqualTo | GreaterThan | GreaterThanOrEqual):
            self.begin = max(self.begin, given.value)
        if isinstance(given, EqualTo | LessThan | LessThanOrEqual):
            self.end = given.value if self.end is None else min(self.end, given.value)

    def _add_time(self, given: Filter) -> None:
        if isinstance(given, EqualTo | GreaterThan | GreaterThanOrEqual):
            time = given.value
            if not isinstance(time, dt.datetime):
                return
            time = time if time.tzinfo else time.replace(tzinfo=dt.UTC)
            self.since = time if self.since is None else max(self.since, time)


_log = logging.getLogger(__name__)

RANGE_BYTES = 128 << 20
"""Adjacent fragments are joined to ranges of up to this size, because each task has the cost of a
worker's start. Larger fragments are split, where lines can be found in their middle. Spark's own
sources have the same limit, ``spark.sql.files.maxPartitionBytes``."""

OPENING_BYTES = 4 << 20
"""Content whose reading takes about as long as a range's begin: ``spark.sql.files.openCostInBytes``
of Spark's own sources. With it, small ranges share a task."""

SHARED_TASKS_MIN = 16
"""Ranges share tasks only where so many tasks are left: cores of executors should not stay idle."""


@dataclass(frozen=True)
class JournalRange:
    """Bytes ``[begin, end)`` of a journal, which one task reads.

    Attributes:
        journal: name of the journal.
        begin: offset of the first byte.
        end: offset after the last byte.
        content_type: content type of the journal's framing.
        labels: labels of the journal.
        fragments: fragments that hold the content: path below the journal in a store, and
            modification time in Unix seconds.
        gaps: parts of the range that no fragment held when it was planned.
        state: where sequencing continues, as a stored checkpoint; empty where it begins.
        split: content of a fragment that was split, of which the range is a part: the lines that
            begin in it. None if the range is of whole fragments.
    """

    journal: str
    begin: int
    end: int
    content_type: str
    labels: tuple[tuple[str, str], ...] = ()
    fragments: tuple[tuple[str, int], ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()
    state: bytes = b""
    split: tuple[int, int] | None = None

    def fragment_at(self, offset: int) -> str | None:
        """Return the path of a fragment that held an offset when the range was planned."""
        for path, _ in self.fragments:
            fragment = parse_content_path(self.journal, path)
            if fragment.begin <= offset < fragment.end:
                return path
        return None


@dataclass
class ReadTask(InputPartition):
    """Ranges that a task reads, one after the other."""

    ranges: tuple[JournalRange, ...]


def tasks_of(ranges: Iterable[JournalRange]) -> list[ReadTask]:
    """Return the tasks that read ranges, in their order. Small ranges share one."""
    costs = [(part, part.end - part.begin + OPENING_BYTES) for part in ranges]
    total = sum(cost for _, cost in costs)
    limit = min(RANGE_BYTES, max(OPENING_BYTES, total // SHARED_TASKS_MIN))
    tasks: list[list[JournalRange]] = []
    left = 0
    for part, cost in costs:
        if cost > left:
            tasks.append([])
            left = limit
        tasks[-1].append(part)
        left -= cost
    return [ReadTask(tuple(parts)) for parts in tasks]


def ranges_of(
    contents: Iterable[JournalContent], options: Options, pruning: Pruning
) -> list[JournalRange]:
    """Return the ranges of a batch read.

    Raises:
        ConfigurationError: the read begins or ends in a journal that is not selected.
    """
    contents = list(contents)
    for name, bound in (("begin", options.begin), ("end", options.end)):
        others = sorted(bound.offsets.keys() - {content.name for content in contents})
        if others:
            raise ConfigurationError(
                f"gazette: the option {name!r} names {others[0]}, which the option 'journals' "
                f"({options.journals!r}) does not select; correct one of them"
            )
    times = [time for time in (options.begin.time, pruning.since) if time is not None]
    since = max(times, default=None)
    found: list[JournalRange] = []
    for content in contents:
        if not pruning.keeps_journal(content.name):
            continue
        framing_for(content.content_type(options))
        first = options.begin.offsets.get(content.name, 0)
        last = options.end.offsets.get(content.name)
        if options.isolation == "committed":
            made = _committed_range(content, options, first, last, since)
        else:
            made = uncommitted_ranges(content, options, first, last, since)
        found += [each for each in made if pruning.keeps_range(each.begin, each.end)]
    return found


def range_of(
    content: JournalContent,
    options: Options,
    begin: int,
    end: int,
    *,
    state: bytes = b"",
    replay_begin: int | None = None,
) -> JournalRange:
    """Return one range of a journal.

    Args:
        content: content of the journal.
        options: options of the read.
        begin: offset of the first byte.
        end: offset after the last byte.
        state: where sequencing continues, as a stored checkpoint.
        replay_begin: offset from which content may be read again; by default ``begin``.
    """
    first = begin if replay_begin is None else min(begin, replay_begin)
    return JournalRange(
        content.name,
        begin,
        end,
        content.content_type(options),
        content.labels,
        tuple(_stored(piece.fragment) for piece in content.pieces(first, end)),
        content.gaps(first, end),
        state,
    )


def _committed_range(
    content: JournalContent,
    options: Options,
    first: int,
    last: int | None,
    since: dt.datetime | None,
) -> Iterator[JournalRange]:
    """Yield the range of a whole journal, if it holds any content."""
    begin = next((piece.begin for piece in pieces_since(content, first, last, since)), None)
    if begin is None:
        return
    end = content.readable_end(begin)
    if end < content.cover.end:
        _log.warning(
            "%s: content of offset %d is in no store yet; reading ends there, before %d",
            content.name,
            end,
            content.cover.end,
        )
    end = end if last is None else min(end, last)
    if begin < end:
        yield range_of(content, options, begin, end)


def uncommitted_ranges(
    content: JournalContent,
    options: Options,
    first: int,
    last: int | None,
    since: dt.datetime | None = None,
) -> Iterator[JournalRange]:
    """Yield ranges of adjacent fragments, and of parts of large ones."""
    is_split = framing_for(content.content_type(options)).newline_delimited and (
        options.is_store or bool(options.file_root)
    )
    begin = end = -1
    for piece in pieces_since(content, first, last, since):
        if is_split and _is_splittable(piece.fragment):
            if begin < end:
                yield range_of(content, options, begin, end)
            yield from _parts(content, options, piece)
            begin = end = piece.end
        elif begin < end == piece.begin and piece.end - begin <= RANGE_BYTES:
            end = piece.end
        else:
            if begin < end:
                yield range_of(content, options, begin, end)
            begin, end = piece.begin, piece.end
    if begin < end:
        yield range_of(content, options, begin, end)


def _is_splittable(fragment: pb.Fragment) -> bool:
    # The bytes of others cannot be read from the middle on.
    return (
        fragment.compression_codec == pb.NONE
        and bool(fragment.mod_time)
        and fragment.end - fragment.begin > RANGE_BYTES
    )


def _parts(content: JournalContent, options: Options, piece: Piece) -> Iterator[JournalRange]:
    count = -(-(piece.end - piece.begin) // RANGE_BYTES)
    cuts = [piece.begin + (piece.end - piece.begin) * at // count for at in range(count + 1)]
    for begin, end in itertools.pairwise(cuts):
        part = range_of(content, options, begin, end)
        yield replace(part, split=(piece.begin, piece.end))


def pieces_since(
    content: JournalContent, first: int, last: int | None, since: dt.datetime | None
) -> Iterator[Piece]:
    """Yield content, without stored fragments that hold no message since a time."""
    mod_time_min = 0 if since is None else begin_mod_time_of(since)
    for piece in content.pieces(first, last):
        mod_time = piece.fragment.mod_time
        if not mod_time or mod_time >= mod_time_min:
            yield piece


def _stored(fragment: pb.Fragment) -> tuple[str, int]:
    return content_path(fragment).removeprefix(f"{fragment.journal}/"), fragment.mod_time
