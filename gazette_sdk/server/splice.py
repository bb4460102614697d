"""Splicing of the public port's HTTP/2 connections to the gRPC server of the same process.

grpcio cannot share a listening socket with HTTP/1. So the gRPC server listens on a private Unix
socket, and the bytes of each gRPC connection are copied to and from it. Each direction has one
large buffer, without streams and their copies. If a side cannot take more, the other side is not
read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

from gazette_sdk.server.peer_limits import peer_of, splice_address

__all__ = ["READ_BYTES", "Splicer"]

_log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
"""Greatest read: beyond it fewer system calls bring nothing."""

HALF_CLOSED_TIMEOUT_S = 10.0
"""Seconds in which the other side must end, too, once one side has ended. While the process has no
free descriptor, the gRPC server accepts nothing: connections to it would never end by themselves,
and hold two descriptors each."""

WARN_PERIOD_S = 60.0
"""Period of the warnings while the gRPC server cannot be reached."""

WRITE_HIGH_BYTES = 1024 * 1024
"""Bytes that may wait for one side before the other side is no longer read."""


class Splicer:
    """Factory of protocol objects that splice a connection to a Unix socket.

    Args:
        path: the socket of the server.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fronts: set[asyncio.Transport] = set()
        self.connecting: set[asyncio.Task[None]] = set()
        self._quiet_until_s = 0.0

    def warn(self, error: OSError) -> None:
        """Log that the server cannot be reached, once per period."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + WARN_PERIOD_S
            _log.warning(
                "cannot connect to the gRPC server of this process: %s; its callers are "
                "disconnected; if descriptors ran out, raise the limit of open files (ulimit -n)",
                error,
            )

    def __call__(self) -> asyncio.Protocol:
        """Return a protocol object for one connection."""
        return _Front(self)

    async def aclose(self) -> None:
        """Abort all connections."""
        connecting = tuple(self.connecting)
        for task in connecting:
            task.cancel()
        for transport in tuple(self.fronts):
            transport.abort()
        if connecting:
            await asyncio.wait(connecting)


class _Front(asyncio.Protocol):
    """Connection of the public port which is not joined with the server yet."""

    def __init__(self, splicer: Splicer) -> None:
        self._splicer = splicer
        self._transport: asyncio.Transport
        self._opening = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.pause_reading()
        # A lost peer would not be detected while both sides are silent.
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
        loop, transport = asyncio.get_running_loop(), self._transport
        front, back = _Side(lambda: self._splicer.fronts.discard(transport)), _Side(lambda: None)
        front.other, back.other = back, front
        front.connection_made(transport)
        try:
            await loop.create_unix_connection(lambda: back, sock=await self._dial())
        except OSError as error:
            self._splicer.warn(error)
            transport.abort()
            return
        if transport.is_closing():
            back.transport.abort()
            return
        back.transport.write(self._opening)
        transport.set_protocol(front)
        transport.resume_reading()

    async def _dial(self) -> socket.socket:
        """Return a connection to the gRPC server, whose own address names the peer."""
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            dialled.setblocking(False)
            peer = peer_of(self._transport.get_extra_info("peername"))
            if (address := splice_address(peer)) is not None:
                dialled.bind(address)
            await asyncio.get_running_loop().sock_connect(dialled, str(self._splicer.path))
        except BaseException:
            dialled.close()
            raise
        return dialled


class _Side(asyncio.BufferedProtocol):
    """One side of a joined pair.

    Args:
        lost: called when its connection is lost.
    """

    def __init__(self, lost: Callable[[], None]) -> None:
        self.transport: asyncio.Transport
        self.other: _Side
        self._lost = lost
        self._ended = False
        self._expiry: asyncio.TimerHandle | None = None
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
            # The transport may reference unsent bytes: they must not be overwritten.
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
        self._expiry = asyncio.get_running_loop().call_later(
            HALF_CLOSED_TIMEOUT_S, self._abort_both
        )
        # TLS cannot be half-closed: its transport closes now, and warns of any other wish.
        return self.transport.can_write_eof() and not self.other._ended  # noqa: SLF001 - its class

    def _abort_both(self) -> None:
        self.other.transport.abort()
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()
        self._buffer = memoryview(b"")  # the pair is a reference cycle, which is collected late
        if self._expiry is not None:
            self._expiry.cancel()
        if error is not None:
            self.other.transport.abort()
        else:
            self.other.transport.close()
