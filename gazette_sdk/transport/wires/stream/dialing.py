"""Rules of opening a connection, which the asyncio and the blocking connection share.

A server that speaks the stream transport says HELLO as soon as it has seen the preface. One that
does not speak it closes the connection, answers in another protocol (HTTP, mostly), or waits for
what it would understand.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Iterator
from typing import NamedTuple

from gazette_sdk.errors import ConfigurationError, StreamProtocolError, UnavailableError
from gazette_sdk.protocol import urls
from gazette_sdk.protocol.stream_calls import ClientCalls
from gazette_sdk.transport.wires.tls import Tls

__all__ = [
    "ALPN",
    "PROTOCOLS",
    "NotStreamError",
    "Place",
    "TlsContext",
    "check_alpn",
    "connect_errors",
    "hello_errors",
    "place_of",
]

_log = logging.getLogger(__name__)

ALPN = "gzt/1"
"""This wire's name in TLS."""

PROTOCOLS = (ALPN, "h2")
"""Names to offer in TLS: a server that does not speak the first shows it by the second."""


class NotStreamError(UnavailableError):
    """Something answers at the address, and does not speak the stream transport."""


class Place(NamedTuple):
    """Address of a socket.

    Attributes:
        path: of a Unix socket; empty for TCP.
        host: name or number.
        port: of TCP.
    """

    path: str
    host: str = ""
    port: int = 0


def place_of(endpoint: str) -> Place:
    """Return the address of a valid endpoint URL."""
    address = urls.dial_address(endpoint)
    if address.startswith("unix:"):
        return Place(address.removeprefix("unix://"))
    host, _, port = address.rpartition(":")
    return Place("", host.removeprefix("[").removesuffix("]"), int(port))


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


def check_alpn(agreed: str | None) -> None:
    """Check the protocol that TLS agreed on; None where there is none.

    Raises:
        StreamProtocolError: it is another one than ours.
    """
    if agreed not in {None, ALPN}:
        raise StreamProtocolError(f"it chose {agreed} in TLS")


@contextlib.contextmanager
def connect_errors(where: str) -> Iterator[None]:
    """Turn errors of opening a socket to a broker into ``UnavailableError``."""
    try:
        yield
    except ssl.SSLError as error:
        raise UnavailableError(f"cannot agree on TLS with {where}: {error}") from error
    except ConnectionRefusedError as error:
        raise UnavailableError(f"cannot connect to {where}: Connection refused") from error
    except OSError as error:
        raise UnavailableError(f"cannot connect to {where}: {error.strerror or error}") from error


@contextlib.contextmanager
def hello_errors(where: str, timeout_s: float, calls: ClientCalls) -> Iterator[None]:
    """Turn errors of waiting for HELLO into ``UnavailableError``.

    It is a :class:`NotStreamError`, unless the server said GOAWAY, and so speaks the wire.
    """
    try:
        yield
    except TimeoutError:
        raise NotStreamError(f"{where} did not say HELLO within {timeout_s:g} s") from None
    except (StreamProtocolError, OSError) as error:
        if calls.leaving and isinstance(error, ConnectionError):
            raise UnavailableError(f"{where}: {error}") from error
        raise NotStreamError(f"{where} does not speak the stream transport: {error}") from error
