"""Content of one journal to runs of rows, by the form of its messages."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from gazette_sdk.errors import DecodeError
from gazette_sdk.framing import Csv, Frames, Framing, JsonLines
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.columns.csv_columns import CsvColumns
from gazette_sdk.message.columns.json_columns import JsonColumns
from gazette_sdk.message.columns.lines import Lines
from gazette_sdk.message.columns.metadata import MISFITS, assembled, data_fields, uuid_column
from gazette_sdk.message.columns.protobuf_columns import ProtobufColumns
from gazette_sdk.message.columns.rows import Row, Rows
from gazette_sdk.message.kinds.base import Kind
from gazette_sdk.message.kinds.json_kind import JsonKind
from gazette_sdk.message.reading.journal_decoder import ContentDecoder, Part
from gazette_sdk.message.sequencing.run import NO_STAMPS, InvalidUuidError, Run, Stamps, stamps_of

__all__ = ["ColumnDecoder", "decoder_of"]

M = TypeVar("M")

_NO_OFFSETS = np.empty(0, np.int64)


def decoder_of(
    journal: str,
    framing: Framing,
    kind: Kind[Any],
    schema: pa.Schema,
    offset: int,
    *,
    sequenced: bool,
) -> ColumnDecoder:
    """The decoder of a journal, by the form of its framing.

    Args:
        journal: the journal's name, as it was asked for.
        framing: its framing.
        kind: adapter of the messages' class.
        schema: columns wanted, with their types.
        offset: where content begins, at the boundary of a frame.
        sequenced: rows are to be sequenced: a UUID that is none is an error then.
    """
    make: Callable[..., ColumnDecoder] = {"json": _JsonDecoder, "csv": _CsvDecoder}.get(
        framing.form, _MessageDecoder
    )
    if type(framing) is JsonLines:
        framing = _ArrayLines()
    return make(journal, framing, kind, schema, offset, sequenced=sequenced)


class ColumnDecoder(ContentDecoder[Row]):
    """What all decoders to columns have in common; arguments as of :func:`decoder_of`."""

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
        super().__init__(journal, framing, offset)
        self.described = "columns of the schema"
        self.schema = schema
        self.kind = kind
        self.sequenced = sequenced
        batch = schema.empty_table().combine_chunks().to_batches()
        rows = Rows(batch[0] if batch else pa.RecordBatch.from_pylist([], schema=schema))
        self._empty: Run[Row] = Run(journal, _NO_OFFSETS, _NO_OFFSETS, *NO_STAMPS, rows)
        self.prepare()

    @abc.abstractmethod
    def prepare(self) -> None:
        """Make what turns messages of this form into columns."""

    def empty(self) -> Run[Row]:
        """A run without rows."""
        return self._empty

    def decode_part(self, part: Part) -> tuple[Run[Row], DecodeError | None]:
        """As :meth:`decode`, with the error that a reader would raise."""
        run, cause = self.decode(part)
        if cause is None:
            return run, None
        return run, self._undecodable(part.offset + int(part.frames.begins[len(run)]), cause)

    def _run(
        self, part: Part, stamps: Stamps, columns: dict[str, Any], uuids: pa.Array | None
    ) -> Run[Row]:
        """A run of the part's first frames: as many as there are stamps."""
        count = len(stamps.clocks)
        if not count:
            return self._empty
        begins = np.asarray(part.frames.begins, np.int64)[:count] + part.offset
        ends = np.asarray(part.frames.ends, np.int64)[:count] + part.offset
        run: Run[Row] = Run(self.journal, begins, ends, *stamps, self._empty.items)
        run.items = Rows(assembled(self.schema, columns, run, uuids))
        return run


class _JsonDecoder(ColumnDecoder):
    """JSON objects of any framing."""

    def prepare(self) -> None:
        """Know the columns, and the key of the UUID."""
        key = self.kind.key if isinstance(self.kind, JsonKind) else "UUID"
        self._columns = JsonColumns(self.schema, key=key, strict=self.sequenced)

    def decode(self, part: Part) -> tuple[Run[Row], Exception | None]:
        """Decode lines in bulk."""
        parsed = self._columns.parse(self._lines(part))
        return self._run(part, parsed.stamps, parsed.columns, parsed.uuids), parsed.cause

    def _lines(self, part: Part) -> Lines:
        frames = part.frames
        if self.framing.newline_delimited:
            begins = np.asarray(frames.begins, np.int64)
            ends = np.asarray(frames.ends, np.int64)
            if bool((begins[1:] == ends[:-1]).all()):
                base, end = int(begins[0]), int(ends[-1])
                block: bytes | bytearray | memoryview = part.buffer
                if base or end != len(block):
                    block = memoryview(block)[base:end]
                return Lines(block, begins - base, ends - base)
        # Between the tokens of JSON a line break is as good as a blank.
        lines = [
            payload.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"
            for payload in self.framing.payloads(part.buffer, frames)
        ]
        ends = np.cumsum([len(line) for line in lines])
        return Lines(b"".join(lines), np.append(0, ends[:-1]), ends)


class _ArrayLines(JsonLines):
    """JSON lines whose frames are arrays: of many lines that makes a difference."""

    def cut(self, buffer: Buffer, *, searched: int = 0, final: bool = False) -> Frames:
        content = np.frombuffer(buffer, np.uint8)
        ends = np.flatnonzero(content[searched:] == 0x0A)
        if not len(ends):
            return super().cut(buffer, searched=searched, final=final)
        ends += searched + 1
        begins = np.empty_like(ends)
        begins[0] = 0
        begins[1:] = ends[:-1]
        consumed = int(ends[-1])
        error = None
        if final and consumed < len(buffer):
            error = super().cut(buffer[consumed:], final=True).error
            assert error is not None
            error.offset = consumed
        # Whatever works on frames works on arrays as well.
        return Frames(begins, ends, consumed, error)  # type: ignore[arg-type]


class _CsvDecoder(ColumnDecoder):
    """Records, whose columns are those of the schema by their places behind the UUID."""

    def prepare(self) -> None:
        """Know the columns."""
        self._columns = CsvColumns(self.schema)

    def decode(self, part: Part) -> tuple[Run[Row], Exception | None]:
        """Decode records in bulk; one by one, if one of them is bad."""
        is_csv = isinstance(self.framing, Csv)
        found = self._columns.read(part.buffer, part.frames) if is_csv else None
        if found is not None:
            stamps, columns, uuids = found
            return self._run(part, stamps, columns, uuids), None
        decoded = self.kind.decode(self.framing, part.buffer, part.frames)
        records = decoded.messages
        columns, good, cause = _fitting(self._columns.convert, records)
        cause = cause or decoded.error
        raw = list(decoded.uuids[:good])
        stamps = stamps_of(raw)
        uuids = uuid_column(raw, stamps) if "_uuid" in self.schema.names else None
        return self._run(part, stamps, columns, uuids), cause


class _MessageDecoder(ColumnDecoder):
    """Messages which are decoded one by one: protobuf."""

    def prepare(self) -> None:
        """Know the columns."""
        descriptor = self.kind.message_type.DESCRIPTOR
        self._columns = ProtobufColumns(descriptor, data_fields(self.schema))

    def decode(self, part: Part) -> tuple[Run[Row], Exception | None]:
        """Decode messages, and then their fields column by column."""
        decoded = self.kind.decode(self.framing, part.buffer, part.frames)
        columns, good, cause = _fitting(self._columns.columns, decoded.messages)
        cause = cause or decoded.error
        raw = list(decoded.uuids[:good])
        try:
            stamps = stamps_of(raw)
        except InvalidUuidError as error:
            good, cause = error.index, error
            raw = raw[:good]
            stamps = stamps_of(raw)
            columns = {name: column.slice(0, good) for name, column in columns.items()}
        uuids = uuid_column(raw, stamps) if "_uuid" in self.schema.names else None
        return self._run(part, stamps, columns, uuids), cause


def _fitting(
    convert: Callable[[Sequence[M]], dict[str, pa.Array]], messages: Sequence[M]
) -> tuple[dict[str, pa.Array], int, Exception | None]:
    """Columns of the messages before the first that does not fit, their number, and its error."""
    try:
        return convert(messages), len(messages), None
    except (*MISFITS, ValueError, TypeError) as error:
        cause: Exception = error
    good, bad = 0, len(messages)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            convert(messages[good:middle])
        except (*MISFITS, ValueError, TypeError) as error:
            bad, cause = middle, error
        else:
            good = middle
    found = ValueError(f"it does not fit the schema: {cause}")
    found.__cause__ = cause
    return convert(messages[:good]), good, found
