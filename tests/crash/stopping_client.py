"""A client of the stream wire in a process of its own, which stops at a boundary of its frames.

It is the SDK's client. Between it and its socket stands something that passes frames on one by
one, whole or half, and stops the process where it was told to; whoever started it kills it then.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import PREFACE, Kind
from gazette_sdk.transport.stream.connection import Connection
from gazette_sdk.transport.stream.wire import StreamTransport
from gazette_sdk.transport.wire import AppendItem

__all__ = ["Boundary", "append_and_stop", "boundaries"]

_HEADER_BYTES = 5


@dataclass(frozen=True)
class Boundary:
    """A place in what a client sends: behind a frame, or within it.

    Attributes:
        frame: of which frame of the connection, counted from the preface, which is the first.
        name: what this is.
        is_half: whether only half of it is sent.
    """

    frame: int
    name: str
    is_half: bool

    @property
    def commits(self) -> bool:
        """Whether the append was sent as a whole."""
        return self.name == "END" and not self.is_half

    def __str__(self) -> str:
        return f"{'half of ' if self.is_half else ''}{self.name}"


def boundaries(contents: int) -> list[Boundary]:
    """All of them, for an append of so many frames of content."""
    names = ["preface", "CALL", *(f"CONTENT {n}" for n in range(1, contents + 1)), "END"]
    return [
        Boundary(frame, name, is_half)
        for frame, name in enumerate(names)
        for is_half in (True, False)
    ]


def append_and_stop(
    address: str,
    journal: str,
    chunks: list[bytes],
    boundary: Boundary,
    *,
    streamed: bool,
    log: Pipe,
) -> None:
    """Append, and stop at a boundary; ``log`` is told the kinds of the frames that were sent.

    Args:
        address: of the broker.
        journal: to append to.
        chunks: of the content; each is a frame, if it is streamed.
        boundary: where to stop.
        streamed: whether the content comes bit by bit, rather than at once.
        log: to whoever kills this process.
    """

    def stop(sent: list[str]) -> None:
        log.send(sent)
        signal.pause()

    made = Connection.connection_made

    def connection_made(self: Connection, transport: asyncio.Transport) -> None:
        made(self, _Stopping(transport, boundary, stop))  # type: ignore[arg-type]

    Connection.connection_made = connection_made  # type: ignore[method-assign,assignment]

    async def items() -> AsyncIterator[AppendItem]:
        yield pb.AppendRequest(journal=journal)
        for chunk in chunks:
            if streamed:
                await asyncio.sleep(0)
            yield chunk
        yield pb.AppendRequest()

    async def append() -> None:
        async with StreamTransport(address) as transport:
            await transport.append(items())

    asyncio.run(append())


class _Stopping:
    """A connection's transport, which passes on frames up to a boundary."""

    def __init__(
        self, transport: asyncio.Transport, boundary: Boundary, stop: Callable[[list[str]], None]
    ) -> None:
        self._transport = transport
        self._boundary = boundary
        self._stop = stop
        self._sent: list[str] = []
        self._waiting = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._waiting += data
        while frame := self._next():
            if len(self._sent) == self._boundary.frame and self._boundary.is_half:
                frame = frame[: len(frame) // 2]
            self._transport.write(frame)
            self._sent.append(_name(frame))
            if len(self._sent) > self._boundary.frame:
                assert not self._transport.get_write_buffer_size(), "it is sent"
                self._stop(self._sent)

    def _next(self) -> bytes:
        """The next whole frame of what waits."""
        length = len(PREFACE)
        if self._sent:
            if len(self._waiting) < _HEADER_BYTES:
                return b""
            length = _HEADER_BYTES + int.from_bytes(self._waiting[1:_HEADER_BYTES], "big")
        if len(self._waiting) < length:
            return b""
        frame, self._waiting = self._waiting[:length], self._waiting[length:]
        return frame


def _name(frame: bytes) -> str:
    return "preface" if PREFACE.startswith(frame[:4]) else Kind(frame[0]).name
