"""Reads of ranges on executors: record batches of the schema that Spark wants.

:class:`RangeTransport` reads the content of one range, as it was planned.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import math
import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from gazette_sdk import JsonMessage, Reader
from gazette_sdk.errors import (
    ConfigurationError,
    DecodeError,
    FragmentNotFoundError,
    FramingError,
    GazetteError,
    NotAllowedError,
)
from gazette_sdk.message.batch_reader import OnError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.columns.batches import data_fields
from gazette_sdk.message.columns.json import TAKES_ANY
from gazette_sdk.message.columns.schema import holds_required
from gazette_sdk.message.uuid import ACK_TXN
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import labels
from gazette_sdk.protocol.fragments import parse_content_path
from gazette_sdk.transport import Transport
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.base import ReadOnlyTransport
from gazette_sdk.transport.fragment_store import FragmentStoreTransport
from gazette_sdk.transport.journal_reader import RetryReader
from gazette_sdk.transport.wire import ANYWHERE, ReadItem, Target
from gazette_spark.options import Options, open_transport
from gazette_spark.planning import JournalRange


class RangeTransport(ReadOnlyTransport):
    """Transport that reads one range of a journal.

    It lists the journal as it was planned, opens the store's fragments that were planned, and
    fails where content is gone since: a reader would pass over it.

    Args:
        inner: transport to the journals, which the caller closes.
        options: options of the read.
        part: the range.
    """

    def __init__(self, inner: Transport, options: Options, part: JournalRange) -> None:
        self._part = part
        self._inner = inner
        if isinstance(self._inner, FragmentStoreTransport):
            self._inner.use_fragments(part.journal, _fragments(part))
        self._url = options.url
        self.knows_routes = self._inner.knows_routes
        self.file_root = Path(options.file_root) if options.file_root else None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Event loop to which all calls belong; None for any running loop."""
        return self._inner.loop

    async def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        """Yield the journal as it was planned."""
        del request
        spec = pb.JournalSpec(name=self._part.journal)
        labels.set_value(spec.labels, labels.CONTENT_TYPE, self._part.content_type)
        yield pb.ListResponse(journals=[pb.ListResponse.Journal(spec=spec)])

    async def read(
        self, request: pb.ReadRequest, target: Target = ANYWHERE
    ) -> AsyncGenerator[ReadItem]:
        """Read the journal.

        Raises:
            FragmentNotFoundError: content of the range is gone.
        """
        offset, is_content = request.offset, not request.metadata_only
        async with aclosing(self._inner.read(request, target)) as items:
            async for item in items:
                if not isinstance(item, pb.ReadResponse):
                    offset += len(item)
                elif is_content:
                    offset = self._checked(offset, item)
                yield item

    def _checked(self, offset: int, response: pb.ReadResponse) -> int:
        """Return the offset after a response, which must continue at ``offset``."""
        if response.status == pb.OK:
            is_gap = any(
                begin <= offset and response.offset <= end for begin, end in self._part.gaps
            )
            if offset < response.offset and not is_gap:
                raise self._gone(offset)
            return response.offset + len(response.content)
        if response.status == pb.OFFSET_NOT_YET_AVAILABLE and offset < self._part.end:
            raise self._gone(offset)
        return offset

    def _gone(self, offset: int) -> FragmentNotFoundError:
        path = self._part.fragment_at(offset)
        held = "the fragment that held it" if path is None else f"fragment {path}, which held it,"
        return FragmentNotFoundError(
            f"{self._part.journal}: content of offset {offset} was there when the query was"
            f" planned, but {held} is gone from {self._url}; load() again to read what is there,"
            " and keep fragments for longer than queries run",
            store=self._url,
            journal=self._part.journal,
            offset=offset,
        )

    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        """List fragments as they are now."""
        return await self._inner.list_fragments(request, target)

    def _refused(self, what: str) -> NotAllowedError:
        return NotAllowedError(
            f"a range of a journal can only be read: {what} through a broker",
            journal=self._part.journal,
        )

    async def aclose(self) -> None:
        """Nothing is left open: the connections are the caller's."""


def _fragments(part: JournalRange) -> Iterator[pb.Fragment]:
    """Yield the fragments of a range as they were planned."""
    for path, mod_time in part.fragments:
        fragment = parse_content_path(part.journal, path)
        fragment.mod_time = mod_time
        yield fragment


FAILING_MAX_S = 30.0
"""A line's begin is looked for as long, while reads fail."""

_LABELS = "_labels"
_FLAGS = pa.field("_flags", pa.int32())
_OFFSET = pa.field("_offset", pa.int64())
_TIME = pa.field("_time", pa.timestamp("us", tz="UTC"))


def read_ranges(
    options: Options, schema: StructType, ranges: Iterable[JournalRange]
) -> Iterator[pa.RecordBatch]:
    """Yield record batches of the messages of ranges.

    Raises:
        GazetteError: a range cannot be read; the text names journal, place and remedy.
    """
    transport = open_transport(options.url)
    try:
        for part in ranges:
            yield from _read_range(options, schema, part, RangeTransport(transport, options, part))
    finally:
        sdk_loop.run(transport.aclose())


def _read_range(
    options: Options, schema: StructType, part: JournalRange, transport: Transport
) -> Iterator[pa.RecordBatch]:
    columns = _Columns(options, schema, part)
    try:
        begin, end = part.begin, part.end
        if part.split is not None:
            begin = sdk_loop.run(_line_begin(transport, part.journal, part.split, begin))
            end = sdk_loop.run(_line_begin(transport, part.journal, part.split, end))
        if begin < end:
            on_error: OnError = "raise" if options.mode == "FAILFAST" else columns.add_corrupt
            with _reader(options, transport, part, (begin, end), on_error) as reader:
                yield from columns.batches(reader.arrow(columns.decoded))
    except FramingError as error:
        path = None if error.offset is None else part.fragment_at(error.offset)
        where = "" if path is None else f"it is in fragment {path}; "
        error.add_note(
            f"{where}in Spark change the schema, or give the option mode=PERMISSIVE or"
            " DROPMALFORMED"
        )
        raise
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        # Fields of messages that do not fit have errors of the SDK.
        raise ConfigurationError(
            f"{part.journal}: a column cannot have its type in the schema ({error}); declare"
            " metadata columns as _journal string, _offset long, _uuid string, _time timestamp,"
            f" _labels map<string,string>, {options.corrupt_column} string"
        ) from error


def state_behind(options: Options, part: JournalRange) -> bytes:
    """Return the stored checkpoint of a committed range's journal after the range.

    Only UUIDs are decoded. Equal ranges have equal checkpoints, unless clocks of their messages are
    ahead of this machine's.
    """
    transport = open_transport(options.url)
    try:
        on_error: OnError = "raise" if options.mode == "FAILFAST" else _ignore
        ranged = RangeTransport(transport, options, part)
        with _reader(options, ranged, part, (part.begin, part.end), on_error) as reader:
            for _ in reader.arrow(pa.schema([_OFFSET])):
                pass
            found = reader.checkpoint()
    finally:
        sdk_loop.run(transport.aclose())
    producers = sorted(each for each in found.producers if each.journal == part.journal)
    return Checkpoint({part.journal: part.end}, producers).to_bytes()


def _reader(
    options: Options,
    transport: Transport,
    part: JournalRange,
    span: tuple[int, int],
    on_error: OnError,
) -> Reader[Any]:
    begin, end = span
    message_type = options.message_type(part.journal, part.content_type)
    return Reader(
        _JsonObject if message_type is dict else message_type,
        name=part.journal,
        transport=transport,
        isolation="committed" if options.isolation == "committed" else "uncommitted",
        offsets=None if part.state else {part.journal: begin},
        checkpoint=part.state or None,
        end_offsets={part.journal: end},
        on_error=on_error,
    )


@dataclass
class _JsonObject(JsonMessage):
    """JSON object of no known class. Its bytes are base64, as Spark writes them."""


def _ignore(error: GazetteError) -> None:
    """Pass over content that is no message: tasks treat it."""
    _release(error)


def _release(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and its causes.

    They form cycles with frames that hold blocks of content, which Python's collector of garbage
    takes for small: some thousands of bad messages took gigabytes.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class _Columns:
    """Columns of a range: those that the reader decodes, and those that Spark wants.

    Args:
        options: options of the read.
        schema: the columns that Spark wants.
        part: the range.

    Attributes:
        decoded: schema of the reader's batches.
    """

    def __init__(self, options: Options, schema: StructType, part: JournalRange) -> None:
        self._options = options
        self._part = part
        self._requested: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        # Text without a zone is a time of the session's.
        in_session: pa.Schema = to_arrow_schema(schema, timezone=_session_zone(options))
        self._made = {_LABELS, options.corrupt_column}
        self._by_time = options.begin.time is not None or options.end.time is not None
        fields = [field for field in in_session if field.name not in self._made]
        names = {field.name for field in fields}
        if self._by_time and _TIME.name not in names:
            fields.append(_TIME)
        # Acknowledgements lack every column, and Spark takes no null in one that is NOT NULL.
        self._drops_acknowledgements = options.isolation != "committed" and holds_required(
            data_fields(pa.schema(fields))
        )
        if self._drops_acknowledgements and _FLAGS.name not in names:
            fields.append(_FLAGS)
        if (not fields or options.mode == "PERMISSIVE") and _OFFSET.name not in names:
            fields.append(_OFFSET)
        # Of a class the text fields are texts.
        self.decoded = pa.schema(fields, metadata=None if options.message else TAKES_ANY)
        self._corrupt: list[tuple[int, str]] = []  # in the order of offsets
        self._corrupt_offsets: set[int] = set()

    def batches(self, decoded: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the columns that Spark wants of decoded batches, and of what is no message.

        Raises:
            ConfigurationError: a column that must not be null is, at which Spark fails.
        """
        for batch in self._all_batches(decoded):
            for field in self._requested:
                if not field.nullable and batch.column(field.name).null_count:
                    raise ConfigurationError(
                        f"{self._part.journal}: column {field.name!r} is NOT NULL in the schema,"
                        " and a message lacks it; leave NOT NULL out"
                    )
            yield batch

    def _all_batches(self, decoded: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield messages, and what is no message, in the order of the journal."""
        for batch in decoded:
            rest = batch
            while self._corrupt:
                offsets = rest.column(_OFFSET.name).cast(_OFFSET.type)
                first_later = pc.index(pc.greater(offsets, self._corrupt[0][0]), True).as_py()
                if first_later < 0:
                    break
                yield from self._requested_of(rest.slice(0, first_later))
                yield self._corrupt_rows(before=offsets[first_later].as_py())
                rest = rest.slice(first_later)
            yield from self._requested_of(rest)
        if self._corrupt:
            yield self._corrupt_rows()

    def _requested_of(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the columns that Spark wants of a decoded batch, if it has wanted rows."""
        if self._drops_acknowledgements:
            batch = batch.filter(pc.not_equal(batch.column(_FLAGS.name), ACK_TXN))
        if self._by_time:
            batch = self._between_times(batch)
        if not batch.num_rows:
            return
        if batch.schema == self._requested:
            yield batch
            return
        made = {_LABELS: list(self._part.labels)}
        arrays = [
            pa.repeat(pa.scalar(made.get(field.name), type=field.type), batch.num_rows)
            if field.name in self._made
            else _of_type(batch.column(field.name), field.type)
            for field in self._requested
        ]
        yield self._batch(arrays, batch.num_rows)

    def add_corrupt(self, error: GazetteError) -> None:
        """Note content that is no message. What is read again is noted once."""
        _release(error)
        offset = error.offset
        if self._options.mode != "PERMISSIVE" or self._by_time:
            return
        if offset is None or offset < self._part.begin or offset in self._corrupt_offsets:
            return
        self._corrupt_offsets.add(offset)
        self._corrupt.append((offset, _text_of(error)))

    def _corrupt_rows(self, before: float = math.inf) -> pa.RecordBatch:
        """Return rows of the content that was no message since the last call, up to an offset."""
        corrupt = [each for each in self._corrupt if each[0] < before]
        self._corrupt = self._corrupt[len(corrupt) :]
        known = {
            "_journal": [self._part.journal] * len(corrupt),
            "_offset": [offset for offset, _ in corrupt],
            _LABELS: [list(self._part.labels)] * len(corrupt),
            self._options.corrupt_column: [text for _, text in corrupt],
        }
        arrays = [
            pa.array(known.get(field.name, [None] * len(corrupt)), type=field.type)
            for field in self._requested
        ]
        return self._batch(arrays, len(corrupt))

    def _batch(self, arrays: list[pa.Array], count: int) -> pa.RecordBatch:
        if not arrays:  # only a struct without fields has a number of rows without any column
            return pa.RecordBatch.from_struct_array(pa.array([{}] * count, type=pa.struct([])))
        return pa.RecordBatch.from_arrays(arrays, schema=self._requested)

    def _between_times(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages between the times of the options."""
        begin, end = self._options.begin.time, self._options.end.time
        times = batch.column(_TIME.name)
        keep = pc.is_valid(times)
        if begin is not None:
            keep = pc.and_(keep, pc.greater_equal(times, _scalar(begin, times.type)))
        if end is not None:
            keep = pc.and_(keep, pc.less(times, _scalar(end, times.type)))
        return batch.filter(keep)


def _of_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column in UTC, if it has the session's time zone."""
    return array if array.type == kind else array.cast(kind)


def _session_zone(options: Options) -> str:
    """Return the time zone of the session of a task, as Arrow names it.

    Raises:
        ConfigurationError: there is no such zone.
    """
    task = TaskContext.get()
    set_zone = task and task.getLocalProperty("spark.sql.session.timeZone")
    zone = set_zone or options.time_zone
    offset = re.fullmatch(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::(\d{2}))?", zone)
    if offset is not None:
        sign, hours, minutes = offset.groups()
        return f"{sign}{int(hours):02}:{minutes or '00'}"
    if zone in {"Z", "UT", "GMT", "GMT0"}:
        return "UTC"
    try:
        pc.assume_timezone(pa.scalar(0, pa.timestamp("s")), zone)
    except pa.ArrowInvalid as error:
        raise ConfigurationError(
            f"gazette: the session's time zone {zone!r} is not known to Python; set"
            " spark.sql.session.timeZone to a region, such as Europe/Berlin, or to UTC"
        ) from error
    return zone


def _text_of(error: GazetteError) -> str:
    """Return the content that is no message; the error where its bytes are not known."""
    frame = error.frame if isinstance(error, DecodeError) else None
    return str(error) if frame is None else frame.rstrip(b"\n").decode("utf-8", "backslashreplace")


def _scalar(time: dt.datetime, kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(time, type=pa.timestamp("us", tz="UTC")).cast(kind)


async def _line_begin(transport: Transport, journal: str, split: tuple[int, int], cut: int) -> int:
    """Return the offset of the first line that begins at ``cut`` or after it.

    Args:
        transport: how to reach the journal.
        journal: its name.
        split: begin and end of whole lines, around ``cut``.
        cut: any offset.
    """
    if cut in split:
        return cut
    request = pb.ReadRequest(journal=journal, offset=cut - 1, end_offset=split[1])
    reader = RetryReader(transport, request, patience_s=FAILING_MAX_S)
    try:
        while (content := await reader.read()) is not None:
            found = content.find(b"\n")
            if found >= 0:
                return reader.offset - len(content) + found + 1
        return split[1]
    finally:
        await reader.aclose()
