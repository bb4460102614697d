"""One connection of the stream transport for plain code: a socket that blocks its caller.

It has the same pure machines as :class:`~gazette_sdk.transport.wires.stream.connection.Connection`.
It belongs to one thread at a time, and carries one call at a time. Nothing reads it between calls:
what the server sent meanwhile is read when it is taken again.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from gazette_sdk.errors import StreamProtocolError
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
from gazette_sdk.protocol.stream_liveness import PING_AFTER_S
from gazette_sdk.transport.wires.stream.dialing import (
    TlsContext,
    check_alpn,
    connect_errors,
    hello_errors,
    place_of,
)
from gazette_sdk.transport.wires.stream.spin import SpinningPoll

__all__ = ["BlockingConnection", "dial"]

FRESH_S = 0.001
"""A connection whose last call ended so lately is taken without a check that it lives."""

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

IDLE_READS_MAX = 16
"""A connection is dropped whose server sent more than so many reads' worth between two calls."""


class BlockingConnection:
    """Connection to one server.

    Args:
        sock: connected, in TLS already where that is spoken. Closed with the connection.

    Attributes:
        calls: the state of its calls.
        greeted: the server said HELLO.
        payload: the only response of the call under way, once it came.
        status: its STATUS, once it came.
        reason: what the server said when it went away.
        idle_since: monotonic seconds since which it has no call.
    """

    __slots__ = (
        "_frames",
        "_pending",
        "_poll",
        "_sock",
        "_timeout_s",
        "calls",
        "greeted",
        "idle_since",
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
        self.idle_since = 0.0
        sock.setblocking(False)  # one with a timeout polls before each operation
        self._sock = sock
        self._pending = sock.pending if isinstance(sock, ssl.SSLSocket) else None
        self._frames = FrameBuffer()
        self._timeout_s = 0.0
        self._poll = SpinningPoll(sock.fileno())

    def fileno(self) -> int:
        """Return the descriptor of its socket."""
        return self._sock.fileno()

    def greet(self, timeout_s: float) -> None:
        """Send the preface, and wait for HELLO.

        Raises:
            TimeoutError: it did not come in time.
            StreamProtocolError: something else came.
            OSError: the connection ended.
        """
        ends_at = time.monotonic() + timeout_s
        sock = self._sock
        if isinstance(sock, ssl.SSLSocket):
            check_alpn(sock.selected_alpn_protocol())
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
            timeout_s: time to wait for room; None as long as the last read, or some seconds.

        Raises:
            OSError: the connection ended, or does not take it in time. It may have taken a part.
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
            if now >= ends_at or not self._poll.wait_writable(ends_at - now):
                raise TimeoutError("timed out")

    def send_soon(self, data: bytes) -> None:
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
            timeout_s: time to wait; 0 not at all.

        Raises:
            TimeoutError: nothing came.
            BlockingIOError: only bytes of TLS itself came.
            StreamProtocolError: the server broke the rules. It got GOAWAY.
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
                    self._receive_rare(event)
            if self._frames.error is not None:
                raise self._frames.error
        except StreamProtocolError as error:
            with contextlib.suppress(OSError):  # it may be gone already
                self.send_soon(self.calls.goaway(str(error)))
            raise

    def _read(self, timeout_s: float) -> int:
        """Read into the memory of frames. Return the number of bytes."""
        self._timeout_s = timeout_s
        is_there = self._pending is not None and self._pending() > 0
        if not is_there and not self._poll.wait_readable(timeout_s):
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

    def _receive_rare(self, event: ClientEvent) -> None:
        """Take an event that belongs to no call."""
        if isinstance(event, Ping):
            self.send_soon(self.calls.pong(event.payload))
        elif isinstance(event, GoAway):
            self.reason = f"it went away: {event.reason}"
        elif isinstance(event, HelloReceived):
            self.greeted = True

    def take(self) -> bool:
        """Make it ready for a call. Return True if it can have one.

        What the server sent since the last call is read now: perhaps it is gone.
        """
        if self.status is not None and time.monotonic() - self.idle_since < FRESH_S:
            self.payload = self.status = None
            return True
        for _ in range(IDLE_READS_MAX):
            if not self._poll.is_readable():
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
        """End it, from any thread, while another one waits for it."""
        with contextlib.suppress(OSError):  # it has ended already
            # Not that of SSLSocket, which is not safe while another thread reads.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """End it."""
        self._sock.close()


def dial(endpoint: str, where: str, tls: TlsContext, timeout_s: float) -> BlockingConnection:
    """Open a connection, up to the server's HELLO.

    Args:
        endpoint: URL of the server.
        where: the server in words.
        tls: for endpoints of scheme ``https``.
        timeout_s: time limit of each step.

    Raises:
        NotStreamError: the server does not speak this wire.
        UnavailableError: it cannot be reached.
        ConfigurationError: a certificate cannot be used.
    """
    with connect_errors(where):
        connection = BlockingConnection(_connect(endpoint, tls.of(endpoint), timeout_s))
    try:
        with hello_errors(where, timeout_s, connection.calls):
            connection.greet(timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(endpoint: str, tls: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    place = place_of(endpoint)
    if place.path:
        sock = socket.socket(socket.AF_UNIX)
    else:
        sock = socket.create_connection((place.host, place.port), timeout_s)
    try:
        if place.path:
            sock.settimeout(timeout_s)
            sock.connect(place.path)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=place.host)
    except BaseException:
        sock.close()
        raise
    return sock
