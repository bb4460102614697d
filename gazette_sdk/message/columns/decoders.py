"""Decoders of journals to rows of record batches, by the form of their messages.

All work on a chunk of whole frames at a time, never on a single message.

Of CSV records the schema's columns are the fields after the UUID, by their places
(:class:`CsvColumns`). Protobuf messages become columns one after the other, of the fields that are
wanted (:class:`ProtobufColumns`).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gazette_sdk.framing import Csv, Cut, Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.batch_reader import ContentDecoder, framing_and_kind
from gazette_sdk.message.columns.batches import (
    MISFITS,
    Row,
    Rows,
    assembled,
    data_fields,
    first_misfit,
    misfit_error,
    text_column,
    uuid_column,
)
from gazette_sdk.message.columns.json import BytesForm, JsonColumns, Lines, matrix_of
from gazette_sdk.message.columns.schema import first_lacking, holds_required, timestamps
from gazette_sdk.message.fetcher import Opened
from gazette_sdk.message.kinds import Kind
from gazette_sdk.message.kinds.json import DictKind, JsonKind, PydanticKind
from gazette_sdk.message.runs import (
    NO_OFFSETS,
    NO_STAMPS,
    Run,
    Stamps,
    parse_text_uuids,
    stamps_of,
    valid_stamps,
)
from gazette_sdk.message.uuid import ACK_TXN

_UUID = "\0uuid"
"""Name that no column of a schema has."""


class CsvColumns:
    """Parser of records to the columns of a schema.

    Empty fields are null, except in columns of text.

    Args:
        schema: columns wanted, with their types. Fields after those of the schema are
            ignored; a record with fewer is bad.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._fields = data_fields(schema)
        self._wants_uuids = "_uuid" in schema.names

    def read(
        self, buffer: Buffer, frames: Frames
    ) -> tuple[Stamps, dict[str, Any], pa.Array | None] | None:
        """Return stamps, columns and UUIDs of all records; None if one may be bad."""
        fields = self._fields
        content = pa.py_buffer(buffer).slice(frames.begins[0], frames.ends[-1] - frames.begins[0])
        names = [_UUID, *(field.name for field in fields)]
        first = bytes(buffer[frames.begins[0] : frames.ends[0]])
        found = _field_count(first)
        if found < len(names) or first.startswith(codecs.BOM_UTF8):  # which pyarrow leaves out
            return None
        names += [f"\0{at}" for at in range(len(names), found)]
        parsed = {
            field.name: pa.string() if pa.types.is_timestamp(field.type) else field.type
            for field in fields
        }
        types = {_UUID: pa.string(), **parsed}
        try:
            table = pcsv.read_csv(
                pa.BufferReader(content),
                read_options=pcsv.ReadOptions(
                    use_threads=False, block_size=max(content.size, 1), column_names=names
                ),
                parse_options=pcsv.ParseOptions(newlines_in_values=True),
                convert_options=pcsv.ConvertOptions(
                    column_types=types,
                    include_columns=list(types),
                    null_values=[""],
                    strings_can_be_null=False,
                ),
            )
        except (*MISFITS, KeyError):  # to be found one by one
            return None
        if table.num_rows != len(frames):
            return None
        columns = {name: table.column(name).combine_chunks() for name in types}
        uuids = columns.pop(_UUID)
        try:
            for field in fields:
                if pa.types.is_timestamp(field.type):
                    columns[field.name] = _cast(columns[field.name], field.type)
        except pa.ArrowInvalid:
            return None
        texts = matrix_of(uuids)
        stamps = parse_text_uuids(texts) if texts is not None else None
        if texts is None or stamps is None:
            return None
        return stamps, columns, text_column(texts) if self._wants_uuids else None

    def convert(self, records: Sequence[list[str]]) -> dict[str, pa.Array]:
        """Return the columns of records whose fields were parsed already.

        Raises:
            ArrowInvalid: or another of pyarrow's errors: a field does not fit its column's type.
            ValueError: a record has too few fields.
        """
        columns = {}
        for place, field in enumerate(self._fields, start=1):
            try:
                texts: list[str | None] = [record[place] for record in records]
            except IndexError:
                raise ValueError(
                    f"the schema names {len(self._fields)} columns, but behind its UUID the"
                    f" record has {min(map(len, records)) - 1}"
                ) from None
            if not pa.types.is_string(field.type):
                texts = [text or None for text in texts]
            columns[field.name] = _cast(pa.array(texts, type=pa.string()), field.type)
        return columns


def _cast(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return texts as a type; of a timestamp, an empty one is null."""
    if pa.types.is_timestamp(kind):
        return timestamps(pc.if_else(pc.equal(texts, ""), None, texts), kind)
    return texts.cast(kind)


def _field_count(record: bytes) -> int:
    """Return the number of a well-formed record's fields."""
    content = np.frombuffer(record, np.uint8)
    inside = np.cumsum(content == ord('"'), dtype=np.int64) & 1
    return 1 + int(((content == ord(",")) & (inside == 0)).sum())


Getter = Callable[[Any], Any]


class ProtobufColumns:
    """Converter of messages of a generated class to columns.

    Fields that are not set are null, or their defaults if they have no presence. Enums are
    the names of their values, messages are structs, maps are maps.

    Args:
        descriptor: descriptor of the messages' class.
        fields: columns wanted, with their types. One that is no field of the class is null.
    """

    def __init__(self, descriptor: Descriptor, fields: Iterable[pa.Field]) -> None:
        known = descriptor.fields_by_name
        self._columns = [
            (field, _getter(known[field.name])) for field in fields if field.name in known
        ]

    def columns(self, messages: Sequence[Any]) -> dict[str, pa.Array]:
        """Return the columns of messages, by name.

        Raises:
            ArrowInvalid: or another of pyarrow's errors: a field does not fit its column's type.
        """
        return {
            field.name: pa.array(list(map(get, messages)), type=field.type)
            for field, get in self._columns
        }


def _getter(field: FieldDescriptor) -> Getter:
    """Return a function that reads a field of a message, as Arrow takes it."""
    name = field.name
    is_plain = field.message_type is None and field.enum_type is None
    if is_plain and not field.is_repeated and not field.has_presence:
        return attrgetter(name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value_of = _converter(field.message_type.fields_by_name["value"])
        return lambda message: [
            (key, value_of(value)) for key, value in getattr(message, name).items()
        ]
    convert = _converter(field)
    if field.is_repeated:
        return lambda message: [convert(each) for each in getattr(message, name)]
    if field.has_presence:
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    return lambda message: convert(getattr(message, name))


def _converter(field: FieldDescriptor) -> Getter:
    """Return a function that converts one value of a field for Arrow."""
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return lambda value: names.get(value, str(value))
    if field.message_type is not None:
        return _Struct(field.message_type)
    return _itself


class _Struct:
    """Converter of messages to dicts. Its getters are made on first use: classes may recur."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self._getters: list[tuple[str, Getter]] | None = None

    def __call__(self, message: Any) -> dict[str, Any]:
        if self._getters is None:
            self._getters = [(each.name, _getter(each)) for each in self._descriptor.fields]
        return {name: get(message) for name, get in self._getters}


def _itself(value: Any) -> Any:
    return value


M = TypeVar("M")


def column_decoder(
    message_type: type[Any], schema: pa.Schema, opened: Opened, *, sequenced: bool
) -> ColumnDecoder:
    """Return the decoder of a journal; raises as :func:`framing_and_kind`.

    Args:
        message_type: class of the messages.
        schema: columns wanted, with their types.
        opened: the journal, and the offset at which content begins.
        sequenced: rows are to be sequenced: an invalid UUID is an error then.
    """
    framing, kind = framing_and_kind(opened, message_type, sequenced=sequenced)
    make: Callable[..., ColumnDecoder] = {"json": _JsonDecoder, "csv": _CsvDecoder}.get(
        framing.form, _ProtobufDecoder
    )
    return make(opened.journal, framing, kind, schema, opened.offset, sequenced=sequenced)


class ColumnDecoder(ContentDecoder[Row]):
    """Decoder of one journal's messages to rows.

    Args:
        journal: name of the journal, as the user gave it.
        framing: its framing.
        kind: adapter of the messages' class.
        schema: columns wanted, with their types.
        offset: offset at which content begins, at the boundary of a frame.
        sequenced: rows are to be sequenced.
    """

    def __init__(
        self,
        journal: str,
        framing: Framing,
        kind: Kind[Any],
        schema: pa.Schema,
        offset: int,
        *,
        sequenced: bool,
    ) -> None:
        batch = schema.empty_table().combine_chunks().to_batches()
        rows = Rows(batch[0] if batch else pa.RecordBatch.from_pylist([], schema=schema))
        empty: Run[Row] = Run(journal, NO_OFFSETS, NO_OFFSETS, *NO_STAMPS, rows)
        super().__init__(journal, framing, offset, empty, "columns of the schema")
        self.schema = schema
        self.kind = kind
        self.sequenced = sequenced
        self._required = [each for each in data_fields(schema) if holds_required([each])]

    def _run(
        self,
        cut: Cut,
        stamps: Stamps,
        columns: dict[str, Any],
        uuids: pa.Array | None,
        cause: Exception | None,
    ) -> tuple[Run[Row], Exception | None]:
        """Return a run of the first frames of a cut, and the error of the next frame.

        Args:
            cut: the frames.
            stamps: parts of the UUIDs of frames, up to the first bad one.
            columns: their columns that are no metadata.
            uuids: their UUIDs as text, if there is a column for them.
            cause: error of the first bad frame.
        """
        if self._required:
            lacking = first_lacking(self._required, columns, stamps.flags != ACK_TXN)
            if lacking is not None:
                good, name = lacking
                cause = misfit_error(
                    ValueError(f"column {name!r} is not nullable, and the message lacks it")
                )
                stamps = stamps.first(good)
                columns = {each: array.slice(0, good) for each, array in columns.items()}
                uuids = None if uuids is None else uuids.slice(0, good)
        count = len(stamps.clocks)
        if not count:
            return self._empty, cause
        begins, ends = (each[:count] + cut.offset for each in cut.frames.arrays())
        run: Run[Row] = Run(self.journal, begins, ends, *stamps, self._empty.items)
        run.items = Rows(assembled(self.schema, columns, run, uuids))
        return run, cause

    def _uuid_column(self, raw: list[Any], stamps: Stamps) -> pa.Array | None:
        return uuid_column(raw, stamps) if "_uuid" in self.schema.names else None


class _JsonDecoder(ColumnDecoder):
    """Decoder of JSON objects of any framing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        key = self.kind.key if isinstance(self.kind, JsonKind) else "UUID"
        self._columns = JsonColumns(
            self.schema,
            key=key,
            strict=self.sequenced,
            bytes_form=_bytes_form(self.kind),
        )

    def decode(self, cut: Cut) -> tuple[Run[Row], Exception | None]:
        """Decode lines in bulk."""
        parsed = self._columns.parse(self._lines(cut))
        return self._run(cut, parsed.stamps, parsed.columns, parsed.uuids, parsed.cause)

    def _lines(self, cut: Cut) -> Lines:
        frames = cut.frames
        if self.framing.newline_delimited:
            begins, ends = frames.arrays()
            if bool((begins[1:] == ends[:-1]).all()):
                base, end = int(begins[0]), int(ends[-1])
                if not base and end == len(cut.buffer):
                    return Lines(cut.buffer, begins, ends)
                return Lines(memoryview(cut.buffer)[base:end], begins - base, ends - base)
        # Between the tokens of JSON a line break equals a blank.
        lines = [
            payload.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"
            for payload in self.framing.payloads(cut.buffer, frames)
        ]
        ends = np.cumsum([len(line) for line in lines])
        return Lines(b"".join(lines), np.append(0, ends[:-1]), ends)


def _bytes_form(kind: Kind[Any]) -> BytesForm:
    """Return the form in which publishers of a kind of JSON messages write bytes."""
    if isinstance(kind, PydanticKind):
        form: BytesForm = kind.message_type.model_config.get("ser_json_bytes", "utf8")
        return form
    return "utf8" if isinstance(kind, DictKind) else "base64"


class _CsvDecoder(ColumnDecoder):
    """Decoder of CSV records: columns are fields after the UUID, by their places."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._columns = CsvColumns(self.schema)

    def decode(self, cut: Cut) -> tuple[Run[Row], Exception | None]:
        """Decode records in bulk; one by one, if one of them is bad."""
        is_csv = isinstance(self.framing, Csv)
        found = self._columns.read(cut.buffer, cut.frames) if is_csv else None
        if found is not None:
            return self._run(cut, *found, None)
        decoded = self.kind.decode(self.framing, cut.buffer, cut.frames)
        columns, good, cause = _fitting(self._columns.convert, decoded.messages)
        raw = list(decoded.uuids[:good])
        stamps = stamps_of(raw)
        uuids = self._uuid_column(raw, stamps)
        return self._run(cut, stamps, columns, uuids, cause or decoded.error)


class _ProtobufDecoder(ColumnDecoder):
    """Decoder of protobuf messages, which are parsed one by one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        descriptor = self.kind.message_type.DESCRIPTOR
        self._columns = ProtobufColumns(descriptor, data_fields(self.schema))

    def decode(self, cut: Cut) -> tuple[Run[Row], Exception | None]:
        """Decode messages, then convert their fields column by column."""
        decoded = self.kind.decode(self.framing, cut.buffer, cut.frames)
        columns, good, cause = _fitting(self._columns.columns, decoded.messages)
        cause = cause or decoded.error
        raw = list(decoded.uuids[:good])
        stamps, invalid = valid_stamps(raw)
        if invalid is not None:
            good, cause = invalid.index, invalid
            raw = raw[:good]
            columns = {name: column.slice(0, good) for name, column in columns.items()}
        return self._run(cut, stamps, columns, self._uuid_column(raw, stamps), cause)


def _fitting(
    convert: Callable[[Sequence[M]], dict[str, pa.Array]], messages: Sequence[M]
) -> tuple[dict[str, pa.Array], int, Exception | None]:
    """Return the columns of messages before the first misfit, their number, and its error."""
    try:
        return convert(messages), len(messages), None
    except MISFITS as error:
        good, cause = first_misfit(
            len(messages), lambda start, stop: convert(messages[start:stop]), error
        )
    return convert(messages[:good]), good, misfit_error(cause)
