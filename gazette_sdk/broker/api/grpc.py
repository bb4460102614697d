"""The journal service on gRPC (protocol section 3).

Most messages carry content, in one length-delimited field, which an offset precedes in reads.
These messages are encoded and decoded here by hand; all others by protobuf.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.broker.api.fronts import Chunk, Journals, chunks
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import decode_varint, encode_varint
from gazette_sdk.protocol.rules import RPCS, complete
from gazette_sdk.server.call import Call
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.transport.wire import AppendItem

__all__ = ["decode_append_item", "encode_read_item", "journal_methods"]

_APPEND_CONTENT_TAG = 0x22  # AppendRequest.content: field 4, length-delimited
_READ_OFFSET_TAG = b"\x18"  # ReadResponse.offset: field 3, varint
_READ_CONTENT_TAG = b"\x3a"  # ReadResponse.content: field 7, length-delimited


def journal_methods(service: Journals) -> Iterator[Method]:
    """Return the methods to register with a :class:`~gazette_sdk.server.grpc_server.GrpcServer`."""

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
    """Decode an item of an append.

    Content becomes bytes. The opening request, the empty request that commits, and any other
    message stay requests, which the service judges.

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
    """Return the position of the content, if it is the only field of the message; else 0."""
    if not wire or wire[0] != _APPEND_CONTENT_TAG:
        return 0
    length, begin = decode_varint(wire, 1)
    return begin if length >= 0 and begin + length == len(wire) else 0


def encode_read_item(item: pb.ReadResponse | Chunk) -> bytes:
    """Encode metadata of a read, or a chunk of its content."""
    if isinstance(item, Chunk):
        offset, content = item
        head = _READ_OFFSET_TAG + encode_varint(offset) if offset else b""
        return b"".join((head, _READ_CONTENT_TAG, encode_varint(len(content)), content))
    return _encode(item)


def _encode(message: Message) -> bytes:
    return complete(message).SerializeToString()
