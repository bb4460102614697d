"""JSON lines of one layout to columns, without parsing each line.

Most producers write all lines in one layout: the same keys in the same order, with texts and
numbers as their values. In such a block without escapes, the quotes determine all places. The
bytes between them are compared with the first line by a few operations on arrays, and values are
sliced out by their places. That takes half as long as parsing.

Each byte of each line is checked: it is part of a text, or of a number whose form is checked, or
equal to the first line's. Other blocks, and other types, are left to the parser.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gazette_sdk.message.columns.schema import timestamps

Block = bytes | bytearray | memoryview
Places = npt.NDArray[np.int64]

_QUOTE, _CLOSE, _BLANK = ord('"'), ord("}"), ord(" ")
_BARE_QUOTES = 4
"""Number of quotes of a line with nothing but a UUID."""

_VALUE = rb'("[^"]*"|[^",:{}\[\]\s]+)'
_is_flat = re.compile(rb'\{"[^"]*":%b(?:,"[^"]*":%b)+\}' % (_VALUE, _VALUE)).fullmatch
_fields = re.compile(rb'"([^"]*)":%b' % _VALUE).findall


class _Slot(NamedTuple):
    """Places of the values of a key: from each of ``begins`` to before each of ``ends``."""

    key: str
    is_text: bool
    begins: Places
    ends: Places


def sliced_columns(
    block: Block,
    begins: Places,
    ends: Places,
    bare: npt.NDArray[np.bool_],
    fields: list[pa.Field],
) -> dict[str, pa.Array] | None:
    """Return the columns of lines, each of which begins with a UUID in canonical text.

    Args:
        block: whole lines.
        begins: index of each line's first byte.
        ends: index after each line's newline.
        bare: mask of the lines with nothing but their UUID. Their columns are null.
        fields: columns wanted, with their types.

    Returns:
        The columns by name, without those that no line has; None if lines have several layouts,
        or values of other types.
    """
    full = np.flatnonzero(~bare) if bare.any() else None
    if full is None:
        return _columns(block, ends, None, _layout(block, begins, ends), fields)
    if not len(full):
        return {}
    begins, ends = begins[full], ends[full]
    columns = _columns(block, ends, bare, _layout(block, begins, ends), fields)
    if columns is None:
        return None
    rows = np.zeros(len(bare), np.int64)
    rows[full] = np.arange(len(full))
    indices = pa.array(rows, mask=bare)
    return {name: column.take(indices) for name, column in columns.items()}


class _Key(NamedTuple):
    """Key of the first line, as it is written, and True if its value is a text."""

    name: str
    written: bytes
    is_text: bool


def _layout(block: Block, begins: Places, ends: Places) -> list[_Key]:
    """Return the keys of the first line; none, if it has values other than texts and numbers."""
    first = bytes(block[int(begins[0]) : int(ends[0]) - 1])
    if not _is_flat(first):
        return []
    keys = [
        _Key(key.decode("utf-8", "replace"), key, value[:1] == b'"')
        for key, value in _fields(first)
    ]
    return keys if len({key.name for key in keys}) == len(keys) else []


def _columns(
    block: Block,
    ends: Places,
    bare: npt.NDArray[np.bool_] | None,
    layout: list[_Key],
    fields: list[pa.Field],
) -> dict[str, pa.Array] | None:
    """Return the columns of the lines that are not bare; None if lines have several layouts."""
    count = sum(4 if key.is_text else 2 for key in layout)
    lines = len(ends) if bare is None else len(bare)
    quotes = _quotes(block, lines, bare, count) if layout else None
    slots = None if quotes is None else _slots(block, quotes, ends, layout)
    if slots is None:
        return None
    types = {field.name: field.type for field in fields}
    columns = {}
    for slot in slots:
        kind = types.get(slot.key)
        if slot.is_text and kind is None:
            continue  # not wanted, and checked already
        column = _column(_values(block, slot), slot, kind)
        if column is None:
            return None
        if kind is not None:
            columns[slot.key] = column
    return columns


def _quotes(
    block: Block, lines: int, bare: npt.NDArray[np.bool_] | None, count: int
) -> Places | None:
    """Return the places of each line's quotes, shape [n, count]; None if there are others.

    ``bare`` are lines with another number of quotes, which are left out.
    """
    content = np.frombuffer(block, np.uint8)
    # No escapes, and no control characters but the newlines.
    if _holds_backslash(block) or int(np.count_nonzero(content < _BLANK)) != lines:
        return None
    quotes = np.flatnonzero(content == _QUOTE)
    if bare is None:
        return quotes.reshape(-1, count) if len(quotes) == lines * count else None
    counts = np.where(bare, _BARE_QUOTES, count)
    if len(quotes) != int(counts.sum()):
        return None
    heads = (np.cumsum(counts) - counts)[~bare]
    found: Places = quotes[heads[:, np.newaxis] + np.arange(count)]
    return found


def _slots(block: Block, quotes: Places, ends: Places, layout: list[_Key]) -> list[_Slot] | None:
    """Return the places of all values but the first; None if a line has another layout."""
    slots: list[_Slot] = []
    at = 4  # the UUID's own quotes, whose places are known
    before = _Slot("", True, quotes[:, 2], quotes[:, 3])
    for key, raw, is_text in layout[1:]:
        # All bytes up to the value are the same in all lines.
        start = before.ends + 1 if before.is_text else quotes[:, at] - 1
        literal = b',"%b":%b' % (raw, b'"' if is_text else b"")
        if not _all_are(block, start, literal):
            return None
        if not before.is_text:
            before = before._replace(ends=start)
        if slots:
            slots[-1] = before
        value = start + len(literal)
        at += 2
        before = _Slot(key, is_text, value, value)
        if is_text:
            before = before._replace(ends=quotes[:, at + 1])
            at += 2
        slots.append(before)
    last = ends - 2
    if not before.is_text:
        slots[-1] = before._replace(ends=last)
    elif not (before.ends + 1 == last).all():
        return None
    content = np.frombuffer(block, np.uint8)
    return slots if (content[last] == _CLOSE).all() else None


def _all_are(block: Block, begins: Places, literal: bytes) -> bool:
    """Return True if ``literal`` is at all places, which ascend."""
    last = int(begins[-1])
    if bytes(block[last : last + len(literal)]) != literal:
        return False
    # Words are compared faster than bytes; the last place may have none after it.
    begins = begins[:-1]
    if not len(begins):
        return True
    width = -(-len(literal) // 8) * 8
    if int(begins[-1]) + width > len(block):
        return False
    windows = np.ndarray((len(block) - width + 1,), f"V{width}", block, strides=(1,))
    words = windows[begins].view(np.uint64).reshape(-1, width // 8)
    wanted = np.frombuffer(literal.ljust(width, b"\0"), np.uint64)
    mask = np.frombuffer((b"\xff" * len(literal)).ljust(width, b"\0"), np.uint64)
    return not bool(((words ^ wanted) & mask).any())


def _values(block: Block, slot: _Slot) -> pa.Array:
    """Return the values of a slot, as texts."""
    count = len(slot.begins)
    # Values and the bytes between them, in turns: every other one is taken.
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0:-1:2] = slot.begins
    offsets[1::2] = slot.ends
    offsets[-1] = len(block)
    everything = pa.StringArray.from_buffers(2 * count, pa.py_buffer(offsets), pa.py_buffer(block))
    return everything.take(pa.array(np.arange(0, 2 * count, 2)))


def _column(values: pa.Array, slot: _Slot, kind: pa.DataType | None) -> pa.Array | None:
    """Return values as a column of a type, if there is one; None if they need a parser."""
    if slot.is_text:
        return _texts(values, kind)
    if (slot.ends <= slot.begins).any():
        return None
    if _are_numbers(values):
        return _numbers(values, pa.float64() if kind is None else kind)
    truths = pc.equal(values, "true")
    are_truths = pc.all(pc.or_(truths, pc.equal(values, "false"))).as_py()
    return truths if are_truths and (kind is None or pa.types.is_boolean(kind)) else None


def _texts(values: pa.Array, kind: pa.DataType | None) -> pa.Array | None:
    """Return texts as a column of a type; None if one of them does not fit."""
    if pa.types.is_timestamp(kind):
        try:
            return timestamps(values, kind)
        except pa.ArrowInvalid:
            return None
    return values if pa.types.is_string(kind) else None


def _numbers(values: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """Return numbers of a type; None if one of them does not fit."""
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    try:
        column = values.cast(kind)
    except pa.ArrowInvalid:
        return None
    # JSON has no infinite numbers: these are too great.
    are_finite = pa.types.is_integer(kind) or np.isfinite(column.to_numpy()).all()
    return column if are_finite else None


# Pairs of neighbouring characters that a number may have. Classes of characters are 0 for those
# that numbers do not have, then digits, minus, plus, point, and the exponent's letter.
_CLASSES = np.zeros(256, np.uint8)
_CLASSES[np.frombuffer(b"0123456789", np.uint8)] = 1
_CLASSES[ord("-")] = 2
_CLASSES[ord("+")] = 3
_CLASSES[ord(".")] = 4
_CLASSES[[ord("e"), ord("E")]] = 5
_FOLLOW = np.zeros(64, np.bool_)
for _pair in ((1, 1), (1, 4), (1, 5), (2, 1), (3, 1), (4, 1), (5, 1), (5, 2), (5, 3)):
    _FOLLOW[_pair[0] * 8 + _pair[1]] = True


def _are_numbers(values: pa.Array) -> bool:
    """Return True if texts, none of which is empty, are written as JSON numbers.

    Two points or exponents are not checked: the conversion to a number refuses them.
    """
    offsets = np.frombuffer(values.buffers()[1], np.int32)[: len(values) + 1]
    data = np.frombuffer(values.buffers()[2], np.uint8)[: offsets[-1]]
    digits, tails = offsets[:-1], offsets[1:] - 1
    if not ((data - np.uint8(ord("0"))) < 10).all():
        classes = _CLASSES[data]
        first = classes[digits]
        if not (((first == 1) | (first == 2)) & (classes[tails] == 1)).all():
            return False
        follows = _FOLLOW[(classes[:-1] << 3) | classes[1:]]
        follows[tails[:-1]] = True
        if not follows.all():
            return False
        digits = digits + (first == 2)
    # A zero stands alone before the point.
    are_zeros = (data[digits] == ord("0")) & (digits < tails)
    return not bool((_CLASSES[data[digits[are_zeros] + 1]] == 1).any())


def _holds_backslash(block: Block) -> bool:
    if isinstance(block, memoryview):
        return bool((np.frombuffer(block, np.uint8) == ord("\\")).any())
    return b"\\" in block
