"""JSON lines to columns, a block at a time.

Where every line begins with its UUID, as our own publishers write it, UUIDs are cut out of the
block in bulk. If the lines also have one layout, their values are cut out, too, see ``layout``. All
other lines are parsed by pyarrow, with blanks in place of the UUIDs that were cut out.

The error of that parser names no line. The first bad line is the first one that a decoder of
objects refuses, if the parser refuses it, too; else it is found by bisection, which takes many
times longer. Types that ``pyarrow.json`` cannot parse are decoded object by object.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime as dt
import decimal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.json as pj

from gazette_sdk.message.columns.batches import (
    MISFITS,
    data_fields,
    first_misfit,
    misfit_error,
    text_column,
    uuid_column,
)
from gazette_sdk.message.columns.layout import sliced_columns
from gazette_sdk.message.columns.schema import (
    converted,
    holds_floats,
    holds_required,
    is_finite,
    parsed_field,
)
from gazette_sdk.message.kinds.json import (
    UuidPlace,
    holds_long_times,
    last_values,
    time_cutter,
    windows,
)
from gazette_sdk.message.runs import NO_STAMPS, Stamps, parse_text_uuids, stamps_of, valid_stamps
from gazette_sdk.message.uuid import TEXT_BYTES, RawUuid, is_uuid_text

_BLANK, _COMMA, _OPEN, _CLOSE, _QUOTE = (np.uint8(ord(character)) for character in ' ,{}"')


@dataclass(frozen=True, slots=True)
class Lines:
    """Block of whole lines, with their places.

    Attributes:
        block: the lines, the last one with its newline.
        begins: index of each line's first byte.
        ends: index after each line's newline, where the next line begins.
    """

    block: bytes | bytearray | memoryview
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begins)

    def part(self, start: int, stop: int) -> Lines:
        """Return the lines of ``[start, stop)``, as a block of their own."""
        if start == 0 and stop == len(self):
            return self
        if start == stop:
            return Lines(b"", self.begins[:0], self.ends[:0])
        base, end = int(self.begins[start]), int(self.ends[stop - 1])
        return Lines(
            memoryview(self.block)[base:end],
            self.begins[start:stop] - base,
            self.ends[start:stop] - base,
        )

    def line(self, index: int) -> bytes:
        """Return one line, without its newline."""
        return bytes(self.block[int(self.begins[index]) : int(self.ends[index]) - 1])


class PlacedUuids(NamedTuple):
    """UUIDs of lines that all begin with one.

    Attributes:
        lines: the lines.
        texts: the texts of the UUIDs, shape [n, 36].
        separators: byte after each UUID's closing quote: a comma or a brace.
        width: length of a line up to its separator, included.
    """

    lines: Lines
    texts: npt.NDArray[np.uint8]
    separators: npt.NDArray[np.uint8]
    width: int

    def are_bare(self) -> npt.NDArray[np.bool_]:
        """Return for each line if it holds nothing beside its UUID."""
        lengths = self.lines.ends - self.lines.begins
        found: npt.NDArray[np.bool_] = (self.separators == _CLOSE) & (
            lengths == self.width + len(b"\n")
        )
        return found

    def blanked(self) -> Lines:
        """Return the lines with blanks in place of the UUID, which makes less to be parsed."""
        begins = self.lines.begins
        block = bytearray(self.lines.block)
        heads = np.full((len(begins), self.width), _BLANK, np.uint8)
        heads[:, 0] = _OPEN
        heads[:, -1] = np.where(self.separators == _COMMA, _BLANK, self.separators)
        windows(block, self.width)[begins] = heads.view(f"V{self.width}").reshape(-1)
        return Lines(block, begins, self.lines.ends)


def placed_uuids(lines: Lines, place: UuidPlace) -> PlacedUuids | None:
    """Return the UUIDs of lines; None if a line does not begin with one.

    Args:
        lines: the lines.
        place: place of UUIDs, with two bytes after.
    """
    heads = place.heads(lines.block, lines.begins, lines.ends)
    if heads is None:
        return None
    separators, following = heads[:, place.end + 1], heads[:, place.end + 2]
    goes_on = (separators == _COMMA) & (following == _QUOTE)
    if not (goes_on | (separators == _CLOSE)).all():
        return None
    return PlacedUuids(lines, heads[:, place.begin : place.end], separators, place.end + 2)


BytesForm: TypeAlias = Literal["utf8", "base64", "hex"]
"""Form of bytes in JSON: their text itself, or an encoding."""


class _Base64(bytes):
    """Bytes that JSON holds as base64, of either alphabet."""

    __slots__ = ()


class _Hex(bytes):
    """Bytes that JSON holds as hexadecimal digits."""

    __slots__ = ()


_BYTES: dict[BytesForm, type] = {"utf8": str, "base64": _Base64, "hex": _Hex}


def is_parsed_by_arrow(kind: pa.DataType, bytes_form: BytesForm) -> bool:
    """Return True if ``pyarrow.json`` parses values of a type from what our publishers write."""
    if pa.types.is_map(kind) or pa.types.is_duration(kind) or pa.types.is_dictionary(kind):
        return False
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return False  # it parses numbers, but no text
    if _is_binary(kind):
        return bytes_form == "utf8"
    parts = [kind.field(at).type for at in range(kind.num_fields)]
    return all(is_parsed_by_arrow(part, bytes_form) for part in parts)


TAKES_ANY = {b"gazette.text": b"any"}
"""Metadata of a schema whose columns of text take any value of JSON, as it is written."""


class JsonObjects:
    """Decoder of JSON objects to a table.

    Args:
        schema: columns wanted, with their types. Keys without a column are ignored.
        bytes_form: form of bytes in JSON.
        takes_any: a column of text takes a value that is no text as it is written.
    """

    def __init__(
        self, schema: pa.Schema, bytes_form: BytesForm = "utf8", *, takes_any: bool = False
    ) -> None:
        self._schema = schema
        self._texts = {
            field.name: made
            for field in schema
            if takes_any and (made := _text_maker(field.type)) is not None
        }
        row = _typed_dict(
            [(field.name, field.type) for field in schema],
            bytes_form,
            msgspec.Raw if takes_any else str,
        )
        self._decoder = msgspec.json.Decoder(row, dec_hook=_decoded_bytes)
        self._cut_times = time_cutter(row)

    def first_refused(self, lines: Lines) -> int | None:
        """Return the index of the first line that is no object of these types; None without one."""
        content = bytes(lines.block)
        places = zip(lines.begins.tolist(), lines.ends.tolist(), strict=True)
        for index, (begin, end) in enumerate(places):
            line = content[begin:end]
            try:
                self._decoder.decode(line if self._cut_times is None else self._cut_times(line))
            except (ValueError, RecursionError):
                return index
        return None

    def table(self, block: bytes | bytearray | memoryview) -> pa.Table:
        """Return the table of lines, without blank ones.

        Raises:
            ArrowInvalid: or another of pyarrow's errors: a value does not fit its column.
            ValueError: a line is no object, or a value does not fit its column.
        """
        try:
            if self._cut_times is not None and holds_long_times(block, 0, len(block)):
                block = b"\n".join(map(self._cut_times, bytes(block).split(b"\n")))
            objects = self._decoder.decode_lines(block)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
        columns = []
        for field in self._schema:
            values = [each.get(field.name) for each in objects]
            if field.name in self._texts:
                values = [self._texts[field.name](each) for each in values]
            column = pa.chunked_array([pa.array(values, type=field.type)])
            if not is_finite(column):  # pyarrow makes infinity of numbers that are too large
                raise ValueError(f"a number of {field.name!r} is out of the range of {field.type}")
            columns.append(column)
        return pa.Table.from_arrays(columns, schema=self._schema)


def _typed_dict(fields: list[tuple[str, pa.DataType]], bytes_form: BytesForm, text: type) -> Any:
    types = {name: _python_type(kind, bytes_form, text) for name, kind in fields}
    return TypedDict("Object", types, total=False)  # type: ignore[operator]


def _python_type(kind: pa.DataType, bytes_form: BytesForm, text: type = str) -> Any:
    """Return the annotation of values that Arrow converts to a type, or null.

    Args:
        kind: the type.
        bytes_form: form of bytes in JSON.
        text: annotation of texts; ``msgspec.Raw`` for those made of any value.
    """
    if _is_text(kind) and text is msgspec.Raw:
        return text
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    found: Any = None
    if pa.types.is_struct(kind):
        fields = [(kind.field(at).name, kind.field(at).type) for at in range(kind.num_fields)]
        found = _typed_dict(fields, bytes_form, text)
    elif pa.types.is_map(kind):
        key = _not_null(_python_type(kind.key_type, bytes_form))
        found = dict.__class_getitem__((key, _python_type(kind.item_type, bytes_form, text)))
    elif pa.types.is_nested(kind) and kind.num_fields == 1:
        found = list.__class_getitem__(_python_type(kind.field(0).type, bytes_form, text))
    elif _is_binary(kind):
        found = _BYTES[bytes_form]
    if found is not None:
        return found | None
    return next((annotation for holds, annotation in _ANNOTATIONS if holds(kind)), Any)


def _not_null(annotation: Any) -> Any:
    """Return the annotation of keys of an object, which are never null, nor numbers of times."""
    return annotation.__args__[0] if hasattr(annotation, "__args__") else annotation


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _text_maker(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return the function that makes texts of the parts of a value; None if it has no texts."""
    if _is_text(kind):
        return _text_of
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        found = {each.name: made for each in fields if (made := _text_maker(each.type))}
        return (lambda value: value and {**value, **_made(found, value)}) if found else None
    is_map = pa.types.is_map(kind)
    if not is_map and not (pa.types.is_nested(kind) and kind.num_fields == 1):
        return None
    item = _text_maker(kind.item_type if is_map else kind.field(0).type)
    if item is None:
        return None
    if is_map:
        return lambda value: value and {key: item(each) for key, each in value.items()}
    return lambda value: value and [item(each) for each in value]


def _made(makers: dict[str, Callable[[Any], Any]], value: dict[str, Any]) -> dict[str, Any]:
    return {name: make(value[name]) for name, make in makers.items() if name in value}


def _text_of(raw: bytes | None) -> str | None:
    """Return the text of a value: its own, or how it is written if it is no text."""
    if raw is None:
        return None
    written = bytes(raw)
    if written[:1] == b'"':
        return msgspec.json.decode(written, type=str)
    return None if written == b"null" else written.decode()


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


_ANNOTATIONS: list[tuple[Callable[[pa.DataType], bool], Any]] = [
    (pa.types.is_boolean, bool | None),
    (pa.types.is_integer, int | None),
    (pa.types.is_floating, float | None),
    (pa.types.is_string, str | None),
    (pa.types.is_large_string, str | None),
    (pa.types.is_timestamp, dt.datetime | None),
    (pa.types.is_date, dt.date | None),
    (pa.types.is_time, dt.time | None),
    (pa.types.is_duration, dt.timedelta | None),
    (pa.types.is_decimal, decimal.Decimal | None),
    (pa.types.is_null, None),
]
"""Annotations of plain types. Times are texts, as readers of classes take them: of a number the
unit is not known."""


def _decoded_bytes(kind: type, text: object) -> bytes:
    """Return the bytes of a text; called by the decoder."""
    if not isinstance(text, str):
        raise ValueError(f"a text is expected, not {type(text).__name__}")  # noqa: TRY004 - of the content
    if kind is _Hex:
        return _Hex(bytes.fromhex(text))
    plain = text.replace("-", "+").replace("_", "/")
    try:
        return _Base64(base64.b64decode(plain, validate=True))
    except binascii.Error as error:
        raise ValueError(f"{text!r} is no base64: {error}") from error


_OBJECT_BEGIN, _OBJECT_END = np.uint8(ord("{")), np.uint8(ord("}"))
_UUID_KEYS = ("UUID", "uuid")


class Parsed(NamedTuple):
    """Content of a block, up to its first bad line.

    Attributes:
        columns: the columns that are no metadata, by name.
        stamps: parts of the lines' UUIDs.
        uuids: the lines' UUIDs as text, if the schema has a column for them.
        cause: error of the line after; None if there is none.
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
        takes_any = TAKES_ANY.items() <= (schema.metadata or {}).items()
        self._holds_decimals = any(_holds_decimals(field.type) for field in self._fields)
        self._floats = [field.name for field in self._fields if holds_floats(field.type)]
        self._bytes_form = bytes_form
        self._takes_any = takes_any
        self._is_parsed = is_parsed

    @cached_property
    def _objects(self) -> JsonObjects:
        return JsonObjects(self._fields, self._bytes_form, takes_any=self._takes_any)

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
            return self._read_good(lines, error)

    def _read_good(self, lines: Lines, cause: Exception) -> tuple[pa.Table, Exception]:
        """Return the table of the lines before the first bad one, and the error of that.

        Args:
            lines: the lines.
            cause: error of all of them.
        """
        suspect = self._objects.first_refused(lines)
        found = None if suspect is None else self._refusal(lines.part(suspect, suspect + 1))
        if suspect is not None and found is not None:
            with contextlib.suppress(*MISFITS):  # an earlier line is bad
                return self._begin(lines, suspect), found
        good, cause = first_misfit(
            len(lines), lambda start, stop: self._table(lines.part(start, stop)), cause
        )
        return self._begin(lines, good), cause

    def _begin(self, lines: Lines, count: int) -> pa.Table:
        """Return the table of the first lines."""
        return self._table(lines.part(0, count)) if count else self._wanted.empty_table()

    def _refusal(self, line: Lines) -> Exception | None:
        """Return the error of a single line; None if it has none."""
        try:
            self._table(line)
        except MISFITS as error:
            return error
        return None

    def _table(self, lines: Lines) -> pa.Table:
        """Return the table of lines.

        Raises:
            ArrowInvalid: or another of pyarrow's errors: a line is bad.
            ValueError: the same.
        """
        bare = _bare_objects(lines)
        if not bare.all():
            lines = _stripped(lines, bare)
        try:
            table = self._parsed(lines.block)
        except pa.ArrowInvalid as error:
            if self._takes_any:
                table = self._objects.table(lines.block)
            elif _TWICE in str(error):
                # pyarrow refuses a key that an object has twice. All other readers take the last.
                table = self._parsed(_with_last_values(lines.block))
            else:
                raise
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
        if not self._is_parsed:
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
            self._is_parsed = False
            return self._objects.table(content)
        if self._holds_decimals:
            table.validate(full=True)  # pyarrow takes integers of more digits
        if not all(is_finite(table.column(name)) for name in self._floats):
            raise ValueError("NaN and Infinity are no JSON")  # which pyarrow takes
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


def _bare_objects(lines: Lines) -> npt.NDArray[np.bool_]:
    """Return for each line if it begins and ends like an object."""
    content = np.frombuffer(lines.block, np.uint8)
    begins, ends = lines.begins, lines.ends
    lasts = content[np.maximum(ends - 2, begins)]
    found: npt.NDArray[np.bool_] = (
        (ends - begins > 2) & (content[begins] == _OBJECT_BEGIN) & (lasts == _OBJECT_END)
    )
    return found


def _stripped(lines: Lines, bare: npt.NDArray[np.bool_]) -> Lines:
    """Return the lines without white space around their objects.

    Args:
        lines: the lines.
        bare: False for those that may have white space.

    Raises:
        ValueError: one of those holds anything but one object.
    """
    for at in np.flatnonzero(~bare).tolist():
        _object(lines.line(at))
    stripped = [lines.line(at).strip() + b"\n" for at in range(len(lines))]
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
