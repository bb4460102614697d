from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gazette_sdk.errors import ConfigurationError, DecodeError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.shard.stores import codec

INT64 = st.integers(-(2**63), 2**63 - 1)
TUPLES = st.tuples(st.text(), INT64, st.binary())
KEYS = codec.key_codec(tuple[str, int, bytes])


@given(INT64, INT64)
def test_integers_keep_their_order_and_come_back(one, other) -> None:
    encode = codec.int64.encode
    assert (encode(one) < encode(other)) == (one < other)
    assert codec.int64.decode(encode(one)) == one


@given(TUPLES, TUPLES)
def test_tuples_keep_their_order_and_come_back(one, other) -> None:
    # Python orders text by code points, as UTF-8 does.
    assert (KEYS.encode(one) < KEYS.encode(other)) == (one < other)
    assert KEYS.decode(KEYS.encode(one)) == one
    for length in range(4):
        assert KEYS.encode(one).startswith(KEYS.encode_prefix(one[:length]))


@given(TUPLES, TUPLES)
@example(("\0", 0, b""), ("", 0, b""))
@example(("", 0, b"\0"), ("", 0, b""))
def test_a_shorter_tuple_is_a_prefix_of_its_own_keys_only(one, other) -> None:
    for length in range(1, 4):
        prefix = KEYS.encode_prefix(other[:length])
        is_within = prefix <= KEYS.encode(one) < prefix + KEYS.prefix_stop
        assert is_within == (one[:length] == other[:length])


@given(st.integers(0, 2**63 - 1))
def test_uvarints_come_back(value) -> None:
    assert codec.uvarint.decode(codec.uvarint.encode(value)) == value


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("of", "value", "encoded"),
    [
        (bytes, b"\0a", b"\0a"),
        (int, 7, b"7"),
        (str, "ü", '"ü"'.encode()),
        (bool, True, b"true"),
        (object, {"a": [1]}, b'{"a":[1]}'),
        (list[int], [1, 2], b"[1,2]"),
        (Point, Point(3), b'{"x":3}'),
        (Point | None, None, b"null"),
        (pb.Label, pb.Label(name="n"), b"\n\x01n"),
        (codec.uvarint, 300, b"\xac\x02"),
    ],
)
def test_values_of_many_types_come_back(of, value, encoded) -> None:
    found = codec.value_codec(of)
    assert found.encode(value) == encoded
    assert found.decode(encoded) == value


@pytest.mark.parametrize(
    ("of", "value"),
    [(int, "1"), (int, True), (str, 1), (bytes, "a"), (pb.Label, pb.LabelSet()), (bool, 1)],
)
def test_a_value_of_another_type_is_refused(of, value) -> None:
    with pytest.raises(TypeError):
        codec.value_codec(of).encode(value)


@pytest.mark.parametrize("key", [(1, 1, b""), ("a",), ("a", True, b""), ("a", 1, b"", 2)])
def test_a_tuple_of_other_types_is_refused(key) -> None:
    with pytest.raises(TypeError):
        KEYS.encode(key)


@pytest.mark.parametrize("encoded", [b"\x02a", b"\x09a\0", b"\x03abc", b"\x02a\0\xff"])
def test_bytes_that_are_no_tuple_are_refused(encoded) -> None:
    with pytest.raises(DecodeError):
        KEYS.decode(encoded)


@pytest.mark.parametrize("encoded", [b"", b"\x80", b"\x01\x01"])
def test_bytes_that_are_no_uvarint_are_refused(encoded) -> None:
    with pytest.raises(DecodeError):
        codec.uvarint.decode(encoded)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        codec.uvarint.encode(-1)
    with pytest.raises(OverflowError):
        codec.int64.encode(2**63)


@pytest.mark.parametrize("of", [float, dict, tuple[str, float]])
def test_other_types_are_no_keys(of) -> None:
    with pytest.raises(ConfigurationError):
        codec.key_codec(of)
