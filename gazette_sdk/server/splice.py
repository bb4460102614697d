"""Connections that are passed on, byte by byte, to another server of the same process.

grpcio cannot share a listening socket with HTTP/1. So the gRPC server listens on a private Unix
socket, and the public port's HTTP/2 connections are spliced to it. Each direction goes through
one large buffer, without streams and their copies; what comes in over a plain connection is moved
by the kernel where it can (see `pump`). A side that cannot take more stops its other side's
reading.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

from gazette_sdk.server.pump import CAN_PUMP, PipePool, Pump

__all__ = ["READ_BYTES", "Splicer"]

_log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
"""Greatest read: beyond it fewer system calls bring nothing."""

WRITE_HIGH_BYTES = 1024 * 1024
"""Bytes that may wait for one side before the other side is no longer read."""


class Splicer:
    """Makes protocol objects that splice a connection to a Unix socket.

    Args:
        path: the socket of the server behind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pipes = PipePool()
        self.fronts: set[asyncio.Transport] = set()
        self.connecting: set[asyncio.Task[None]] = set()

    def __call__(self) -> asyncio.Protocol:
        """A protocol object for one connection."""
        return _Front(self)

    async def aclose(self) -> None:
        """End all connections at once."""
        connecting = tuple(self.connecting)
        for task in connecting:
            task.cancel()
        for transport in tuple(self.fronts):
            transport.abort()
        if connecting:
            await asyncio.wait(connecting)
        self.pipes.close()


class _Front(asyncio.Protocol):
    """A connection of the public port that has no other side yet."""

    def __init__(self, splicer: Splicer) -> None:
        self._splicer = splicer
        self._transport: asyncio.Transport
        self._opening = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.pause_reading()
        # A peer that is gone without a word is noticed by nobody else while both sides are silent.
        self._transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
        )
        self._splicer.fronts.add(self._transport)
        task = asyncio.get_running_loop().create_task(self._connect())
        self._splicer.connecting.add(task)
        task.add_done_callback(self._splicer.connecting.discard)

    def data_received(self, data: bytes) -> None:
        self._opening += data

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - its signature
        self._splicer.fronts.discard(self._transport)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        back = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        back.setblocking(False)
        try:
            await loop.sock_connect(back, str(self._splicer.path))
            await loop.sock_sendall(back, self._opening)
            await _join(self._transport, back, self._splicer)
        except OSError as error:
            _log.warning("the gRPC server of this process cannot be reached: %s", error)
            self._transport.abort()
            back.close()
        except asyncio.CancelledError:
            back.close()
            raise


async def _join(transport: asyncio.Transport, back: socket.socket, splicer: Splicer) -> None:
    """Join a paused connection with the socket behind."""
    front, behind = _Side(lambda: splicer.fronts.discard(transport)), _Side(lambda: None)
    front.other, behind.other = behind, front
    await asyncio.get_running_loop().create_unix_connection(lambda: behind, sock=back)
    if transport.is_closing():
        behind.transport.abort()
        return
    transport.set_protocol(front)
    front.connection_made(transport)
    if CAN_PUMP and transport.get_extra_info("ssl_object") is None:
        # The transports stay; what comes in goes past them, over descriptors of its own.
        public = transport.get_extra_info("socket").dup()
        front.pump = Pump(public, back.dup(), splicer.pipes, front.pump_ended)
    else:
        transport.resume_reading()


class _Side(asyncio.BufferedProtocol):
    """One side of a joined pair.

    Args:
        lost: called when it is gone.
    """

    def __init__(self, lost: Callable[[], None]) -> None:
        self.transport: asyncio.Transport
        self.other: _Side
        self.pump: Pump | None = None
        self._lost = lost
        self._ended = False
        self._buffer = memoryview(bytearray(READ_BYTES))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - its signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        to = self.other.transport
        to.write(self._buffer[:nbytes])
        if to.get_write_buffer_size():
            # What could not be sent at once may be kept by reference: never write over it.
            self._buffer = memoryview(bytearray(READ_BYTES))

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        self._ended = True
        if not self.other.transport.can_write_eof():
            return False
        self.other.transport.write_eof()
        return not self.other._ended  # noqa: SLF001 - of this class

    def pump_ended(self, error: OSError | None) -> None:
        """What came in for the other side has ended."""
        self._ended = True
        if error is not None:
            self.transport.abort()
        elif self.other._ended:  # noqa: SLF001 - of this class
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()
        if self.pump is not None:
            self.pump.stop()
        if error is not None:
            self.other.transport.abort()
        else:
            self.other.transport.close()
