"""Opening of connections: their rules, and the asyncio and the blocking way to the server's HELLO.

A server that speaks the stream transport says HELLO as soon as it has seen the preface. One that
does not speak it closes the connection, answers in another protocol (HTTP, mostly), or waits for
what it would understand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from gazette_sdk.errors import ConfigurationError, StreamProtocolError, UnavailableError
from gazette_sdk.protocol import names as urls
from gazette_sdk.protocol.stream_calls import ClientCalls
from gazette_sdk.transport.wires.stream.call import ALPN
from gazette_sdk.transport.wires.tls import Tls

if TYPE_CHECKING:
    from gazette_sdk.transport.wires.stream.blocking_connection import BlockingConnection
    from gazette_sdk.transport.wires.stream.connection import Connection

__all__ = [
    "ALPN",
    "PROTOCOLS",
    "NotStreamError",
    "TlsContext",
    "check_alpn",
    "dial",
    "dial_blocking",
]

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


@contextlib.contextmanager
def _connect_errors(where: str) -> Iterator[None]:
    """Turn errors of opening a socket to a broker into ``UnavailableError``."""
    try:
        yield
    except ssl.SSLError as error:
        raise UnavailableError(f"cannot agree on TLS with {where}: {error}") from error
    except ConnectionRefusedError as error:
        raise UnavailableError(f"cannot connect to {where}: Connection refused") from error
    except OSError as error:
        reason = error.strerror or str(error) or _CLOSED
        raise UnavailableError(f"cannot connect to {where}: {reason}") from error


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
