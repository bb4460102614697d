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


def call(stream: int, path: str) -> bytes:
    """The frame with which a call begins."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    literals = (
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(1, 4, stream, b"".join(literals))


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
