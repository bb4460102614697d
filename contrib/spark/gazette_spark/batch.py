"""Batch reads: the driver splits journals into ranges, and executors decode one range each.

Ranges consist of whole fragments. Fragments end between appends, and no message spans two
appends, so ranges are decoded independently.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from gazette_sdk.errors import JournalNotFoundError
from gazette_sdk.framing import Cut, Cutter
from gazette_sdk.framing.registry import framing_for
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, value_of
from gazette_sdk.protocol.selectors import parse_selector
from gazette_sdk.transport import Transport, connect
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.listing import list_all_fragments, list_journals
from gazette_sdk.transport.read.retry_reader import RetryReader
from gazette_spark.decode import Decoder
from gazette_spark.options import Options

__all__ = ["GazetteBatchReader", "JournalRange"]

RANGE_BYTES = 64 << 20
"""Adjacent fragments are joined to ranges of up to this size, because each task has the cost of a
worker's start."""

BLOCK_BYTES = 4 << 20
"""Size of a decoded block: large enough to make the cost of a call small, and small enough for a
core's share of memory."""

_JSON = "application/x-ndjson"
_TIME = pa.field("_time", pa.timestamp("us", tz="UTC"))


@dataclass
class JournalRange(InputPartition):
    """Bytes ``[begin, end)`` of a journal, which one task reads."""

    journal: str
    begin: int
    end: int
    content_type: str


class GazetteBatchReader(DataSourceReader):
    """Reader of the content that exists when the query is planned.

    Args:
        options: options of the read.
        schema: requested columns.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[JournalRange]:
        """Return the ranges of all journals. Runs on the driver."""
        return sdk_loop.run(_plan(self._options))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield record batches of one range. Runs in a worker of an executor."""
        assert isinstance(partition, JournalRange)
        requested = schema = to_arrow_schema(self._schema, timezone="UTC")
        by_time = self._options.begin.time is not None or self._options.end.time is not None
        if by_time and _TIME.name not in schema.names:
            schema = schema.append(_TIME)
        decoder = Decoder(self._options, partition.journal, partition.content_type, schema)
        for cut in _blocks(self._options, partition):
            batch = decoder.decode(cut)
            if by_time:
                batch = _filter_by_time(self._options, batch).select(requested.names)
            if batch.num_rows:
                yield batch


async def _plan(options: Options) -> list[JournalRange]:
    async with _connect(options) as transport:
        specs = await _journals(transport, options)
        ranges = []
        for spec in specs:
            content_type = options.content_type or value_of(spec.labels, CONTENT_TYPE) or _JSON
            framing_for(content_type)
            for begin, end in await _ranges(transport, spec.name, options):
                ranges.append(JournalRange(spec.name, begin, end, content_type))
        return ranges


def _connect(options: Options) -> Transport:
    return connect(options.url)


async def _journals(transport: Transport, options: Options) -> list[pb.JournalSpec]:
    text = options.journals
    if options.is_store:
        text = f"prefix={text}" if text.endswith("/") else f"name={text}"
    listing = await list_journals(transport, parse_selector(text))
    if not listing.journals:
        raise JournalNotFoundError(f"no journal matches {options.journals!r} at {options.url}")
    return [journal.spec for journal in listing.journals]


async def _ranges(transport: Transport, journal: str, options: Options) -> list[tuple[int, int]]:
    """Return ranges of adjacent fragments, between the offsets of the options."""
    request = pb.FragmentsRequest(journal=journal)
    if options.begin.time is not None:
        request.begin_mod_time = int(options.begin.time.timestamp())
    response = await list_all_fragments(transport, request)
    first = options.begin.offsets.get(journal, 0)
    last = options.end.offsets.get(journal)
    ranges: list[tuple[int, int]] = []
    for fragment in response.fragments:
        begin = max(fragment.spec.begin, first, ranges[-1][1] if ranges else 0)
        end = fragment.spec.end if last is None else min(fragment.spec.end, last)
        if begin >= end:
            continue
        if ranges and ranges[-1][1] == begin and end - ranges[-1][0] <= RANGE_BYTES:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((begin, end))
    return ranges


def _blocks(options: Options, partition: JournalRange) -> Iterator[Cut]:
    """Yield blocks of whole frames. The SDK's loop fetches the next block ahead."""

    async def fetch() -> AsyncGenerator[Cut]:
        cutter = Cutter(framing_for(partition.content_type), partition.begin)
        request = pb.ReadRequest(
            journal=partition.journal,
            offset=partition.begin,
            end_offset=partition.end,
            do_not_proxy=bool(options.file_root),
        )
        async with _connect(options) as transport:
            reader = RetryReader(
                transport, request, file_root=Path(options.file_root) if options.file_root else None
            )
            async with contextlib.aclosing(reader):
                pieces: list[bytes] = []
                size = 0
                while (piece := await reader.read()) is not None:
                    pieces.append(piece)
                    size += len(piece)
                    if size >= BLOCK_BYTES:
                        yield cutter.feed(b"".join(pieces))
                        pieces, size = [], 0
                yield cutter.feed(b"".join(pieces))
                yield cutter.finish()

    iterator = fetch()

    async def next_cut() -> Cut | None:
        return await anext(iterator, None)

    pending = sdk_loop.post(next_cut())
    try:
        while (cut := pending.result()) is not None:
            pending = sdk_loop.post(next_cut())
            if cut.frames.error is not None:
                raise cut.frames.error
            yield cut
    finally:
        pending.cancel()
        sdk_loop.run(iterator.aclose())


def _filter_by_time(options: Options, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the messages between the times of the options."""
    begin, end = options.begin.time, options.end.time
    times = batch.column(_TIME.name)
    keep = pc.is_valid(times)
    if begin is not None:
        keep = pc.and_(keep, pc.greater_equal(times, _scalar(begin, times.type)))
    if end is not None:
        keep = pc.and_(keep, pc.less(times, _scalar(end, times.type)))
    return batch.filter(keep)


def _scalar(time: dt.datetime, kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(time, type=pa.timestamp("us", tz="UTC")).cast(kind)
