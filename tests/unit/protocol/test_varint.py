from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import decode_varint, encode_varint


@given(st.integers(1, 2**63 - 1), st.binary(max_size=3), st.binary(max_size=3))
def test_encoded_numbers_are_those_of_protobuf_and_are_read_back(value, before, after):
    encoded = encode_varint(value)
    assert b"\x18" + encoded == pb.ReadResponse(offset=value).SerializeToString()
    at = len(before)
    assert decode_varint(before + encoded + after, at) == (value, at + len(encoded))


@pytest.mark.parametrize("value", [0, 1, 0x7F, 0x80, 0x3FFF, 0x4000])
def test_numbers_at_the_bounds_of_a_length_are_read_back(value):
    encoded = encode_varint(value)
    assert decode_varint(encoded, 0) == (value, len(encoded))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9, b"\xff" * 9 + b"\x01"])
def test_numbers_that_end_early_or_are_negative_are_not_decoded(data):
    assert decode_varint(data, 0) == (-1, 0)
