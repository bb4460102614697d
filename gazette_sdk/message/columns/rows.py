"""Rows of record batches: references that are sequenced, and gathered into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["Row", "Rows", "gathered", "selected"]

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
