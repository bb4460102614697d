"""HTTP connection with bounds in time: for a request's headers, and for its body.

aiohttp bounds the size of headers and the idle time between requests. It has no bound for a client
that sends a request slowly, and it logs a traceback for every malformed one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from aiohttp import web
from aiohttp.http import HttpProcessingError, RawRequestMessage

__all__ = ["BODY_PAUSE_S", "HEADERS_TIMEOUT_S", "KEEPALIVE_TIMEOUT_S", "HttpConnection"]

_log = logging.getLogger(__name__)

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
        self._served: web.Request | None = None

    @classmethod
    def of(cls, request: web.BaseRequest) -> HttpConnection:
        """Return the connection of a request."""
        return cast("HttpConnection", request.protocol)

    @property
    def is_closing(self) -> bool:
        """Return True if nothing can be sent any more."""
        return self.transport is None or self.transport.is_closing()

    @contextmanager
    def serving(self, request: web.Request) -> Iterator[None]:
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
