"""Metadata columns of record batches, which are no fields of messages.

They are the columns with these names:

======== ============================ =====================================================
column   type                         content
======== ============================ =====================================================
_journal string                       name of the journal
_offset  int64                        offset of the message's first byte
_end     int64                        offset behind its last byte
_uuid    string                       the message's UUID, as text; null where it has none
_time    timestamp (of any unit, UTC) the time within the UUID; null where there is none
_flags   integer                      its part in a transaction, see
                                      :mod:`~gazette_sdk.message.flags`
======== ============================ =====================================================

They may be asked for in any other type that theirs casts to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gazette_sdk.message.clock import UNIX_EPOCH
from gazette_sdk.message.sequencing.run import Run, Stamps
from gazette_sdk.message.uuid import TEXT_BYTES, RawUuid, is_uuid_text, uuid_of_bytes, uuid_of_text

__all__ = [
    "METADATA_COLUMNS",
    "MISFITS",
    "assembled",
    "data_fields",
    "first_misfit",
    "misfit_error",
    "text_column",
    "uuid_column",
]

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
