"""Content of journals to and from protobuf, without protobuf's work.

Content messages are by far the most bytes and the plainest messages: one length-delimited
field, with an offset before it where they are read. Building and cutting them by hand spares
two copies and the message object. Whatever is not exactly of that shape takes the general path.
"""

from __future__ import annotations

from typing import TypeAlias

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import decode_varint, encode_varint
from gazette_sdk.transport.target import AppendItem

__all__ = ["Chunk", "content_request", "decode_read_response", "encode_append_item"]

Chunk: TypeAlias = tuple[int, bytes]
"""Offset and content of a read message which has nothing else."""

_APPEND_CONTENT_TAG = b"\x22"  # AppendRequest.content: field 4, length-delimited
_READ_OFFSET_TAG = 0x18  # ReadResponse.offset: field 3, varint
_READ_CONTENT_TAG = 0x3A  # ReadResponse.content: field 7, length-delimited


def content_request(content: bytes) -> bytes:
    """Encode ``AppendRequest(content=content)``."""
    return b"".join((_APPEND_CONTENT_TAG, encode_varint(len(content)), content))


def encode_append_item(item: AppendItem) -> bytes:
    """Encode one item of an append.

    An empty chunk of content would mean commit: callers never send one.
    """
    if isinstance(item, pb.AppendRequest):
        return item.SerializeToString()
    assert len(item) > 0
    return content_request(item)


def decode_read_response(data: bytes) -> pb.ReadResponse | Chunk:
    """Decode a message of a read: its offset and content if it has nothing else."""
    offset, at = 0, 0
    if data and data[0] == _READ_OFFSET_TAG:
        offset, at = decode_varint(data, 1)
    if offset >= 0 and at < len(data) and data[at] == _READ_CONTENT_TAG:
        length, at = decode_varint(data, at + 1)
        if length > 0 and at + length == len(data):
            return offset, data[at:]
    return pb.ReadResponse.FromString(data)
