"""Blocks of whole frames to Arrow: a chunk at a time, never a message at a time.

A *block* is a run of whole frames of one journal, as read from offset ``begin``. The decoder of
its content type turns it into one ``pyarrow.RecordBatch`` with the columns of a schema. Columns
whose names begin with an underscore are metadata, not fields of messages:

======== ============================ =====================================================
column   type                         content
======== ============================ =====================================================
_journal string                       name of the journal
_offset  int64                        offset of the message's first byte
_uuid    string                       the message's UUID, as text; null where it has none
_time    timestamp (of any unit, UTC) the time within the UUID; null where there is none
======== ============================ =====================================================

JSON goes through ``pyarrow.json``, which decodes about five times faster than one call per
message. Needs the extra ``spark`` (pyarrow).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from gazette_sdk.errors import ConfigurationError, DecodeError, TornFrameError

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

__all__ = ["METADATA_COLUMNS", "BlockDecoder", "decode_json_block", "decode_message_block"]

METADATA_COLUMNS = ("_journal", "_offset", "_uuid", "_time")

BlockDecoder = Callable[[bytes, str, int, "pa.Schema"], "pa.RecordBatch"]
"""(block, journal, offset of the block's first byte, wanted schema) -> record batch."""


class _Lines(NamedTuple):
    """A block, and where its lines begin."""

    block: bytes
    journal: str
    begin: int
    starts: npt.NDArray[np.int64]


_UUID_FIELDS = ("UUID", "uuid")
_UUID_TEXT_BYTES = 36
_UNIX_EPOCH_UUID_UNITS = 122192928000000000
_NEWLINE = 0x0A


def decode_json_block(block: bytes, journal: str, begin: int, schema: pa.Schema) -> pa.RecordBatch:
    """Decode JSON lines.

    Args:
        block: whole lines, the last one with its newline.
        journal: name of the journal, for ``_journal`` and for errors.
        begin: offset of the block's first byte.
        schema: columns wanted, with their types. Fields of messages without a column are
            ignored; columns without a field are null.

    Raises:
        DecodeError: a line is no JSON object or does not fit the schema; names its offset.
        TornFrameError: the block ends within a line.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.json as pj  # noqa: PLC0415 - an extra

    if not block:
        return pa.RecordBatch.from_arrays(
            [pa.array([], field.type) for field in schema], schema=schema
        )
    starts = _line_starts(block, journal, begin)
    lines = _Lines(block, journal, begin, starts)
    wants_uuid = "_uuid" in schema.names or "_time" in schema.names
    fields = [field for field in schema if field.name not in METADATA_COLUMNS]
    parsed = list(fields)
    if wants_uuid:
        have = {field.name for field in fields}
        parsed += [pa.field(name, pa.string()) for name in _UUID_FIELDS if name not in have]
    try:
        table = pj.read_json(
            pa.BufferReader(block),
            read_options=pj.ReadOptions(use_threads=False, block_size=max(len(block), 1)),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema(parsed or [pa.field("_", pa.null())]),
                unexpected_field_behavior="ignore",
            ),
        )
        if table.num_rows != len(starts):
            raise _find_bad_line(lines, parsed, "a blank line")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        table = _decode_lines(lines, pa.schema(parsed), error)
    uuids = _merged_uuids(table) if wants_uuid else None
    columns = {
        field.name: table.column(field.name).combine_chunks() if table.num_rows else None
        for field in fields
    }
    return _assemble(schema, columns, journal, starts + begin, uuids)


def decode_message_block(
    rows: Sequence[dict[str, Any]],
    uuids: Sequence[str | None],
    starts: Sequence[int],
    journal: str,
    schema: pa.Schema,
) -> pa.RecordBatch:
    """Columns of messages which were decoded one by one (protobuf, CSV).

    Args:
        rows: each message's fields.
        uuids: each message's UUID as text, or None.
        starts: each message's offset.
        journal: name of the journal.
        schema: columns wanted, with their types.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra

    columns = {
        field.name: pa.array([row.get(field.name) for row in rows], type=field.type)
        for field in schema
        if field.name not in METADATA_COLUMNS
    }
    return _assemble(
        schema,
        columns,
        journal,
        np.asarray(starts, dtype=np.int64),
        pa.array(uuids, type=pa.string()),
    )


def _line_starts(block: bytes, journal: str, begin: int) -> npt.NDArray[np.int64]:
    ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE)
    if block and (not len(ends) or ends[-1] != len(block) - 1):
        torn = int(ends[-1]) + 1 if len(ends) else 0
        raise TornFrameError(
            f"{journal}: the content which was read ends within the message at offset "
            f"{begin + torn}; read on to its end",
            journal=journal,
            offset=begin + torn,
        )
    starts = np.empty(len(ends), dtype=np.int64)
    if len(ends):
        starts[0] = 0
        starts[1:] = ends[:-1] + 1
    return starts


def _assemble(
    schema: pa.Schema,
    columns: dict[str, Any],
    journal: str,
    offsets: npt.NDArray[np.int64],
    uuids: Any,
) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415 - an extra

    arrays = []
    for field in schema:
        if field.name == "_journal":
            array = pa.repeat(pa.scalar(journal, type=field.type), len(offsets))
        elif field.name == "_offset":
            array = pa.array(offsets, type=field.type)
        elif field.name == "_uuid":
            array = uuids.cast(field.type)
        elif field.name == "_time":
            array = _times(uuids, field.type)
        else:
            array = columns[field.name]
            if array is None:
                array = pa.nulls(len(offsets), type=field.type)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _merged_uuids(table: pa.Table) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.compute as pc  # noqa: PLC0415 - an extra

    found = [
        column.combine_chunks()
        if isinstance(column := table.column(name), pa.ChunkedArray)
        else column
        for name in _UUID_FIELDS
    ]
    found = [array if array.type == pa.string() else array.cast(pa.string()) for array in found]
    if not len(table):
        return pa.array([], type=pa.string())
    upper, lower = found
    if upper.null_count == 0:
        return upper
    return pc.coalesce(upper, lower)


_HEX = np.full(256, 255, dtype=np.uint8)
for _digit in range(16):
    for _text in (f"{_digit:x}", f"{_digit:X}"):
        _HEX[ord(_text)] = _digit


def _times(uuids: pa.Array, kind: pa.DataType) -> pa.Array:
    """Times within UUIDs of canonical text; others, and the zero UUID, are null."""
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.compute as pc  # noqa: PLC0415 - an extra

    canonical = pc.fill_null(pc.equal(pc.binary_length(uuids), _UUID_TEXT_BYTES), False)
    texts = uuids.filter(canonical)
    units = np.zeros(len(uuids), dtype=np.int64)
    valid = np.asarray(canonical.to_numpy(zero_copy_only=False), dtype=bool)
    if len(texts):
        offsets = np.frombuffer(texts.buffers()[1], dtype=np.int32)[texts.offset :]
        data = np.frombuffer(texts.buffers()[2], dtype=np.uint8)
        digits = data[offsets[0] : offsets[0] + len(texts) * _UUID_TEXT_BYTES]
        nibbles = _HEX[digits.reshape(len(texts), _UUID_TEXT_BYTES)]
        clock = np.zeros(len(texts), dtype=np.int64)
        good = np.ones(len(texts), dtype=bool)
        # Timestamp bits 48..59, then 32..47, then 0..31 (message section 1).
        for position in (15, 16, 17, 9, 10, 11, 12, 0, 1, 2, 3, 4, 5, 6, 7):
            clock = (clock << 4) | (nibbles[:, position] & 0x0F)
            good &= nibbles[:, position] < 16
        units[valid] = clock
        valid[valid] = good & (clock > 0)
    micros = (units - _UNIX_EPOCH_UUID_UNITS) // 10
    times = pa.array(micros, type=pa.int64(), mask=~valid).cast(pa.timestamp("us", tz="UTC"))
    return times.cast(kind, safe=False) if times.type != kind else times


def _decode_lines(lines: _Lines, schema: pa.Schema, cause: Exception) -> pa.Table:
    """The slow way, for types which the columnar reader lacks and to name the bad line."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    rows = []
    starts = lines.starts.tolist()
    for start, end in zip(starts, [*starts[1:], len(lines.block)], strict=True):
        try:
            row = orjson.loads(lines.block[start:end])
        except orjson.JSONDecodeError as error:
            raise _bad_line(lines, start, str(error)) from error
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise _bad_line(lines, start, f"a JSON object is expected, not {kind}")
        try:
            rows.append(pa.Table.from_pylist([row], schema=schema))
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise _bad_line(lines, start, f"it does not fit the schema: {error}") from error
    if not rows:
        raise ConfigurationError(f"{lines.journal}: the schema cannot be read from JSON: {cause}")
    return pa.concat_tables(rows)


def _find_bad_line(lines: _Lines, fields: list[Any], guess: str) -> DecodeError:
    import pyarrow as pa  # noqa: PLC0415 - an extra

    try:
        _decode_lines(lines, pa.schema(fields), ValueError(guess))
    except DecodeError as error:
        return error
    return _bad_line(lines, 0, guess)


def _bad_line(lines: _Lines, start: int, reason: str) -> DecodeError:
    offset = lines.begin + start
    return DecodeError(
        f"{lines.journal}: the message at offset {offset} cannot be decoded: {reason}; "
        "read from an offset behind it, or mend its writer",
        journal=lines.journal,
        offset=offset,
    )
