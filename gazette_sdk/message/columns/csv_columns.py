"""CSV records to columns: the schema's columns are the fields behind the UUID, by their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from gazette_sdk.framing import Frames
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.columns.conversion import timestamps
from gazette_sdk.message.columns.json_columns import matrix_of
from gazette_sdk.message.columns.metadata import MISFITS, data_fields, text_column
from gazette_sdk.message.sequencing.run import Stamps, parse_text_uuids

__all__ = ["CsvColumns"]

_UUID = "\0uuid"
"""Name that no column of a schema has."""


class CsvColumns:
    """Parser of records to the columns of a schema.

    Empty fields are null, except in columns of text.

    Args:
        schema: columns wanted, with their types. Fields behind those of the schema are
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
        found = _field_count(bytes(buffer[frames.begins[0] : frames.ends[0]]))
        if found < len(names):
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
