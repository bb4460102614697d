"""Record batches as messages: their rows, of a class made for their columns."""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from gazette_sdk.errors import ValidationError
from gazette_sdk.message.kinds.json_kind import KEY, own_uuid

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Row", "Rows", "is_arrow", "known_keys", "table_of"]

_CLASSES_KNOWN_MAX = 64
"""Classes of so many sets of columns are kept: each costs as much as encoding thousands of rows."""

_MEANT = frozenset({"uuid_field", "validate"})
"""Attributes which mean something where a class of messages has them."""


class Row(msgspec.Struct, gc=False):
    """A row: its values are attributes, where their names allow that, and items."""

    fields_by_column: ClassVar[dict[str, str]] = {}

    def __getitem__(self, column: str) -> Any:
        return getattr(self, self.fields_by_column[column])

    def new_acknowledgement(self, journal: str) -> dict[str, Any]:
        """An object without any column."""
        del journal
        return {}


class Rows(list[Row]):
    """Rows of a record batch.

    Attributes:
        columns: the values of each column.
    """

    columns: dict[str, list[Any]]


def is_arrow(messages: object) -> bool:
    """Return True for columns: pyarrow's, or anything that hands out an Arrow stream."""
    kind = type(messages)
    return hasattr(kind, "__arrow_c_stream__") or hasattr(kind, "__arrow_c_array__")


def table_of(messages: Any) -> pa.Table:
    """Columns as a table; nothing is copied.

    Raises:
        ValidationError: two columns have one name, or one has that of the message UUID.
    """
    import pyarrow as pa  # noqa: PLC0415 - only where columns are given

    if isinstance(messages, pa.Table):
        table = messages
    elif isinstance(messages, pa.RecordBatch):
        table = pa.Table.from_batches([messages])
    else:
        table = pa.table(messages)
    twice = {name for name in table.column_names if table.column_names.count(name) > 1}
    if twice:
        raise ValidationError(
            f"columns of a batch have the same name: {', '.join(sorted(twice))}", kind="columns"
        )
    if KEY in table.column_names:
        raise own_uuid(f"the batch has a column {KEY!r}")
    return table


def rows_of(table: pa.Table, begin: int, count: int) -> Rows:
    """Rows of a table, in order.

    Raises:
        ValidationError: a column has a value that no Python object is for, or JSON cannot hold.
    """
    part = table.slice(begin, count)
    columns: dict[str, list[Any]] = {}
    for name in part.column_names:
        if not _is_finite(part.column(name)):
            raise ValidationError(
                f"column {name!r} has NaN or an infinite number, which JSON cannot hold; write null"
                " in its place, or cast the column to string",
                kind="columns",
            )
        try:
            columns[name] = _values(part.column(name))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValidationError(
                f"a value of column {name!r}, of type {part.column(name).type}, cannot be written:"
                f" {error}; cast the column to string, or leave these rows out",
                kind="columns",
            ) from error
    made = _row_class(tuple(columns))
    rows = Rows(map(made, *columns.values())) if columns else Rows(made() for _ in range(count))
    rows.columns = columns
    return rows


def known_keys(messages: Sequence[Any], key: Callable[[Any], Any]) -> list[Any] | None:
    """The key of each message, if they are rows, and the key is a column; else None."""
    if not isinstance(messages, Rows) or not isinstance(key, itemgetter | attrgetter):
        return None
    names = key.__reduce__()[1]
    return messages.columns.get(names[0]) if len(names) == 1 else None


@functools.lru_cache(maxsize=_CLASSES_KNOWN_MAX)
def _row_class(columns: tuple[str, ...]) -> type[Row]:
    fields: list[Any] = []
    by_column = {}
    taken = _MEANT.union(dir(Row))
    for index, column in enumerate(columns):
        usable = column.isidentifier() and not keyword.iskeyword(column)
        name = column if usable and column not in taken else f"column_{index}_"
        by_column[column] = name
        fields.append((name, Any, msgspec.field(name=column)))
    made: type[Any] = msgspec.defstruct(
        "Row", fields, bases=(Row,), namespace={"fields_by_column": by_column}, gc=False
    )
    return made


def _values(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column as Python objects which JSON can hold."""
    import pyarrow as pa  # noqa: PLC0415 - only where columns are given

    kind = column.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return _nanosecond_texts(column)
    values: list[Any] = column.to_pylist()
    if "map<" in str(kind):
        return [_with_objects(value, kind) for value in values]
    return values


def _is_finite(column: pa.ChunkedArray) -> bool:
    """Return True if a column holds no NaN and no infinite number, at any depth."""
    return not _holds_floats(column.type) or all(map(_is_finite_array, column.chunks))


def _holds_floats(kind: pa.DataType) -> bool:
    import pyarrow as pa  # noqa: PLC0415 - only where columns are given

    if pa.types.is_dictionary(kind):
        return _holds_floats(kind.value_type)
    parts = (kind.field(at).type for at in range(kind.num_fields))
    return bool(pa.types.is_floating(kind)) or any(map(_holds_floats, parts))


def _is_finite_array(array: pa.Array) -> bool:
    import pyarrow as pa  # noqa: PLC0415 - only where columns are given

    kind = array.type
    if not _holds_floats(kind):
        return True
    if pa.types.is_floating(kind):
        return bool(np.isfinite(array.drop_null().to_numpy()).all())
    if pa.types.is_dictionary(kind):
        return _is_finite_array(array.dictionary_decode())
    if pa.types.is_struct(kind):
        return all(map(_is_finite_array, array.flatten()))
    if pa.types.is_map(kind):
        begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return all(_is_finite_array(each[begin:end]) for each in (array.keys, array.items))
    return _is_finite_array(array.flatten())


def _with_objects(value: Any, kind: pa.DataType) -> Any:
    """Return a value whose maps, which are lists of pairs, are dictionaries at any depth."""
    import pyarrow as pa  # noqa: PLC0415 - only where columns are given

    if value is None:
        return None
    if pa.types.is_map(kind):
        return {key: _with_objects(item, kind.item_type) for key, item in value}
    if isinstance(value, list):
        return [_with_objects(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: _with_objects(value[field.name], field.type) for field in kind}
    return value


def _nanosecond_texts(column: pa.ChunkedArray) -> list[str | None]:
    """RFC 3339 texts: datetimes would lose the last three digits."""
    suffix = "Z" if column.type.tz is not None else ""
    times = column.cast("int64").fill_null(0).to_numpy()
    missing = column.is_null().to_numpy()
    texts = np.datetime_as_string(times.astype("datetime64[ns]"), unit="ns")
    return [
        None if absent else f"{text}{suffix}"
        for text, absent in zip(texts.tolist(), missing.tolist(), strict=True)
    ]
