"""Record batches of the messages of journals, for plain code and coroutines.

Columns with these names are no fields of messages, but metadata:

======== ============================ =====================================================
column   type                         content
======== ============================ =====================================================
_journal string                       name of the journal
_offset  int64                        offset of the message's first byte
_end     int64                        offset after its last byte
_uuid    string                       the message's UUID, as text; null where it has none
_time    timestamp (of any unit, UTC) the time within the UUID; null where there is none
_flags   integer                      its part in a transaction, see
                                      :mod:`~gazette_sdk.message.uuid`
======== ============================ =====================================================

They may be asked for in any other type that theirs casts to.

Of messages that are sequenced, rows are references into batches, which are gathered at the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.message.batch_reader import BatchReader
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.delivery import HORIZON_S
from gazette_sdk.message.runs import Run, Stamps
from gazette_sdk.message.uuid import (
    TEXT_BYTES,
    UNIX_EPOCH,
    RawUuid,
    is_uuid_text,
    uuid_of_bytes,
    uuid_of_text,
)

MISFITS = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowNotImplementedError,
    OverflowError,
    ValueError,
    TypeError,
)
"""Errors of a conversion to columns: a message is malformed, or does not fit its column's type."""

_LOWER = np.uint8(0x20)
"""Bit of lower case, which digits and hyphens have anyhow."""

METADATA_COLUMNS = ("_journal", "_offset", "_end", "_uuid", "_time", "_flags")


def data_fields(schema: pa.Schema) -> list[pa.Field]:
    """Return the columns of a schema that are fields of messages."""
    return [field for field in schema if field.name not in METADATA_COLUMNS]


def first_misfit(
    count: int, convert: Callable[[int, int], object], cause: Exception
) -> tuple[int, Exception]:
    """Find the first of many messages that cannot be converted, by bisection.

    Args:
        count: number of the messages.
        convert: converts messages of a range, and raises one of :data:`MISFITS`.
        cause: error of the conversion of all of them.

    Returns:
        Its index, and its error.
    """
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            convert(good, middle)
        except MISFITS as error:
            bad, cause = middle, error
        else:
            good = middle
    return good, cause


def misfit_error(cause: Exception) -> ValueError:
    """Return the error of a message that does not fit the schema."""
    error = ValueError(f"it does not fit the schema: {cause}")
    error.__cause__ = cause
    return error


def assembled(
    schema: pa.Schema,
    columns: dict[str, Any],
    run: Run[Any],
    uuids: pa.Array | None,
) -> pa.RecordBatch:
    """Return a record batch of columns and metadata.

    Args:
        schema: columns wanted, with their types.
        columns: the columns that are no metadata, by name; one that is missing is null.
        run: places and UUIDs' parts of the messages. Its items are not used.
        uuids: their UUIDs as text; None if they are not wanted.
    """
    count = len(run)
    arrays = []
    for field in schema:
        if field.name in METADATA_COLUMNS:
            array = _metadata(field.name, run, uuids)
            if array.type != field.type:
                # Times are rounded down to coarser units.
                array = array.cast(field.type, safe=not pa.types.is_timestamp(field.type))
        else:
            found = columns.get(field.name)
            array = pa.nulls(count, type=field.type) if found is None else found
        arrays.append(array)
    if not arrays:
        # Only a struct without fields has a number of rows without any column.
        return pa.RecordBatch.from_struct_array(pa.array([{}] * count, type=pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _metadata(name: str, run: Run[Any], uuids: pa.Array | None) -> pa.Array:
    if name == "_journal":
        return pa.repeat(pa.scalar(run.journal), len(run))
    if name == "_offset":
        return pa.array(run.begins)
    if name == "_end":
        return pa.array(run.ends)
    if name == "_flags":
        return pa.array(run.flags)
    if name == "_time":
        return _times(run.clocks)
    assert uuids is not None
    return uuids


def _times(clocks: npt.NDArray[np.uint64]) -> pa.Array:
    """Return the times of clocks, rounded down to microseconds; null where a clock is 0."""
    units = (clocks >> np.uint64(4)).astype(np.int64)
    times = pa.array((units - UNIX_EPOCH) // 10, type=pa.int64(), mask=units == 0)
    return times.cast(pa.timestamp("us", tz="UTC"))


def text_column(texts: npt.NDArray[np.uint8]) -> pa.Array:
    """Return valid texts of UUIDs, shape [n, 36], as a column of lower case."""
    count = len(texts)
    ends = np.arange(0, TEXT_BYTES * (count + 1), TEXT_BYTES, dtype=np.int32)
    data = np.ascontiguousarray(texts | _LOWER)
    return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(data))


def uuid_column(raw: Sequence[RawUuid], stamps: Stamps) -> pa.Array:
    """Return UUIDs as a column of canonical text; null where a message has none.

    Text that is no UUID is returned as it is.

    Args:
        raw: the UUIDs as they are written in messages.
        stamps: their parts.
    """
    texts: list[str | None] = []
    for value, clock in zip(raw, stamps.clocks.tolist(), strict=True):
        if isinstance(value, bytes) and len(value) == TEXT_BYTES:
            texts.append(_canonical(value.decode("ascii", "replace")))
        elif isinstance(value, bytes):
            texts.append(str(uuid_of_bytes(value)) if clock or any(value) else None)
        else:
            texts.append(_canonical(str(value)) if value else None)
    return pa.array(texts, type=pa.string())


def _canonical(text: str) -> str:
    if len(text) == TEXT_BYTES and text.islower():
        return text
    return str(uuid_of_text(text)) if is_uuid_text(text) else text


_PIECE_ROWS = 64
_PIECE_BYTES = 16 << 10
"""Limits of a piece. A row that is sequenced by itself may be kept for long, with its batch. So
rows are copied to pieces first, which are small enough to be kept by the thousand."""

_SLICE_ROWS = 32
"""From so many neighbouring rows on, copying slices is faster than taking single rows."""


class Row(NamedTuple):
    """Row of a batch."""

    batch: pa.RecordBatch
    row: int


class Rows(Sequence[Row]):
    """Neighbouring rows of a batch.

    Args:
        batch: a batch of these rows and no others.
    """

    __slots__ = ("batch",)

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        count: int = self.batch.num_rows
        return count

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return Rows(self.batch.slice(start, max(stop - start, 0)))
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return Row(self.batch, index)

    def __iter__(self) -> Iterator[Row]:
        """Yield each row, copied out of its batch together with some neighbours."""
        count = len(self)
        if not count:
            return
        size = max(1, self.batch.nbytes // count)
        step = max(1, min(_PIECE_ROWS, _PIECE_BYTES // size))
        for start in range(0, count, step):
            rows = np.arange(start, min(start + step, count))
            piece = self.batch.take(pa.array(rows))
            for index in range(len(rows)):
                yield Row(piece, index)


def selected(rows: Sequence[Row], indices: npt.NDArray[np.intp]) -> Rows:
    """Return the rows at ascending indices, which are most of them."""
    assert isinstance(rows, Rows)
    if not len(indices):
        return rows[0:0]
    heads = np.flatnonzero(np.diff(indices) != 1) + 1
    begins, ends = [0, *heads.tolist()], [*heads.tolist(), len(indices)]
    batch = rows.batch
    if len(begins) * _SLICE_ROWS > len(indices):
        return Rows(batch.take(pa.array(indices)))
    parts = [
        batch.slice(int(indices[begin]), end - begin)
        for begin, end in zip(begins, ends, strict=True)
    ]
    return Rows(parts[0] if len(parts) == 1 else pa.concat_batches(parts))


def gathered(rows: Sequence[Row]) -> pa.RecordBatch:
    """Return a batch of rows, of which there is at least one, in their order."""
    parts = []
    batch, indices = rows[0].batch, [rows[0].row]
    for row in rows[1:]:
        if row.batch is batch:
            indices.append(row.row)
        else:
            parts.append(_part(batch, indices))
            batch, indices = row.batch, [row.row]
    parts.append(_part(batch, indices))
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _part(batch: pa.RecordBatch, indices: list[int]) -> pa.RecordBatch:
    first, count = indices[0], len(indices)
    if indices[-1] - first + 1 == count and all(
        index == first + at for at, index in enumerate(indices)
    ):
        return batch.slice(first, count)
    return batch.take(pa.array(indices))


ITEM_BYTES_MAX = 1 << 20
"""Limit of the content of a journal that is decoded at once: less costs more per message, and the
intermediate arrays of a few megabytes do not fit into a core's cache."""

_KEPT_BYTES = 8 << 20
"""Size of an array whose release lets glibc keep twice as much freed memory."""


class RecordBatches:
    """Record batches of a reader's messages: an iterable, and an asynchronous one.

    The result of :meth:`Reader.arrow <gazette_sdk.message.Reader.arrow>`. No batch is empty, and
    all rows of a batch are of one journal, in its order. Iteration may be broken off and resumed,
    as with a reader. Functions that take a stream of Arrow's C interface take this object:
    ``pyarrow.table(batches)``, ``polars.DataFrame(batches)``, and DuckDB's queries by its name.

    Attributes:
        schema: schema of all batches.
    """

    def __init__(self, schema: pa.Schema, batches: BatchReader[Row], batch_rows: int) -> None:
        self.schema = schema
        self._batches = batches
        self._batch_rows = batch_rows
        self._rest: pa.RecordBatch | None = None
        self._rows: Iterator[Row] = iter(())
        self._gathered: list[Row] = []
        self._failure: Exception | None = None
        _keep_freed_memory()

    @property
    def offsets(self) -> dict[str, int]:
        """Offsets to read on from, after the last row of the last batch that was taken."""
        return self._batches.offsets(self._left)

    def checkpoint(self, *, horizon_s: float = HORIZON_S) -> Checkpoint:
        """Return the position after the last row of the last batch; see the reader's."""
        return self._batches.checkpoint(self._left, horizon_s=horizon_s)

    @property
    def _left(self) -> int:
        """Number of rows of the batch reader's batch that were not taken yet."""
        return 0 if self._rest is None else int(self._rest.num_rows)

    # ------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        self._batches.begin(blocks=True)
        while (batch := self._take()) is not None:
            yield batch

    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        self._batches.begin()
        while (batch := await self._take_async()) is not None:
            yield batch

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the batches as a stream of Arrow's C interface."""
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the batches as a ``pyarrow.RecordBatchReader``."""
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def close(self) -> None:
        """Close the reader, see :meth:`Reader.close`."""
        self._batches.close()

    async def aclose(self) -> None:
        """Close the reader, see :meth:`Reader.aclose`."""
        await self._batches.aclose()

    # ----------------------------------------------------------------- batches

    def _take(self) -> pa.RecordBatch | None:
        """Return the next batch, in turn with other threads; None at the end."""
        with self._batches.taking():
            while (batch := self._next()) is None:
                taken = self._batches.next_batch()
                if taken is None:
                    break
                self._add(taken)
            return batch

    async def _take_async(self) -> pa.RecordBatch | None:
        """Return the next batch, in turn with other tasks; None at the end."""
        async with self._batches.taking_async():
            while (batch := self._next()) is None:
                taken = await self._batches.next_batch_async()
                if taken is None:
                    break
                self._add(taken)
            return batch

    def _add(self, taken: Sequence[Row] | Iterator[Row]) -> bool:
        """Take over a batch of the batch reader. Return True if it was delivered in bulk."""
        is_bulk = isinstance(taken, Rows)
        if isinstance(taken, Rows):
            self._rest = taken.batch
        else:
            self._rows = iter(taken)
        return is_bulk

    def _next(self) -> pa.RecordBatch | None:
        """Return the next batch of what is decoded already; None if more content is needed."""
        if self._rest is not None:
            return self._cut()
        if self._failure is not None:
            raise self._failure
        rows = self._gathered
        try:
            rows += islice(self._rows, self._batch_rows - len(rows))
            while len(rows) < self._batch_rows:
                # Transactions are delivered one by one, and may be small: some are joined.
                taken = self._batches.ready_batch()
                if taken is None or self._add(taken):
                    break
                rows += islice(self._rows, self._batch_rows - len(rows))
        except Exception as error:
            self._failure = error
            if not rows:
                raise
            # It is raised after these rows.
        except BaseException:
            self._batches.interrupt()
            raise
        if not rows:
            return None if self._rest is None else self._cut()
        batch = gathered(rows)
        self._gathered = []
        return batch

    def _cut(self) -> pa.RecordBatch | None:
        """Return the next part of the rows that were delivered in bulk."""
        rest, self._rest = self._rest, None
        assert rest is not None
        if rest.num_rows > self._batch_rows:
            self._rest = rest.slice(self._batch_rows)
            return rest.slice(0, self._batch_rows)
        return rest if rest.num_rows else None


def _keep_freed_memory() -> None:
    """Let the C library keep the memory of intermediate arrays for those of the next content.

    glibc returns free memory to the kernel, and gets it again page by page, which takes a third of
    the time of decoding. It adapts its limits to the largest array that was released (``mallopt``,
    ``M_MMAP_THRESHOLD``). Other C libraries are not affected.
    """
    np.empty(_KEPT_BYTES, np.uint8)


def checked_schema(schema: Any) -> pa.Schema:
    """Return a schema from an argument of ``pyarrow.schema``.

    Raises:
        ConfigurationError: it is no schema, or has no columns, a column twice, or an unknown zone.
    """
    try:
        found = schema if isinstance(schema, pa.Schema) else pa.schema(schema)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"arrow() takes a pyarrow.Schema, or what pyarrow.schema() takes: {error}"
        ) from error
    twice = {name for name in found.names if found.names.count(name) > 1}
    if not found.names or twice:
        raise ConfigurationError(
            f"the schema names {min(twice)!r} twice" if twice else "the schema is empty"
        )
    for field in found:
        _check_zone(field.name, field.type)
    return found


def _check_zone(column: str, kind: pa.DataType) -> None:
    for at in range(kind.num_fields):
        _check_zone(column, kind.field(at).type)
    if pa.types.is_timestamp(kind) and kind.tz:
        try:
            pc.assume_timezone(pa.scalar(0, pa.timestamp("s")), kind.tz)
        except pa.ArrowInvalid as error:
            raise ConfigurationError(
                f"column {column!r} has the time zone {kind.tz!r}, which is not known; give a"
                " region, such as Europe/Berlin, an offset, such as +01:00, or UTC"
            ) from error
