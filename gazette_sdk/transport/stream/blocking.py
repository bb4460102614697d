"""Appends over the stream transport from plain code, on the caller's own thread.

A hop to the event loop's thread and back costs several times as much as the append itself. So there
are connections for plain code: one send and one read for an append. Any thread may make one. It has
a connection to itself meanwhile, and idle connections are kept.

An append that may have been sent is never repeated here.

A :class:`BlockingConnection` is a socket that blocks its caller. It has the same pure machines as
:class:`~gazette_sdk.transport.stream.connection.Connection`. It belongs to one thread at a time,
and carries one call at a time. Nothing reads it between calls: what the server sent meanwhile is
read when it is taken again.

:func:`dial` and :func:`dial_blocking` open connections, up to the server's HELLO. A server that
speaks the stream transport says HELLO as soon as it has seen the preface. One that does not speak
it closes the connection, answers in another protocol (HTTP, mostly), or waits for what it would
understand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import DecodeError

from gazette_sdk.adaptive_spin import SpinningPoll
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    StreamProtocolError,
    UnavailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import names as urls
from gazette_sdk.protocol.stream_calls import (
    PING_AFTER_S,
    ClientCalls,
    ClientEvent,
    GoAway,
    HelloReceived,
    Item,
    Liveness,
    LivenessCheck,
    Ping,
    Status,
)
from gazette_sdk.protocol.stream_frames import PREFACE, FrameBuffer
from gazette_sdk.retries import DialPolicy
from gazette_sdk.transport.stream.connection import (
    ALPN,
    Call,
    EndReason,
    Head,
    check_alpn,
    malformed,
    no_response,
    too_long,
)
from gazette_sdk.transport.wire import BlockingCall, Destination, Tls

if TYPE_CHECKING:
    from gazette_sdk.transport.stream.connection import Connection


FRESH_S = 0.001
"""A connection whose last call ended so lately is taken without a check that it lives."""

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

IDLE_READS_MAX = 16
"""A connection is dropped whose server sent more than so many reads' worth between two calls."""


class LostConnectionError(ConnectionError):
    """A connection has ended, or its server does not read.

    Calls end by this error alone: a TimeoutError or another OSError may be that of a signal
    handler, which interrupts a wait.
    """


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
            self.receive(left_s)
            if self.calls.leaving:
                raise ConnectionError(self.reason)

    def send(self, data: bytes | memoryview, timeout_s: float | None = None) -> None:
        """Send all of it.

        Args:
            data: the bytes.
            timeout_s: time to wait for room; None as long as the last read, or some seconds.

        Raises:
            LostConnectionError: it ended, or does not take the bytes in time. It may have taken a
                part.
        """
        ends_at = 0.0
        while True:
            try:
                sent = self._sock.send(data)
            except _WOULD_BLOCK:
                sent = 0
            except OSError as error:
                raise LostConnectionError(str(error)) from error
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
            now = time.monotonic()
            if timeout_s is None:
                timeout_s = self._timeout_s or PING_AFTER_S
            ends_at = ends_at or now + timeout_s
            if now >= ends_at or not self._poll.wait_writable(ends_at - now):
                raise LostConnectionError("the server does not read what is sent")

    def send_soon(self, data: bytes) -> None:
        """Send a few bytes, waiting no longer than reads do.

        Raises:
            LostConnectionError: it ended, or has no room for them.
        """
        self.send(data, self._timeout_s)

    def receive(self, timeout_s: float) -> bool:
        """Read once, and take what came.

        Args:
            timeout_s: time to wait; 0 not at all.

        Returns:
            False if nothing came, or only bytes of TLS itself.

        Raises:
            StreamProtocolError: the server broke the rules. It got GOAWAY.
            LostConnectionError: the connection ended.
        """
        count = self._read(timeout_s)
        if not count:
            return False
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
            with contextlib.suppress(LostConnectionError):  # it may be gone already
                self.send_soon(self.calls.goaway(str(error)))
            raise
        return True

    def _read(self, timeout_s: float) -> int:
        """Read into the memory of frames. Return the number of bytes."""
        self._timeout_s = timeout_s
        is_there = self._pending is not None and self._pending() > 0
        if not is_there and not self._poll.wait_readable(timeout_s):
            return 0
        try:
            count = self._sock.recv_into(self._frames.get_buffer())
        except _WOULD_BLOCK:
            return 0
        except OSError as error:
            raise LostConnectionError(self.reason or str(error)) from error
        if not count:
            raise LostConnectionError(self.reason or "the server closed the connection")
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
            except (LostConnectionError, StreamProtocolError):
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
        except LostConnectionError as error:
            self._fail(EndReason.LOST, str(error))

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
            self._fail(EndReason.LOST, reason)

    # ------------------------------------------------------------------- parts

    def _receive(self, wait_s: float) -> bool:
        """Take what arrives within a time. Return True if anything did, if only an end."""
        connection = self._connection
        try:
            if not connection.receive(wait_s):
                return False
        except StreamProtocolError as error:
            if connection.status is None:
                self._fail(EndReason.LOST, f"the server broke the rules of the wire: {error}")
                return True
            # It did so after the answer, which is good; the connection takes no call any more.
        except LostConnectionError as error:
            self._fail(EndReason.LOST, str(error))
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
            self._fail(EndReason.EXPIRED, f"no answer within {self._timeout_s:g} s")
            return
        liveness = self._connection.liveness
        match liveness.check(now):
            case LivenessCheck.DROP:
                silent_s = liveness.silent_s(now)
                self._fail(EndReason.LOST, f"the server said nothing for {silent_s:.0f} s")
            case LivenessCheck.PING:
                try:
                    self._connection.send_soon(self._connection.calls.ping(b""))
                except LostConnectionError as error:
                    self._fail(EndReason.LOST, str(error))

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

    def _fail(self, ended: EndReason, reason: str) -> None:
        self.ended = EndReason.CLOSED if self._client.is_closed else ended
        self.reason = reason
        self._client.discard(self._connection)


_log = logging.getLogger(__name__)


PROTOCOLS = (ALPN, "h2")
"""Names to offer in TLS: a server that does not speak the first shows it by the second."""

_CLOSED = "the connection was closed, as by a server that does not serve TLS"
"""Text of an error without one: asyncio raises it for connections that end in the handshake."""


class NotStreamError(UnavailableError):
    """Something answers at the address, and does not speak the stream transport."""


class TlsContext:
    """TLS context of one client, made when it is first needed, and again when a file has changed.

    If a changed file cannot be used, the earlier context stays in use.

    Args:
        tls: certificates, for endpoints of scheme ``https``.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._stamps: tuple[int, ...] = ()

    def of(self, endpoint: str) -> ssl.SSLContext | None:
        """Return the context for connections to an endpoint; None if TLS is not spoken there.

        Raises:
            ConfigurationError: a certificate cannot be used.
        """
        if not urls.is_tls(endpoint):
            return None
        stamps = self._tls.stamps()
        if self._context is None or stamps != self._stamps:
            try:
                self._context = self._tls.context(PROTOCOLS)
            except ConfigurationError as error:
                if self._context is None:
                    raise
                _log.error("the earlier certificates stay in use: %s", error)
            self._stamps = stamps
        return self._context


async def dial(
    endpoint: str,
    where: str,
    tls: TlsContext,
    hello_timeout_s: float,
    make: Callable[[], Connection],
    *,
    has_spoken: bool = False,
) -> Connection:
    """Open a connection on the running event loop, up to the server's HELLO.

    Args:
        endpoint: URL of the server.
        where: the server in words.
        tls: for endpoints of scheme ``https``.
        hello_timeout_s: time within which a connected server must say HELLO.
        make: makes the connection.
        has_spoken: True if the server said HELLO before: if it is silent now, it is frozen.

    Raises:
        NotStreamError: the server does not speak this wire.
        UnavailableError: it cannot be reached, or is frozen.
        ConfigurationError: a certificate cannot be used.
    """
    with _connect_errors(where):
        connection = await _connect(endpoint, tls.of(endpoint), make)
    try:
        with _hello_errors(where, hello_timeout_s, connection.calls, has_spoken=has_spoken):
            async with asyncio.timeout(hello_timeout_s):
                await asyncio.shield(connection.greeted)
    except BaseException:
        connection.drop("it was given up before HELLO")
        with contextlib.suppress(asyncio.CancelledError):
            await connection.closed()
        raise
    return connection


def dial_blocking(
    endpoint: str,
    where: str,
    tls: TlsContext,
    timeout_s: float,
    make: Callable[[socket.socket], BlockingConnection],
) -> BlockingConnection:
    """Open a blocking connection, up to the server's HELLO.

    Args:
        endpoint: URL of the server.
        where: the server in words.
        tls: for endpoints of scheme ``https``.
        timeout_s: time limit of each step.
        make: makes the connection.

    Raises:
        NotStreamError: the server does not speak this wire.
        UnavailableError: it cannot be reached.
        ConfigurationError: a certificate cannot be used.
    """
    with _connect_errors(where):
        connection = make(_connect_blocking(endpoint, tls.of(endpoint), timeout_s))
    try:
        with _hello_errors(where, timeout_s, connection.calls):
            connection.greet(timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


class _Place(NamedTuple):
    """Address of a socket.

    Attributes:
        path: of a Unix socket; empty for TCP.
        host: name or number.
        port: of TCP.
    """

    path: str
    host: str = ""
    port: int = 0


def _place_of(endpoint: str) -> _Place:
    """Return the address of a valid endpoint URL."""
    address = urls.dial_address(endpoint)
    if address.startswith("unix:"):
        return _Place(address.removeprefix("unix://"))
    host, _, port = address.rpartition(":")
    return _Place("", host.removeprefix("[").removesuffix("]"), int(port))


class HandshakeClosedError(UnavailableError):
    """The server closed the connection in the handshake of TLS."""


_UNTRUSTED = (
    "give the certificate of the authority that signed it: trusted_ca_file, "
    "--broker.trusted-ca-file or BROKER_TRUSTED_CA_FILE"
)
_OTHER_NAME = "connect to a name that the certificate has, or have the server use another one"
_REMEDIES = {
    9: "set the clock of this machine: the certificate is not valid yet",
    10: "renew the certificate of the server",
    62: _OTHER_NAME,
    64: _OTHER_NAME,
}
"""Remedies by the codes with which OpenSSL refuses a certificate."""


@contextlib.contextmanager
def _connect_errors(where: str) -> Iterator[None]:
    """Turn errors of opening a socket to a broker into ``UnavailableError``."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        remedy = _REMEDIES.get(error.verify_code, _UNTRUSTED)
        raise UnavailableError(f"cannot agree on TLS with {where}: {error}; {remedy}") from error
    except ssl.SSLError as error:
        raise UnavailableError(f"cannot agree on TLS with {where}: {error}") from error
    except ConnectionRefusedError as error:
        raise UnavailableError(f"cannot connect to {where}: Connection refused") from error
    except OSError as error:
        if reason := error.strerror or str(error):
            raise UnavailableError(f"cannot connect to {where}: {reason}") from error
        raise HandshakeClosedError(f"cannot connect to {where}: {_CLOSED}") from error


@contextlib.contextmanager
def _hello_errors(
    where: str, timeout_s: float, calls: ClientCalls, *, has_spoken: bool = False
) -> Iterator[None]:
    """Turn errors of waiting for HELLO into ``UnavailableError``.

    It is a :class:`NotStreamError`, unless the server said GOAWAY, or is silent and has spoken the
    wire before.
    """
    try:
        yield
    except TimeoutError:
        kind = UnavailableError if has_spoken else NotStreamError
        raise kind(f"{where} did not say HELLO within {timeout_s:g} s") from None
    except (StreamProtocolError, OSError) as error:
        if calls.leaving and isinstance(error, ConnectionError):
            raise UnavailableError(f"{where}: {error}") from error
        raise NotStreamError(f"{where} does not speak the stream transport: {error}") from error


async def _connect(
    endpoint: str, tls: ssl.SSLContext | None, make: Callable[[], Connection]
) -> Connection:
    loop = asyncio.get_running_loop()
    place = _place_of(endpoint)
    if place.path:
        _, connection = await loop.create_unix_connection(make, place.path)
        return connection
    more: dict[str, Any] = {"ssl": tls, "server_hostname": place.host} if tls else {}
    failure: OSError | None = None
    for number in await _addresses(place.host, place.port):
        try:
            _, connection = await loop.create_connection(make, number, place.port, **more)
        except OSError as error:
            failure = failure or error
        else:
            return connection
    raise failure or OSError(f"{place.host} has no address")


async def _addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host, in the order in which to try them."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except RuntimeError:
        # The program is ending, and no thread can be had. What it published last is sent
        # nevertheless; nothing else waits for the loop any more.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _connect_blocking(endpoint: str, tls: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    place = _place_of(endpoint)
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


DIAL_TIMEOUT_S = 1.0
"""Time limit of each step of a dial. The event loop's dials take longer, and serve who fails
here."""

REDIAL_AFTER_S = 0.5
"""Time for which a server that could not be dialled is left to the event loop. Doubles each
time."""

REDIAL_AFTER_MAX_S = 60.0

IDLE_MAX = 8
"""Idle connections to one server that are kept."""

IDLE_MAX_S = 30.0
"""A connection that was idle for so long is closed when the next one becomes idle."""


class BlockingClient:
    """Connections for plain code, to all servers. Safe to use from any thread.

    A forked child begins with none: its parent's are untouched.

    Args:
        tls: for endpoints of scheme ``https``.
        call_timeout_s: time limit of an append; 0 for none. The server has it, too.
    """

    def __init__(self, tls: TlsContext, *, call_timeout_s: float = 0.0) -> None:
        self.is_closed = False
        self._tls = tls
        self._call_timeout_s = call_timeout_s
        self._head = Head(timeout_s=call_timeout_s)
        self._lock = threading.RLock()  # a signal handler may publish within
        self._idle: dict[str, list[BlockingConnection]] = {}
        self._busy: dict[BlockingConnection, str] = {}
        self._policies: dict[str, DialPolicy] = {}
        self._sweep_at = 0.0
        _clients.add(self)

    def append(self, to: Destination, opening: bytes, content: bytes) -> StreamBlockingCall | None:
        """See :attr:`~gazette_sdk.transport.wire.Wire.append_blocking`."""
        connection = self._take(to)
        if connection is None:
            return None
        try:
            _, data = connection.calls.append(opening, content, self._head.encoded(to))
            call = StreamBlockingCall(self, connection, to, self._call_timeout_s)
            call.send(data)
        except StreamProtocolError as error:
            self.give_back(connection)
            raise too_long(to, error) from error
        except BaseException:
            self.discard(connection)
            raise
        return call

    def prepare(self, to: Destination) -> None:
        """See :attr:`~gazette_sdk.transport.wire.Wire.prepare_blocking`."""
        endpoint = to.peer.endpoint
        with self._lock:
            if self.is_closed:
                raise _closed_error(to)
            policy = self._policies.get(endpoint)
            if policy is not None and not policy.may_dial(time.monotonic()):
                raise UnavailableError(f"{policy.failure}", journal=to.journal)
            count = len(self._idle.get(endpoint, ())) + list(self._busy.values()).count(endpoint)
        if count < IDLE_MAX:
            self.give_back(self._dial(to))

    def close(self) -> None:
        """Close all connections. Appends under way end as closed."""
        with self._lock:
            self.is_closed = True
            idle = [each for kept in self._idle.values() for each in kept]
            busy = list(self._busy)
            self._idle.clear()
        for connection in idle:
            connection.close()
        for connection in busy:
            connection.interrupt()

    # ------------------------------------------------------------ by its calls

    def give_back(self, connection: BlockingConnection) -> None:
        """Keep the connection of a call that has ended."""
        now = connection.idle_since = time.monotonic()
        closing: Sequence[BlockingConnection] = ()
        with self._lock:
            endpoint = self._busy.pop(connection, "")
            if endpoint and not self.is_closed and connection.calls.may_begin:
                kept = self._idle.setdefault(endpoint, [])
                kept.append(connection)
                if len(kept) > IDLE_MAX:
                    closing = (kept.pop(0),)
            else:
                closing = (connection,)
            if now >= self._sweep_at:
                self._sweep_at = now + IDLE_MAX_S
                closing = (*closing, *self._sweep(now))
        for each in closing:
            each.close()

    def discard(self, connection: BlockingConnection) -> None:
        """Close a connection which takes no further call."""
        with self._lock:
            self._busy.pop(connection, None)
        connection.close()

    # ------------------------------------------------------------------- parts

    def _take(self, to: Destination) -> BlockingConnection | None:
        endpoint = to.peer.endpoint
        while True:
            with self._lock:
                if self.is_closed:
                    raise _closed_error(to)
                try:
                    connection = self._idle[endpoint].pop()
                except LookupError:  # none is idle
                    return None
                self._busy[connection] = endpoint
            if connection.take():
                return connection
            self.discard(connection)

    def _dial(self, to: Destination) -> BlockingConnection:
        endpoint = to.peer.endpoint
        try:
            connection = dial_blocking(
                endpoint, to.where, self._tls, DIAL_TIMEOUT_S, BlockingConnection
            )
        except (UnavailableError, ConfigurationError) as error:
            with self._lock:
                policy = self._policies.setdefault(
                    endpoint, DialPolicy(REDIAL_AFTER_S, REDIAL_AFTER_MAX_S)
                )
                policy.failed(time.monotonic(), error)
            raise
        with self._lock:
            self._policies.pop(endpoint, None)
            if not self.is_closed:
                self._busy[connection] = endpoint
                return connection
        connection.close()
        raise _closed_error(to)

    def _sweep(self, now: float) -> list[BlockingConnection]:
        """Take out what is idle for long. Under the lock."""
        old = []
        for endpoint, kept in list(self._idle.items()):
            old += [each for each in kept if now - each.idle_since >= IDLE_MAX_S]
            kept[:] = [each for each in kept if now - each.idle_since < IDLE_MAX_S]
            if not kept:
                del self._idle[endpoint]
        for endpoint, policy in list(self._policies.items()):
            if policy.may_dial(now - REDIAL_AFTER_MAX_S):
                del self._policies[endpoint]
        return old

    def reset_after_fork(self) -> None:
        """Release the connections in a forked child: they are the parent's.

        Another thread of the parent may have held the lock.
        """
        self._lock = threading.RLock()
        for connection in [*self._busy, *(each for kept in self._idle.values() for each in kept)]:
            connection.close()  # this process' descriptor of it; nothing is sent
        self._idle.clear()
        self._busy.clear()


def _closed_error(to: Destination) -> ClosedError:
    return ClosedError("the transport was closed; connect again", journal=to.journal)


_clients: weakref.WeakSet[BlockingClient] = weakref.WeakSet()


def _reset_after_fork() -> None:
    for client in list(_clients):
        client.reset_after_fork()


os.register_at_fork(after_in_child=_reset_after_fork)
