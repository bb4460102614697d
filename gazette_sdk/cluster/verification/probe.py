"""Dial of a member's endpoint: tells a dead process from one that cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

from gazette_sdk.cluster.verification.decision import NOTHING_LISTENS, Input
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import names as urls

__all__ = ["DIAL_TIMEOUT_S", "dial", "hold"]

DIAL_TIMEOUT_S = 0.5
"""Bound of one dial. A process that is dead refuses within a round trip."""

_QUESTION = b"GET /debug/ready HTTP/1.1\r\nHost: member\r\nConnection: close\r\n\r\n"
"""Request to which any member has an answer: a response, or with TLS an alert."""

_LASTING_QUESTION = _QUESTION.replace(b"Connection: close\r\n", b"")
"""The same, on a connection that is to stay open."""

_CHUNK_BYTES = 4096

_Hold: TypeAlias = Callable[[socket.socket], Awaitable[None]]


async def dial(endpoint: str, *, timeout_s: float = DIAL_TIMEOUT_S) -> Input:
    """Connect to an endpoint, ask for an answer, and close the connection.

    An answer is awaited because the kernel accepts connections for a frozen process, and some
    networks do for a host that they do not reach.

    Args:
        endpoint: URL of a broker or consumer: ``http://``, ``https://`` or ``unix://``.
        timeout_s: bound of the whole dial.

    Returns:
        ``REACHED`` if an address of the host answered; ``REFUSED`` if all of them refused;
        ``CLOSED`` if they did that, or accepted and closed; else ``UNCLEAR``.
    """
    return await _dial(endpoint, timeout_s, None)


async def hold(endpoint: str, *, timeout_s: float = DIAL_TIMEOUT_S) -> Input:
    """Dial an endpoint, and keep the connection that was answered until it ends.

    The kernel of a process that dies ends it at once. Arguments and results are those of
    :func:`dial`; the bound is that of the dial.
    """
    return await _dial(endpoint, timeout_s, _until_ended)


async def _dial(endpoint: str, timeout_s: float, then: _Hold | None) -> Input:
    found: list[Input] = []
    try:
        async with asyncio.timeout(timeout_s) as bound:
            async for family, address in _places(endpoint):
                with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as sock:
                    question = _QUESTION if then is None else _LASTING_QUESTION
                    found.append(await _connect(sock, address, question))
                    if found[-1] is Input.REACHED:
                        if then is not None:
                            bound.reschedule(None)
                            await then(sock)
                        return Input.REACHED
    except (OSError, ValueError, GazetteError):  # the endpoint may have no port
        return Input.UNCLEAR
    if not found or not NOTHING_LISTENS.issuperset(found):
        return Input.UNCLEAR
    return Input.CLOSED if Input.CLOSED in found else Input.REFUSED


async def _until_ended(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while await asyncio.get_running_loop().sock_recv(sock, _CHUNK_BYTES):
            pass


async def _places(endpoint: str) -> AsyncIterator[tuple[int, Any]]:
    """Yield the family and the address of each socket of an endpoint."""
    address = urls.dial_address(endpoint)
    if address.startswith("unix:"):
        yield socket.AF_UNIX, address.removeprefix("unix://")
        return
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    for family, _, _, _, place in found:
        yield family, place


async def _connect(sock: socket.socket, address: Any, question: bytes) -> Input:
    """Connect to one address, of the form of the socket's family, and await the first byte."""
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, address)
    except ConnectionRefusedError:
        return Input.REFUSED
    except OSError:
        return Input.UNCLEAR
    try:
        # A port of this host on which no process listens may be connected to itself.
        if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
            return Input.REFUSED
        await loop.sock_sendall(sock, question)
        return Input.REACHED if await loop.sock_recv(sock, 1) else Input.CLOSED
    except OSError as error:
        is_reset = isinstance(error, ConnectionError) or error.errno == errno.ENOTCONN
        return Input.CLOSED if is_reset else Input.UNCLEAR
