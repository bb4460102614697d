"""Dial of a member's endpoint: tells a dead process from one that cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from gazette_sdk.cluster.verification.decision import Input
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import urls

__all__ = ["DIAL_TIMEOUT_S", "dial"]

DIAL_TIMEOUT_S = 0.5
"""Bound of one dial. A process that is dead refuses within a round trip."""

_QUESTION = b"GET /debug/ready HTTP/1.1\r\nHost: member\r\nConnection: close\r\n\r\n"
"""Request to which any member has an answer: a response, or with TLS an alert."""

_NOTHING_LISTENS = frozenset({Input.REFUSED, Input.CLOSED})


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
    try:
        async with asyncio.timeout(timeout_s):
            found = [await _connect(*place) async for place in _places(endpoint)]
    except (OSError, ValueError, GazetteError):  # the endpoint may have no port
        return Input.UNCLEAR
    if Input.REACHED in found:
        return Input.REACHED
    if not found or not _NOTHING_LISTENS.issuperset(found):
        return Input.UNCLEAR
    return Input.CLOSED if Input.CLOSED in found else Input.REFUSED


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


async def _connect(family: int, address: Any) -> Input:
    """Connect to one address, of the form of its family."""
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as sock:
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, address)
        except ConnectionRefusedError:
            return Input.REFUSED
        except OSError:
            return Input.UNCLEAR
        # A port of this host on which nobody listens may be connected to itself.
        if family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
            return Input.REFUSED
        try:
            await asyncio.get_running_loop().sock_sendall(sock, _QUESTION)
            answer = await asyncio.get_running_loop().sock_recv(sock, 1)
        except (ConnectionResetError, BrokenPipeError):
            return Input.CLOSED
        except OSError:
            return Input.UNCLEAR
        return Input.REACHED if answer else Input.CLOSED
