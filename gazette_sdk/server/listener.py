"""Listener: the public port of a server, with every protocol on one socket.

The protocol of a new connection is determined by its first bytes, or by ALPN of TLS. Then the
connection, with those bytes, is given to that protocol's own asyncio protocol object, and the
listener costs it nothing afterwards. A connection of an unknown protocol, or without any bytes for
some seconds, is closed.

:class:`PeerLimits` bounds connections and calls of each peer, which is an IP address.
:class:`UnknownShare` bounds the processor time of all unknown clients, which have no good token or
have not shown it yet.

:class:`Acceptor` takes the place of asyncio's server, which accepts all connections that wait in
one turn of the event loop. When the process has no free descriptor, that server also logs a
traceback and starts a timer for each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

from gazette_sdk.errors import CallError, ConfigurationError

_MAPPED = "::ffff:"  # begins an IPv4 address in the form of IPv6

PEERS_CHECKED = 1024
"""Number of peers from which on those without connections are forgotten."""


def peer_of(address: Any) -> str:
    """Return the IP address of a socket's peer; empty for a Unix socket."""
    return address[0].removeprefix(_MAPPED) if isinstance(address, tuple) and address else ""


class PeerLimits:
    """Counts of connections and calls by peer. Peers without an address have no limits.

    Args:
        connections_max: greatest number of connections of one peer; 0 for no limit.
        calls_max: greatest number of concurrent calls of one peer; 0 for no limit.
        calls_remedy: end of the error of one call more.

    Attributes:
        calls_max: as given.
    """

    def __init__(
        self,
        *,
        connections_max: int = 0,
        calls_max: int = 0,
        calls_remedy: str = "or raise --broker.max-peer-calls",
    ) -> None:
        self._connections_max = connections_max
        self.calls_max = calls_max
        self._calls_remedy = calls_remedy
        self._connections: dict[str, weakref.WeakSet[asyncio.BaseTransport]] = {}
        self._calls: Counter[str] = Counter()

    def connected(self, transport: asyncio.BaseTransport) -> str:
        """Count a connection. Return the reason if it is refused, else the empty string."""
        peer = peer_of(transport.get_extra_info("peername"))
        if not self._connections_max or not peer:
            return ""
        if len(self._connections) >= PEERS_CHECKED:
            self._connections = {ip: open_ for ip, open_ in self._connections.items() if open_}
        found = self._connections.setdefault(peer, weakref.WeakSet())
        if len(found) >= self._connections_max:
            for other in [other for other in found if other.is_closing()]:
                found.discard(other)
        if len(found) >= self._connections_max:
            return (
                f"{peer} has {self._connections_max} connections already; close some, or raise "
                "--broker.max-peer-connections"
            )
        found.add(transport)
        return ""

    @contextlib.contextmanager
    def calling(self, peer: str) -> Iterator[None]:
        """Count a call while the context is open.

        Raises:
            CallError: RESOURCE_EXHAUSTED: the peer has too many calls.
        """
        if not self.calls_max or not peer:
            yield
            return
        if self._calls[peer] >= self.calls_max:
            raise CallError(
                f"{peer} has {self.calls_max} calls in progress already; wait for some, "
                f"{self._calls_remedy}",
                code="RESOURCE_EXHAUSTED",
            )
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]


UNKNOWN_SHARE = 0.2
"""Part of a core that unknown clients get."""

UNKNOWN_CREDIT_S = 0.2
"""Processor time that they may use at once, after a pause: for probes of health, and for clients
that all connect again when a server has started."""

UNKNOWN_DEBT_S = 0.5
"""Greatest processor time that is held against them, so that a flood soon is forgotten."""


class UnknownCost(float, Enum):
    """Processor time of an unknown client's steps, in seconds, as measured."""

    CONNECTION = 0.00025
    GRPC_CONNECTION = 0.0005
    GRPC_CALL = 0.001
    HTTP_REQUEST = 0.0006
    STREAM_FRAME = 0.00002


class UnknownShare:
    """Share of a core that clients without a good token get together.

    Their steps are counted with fixed costs. Once they have used more than their share, connections
    are accepted slowly, and their requests and calls wait. What a client with a good token cost
    before that was known is given back.

    Args:
        now: monotonic time in seconds.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._debt_s = -UNKNOWN_CREDIT_S
        self._at_s = now()

    def spend(self, cost_s: float) -> None:
        """Count a step; give it back if its cost is negative."""
        debt_s = self._debt_now() + cost_s
        self._debt_s = max(-UNKNOWN_CREDIT_S, min(debt_s, UNKNOWN_DEBT_S))

    @property
    def delay_s(self) -> float:
        """Seconds until the next step may be made."""
        return max(0.0, self._debt_now() / UNKNOWN_SHARE)

    def _debt_now(self) -> float:
        now_s = self._now()
        self._debt_s = max(-UNKNOWN_CREDIT_S, self._debt_s - (now_s - self._at_s) * UNKNOWN_SHARE)
        self._at_s = now_s
        return self._debt_s


def http_refusal(reason: str) -> bytes:
    """Return the response that refuses an HTTP/1 connection, or one of gRPC.

    gRPC clients report the status of such a response, and dial again with a growing pause. After
    HTTP/2 frames that begin with SETTINGS they dial again at once, and without end.
    """
    body = reason.encode() + b"\n"
    return (
        b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: text/plain; charset=utf-8\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body


_log = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 4
"""Connections accepted in one turn of the event loop. Thousands of new connections must not keep
the loop from those that are served."""

PACE_S = 0.004
"""Pause after so many, if more may wait: at most 1,000 connections are made per second. Clients of
the stream transport wait one second for the answer to their preface, before they choose gRPC."""

SLOW_PACE_S = 0.03
"""The longest such pause, while unknown clients have used more than their share of a core."""

RETRY_S = 0.5
"""Pause after the process was out of descriptors or memory. Connections wait in the kernel."""

WARN_PERIOD_S = 60.0
"""Period of the warnings while this continues."""

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accepts the connections of one socket, from its construction to :meth:`close`.

    Args:
        listening: the socket; closed by :meth:`close`.
        factory: makes the protocol object of a connection.
        tls: TLS to terminate on its connections.
        handshake_timeout_s: bound of the handshake of TLS.
        unknown: processor time of unknown clients.
    """

    def __init__(
        self,
        listening: socket.socket,
        factory: Callable[[], asyncio.BaseProtocol],
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
        unknown: UnknownShare,
    ) -> None:
        self._unknown = unknown
        self._listening = listening
        self._factory = factory
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s if tls is not None else None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._quiet_until_s = 0.0
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept no further connections. Those that were accepted are still made."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._warn(error)
                self._pause(RETRY_S)
                return
            connection.setblocking(False)
            self._unknown.spend(UnknownCost.CONNECTION)
            task = self._loop.create_task(self._make(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._pause(max(PACE_S, min(self._unknown.delay_s, SLOW_PACE_S)))

    def _pause(self, pause_s: float) -> None:
        """Accept again after a pause. The kernel reports the socket as ready all the time."""
        self._loop.remove_reader(self._listening)
        self._retry = self._loop.call_later(
            pause_s, self._loop.add_reader, self._listening, self._accept
        )

    def _warn(self, error: OSError) -> None:
        now_s = self._loop.time()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + WARN_PERIOD_S
            _log.warning(
                "no connection can be accepted (%s); raise the limit of open files (ulimit -n), or "
                "stop the clients that hold too many connections",
                error.strerror,
            )

    async def _make(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._factory,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
        except (OSError, TimeoutError) as error:  # errors of TLS are among the former
            _log.debug("a connection was not made: %s", error)
            connection.close()


OPENING_TIMEOUT_S = 5.0
"""Seconds within which a new connection has to finish TLS and send its first bytes: less than the
bound of a graceful stop, so that silent connections never delay one."""

REFUSED_TIMEOUT_S = 1.0
"""Seconds within which a connection beyond its peer's limit has to send its first bytes, so that
the refusal can be written in its protocol."""

OPENING_BYTES_MAX = 16 << 10
"""Greatest first read of a connection."""

BACKLOG = 1024
"""Connections that the kernel queues until they are accepted."""

BIND_TRIES = 8
"""Attempts to find a port that is free on both loopback addresses."""

HTTP_OPENINGS = tuple(
    f"{method} ".encode()
    for method in ("GET", "PUT", "HEAD", "POST", "DELETE", "OPTIONS", "TRACE", "CONNECT")
)
"""First bytes of HTTP/1 connections. Connections with other methods (PATCH) are closed, as by
every Gazette server."""

ProtocolFactory = Callable[[], asyncio.Protocol | asyncio.BufferedProtocol]


@dataclass(frozen=True, slots=True)
class PortProtocol:
    """Protocol of the public port.

    Attributes:
        name: its name in logs.
        openings: first bytes of its connections; none may be a prefix of another protocol's.
        factory: makes the protocol object of a connection. Its ``connection_made`` is called,
            and then it gets all bytes read so far, the opening included.
        alpn: its name in TLS. A connection that agreed on it needs no opening.
        refusal: makes the bytes that refuse a connection, with a reason.
    """

    name: str
    openings: tuple[bytes, ...]
    factory: ProtocolFactory
    alpn: str | None = None
    refusal: Callable[[str], bytes] | None = None


def find_protocol(
    opening: bytes, protocols: Iterable[PortProtocol]
) -> tuple[PortProtocol | None, bool]:
    """Find the protocol of a connection by its first bytes.

    Returns:
        the protocol, if it is known by now, and True if more bytes may determine one.
    """
    undecided = False
    for protocol in protocols:
        for start in protocol.openings:
            if opening.startswith(start):
                return protocol, False
            undecided = undecided or start.startswith(opening)
    return None, undecided


class Listener:
    """Bound socket (or the two of both loopback addresses) with its protocols.

    Binding and serving are separate steps: the port is known, and no one else can serve on it, as
    soon as it is bound. Connections are refused until :meth:`start`. Those of a Unix socket wait.

    Args:
        tls: TLS to terminate on TCP connections. Unix sockets never use it.
        limits: limits of the connections of each peer.
        unknown: processor time of unknown clients.
    """

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        limits: PeerLimits | None = None,
        unknown: UnknownShare | None = None,
    ) -> None:
        self.limits = limits or PeerLimits()
        self.port: int | None = None
        self.path: Path | None = None
        self._tls = tls
        self._unknown = unknown or UnknownShare()
        self._protocols: list[PortProtocol] = []
        self._sockets: list[socket.socket] = []
        self._acceptors: list[Acceptor] = []
        self._opening: set[_Opening] = set()
        self._is_closed = False

    def add(self, protocol: PortProtocol) -> None:
        """Add a protocol, from the next connection on."""
        self._protocols.append(protocol)

    # ------------------------------------------------------------------ binding

    def bind(self, host: str, port: int) -> int:
        """Bind a TCP port.

        Args:
            host: address or name to bind; ``localhost`` means both loopback addresses, an
                empty string all interfaces.
            port: port number, 0 for any free one.

        Returns:
            The port.

        Raises:
            ConfigurationError: it cannot be bound, above all because it is in use.
        """
        for last in (False,) * (BIND_TRIES - 1) + (True,):
            try:
                self.port = self._bind_all(_addresses(host), port)
            except OSError as error:
                self.close()
                if error.errno == errno.EADDRINUSE and port == 0 and not last:
                    continue
                raise ConfigurationError(_why_not_bound(error, host, port)) from error
            return self.port
        raise AssertionError("the last try returns or raises")

    def _bind_all(self, hosts: list[str], port: int) -> int:
        for position, host in enumerate(hosts):
            family, _, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            try:
                # Only sockets which name TCP get TCP_NODELAY of asyncio; without it the answers of
                # calls that share a connection wait for each other's delayed acknowledgements.
                bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            except OSError:
                if position == 0:
                    raise
                continue  # a machine without IPv6
            self._sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            try:
                bound.bind(address)
                # Until it listens, another socket with this option could be bound to the port, too.
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            except OSError as error:
                if position == 0 or error.errno == errno.EADDRINUSE:
                    raise
                self._sockets.remove(bound)  # a machine whose IPv6 has no loopback address
                bound.close()
                continue
            bound.setblocking(False)
            port = bound.getsockname()[1]
        return port

    def bind_unix(self, path: Path) -> None:
        """Bind a Unix socket; the socket of a process that is gone is replaced.

        Raises:
            ConfigurationError: another process serves on it, or it cannot be made.
        """
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if path.is_socket():
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                    try:
                        probe.connect(str(path))
                    except ConnectionRefusedError:
                        path.unlink()
            bound.bind(str(path))
            bound.listen(BACKLOG)
        except OSError as error:
            bound.close()
            raise ConfigurationError(
                f"the socket {path} cannot be bound: {error.strerror or error}; stop the process "
                "that serves on it, or choose another path"
            ) from error
        bound.setblocking(False)
        self._sockets.append(bound)
        self.path = path

    # ------------------------------------------------------------------ serving

    async def start(self) -> None:
        """Begin to listen, and to accept connections.

        Raises:
            ConfigurationError: another process bound the port, too, and serves on it.
        """
        if self.path is None:
            for bound in self._sockets:
                try:
                    # Connections inherit it: the next process need not wait for their ends.
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    bound.listen(BACKLOG)
                except OSError as error:
                    host, port = bound.getsockname()[:2]
                    self.close()
                    raise ConfigurationError(_why_not_bound(error, host, port)) from error
        self._acceptors += [
            Acceptor(
                bound,
                lambda: _Opening(self),
                tls=self._tls if self.path is None else None,
                handshake_timeout_s=OPENING_TIMEOUT_S,
                unknown=self._unknown,
            )
            for bound in self._sockets
        ]
        self._sockets.clear()

    def close(self) -> None:
        """Accept no further connections, and abort those of which no protocol is known yet."""
        self._is_closed = True
        for acceptor in self._acceptors:
            acceptor.close()
        self._acceptors.clear()
        for bound in self._sockets:
            bound.close()
        self._sockets.clear()
        for opening in tuple(self._opening):
            opening.abort()
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            self.path = None


_opening_bytes = memoryview(bytearray(OPENING_BYTES_MAX))
"""Bytes that a connection without a protocol receives, taken within one callback."""


class _Opening(asyncio.BufferedProtocol):
    """Connection whose protocol is not known yet."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._seen = b""
        self._refusal = ""
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._listener._opening.add(self)  # noqa: SLF001 - of this module
        self._refusal = self._listener.limits.connected(transport)
        timeout_s = REFUSED_TIMEOUT_S if self._refusal else OPENING_TIMEOUT_S
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.abort)
        if self._listener._is_closed:  # noqa: SLF001 - of this module
            self.abort()
            return
        tls = transport.get_extra_info("ssl_object")
        agreed = tls.selected_alpn_protocol() if tls is not None else None
        if agreed is not None:
            for offered in self._listener._protocols:  # noqa: SLF001 - of this module
                if offered.alpn == agreed:
                    self._hand_over(offered)
                    return

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - its signature
        return _opening_bytes

    def buffer_updated(self, nbytes: int) -> None:
        self._seen += _opening_bytes[:nbytes]
        found, undecided = find_protocol(self._seen, self._listener._protocols)  # noqa: SLF001 - as above
        if found is not None:
            self._hand_over(found)
        elif not undecided:
            _log.debug(
                "closing a connection of unknown protocol",
                extra={"peer": self._transport.get_extra_info("peername")},
            )
            self._forget()
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - its signature
        self._forget()

    def abort(self) -> None:
        """Abort it."""
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        self._timer.cancel()
        self._listener._opening.discard(self)  # noqa: SLF001 - of this module

    def _hand_over(self, found: PortProtocol) -> None:
        self._forget()
        if self._refusal:
            if found.refusal is not None:
                self._transport.write(found.refusal(self._refusal))
            self._transport.close()
            return
        protocol = found.factory()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if isinstance(protocol, asyncio.BufferedProtocol):
            _feed(protocol, self._seen)
        elif self._seen:
            protocol.data_received(self._seen)


def _feed(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    while data:
        room = memoryview(protocol.get_buffer(len(data)))
        count = min(len(room), len(data))
        room[:count] = data[:count]
        protocol.buffer_updated(count)
        data = data[count:]


def _addresses(host: str) -> list[str]:
    if host == "localhost":
        return ["127.0.0.1", "::1"]
    if not host:
        return ["::"] if socket.has_dualstack_ipv6() else ["0.0.0.0"]  # noqa: S104 - asked for
    return [host]


def _why_not_bound(error: OSError, host: str, port: int) -> str:
    where = f"port {port} of {host or 'this machine'}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{where} is already in use; stop the process that holds it, or choose another port "
            "(0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return f"{where} may not be bound by this user; choose a port above 1023"
    return f"{where} cannot be bound: {error.strerror or error}; check the host name"
