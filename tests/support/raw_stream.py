"""A client of the stream transport that is nothing but a socket and the frame codec.

It keeps no state of calls: tests send whatever frames they like, also wrong ones.
"""

from __future__ import annotations

import socket
import ssl
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from google.protobuf.message import Message

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import (
    CONTENT_BYTES_MAX,
    END_FRAME,
    PREFACE,
    Frame,
    Kind,
    Method,
    StatusLine,
    decode_hello,
    decode_status,
    decode_text,
    encode,
    encode_call,
)
from gazette_sdk.protocol.stream_pb2 import CallHead, Hello
from support.frame_feed import FrameFeed

TIMEOUT_S = 20.0


def head_of(
    *, token: str = "", timeout_ms: int = 0, after_success: bool = False, **metadata: str
) -> bytes:
    """An encoded head; names of metadata have dashes for underscores."""
    named = {name.replace("_", "-"): value for name, value in metadata.items()}
    if token:
        named["authorization"] = token
    head = CallHead(metadata=named, timeout_ms=timeout_ms, after_success=after_success)
    return head.SerializeToString()


def append_frames(journal: str, *chunks: bytes, head: bytes = b"", **fields: Any) -> list[bytes]:
    """The frames of a whole append."""
    request = pb.AppendRequest(journal=journal, **fields).SerializeToString()
    return [
        encode_call(Method.APPEND, request, head),
        *(encode(Kind.CONTENT, chunk) for chunk in chunks),
        END_FRAME,
    ]


def read_call(journal: str, offset: int = 0, *, head: bytes = b"", **fields: Any) -> bytes:
    request = pb.ReadRequest(journal=journal, offset=offset, **fields)
    return encode_call(Method.READ, request.SerializeToString(), head)


class RawStream:
    """A connection. It says the preface at once, and takes the HELLO.

    Args:
        address: host and port, or the server's URL.
        tls: context of an encrypted connection.
        preface: what is said first; nothing leaves the HELLO to the test.
    """

    def __init__(
        self,
        address: tuple[str, int] | str,
        *,
        tls: ssl.SSLContext | None = None,
        preface: bytes = PREFACE,
    ) -> None:
        if isinstance(address, str):
            parts = urlsplit(address)
            address = (parts.hostname or "", parts.port or 0)
        self.socket: socket.socket = socket.create_connection(address, TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._decoder = FrameFeed()
        self._frames: list[Frame] = []
        self.hello: Hello | None = None
        if preface:
            self.socket.sendall(preface)
            frame = self.frame()
            if frame.kind == Kind.HELLO:
                self.hello = decode_hello(frame.payload)
            else:
                self._frames.insert(0, frame)

    def send(self, *frames: bytes) -> None:
        """Send frames, or any bytes, in one piece."""
        self.socket.sendall(b"".join(frames))

    def frame(self) -> Frame:
        """The server's next frame.

        Raises:
            EOFError: it closed the connection.
        """
        while not self._frames:
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._frames = self._decoder.feed(data)
            assert self._decoder.error is None
        return self._frames.pop(0)

    def answer(self) -> tuple[list[Frame], StatusLine]:
        """The frames of the oldest call, and its status."""
        frames = []
        while (frame := self.frame()).kind != Kind.STATUS:
            if frame.kind == Kind.PING:
                self.send(encode(Kind.PONG, frame.payload))
                continue
            assert frame.kind in {Kind.MESSAGE, Kind.CONTENT}, frame
            frames.append(frame)
        return frames, decode_status(frame.payload)

    def status(self) -> StatusLine:
        """The status of the oldest call."""
        return self.answer()[1]

    def call(self, method: Method, request: Message, head: bytes = b"") -> Any:
        """The only response of a call that succeeds."""
        self.send(encode_call(method, request.SerializeToString(), head))
        return self.response(method)

    def response(self, method: Method) -> Any:
        """The only response of the oldest call, which succeeds."""
        frames, status = self.answer()
        assert status == StatusLine(0), status
        (frame,) = frames
        return _RESPONSES[method].FromString(frame.payload)

    def append(self, journal: str, *chunks: bytes, **fields: Any) -> pb.AppendResponse:
        """A whole append."""
        pieces = [
            chunk[begin : begin + CONTENT_BYTES_MAX]
            for chunk in chunks
            for begin in range(0, len(chunk), CONTENT_BYTES_MAX)
        ]
        self.send(*append_frames(journal, *pieces, **fields))
        response: pb.AppendResponse = self.response(Method.APPEND)
        return response

    def read(self, journal: str, offset: int = 0, **fields: Any) -> bytes:
        """All content of a read that ends well."""
        self.send(read_call(journal, offset, **fields))
        frames, status = self.answer()
        assert status == StatusLine(0), status
        return b"".join(frame.payload for frame in frames if frame.kind == Kind.CONTENT)

    def goaway(self) -> str:
        """The reason of a GOAWAY, which comes next and is the last frame."""
        frame = self.frame()
        assert frame.kind == Kind.GOAWAY, frame
        return decode_text(frame.payload)

    def is_ended(self) -> bool:
        """Whether the server has closed the connection, or does soon."""
        try:
            self.frame()
        except (EOFError, ConnectionError):
            return True
        return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_RESPONSES: dict[int, type[Message]] = {
    Method.APPLY: pb.ApplyResponse,
    Method.APPEND: pb.AppendResponse,
    Method.LIST_FRAGMENTS: pb.FragmentsResponse,
    Method.FRAGMENT_STORE_HEALTH: pb.FragmentStoreHealthResponse,
}
