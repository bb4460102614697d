from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.wire import content_request, decode_read_response, encode_append_item

OFFSETS = st.integers(min_value=0, max_value=2**63 - 1)


@given(st.binary(min_size=1, max_size=5000))
def test_content_is_encoded_as_protobuf_would(content):
    assert content_request(content) == pb.AppendRequest(content=content).SerializeToString()


def test_large_content_is_encoded_as_protobuf_would():
    content = b"x" * (3 << 20)
    assert encode_append_item(content) == pb.AppendRequest(content=content).SerializeToString()


def test_the_commit_is_an_empty_message():
    assert encode_append_item(pb.AppendRequest()) == b""


@given(OFFSETS, st.binary(min_size=1, max_size=5000))
def test_chunks_are_decoded_to_offset_and_content(offset, content):
    data = pb.ReadResponse(offset=offset, content=content).SerializeToString()
    assert decode_read_response(data) == (offset, content)


@given(OFFSETS, st.binary(max_size=50), st.integers(0, 15), st.text(max_size=9), st.booleans())
def test_every_other_message_is_decoded_by_protobuf(offset, content, status, url, has_header):
    message = pb.ReadResponse(
        status=status, offset=offset, write_head=5, fragment_url=url, content=content
    )
    if has_header:
        message.header.SetInParent()
    assert decode_read_response(message.SerializeToString()) == message


def test_negative_offsets_take_the_general_path():
    message = pb.ReadResponse(offset=-5, content=b"x")
    assert decode_read_response(message.SerializeToString()) == message


def test_an_empty_message_is_decoded_by_protobuf():
    assert decode_read_response(b"") == pb.ReadResponse()


def test_bytes_behind_the_content_take_the_general_path():
    data = pb.ReadResponse(offset=3, content=b"abc").SerializeToString()
    assert decode_read_response(data + data) == pb.ReadResponse(offset=3, content=b"abc")
