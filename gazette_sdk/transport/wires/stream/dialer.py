"""Opening of asyncio connections: from an endpoint to a server that said HELLO."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from gazette_sdk.transport.wires.stream.connection import Connection
from gazette_sdk.transport.wires.stream.dialing import (
    TlsContext,
    connect_errors,
    hello_errors,
    place_of,
)

__all__ = ["Dialer"]


class Dialer:
    """Opens connections of one client.

    Args:
        tls: for endpoints of scheme ``https``.
        hello_timeout_s: time within which a connected server must say HELLO.
    """

    def __init__(self, tls: TlsContext, hello_timeout_s: float) -> None:
        self._tls = tls
        self.hello_timeout_s = hello_timeout_s

    async def dial(
        self,
        endpoint: str,
        where: str,
        on_idle: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> Connection:
        """Open a connection, up to the server's HELLO.

        Args:
            endpoint: URL of the server.
            where: the server in words.
            on_idle: see :class:`Connection`.
            on_lost: see :class:`Connection`.

        Raises:
            NotStreamError: the server does not speak this wire.
            UnavailableError: it cannot be reached.
            ConfigurationError: a certificate cannot be used.
        """
        with connect_errors(where):
            connection = await self._connect(endpoint, partial(Connection, on_idle, on_lost))
        try:
            with hello_errors(where, self.hello_timeout_s, connection.calls):
                async with asyncio.timeout(self.hello_timeout_s):
                    await asyncio.shield(connection.greeted)
        except BaseException:
            connection.drop("it was given up before HELLO")
            with contextlib.suppress(asyncio.CancelledError):
                await connection.closed()
            raise
        return connection

    async def _connect(self, endpoint: str, made: Callable[[], Connection]) -> Connection:
        loop = asyncio.get_running_loop()
        place = place_of(endpoint)
        if place.path:
            _, connection = await loop.create_unix_connection(made, place.path)
            return connection
        tls = self._tls.of(endpoint)
        more: dict[str, Any] = {"ssl": tls, "server_hostname": place.host} if tls else {}
        failure: OSError | None = None
        for number in await _addresses(place.host, place.port):
            try:
                _, connection = await loop.create_connection(made, number, place.port, **more)
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
