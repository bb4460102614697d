"""Decoders of journals to rows of record batches, by the form of their messages.

All work on a chunk of whole frames at a time, never on a single message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pydantic

from gazette_sdk.framing import Csv, Cut, Framing
from gazette_sdk.message.columns.conversion import first_lacking, holds_required
from gazette_sdk.message.columns.csv_columns import CsvColumns
from gazette_sdk.message.columns.json_columns import JsonColumns
from gazette_sdk.message.columns.json_objects import BytesForm
from gazette_sdk.message.columns.lines import Lines
from gazette_sdk.message.columns.metadata import (
    MISFITS,
    assembled,
    data_fields,
    first_misfit,
    misfit_error,
    uuid_column,
)
from gazette_sdk.message.columns.protobuf_columns import ProtobufColumns
from gazette_sdk.message.columns.rows import Row, Rows
from gazette_sdk.message.flags import ACK_TXN
from gazette_sdk.message.kinds import Kind
from gazette_sdk.message.kinds.json_kind import JsonKind
from gazette_sdk.message.reading.content_queue import Opened
from gazette_sdk.message.reading.journal_decoder import ContentDecoder, framing_and_kind
from gazette_sdk.message.sequencing.run import (
    NO_OFFSETS,
    NO_STAMPS,
    Run,
    Stamps,
    stamps_of,
    valid_stamps,
)

__all__ = ["ColumnDecoder", "column_decoder"]

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
            bytes_form=_bytes_form(self.kind.message_type),
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


def _bytes_form(message_type: type[Any]) -> BytesForm:
    """Return the form in which publishers of a class of JSON messages write bytes."""
    if issubclass(message_type, pydantic.BaseModel):
        return message_type.model_config.get("ser_json_bytes", "utf8")
    return "utf8" if issubclass(message_type, dict) else "base64"


class _CsvDecoder(ColumnDecoder):
    """Decoder of CSV records: columns are fields behind the UUID, by their places."""

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
