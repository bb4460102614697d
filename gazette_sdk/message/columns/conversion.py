"""Conversion of parsed columns to the types of a schema, where a parser's types are others.

A parser takes all columns as nullable, at any depth: acknowledgements are empty, and lack every
column. What other messages lack is checked on its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["converted", "first_lacking", "holds_required", "parsed_field"]

Mask = npt.NDArray[np.bool_]


def parsed_field(field: pa.Field) -> pa.Field:
    """Return a column as a parser takes it: nullable."""
    return pa.field(field.name, _parsed_type(field.type))


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_map(kind):
        return pa.map_(_parsed_type(kind.key_type), parsed_field(kind.item_field))
    if pa.types.is_struct(kind):
        return pa.struct([parsed_field(field) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(parsed_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(parsed_field(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(parsed_field(kind.value_field), kind.list_size)
    return kind


def converted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a parsed column with the type of the schema.

    Args:
        array: the column, which begins at the first row of its buffers.
        kind: the type, of which the array has the parser's.
    """
    if array.type == kind:
        return array
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(kind):
        parts = [converted(array.field(at), field.type) for at, field in enumerate(kind)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=mask)
    if pa.types.is_map(kind):
        keys, items = (
            converted(part, each)
            for part, each in ((array.keys, kind.key_type), (array.items, kind.item_type))
        )
        return pa.MapArray.from_arrays(array.offsets, keys, items, type=kind, mask=mask)
    values = converted(array.values, kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=mask)
    make = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    return make.from_arrays(array.offsets, values, type=kind, mask=mask)


# ------------------------------------------------------------------- NOT NULL


def holds_required(fields: Iterable[pa.Field]) -> bool:
    """Return True if a column, or a part of one, is not nullable."""
    return any(not field.nullable or holds_required(_parts(field.type)) for field in fields)


def _parts(kind: pa.DataType) -> list[pa.Field]:
    if pa.types.is_map(kind):
        return [kind.item_field]  # keys are never null
    if pa.types.is_struct(kind):
        return list(kind)
    return [kind.value_field] if _is_list(kind) else []


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def first_lacking(
    fields: Iterable[pa.Field], columns: Mapping[str, pa.Array | None], needed: Mask
) -> tuple[int, str] | None:
    """Return the first row that lacks a value that is not nullable, and its column.

    Args:
        fields: the columns of the schema.
        columns: their arrays by name; a column without one is null in all rows.
        needed: mask of the rows that must have all values: those of no acknowledgement.
    """
    found: tuple[int, str] | None = None
    for field in fields:
        rows = np.flatnonzero(_lacks(columns.get(field.name), field, len(needed)) & needed)
        if len(rows) and (found is None or rows[0] < found[0]):
            found = int(rows[0]), field.name
    return found


def _lacks(array: pa.Array | None, field: pa.Field, count: int) -> Mask:
    """Return the mask of the rows that have a null where the field has none."""
    if array is None:
        return np.full(count, not field.nullable)
    nulls: Mask = np.asarray(array.is_null())
    kind = field.type
    found = np.zeros(count, np.bool_)
    if pa.types.is_struct(kind):
        for at, part in enumerate(kind):
            found |= _lacks(array.field(at), part, count)
    elif pa.types.is_map(kind) or _is_list(kind):
        [part] = _parts(kind)
        if pa.types.is_fixed_size_list(kind):
            parents = np.repeat(np.arange(count), kind.list_size)
            values = array.values[array.offset * kind.list_size :][: len(parents)]
        else:
            offsets = np.asarray(array.offsets)
            parents = np.repeat(np.arange(count), np.diff(offsets))
            values = array.items if pa.types.is_map(kind) else array.values
            values = values[int(offsets[0]) : int(offsets[-1])]
        found[parents[_lacks(values, part, len(parents))]] = True
    return found & ~nulls if field.nullable else found & ~nulls | nulls
