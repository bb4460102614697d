"""Output of a connection of the stream transport: few writes, bounded buffers, files.

Each frame is written whole in one synchronous step, so that a cancellation always leaves the peer
at the begin of a frame. Content of a file goes from the page cache to the socket inside the
kernel, as far as the socket takes it at once. The rest of the frame is read and queued, so that
the loop also notices when there is room again.
"""

from __future__ import annotations

import asyncio
import os
import socket

from gazette_sdk.errors import CorruptFragmentError

__all__ = ["WRITE_HIGH_BYTES", "StreamOutput"]

WRITE_HIGH_BYTES = 1 << 20
"""Bytes that may wait for a peer before no more are produced."""

JOIN_BYTES = 64 << 10
"""Content up to here is copied behind its header, for one write; more of it is written apart."""

LEAD_BYTES = 16 << 10
"""Content of a file that is written together with its header: a packet of five bytes would wake
the peer for nothing."""


class StreamOutput:
    """Writing side of one connection.

    Args:
        transport: of the connection.

    Attributes:
        paused: True if so much waits for the peer that no more should be produced.
    """

    __slots__ = ("_held", "_loop", "_room", "_socket", "_transport", "paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []
        self.paused = False
        self._room: asyncio.Future[None] | None = None
        self._socket: socket.socket | None = None
        if transport.get_extra_info("ssl_object") is None and hasattr(os, "sendfile"):
            self._socket = transport.get_extra_info("socket")
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        return self._transport.get_write_buffer_size()

    # ------------------------------------------------------------------ frames

    def write(self, frames: bytes) -> None:
        """Write whole frames, at once."""
        if self._held:
            frames = self._take_held() + frames
        if not self._transport.is_closing():
            self._transport.write(frames)

    def hold(self, frame: bytes) -> None:
        """Write a frame together with the next one, or when :meth:`flush` says so."""
        self._held.append(frame)

    def flush(self) -> None:
        """Write the frames that are held."""
        if self._held:
            self.write(b"")

    def write_content(self, header: bytes, content: bytes) -> None:
        """Write a frame of which the header and the content are not together yet."""
        if len(content) <= JOIN_BYTES:
            self.write(header + content)
            return
        self.write(header)
        if not self._transport.is_closing():
            self._transport.write(content)

    def write_file(self, header: bytes, fd: int, position: int, length: int) -> None:
        """Write a frame whose content stands in a file.

        Args:
            header: of the frame.
            fd: of the file.
            position: where in the file the content begins.
            length: of the content.

        Raises:
            CorruptFragmentError: the file ends early. The connection is broken, as the peer was
                promised more; unless that was known before the frame began.
        """
        end = position + length
        if length > LEAD_BYTES and os.fstat(fd).st_size < end:
            raise _ends_early(end - os.fstat(fd).st_size)
        lead = os.pread(fd, min(length, LEAD_BYTES), position)
        position += len(lead)
        if position < end and length <= LEAD_BYTES:
            raise _ends_early(end - position)
        self.write(header + lead)
        if position == end:
            return
        position = self._send_file(fd, position, end)
        while position < end and not self._transport.is_closing():
            rest = os.pread(fd, end - position, position)
            if not rest:
                self._transport.abort()
                raise _ends_early(end - position)
            self._transport.write(rest)
            position += len(rest)

    def _send_file(self, fd: int, position: int, end: int) -> int:
        """Send the part of a file that the socket takes now. Return the position behind it."""
        if self._socket is None or self._transport.get_write_buffer_size():
            return position
        while position < end and not self._transport.is_closing():
            try:
                sent = os.sendfile(self._socket.fileno(), fd, position, end - position)
            except BlockingIOError:
                break
            except OSError:
                # A file that can't be sent so is read; a peer that is gone is found by writing.
                self._socket = None
                break
            if not sent:
                break
            position += sent
        return position

    def _take_held(self) -> bytes:
        frames = b"".join(self._held)
        self._held.clear()
        return frames

    # ------------------------------------------------------------ back-pressure

    def pause(self) -> None:
        """As ``pause_writing`` of a protocol."""
        self.paused = True

    def resume(self) -> None:
        """As ``resume_writing`` of a protocol."""
        self.paused = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def room(self) -> None:
        """Return when there is room for more. For one waiter at a time."""
        while self.paused:
            self._room = self._loop.create_future()
            try:
                await self._room
            finally:
                self._room = None

    async def file_room(self) -> None:
        """Return when the next :meth:`write_file` is worth it.

        Where files are sent by the kernel that is when nothing waits before them.
        """
        if self._socket is None:
            await self.room()
        elif self._transport.get_write_buffer_size():
            self._transport.set_write_buffer_limits(high=0)
            try:
                await self.room()
            finally:
                self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        else:
            await asyncio.sleep(0)  # a fast peer must not keep the loop from everybody else


def _ends_early(missing: int) -> CorruptFragmentError:
    return CorruptFragmentError(
        f"the local file of a fragment ends {missing} bytes early; restart the broker, which then "
        "recovers or replaces it"
    )
