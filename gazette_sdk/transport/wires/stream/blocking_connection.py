"""One connection of the stream transport for plain code, and the append on it.

A connection is a socket that blocks its caller. It has the same pure machines as
:class:`~gazette_sdk.transport.wires.stream.connection.Connection`. It belongs to one thread at a
time, and carries one call at a time. Nothing reads it between calls: what the server sent meanwhile
is read when it is taken again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from gazette_sdk.adaptive_spin import SpinningPoll
from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import (
    PING_AFTER_S,
    ClientCalls,
    ClientEvent,
    GoAway,
    HelloReceived,
    Item,
    Liveness,
    Ping,
    Status,
    Verdict,
)
from gazette_sdk.protocol.stream_frames import PREFACE, FrameBuffer
from gazette_sdk.transport.target import Destination
from gazette_sdk.transport.wires.base import BlockingCall
from gazette_sdk.transport.wires.stream.call import Call, Ended, check_alpn, malformed, no_response

if TYPE_CHECKING:
    from gazette_sdk.transport.wires.stream.blocking import BlockingClient

__all__ = ["BlockingConnection", "StreamBlockingCall"]

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
        liveness: clock of the server's silence during a call.
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
        "liveness",
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
        self.liveness = Liveness(0.0)
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
        now = time.monotonic()
        self.liveness.begin(now)
        if self.status is not None and now - self.idle_since < FRESH_S:
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


class StreamBlockingCall(Call, BlockingCall):
    """Append on a blocking connection, which it has for itself. See :class:`BlockingCall`.

    Args:
        client: gets the connection back.
        connection: its own until it is over.
        to: the broker.
        timeout_s: its time limit; 0 for none.
    """

    def __init__(
        self,
        client: BlockingClient,
        connection: BlockingConnection,
        to: Destination,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._connection = connection
        self._to = to
        self._timeout_s = timeout_s
        self._payload: bytes | None = None
        self._expires_at = time.monotonic() + timeout_s if timeout_s else 0.0

    def send(self, data: bytes) -> None:
        """Send the append; if that fails, it is over."""
        self._connection.liveness.sent(len(data))
        try:
            self._connection.send(data)
        except TimeoutError:
            self._fail(Ended.LOST, "the server does not read what is sent")
        except OSError as error:
            self._fail(Ended.LOST, str(error))

    def wait(self, timeout_s: float | None) -> bool:
        """See :class:`BlockingCall`."""
        now = time.monotonic()
        ends_at = None if timeout_s is None else now + timeout_s
        try:
            while not self.over:
                check_at = self._check_at()
                wait_s = (check_at if ends_at is None else min(ends_at, check_at)) - now
                self._receive(max(wait_s, 0.0))
                if self.status is not None:
                    break
                now = time.monotonic()
                self._check(now)
                if ends_at is not None and now >= ends_at:
                    return self.over
        except BaseException:
            self.give_up("its caller was interrupted")
            raise
        return True

    async def finish(self) -> None:
        """See :class:`BlockingCall`."""
        loop = asyncio.get_running_loop()
        try:
            while not self.over:
                if not self._receive(0):
                    await self._readable(loop)
                    self._check(time.monotonic())
        except BaseException:
            self.give_up("it was given up")
            raise

    def response(self) -> pb.AppendResponse:
        """See :class:`BlockingCall`."""
        to = self._to
        if self.status is None or self.status.code:
            self.raise_failure(to)
        if self._payload is None:
            raise no_response(to)
        try:
            return pb.AppendResponse.FromString(self._payload)
        except DecodeError as error:
            raise malformed(to, error) from error

    def interrupt(self) -> None:
        """See :class:`BlockingCall`."""
        self._connection.interrupt()

    def give_up(self, reason: str) -> None:
        """See :class:`BlockingCall`."""
        if not self.over:
            self._fail(Ended.LOST, reason)

    # ------------------------------------------------------------------- parts

    def _receive(self, wait_s: float) -> bool:
        """Take what arrives within a time. Return True if anything did, if only an end."""
        connection = self._connection
        try:
            connection.receive(wait_s)
        except (TimeoutError, BlockingIOError):
            return False
        except StreamProtocolError as error:
            if connection.status is None:
                self._fail(Ended.LOST, f"the server broke the rules of the wire: {error}")
                return True
            # It did so behind the answer, which is good; the connection takes no call any more.
        except OSError as error:
            self._fail(Ended.LOST, str(error))
            return True
        if connection.status is None:
            connection.liveness.heard(time.monotonic())
        else:
            self._payload = connection.payload
            self.status = connection.status
            self._client.give_back(connection)
        return True

    def _check_at(self) -> float:
        """Return when to check for silence and the time limit."""
        deadline = self._connection.liveness.deadline
        return min(deadline, self._expires_at) if self._expires_at else deadline

    def _check(self, now: float) -> None:
        """If it is due: send PING to a silent server or give it up, and keep the time limit."""
        if now < self._check_at() or self.over:
            return
        if self._expires_at and now >= self._expires_at:
            self._fail(Ended.EXPIRED, f"no answer within {self._timeout_s:g} s")
            return
        liveness = self._connection.liveness
        match liveness.check(now):
            case Verdict.DROP:
                silent_s = liveness.silent_s(now)
                self._fail(Ended.LOST, f"the server said nothing for {silent_s:.0f} s")
            case Verdict.PING:
                try:
                    self._connection.send_soon(self._connection.calls.ping(b""))
                except OSError as error:
                    self._fail(Ended.LOST, str(error))

    async def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until something arrived, or a check is due."""
        ready = asyncio.Event()
        descriptor = self._connection.fileno()
        loop.add_reader(descriptor, ready.set)
        try:
            async with asyncio.timeout(max(0.0, self._check_at() - time.monotonic())):
                await ready.wait()
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(descriptor)

    def _fail(self, ended: Ended, reason: str) -> None:
        self.ended = Ended.CLOSED if self._client.is_closed else ended
        self.reason = reason
        self._client.discard(self._connection)
