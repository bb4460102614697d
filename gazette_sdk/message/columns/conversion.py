"""Conversion of parsed columns to the types of a schema, where a parser's types are others.

A parser takes all columns as nullable, at any depth: acknowledgements are empty, and lack every
column. What other messages lack is checked on its results. And it takes timestamps as texts, of
which pyarrow's parsers read some forms, and take their zones as they like.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["converted", "first_lacking", "holds_required", "parsed_field", "timestamps"]

Mask = npt.NDArray[np.bool_]
Seconds = npt.NDArray[np.int64]


def parsed_field(field: pa.Field) -> pa.Field:
    """Return a column as a parser takes it: nullable, with timestamps as texts."""
    return pa.field(field.name, _parsed_type(field.type))


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_map(kind):
        return pa.map_(_parsed_type(kind.key_type), parsed_field(kind.item_field))
    if pa.types.is_struct(kind):
        return pa.struct([parsed_field(field) for field in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(parsed_field(kind.value_field))
    if _is_list(kind):
        return pa.list_(parsed_field(kind.value_field), getattr(kind, "list_size", -1))
    return kind


def converted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a parsed column with the type of the schema.

    Args:
        array: the column, which begins at the first row of its buffers.
        kind: the type, of which the array has the parser's.

    Raises:
        ArrowInvalid: a text is no timestamp of the type.
    """
    if array.type == kind:
        return array
    if pa.types.is_timestamp(kind):
        return timestamps(array, kind)
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(kind):
        types = [field.type for field in kind]
        # Parts of what is null are null here; in the array itself they may have any value.
        parts = [converted(*each) for each in zip(array.flatten(), types, strict=True)]
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


# ----------------------------------------------------------------- timestamps

_TIMESTAMP = (
    r"^(?P<day>\d{4}-\d{2}-\d{2})"
    r"(?:[Tt ](?P<minute>\d{2}:\d{2})(?::(?P<second>\d{2})(?:\.(?P<fraction>\d+))?)?"
    r"(?P<zone>[Zz]|[+-]\d{2}(?::?\d{2})?)?)?$"
)
_SCALES = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_NANOS = 10**9
_UTC = frozenset({"UTC", "Etc/UTC", "Z", "+00:00"})
_YEAR_1 = int(dt.datetime(1, 1, 1, tzinfo=dt.UTC).timestamp())


def timestamps(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return texts as timestamps, truncated to the unit of their type.

    Texts are of RFC 3339, of any number of digits, in any case, with or without the time, its
    seconds and its zone. One without a zone is a time of the column's zone. A column without a
    zone has none with one.

    Args:
        texts: an array of strings.
        kind: a type of timestamps.

    Raises:
        ArrowInvalid: one is no such text, or out of the type's range.
    """
    valid = texts.drop_null()
    found = None
    for parse in (_cast, _cast_local, _cast_cut):
        try:
            # A cast that fails takes ten times as long as one of the first text.
            parse(valid[:1], kind)
            found = parse(texts, kind)
            break
        except pa.ArrowInvalid:
            continue
    if found is None:
        found = _parsed_timestamps(texts, kind)
    first = pc.min(found)
    if first.is_valid and first.value < _YEAR_1 * _SCALES[kind.unit]:
        raise pa.ArrowInvalid("a timestamp is before the year 1")
    return found


def _cast(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    return texts.cast(kind)


def _cast_local(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return texts without a zone as timestamps of the column's."""
    local = texts.cast(pa.timestamp(kind.unit))
    if kind.tz is None or kind.tz in _UTC:
        return local.cast(pa.int64()).cast(kind)
    return pc.assume_timezone(local, kind.tz, ambiguous="earliest").cast(kind)


_PLACES = {"ms": 23, "us": 26, "ns": 29}
"""Index after the last digit of a unit."""


def _cast_cut(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return texts of UTC as timestamps, as Go writes them: with digits that their unit lacks."""
    place = _PLACES.get(kind.unit)
    if place is None:
        raise pa.ArrowInvalid("a text has a fraction")
    cut = pc.utf8_slice_codeunits(texts, place, -1)
    if not pc.all(pc.or_(pc.ascii_is_decimal(cut), pc.equal(cut, ""))).as_py():
        raise pa.ArrowInvalid("a text ends otherwise")
    return pc.utf8_replace_slice(texts, place, -1, "").cast(kind)


def _parsed_timestamps(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    parts = pc.extract_regex(texts, _TIMESTAMP)
    nulls = np.asarray(texts.is_null())
    wrong = np.flatnonzero(np.asarray(parts.is_null()) & ~nulls)
    if len(wrong):
        raise pa.ArrowInvalid(f"{texts[int(wrong[0])].as_py()!r} is no timestamp of RFC 3339")
    day, minute, second, fraction, zone = (each.fill_null("") for each in parts.flatten())
    time = pc.binary_join_element_wise(_filled(minute, "00:00"), _filled(second, "00"), ":")
    local = pc.binary_join_element_wise(_filled(day, "1970-01-01"), time, "T")
    seconds = np.asarray(local.cast(pa.timestamp("s")).cast(pa.int64()))
    digits = pc.utf8_slice_codeunits(pc.utf8_rpad(fraction, 9, "0"), 0, 9)
    nanos = np.asarray(digits.cast(pa.int64()))
    seconds = _in_utc(seconds, zone, kind.tz, nulls)
    scale = _SCALES[kind.unit]
    if bool((np.abs(seconds) > (2**63 - 1) // scale - 1).any()):
        raise pa.ArrowInvalid(f"a timestamp is out of the range of {kind}")
    values = seconds * scale + nanos // (_NANOS // scale)
    return pa.array(values, mask=nulls).cast(kind)


def _filled(texts: pa.Array, default: str) -> pa.Array:
    return pc.if_else(pc.equal(texts, ""), default, texts)


def _in_utc(seconds: Seconds, zones: pa.Array, own: str | None, nulls: Mask) -> Seconds:
    """Return local times as seconds of UTC.

    Args:
        seconds: local times.
        zones: their zones as they are written; empty for the column's.
        own: zone of the column; None if it has none.
        nulls: mask of what is no time.
    """
    found = zones.dictionary_encode()
    names = found.dictionary.to_pylist()
    indices = np.asarray(found.indices)
    if own is None:
        named = next((name for name in names if name), None)
        if named is not None:
            raise pa.ArrowInvalid(f"a timestamp has the zone {named!r}, and its column has none")
        return seconds
    seconds = seconds - np.array([_offset_s(name) for name in names], np.int64)[indices]
    absent = np.array([not name for name in names], np.bool_)[indices] & ~nulls
    if absent.any() and own not in _UTC:
        seconds[absent] = _from_zone(seconds[absent], own)
    return seconds


def _offset_s(zone: str) -> int:
    """Return the seconds by which a zone is ahead of UTC."""
    if len(zone) < 2:
        return 0
    hours, minutes = int(zone[1:3]), int(zone[-2:]) if len(zone) > 3 else 0
    if hours > 23 or minutes > 59:
        raise pa.ArrowInvalid(f"{zone!r} is no zone")
    return (hours * 3600 + minutes * 60) * (-1 if zone[0] == "-" else 1)


def _from_zone(seconds: Seconds, zone: str) -> Seconds:
    """Return local times of a zone as seconds of UTC; of two such, the earlier."""
    local = pa.array(seconds).cast(pa.timestamp("s"))
    try:
        assumed = pc.assume_timezone(local, zone, ambiguous="earliest")
        return np.asarray(assumed.cast(pa.int64()))
    except (
        pa.ArrowInvalid
    ):  # one is skipped by the begin of summer time, as Python and Java read it
        info = pa.lib.string_to_tzinfo(zone)
        epoch = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - of local times
        times = (epoch + dt.timedelta(seconds=each) for each in seconds.tolist())
        return np.array([int(each.replace(tzinfo=info).timestamp()) for each in times], np.int64)


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
