"""The journal service on gRPC (protocol section 3).

Content is by far the most of what travels, and its messages are the plainest: a length-delimited
field, behind an offset where it is read. Those are built and cut here by hand; every other
message takes the way of protobuf.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.broker.api.fronts import Chunk, Journals, chunks
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.non_null_fields import complete
from gazette_sdk.protocol.service import RPCS
from gazette_sdk.protocol.varint import decode_varint, encode_varint
from gazette_sdk.server.call import Call
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.transport.base import AppendItem

__all__ = ["decode_append_item", "encode_read_item", "journal_methods"]

_APPEND_CONTENT_TAG = 0x22  # AppendRequest.content: field 4, length-delimited
_READ_OFFSET_TAG = b"\x18"  # ReadResponse.offset: field 3, varint
_READ_CONTENT_TAG = b"\x3a"  # ReadResponse.content: field 7, length-delimited


def journal_methods(service: Journals) -> Iterator[Method]:
    """The methods to register with a :class:`~gazette_sdk.server.grpc_server.GrpcServer`."""

    async def read(request: pb.ReadRequest, call: Call) -> AsyncGenerator[pb.ReadResponse | Chunk]:
        async for item in chunks(service.read(request, call), call.chunk_bytes):
            yield item

    serves: dict[str, Callable[[Any, Call], Any]] = {
        "List": service.list,
        "Apply": service.apply,
        "Read": read,
        "Append": service.append,
        "Replicate": service.replicate,
        "ListFragments": service.list_fragments,
        "FragmentStoreHealth": service.fragment_store_health,
    }
    for rpc in RPCS:
        yield Method(
            rpc,
            serves[rpc.name],
            decode=decode_append_item if rpc.name == "Append" else None,
            encode=encode_read_item if rpc.name == "Read" else _encode,
        )


def decode_append_item(wire: bytes, first: bool) -> AppendItem:  # noqa: FBT001 - a Method's decode
    """An item of an append from its wire form.

    Content comes out as bytes; the opening request, the empty request that commits and whatever
    is neither come out as they are, for the service to judge.

    Raises:
        google.protobuf.message.DecodeError: the bytes are no message.
    """
    if not first:
        begin = _content_begin(wire)
        if begin:
            return wire[begin:] or pb.AppendRequest()
    request = pb.AppendRequest.FromString(wire)
    if not first and request.content and len(request.ListFields()) == 1:
        return request.content
    return request


def _content_begin(wire: bytes) -> int:
    """Where content begins that reaches to the end of the message, as its only field; or 0."""
    if not wire or wire[0] != _APPEND_CONTENT_TAG:
        return 0
    length, begin = decode_varint(wire, 1)
    return begin if length >= 0 and begin + length == len(wire) else 0


def encode_read_item(item: pb.ReadResponse | Chunk) -> bytes:
    """The wire form of a read's metadata or of a chunk of its content."""
    if isinstance(item, Chunk):
        offset, content = item
        head = _READ_OFFSET_TAG + encode_varint(offset) if offset else b""
        return b"".join((head, _READ_CONTENT_TAG, encode_varint(len(content)), content))
    return _encode(item)


def _encode(message: Message) -> bytes:
    return complete(message).SerializeToString()
