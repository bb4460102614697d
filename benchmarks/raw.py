"""Client of the stream wire with a blocking socket and the frame codec.

It has no event loop, no pool, no routes and no retries, so it measures the broker alone.
"""

from __future__ import annotations

import socket
from typing import Self
from urllib.parse import urlsplit

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import (
    PREFACE,
    Frame,
    FrameBuffer,
    Kind,
    Method,
    decode_status,
    encode,
    encode_append,
    encode_call,
)

__all__ = ["RawStream", "append_frames", "read_frame"]

TIMEOUT_S = 30.0


def append_frames(journal: str, content: bytes) -> bytes:
    """Encode a whole append of up to 1 MiB."""
    return encode_append(pb.AppendRequest(journal=journal).SerializeToString(), content)


def read_frame(request: pb.ReadRequest) -> bytes:
    """Encode the call of a read."""
    return encode_call(Method.READ, request.SerializeToString())


class RawStream:
    """Connection, after preface and HELLO.

    Args:
        address: URL of the broker.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.socket = socket.create_connection((parts.hostname or "", parts.port or 0), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = FrameBuffer()
        self.socket.sendall(PREFACE)
        if [frame.kind for frame in self.receive()] != [Kind.HELLO]:
            raise RuntimeError(f"{address} does not speak the stream wire")

    def receive(self) -> list[Frame]:
        """Receive once, and return the complete frames.

        Raises:
            EOFError: the broker has closed the connection.
        """
        length = self.socket.recv_into(self._buffer.get_buffer())
        if not length:
            raise EOFError("the broker closed the connection")
        return self._buffer.updated(length)

    def call(self, frames: bytes) -> list[Frame]:
        """Send a whole call, and return its answer.

        Raises:
            RuntimeError: the call failed.
        """
        self.socket.sendall(frames)
        return self.answer()

    def answer(self) -> list[Frame]:
        """Return the answer of the only open call, without its status.

        Raises:
            RuntimeError: the call failed.
        """
        found: list[Frame] = []
        while True:
            for frame in self.receive():
                if frame.kind == Kind.STATUS:
                    status = decode_status(frame.payload)
                    if status.code:
                        raise RuntimeError(f"a call failed: {status}")
                    return found
                if frame.kind == Kind.PING:
                    self.socket.sendall(encode(Kind.PONG, frame.payload))
                else:
                    found.append(frame)

    def close(self) -> None:
        """Disconnect."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
