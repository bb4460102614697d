"""JSON lines to columns, a block at a time.

Where every line begins with its UUID, as our own publishers write it, UUIDs are cut out of the
block. Are the lines written alike beyond that, then so are their values, see ``layout``. All
others go through the columnar reader of pyarrow, which is spared the UUIDs that were cut out: they
are blanks to it.

That reader names no line that it does not like. Which one that is, is found by halving; that takes
a few times longer than reading the block, once per bad line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from gazette_sdk.message.columns.layout import sliced_columns
from gazette_sdk.message.columns.lines import Lines, PlacedUuids, placed_uuids
from gazette_sdk.message.columns.metadata import MISFITS, data_fields, text_column, uuid_column
from gazette_sdk.message.kinds.fixed_place import UuidPlace
from gazette_sdk.message.sequencing.run import (
    NO_STAMPS,
    InvalidUuidError,
    Stamps,
    parse_text_uuids,
    stamps_of,
)
from gazette_sdk.message.uuid import TEXT_BYTES, RawUuid, uuid_of_text

__all__ = ["JsonColumns", "Parsed", "matrix_of"]

_OPEN, _CLOSE = np.uint8(ord("{")), np.uint8(ord("}"))
_UUID_KEYS = ("UUID", "uuid")


class Parsed(NamedTuple):
    """What a block holds, up to its first bad line.

    Attributes:
        columns: the columns which are no metadata, by name.
        stamps: what the lines' UUIDs say.
        uuids: the lines' UUIDs as text, if they are wanted.
        cause: why the line behind is bad; None if there is none.
    """

    columns: dict[str, Any]
    stamps: Stamps
    uuids: pa.Array | None
    cause: Exception | None


class JsonColumns:
    """Reads blocks of JSON lines into the columns of a schema.

    Args:
        schema: columns wanted, with their types. Keys of objects without a column are passed
            over; columns without a key are null.
        key: key of the UUID; ``UUID`` and ``uuid`` are understood in any case.
        strict: a UUID that is none makes a line a bad one; without it, such a line has none.
    """

    def __init__(self, schema: pa.Schema, *, key: str = "UUID", strict: bool = True) -> None:
        fields = data_fields(schema)
        names = [field.name for field in fields]
        self._keys = _UUID_KEYS if key in _UUID_KEYS else (key, *_UUID_KEYS)
        self._names = names
        self._data_fields = fields
        self._strict = strict
        self._wants_uuids = "_uuid" in schema.names
        # Without any field objects are looked through nevertheless: they may be none.
        self._fields = pa.schema(fields or [pa.field("_", pa.null())])
        self._with_keys = pa.schema(
            [*fields, *(pa.field(each, pa.string()) for each in self._keys if each not in names)]
        )
        # A column of the UUID's own key is read like any other.
        self._place = None if key in names else UuidPlace(b'{"%b":"' % key.encode(), 2)
        self._lacks_types = False

    def parse(self, lines: Lines) -> Parsed:
        """The columns of lines, up to the first that is bad."""
        if not len(lines):
            return Parsed({}, NO_STAMPS, self._no_uuids(), None)
        placed = placed_uuids(lines, self._place) if self._place is not None else None
        if placed is not None:
            stamps = parse_text_uuids(placed.texts)
            if stamps is not None:
                return self._parse_placed(lines, placed, stamps)
        return self._parse_searched(lines)

    # ------------------------------------------------------- two ways to read

    def _parse_placed(self, lines: Lines, placed: PlacedUuids, stamps: Stamps) -> Parsed:
        """Lines which all begin with a UUID."""
        texts = placed.texts
        columns = self._sliced(lines, placed.are_bare())
        if columns is not None:
            return Parsed(columns, stamps, text_column(texts) if self._wants_uuids else None, None)
        table, cause = self._read(placed.blanked(), self._fields)
        if cause is not None:
            good = table.num_rows
            texts = texts[:good]
            stamps = first_of(stamps, good)
            cause = self._explained(lines.line(good), cause)
        uuids = text_column(texts) if self._wants_uuids else None
        return Parsed(self._columns_of(table), stamps, uuids, cause)

    def _sliced(self, lines: Lines, bare: npt.NDArray[np.bool_]) -> dict[str, Any] | None:
        """The columns of lines, if these are written alike; None if they are to be parsed."""
        try:
            _check_utf8(lines.block)
        except UnicodeDecodeError:
            return None
        return sliced_columns(lines.block, lines.begins, lines.ends, bare, self._data_fields)

    def _parse_searched(self, lines: Lines) -> Parsed:
        """Lines which have their UUIDs anywhere, or none."""
        table, cause = self._read(lines, self._with_keys)
        if cause is None:
            found = self._merged(table)
        else:
            # A key may hold something that is no text, and no UUID.
            table, cause = self._read(lines, self._fields)
            good = table.num_rows
            if cause is not None:
                cause = self._explained(lines.line(good), cause)
            found, refused = self._looked_up(lines.part(0, good))
            if refused is not None:
                cause = refused
                table = table.slice(0, len(found))
        stamps, uuids, invalid = self._understood(found)
        if invalid is not None:
            cause = invalid
            table = table.slice(0, invalid.index)
        return Parsed(self._columns_of(table), stamps, uuids, cause)

    def _columns_of(self, table: pa.Table) -> dict[str, Any]:
        return {name: _array(table.column(name)) for name in self._names}

    # ----------------------------------------------------------------- columns

    def _read(self, lines: Lines, schema: pa.Schema) -> tuple[pa.Table, Exception | None]:
        """The table of all lines before the first bad one, and what is wrong with that."""
        try:
            return self._table(lines, schema), None
        except MISFITS as error:
            cause: Exception = error
        except ValueError as error:
            cause = error
        good, bad = 0, len(lines)
        best = schema.empty_table()
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._table(lines.part(good, middle), schema)
            except (*MISFITS, ValueError) as error:
                bad, cause = middle, error
            else:
                good = middle
        if good:
            best = self._table(lines.part(0, good), schema)
        return best, cause

    def _table(self, lines: Lines, schema: pa.Schema) -> pa.Table:
        """The table of lines.

        Raises:
            ArrowInvalid: or another of pyarrow's errors: a line is bad.
            ValueError: the same.
        """
        if self._lacks_types:
            return _table_of_objects([_object(lines.line(at)) for at in range(len(lines))], schema)
        if not _are_objects(lines):
            lines = _stripped(lines)
        block = pa.py_buffer(lines.block)
        try:
            table = pj.read_json(
                pa.BufferReader(block),
                read_options=pj.ReadOptions(use_threads=False, block_size=max(block.size, 1)),
                parse_options=pj.ParseOptions(
                    explicit_schema=schema, unexpected_field_behavior="ignore"
                ),
            )
        except pa.ArrowNotImplementedError:
            # That reader has no such types at all: from now on objects are made and converted.
            self._lacks_types = True
            return self._table(lines, schema)
        if table.num_rows != len(lines):
            raise ValueError("a line holds more than one object")
        _check_utf8(lines.block)  # the reader takes over what it is given
        return table

    def _explained(self, line: bytes, cause: Exception) -> Exception:
        """What is wrong with a line, said by who says it best."""
        try:
            _object(line)
        except ValueError as error:
            return error
        found = ValueError(f"it does not fit the schema: {cause}")
        found.__cause__ = cause
        return found

    # ------------------------------------------------------------------- UUIDs

    def _merged(self, table: pa.Table) -> pa.Array | list[RawUuid]:
        """The UUIDs of lines: an array of text, or whatever stands there."""
        first, *others = (
            column if column.type == pa.string() else column.cast(pa.string())
            for column in (_array(table.column(key)) for key in self._keys)
        )
        if not first.null_count:
            return first
        *others, last = others
        for other in others:
            first = pc.coalesce(first, other)
        if not first.null_count:
            return first
        # Of ``uuid`` nobody knows that it is a message's: it is taken for one if it can be.
        return [
            raw if raw is not None else _if_uuid(lower)
            for raw, lower in zip(first.to_pylist(), last.to_pylist(), strict=True)
        ]

    def _looked_up(self, lines: Lines) -> tuple[list[RawUuid], Exception | None]:
        """The UUIDs of lines which were read, up to the first that holds something else there."""
        found: list[RawUuid] = []
        *keys, last = self._keys
        header = _header_of(self._keys)
        for at in range(len(lines)):
            values = header(lines.line(at))
            raw = next((value for key in keys if (value := values[key]) is not None), None)
            if raw is None:
                found.append(_if_uuid(values[last]))
            elif isinstance(raw, str):
                found.append(raw)
            else:
                return found, ValueError(f"its UUID is no text but {type(raw).__name__}")
        return found, None

    def _understood(
        self, found: pa.Array | Sequence[RawUuid]
    ) -> tuple[Stamps, pa.Array | None, InvalidUuidError | None]:
        """What UUIDs say, up to the first that is none."""
        if isinstance(found, pa.Array):
            texts = matrix_of(found)
            stamps = parse_text_uuids(texts) if texts is not None else None
            if stamps is not None:
                return stamps, found if self._wants_uuids else None, None
            found = found.to_pylist()
        invalid = None
        try:
            stamps = stamps_of(found)
        except InvalidUuidError as error:
            if self._strict:
                invalid = error
                found = found[: error.index]
                stamps = stamps_of(found)
            else:
                stamps = stamps_of([_if_uuid(raw) for raw in found])
        uuids = uuid_column(found, stamps) if self._wants_uuids else None
        return stamps, uuids, invalid

    def _no_uuids(self) -> pa.Array | None:
        return pa.array([], type=pa.string()) if self._wants_uuids else None


def first_of(stamps: Stamps, count: int) -> Stamps:
    """The first of many stamps."""
    return Stamps(stamps.producers[:count], stamps.clocks[:count], stamps.flags[:count])


# -------------------------------------------------------------------- pieces


def _are_objects(lines: Lines) -> bool:
    """Whether each line seems to hold one object and nothing beside it."""
    content = np.frombuffer(lines.block, np.uint8)
    begins, ends = lines.begins, lines.ends
    if int((ends - begins).min()) <= 2:
        return False
    return bool((content[begins] == _OPEN).all() and (content[ends - 2] == _CLOSE).all())


def _stripped(lines: Lines) -> Lines:
    """The same lines without white space around their objects.

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
    """The object of a line.

    Raises:
        ValueError: it holds something else.
    """
    found = orjson.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is expected, not {type(found).__name__}")  # noqa: TRY004 - of the content
    return found


def _table_of_objects(objects: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """The slow way, for types that the columnar reader lacks."""
    columns = [
        pa.array([each.get(field.name) for each in objects], type=field.type) for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _header_of(keys: Sequence[str]) -> Callable[[bytes], dict[str, Any]]:
    def decode(line: bytes) -> dict[str, Any]:
        found = _decode_raw(line)
        return {key: msgspec.json.decode(found[key]) if key in found else None for key in keys}

    return decode


_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _array(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.combine_chunks()


def matrix_of(texts: pa.Array) -> npt.NDArray[np.uint8] | None:
    """Texts which are all as long as a UUID's as rows of bytes, shape [n, 36]."""
    if texts.null_count or not len(texts):
        return None
    ends = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: len(texts) + 1]
    if not (np.diff(ends) == TEXT_BYTES).all():
        return None
    data = np.frombuffer(texts.buffers()[2], np.uint8)
    return data[ends[0] : ends[-1]].reshape(-1, TEXT_BYTES)


def _if_uuid(raw: object) -> str | None:
    """A text which is a UUID; None for anything else."""
    if not isinstance(raw, str):
        return None
    try:
        uuid_of_text(raw)
    except ValueError:
        return None
    return raw


def _check_utf8(block: bytes | bytearray | memoryview) -> None:
    """Refuse what is no text.

    Raises:
        UnicodeDecodeError: it is not.
    """
    if isinstance(block, memoryview) or not block.isascii():
        str(block, "utf-8")
