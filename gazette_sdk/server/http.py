"""HTTP host of a server: mounts of path prefixes, canonical paths, bodies with a trailer.

aiohttp implements the protocol. Its router is not used: a journal's name is a path, with rules of
its own. A path that is not canonical is redirected. The mounts get a request in order until one
answers. :class:`HttpConnection` has the bounds of a connection.

A gateway has no media type of a journal's bytes. So :func:`guess_content_type` guesses it from the
first bytes, as browsers do, by the rules of the "MIME Sniffing" standard of the WHATWG, sections 6
and 7, without the container formats whose header needs parsing.

aiohttp bounds the size of headers and the idle time between requests. It has no bound for a client
that sends a request slowly, and it logs a traceback for every malformed one.
:class:`HttpConnection` has bounds in time for a request's headers, and for its body.
"""

from __future__ import annotations

import asyncio
import html
import ipaddress
import logging
import posixpath
import re
import time
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, cast
from urllib.parse import quote, unquote_to_bytes, urlsplit

from aiohttp import StreamReader, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpProcessingError, HttpVersion11, RawRequestMessage
from aiohttp.http_writer import StreamWriter

from gazette_sdk.errors import GazetteError, UnauthenticatedError, ValidationError
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability
from gazette_sdk.server.listener import UnknownCost, UnknownShare
from gazette_sdk.user_code import described, text_of

SNIFFED_BYTES = 512
"""Number of the first bytes that are examined."""

_TEXT = "text/plain; charset=utf-8"

_HTML = re.compile(
    rb"[\t\n\f\r ]*<(?:!DOCTYPE HTML|HTML|HEAD|SCRIPT|IFRAME|H1|DIV|FONT|TABLE|A|STYLE|TITLE|B|BODY"
    rb"|BR|P|!--)[ >]",
    re.IGNORECASE,
)
_XML = re.compile(rb"[\t\n\f\r ]*<\?xml")

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"%PDF-", "application/pdf"),
    (b"%!PS-Adobe-", "application/postscript"),
    (b"\xfe\xff", "text/plain; charset=utf-16be"),
    (b"\xff\xfe", "text/plain; charset=utf-16le"),
    (b"\xef\xbb\xbf", _TEXT),
    (b"\x00\x00\x01\x00", "image/x-icon"),
    (b"BM", "image/bmp"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"ID3", "audio/mpeg"),
    (b"OggS\x00", "application/ogg"),
    (b"\x1a\x45\xdf\xa3", "video/webm"),
    (b"\x00\x01\x00\x00", "font/ttf"),
    (b"OTTO", "font/otf"),
    (b"wOFF", "font/woff"),
    (b"wOF2", "font/woff2"),
    (b"\x1f\x8b\x08", "application/x-gzip"),
    (b"PK\x03\x04", "application/zip"),
    (b"Rar!\x1a\x07", "application/x-rar-compressed"),
    (b"\x00asm", "application/wasm"),
)

_BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")


def guess_content_type(content: bytes) -> str:
    """Return the media type of a body that begins with ``content``, which must not be empty."""
    head = content[:SNIFFED_BYTES]
    if _HTML.match(head):
        return "text/html; charset=utf-8"
    if _XML.match(head):
        return "text/xml; charset=utf-8"
    for signature, media_type in _SIGNATURES:
        if head.startswith(signature):
            return media_type
    return "application/octet-stream" if _BINARY.search(head) else _TEXT


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


HttpHandler = Callable[[web.BaseRequest, Target], Awaitable[web.StreamResponse | None]]
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


def accepts_gzip(request: web.BaseRequest) -> bool:
    """Return True if a client wants gzip; not for a refusal of it by a weight of zero."""
    for offered in request.headers.get(hdrs.ACCEPT_ENCODING, "").lower().split(","):
        name, _, weight = offered.replace(" ", "").partition(";")
        if name == "gzip":
            return weight.rstrip(".0") != "q="
    return False


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
        self._server: web.Server | None = None

    def mount(self, prefix: str, handler: HttpHandler) -> None:
        """Give requests whose canonical path begins with ``prefix`` to ``handler``.

        Earlier mounts come first.
        """
        self._mounts.append((prefix, handler))

    def __call__(self) -> asyncio.Protocol:
        """Return a protocol object for one connection."""
        assert self._server is not None, "connections come only between start and stop"
        return HttpConnection(self._server)

    async def start(self) -> None:
        """Make the aiohttp server."""
        self._server = web.Server(
            self._answer, request_factory=HttpRequest, handler_cancellation=True
        )

    async def stop(self, grace_s: float) -> None:
        """Close idle connections. Wait ``grace_s`` for running requests, then close the rest."""
        server, self._server = self._server, None
        if server is not None:
            server.pre_shutdown()
            await server.shutdown(grace_s)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            with HttpConnection.of(request).serving(request):
                await self._await_turn(request)
                _check_transfer_coding(request)
                await _invite_body(request)
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

    async def _await_turn(self, request: web.BaseRequest) -> None:
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

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
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


class HttpRequest(web.BaseRequest):
    """Request whose answer has no headers that aiohttp adds by default."""

    def __init__(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> None:
        super().__init__(
            message,
            payload,
            protocol,
            writer,
            task,
            asyncio.get_running_loop(),
            client_max_size=MAX_BUFFERED_BODY_BYTES,
        )

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Forbid browsers to guess media types, too."""
        headers = response.headers
        headers.popall(hdrs.SERVER, None)
        headers["X-Content-Type-Options"] = "nosniff"
        if isinstance(response, TrailedResponse):
            headers.popall(hdrs.CONTENT_TYPE, None)
            if response.media_type:
                headers[hdrs.CONTENT_TYPE] = response.media_type


def _check_transfer_coding(request: web.BaseRequest) -> None:
    """Refuse a body in a coding that is not undone here: RFC 9112, section 6.1.

    Raises:
        web.HTTPNotImplemented: the body is not sent plainly or in chunks.
    """
    codings = request.headers.get(hdrs.TRANSFER_ENCODING, "")
    for coding in codings.lower().split(","):
        if coding.strip() not in {"", "identity", "chunked"}:
            raise web.HTTPNotImplemented(
                text=f"Transfer-Encoding {codings[:40]!r} is not supported: send chunked, and say "
                "in Content-Encoding how the content is compressed"
            )


async def _invite_body(request: web.BaseRequest) -> None:
    """Ask for the body of a client that waits for that.

    Raises:
        web.HTTPExpectationFailed: it expects something else.
    """
    expected = request.headers.get(hdrs.EXPECT)
    if expected is None or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        raise web.HTTPExpectationFailed(text=f"unknown expectation: {expected}")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer has not begun


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


REFUSALS = frozenset({401, 403, 413, 429})
"""Statuses of requests whose body is not read to its end: that costs as much as to serve it."""

REFUSAL_PAUSE_S = 0.2
"""Seconds until the connection of such a request is closed: time for the client to read the answer,
which a reset would take from it."""

KEEPALIVE_TIMEOUT_S = 75.0
"""Seconds for which an idle connection is kept open."""

HEADERS_TIMEOUT_S = 10.0
"""Seconds from the first byte of a request to the end of its headers."""

BODY_PAUSE_S = 30.0
"""Seconds within which at least :data:`BODY_BYTES_MIN` bytes of a body have to arrive, while the
server has room for them."""

BODY_BYTES_MIN = 1024
"""Least number of bytes of a body in :data:`BODY_PAUSE_S`: a client cannot hold a connection by a
byte now and then. The broker's least append rate is higher."""


class HttpConnection(web.RequestHandler):
    """Connection of an aiohttp server, with bounds in time.

    Bodies stay as they are sent: see ``Content-Encoding`` in
    :mod:`gazette_sdk.broker.api.http_gateway`.

    Attributes:
        is_known: a request had a good token.
    """

    __slots__ = ("_had_no_room", "_headers_timer", "_received_bytes", "_served", "is_known")

    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            access_log=None,  # type: ignore[arg-type] # None turns it off
            auto_decompress=False,
        )
        self.is_known = False
        self._headers_timer: asyncio.TimerHandle | None = None
        self._received_bytes = 0
        self._had_no_room = False
        self._served: web.BaseRequest | None = None

    @classmethod
    def of(cls, request: web.BaseRequest) -> HttpConnection:
        """Return the connection of a request."""
        return cast("HttpConnection", request.protocol)

    @property
    def is_closing(self) -> bool:
        """Return True if nothing can be sent any more."""
        return self.transport is None or self.transport.is_closing()

    @contextmanager
    def serving(self, request: web.BaseRequest) -> Iterator[None]:
        """Bound the body of a request while the context serves it."""
        self._stop_headers_timer()
        self._served = request
        loop = asyncio.get_running_loop()
        watch: asyncio.TimerHandle | None = None
        last_bytes = self._received_bytes

        def check() -> None:
            nonlocal watch, last_bytes
            body = request.content
            if body.is_eof():
                return
            is_slow = self._received_bytes - last_bytes < BODY_BYTES_MIN
            could_send = not self._had_no_room
            last_bytes = self._received_bytes
            self._had_no_room = self._reading_paused
            if is_slow and could_send:
                body.set_exception(
                    web.HTTPRequestTimeout(
                        text=f"less than {BODY_BYTES_MIN} bytes of the body came within "
                        f"{BODY_PAUSE_S:g} s; send it faster"
                    )
                )
                return
            watch = loop.call_later(BODY_PAUSE_S, check)

        self._had_no_room = self._reading_paused
        if not request.content.is_eof():
            watch = loop.call_later(BODY_PAUSE_S, check)
        try:
            yield
        finally:
            self._served = None
            if watch is not None:
                watch.cancel()

    async def rest(self, delay_s: float) -> None:
        """Wait before a request is served, and read nothing meanwhile."""
        transport = self.transport
        if transport is None or self._reading_paused:
            await asyncio.sleep(delay_s)
            return
        transport.pause_reading()
        try:
            await asyncio.sleep(delay_s)
        finally:
            if not self._reading_paused:
                transport.resume_reading()

    # ----------------------------------------------------------- of aiohttp

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the parser, and begin to wait for the end of headers."""
        self._received_bytes += len(data)
        if data and self._served is None and self._headers_timer is None:
            loop = asyncio.get_running_loop()
            self._headers_timer = loop.call_later(HEADERS_TIMEOUT_S, self._headers_overdue)
        super().data_received(data)
        if (
            self._served is not None
            and self._messages
            and not isinstance(self._messages[-1][0], RawRequestMessage)
            and not self._served.content.is_eof()
        ):
            # The parser has failed inside of this body, and aiohttp would wait for its end.
            self._served.content.set_exception(web.RequestPayloadError("malformed chunk"))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; close the connection if it refuses a body that is still coming."""
        finished = await super().finish_response(request, resp, start_time)
        if resp.status in REFUSALS and not request.content.is_eof():
            self.pause_reading()
            await asyncio.sleep(REFUSAL_PAUSE_S)
            self.force_close()
        return finished

    def pause_reading(self) -> None:
        """Stop reading: the body's buffer is full."""
        self._had_no_room = True
        super().pause_reading()

    def connection_lost(self, error: BaseException | None) -> None:
        """Stop waiting for headers."""
        self._stop_headers_timer()
        super().connection_lost(error)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to a malformed request, and log it in one line."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client has left, or the answer had begun: aiohttp closes the connection
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        self._log_refusal(exc)
        response = web.Response(
            status=status,
            text=f"malformed HTTP request: {_one_line(exc)}\n",
            headers={"X-Content-Type-Options": "nosniff"},
        )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a failure: in one line if the client's bytes caused it, else with its traceback."""
        error = kw.get("exc_info")
        if isinstance(error, HttpProcessingError | web.RequestPayloadError | web.HTTPException):
            self._log_refusal(error)
        else:
            super().log_exception(*args, **kw)

    # -------------------------------------------------------------- inside

    def _headers_overdue(self) -> None:
        self._headers_timer = None
        _log.info(
            "closing an HTTP connection: its request had no end of headers within %g s",
            HEADERS_TIMEOUT_S,
            extra={"peer": self.peername},
        )
        self.force_close()

    def _stop_headers_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _log_refusal(self, error: BaseException) -> None:
        _log.info(
            "refused a malformed HTTP request: %s", _one_line(error), extra={"peer": self.peername}
        )


def _one_line(error: BaseException) -> str:
    """Return the reason of an error, without the bytes that the client sent."""
    text = getattr(error, "message", "") or str(error)
    return " ".join(text.partition(":")[0].split())[:200]
