"""Connections that are passed on, byte by byte, to another server of the same process.

grpcio cannot share a listening socket with HTTP/1. So the gRPC server listens on a private Unix
socket, and the public port's HTTP/2 connections are spliced to it. Each direction reads into one
large buffer and writes from it: a message costs a system call in and one out, and no copy in
between. A side that cannot take more stops its other side's reading.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import cast

__all__ = ["READ_BYTES", "Splicer"]

_log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
"""Greatest read of a spliced connection: beyond it fewer system calls bring nothing."""

WRITE_HIGH_BYTES = 1024 * 1024
"""Bytes that may wait for one side before the other side is no longer read."""


class Splicer:
    """Makes protocol objects that splice a connection to a Unix socket.

    Args:
        path: the socket of the server behind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends: set[_End] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    def __call__(self) -> asyncio.BufferedProtocol:
        """A protocol object for one connection."""
        return _Front(self)

    def __len__(self) -> int:
        """How many connections are spliced."""
        return len(self._ends) // 2

    async def aclose(self) -> None:
        """End all connections at once."""
        for task in self._connecting:
            task.cancel()
        for end in tuple(self._ends):
            end.transport.abort()
        if self._connecting:
            await asyncio.wait(self._connecting)


class _End(asyncio.BufferedProtocol):
    """One side of a spliced pair."""

    def __init__(self, splicer: Splicer) -> None:
        self.transport: asyncio.Transport
        self.other: _End | None = None
        self._ended = False
        self._splicer = splicer
        self._buffer = memoryview(bytearray(READ_BYTES))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._splicer._ends.add(self)  # noqa: SLF001 - of this module

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - its signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        assert self.other is not None, "a side is read only once it has its other side"
        to = self.other.transport
        to.write(self._buffer[:nbytes])
        if to.get_write_buffer_size():
            # What could not be sent at once may be kept by reference: never write over it.
            self._buffer = memoryview(bytearray(READ_BYTES))

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        self._ended = True
        if self.other is None or not self.other.transport.can_write_eof():
            return False
        self.other.transport.write_eof()
        return not self.other._ended  # noqa: SLF001 - of this class

    def connection_lost(self, error: Exception | None) -> None:
        self._splicer._ends.discard(self)  # noqa: SLF001 - of this module
        if self.other is not None:
            if error is not None:
                self.other.transport.abort()
            else:
                self.other.transport.close()


class _Front(_End):
    """The side of the public port: it finds its other side first."""

    def __init__(self, splicer: Splicer) -> None:
        super().__init__(splicer)
        self._opening = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        connecting = self._splicer._connecting  # noqa: SLF001 - of this module
        task = asyncio.get_running_loop().create_task(self._connect())
        connecting.add(task)
        task.add_done_callback(connecting.discard)

    def buffer_updated(self, nbytes: int) -> None:
        if self.other is None:
            self._opening += bytes(self._buffer[:nbytes])
        else:
            super().buffer_updated(nbytes)

    async def _connect(self) -> None:
        back = _End(self._splicer)
        back.other = self
        try:
            await asyncio.get_running_loop().create_unix_connection(
                lambda: back,
                str(self._splicer._path),  # noqa: SLF001 - of this module
            )
        except OSError as error:
            _log.warning("the gRPC server of this process cannot be reached: %s", error)
            self.transport.abort()
            return
        self.other = back
        if self.transport.is_closing():
            back.transport.abort()
            return
        back.transport.write(self._opening)
        self._opening = b""
        self.transport.resume_reading()
