"""Content of journals to and from protobuf, without protobuf's work.

Content messages are by far the most bytes and the plainest messages: one length-delimited
field, with an offset before it where they are read. Building and cutting them by hand spares
two copies and the message object. Whatever is not exactly of that shape takes the general path.
"""

from __future__ import annotations

from typing import TypeAlias

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.target import AppendItem

__all__ = ["Chunk", "content_request", "decode_read_response", "encode_append_item"]

Chunk: TypeAlias = tuple[int, bytes]
"""Offset and content of a read message which has nothing else."""

_APPEND_CONTENT_TAG = b"\x22"  # AppendRequest.content: field 4, length-delimited
_READ_OFFSET_TAG = 0x18  # ReadResponse.offset: field 3, varint
_READ_CONTENT_TAG = 0x3A  # ReadResponse.content: field 7, length-delimited

_INT64_VARINT_BYTES_MAX = 9  # a tenth byte is a negative number


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def content_request(content: bytes) -> bytes:
    """Encode ``AppendRequest(content=content)``."""
    return b"".join((_APPEND_CONTENT_TAG, _varint(len(content)), content))


def encode_append_item(item: AppendItem) -> bytes:
    """Encode one item of an append.

    An empty chunk of content would mean commit: callers never send one.
    """
    if isinstance(item, pb.AppendRequest):
        return item.SerializeToString()
    assert len(item) > 0
    return content_request(item)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the non-negative number at ``at`` and the position behind it; -1 if it is none."""
    value = shift = 0
    for position in range(at, min(at + _INT64_VARINT_BYTES_MAX, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    return -1, at


def decode_read_response(data: bytes) -> pb.ReadResponse | Chunk:
    """Decode a message of a read: its offset and content if it has nothing else."""
    offset, at = 0, 0
    if data and data[0] == _READ_OFFSET_TAG:
        offset, at = _read_varint(data, 1)
    if offset >= 0 and at < len(data) and data[at] == _READ_CONTENT_TAG:
        length, at = _read_varint(data, at + 1)
        if length > 0 and at + length == len(data):
            return offset, data[at:]
    return pb.ReadResponse.FromString(data)
