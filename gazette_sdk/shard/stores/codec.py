"""Codecs: keys and values of a store as bytes.

Keys are encoded so that their order is that of their bytes.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import google.protobuf.message
import msgspec

from gazette_sdk.errors import ConfigurationError, DecodeError
from gazette_sdk.protocol.varint import decode_varint, encode_varint

__all__ = [
    "Codec",
    "int64",
    "json",
    "key_codec",
    "protobuf",
    "raw",
    "tuple_of",
    "utf8",
    "uvarint",
    "value_codec",
]

T = TypeVar("T")

_SIGN = 1 << 63
_BYTES_TAG, _STR_TAG, _INT_TAG = b"\x01", b"\x02", b"\x03"
_END = b"\x00"
_ESCAPED_ZERO = b"\x00\xff"


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """Pair of functions between values and bytes.

    Attributes:
        encode: value to bytes; raises for a value of another type.
        decode: bytes to value; raises for malformed bytes.
        encode_prefix: of a key: bytes with which the keys of that prefix begin; None if the order
            of keys has no prefixes.
    """

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]
    encode_prefix: Callable[[Any], bytes] | None = None


def _encode_bytes(value: bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"bytes are needed, not {type(value).__name__}")
    return value


def _decode_utf8(encoded: bytes) -> str:
    return str(encoded, "utf-8")


def _encode_int64(value: int) -> bytes:
    return (value + _SIGN).to_bytes(8, "big")


def _decode_int64(encoded: bytes) -> int:
    if len(encoded) != 8:
        raise DecodeError(f"{len(encoded)} bytes are no int64 key; declare the type that wrote it")
    return int.from_bytes(encoded, "big") - _SIGN


def _encode_uvarint(value: int) -> bytes:
    if value < 0:
        raise ValueError(f"{value} is negative; declare int, or a codec for signed numbers")
    return encode_varint(value)


def _decode_uvarint(encoded: bytes) -> int:
    value, end = decode_varint(encoded, 0)
    if value < 0 or end != len(encoded):
        raise DecodeError(f"{len(encoded)} bytes are no uvarint; declare the type that wrote it")
    return value


utf8: Codec[str] = Codec(str.encode, _decode_utf8, str.encode)
"""Text as UTF-8."""
raw: Codec[bytes] = Codec(_encode_bytes, bytes, _encode_bytes)
"""Bytes as they are."""
int64: Codec[int] = Codec(_encode_int64, _decode_int64)
"""Integers of 64 bits: big-endian with the sign bit flipped, so that their order is kept."""
uvarint: Codec[int] = Codec(_encode_uvarint, _decode_uvarint)
"""Integers from 0 on in base 128, as Go's ``binary.PutUvarint``; for values."""


def json(of: type[T] | Any = object) -> Codec[T]:
    """Return the codec of values of a type as JSON.

    Args:
        of: any type of msgspec. Of ``int``, ``str`` and ``bool``, other values are refused.
    """
    encode = msgspec.json.Encoder().encode
    decode = msgspec.json.Decoder(Any if of is object else of).decode
    if of not in (int, str, bool):
        return Codec(encode, decode)

    def encode_scalar(value: T) -> bytes:
        if type(value) is not of:
            raise TypeError(f"a value of {of.__name__} is needed, not {value!r}")
        return encode(value)

    return Codec(encode_scalar, decode)


def protobuf(of: type[google.protobuf.message.Message]) -> Codec[Any]:
    """Return the codec of a protobuf class's messages."""

    def encode(message: google.protobuf.message.Message) -> bytes:
        if not isinstance(message, of):
            raise TypeError(f"a {of.__name__} is needed, not {type(message).__name__}")
        return message.SerializeToString(deterministic=True)

    return Codec(encode, of.FromString)


def tuple_of(*of: type) -> Codec[tuple[Any, ...]]:
    """Return the codec of tuples as keys, ordered as Python orders the tuples.

    Each element has a byte for its type; text and bytes end with 00, and have 00 FF for each 00 in
    them. A shorter tuple is a prefix of keys.

    Args:
        of: the elements' types, of str, bytes and int.

    Raises:
        ConfigurationError: an element's type is another one.
    """
    for element in of:
        if element not in (str, bytes, int):
            raise ConfigurationError(
                f"{element!r} cannot be part of a key; declare tuples of str, bytes and int"
            )

    def encode_prefix(key: tuple[Any, ...]) -> bytes:
        if len(key) > len(of) or any(map(_is_other, key, of)):
            raise TypeError(f"{key!r} is no key of {', '.join(part.__name__ for part in of)}")
        return b"".join(map(_encode_element, key))

    def encode(key: tuple[Any, ...]) -> bytes:
        if len(key) != len(of):
            raise TypeError(f"{key!r} has {len(key)} elements; {len(of)} are declared")
        return encode_prefix(key)

    return Codec(encode, _decode_tuple, encode_prefix)


def _is_other(value: object, of: type) -> bool:
    return type(value) is not of


def _encode_element(value: str | bytes | int) -> bytes:
    if isinstance(value, int):
        return _INT_TAG + _encode_int64(value)
    tag, content = (_STR_TAG, value.encode()) if isinstance(value, str) else (_BYTES_TAG, value)
    return tag + content.replace(_END, _ESCAPED_ZERO) + _END


def _decode_tuple(encoded: bytes) -> tuple[Any, ...]:
    elements: list[str | bytes | int] = []
    at = 0
    while at < len(encoded):
        tag = encoded[at : at + 1]
        at += 1
        if tag == _INT_TAG:
            elements.append(_decode_int64(encoded[at : at + 8]))
            at += 8
            continue
        end = encoded.find(_END, at)
        while end >= 0 and encoded[end : end + 2] == _ESCAPED_ZERO:
            end = encoded.find(_END, end + 2)
        if end < 0 or tag not in (_STR_TAG, _BYTES_TAG):
            raise DecodeError(f"{encoded!r} is no tuple; declare the type that wrote the key")
        content = encoded[at:end].replace(_ESCAPED_ZERO, _END)
        elements.append(content.decode() if tag == _STR_TAG else content)
        at = end + 1
    return tuple(elements)


def key_codec(of: Any) -> Codec[Any]:
    """Return the codec of keys of a type.

    Args:
        of: str, bytes, int, a tuple of them (``tuple[str, int]``), or a codec.

    Raises:
        ConfigurationError: it is another type.
    """
    if isinstance(of, Codec):
        return of
    if typing.get_origin(of) is tuple:
        return tuple_of(*typing.get_args(of))
    codecs: dict[Any, Codec[Any]] = {str: utf8, bytes: raw, int: int64}
    if of not in codecs:
        raise ConfigurationError(
            f"{of!r} cannot be a key; declare str, bytes, int, a tuple of them, or a codec"
        )
    return codecs[of]


def value_codec(of: Any) -> Codec[Any]:
    """Return the codec of values of a type.

    Args:
        of: bytes, a protobuf class, any type of msgspec (as JSON), or a codec.
    """
    if isinstance(of, Codec):
        return of
    if of is bytes:
        return raw
    # Of list[int] and the like, isinstance() says that they are types, and issubclass() raises.
    plain = isinstance(of, type) and typing.get_origin(of) is None
    if plain and issubclass(of, google.protobuf.message.Message):
        return protobuf(of)
    return json(of)
