"""Console as a server of its own: it forwards calls of the page to a broker and a consumer.

For networks where browsers reach neither. Targets are the given addresses and no others. A request
is forwarded with its token and body, and no other header. Of the calls that change something, those
of the page are forwarded if they have a token: a cluster without keys is changed by no one who
reaches the console alone. Pages of other origins cannot send one.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import yarl
from aiohttp import hdrs, web

from gazette_sdk.console.mount import PREFIX, console
from gazette_sdk.errors import ConfigurationError, UnavailableError
from gazette_sdk.server.http import CONTENT_HEADERS, Target, origin_form, text_error
from gazette_sdk.server.process import Server

BODY_BYTES_MAX = 16 << 10
"""Greatest body of a request, which is that of servers."""

CHANGE_BYTES_MAX = 128 << 10
"""Greatest body of a change: specs of as many partitions as the page creates in one call."""

_SLASHES_AT_MEMBER = 6  # /v1/at/ZONE/ID/shards/unassign

CONNECT_TIMEOUT_S = 5.0
"""Longest time of a connection to a target."""

_CHANGES = ("/apply", "/unassign")
_CHANGES_OF_PAGE = frozenset({"/v1/journals/apply", "/v1/shards/unassign"})
_OWN = ("/debug/", "/v1/dev")
_PASSED_ON = (
    hdrs.CONTENT_TYPE,
    hdrs.CONTENT_ENCODING,
    hdrs.CONTENT_RANGE,
    hdrs.VARY,
    hdrs.WWW_AUTHENTICATE,
    "X-Write-Head",
    "X-Fragment-Name",
)
_AUTOMATIC_HEADERS = (hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.USER_AGENT, hdrs.CONTENT_TYPE)


class Forwarder:
    """Handler that answers calls and reads of journals by the answers of other servers.

    Args:
        client: makes the requests.
        broker: URL of a broker.
        consumer: URL of a process of a consumer; empty for none.
        tls: context of connections to them.
    """

    def __init__(
        self, client: aiohttp.ClientSession, broker: str, consumer: str, tls: ssl.SSLContext
    ) -> None:
        self._client = client
        self._broker = broker.rstrip("/")
        self._consumer = consumer.rstrip("/")
        self._tls = tls

    async def __call__(self, request: web.Request, target: Target) -> web.StreamResponse | None:
        """Answer a request.

        Raises:
            UnavailableError: the target does not answer.
        """
        path = target.path
        is_call = path.startswith("/v1/")
        if path.startswith(_OWN) or path == "/":
            return None
        if request.method not in {"GET", "HEAD", "POST"} or (
            request.method == "POST" and not is_call
        ):
            return text_error(405, "the console only reads: call the broker itself")
        if is_call and path.endswith(_CHANGES):
            if not _is_of_page(path):
                return text_error(403, "the console does not change that: use gazctl")
            if hdrs.AUTHORIZATION not in request.headers:
                return text_error(403, "changes need a token with the capability APPLY: sign in")
        base = self._broker
        if self._consumer and path.startswith("/v1/shards/"):
            base = self._consumer
        response = web.StreamResponse()
        try:
            await self._exchange(request, base, response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if response.prepared:
                if request.transport is not None:
                    request.transport.abort()  # an answer without its end must not look complete
                return response
            raise UnavailableError(
                f"{base} does not answer ({type(error).__name__}); check --broker.address and "
                "--consumer.address"
            ) from error
        return response

    async def _exchange(
        self, request: web.Request, base: str, response: web.StreamResponse
    ) -> None:
        is_change = request.path.endswith(_CHANGES)
        bytes_max = CHANGE_BYTES_MAX if is_change else BODY_BYTES_MAX
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > bytes_max:
                raise web.HTTPRequestEntityTooLarge(bytes_max, len(body))
        headers = {
            name: request.headers[name]
            for name in (hdrs.AUTHORIZATION, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)
            if name in request.headers
        }
        async with self._client.request(
            request.method,
            yarl.URL(base + origin_form(request.raw_path), encoded=True),
            data=bytes(body) or None,
            headers=headers,
            allow_redirects=False,
            ssl=self._tls,
        ) as answer:
            response.set_status(answer.status)
            for name in _PASSED_ON:
                if name in answer.headers:
                    response.headers[name] = answer.headers[name]
            response.headers.update(CONTENT_HEADERS)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()


def _is_of_page(path: str) -> bool:
    """Return True for a change that the page makes, here or at another member."""
    if not path.startswith("/v1/at/"):
        return path in _CHANGES_OF_PAGE
    return path.count("/") == _SLASHES_AT_MEMBER and path.endswith("/shards/unassign")


@asynccontextmanager
async def serve_console(
    server: Server, broker: str, consumer: str, tls: ssl.SSLContext
) -> AsyncIterator[str]:
    """Serve the console on a port of its own; yield its address.

    Args:
        server: the port, which is not started yet.
        broker: URL of a broker.
        consumer: URL of a process of a consumer; empty for none.
        tls: context of connections to them.

    Raises:
        ConfigurationError: an address is no URL of HTTP, or the port cannot be bound.
    """
    for address in filter(None, (broker, consumer)):
        if urlsplit(address).scheme not in {"http", "https"}:
            raise ConfigurationError(
                f"{address!r} cannot be forwarded to: give a URL of http or https"
            )
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_AUTOMATIC_HEADERS,
        timeout=limits,
    ) as client:
        server.http.mount(PREFIX, console("cluster" if consumer else "broker", needs_token=True))
        server.http.mount("/", Forwarder(client, broker, consumer, tls))
        try:
            yield f"{await server.start()}/console/"
        finally:
            await server.stop()
