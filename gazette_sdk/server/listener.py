"""Listener: the public port of a server, with every protocol on one socket.

The protocol of a new connection is determined by its first bytes, or by ALPN of TLS. Then the
connection, with those bytes, is given to that protocol's own asyncio protocol object, and the
listener costs it nothing afterwards. A connection of an unknown protocol, or without any bytes for
some seconds, is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.acceptor import Acceptor
from gazette_sdk.server.peer_limits import PeerLimits, UnknownShare

__all__ = ["HTTP_OPENINGS", "OPENING_TIMEOUT_S", "Listener", "PortProtocol", "find_protocol"]

_log = logging.getLogger(__name__)

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

    Binding and serving are separate steps: the port is known, and nobody else can serve on it, as
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
        """Bind a Unix socket; one left behind by a process that is gone is replaced.

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
