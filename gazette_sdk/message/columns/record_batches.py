"""Record batches of the messages of journals, for plain code and coroutines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.message.columns.rows import Row, Rows, gathered
from gazette_sdk.message.reading.batch_reader import BatchReader
from gazette_sdk.message.reading.delivery import HORIZON_S
from gazette_sdk.message.sequencing.checkpoint import Checkpoint

__all__ = ["ITEM_BYTES_MAX", "RecordBatches", "checked_schema"]

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
        """Offsets to read on from, behind the last row of the last batch that was taken."""
        return self._batches.offsets(self._left)

    def checkpoint(self, *, horizon_s: float = HORIZON_S) -> Checkpoint:
        """Return the position behind the last row of the last batch; see the reader's."""
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
            # It is raised behind these rows.
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
