"""Journals as files over HTTP: GET reads, HEAD looks, PUT appends (broker section 16).

The path is the journal's name. A GET answers 206 and streams content; why the body ended stands in
the trailer ``X-Close-Error``. A PUT is one append, acknowledged with 204. Its body may have the
``Content-Encoding`` gzip or deflate.

Where keys are configured the caller's own bearer token is required, as on every other front.

:class:`BodyDecoder` decodes a request's compressed body, which must be complete (RFC 9110, section
8.4). :func:`json_methods` has the RPCs that the JSON gateway offers (protocol section 15).
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import SplitResult, unquote_plus, urlsplit

from aiohttp import web

from gazette_sdk.broker.api.fronts import Chunk, Journals, chunks
from gazette_sdk.broker.metrics import APPEND_SECONDS
from gazette_sdk.console.content import MASKED_HEADER, MASKED_MEDIA_TYPE, MaskedContent, Masking
from gazette_sdk.errors import GazetteError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.protocol.fragments import content_name, digest_of
from gazette_sdk.protocol.rules import (
    validate,
)
from gazette_sdk.server.authorization import FOREIGN_CHUNK_BYTES, Call
from gazette_sdk.server.http import (
    CONTENT_HEADERS,
    Target,
    TrailedResponse,
    check_escapes,
    guess_content_type,
    quote_path,
    text_error,
)
from gazette_sdk.server.json_gateway import JsonStream, JsonUnary
from gazette_sdk.server.listener import peer_of
from gazette_sdk.tracing import PARENT_KEY, is_sampled
from gazette_sdk.transport.wire import AppendItem

STEP_BYTES = 256 * 1024
"""Greatest piece of decoded content: a small body can decode to a thousand times its size."""

SMALL_BODY_BYTES = 64 * 1024
"""Greatest length of a body that is received before its append begins, which then rarely waits."""

_GZIP_BITS = 16 + zlib.MAX_WBITS

_TOTAL_SECONDS = APPEND_SECONDS.buckets("total")


def decoder_of(encoding: str) -> BodyDecoder | None:
    """Return the decoder of a ``Content-Encoding``; None if the body is sent as it is.

    Raises:
        ValidationError: the encoding is not supported.
    """
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return BodyDecoder(_GZIP_BITS)
        case "deflate":
            return BodyDecoder(zlib.MAX_WBITS)
        case _:
            raise ValidationError(
                f"Content-Encoding {encoding[:40]!r} is not supported: send gzip, deflate or none"
            )


class BodyDecoder:
    """Incremental decoder of a body. gzip may have many members; there is nothing after the last.

    Args:
        window_bits: format, as of :func:`zlib.decompressobj`.
    """

    def __init__(self, window_bits: int) -> None:
        self._window_bits = window_bits
        self._member = zlib.decompressobj(window_bits)
        self._is_inside = False
        self._is_begun = False

    def feed(self, encoded: bytes) -> Iterator[bytes]:
        """Yield the content of the next bytes, in pieces of bounded size.

        Raises:
            ValidationError: the bytes are damaged.
        """
        while encoded:
            if self._member.eof:
                self._member = zlib.decompressobj(self._window_bits)
            self._is_begun = self._is_inside = True
            try:
                content = self._member.decompress(encoded, STEP_BYTES)
            except zlib.error as error:
                raise ValidationError(f"the compressed body is damaged: {error}") from None
            self._is_inside = not self._member.eof
            encoded = self._member.unused_data or self._member.unconsumed_tail
            if content:
                yield content

    def finish(self) -> None:
        """Check that the body is complete.

        Raises:
            ValidationError: it ends inside a member.
        """
        if self._is_inside or not self._is_begun:
            raise ValidationError(
                "the compressed body is truncated: nothing was appended; send all of it"
            )


APPLY_BYTES_MAX = 256 << 10
"""Greatest body of an ``apply``: some hundred specs."""


def json_methods(service: Journals) -> Mapping[str, JsonStream | JsonUnary]:
    """Return the calls of the journal service below ``/v1/journals/``.

    Args:
        service: the journal service to ask.
    """

    async def read(request: pb.ReadRequest, call: Call) -> AsyncGenerator[pb.ReadResponse]:
        items = chunks(service.read(request, call), FOREIGN_CHUNK_BYTES)
        async with aclosing(items):
            async for item in items:
                if isinstance(item, Chunk):
                    yield pb.ReadResponse(offset=item.offset, content=item.content)
                else:
                    yield item

    return {
        "/v1/journals/list": JsonStream(Capability.LIST, pb.ListRequest, service.list),
        "/v1/journals/read": JsonStream(Capability.READ, pb.ReadRequest, read),
        "/v1/journals/fragments": JsonUnary(
            Capability.READ, pb.FragmentsRequest, service.list_fragments
        ),
        "/v1/journals/store-health": JsonUnary(
            Capability.READ, pb.FragmentStoreHealthRequest, service.fragment_store_health
        ),
        "/v1/journals/apply": JsonUnary(
            Capability.APPLY, pb.ApplyRequest, service.apply, body_bytes_max=APPLY_BYTES_MAX
        ),
    }


HTTP_CHUNK_BYTES = 128 * 1024
"""Greatest piece of content written at once."""

MAX_OFFSET = (1 << 63) - 1
"""End and size in ``Content-Range``: a journal has none."""

ROUTE_WAITS_S = (0.05, 0.05, 0.1, 0.1, 0.2, 0.5, 1.0)
"""Waits between tries where a journal has no brokers. One that was just created is given some
within moments, and curl, unlike a client of the SDK, does not try again by itself."""

CLOSED_CLEANLY = "broker terminated RPC"
"""Trailer of a body which the broker ended without an error."""

_HTTP_STATUS = {
    pb.OK: 206,
    pb.JOURNAL_NOT_FOUND: 404,
    pb.INSUFFICIENT_JOURNAL_BROKERS: 503,
    pb.OFFSET_NOT_YET_AVAILABLE: 416,
}

_TRUE = frozenset(("1", "t", "T", "true", "TRUE", "True", "on"))
_FALSE = frozenset(("0", "f", "F", "false", "FALSE", "False"))
_INTEGER = re.compile(r"[-+]?[0-9]+")


class HttpGateway:
    """Answers requests for journals. Mount it at ``/``, after everything else.

    Args:
        service: the journal service to ask.
        waits_for_routes: try again for two seconds where a journal has no brokers yet, as one that
            was just created. Other implementations answer at once, and leave that to the caller.
    """

    def __init__(self, service: Journals, *, waits_for_routes: bool = False) -> None:
        self._service = service
        self._route_waits_s = ROUTE_WAITS_S if waits_for_routes else ()

    async def __call__(
        self, request: web.BaseRequest, target: Target, masking: Masking | None = None
    ) -> web.StreamResponse:
        """Answer a request.

        Args:
            request: the request.
            target: its target.
            masking: makes the body of a read of the content; None for the content itself.

        Raises:
            GazetteError: for the HTTP host to turn into a status: the request is invalid or not
                authorized, or the call failed.
        """
        parent = request.headers.get(PARENT_KEY, "")
        call = Call(
            authorization=request.headers.get("Authorization"),
            chunk_bytes=HTTP_CHUNK_BYTES,
            peer=peer_of((request.remote or "",)),
            traceparent=parent if parent and is_sampled(parent) else "",
        )
        if request.method in {"GET", "HEAD"}:
            read = read_request(request.method, target)
            return await self._read(request, target, read, call, masking)
        if request.method == "PUT":
            body = _Body(append_request(target), request)
            begun_s = time.monotonic()
            try:
                return _append_response(await self._append(body, call), target)
            finally:
                total_s = time.monotonic() - begun_s  # as observe() does, without the call
                _TOTAL_SECONDS.counts[bisect_left(_TOTAL_SECONDS.bounds, total_s)] += 1
                _TOTAL_SECONDS.sum += total_s
        return text_error(400, f"unknown method: {request.method}")

    async def _read(
        self,
        request: web.BaseRequest,
        target: Target,
        read: pb.ReadRequest,
        call: Call,
        masking: Masking | None,
    ) -> web.StreamResponse:
        waits = iter(self._route_waits_s)
        while True:
            async with aclosing(chunks(self._service.read(read, call), HTTP_CHUNK_BYTES)) as items:
                first = await anext(items, None)
                wait = next(waits, None)
                if wait is None or not _lacks_route(first):
                    return await _answer_read(request, target, first, items, masking)
            await asyncio.sleep(wait)

    async def _append(self, body: _Body, call: Call) -> pb.AppendResponse:
        content = await body.small()
        started = content and self._service.append_now(body.opening, content, call, None)
        if started:
            if started.answers:
                await self._service.append_acknowledged(started)
            return pb.AppendResponse.FromString(started.response)
        waits = iter(self._route_waits_s)
        while True:
            async with aclosing(body.items()) as items:
                response = await self._service.append(items, call)
            wait = next(waits, None)
            if wait is None or body.is_begun or not _lacks_route(response):
                return response
            await asyncio.sleep(wait)


# ------------------------------------------------------------------ requests


def read_request(method: str, target: Target) -> pb.ReadRequest:
    """The Read that a GET or HEAD asks for.

    Raises:
        ValidationError: its query or its path is not what it should be.
    """
    query = _query(target.query, ("offset", "block"))
    request = pb.ReadRequest(
        journal=target.path[1:],
        offset=_integer(query.get("offset", "")),
        block=_boolean(query.get("block", "")),
        metadata_only=method == "HEAD",
    )
    validate(request)
    return request


def append_request(target: Target) -> pb.AppendRequest:
    """The request with which the Append of a PUT opens.

    Raises:
        ValidationError: it has a query, or its path is no name of a journal.
    """
    _query(target.query, ())
    if target.path == "/":
        raise ValidationError("the path must name a journal", kind="invalid_length", path="journal")
    request = pb.AppendRequest(journal=target.path[1:])
    validate(request)
    return request


def _query(text: str, known: tuple[str, ...]) -> dict[str, str]:
    """Keys of a query string in lower case, with their last values."""
    values: dict[str, str] = {}
    for pair in text.split("&"):
        if not pair:
            continue
        if ";" in pair:
            raise ValidationError("invalid semicolon separator in query", kind="url_parse")
        check_escapes(pair)
        name, _, value = pair.partition("=")
        name = unquote_plus(name)
        if name.lower() not in known:
            hint = f"know only {', '.join(known)}" if known else "takes none"
            raise ValidationError(f"query: unknown key {name!r}; {hint}")
        values[name.lower()] = unquote_plus(value)
    return values


def _integer(text: str) -> int:
    if not text:
        return 0
    value = int(text) if len(text) <= 20 and _INTEGER.fullmatch(text) else MAX_OFFSET + 1
    if not -MAX_OFFSET - 1 <= value <= MAX_OFFSET:
        raise ValidationError(f"query: offset must be a 64-bit integer, not {text!r}")
    return value


def _boolean(text: str) -> bool:
    if not text or text in _FALSE:
        return False
    if text in _TRUE:
        return True
    raise ValidationError(f"query: block must be true or false, not {text!r}")


class _Body:
    """The body of a PUT as an append.

    Attributes:
        is_begun: some of it was taken, or asked for: it cannot be sent again.
    """

    def __init__(self, opening: pb.AppendRequest, request: web.BaseRequest) -> None:
        self.is_begun = False
        self._opening = opening
        self._request = request
        self._content = b""

    @property
    def opening(self) -> bytes:
        """The encoded request that opens the append."""
        return self._opening.SerializeToString()

    async def small(self) -> bytes:
        """Return all content, if it is small and plain, or nothing."""
        length = self._request.content_length or 0
        is_plain = not self._request.headers.get("Content-Encoding")
        if 0 < length <= SMALL_BODY_BYTES and is_plain:
            self._content = await self._request.read()
        return self._content

    async def items(self) -> AsyncGenerator[AppendItem]:
        """Yield the append's messages. A body that breaks off raises, and so rolls back."""
        decoder = decoder_of(self._request.headers.get("Content-Encoding", ""))
        yield self._opening
        if self._content:
            yield self._content
            yield pb.AppendRequest()
            return
        self.is_begun = True
        async for encoded in self._request.content.iter_any():
            if decoder is None:
                if encoded:
                    yield encoded
                continue
            for content in decoder.feed(encoded):
                yield content
        if decoder is not None:
            decoder.finish()
        yield pb.AppendRequest()


def _lacks_route(response: pb.ReadResponse | pb.AppendResponse | Chunk | None) -> bool:
    return isinstance(response, pb.ReadResponse | pb.AppendResponse) and response.status in {
        pb.NO_JOURNAL_PRIMARY_BROKER,
        pb.INSUFFICIENT_JOURNAL_BROKERS,
    }


# ----------------------------------------------------------------- responses


class _Head(NamedTuple):
    """Metadata of a read before its first byte."""

    status: int
    headers: dict[str, str]
    offset: int


async def _answer_read(
    request: web.BaseRequest,
    target: Target,
    first: pb.ReadResponse | Chunk | None,
    items: AsyncGenerator[pb.ReadResponse | Chunk],
    masking: Masking | None,
) -> web.StreamResponse:
    if first is None:
        return text_error(
            500,
            "the broker ended the read before content came: it is stopping, or the token has "
            "expired; ask again",
        )
    assert isinstance(first, pb.ReadResponse), "a read begins with its metadata"
    headers = _read_headers(first, target)
    if first.status != pb.OK:
        response = text_error(_HTTP_STATUS.get(first.status, 500), pb.Status.Name(first.status))
        response.headers.update(headers)
        return response
    if request.method == "HEAD":
        return web.Response(status=206, headers=headers)
    if masking is None:
        return await _stream(request, headers, first.offset, items, None)
    headers[MASKED_HEADER] = "true"
    headers.pop("X-Fragment-Location", None)  # who has that URL needs no token
    return await _stream(request, headers, first.offset, items, masking(first.offset))


async def _stream(
    request: web.BaseRequest,
    headers: dict[str, str],
    offset: int,
    items: AsyncGenerator[pb.ReadResponse | Chunk],
    masked: MaskedContent | None,
) -> web.StreamResponse:
    """Answer with content as it comes; the trailer says why it ended."""
    response = TrailedResponse(status=206, headers={**headers, "Trailer": "X-Close-Error"})
    closed = CLOSED_CLEANLY
    try:
        async for item in items:
            if isinstance(item, Chunk):
                content = item.content
                if not response.prepared:
                    response.media_type = (
                        guess_content_type(content) if masked is None else MASKED_MEDIA_TYPE
                    )
                    await response.prepare(request)
                if masked is None:
                    await response.write(content)
                else:
                    await masked.write(response, content)
                offset += len(content)
            elif item.status != pb.OK:
                closed = pb.Status.Name(item.status)
                break
            elif item.offset != offset:
                closed = "offset jump"
                break
    except GazetteError as error:
        closed = str(error)
    if not response.prepared:
        await response.prepare(request)
    if masked is not None:
        await response.write(masked.finish())
    await response.finish("X-Close-Error", closed)
    return response


def _read_headers(response: pb.ReadResponse, target: Target) -> dict[str, str]:
    headers = {**_route_headers(response.header.route, target), **CONTENT_HEADERS}
    if response.HasField("fragment"):
        headers["X-Fragment-Name"] = content_name(response.fragment)
        if response.fragment.mod_time:
            headers["X-Fragment-Last-Modified"] = formatdate(
                response.fragment.mod_time, usegmt=True
            )
    if response.fragment_url:
        headers["X-Fragment-Location"] = response.fragment_url
    if response.status == pb.OK:
        headers["Content-Range"] = f"bytes {response.offset}-{MAX_OFFSET}/{MAX_OFFSET}"
    if response.write_head:
        headers["X-Write-Head"] = str(response.write_head)
    return headers


def _append_response(response: pb.AppendResponse, target: Target) -> web.Response:
    if response.status != pb.OK:
        text = pb.Status.Name(response.status)
        if response.store_health_error:
            text += f": {response.store_health_error}"
        return text_error(500, text)
    commit = response.commit
    return web.Response(
        status=204,
        headers={
            **_route_headers(response.header.route, target),
            "X-Commit-Begin": str(commit.begin),
            "X-Commit-End": str(commit.end),
            "X-Commit-SHA1-Sum": digest_of(commit.sum).hex(),
            "X-Write-Head": str(commit.end),
        },
    )


def _route_headers(route: pb.Route, target: Target) -> dict[str, str]:
    headers: dict[str, str] = {}
    if route.members:
        headers["X-Route-Token"] = route_token(route)
    if 0 <= route.primary < len(route.endpoints):
        headers["Location"] = _location(urlsplit(route.endpoints[route.primary]), target.path)
    return headers


def _location(endpoint: SplitResult, path: str) -> str:
    return endpoint._replace(path=endpoint.path.rstrip("/") + quote_path(path)).geturl()


def route_token(route: pb.Route) -> str:
    """Return a Route in compact protobuf text, as far as a header can carry it."""
    parts = [
        f"members:<zone:{_quoted(member.zone)} suffix:{_quoted(member.suffix)} >"
        for member in route.members
    ]
    if route.primary:
        parts.append(f"primary:{route.primary}")
    parts += [f"endpoints:{_quoted(endpoint)}" for endpoint in route.endpoints]
    return " ".join(parts)


def _quoted(text: str) -> str:
    """Return a string in protobuf's text format: quoted, in printable ASCII."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    named = {0x22: '\\"', 0x5C: "\\\\", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}
    plain = (
        named.get(byte) or (chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:03o}")
        for byte in text.encode()
    )
    return f'"{"".join(plain)}"'
