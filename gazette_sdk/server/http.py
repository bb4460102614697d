"""HTTP host of a server: mounts of path prefixes, canonical paths, bodies with a trailer.

aiohttp implements the protocol. Its router is not used: a journal's name is a path, with rules of
its own. A path that is not canonical is redirected. The mounts get a request in order until one
answers. :mod:`~gazette_sdk.server.http_connection` has the bounds of a connection.
"""

from __future__ import annotations

import asyncio
import html
import ipaddress
import logging
import posixpath
import time
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from urllib.parse import quote, unquote_to_bytes, urlsplit

from aiohttp import hdrs, web
from aiohttp.http_writer import StreamWriter

from gazette_sdk.errors import GazetteError, UnauthenticatedError, ValidationError
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability
from gazette_sdk.server.http_connection import HttpConnection
from gazette_sdk.server.peer_limits import UnknownCost, UnknownShare
from gazette_sdk.user_code import described, text_of

__all__ = [
    "CONTENT_HEADERS",
    "HttpHandler",
    "HttpHost",
    "Target",
    "TrailedResponse",
    "clean_path",
    "is_local_name",
    "origin_form",
    "parse_target",
    "quote_path",
    "text_error",
]

_log = logging.getLogger(__name__)

MAX_BUFFERED_BODY_BYTES = 4 * 1024 * 1024
"""Greatest body of a request that is read as a whole (JSON); streamed bodies have no bound."""

_STATUS_OF_ERROR: dict[type[Exception], int] = {
    web.RequestPayloadError: 400,
    ValidationError: 400,
    UnauthenticatedError: 401,
    GazetteError: 500,
}

UNKNOWN_DELAY_S = 0.5
"""Longest wait of a request without a good token: probes of health have such bounds."""

CONTENT_HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": "sandbox; default-src 'none'",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
)
"""Headers of an answer with stored content. Anyone may have written it: a browser shows it in an
origin of its own, runs no script of it and loads nothing for it."""

_PATH_SAFE = "/-_.~$&+,:;=@"
"""Bytes of a path which need no escape."""


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a request.

    Attributes:
        path: decoded path, beginning with a slash.
        query: query string as it came, without the question mark.
    """

    path: str
    query: str


HttpHandler = Callable[[web.Request, Target], Awaitable[web.StreamResponse | None]]
"""Function that answers a request, or returns None for the next mount."""


def parse_target(raw: str) -> Target:
    """Return the target of a request line.

    Raises:
        ValidationError: its path has a bad escape, or is no UTF-8.
    """
    path, _, query = origin_form(raw).partition("?")
    check_escapes(path)
    try:
        return Target(unquote_to_bytes(path).decode(), query)
    except UnicodeDecodeError as error:
        raise ValidationError("is not valid UTF-8", kind="url_parse", path="path") from error


def origin_form(raw: str) -> str:
    """Return the target of a request line without the scheme and host of its absolute form."""
    for scheme in ("http://", "https://"):
        if raw[: len(scheme)].lower() == scheme:
            return "/" + raw[len(scheme) :].partition("/")[2]
    return raw


def check_escapes(text: str) -> None:
    """Check that two hexadecimal digits follow every percent sign.

    Raises:
        ValidationError: they do not.
    """
    _, *escapes = text.split("%")
    for escape in escapes:
        try:
            int(escape[:2], 16)
        except ValueError:
            pass
        else:
            if len(escape) >= 2 and escape[:2].isalnum():
                continue
        raise ValidationError(f'invalid URL escape "%{escape[:2]}"', kind="url_parse")


def clean_path(path: str) -> str:
    """Return ``path`` without empty, ``.`` and ``..`` segments; a trailing slash stays."""
    cleaned = posixpath.normpath("/" + path.lstrip("/"))
    return cleaned + "/" if path.endswith("/") and cleaned != "/" else cleaned


def quote_path(path: str) -> str:
    """Return a decoded path with escapes for use in a URL."""
    return quote(path, safe=_PATH_SAFE)


def text_error(status: int, text: str) -> web.Response:
    """Return a plain text answer with an error message."""
    response = web.Response(status=status, text=text + "\n")
    if status == HTTPStatus.UNAUTHORIZED:
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    return response


def is_local_name(host: str | None, names: Container[str] = ()) -> bool:
    """Return True if a ``Host`` header is absent, or a name of this machine's loopback.

    Args:
        host: the header's value.
        names: further names that are this machine's, in lower case.
    """
    if host is None:
        return True  # browsers always send it
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class TrailedResponse(web.StreamResponse):
    """Streamed body that ends with a trailer.

    HTTP/1.0 has no trailers: there the body ends with the connection.

    Attributes:
        media_type: its ``Content-Type``; none is sent where it is empty.
    """

    media_type: str = ""

    async def finish(self, name: str, value: str) -> None:
        """End the body, with one trailer field."""
        writer = self._payload_writer
        trailer = b""
        if isinstance(writer, StreamWriter) and writer.chunked:
            line = " ".join(f"{name}: {value}".split())
            trailer = b"0\r\n" + line.encode() + b"\r\n\r\n"
            writer.chunked = False  # the last chunk is written here, with its trailer
        await self.write_eof(trailer)


class HttpHost:
    """aiohttp server of connections from the listener.

    Args:
        unknown: processor time of unknown clients.

    Attributes:
        authority: verifies tokens. The mounts check the token of each request themselves.
        own_names: names of this machine beside those of loopback, in lower case. A request with
            another ``Host`` is refused while no tokens are required: a web page could reach a
            server on loopback by a name of its own (DNS rebinding). None if other machines reach
            the server, too.
    """

    def __init__(self, *, unknown: UnknownShare | None = None) -> None:
        self.own_names: frozenset[str] | None = None
        self.authority: Authority | AllowAll = AllowAll()
        self._unknown = unknown or UnknownShare()
        self._mounts: list[tuple[str, HttpHandler]] = []
        self._runner: web.AppRunner | None = None

    def mount(self, prefix: str, handler: HttpHandler) -> None:
        """Give requests whose canonical path begins with ``prefix`` to ``handler``.

        Earlier mounts come first.
        """
        self._mounts.append((prefix, handler))

    def __call__(self) -> asyncio.Protocol:
        """Return a protocol object for one connection."""
        server = self._runner.server if self._runner is not None else None
        assert server is not None, "connections come only between start and stop"
        return HttpConnection(server)

    async def start(self) -> None:
        """Make the aiohttp server."""
        application = web.Application(
            middlewares=[self._middleware], client_max_size=MAX_BUFFERED_BODY_BYTES
        )
        application.on_response_prepare.append(_prepare)
        self._runner = web.AppRunner(
            application,
            handle_signals=False,
            handler_cancellation=True,
        )
        await self._runner.setup()

    async def stop(self, grace_s: float) -> None:
        """Close idle connections. Wait ``grace_s`` for running requests, then close the rest."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        server = runner.server
        assert server is not None, "set up by start"
        server.pre_shutdown()
        await server.shutdown(grace_s)
        await runner.cleanup()

    @web.middleware
    async def _middleware(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],  # noqa: ARG002 - mounts answer
    ) -> web.StreamResponse:
        try:
            with HttpConnection.of(request).serving(request):
                await self._await_turn(request)
                return await self._dispatch(request)
        except web.HTTPException as error:
            return text_error(error.status, error.text or error.reason)
        except tuple(_STATUS_OF_ERROR) as error:
            known = (_STATUS_OF_ERROR.get(kind) for kind in type(error).mro())
            return text_error(next(filter(None, known)), text_of(error))
        except Exception as error:
            if isinstance(error, ConnectionError) and HttpConnection.of(request).is_closing:
                raise  # the client has left
            _log.exception("request failed unexpectedly", extra={"path": request.raw_path})
            if request.writer.output_size:
                raise ConnectionError("the answer had begun: the connection is closed") from error
            return text_error(500, described(error))

    async def _await_turn(self, request: web.Request) -> None:
        """Wait, if an unknown client asks, while such have used more than their share of a core."""
        connection = HttpConnection.of(request)
        try:
            self.authority.verify(
                request.headers.get(hdrs.AUTHORIZATION), Capability(0), time.time()
            )
        except UnauthenticatedError:
            self._unknown.spend(UnknownCost.HTTP_REQUEST)
            if delay_s := min(self._unknown.delay_s, UNKNOWN_DELAY_S):
                await connection.rest(delay_s)
        else:
            if not connection.is_known:
                connection.is_known = True
                self._unknown.spend(-UnknownCost.CONNECTION)

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        host = request.headers.get(hdrs.HOST)
        if (
            self.own_names is not None
            and not self.authority.requires_tokens
            and not is_local_name(host, self.own_names)
        ):
            return text_error(
                403,
                f"this server has no name {host!r}: it serves this machine only; use localhost, "
                "127.0.0.1 or [::1] in the URL, or allow the name (--broker.allow-host, "
                "--consumer.allow-host)",
            )
        target = parse_target(request.raw_path)
        path = clean_path(target.path)
        if path != target.path:
            return _redirect(request.method, path, target.query)
        for prefix, handler in self._mounts:
            if path.startswith(prefix):
                response = await handler(request, target)
                if response is not None:
                    return response
        return text_error(404, "not found")


async def _prepare(_request: web.Request, response: web.StreamResponse) -> None:
    """Remove the headers that aiohttp adds by default. Forbid browsers to guess media types."""
    response.headers.popall(hdrs.SERVER, None)
    response.headers["X-Content-Type-Options"] = "nosniff"
    if isinstance(response, TrailedResponse):
        response.headers.popall(hdrs.CONTENT_TYPE, None)
        if response.media_type:
            response.headers[hdrs.CONTENT_TYPE] = response.media_type


def _redirect(method: str, path: str, query: str) -> web.Response:
    location = quote_path(path) + (f"?{query}" if query else "")
    body = f'<a href="{html.escape(location)}">Temporary Redirect</a>.\n\n'
    return web.Response(
        status=307,
        text=body if method == "GET" else "",
        content_type="text/html",
        charset="utf-8",
        headers={hdrs.LOCATION: location},
    )
