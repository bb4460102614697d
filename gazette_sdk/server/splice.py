"""Splicing of the public port's HTTP/2 connections to the gRPC server of the same process.

grpcio cannot share a listening socket with HTTP/1. So the gRPC server listens on a private Unix
socket, and the bytes of each gRPC connection are copied to and from it. Each direction has one
large buffer, without streams and their copies. If a side cannot take more, the other side is not
read.

A connection must earn its memory and its place, as one of the stream transport. Until one of its
calls had a good token, few of its bytes and calls are let through, and it has some seconds. What is
held back is not read, so that it waits at the client. The gRPC server finds the connection of a
call by the address that its Unix socket is bound to: a file in the private directory of the server.

grpc.aio accepts no further call of any client after one whose path is not UTF-8. So the headers of
all calls are checked on the way, also those of known clients.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from gazette_sdk.server.listener import UnknownCost, UnknownShare, peer_of

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

UNKNOWN_TIMEOUT_S = 5.0
"""Seconds in which a call of a connection must have a good token."""

UNKNOWN_BYTES_MAX = 64 << 10
"""Bytes of a connection that reach the gRPC server before that. The largest headers fit in, and the
rest of a large first request follows when its token was checked."""

UNKNOWN_CALLS_MAX = 64
"""Calls of a connection that reach the gRPC server before that."""

UNKNOWN_READ_BYTES = 16 << 10
"""Greatest read before that."""

HEADERS_BYTES_MAX = 64 << 10
"""Greatest headers of a call, as they are sent. Those that the gRPC server takes are smaller."""

UNKNOWN_CONNECTIONS_MAX = 512
"""Connections without a good token so far. Beyond it the oldest one is cut: a client that has a
token sends it within moments, also while others dial without end."""


class Splicer:
    """Factory of protocol objects that splice a connection to a Unix socket.

    Args:
        path: the socket of the server, in a directory of this process alone.
        unknown: processor time of unknown clients.

    Attributes:
        path: as given.
        unknown: as given.
        fronts: connections of the public port.
        connecting: tasks that dial the server.
    """

    def __init__(self, path: Path, unknown: UnknownShare | None = None) -> None:
        self.path = path
        self.unknown = unknown or UnknownShare()
        self.fronts: set[asyncio.Transport] = set()
        self.connecting: set[asyncio.Task[None]] = set()
        self._connections: dict[str, SplicedConnection] = {}
        self._unknown: dict[SplicedConnection, None] = {}  # oldest first
        self._numbers = itertools.count()
        self._quiet_until_s = 0.0

    def find(self, peer: str) -> SplicedConnection | None:
        """Return the connection of a call, by the peer that the gRPC server reports."""
        return self._connections.get(peer.rpartition("/")[2])

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

    def __call__(self) -> asyncio.BufferedProtocol:
        """Return a protocol object for one connection."""
        return SplicedConnection(self, f"c{next(self._numbers):x}").front

    def opened(self, connection: SplicedConnection) -> None:
        """Note a connection, which is unknown so far."""
        self.fronts.add(connection.transport)
        self._connections[connection.name] = connection
        self._unknown[connection] = None
        if len(self._unknown) > UNKNOWN_CONNECTIONS_MAX:
            next(iter(self._unknown)).abort()

    def known(self, connection: SplicedConnection) -> None:
        """Note that a connection is unknown no more."""
        self._unknown.pop(connection, None)

    def lost(self, connection: SplicedConnection) -> None:
        """Forget a connection."""
        self.fronts.discard(connection.transport)
        self._connections.pop(connection.name, None)
        self._unknown.pop(connection, None)

    async def aclose(self) -> None:
        """Abort all connections."""
        connecting = tuple(self.connecting)
        for task in connecting:
            task.cancel()
        for transport in tuple(self.fronts):
            transport.abort()
        if connecting:
            await asyncio.wait(connecting)


class SplicedConnection:
    """Connection of the public port to the gRPC server.

    Args:
        splicer: its splicer.
        name: name of the file that its Unix socket is bound to.

    Attributes:
        name: as given.
        front: the side of the client.
        transport: the transport of that side.
        peer: IP address of the client.
        is_known: True if one of its calls had a good token.
        headers: headers of its calls.
    """

    def __init__(self, splicer: Splicer, name: str) -> None:
        self.name = name
        self.headers = CallHeaders()
        self.front = _Side(self)
        self.transport: asyncio.Transport
        self.peer = ""
        self.is_known = False
        self._splicer = splicer
        self._frames = UnknownFrames()
        self._joining: asyncio.Task[None] | None = None
        self._is_joined = False
        self._retry: asyncio.TimerHandle | None = None
        self._spent_s = float(UnknownCost.CONNECTION)
        self._timer: asyncio.TimerHandle

    def made(self, transport: asyncio.Transport) -> None:
        """Begin, with a connection from the listener."""
        self.transport = transport
        # A lost peer would not be detected while both sides are silent.
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.peer = peer_of(transport.get_extra_info("peername"))
        self._timer = asyncio.get_running_loop().call_later(UNKNOWN_TIMEOUT_S, self._cut)
        self._splicer.opened(self)

    def received(self, data: bytes) -> None:
        """Take bytes of the client while it is unknown."""
        self._frames.put(data)
        if self._is_joined:
            self._forward()
        elif self._frames.is_http2 is False:
            self.abort()
        elif self._frames.is_http2 and self._joining is None:
            self.transport.pause_reading()
            self._joining = asyncio.get_running_loop().create_task(self._join())
            self._splicer.connecting.add(self._joining)
            self._joining.add_done_callback(self._splicer.connecting.discard)

    def admit(self) -> None:
        """Lift the limits: a call had a good token."""
        if self.is_known:
            return
        self.is_known = True
        self._timer.cancel()
        self._splicer.known(self)
        self._splicer.unknown.spend(-self._spent_s)
        if self._is_joined and not self.transport.is_closing() and not self.front.has_ended:
            self.front.other.transport.write(self._frames.rest())
            self.front.lift_limits()
            self.front.other.lift_limits()
            self.transport.resume_reading()

    def lost(self) -> None:
        """Forget the client, which has left."""
        self._timer.cancel()
        if self._retry is not None:
            self._retry.cancel()
        self._frames.rest()
        self._splicer.lost(self)

    def abort(self) -> None:
        """Abort it."""
        self._timer.cancel()
        self._splicer.known(self)
        self.transport.abort()

    def refuse(self) -> None:
        """Abort it, for headers that the gRPC server must not get."""
        _log.debug("cutting a gRPC client with invalid headers", extra={"peer": self.peer})
        self.abort()

    def _cut(self) -> None:
        _log.debug("cutting a gRPC client without a good token", extra={"peer": self.peer})
        self.abort()

    def _forward(self) -> None:
        """Forward what the client may send now.

        Its first call never waits. Further ones do, while unknown clients have used their share.
        """
        self._retry = None
        if self.is_known or self.transport.is_closing() or self.front.has_ended:
            return
        delay_s = self._splicer.unknown.delay_s if self._frames.calls else 0.0
        before = self._frames.calls
        calls_max = before if delay_s else UNKNOWN_CALLS_MAX
        self.front.other.transport.write(self._frames.take(calls_max))
        self._spend((self._frames.calls - before) * UnknownCost.GRPC_CALL)
        if self._frames.holds:
            self.transport.pause_reading()
            if self._frames.calls < UNKNOWN_CALLS_MAX and not self._frames.is_full:
                self._retry = asyncio.get_running_loop().call_later(delay_s, self._forward)
        elif not self.transport.is_reading():
            self.transport.resume_reading()

    def _spend(self, cost_s: float) -> None:
        self._splicer.unknown.spend(cost_s)
        self._spent_s += cost_s

    async def _join(self) -> None:
        """Join the connection with one to the gRPC server."""
        self._spend(UnknownCost.GRPC_CONNECTION)
        loop, transport, back = asyncio.get_running_loop(), self.transport, _Side(None)
        back.other = self.front
        try:
            await loop.create_unix_connection(lambda: back, sock=await self._dial())
        except OSError as error:
            self._splicer.warn(error)
            transport.abort()
            return
        if transport.is_closing():
            back.transport.abort()
            return
        self.front.other = back
        self._is_joined = True
        self._forward()

    async def _dial(self) -> socket.socket:
        """Return a connection to the gRPC server, whose own address is this connection's name."""
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own = self._splicer.path.with_name(self.name)
        try:
            dialled.setblocking(False)
            dialled.bind(str(own))
            own.unlink()  # the address stays
            await asyncio.get_running_loop().sock_connect(dialled, str(self._splicer.path))
        except BaseException:
            dialled.close()
            raise
        return dialled


class _Side(asyncio.BufferedProtocol):
    """One side of a joined pair.

    Args:
        connection: its connection, if it is the client's side.

    Attributes:
        transport: its transport.
        other: the other side; itself until the pair is joined.
        has_ended: True if no further bytes come from it.
    """

    def __init__(self, connection: SplicedConnection | None) -> None:
        self.transport: asyncio.Transport
        self.other = self
        self._connection = connection
        self._is_limited = connection is not None
        self.has_ended = False
        self._expiry: asyncio.TimerHandle | None = None
        self._buffer = memoryview(bytearray(UNKNOWN_READ_BYTES))

    def lift_limits(self) -> None:
        """Forward all bytes from now on, with large reads."""
        self._is_limited = False
        self._buffer = memoryview(bytearray(READ_BYTES))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        if self._connection is not None:
            self._connection.made(self.transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - its signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data: memoryview | bytes = self._buffer[:nbytes]
        if self._connection is not None:
            checked = self._connection.headers.take(data)
            if checked is None:
                self._connection.refuse()
                return
            data = checked
            if self._is_limited:
                self._connection.received(bytes(data))
                return
        to = self.other.transport
        to.write(data)
        if to.get_write_buffer_size():
            # The transport may reference unsent bytes: they must not be overwritten.
            self._buffer = memoryview(bytearray(len(self._buffer)))

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        self.has_ended = True
        if self.other is self or not self.other.transport.can_write_eof():
            return False
        self.other.transport.write_eof()
        self._expiry = asyncio.get_running_loop().call_later(
            HALF_CLOSED_TIMEOUT_S, self._abort_both
        )
        # TLS cannot be half-closed: its transport closes now, and warns of any other wish.
        return self.transport.can_write_eof() and not self.other.has_ended

    def _abort_both(self) -> None:
        self.other.transport.abort()
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._connection is not None:
            self._connection.lost()
        self._buffer = memoryview(b"")  # the pair is a reference cycle, which is collected late
        if self._expiry is not None:
            self._expiry.cancel()
        if error is not None:
            self.other.transport.abort()
        else:
            self.other.transport.close()


# ---------------------------------------------------------------------- headers


class CallHeaders:
    """Headers of the calls on one connection, of which only ASCII is valid. Pure.

    gRPC has no other characters in headers, but for binary ones. They are not decoded: HPACK's
    dynamic table has what came as literals, and each literal is checked (RFC 7541 section 6).
    Headers are held until they are complete: once a connection ends, grpc.aio accepts calls of
    which it has a part.
    """

    def __init__(self) -> None:
        self._held = b""
        self._at = len(_PREFACE)  # position of the next frame after the begin of what is held
        self._block: bytes | None = None  # headers that the next frame continues
        self._is_begun = False

    def take(self, data: memoryview | bytes) -> memoryview | bytes | None:
        """Take the next bytes of the client.

        Returns:
            the bytes that the gRPC server may get now, None if there are invalid headers, or the
            first frame is not SETTINGS.
        """
        if self._held:
            data = self._held + data
        at, checked = self._at, 0
        while len(data) - at >= _HEADER_BYTES:
            kind, end = data[at + 3], at + _HEADER_BYTES + int.from_bytes(data[at : at + 3], "big")
            if not self._is_begun and kind != _SETTINGS:
                return None
            self._is_begun = True
            if kind in (_HEADERS, _CONTINUATION):
                if end > len(data):
                    break
                if not self._put(kind, data[at + 4], bytes(data[at + _HEADER_BYTES : end])):
                    return None
            elif self._block is not None:
                return None
            at = end
            if self._block is None:
                checked = at
        if at >= len(data) and self._block is None:
            checked = len(data)
        self._held = bytes(data[checked:])
        self._at = at - checked
        return data[:checked] if len(self._held) <= HEADERS_BYTES_MAX else None

    def _put(self, kind: int, flags: int, payload: bytes) -> bool:
        """Return True if a frame's headers are valid, as far as that is known."""
        if (kind == _CONTINUATION) != (self._block is not None):
            return False
        if kind == _HEADERS:
            if flags & _PADDED or (flags & _PRIORITY and len(payload) < _PRIORITY_BYTES):
                return False  # no client of gRPC sends padding
            block = payload[_PRIORITY_BYTES:] if flags & _PRIORITY else payload
        else:
            block = (self._block or b"") + payload
        if not flags & _END_HEADERS:
            self._block = block
            return True
        self._block = None
        try:
            return _is_ascii(block)
        except IndexError:  # it ends within a field
            return False


def _is_ascii(block: bytes) -> bool:
    """Return True if all strings of a header block are ASCII, or values of binary headers."""
    at = 0
    while at < len(block):
        first = block[at]
        if first >= 0x80:  # a field of a table
            _, at = _integer(block, at, 7) if first == 0xFF else (0, at + 1)
            continue
        if first >> 5 == 1:  # a size of the dynamic table
            _, at = _integer(block, at, 5)
            continue
        index, at = _integer(block, at, 6 if first >> 6 else 4)
        is_binary = False
        for is_name in (False,) if index else (True, False):
            is_huffman = block[at] >> 7
            length, begin = _integer(block, at, 7)
            at = begin + length
            if at > len(block):
                return False
            text = block[begin:at]
            if is_huffman:
                if not _is_huffman_ascii(text):
                    return False
            elif not text.isascii() and not is_binary:
                return False
            is_binary = is_name and not is_huffman and text.endswith(b"-bin")
    return True


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """Return an integer of HPACK and the position after it (RFC 7541 section 5.1)."""
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value == most:
        for shift in range(0, 35, 7):
            byte = block[at]
            at += 1
            value += (byte & 0x7F) << shift
            if not byte >> 7:
                break
        else:
            raise IndexError
    return value, at


def _is_huffman_ascii(text: bytes) -> bool:
    """Return True if an encoded string has only codes of ASCII characters, and padding."""
    bits = f"{int.from_bytes(text, 'big'):0{8 * len(text)}b}"
    # The codes of all others begin so.
    return "1" * 15 not in bits or _HUFFMAN_ASCII.fullmatch(bits) is not None


def _huffman_codes() -> Iterator[str]:
    """Yield HPACK's codes of printable characters: a canonical code (RFC 7541 appendix B)."""
    code = last = 0
    for length, characters in _HUFFMAN_LENGTHS.items():
        code <<= length - last
        last = length
        for _ in characters:
            yield f"{code:0{length}b}"
            code += 1


_HUFFMAN_LENGTHS = {
    5: "012aceiost",
    6: " %-./3456789=A_bdfghlmnpru",
    7: ":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: "&*,;XZ",
    10: '!"()?',
    11: "'+|",
    12: "#>",
    13: "\0$@[]~",
    14: "^}",
    15: "<`{",
    19: "\\",
}
"""Characters by the lengths of their codes. Their order is that of the codes, too."""

_HUFFMAN_ASCII = re.compile(f"(?:{'|'.join(_huffman_codes())})*+1{{0,7}}")


# ---------------------------------------------------------------------- unknown clients


class UnknownFrames:
    """HTTP/2 bytes of a client without a good token: what of them is let through. Pure.

    The first frame must be SETTINGS: what is no HTTP/2 costs the gRPC server nothing. Others are
    distinguished by their lengths and types only.

    Attributes:
        calls: calls that were let through.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._within = len(_PREFACE)  # bytes of the current frame that were not let through yet
        self._bytes = 0
        self.calls = 0

    @property
    def is_http2(self) -> bool | None:
        """True if the client began as HTTP/2 does, None if it is not known yet, before taking."""
        begin = len(_PREFACE)
        if not _PREFACE.startswith(self._held[:begin]):
            return False
        kind = self._held[begin + 3 : begin + 4]
        return kind[0] == _SETTINGS if kind else None

    @property
    def holds(self) -> bool:
        """True if bytes wait that no further bytes will let through."""
        if not self._held:
            return False
        if self._within:
            return self.is_full
        return len(self._held) >= _HEADER_BYTES

    @property
    def is_full(self) -> bool:
        """True if as many bytes as possible were let through."""
        return self._bytes >= UNKNOWN_BYTES_MAX

    def put(self, data: bytes) -> None:
        """Add bytes of the client."""
        self._held += data

    def take(self, calls_max: int = UNKNOWN_CALLS_MAX) -> bytes:
        """Remove and return the bytes that are let through now.

        Args:
            calls_max: number of calls that may have been let through then.
        """
        end = 0
        room = UNKNOWN_BYTES_MAX - self._bytes
        while end < room:
            if not self._within:
                if len(self._held) - end < _HEADER_BYTES:
                    break
                if self._held[end + 3] == _HEADERS:
                    if self.calls >= calls_max:
                        break
                    self.calls += 1
                length = int.from_bytes(self._held[end : end + 3], "big")
                self._within = _HEADER_BYTES + length
            count = min(self._within, len(self._held) - end, room - end)
            if not count:
                break
            self._within -= count
            end += count
        taken = bytes(self._held[:end])
        del self._held[:end]
        self._bytes += end
        return taken

    def rest(self) -> bytes:
        """Remove and return all bytes."""
        rest = bytes(self._held)
        self._held.clear()
        return rest


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_BYTES = 9
_HEADERS, _SETTINGS, _CONTINUATION = 1, 4, 9
"""HTTP/2's preface, the length of a frame's header, and the types of the frames that begin a call
and a connection, and continue headers (RFC 9113 sections 3.4, 4.1, 6.2, 6.5 and 6.10)."""

_END_HEADERS, _PADDED, _PRIORITY = 0x04, 0x08, 0x20
_PRIORITY_BYTES = 5
"""Flags of frames with headers, and the length of their priority (RFC 9113 section 6.2)."""
