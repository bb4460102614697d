"""Console as a server of its own: it forwards calls of the page to a broker and a consumer.

For networks where browsers reach neither. Targets are the given addresses and no others. A request
is forwarded with its token and body, and no other header. Of the calls that change something, those
of the page are forwarded if they have a token: a cluster without keys is changed by no one who
reaches the console alone. Pages of other origins cannot send one.

With masks, content of journals is forwarded by the console's own call alone, which masks it.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import orjson
import yarl
from aiohttp import hdrs, web
from google.protobuf import json_format

from gazette_sdk.console.content import (
    MASKED_HEADER,
    MASKED_MEDIA_TYPE,
    ConsoleContent,
    Masking,
    Refusal,
)
from gazette_sdk.console.mount import PREFIX, console
from gazette_sdk.errors import ConfigurationError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.http import (
    CONTENT_HEADERS,
    Target,
    origin_form,
    quote_path,
    text_error,
)
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
        has_masks: refuse content of journals that is not masked.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        broker: str,
        consumer: str,
        tls: ssl.SSLContext,
        *,
        has_masks: bool = False,
    ) -> None:
        self._client = client
        self._has_masks = has_masks
        self._broker = broker.rstrip("/")
        self._consumer = consumer.rstrip("/")
        self._tls = tls

    async def __call__(self, request: web.BaseRequest, target: Target) -> web.StreamResponse | None:
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
        if self._has_masks and not is_call and request.method != "HEAD":
            return text_error(403, _MASKS_REMEDY)
        base = self._broker
        if self._consumer and path.startswith("/v1/shards/"):
            base = self._consumer
        return await self._answered(request, base, _Sent(request.raw_path))

    async def find(self, journal: str, request: web.BaseRequest) -> pb.JournalSpec | Refusal | None:
        """Return the spec of a journal, as the broker lists it to the caller.

        Raises:
            UnavailableError: the broker does not answer.
        """
        selector = {"include": {"labels": [{"name": "name", "value": journal}]}}
        headers = {hdrs.CONTENT_TYPE: "application/json"}
        if hdrs.AUTHORIZATION in request.headers:
            headers[hdrs.AUTHORIZATION] = request.headers[hdrs.AUTHORIZATION]
        try:
            async with self._client.post(
                f"{self._broker}/v1/journals/list",
                data=orjson.dumps({"selector": selector}),
                headers=headers,
                allow_redirects=False,
                ssl=self._tls,
            ) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unavailable(self._broker, error) from error
        if answer.status != 200:
            return Refusal(answer.status, body.decode(errors="replace"))
        return _spec_of(body, journal)

    async def read(
        self, request: web.BaseRequest, target: Target, masking: Masking | None
    ) -> web.StreamResponse:
        """Answer a read of a journal."""
        path = f"{quote_path(target.path)}?{target.query}"
        return await self._answered(request, self._broker, _Sent(path, masking))

    async def _answered(
        self, request: web.BaseRequest, base: str, sent: _Sent
    ) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            await self._exchange(request, base, sent, response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if response.prepared:
                if request.transport is not None:
                    request.transport.abort()  # an answer without its end must not look complete
                return response
            raise self._unavailable(base, error) from error
        return response

    def _unavailable(self, base: str, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{base} does not answer ({type(error).__name__}); check --broker.address and "
            "--consumer.address"
        )

    async def _exchange(
        self, request: web.BaseRequest, base: str, sent: _Sent, response: web.StreamResponse
    ) -> None:
        is_change = request.path.endswith(_CHANGES)
        bytes_max = CHANGE_BYTES_MAX if is_change else BODY_BYTES_MAX
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > bytes_max:
                raise web.HTTPRequestEntityTooLarge(bytes_max, len(body))
        sent_body = _without_content(request.path, body) if self._has_masks else bytes(body)
        if sent_body is None:
            response.set_status(403)
            response.content_type = "text/plain"
            await response.prepare(request)
            await response.write_eof(_MASKS_REMEDY.encode())
            return
        names = [hdrs.AUTHORIZATION, hdrs.CONTENT_TYPE]
        if sent.masking is None:
            names.append(hdrs.ACCEPT_ENCODING)
        headers = {name: request.headers[name] for name in names if name in request.headers}
        async with self._client.request(
            request.method,
            yarl.URL(base + origin_form(sent.path), encoded=True),
            data=sent_body or None,
            headers=headers,
            allow_redirects=False,
            ssl=self._tls,
        ) as answer:
            response.set_status(answer.status)
            for name in _PASSED_ON:
                if name in answer.headers:
                    response.headers[name] = answer.headers[name]
            response.headers.update(CONTENT_HEADERS)
            masked = None
            if sent.masking is not None and answer.status == HTTPStatus.PARTIAL_CONTENT:
                masked = sent.masking(_begin_of(answer.headers.get(hdrs.CONTENT_RANGE, "")))
                response.headers[MASKED_HEADER] = "true"
                response.headers[hdrs.CONTENT_TYPE] = MASKED_MEDIA_TYPE
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                if masked is None:
                    await response.write(chunk)
                else:
                    await masked.write(response, chunk)
            await response.write_eof(b"" if masked is None else masked.finish())


class _Sent(NamedTuple):
    """Path that is requested of a target, and the masks of what it answers."""

    path: str
    masking: Masking | None = None


_MASKS_REMEDY = (
    "this console masks content: its page has masked messages; a token with READ can read the "
    "journal itself from a broker"
)


def _without_content(path: str, body: bytearray) -> bytes | None:
    """Return a call's body, if its answer has no content and no URL of content; else None.

    Calls that could have are written again as they were understood: the target sees no field that
    was not.
    """
    call = path.rpartition("/journals/")[2]
    kind = {"read": pb.ReadRequest, "fragments": pb.FragmentsRequest}.get(call)
    if kind is None or "/journals/" not in path:
        return bytes(body)
    try:
        asked: Any = kind()
        json_format.Parse(bytes(body).strip() or b"{}", asked, ignore_unknown_fields=True)
    except json_format.ParseError:
        return None
    if call == "read" and not asked.metadata_only:
        return None
    if call == "fragments":
        asked.ClearField("signatureTTL")
    return json_format.MessageToJson(asked, indent=None).encode()


def _begin_of(content_range: str) -> int:
    """Return the offset at which an answer begins.

    Raises:
        UnavailableError: the answer does not have it.
    """
    begin = content_range.removeprefix("bytes ").partition("-")[0]
    if not begin.isdigit():
        raise UnavailableError(
            "the broker answers a read without the header Content-Range; upgrade it"
        )
    return int(begin)


def _spec_of(listing: bytes, journal: str) -> pb.JournalSpec | None:
    """Return the spec of a journal in a listing."""
    for line in listing.splitlines():
        result = orjson.loads(line).get("result") or {}
        for row in result.get("journals") or ():
            spec = json_format.ParseDict(row["spec"], pb.JournalSpec(), ignore_unknown_fields=True)
            if spec.name == journal:
                return spec
    return None


def _is_of_page(path: str) -> bool:
    """Return True for a change that the page makes, here or at another member."""
    if not path.startswith("/v1/at/"):
        return path in _CHANGES_OF_PAGE
    return path.count("/") == _SLASHES_AT_MEMBER and path.endswith("/shards/unassign")


@asynccontextmanager
async def serve_console(
    server: Server,
    broker: str,
    consumer: str,
    tls: ssl.SSLContext,
    content: ConsoleContent | None = None,
) -> AsyncIterator[str]:
    """Serve the console on a port of its own; yield its address.

    Args:
        server: the port, which is not started yet.
        broker: URL of a broker.
        consumer: URL of a process of a consumer; empty for none.
        tls: context of connections to them.
        content: masks and message types; None for none.

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
        has_masks = content is not None and bool(content.masks)
        forwarder = Forwarder(client, broker, consumer, tls, has_masks=has_masks)
        page = console(
            "cluster" if consumer else "broker",
            needs_token=True,
            content=content,
            journals=forwarder,
        )
        server.http.mount(PREFIX, page)
        server.http.mount("/", forwarder)
        try:
            yield f"{await server.start()}/console/"
        finally:
            await server.stop()
