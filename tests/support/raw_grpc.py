"""Bytes of gRPC clients that do not follow the rules: requests that are never completed."""

from __future__ import annotations

import asyncio

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
"""HTTP/2's preface, with SETTINGS."""

_RST_STREAM, _HEADERS = 3, 1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A field of HPACK, which is not kept in its table."""
    return b"\0" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    more = len(text) - 127
    return bytes([len(text)]) if more < 0 else bytes([127, more & 127 | 128, more >> 7])


def call(stream: int, path: str) -> bytes:
    """The frame with which a call begins."""
    return frame(_HEADERS, 4, stream, fields(literal(b":path", path.encode())))


def fields(path: bytes) -> bytes:
    """The headers of a call.

    Args:
        path: the encoded field of its path.
    """
    return b"".join(
        (
            literal(b":method", b"POST"),
            literal(b":scheme", b"http"),
            path,
            literal(b":authority", b"localhost"),
            literal(b"content-type", b"application/grpc"),
            literal(b"te", b"trailers"),
        )
    )


def half_message(stream: int, length: int, content: bytes) -> bytes:
    """A frame with the begin of a message, whose length is more than its content."""
    return frame(0, 0, stream, b"\0" + length.to_bytes(4, "big") + content)


async def ended_stream(reader: asyncio.StreamReader) -> int:
    """The stream of the first call that the server ends, by trailers or a reset."""
    while True:
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == _RST_STREAM or (head[3] == _HEADERS and head[4] & 1):
            return int.from_bytes(head[5:9], "big")
