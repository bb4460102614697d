"""One connection of the stream transport for plain code: a socket that blocks its caller.

The same pure machines as at :class:`~gazette_sdk.transport.wires.stream.connection.Connection`. It
belongs to one caller at a time, who may be any thread, and carries one call at a time. Nobody
listens between calls: what the server said meanwhile is seen when it is taken again.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol import urls
from gazette_sdk.protocol.stream_calls import (
    ClientCalls,
    ClientEvent,
    GoAway,
    HelloReceived,
    Item,
    Ping,
    Status,
)
from gazette_sdk.protocol.stream_frames import PREFACE, FrameBuffer
from gazette_sdk.transport.wires.stream.connection import ALPN, PING_AFTER_S
from gazette_sdk.transport.wires.stream.dialing import (
    PROTOCOLS,
    Place,
    place_of,
    refused,
    unheard,
    unreachable,
)
from gazette_sdk.transport.wires.stream.watch import Watch
from gazette_sdk.transport.wires.tls import Tls

__all__ = ["BlockingConnection", "BlockingDialer"]

FRESH_S = 0.001
"""A connection whose last call ended so lately is not asked whether it lives."""

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

UNASKED_READS_MAX = 16
"""A server that said more than so many reads' worth between two calls is not listened to."""


class BlockingConnection:
    """A connection to one server.

    Args:
        sock: connected, in TLS already where that is spoken. Closed with the connection.

    Attributes:
        calls: the state of its calls.
        greeted: the server said HELLO.
        payload: the only response of the call under way, once it came.
        status: its STATUS, once it came.
        reason: what the server said when it went away.
        freed_at: monotonic seconds since which it has no call.
    """

    __slots__ = (
        "_frames",
        "_pending",
        "_sock",
        "_timeout_s",
        "_watch",
        "calls",
        "freed_at",
        "greeted",
        "payload",
        "reason",
        "status",
    )

    def __init__(self, sock: socket.socket) -> None:
        self.calls = ClientCalls()
        self.greeted = False
        self.payload: bytes | None = None
        self.status: Status | None = None
        self.reason = ""
        self.freed_at = 0.0
        sock.setblocking(False)  # one with a timeout polls before each operation
        self._sock = sock
        self._pending = sock.pending if isinstance(sock, ssl.SSLSocket) else None
        self._frames = FrameBuffer()
        self._timeout_s = 0.0
        self._watch = Watch(sock.fileno())

    def fileno(self) -> int:
        """Number of its socket."""
        return self._sock.fileno()

    def greet(self, timeout_s: float) -> None:
        """Say who we are, and wait for HELLO.

        Raises:
            TimeoutError: it did not come in time.
            StreamProtocolError: something else came.
            OSError: the connection ended.
        """
        ends_at = time.monotonic() + timeout_s
        sock = self._sock
        agreed = sock.selected_alpn_protocol() if isinstance(sock, ssl.SSLSocket) else None
        if agreed not in {None, ALPN}:
            raise StreamProtocolError(f"it chose {agreed} in TLS")
        self._timeout_s = timeout_s
        self.send(PREFACE)
        while not self.greeted:
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            with contextlib.suppress(BlockingIOError):
                self.receive(left_s)
            if self.calls.leaving:
                raise ConnectionError(self.reason)

    def send(self, data: bytes | memoryview, timeout_s: float | None = None) -> None:
        """Send all of it.

        Args:
            data: the bytes.
            timeout_s: what to wait for room; None as long as the last read, or some seconds.

        Raises:
            OSError: the connection ended, or does not take it in time. What it took of it
                nobody knows.
        """
        ends_at = 0.0
        while True:
            try:
                sent = self._sock.send(data)
            except _WOULD_BLOCK:
                sent = 0
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
            now = time.monotonic()
            if timeout_s is None:
                timeout_s = self._timeout_s or PING_AFTER_S
            ends_at = ends_at or now + timeout_s
            if now >= ends_at or not self._watch.has_room(ends_at - now):
                raise TimeoutError("timed out")

    def say(self, data: bytes) -> None:
        """Send a few bytes, waiting no longer than reads do.

        Raises:
            ConnectionError: the connection ended, or has no room for them.
        """
        try:
            self.send(data, self._timeout_s)
        except OSError as error:
            raise ConnectionError(f"the server does not read: {error}") from error

    def receive(self, timeout_s: float) -> None:
        """Read once, and take what came.

        Args:
            timeout_s: what to wait; 0 not at all.

        Raises:
            TimeoutError: nothing came.
            BlockingIOError: what came was TLS's own.
            StreamProtocolError: the server broke the rules. It was told.
            OSError: the connection ended.
        """
        count = self._read(timeout_s)
        receive = self.calls.receive
        try:
            for frame in self._frames.updated(count):
                event = receive(frame)
                kind = type(event)
                if kind is Item:
                    self.payload = frame.payload
                elif kind is Status:
                    self.status = event  # type: ignore[assignment]
                elif event is not None:
                    self._told(event)
            if self._frames.error is not None:
                raise self._frames.error
        except StreamProtocolError as error:
            with contextlib.suppress(OSError):  # it may be gone already
                self.say(self.calls.goaway(str(error)))
            raise

    def _read(self, timeout_s: float) -> int:
        """Read into the memory of frames; how many bytes."""
        self._timeout_s = timeout_s
        is_there = self._pending is not None and self._pending() > 0
        if not is_there and not self._watch.wait(timeout_s):
            raise TimeoutError("timed out")
        try:
            count = self._sock.recv_into(self._frames.get_buffer())
        except _WOULD_BLOCK as error:
            raise BlockingIOError from error
        except OSError as error:
            if self.reason:
                raise ConnectionError(self.reason) from error
            raise
        if not count:
            raise ConnectionError(self.reason or "the server closed the connection")
        return count

    def _told(self, event: ClientEvent) -> None:
        """The server said something that belongs to no call."""
        if isinstance(event, Ping):
            self.say(self.calls.pong(event.payload))
        elif isinstance(event, GoAway):
            self.reason = f"it went away: {event.reason}"
        elif isinstance(event, HelloReceived):
            self.greeted = True

    def take(self) -> bool:
        """Make it ready for a call; whether it can have one.

        What the server said since the last one is heard now: perhaps it is gone. One that just
        had a call is not asked.
        """
        if self.status is not None and time.monotonic() - self.freed_at < FRESH_S:
            self.payload = self.status = None
            return True
        for _ in range(UNASKED_READS_MAX):
            if not self._watch.sees():
                self.payload = self.status = None
                return self.calls.may_begin
            try:
                self.receive(0)
            except BlockingIOError:
                pass  # TLS had something for itself
            except (OSError, StreamProtocolError):
                return False
        return False

    def interrupt(self) -> None:
        """End it under the hands of whoever waits for it, from any thread."""
        with contextlib.suppress(OSError):  # it has ended already
            # Not that of SSLSocket, which is not safe while another thread reads.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """End it."""
        self._sock.close()


class BlockingDialer:
    """Opens connections for plain code.

    Args:
        tls: certificates, for endpoints of scheme ``https``.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._context: ssl.SSLContext | None = None

    def dial(self, endpoint: str, where: str, timeout_s: float) -> BlockingConnection:
        """Open a connection, up to the server's HELLO.

        Args:
            endpoint: URL of the server.
            where: the server in words.
            timeout_s: what each step of it may take.

        Raises:
            NotStreamError: the server doesn't speak this wire.
            UnavailableError: it cannot be reached.
            ConfigurationError: a certificate cannot be used.
        """
        try:
            sock = self._connect(place_of(endpoint), timeout_s, is_tls=urls.is_tls(endpoint))
        except OSError as error:
            raise unreachable(where, error) from error
        connection = BlockingConnection(sock)
        try:
            connection.greet(timeout_s)
        except TimeoutError:
            connection.close()
            raise unheard(where, timeout_s) from None
        except (StreamProtocolError, OSError) as error:
            connection.close()
            raise refused(where, error, leaving=connection.calls.leaving) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, place: Place, timeout_s: float, *, is_tls: bool) -> socket.socket:
        if is_tls and self._context is None:
            self._context = self._tls.context(PROTOCOLS)
        if place.path:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(timeout_s)
                sock.connect(place.path)
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((place.host, place.port), timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if is_tls:
                assert self._context is not None
                sock = self._context.wrap_socket(sock, server_hostname=place.host)
        except BaseException:
            sock.close()
            raise
        return sock
