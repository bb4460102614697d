"""JSON lines to columns, object by object, for types that ``pyarrow.json`` cannot parse."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import decimal
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypedDict

import msgspec
import pyarrow as pa

from gazette_sdk.message.kinds.json_lines import holds_long_times, time_cutter

__all__ = ["BytesForm", "JsonObjects", "is_parsed_by_arrow"]

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


class JsonObjects:
    """Decoder of JSON objects to a table.

    Args:
        schema: columns wanted, with their types. Keys without a column are ignored.
        bytes_form: form of bytes in JSON.
    """

    def __init__(self, schema: pa.Schema, bytes_form: BytesForm = "utf8") -> None:
        self._schema = schema
        row = _typed_dict([(field.name, field.type) for field in schema], bytes_form)
        self._decode = msgspec.json.Decoder(row, dec_hook=_decoded_bytes).decode_lines
        self._cut_times = time_cutter(row)

    def table(self, block: bytes | bytearray | memoryview) -> pa.Table:
        """Return the table of lines, without blank ones.

        Raises:
            ArrowInvalid: or another of pyarrow's errors: a value does not fit its column.
            ValueError: a line is no object, or a value does not fit its column.
        """
        try:
            if self._cut_times is not None and holds_long_times(block, 0, len(block)):
                block = b"\n".join(map(self._cut_times, bytes(block).split(b"\n")))
            objects = self._decode(block)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
        columns = [
            pa.array([each.get(field.name) for each in objects], type=field.type)
            for field in self._schema
        ]
        return pa.Table.from_arrays(columns, schema=self._schema)


def _typed_dict(fields: list[tuple[str, pa.DataType]], bytes_form: BytesForm) -> Any:
    types = {name: _python_type(kind, bytes_form) for name, kind in fields}
    return TypedDict("Object", types, total=False)  # type: ignore[operator]


def _python_type(kind: pa.DataType, bytes_form: BytesForm) -> Any:
    """Return the annotation of values that Arrow converts to a type, or null."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    found: Any = None
    if pa.types.is_struct(kind):
        fields = [(kind.field(at).name, kind.field(at).type) for at in range(kind.num_fields)]
        found = _typed_dict(fields, bytes_form)
    elif pa.types.is_map(kind):
        key, item = (_python_type(each, bytes_form) for each in (kind.key_type, kind.item_type))
        found = dict.__class_getitem__((_not_null(key), item))
    elif pa.types.is_nested(kind) and kind.num_fields == 1:
        found = list.__class_getitem__(_python_type(kind.field(0).type, bytes_form))
    elif _is_binary(kind):
        found = _BYTES[bytes_form]
    if found is not None:
        return found | None
    return next((annotation for holds, annotation in _ANNOTATIONS if holds(kind)), Any)


def _not_null(annotation: Any) -> Any:
    """Return the annotation of keys of an object, which are never null, nor numbers of times."""
    return annotation.__args__[0] if hasattr(annotation, "__args__") else annotation


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
