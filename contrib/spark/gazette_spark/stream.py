"""Streaming reads: offsets of micro-batches on the driver, and the ranges of each.

A follower lists the journals of the stream, and how far they go. Offsets say how far each journal
was read, and how much is left. Spark stores them as JSON, and compares the text, so that equal
offsets have equal texts::

    {"version": 1, "isolation": "committed", "journals":
        {"shop/orders": {"next": 73123, "created": 7, "state": "…"}}}

``next`` is the offset to read on from, ``created`` the Etcd revision at which the journal was
created, where it is known, and ``state`` the stored checkpoint of the journal's producers there.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from gazette_sdk.errors import (
    ConfigurationError,
    DecodeError,
    GazetteError,
    JournalNotFoundError,
    SuspendedError,
)
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.message.checkpoint import Checkpoint, ProducerState
from gazette_sdk.message.delivery import HORIZON_S
from gazette_sdk.message.sequencer import age_threshold
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.retries import pause
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.transport.listing import WatchedList
from gazette_sdk.transport.loop import for_each
from gazette_spark.options import Options, clear_errors, open_transport
from gazette_spark.planning import (
    CONCURRENT_LISTINGS_MAX,
    STOPPING,
    JournalContent,
    JournalRange,
    Piece,
    ReadTask,
    admitted,
    fragments_of,
    patiently,
    pieces_since,
    range_of,
    selector_of,
    tasks_of,
    uncommitted_ranges,
)
from gazette_spark.range_read import read_ranges, state_behind

VERSION = 1


@dataclass(frozen=True, slots=True)
class Position:
    """Position in one journal.

    Attributes:
        next: offset to read on from.
        created: Etcd revision at which the journal was created; 0 if it is not known.
        state: stored checkpoint of its producers; empty if there are none, or not sequenced.
    """

    next: int
    created: int = 0
    state: bytes = b""

    @property
    def producers(self) -> list[ProducerState]:
        """States of the journal's producers."""
        return Checkpoint.from_bytes(self.state).producers if self.state else []

    @property
    def replay_begin(self) -> int:
        """Least offset that may be read again: the begin of the oldest open transaction."""
        begins = [producer.begin for producer in self.producers if producer.begin >= 0]
        return min([self.next, *begins])

    def without_abandoned(self, begin: int, unix_ns: int) -> Position:
        """Return the position without old transactions that cannot be read again.

        The publisher of a transaction that is open for a day died most likely. Once its content is
        removed, no one needs it, and it is no loss.

        Args:
            begin: offset of the journal's first content.
            unix_ns: time of this machine, in nanoseconds since 1970.
        """
        producers = self.producers
        newest = max((producer.last_ack for producer in producers), default=0)
        threshold = age_threshold(newest, HORIZON_S, unix_ns)
        left = [
            producer
            for producer in producers
            if not (0 <= producer.begin < begin and producer.last_ack < threshold)
        ]
        if len(left) == len(producers):
            return self
        offsets = Checkpoint.from_bytes(self.state).offsets
        return dataclasses.replace(self, state=Checkpoint(offsets, left).to_bytes())


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """Offset of a stream.

    Attributes:
        isolation: isolation of the stream.
        journals: position of each journal that was seen, by name.
    """

    isolation: str
    journals: Mapping[str, Position]

    def to_json(self) -> dict[str, Any]:
        """Return the offset as Spark stores it."""
        journals: dict[str, dict[str, Any]] = {}
        for name in sorted(self.journals):
            position = self.journals[name]
            journals[name] = {"next": position.next}
            if position.created:
                journals[name]["created"] = position.created
            if position.state:
                journals[name]["state"] = base64.b64encode(position.state).decode("ascii")
        return {"version": VERSION, "isolation": self.isolation, "journals": journals}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], isolation: str) -> StreamOffset:
        """Return a stored offset of a stream with an isolation.

        Raises:
            ConfigurationError: it is of another version, or of another isolation.
        """
        if stored.get("version") != VERSION:
            raise ConfigurationError(
                f"gazette: the checkpoint holds offsets of version {stored.get('version')!r}, and"
                f" this version of gazette_spark reads version {VERSION}; use the version that"
                " wrote it, or another checkpointLocation"
            )
        if stored["isolation"] != isolation:
            raise ConfigurationError(
                f"gazette: the checkpoint was written with isolation={stored['isolation']}, and the"
                f" stream has isolation={isolation}; use the former, or another checkpointLocation"
            )
        try:
            journals = {
                name: Position(
                    each["next"],
                    each.get("created", 0),
                    base64.b64decode(each.get("state", ""), validate=True),
                )
                for name, each in stored["journals"].items()
            }
            for position in journals.values():
                if position.state:
                    Checkpoint.from_bytes(position.state)
        except (KeyError, AttributeError, binascii.Error, DecodeError) as error:
            raise ConfigurationError(
                f"gazette: the checkpoint holds a malformed offset ({error!r}); use another"
                " checkpointLocation"
            ) from error
        return cls(isolation, journals)


# -------------------------------------------------------------------------- lag


def lag(progress: Any) -> dict[str, int]:
    """Return the bytes of each journal that a streaming query has not read yet.

    Args:
        progress: progress of the query: ``query.lastProgress``, or ``event.progress`` of a
            ``StreamingQueryListener``, as an object or as a mapping. Sources other than
            ``gazette`` are left out.

    Returns:
        Bytes by journal, after the micro-batch that the progress is about. Journals that do not
        exist any more are left out.
    """
    found: dict[str, int] = {}
    for source in _get(progress, "sources"):
        end, head = (_offset(_get(source, name)) for name in ("endOffset", "latestOffset"))
        positions = end.get("journals", {})
        for journal, position in head.get("journals", {}).items():
            read = positions.get(journal, {}).get("next", 0)
            found[journal] = found.get(journal, 0) + max(0, position["next"] - read)
    return found


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, Mapping) else getattr(holder, name)


def _offset(given: Any) -> Mapping[str, Any]:
    """Return an offset of this source; an empty one if it is of another source, or missing."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        return {}
    is_ours = isinstance(found, Mapping) and {"isolation", "journals"} <= found.keys()
    return found if is_ours else {}


_log = logging.getLogger(__name__)

HEAD_LAG_MAX_S = 5.0
"""Time for which a write head before the offset that was read is looked up again. A broker that
just took a journal over may not have listed all its fragments."""


class JournalFollower:
    """Follower of journals. Its coroutines belong to the SDK's loop.

    Args:
        options: options of the stream.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._transport = open_transport(options.url)
        self._watched = WatchedList(self._transport, selector_of(options))
        # By journal: begin of the first fragment that was needed last.
        self._listed_from: dict[str, int] = {}

    async def journals(self) -> dict[str, pb.ListResponse.Journal]:
        """Return the journals that match the options now, by name.

        Raises:
            GazetteError: they could not be listed once.
        """
        self._watched.start()
        is_first = self._watched.snapshot is None
        snapshot = await patiently(self._watched.first_snapshot, STOPPING)
        if is_first and not snapshot.journals:
            _log.warning(
                "no journal matches %r at %s; the stream reads journals once they are created",
                self._options.journals,
                self._options.url,
            )
        return {journal.spec.name: journal for journal in snapshot.journals}

    async def contents(self, needed: Mapping[str, tuple[int, int]]) -> dict[str, JournalContent]:
        """Return the content of journals that exist, by name.

        Args:
            needed: by journal, the offset from which its fragments are needed, and the one up to
                which it is known to have been written.

        Raises:
            GazetteError: they could not be listed.
        """
        listed = await self.journals()
        names = [name for name in needed if name in listed]

        async def cover_of(name: str) -> CoverSet | None:
            return await self._cover(name, *needed[name])

        covers = await for_each(names, cover_of, CONCURRENT_LISTINGS_MAX)
        return {
            name: JournalContent(listed[name].spec, listed[name].create_revision, cover)
            for name, cover in zip(names, covers, strict=True)
            if cover is not None
        }

    async def heads(self) -> dict[str, int]:
        """Return the write heads of all journals."""
        names = list(await self.journals())
        heads = await for_each(names, self._head, CONCURRENT_LISTINGS_MAX)
        return dict(zip(names, heads, strict=True))

    async def aclose(self) -> None:
        """Stop following."""
        await self._watched.aclose()
        await self._transport.aclose()

    async def _head(self, name: str) -> int:
        try:
            found = await patiently(lambda: read_metadata(self._transport, name, -1))
        except (JournalNotFoundError, SuspendedError):
            return 0  # deleted since it was listed, or without any content to read
        return max(found.write_head, found.offset)

    async def _cover(self, name: str, begin: int, end: int) -> CoverSet | None:
        """Return fragments of a journal from an offset on; None if it was deleted meanwhile.

        It waits for fragments up to ``end``. An idle journal whose content was removed has none,
        and is not waited for if none is needed.
        """
        ends_at = time.monotonic() + HEAD_LAG_MAX_S
        try:
            while True:
                cover = await self._listed(name, begin)
                is_idle = not cover and begin >= end
                if cover.end >= end or is_idle or time.monotonic() >= ends_at:
                    return cover
                await pause(1)
        except JournalNotFoundError:
            return None

    async def _listed(self, name: str, needed: int) -> CoverSet:
        begin = self._listed_from.get(name, 0)
        cover = await fragments_of(self._transport, name, begin=begin)
        if begin and not (cover.begin <= needed <= cover.end and cover):
            # Fragments were replaced by larger ones, or removed.
            cover = await fragments_of(self._transport, name)
        index, _ = cover.longest_overlap(max(needed - 1, 0))
        if index < len(cover):
            self._listed_from[name] = cover[index].begin
        return cover


class GazetteStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a stream of journals.

    One object in one process of the driver plans all micro-batches of a query. Tasks have copies
    of another object, which only read ranges.

    Args:
        options: options of the read.
        schema: requested columns.

    Raises:
        ConfigurationError: an option is of batch reads only.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        if options.end.offsets or options.end.time is not None:
            raise ConfigurationError(
                "gazette: a stream has no end; leave the option 'end' out, and stop the query, or"
                " use the trigger availableNow"
            )
        self._options = options
        self._schema = schema
        self._follower: JournalFollower | None = None
        # Write heads at which a query with the trigger AvailableNow ends.
        self._last_heads: dict[str, int] | None = None
        self._contents: dict[str, JournalContent] = {}

    # ------------------------------------------------------------------ driver

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names, as those below
        """Return the offset before all journals."""
        return StreamOffset(self._options.isolation, {}).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of the option ``maxBytesPerTrigger``."""
        limit = self._options.bytes_per_trigger_max
        return ReadAllAvailable() if limit is None else ReadMaxBytes(limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note the journals and their write heads, after which the query reads nothing."""
        with clear_errors():
            self._last_heads = sdk_loop.run(self._following.heads())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the offset after the next micro-batch; ``start`` if there is nothing new."""
        with clear_errors():
            before = StreamOffset.from_json(start, self._options.isolation)
            limit_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
            return self._latest(before, limit_bytes).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the write heads that the last call of :meth:`latestOffset` found."""
        if not self._contents:
            return None
        heads = {name: Position(found.cover.end) for name, found in self._contents.items()}
        return StreamOffset(self._options.isolation, heads).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[ReadTask]:
        """Return the tasks that read what is between two offsets."""
        with clear_errors():
            isolation = self._options.isolation
            before = StreamOffset.from_json(start, isolation)
            behind = StreamOffset.from_json(end, isolation)
            return tasks_of(
                part
                for name, position in behind.journals.items()
                if position != before.journals.get(name)
                for part in self._ranges(name, before.journals.get(name), position)
            )

    def stop(self) -> None:
        """Stop following the journals."""
        follower, self._follower = self._follower, None
        if follower is not None:
            sdk_loop.run(follower.aclose())

    # ------------------------------------------------------------------- tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield record batches of a task. Runs in a worker of an executor."""
        assert isinstance(partition, ReadTask)
        with clear_errors():
            yield from read_ranges(self._options, self._schema, partition.ranges)

    # ---------------------------------------------------------------- planning

    @property
    def _following(self) -> JournalFollower:
        if self._follower is None:
            self._follower = JournalFollower(self._options)
        return self._follower

    def _latest(self, before: StreamOffset, limit_bytes: int | None) -> StreamOffset:
        listed = sdk_loop.run(self._following.journals())
        names = [name for name in listed if self._last_heads is None or name in self._last_heads]
        self._contents = sdk_loop.run(
            self._following.contents({name: _read_of(before.journals.get(name)) for name in names})
        )
        begins: dict[str, Position] = {}
        pieces: dict[str, list[Piece]] = {}
        for name, content in self._contents.items():
            position = before.journals.get(name)
            begin = self._begin(position, content)
            if position is None and (not content.cover or begin.next > content.cover.end):
                continue  # nothing is written yet where it begins
            begins[name] = begin
            if position is not None and _is_moved(position, begin):
                continue  # a micro-batch of its own, so that it is the same when it is run again
            end = content.readable_end(begin.next)
            if self._last_heads is not None:
                end = min(end, self._last_heads[name])
            pieces[name] = list(content.pieces(begin.next, end))
        ends = admitted(pieces, limit_bytes)
        for name, end in ends.items():
            self._check_gaps(self._contents[name], begins[name], end)
        journals = {**before.journals, **begins, **self._positions_at(ends, begins)}
        return StreamOffset(self._options.isolation, journals)

    def _positions_at(
        self, ends: Mapping[str, int], begins: Mapping[str, Position]
    ) -> dict[str, Position]:
        """Return positions at offsets; of a committed stream with the states of producers there."""

        def at(name: str) -> Position:
            before, end = begins[name], ends[name]
            if self._options.isolation != "committed":
                return dataclasses.replace(before, next=end)
            part = self._committed_range(self._contents[name], before, end)
            return dataclasses.replace(before, next=end, state=state_behind(self._options, part))

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return dict(zip(ends, threads.map(at, ends), strict=True))

    def _ranges(self, name: str, before: Position | None, behind: Position) -> list[JournalRange]:
        if before is not None and _is_moved(before, behind):
            return []
        content = self._contents.get(name)
        if content is None or content.cover.end < behind.next:
            needed = {name: (_read_of(before)[0], behind.next)}
            content = sdk_loop.run(self._following.contents(needed)).get(name)
        if content is None or _is_other(behind, content):
            self._lost(
                f"{name}: the journal was deleted, and its content up to offset {behind.next} with"
                " it",
                name,
                behind.next,
            )
            return []
        begin, end = self._begin(before, content), min(behind.next, content.cover.end)
        if before is not None and _is_moved(before, begin):
            return []
        if end < behind.next:
            self._lost(
                f"{name}: the journal ends at offset {end}, and the micro-batch at {behind.next}",
                name,
                end,
            )
        if begin.next >= end:
            return []
        self._check_gaps(content, begin, end)
        if self._options.isolation == "committed":
            return [self._committed_range(content, begin, end)]
        return list(uncommitted_ranges(content, self._options, begin.next, end))

    def _committed_range(self, content: JournalContent, begin: Position, end: int) -> JournalRange:
        return range_of(
            content,
            self._options,
            begin.next,
            end,
            state=begin.state,
            replay_begin=begin.replay_begin,
        )

    # --------------------------------------------------------------- positions

    def _begin(self, before: Position | None, content: JournalContent) -> Position:
        """Return the position at which a journal is read on, and check that its content is there.

        Raises:
            GazetteError: content that was not read yet is gone, and the stream fails then.
        """
        name, cover = content.name, content.cover
        if before is None:
            return self._first(content)
        if _is_other(before, content):
            self._lost(f"{name}: the journal was deleted, and created anew", name, before.next)
            return Position(cover.begin, content.created)
        if cover and cover.begin > before.replay_begin:
            before = before.without_abandoned(cover.begin, time.time_ns())
        needed = before.replay_begin
        if not cover or (cover.begin <= needed and before.next <= cover.end):
            return before  # without fragments it is not known where the journal ends
        if cover.end < before.next:
            self._lost(
                f"{name}: the journal ends at offset {cover.end}, and was read up to {before.next}",
                name,
                before.next,
            )
            # Without a revision it may be another journal of the same name.
            is_same = bool(content.created)
            return self._moved(before, cover.end, content) if is_same else Position(cover.begin)
        self._lost(
            f"{name}: content from offset {needed} to {cover.begin} was removed before it was read",
            name,
            needed,
        )
        return self._moved(before, max(before.next, cover.begin), content)

    def _first(self, content: JournalContent) -> Position:
        """Return the position at which a journal is read that was not seen before."""
        first = self._options.begin.offsets.get(content.name, 0)
        wanted = pieces_since(content, first, None, self._options.begin.time)
        begin = next((piece.begin for piece in wanted), max(first, content.cover.end))
        return Position(begin, content.created)

    def _moved(self, before: Position, begin: int, content: JournalContent) -> Position:
        """Return a position moved over content that was lost, with what is left of transactions."""
        cover = content.cover
        producers = [
            producer._replace(
                begin=max(producer.begin, cover.begin) if producer.begin < cover.end else -1
            )
            if producer.begin >= 0
            else producer
            for producer in before.producers
        ]
        state = Checkpoint({content.name: begin}, producers).to_bytes() if before.state else b""
        return Position(begin, before.created, state)

    def _check_gaps(self, content: JournalContent, begin: Position, end: int) -> None:
        """Check that no content is missing of what is read, or read again.

        Raises:
            GazetteError: some is, and the stream fails then.
        """
        for gap in content.gaps(begin.replay_begin, end):
            self._lost(
                f"{content.name}: content from offset {gap[0]} to {gap[1]} was removed before it"
                " was read",
                content.name,
                gap[0],
            )

    def _lost(self, what: str, journal: str, offset: int) -> None:
        """Raise or log the loss of content, as the option ``failOnDataLoss`` says."""
        if not self._options.fails_on_data_loss:
            _log.warning("%s; the stream goes on with what there is", what)
            return
        raise GazetteError(
            f"{what}; the option failOnDataLoss=false goes on with what there is, another"
            " checkpointLocation begins anew; keep fragments for longer",
            journal=journal,
            offset=offset,
        )


def _read_of(position: Position | None) -> tuple[int, int]:
    """Return the offset from which a stream may read again, and the one up to which it read."""
    return (0, 0) if position is None else (position.replay_begin, position.next)


def _is_other(position: Position, content: JournalContent) -> bool:
    """Return True if a position is one of a journal that was deleted, and created anew since."""
    return bool(position.created and content.created) and position.created != content.created


def _is_moved(before: Position, behind: Position) -> bool:
    """Return True if nothing lies between two positions, as content was lost there."""
    return before.created != behind.created or behind.next < before.next
