"""Codecs: keys and values of a store as bytes.

Keys are encoded so that their order is that of their bytes. What would not be read again as it is
put, is refused when it is put: :class:`~gazette_sdk.errors.UnreadableStateError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Generic, TypeVar

import google.protobuf.message
import msgspec
import msgspec.inspect as mi

from gazette_sdk.errors import ConfigurationError, DecodeError, UnreadableStateError
from gazette_sdk.protocol.durations import decode_varint, encode_varint

T = TypeVar("T")

_SIGN = 1 << 63
_BYTES_TAG, _STR_TAG, _INT_TAG, _TUPLE_TAG = b"\x01", b"\x02", b"\x03", b"\x04"
_END = b"\x00"
_ESCAPED_ZERO = b"\x00\xff"
_UVARINT_MAX = (1 << 63) - 1
_INT64_BYTES = 8

_JSON_CLASSES = dict, list, str, int, float, bool, type(None)
"""Classes of what JSON holds."""

_NO_JSON_KEYS = (
    mi.CollectionType
    | mi.TupleType
    | mi.DictType
    | mi.StructType
    | mi.DataclassType
    | mi.TypedDictType
    | mi.NamedTupleType
)
"""Types that cannot be the key of an object in JSON."""


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """Pair of functions between values and bytes.

    Attributes:
        encode: value to bytes; raises for a value of another type.
        decode: bytes to value; raises for malformed bytes.
        encode_prefix: of a key: bytes with which the keys of that prefix begin; None if the order
            of keys has no prefixes.
        prefix_stop: keys of a prefix are below its bytes with these after them, and other keys are
            not; empty if all keys that begin with its bytes are of the prefix.
        is_checked: `encode` refuses each value that `decode` would refuse. A store decodes each
            put of other codecs.
    """

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]
    encode_prefix: Callable[[Any], bytes] | None = None
    is_checked: bool = False
    prefix_stop: bytes = b""


def _encode_bytes(value: bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"bytes are needed, not {type(value).__name__}")
    return value


def _decode_utf8(encoded: bytes) -> str:
    return str(encoded, "utf-8")


def _encode_int64(value: int) -> bytes:
    try:
        return (value + _SIGN).to_bytes(8, "big")
    except AttributeError:
        raise TypeError(f"an int is needed, not {type(value).__name__}") from None


def _decode_int64(encoded: bytes) -> int:
    if len(encoded) != _INT64_BYTES:
        raise DecodeError(f"{len(encoded)} bytes are no int64 key; declare the type that wrote it")
    return int.from_bytes(encoded, "big") - _SIGN


def _encode_uvarint(value: int) -> bytes:
    if value < 0:
        raise ValueError(f"{value} is negative; declare int, or a codec for signed numbers")
    if value > _UVARINT_MAX:
        raise OverflowError(f"{value} is above {_UVARINT_MAX}; declare int")
    return encode_varint(value)


def _decode_uvarint(encoded: bytes) -> int:
    value, end = decode_varint(encoded, 0)
    if value < 0 or end != len(encoded):
        raise DecodeError(f"{len(encoded)} bytes are no uvarint; declare the type that wrote it")
    return value


utf8: Codec[str] = Codec(str.encode, _decode_utf8, str.encode, is_checked=True)
"""Text as UTF-8."""
raw: Codec[bytes] = Codec(_encode_bytes, bytes, _encode_bytes, is_checked=True)
"""Bytes as they are."""
int64: Codec[int] = Codec(_encode_int64, _decode_int64, is_checked=True)
"""Integers of 64 bits: big-endian with the sign bit flipped, so that their order is kept."""
uvarint: Codec[int] = Codec(_encode_uvarint, _decode_uvarint, is_checked=True)
"""Integers from 0 to 2**63 - 1 in base 128, as Go's ``binary.PutUvarint``; for values."""


def json(of: type[T] | Any = object) -> Codec[T]:
    """Return the codec of values of a type as JSON.

    A value is refused when it is put, if JSON loses part of it, or it would not be decoded as the
    declared type: NaN and infinity, a value of another type, or one that breaks a constraint.

    Args:
        of: any type of msgspec. Of ``int``, ``str`` and ``bool``, all other types are refused.

    Raises:
        ConfigurationError: JSON cannot hold values of the type.
    """
    encode = msgspec.json.Encoder().encode
    decode = _json_decoder(Any if of is object else of).decode

    def encode_scalar(value: T) -> bytes:
        if type(value) is not of:
            raise UnreadableStateError(
                f"a value of {of.__name__} is needed, not {value!r}; put one, or declare its type"
            )
        return encode(value)

    def encode_checked(value: T) -> bytes:
        encoded = encode(value)
        _check_json(value, encoded, decode)
        return encoded

    def encode_float(value: Any) -> bytes:
        # The difference of a finite number and itself is 0, that of NaN and infinity is NaN.
        if type(value) is float and value - value == 0.0:
            return encode(value)
        return encode_checked(value)

    encoders = {int: encode_scalar, str: encode_scalar, bool: encode_scalar, float: encode_float}
    return Codec(encoders.get(of, encode_checked), decode, is_checked=True)


def _json_decoder(of: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type.

    Raises:
        ConfigurationError: JSON cannot hold values of the type, or of a part of it.
    """
    try:
        decoder = msgspec.json.Decoder(of)
        refused = next(_refused_types(mi.type_info(of), set()), None)
    except (TypeError, NameError) as error:  # the latter: of a class that is not defined yet
        raise ConfigurationError(f"{of!r} cannot be the type of a value: {error}") from error
    if refused is not None:
        raise ConfigurationError(
            f"{of!r} cannot be the type of a value: {refused}; declare a dataclass, a msgspec"
            " Struct, a protobuf class, or a codec"
        )
    return decoder


def _refused_types(kind: mi.Type, seen: set[int]) -> Iterator[str]:
    """Yield why JSON cannot hold values of a type, for each part of it that it cannot hold."""
    if id(kind) in seen:
        return
    seen.add(id(kind))  # a class may have itself as a part, which is the same object
    if isinstance(kind, mi.CustomType) and not _is_decoded(kind.cls):
        yield f"JSON is not decoded as {kind.cls!r}"
    if isinstance(kind, mi.DictType) and isinstance(kind.key_type, _NO_JSON_KEYS):
        yield "JSON has no keys but text and numbers"
    for name in kind.__struct_fields__:
        part = getattr(kind, name)
        for each in part if isinstance(part, tuple) else (part,):
            if isinstance(each, mi.Type | mi.Field):
                yield from _refused_types(each.type if isinstance(each, mi.Field) else each, seen)


def _is_decoded(cls: Any) -> bool:
    """Return True if something that JSON holds is of a class that msgspec has no type for."""
    cls = typing.get_origin(cls) or cls
    try:
        return any(issubclass(each, cls) for each in _JSON_CLASSES)
    except TypeError:  # of a protocol that cannot be checked at run time
        return False


def _check_json(value: Any, encoded: bytes, decode: Callable[[bytes], Any]) -> None:
    """Raise UnreadableStateError if a value that was encoded as JSON would not be read again."""
    try:
        read = decode(encoded)
    except Exception as error:
        raise UnreadableStateError(
            f"a value of {type(value).__name__} would not be decoded as the declared type"
            f" ({error}); put one of that type, or declare its type (JSON has no NaN or infinity)"
        ) from error
    if read == value or is_same(value, read) or _is_lossless(value, read, encoded):
        return
    raise UnreadableStateError(
        f"a value of {type(value).__name__} would not be read as it is: JSON has no NaN, no"
        " infinity and no keys but text, and fields that are not declared are dropped; put a value"
        " of the declared type, or declare its type"
    )


def _is_lossless(value: Any, read: Any, encoded: bytes) -> bool:
    """Return True if the JSON forms of two values are the same, with NaN as a value of its own."""
    form = _json_form(value)
    if len(msgspec.json.encode(form)) != len(encoded):
        return False  # keys of several types have one form
    return is_same(form, _json_form(read))


def _json_form(value: Any) -> Any:
    try:
        return msgspec.to_builtins(value, str_keys=True, order="deterministic")
    except TypeError:  # elements of a set that have no order
        return msgspec.to_builtins(value, str_keys=True)


def is_same(value: Any, read: Any) -> bool:
    """Return True if a value that was decoded stands for the one that was encoded.

    It is equal, but for tuples that are read as lists, integers that are read as floats, and
    objects whose class does not compare fields.
    """
    if isinstance(value, list | tuple) and isinstance(read, list | tuple):
        return len(value) == len(read) and all(map(is_same, value, read))
    if isinstance(value, dict) and isinstance(read, dict):
        return all(key in read and is_same(held, read[key]) for key, held in value.items())
    if isinstance(value, int) and isinstance(read, float):
        return float(value) == read
    if isinstance(value, Decimal) and isinstance(read, Decimal) and value.is_nan():
        return read.is_nan()
    if type(value) is type(read) and (names := _field_names(value)):
        return all(is_same(getattr(value, name), getattr(read, name)) for name in names)
    return bool(value == read)


def _field_names(value: Any) -> tuple[str, ...]:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    return tuple(field.name for field in getattr(value, "__attrs_attrs__", ()))


def protobuf(of: type[google.protobuf.message.Message]) -> Codec[Any]:
    """Return the codec of a protobuf class's messages."""

    def encode(message: google.protobuf.message.Message) -> bytes:
        if not isinstance(message, of):
            raise TypeError(f"a {of.__name__} is needed, not {type(message).__name__}")
        return message.SerializeToString(deterministic=True)

    # Only messages inside of their own type can be deeper than a parser reads.
    return Codec(encode, of.FromString, is_checked=not _is_recursive(of.DESCRIPTOR))


def _is_recursive(descriptor: Any, inside: frozenset[str] = frozenset()) -> bool:
    """Return True if a message can contain another one of a type that contains it."""
    if descriptor.full_name in inside:
        return True
    inside |= {descriptor.full_name}
    types = (field.message_type for field in descriptor.fields)
    return any(of is not None and _is_recursive(of, inside) for of in types)


def checked(codec: Codec[T]) -> Codec[T]:
    """Return a codec that refuses what it would not decode."""
    if codec.is_checked:
        return codec

    def encode(value: T) -> bytes:
        encoded = codec.encode(value)
        if type(encoded) is not bytes:
            raise UnreadableStateError(
                f"the codec returned {type(encoded).__name__}; return bytes from its encode"
            )
        try:
            codec.decode(encoded)
        except Exception as error:
            raise UnreadableStateError(
                f"a value of {type(value).__name__} would not be decoded by its codec ({error});"
                " put another one, or mend the codec"
            ) from error
        return encoded

    return dataclasses.replace(codec, encode=encode, is_checked=True)


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

    # After a whole element is the type of the next one, or the rest of an escaped zero.
    return Codec(encode, _decode_tuple, encode_prefix, is_checked=True, prefix_stop=b"\xff")


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


def _encode_key_of_any_type(key: Any) -> bytes:
    if type(key) is str:  # most keys are
        return _encode_element(key)
    parts = key if type(key) is tuple else (key,)
    if any(type(part) not in (str, bytes, int) for part in parts):
        raise TypeError(f"a key of str, bytes, int or a tuple of them is needed, not {key!r}")
    encoded = b"".join(map(_encode_element, parts))
    return _TUPLE_TAG + encoded if type(key) is tuple else encoded


def _decode_key_of_any_type(encoded: bytes) -> Any:
    if encoded.startswith(_TUPLE_TAG):
        return _decode_tuple(encoded[1:])
    (key,) = _decode_tuple(encoded)
    return key


any_key: Codec[Any] = Codec(_encode_key_of_any_type, _decode_key_of_any_type, is_checked=True)
"""Keys of str, bytes, int or tuples of them, of any of these types beside each other."""


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
    if not isinstance(of, type) or of not in codecs:
        raise ConfigurationError(
            f"{of!r} cannot be a key; declare str, bytes, int, a tuple of them, or a codec"
        )
    return codecs[of]


def value_codec(of: Any) -> Codec[Any]:
    """Return the codec of values of a type.

    Args:
        of: bytes, a protobuf class, any type of msgspec (as JSON), or a codec.

    Raises:
        ConfigurationError: values of the type cannot be kept.
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


# ---------------------------------------------------------------- without declared types


def stored_key(key: str | bytes | int | tuple[str | bytes | int, ...]) -> bytes:
    """Return a key in the layout of its type, as :func:`key_codec` has it."""
    if isinstance(key, tuple):
        return b"".join(map(_encode_element, key))
    if isinstance(key, int):
        return int64.encode(key)
    return key.encode() if isinstance(key, str) else key


def shown_key(encoded: bytes) -> Any:
    """Return a stored key as the value that it most likely is: a tuple, text, an integer or bytes.

    A tuple has a byte for the type of each element, and integers begin with a byte that no text
    begins with, unless they are huge or far below zero.
    """
    if encoded[:1] in (_BYTES_TAG, _STR_TAG, _INT_TAG):
        with contextlib.suppress(DecodeError, ValueError):
            found = _decode_tuple(encoded)
            if b"".join(map(_encode_element, found)) == encoded:
                return found
    with contextlib.suppress(UnicodeDecodeError):
        return encoded.decode()
    return _decode_int64(encoded) if len(encoded) == _INT64_BYTES else encoded


def shown_value(encoded: bytes) -> Any:
    """Return a stored value as what it most likely is: JSON as it stands, text or bytes."""
    with contextlib.suppress(ValueError):
        msgspec.json.decode(encoded)
        return msgspec.Raw(msgspec.json.format(encoded, indent=-1))
    with contextlib.suppress(UnicodeDecodeError):
        return encoded.decode()
    return encoded
