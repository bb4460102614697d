"""From an endpoint to a connection, and how a server shows that it speaks this wire.

A server that does says HELLO as soon as it has seen the preface. One that doesn't closes the
connection, answers in another language (HTTP, mostly), or waits for what it would understand.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any, NamedTuple

from gazette_sdk.errors import StreamProtocolError, UnavailableError
from gazette_sdk.protocol import urls
from gazette_sdk.transport.wires.stream.connection import ALPN, Connection, Owner
from gazette_sdk.transport.wires.tls import Tls

__all__ = [
    "PROTOCOLS",
    "Dialer",
    "NotStreamError",
    "Place",
    "place_of",
    "refused",
    "unheard",
    "unreachable",
]

PROTOCOLS = (ALPN, "h2")
"""What to offer in TLS: a server that doesn't speak the first shows it by the second."""


class NotStreamError(UnavailableError):
    """Something answers at the address, and doesn't speak the stream transport."""


class Place(NamedTuple):
    """Where an endpoint is.

    Attributes:
        path: of its unix socket; empty where it has none.
        host: name or number.
        port: of TCP.
    """

    path: str
    host: str = ""
    port: int = 0


def place_of(endpoint: str) -> Place:
    """Where to connect to.

    Args:
        endpoint: a valid endpoint URL.
    """
    address = urls.dial_address(endpoint)
    if address.startswith("unix:"):
        return Place(address.removeprefix("unix://"))
    host, _, port = address.rpartition(":")
    return Place("", host.removeprefix("[").removesuffix("]"), int(port))


def unreachable(where: str, error: OSError) -> UnavailableError:
    """The error of a connection that could not be opened."""
    if isinstance(error, ssl.SSLError):
        return UnavailableError(f"cannot agree on TLS with {where}: {error}")
    reason = error.strerror or error
    if isinstance(error, ConnectionRefusedError):
        reason = "Connection refused"
    return UnavailableError(f"cannot connect to {where}: {reason}")


def unheard(where: str, timeout_s: float) -> NotStreamError:
    """The error of a server that says nothing."""
    return NotStreamError(f"{where} did not say HELLO within {timeout_s:g} s")


def refused(where: str, error: Exception, *, leaving: bool) -> UnavailableError:
    """The error of a connection that ended before HELLO.

    Args:
        where: the server in words.
        error: how it ended.
        leaving: the server said GOAWAY: it knows the wire.
    """
    if leaving and isinstance(error, ConnectionError):
        return UnavailableError(f"{where}: {error}")
    return NotStreamError(f"{where} does not speak the stream transport: {error}")


class Dialer:
    """Opens connections of one client.

    Args:
        tls: certificates, for endpoints of scheme ``https``.
        hello_timeout_s: what a server may take to say HELLO, once it is connected.
    """

    def __init__(self, tls: Tls, hello_timeout_s: float) -> None:
        self._tls = tls
        self._hello_timeout_s = hello_timeout_s
        self._context: ssl.SSLContext | None = None

    async def dial(self, endpoint: str, where: str, owner: Owner) -> Connection:
        """Open a connection, up to the server's HELLO.

        Args:
            endpoint: URL of the server.
            where: the server in words.
            owner: who keeps the connection.

        Raises:
            NotStreamError: the server doesn't speak this wire.
            UnavailableError: it cannot be reached.
            ConfigurationError: a certificate cannot be used.
        """
        try:
            connection = await self._connect(endpoint, owner)
        except OSError as error:
            raise unreachable(where, error) from error
        try:
            await self._greet(connection, where)
        except BaseException:
            connection.drop("it was given up before HELLO")
            with contextlib.suppress(asyncio.CancelledError):
                await connection.closed()
            raise
        return connection

    async def _connect(self, endpoint: str, owner: Owner) -> Connection:
        loop = asyncio.get_running_loop()
        place = place_of(endpoint)
        if place.path:
            _, connection = await loop.create_unix_connection(lambda: Connection(owner), place.path)
            return connection
        more: dict[str, Any] = {}
        if urls.is_tls(endpoint):
            if self._context is None:
                self._context = self._tls.context(PROTOCOLS)
            more = {"ssl": self._context, "server_hostname": place.host}
        failure: OSError | None = None
        for number in await _addresses(place.host, place.port):
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(owner), number, place.port, **more
                )
            except OSError as error:
                failure = failure or error
            else:
                return connection
        raise failure or OSError(f"{place.host} has no address")

    async def _greet(self, connection: Connection, where: str) -> None:
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                await asyncio.shield(connection.greeted)
        except TimeoutError:
            raise unheard(where, self._hello_timeout_s) from None
        except (StreamProtocolError, ConnectionError) as error:
            raise refused(where, error, leaving=connection.calls.leaving) from error


async def _addresses(host: str, port: int) -> list[str]:
    """The addresses of a host, in the order in which to try them."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except RuntimeError:
        # The program is ending, and no thread can be had for it. What it published last is sent
        # nevertheless; nobody else waits for the loop any more.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]
