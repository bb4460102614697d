"""JSON lines to columns, a block at a time.

Where every line begins with its UUID, as our own publishers write it, UUIDs are cut out of the
block in bulk. If the lines also have one layout, their values are cut out, too, see ``layout``.
All other lines are parsed by pyarrow, with blanks in place of the UUIDs that were cut out.

The error of that parser names no line. A bad line is found by bisection, which takes a few times
longer than parsing the block.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.json as pj

from gazette_sdk.message.columns.conversion import converted, holds_required, parsed_field
from gazette_sdk.message.columns.json_objects import BytesForm, JsonObjects, is_parsed_by_arrow
from gazette_sdk.message.columns.layout import sliced_columns
from gazette_sdk.message.columns.lines import Lines, PlacedUuids, placed_uuids
from gazette_sdk.message.columns.metadata import (
    MISFITS,
    data_fields,
    first_misfit,
    misfit_error,
    text_column,
    uuid_column,
)
from gazette_sdk.message.kinds.fixed_place import UuidPlace
from gazette_sdk.message.kinds.json_lines import last_values
from gazette_sdk.message.sequencing.run import (
    NO_STAMPS,
    Stamps,
    parse_text_uuids,
    stamps_of,
    valid_stamps,
)
from gazette_sdk.message.uuid import TEXT_BYTES, RawUuid, is_uuid_text

__all__ = ["JsonColumns", "Parsed", "matrix_of"]

_OPEN, _CLOSE = np.uint8(ord("{")), np.uint8(ord("}"))
_UUID_KEYS = ("UUID", "uuid")


class Parsed(NamedTuple):
    """Content of a block, up to its first bad line.

    Attributes:
        columns: the columns that are no metadata, by name.
        stamps: parts of the lines' UUIDs.
        uuids: the lines' UUIDs as text, if the schema has a column for them.
        cause: error of the line behind; None if there is none.
    """

    columns: dict[str, Any]
    stamps: Stamps
    uuids: pa.Array | None
    cause: Exception | None


class JsonColumns:
    """Parser of blocks of JSON lines to the columns of a schema.

    Args:
        schema: columns wanted, with their types. Keys of objects without a column are ignored;
            columns without a key are null.
        key: key of the UUID, beside ``UUID`` and ``uuid``.
        strict: a line with an invalid UUID is bad. Without it, such a line has no UUID.
        bytes_form: form of bytes in JSON.
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        key: str = "UUID",
        strict: bool = True,
        bytes_form: BytesForm = "utf8",
    ) -> None:
        fields = data_fields(schema)
        names = [field.name for field in fields]
        keys = _UUID_KEYS if key in _UUID_KEYS else (key, *_UUID_KEYS)
        keys_by_field = {f"key{index}": each for index, each in enumerate(keys)}
        self._uuids = attrgetter(*keys_by_field)
        self._decoder = msgspec.json.Decoder(
            msgspec.defstruct(
                "Uuids", [(each, Any, None) for each in keys_by_field], rename=keys_by_field
            )
        )
        self._data_fields = fields
        self._strict = strict
        self._wants_uuids = "_uuid" in schema.names
        self._parses_uuids = (
            strict
            or not {"_uuid", "_time", "_flags"}.isdisjoint(schema.names)
            or holds_required(fields)  # which acknowledgements lack
        )
        # Without any field lines are parsed nevertheless: they may be no objects.
        self._wanted = pa.schema(fields or [pa.field("_", pa.null())])
        self._fields = pa.schema(list(map(parsed_field, self._wanted)))
        # A column of the UUID's own key is parsed like any other.
        self._place = None if key in names else UuidPlace(key, 2)
        is_parsed = all(is_parsed_by_arrow(field.type, bytes_form) for field in self._fields)
        self._holds_decimals = any(_holds_decimals(field.type) for field in self._fields)
        self._bytes_form = bytes_form
        self._objects = None if is_parsed else JsonObjects(self._fields, bytes_form)

    def parse(self, lines: Lines) -> Parsed:
        """Return the columns of lines, up to the first bad one."""
        if not len(lines):
            return Parsed(
                {}, NO_STAMPS, uuid_column([], NO_STAMPS) if self._wants_uuids else None, None
            )
        placed = placed_uuids(lines, self._place) if self._place is not None else None
        if placed is not None:
            parses = self._parses_uuids
            stamps = parse_text_uuids(placed.texts) if parses else Stamps.none(len(lines))
            if stamps is not None:
                return self._parse_placed(lines, placed, stamps)
        return self._parse_any(lines)

    # ------------------------------------------------- with and without a fixed place

    def _parse_placed(self, lines: Lines, placed: PlacedUuids, stamps: Stamps) -> Parsed:
        """Parse lines that all begin with a UUID."""
        texts = placed.texts
        columns = self._sliced(lines, placed.are_bare())
        if columns is not None:
            return Parsed(columns, stamps, text_column(texts) if self._wants_uuids else None, None)
        assert self._place is not None
        if self._place.may_repeat(lines.block, len(lines)):
            return self._parse_any(lines)
        table, cause = self._read(placed.blanked())
        if cause is not None:
            good = table.num_rows
            texts = texts[:good]
            stamps = stamps.first(good)
            cause = self._explained(lines.line(good), cause)
        uuids = text_column(texts) if self._wants_uuids else None
        return Parsed(self._columns_of(table), stamps, uuids, cause)

    def _sliced(self, lines: Lines, bare: npt.NDArray[np.bool_]) -> dict[str, Any] | None:
        """Return the columns of lines of one layout; None if lines have to be parsed."""
        try:
            _check_utf8(lines.block)
        except UnicodeDecodeError:
            return None
        return sliced_columns(lines.block, lines.begins, lines.ends, bare, self._data_fields)

    def _parse_any(self, lines: Lines) -> Parsed:
        """Parse lines that have their UUIDs anywhere, or none."""
        table, cause = self._read(lines)
        good = table.num_rows
        if cause is not None:
            cause = self._explained(lines.line(good), cause)
        found, refused = self._uuids_of(lines.part(0, good))
        stamps, invalid = valid_stamps(found)
        if invalid is not None and self._strict:
            found, refused = found[: invalid.index], invalid
        elif invalid is not None:
            stamps = stamps_of([raw if is_uuid_text(raw) else None for raw in found])
        table = table.slice(0, len(found))
        uuids = uuid_column(found, stamps) if self._wants_uuids else None
        return Parsed(self._columns_of(table), stamps, uuids, refused or cause)

    def _uuids_of(self, lines: Lines) -> tuple[list[RawUuid], Exception | None]:
        """Return the UUIDs of lines, up to the first that is no text, and its error."""
        found: list[RawUuid] = []
        try:
            rows = list(map(self._uuids, self._decoder.decode_lines(lines.block)))
            firsts = [row[0] for row in rows]
            if set(map(type, firsts)) == {str}:  # the usual case, for less
                return firsts, None
            for *values, lower in rows:
                raw = next((value for value in values if value is not None), None)
                if raw is not None and not isinstance(raw, str):
                    return found, ValueError(f"its UUID is no text but {type(raw).__name__}")
                # The key "uuid" may be a message's own.
                found.append(raw if raw is not None else lower if is_uuid_text(lower) else None)
        except msgspec.DecodeError as error:  # of a line that pyarrow accepts
            if len(lines) == 1:
                return [], error
            middle = len(lines) // 2
            found, cause = self._uuids_of(lines.part(0, middle))
            if cause is None:
                more, cause = self._uuids_of(lines.part(middle, len(lines)))
                found += more
            return found, cause
        return found, None

    def _columns_of(self, table: pa.Table) -> dict[str, Any]:
        return {field.name: _array(table.column(field.name)) for field in self._data_fields}

    # ----------------------------------------------------------------- columns

    def _read(self, lines: Lines) -> tuple[pa.Table, Exception | None]:
        """Return the table of all lines before the first bad one, and the error of that."""
        try:
            return self._table(lines), None
        except MISFITS as error:
            good, cause = first_misfit(
                len(lines), lambda start, stop: self._table(lines.part(start, stop)), error
            )
        best = self._table(lines.part(0, good)) if good else self._wanted.empty_table()
        return best, cause

    def _table(self, lines: Lines) -> pa.Table:
        """Return the table of lines.

        Raises:
            ArrowInvalid: or another of pyarrow's errors: a line is bad.
            ValueError: the same.
        """
        if not _are_objects(lines):
            lines = _stripped(lines)
        try:
            table = self._parsed(lines.block)
        except pa.ArrowInvalid as error:
            if _TWICE not in str(error):
                raise
            # pyarrow refuses a key that an object has twice. All other readers take the last.
            table = self._parsed(_with_last_values(lines.block))
        if table.num_rows != len(lines):
            raise ValueError("a line holds more than one object")
        _check_utf8(lines.block)  # pyarrow does not
        if self._fields.types == self._wanted.types:
            return table
        columns = [
            converted(_array(column), field.type)
            for column, field in zip(table.columns, self._wanted, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=self._wanted)

    def _parsed(self, content: bytes | bytearray | memoryview) -> pa.Table:
        """Return the table of well-formed lines."""
        if self._objects is not None:
            return self._objects.table(content)
        block = pa.py_buffer(content)
        try:
            table = pj.read_json(
                pa.BufferReader(block),
                read_options=pj.ReadOptions(use_threads=False, block_size=max(block.size, 1)),
                parse_options=pj.ParseOptions(
                    explicit_schema=self._fields, unexpected_field_behavior="ignore"
                ),
            )
        except pa.ArrowNotImplementedError:
            # pyarrow cannot parse these types at all: from now on objects are decoded.
            self._objects = JsonObjects(self._fields, self._bytes_form)
            return self._objects.table(content)
        if self._holds_decimals:
            table.validate(full=True)  # pyarrow takes integers of more digits
        return table

    def _explained(self, line: bytes, cause: Exception) -> Exception:
        """Return the most specific error of a bad line."""
        try:
            _object(line)
        except ValueError as error:
            return error
        return misfit_error(cause)


# -------------------------------------------------------------------- pieces


_TWICE = "was specified twice"
"""Part of pyarrow's error of a key that an object has twice."""


def _with_last_values(block: bytes | bytearray | memoryview) -> bytes:
    """Return lines whose objects have each key once, with its last value."""
    lines = bytes(block).split(b"\n")
    for at, line in enumerate(lines):
        try:
            lines[at] = last_values(line)
        except (msgspec.DecodeError, RecursionError):
            continue  # which the parser refuses, with an error of its own
    return b"\n".join(lines)


def _are_objects(lines: Lines) -> bool:
    """Return True if each line begins and ends like an object."""
    content = np.frombuffer(lines.block, np.uint8)
    begins, ends = lines.begins, lines.ends
    if int((ends - begins).min()) <= 2:
        return False
    return bool((content[begins] == _OPEN).all() and (content[ends - 2] == _CLOSE).all())


def _stripped(lines: Lines) -> Lines:
    """Return the lines without white space around their objects.

    Raises:
        ValueError: a line holds anything but one object.
    """
    stripped = []
    for at in range(len(lines)):
        line = lines.line(at)
        _object(line)
        stripped.append(line.strip() + b"\n")
    ends = np.cumsum([len(line) for line in stripped])
    begins = np.append(0, ends[:-1])
    return Lines(b"".join(stripped), begins, ends)


def _object(line: bytes) -> dict[str, Any]:
    """Return the object of a line.

    Raises:
        ValueError: the line holds something else.
    """
    found = orjson.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is expected, not {type(found).__name__}")  # noqa: TRY004 - of the content
    return found


def _holds_decimals(kind: pa.DataType) -> bool:
    parts = (kind.field(at).type for at in range(kind.num_fields))
    return bool(pa.types.is_decimal(kind)) or any(map(_holds_decimals, parts))


def _array(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.combine_chunks()


def matrix_of(texts: pa.Array) -> npt.NDArray[np.uint8] | None:
    """Return texts as rows of bytes, shape [n, 36]; None if one has another length."""
    if texts.null_count or not len(texts):
        return None
    ends = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: len(texts) + 1]
    if not (np.diff(ends) == TEXT_BYTES).all():
        return None
    data = np.frombuffer(texts.buffers()[2], np.uint8)
    return data[ends[0] : ends[-1]].reshape(-1, TEXT_BYTES)


def _check_utf8(block: bytes | bytearray | memoryview) -> None:
    """Check that a block is UTF-8.

    Raises:
        UnicodeDecodeError: it is not.
    """
    if isinstance(block, memoryview) or not block.isascii():
        str(block, "utf-8")
