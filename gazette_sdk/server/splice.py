"""Connections that are passed on, byte by byte, to another server of the same process.

grpcio cannot share a listening socket with HTTP/1. So the gRPC server listens on a private Unix
socket, and the public port's HTTP/2 connections are spliced to it: plain ones by pumps (see
`pump`), those whose TLS ends here through asyncio's TLS and one large buffer in each direction.
A side that cannot take more stops its other side's reading.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from gazette_sdk.server.pump import (
    BUFFER_BYTES,
    CAN_SPLICE,
    Buffer,
    BufferPump,
    KernelPump,
    Pipe,
    Pool,
    Pump,
)

__all__ = ["Splicer"]

_log = logging.getLogger(__name__)

WRITE_HIGH_BYTES = 1024 * 1024
"""Bytes that may wait for one side before the other side is no longer read."""


class Splicer:
    """Makes protocol objects that splice a connection to a Unix socket.

    Args:
        path: the socket of the server behind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fronts: set[_Front] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self.pipes = Pool(Pipe)
        self.buffers = Pool(Buffer)

    def __call__(self) -> asyncio.Protocol:
        """A protocol object for one connection."""
        return _Front(self)

    def __len__(self) -> int:
        """How many connections there are."""
        return len(self._fronts)

    async def aclose(self) -> None:
        """End all connections at once."""
        for task in self._connecting:
            task.cancel()
        for front in tuple(self._fronts):
            front.transport.abort()
        if self._connecting:
            await asyncio.wait(self._connecting)
        self.pipes.close()
        self.buffers.close()


class _Front(asyncio.Protocol):
    """A connection of the public port, until it is connected to the server behind."""

    def __init__(self, splicer: Splicer) -> None:
        self.transport: asyncio.Transport
        self._splicer = splicer
        self._opening = b""
        self._pumped: _PumpedPair | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.pause_reading()
        # A peer that is gone without a word is noticed by nobody else while both sides are silent.
        self.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
        )
        self._splicer._fronts.add(self)  # noqa: SLF001 - of this module
        connecting = self._splicer._connecting  # noqa: SLF001 - of this module
        task = asyncio.get_running_loop().create_task(self._connect())
        connecting.add(task)
        task.add_done_callback(connecting.discard)

    def data_received(self, data: bytes) -> None:
        self._opening += data

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - its signature
        self.forget()
        if self._pumped is not None:
            self._pumped.close()

    def forget(self) -> None:
        """Not to be ended together with the splicer any more."""
        self._splicer._fronts.discard(self)  # noqa: SLF001 - of this module

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        back = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        back.setblocking(False)
        try:
            await loop.sock_connect(back, str(self._splicer._path))  # noqa: SLF001 - as above
            await loop.sock_sendall(back, self._opening)
            if self.transport.is_closing():
                back.close()
            elif self.transport.get_extra_info("ssl_object") is None:
                self._pumped = _PumpedPair(self.transport, back, self._splicer)
            else:
                await _join_transports(self, back)
        except OSError as error:
            _log.warning("the gRPC server of this process cannot be reached: %s", error)
            back.close()
            self.transport.abort()
        except asyncio.CancelledError:
            back.close()
            raise


# --------------------------------------------------------------------- plain


class _PumpedPair:
    """Both directions of a plain connection."""

    def __init__(self, transport: asyncio.Transport, back: socket.socket, splicer: Splicer) -> None:
        self._transport = transport
        # The transport keeps its own descriptor, which the loop would not let us watch.
        self._front = transport.get_extra_info("socket").dup()
        self._front.setblocking(False)
        self._back = back
        self._running = 2
        inward: Pump[Any] = (
            KernelPump(self._front, back, splicer.pipes, self._ended)
            if CAN_SPLICE
            else BufferPump(self._front, back, splicer.buffers, self._ended)
        )
        outward = BufferPump(back, self._front, splicer.buffers, self._ended)
        self._pumps = (inward, outward)
        for pump in self._pumps:
            pump.start()

    def close(self) -> None:
        """Stop both directions; the transport's owner closes it."""
        for pump in self._pumps:
            pump.stop()
        self._front.close()
        self._back.close()

    def _ended(self, error: OSError | None) -> None:
        self._running -= 1
        if error is not None:
            self._transport.abort()
        elif not self._running:
            self._transport.close()


# ----------------------------------------------------------------------- TLS


async def _join_transports(front: _Front, back: socket.socket) -> None:
    one, other = _End(front.forget), _End(lambda: None)
    one.other, other.other = other, one
    await asyncio.get_running_loop().create_unix_connection(lambda: other, sock=back)
    transport = front.transport
    transport.set_protocol(one)
    one.connection_made(transport)
    if transport.is_closing():
        other.transport.abort()
    else:
        transport.resume_reading()


class _End(asyncio.BufferedProtocol):
    """One side of a pair."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self.transport: asyncio.Transport
        self.other: _End
        self._forget = forget
        self._ended = False
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

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
            self._buffer = memoryview(bytearray(BUFFER_BYTES))

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

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()
        if error is not None:
            self.other.transport.abort()
        else:
            self.other.transport.close()
