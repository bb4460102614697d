"""Gateway of RPCs as JSON over HTTP, under ``/v1/`` (protocol section 15, shard section 2).

A streaming RPC answers with one JSON object per message, each on its own line; a unary RPC with the
one message. Which RPCs there are is a table, given by the service. Rows of lists are encoded once,
and other tasks of the event loop run between them: a list of 10,000 rows takes long.

The request is the body of a POST. Calls that only show something may be made by GET, too: then the
scalar fields of the request are parameters of the query.
"""

from __future__ import annotations

import asyncio
import base64
import time
import zlib
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from operator import attrgetter
from typing import Any
from urllib.parse import parse_qsl

import orjson
from aiohttp import web
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gazette_sdk.errors import CallError, GazetteError, UnauthenticatedError
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability
from gazette_sdk.protocol.rules import OWN_FIELDS_FROM, RPCS_BY_REQUEST, is_non_null
from gazette_sdk.server.authorization import Call, NoteRefusal
from gazette_sdk.server.http import Target, accepts_gzip
from gazette_sdk.server.listener import peer_of

BODY_BYTES_MAX = 16 << 10
"""Greatest body of most requests, which are parsed on the event loop, for about a millisecond per
KiB, and the longest of which is a selector. Longer ones are parsed on a thread."""

_GRPC_CODES = {
    "CANCELLED": (1, 408),
    "UNKNOWN": (2, 500),
    "INVALID_ARGUMENT": (3, 400),
    "DEADLINE_EXCEEDED": (4, 504),
    "NOT_FOUND": (5, 404),
    "ALREADY_EXISTS": (6, 409),
    "PERMISSION_DENIED": (7, 403),
    "RESOURCE_EXHAUSTED": (8, 429),
    "FAILED_PRECONDITION": (9, 400),
    "ABORTED": (10, 409),
    "OUT_OF_RANGE": (11, 400),
    "UNIMPLEMENTED": (12, 501),
    "INTERNAL": (13, 500),
    "UNAVAILABLE": (14, 503),
    "DATA_LOSS": (15, 500),
    "UNAUTHENTICATED": (16, 401),
}
"""gRPC status codes: their numbers, and the HTTP statuses they map to."""

_CORS_METHODS = "GET, POST, OPTIONS"
_CORS_HEADERS = (
    "Cache-Control, Content-Language, Content-Length, Content-Type, Expires, Last-Modified, "
    "Pragma, Authorization"
)


@dataclass(frozen=True, slots=True)
class JsonStream:
    """RPC that answers with a stream of messages.

    Attributes:
        capability: that a caller needs.
        request: type of the request.
        serve: serves a request.
        allows_get: True for a call that may be made by GET, too: it changes nothing.
    """

    capability: Capability
    request: type[Message]
    serve: Callable[[Any, Call], AsyncGenerator[Message]]
    allows_get: bool = False


@dataclass(frozen=True, slots=True)
class JsonUnary:
    """RPC that answers with one message.

    Attributes:
        capability: that a caller needs.
        request: type of the request.
        serve: serves a request.
        allows_get: True for a call that may be made by GET, too: it changes nothing.
        body_bytes_max: greatest body of a request.
    """

    capability: Capability
    request: type[Message]
    serve: Callable[[Any, Call], Awaitable[Message]]
    allows_get: bool = False
    body_bytes_max: int = BODY_BYTES_MAX


class JsonGateway:
    """Answers ``/v1/…``. Mount it at ``/v1/``.

    Args:
        methods: the RPCs, by path.
        authority: verifies tokens before a request is parsed. The service checks them again.
        allow_origins: origins whose pages may call from a browser.
        note_refusal: records calls that are refused here; None for none.
    """

    def __init__(
        self,
        methods: Mapping[str, JsonStream | JsonUnary],
        *,
        authority: Authority | AllowAll | None = None,
        allow_origins: Iterable[str] = (),
        note_refusal: NoteRefusal | None = None,
    ) -> None:
        self._methods = dict(methods)
        self._note_refusal = note_refusal
        self._authority = authority or AllowAll()
        self._allow_origins = frozenset(allow_origins)

    async def __call__(self, request: web.BaseRequest, target: Target) -> web.StreamResponse:
        """Answer a request."""
        cors = cors_headers(self._allow_origins, request)
        if request.method == "OPTIONS":
            return web.Response(headers=cors)
        call = Call(
            authorization=request.headers.get("Authorization"),
            peer=peer_of((request.remote or "",)),
        )
        method = self._methods.get(target.path)
        if method is None or not _is_allowed(request.method, method):
            return _refusal(501, 12, "Not Implemented", cors)
        try:
            if method.capability & Capability.APPLY:
                check_origin(self._allow_origins, request)
            self._authority.verify(call.authorization, method.capability, time.time())
            parsed = method.request()
            if request.method == "GET":
                _parse_query(target.query, parsed)
            else:
                bytes_max = (
                    BODY_BYTES_MAX if isinstance(method, JsonStream) else method.body_bytes_max
                )
                await _parse_body(request, parsed, bytes_max)
        except json_format.ParseError as error:
            return _refusal(400, 3, str(error), cors)
        except UnauthenticatedError as error:
            if self._note_refusal is not None:
                self._note_refusal(RPCS_BY_REQUEST[method.request].name, call, error)
            return await _refuse(request, method, error, cors)
        if isinstance(method, JsonUnary):
            return await _unary(request, method, parsed, call, cors)
        async with aclosing(method.serve(parsed, call)) as messages:
            return await _stream(request, messages, cors, is_prompt=request.method == "GET")


def check_origin(allow_origins: Collection[str], request: web.BaseRequest) -> None:
    """Check that a request is not of a web page of another origin.

    A browser sends such a request without asking, and only hides the answer from the page.

    Raises:
        UnauthenticatedError: it is, and the origin is not allowed.
    """
    origin = request.headers.get("Origin", "")
    is_ours = origin.partition("://")[2] == request.headers.get("Host", "")
    if origin and not is_ours and origin not in allow_origins:
        raise UnauthenticatedError(
            f"pages of {origin} may not change anything here; allow them with --broker.allow-origin"
        )


def cors_headers(allow_origins: Collection[str], request: web.BaseRequest) -> dict[str, str]:
    """Return the headers by which a page of an allowed origin may call from a browser."""
    origin = request.headers.get("Origin", "")
    if origin not in allow_origins:
        return {}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": _CORS_METHODS,
        "Access-Control-Allow-Headers": _CORS_HEADERS,
    }


def _is_allowed(http_method: str, method: JsonStream | JsonUnary) -> bool:
    return http_method == "POST" or (http_method == "GET" and method.allows_get)


def _parse_query(query: str, message: Message) -> None:
    """Set scalar fields of a request from the query of a URL.

    Raises:
        json_format.ParseError: a parameter is no such field, or its value is not of its type.
    """
    fields = {
        name: field
        for field in message.DESCRIPTOR.fields
        if field.message_type is None
        for name in (field.name, field.camelcase_name)
    }
    values: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        field = fields.get(name)
        if field is None:
            known = ", ".join(sorted({field.name for field in fields.values()})) or "none"
            raise json_format.ParseError(f"the call has no parameter {name!r}; it has: {known}")
        value: Any = text
        if field.type == FieldDescriptor.TYPE_BOOL:
            if text not in _BOOLEANS:
                raise json_format.ParseError(f"parameter {name!r} must be true or false")
            value = _BOOLEANS[text]
        if field.is_repeated:
            values.setdefault(field.name, []).append(value)
        else:
            values[field.name] = value
    json_format.ParseDict(values, message)


_BOOLEANS = {"true": True, "false": False}


async def _parse_body(request: web.BaseRequest, message: Message, bytes_max: int) -> None:
    """Set a request from the body; an empty one is the default request.

    Raises:
        json_format.ParseError: it is not the JSON of such a message.
        web.HTTPRequestEntityTooLarge: it is too long.
    """
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > bytes_max:
            raise web.HTTPRequestEntityTooLarge(
                max_size=bytes_max,
                actual_size=len(body),
                text=f"the body is longer than {bytes_max} bytes; send a shorter request",
            )
    if len(body) > BODY_BYTES_MAX:
        await asyncio.to_thread(_parse_json, body, message)
    elif body.strip():
        _parse_json(body, message)


def _parse_json(body: bytearray, message: Message) -> None:
    """Set a request from JSON.

    Raises:
        json_format.ParseError: it is not the JSON of such a message.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise json_format.ParseError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise json_format.ParseError("the body must be a JSON object")
    json_format.ParseDict(value, message, ignore_unknown_fields=True)


async def _refuse(
    request: web.BaseRequest,
    method: JsonStream | JsonUnary,
    error: GazetteError,
    cors: dict[str, str],
) -> web.StreamResponse:
    """Answer with an error, in the form of a call that has failed."""
    if isinstance(method, JsonUnary):
        return failure_response(error, cors)
    status, body = _failure(error)
    headers = {"Content-Type": "application/json", **cors}
    response = web.StreamResponse(status=status, headers=headers)
    await response.prepare(request)
    await response.write_eof(body)
    return response


class _Body:
    """Body of a streamed answer, as the client accepts it.

    Args:
        request: the request.
        response: its answer.
    """

    def __init__(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        self._response = response
        self._gzip = None
        if accepts_gzip(request):
            response.headers.update(_GZIP_HEADERS)
            self._gzip = _gzip_compressor()

    async def write(self, content: bytes) -> None:
        """Send content at once."""
        if self._gzip is not None:
            content = self._gzip.compress(content) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        await self._response.write(content)

    async def write_eof(self, content: bytes) -> None:
        """Send the end."""
        if self._gzip is not None:
            content = self._gzip.compress(content) + self._gzip.flush()
        await self._response.write_eof(content)


_GZIP_HEADERS = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}


def _gzip_compressor() -> Any:
    """Return a compressor of lists, whose rows are alike: the fastest level suffices."""
    return zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)


BEGIN_S = 0.5
"""Time after which a stream that a URL names begins, also if it has no message yet: a client waits
for the headers."""


async def _stream(
    request: web.BaseRequest,
    messages: AsyncGenerator[Message],
    cors: dict[str, str],
    *,
    is_prompt: bool,
) -> web.StreamResponse:
    """Answer with a line per message; an error before the first one is the whole answer.

    Args:
        request: the request.
        messages: the messages.
        cors: headers of the answer.
        is_prompt: begin the answer soon, also without a message.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/json", **cors})
    body = _Body(request, response)
    failed = b""

    async def begin() -> None:
        if not response.prepared:
            response.headers["Grpc-Metadata-Content-Type"] = "application/grpc"
            await response.prepare(request)

    source = _begun_soon(messages, begin) if is_prompt else messages
    try:
        async with aclosing(source):
            async for message in source:
                await begin()
                await body.write(_json({"result": message_json(message)}) + b"\n")
    except GazetteError as error:
        status, failed = _failure(error)
        if not response.prepared:
            response.set_status(status)
    if not response.prepared:
        await response.prepare(request)
    await body.write_eof(failed)
    return response


async def _begun_soon(
    messages: AsyncGenerator[Message], begin: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Message]:
    """Yield messages. Begin the answer when the first one does not come soon."""
    first = asyncio.ensure_future(anext(messages, None))
    try:
        await asyncio.wait((first,), timeout=BEGIN_S)
        if not first.done():
            await begin()
        message = await first
    finally:
        if not first.done():
            first.cancel()
            await asyncio.wait((first,))
    while message is not None:
        yield message
        message = await anext(messages, None)


async def _unary(
    request: web.BaseRequest, method: JsonUnary, parsed: Message, call: Call, cors: dict[str, str]
) -> web.Response:
    """Answer with the one message of a call, or with its error."""
    try:
        message = await method.serve(parsed, call)
    except GazetteError as error:
        return failure_response(error, cors)
    rows = await _encode_rows(message)
    headers = {"Grpc-Metadata-Content-Type": "application/grpc", **cors}
    body = _json(message_json(message, rows))
    if accepts_gzip(request):
        compressor = _gzip_compressor()
        headers |= _GZIP_HEADERS
        body = await asyncio.to_thread(lambda: compressor.compress(body) + compressor.flush())
    return _answer(200, body, headers)


def failure_response(error: GazetteError, cors: dict[str, str]) -> web.Response:
    """Return the answer of a unary call that has failed."""
    code, status = _codes(error)
    return _refusal(status, code, str(error), cors)


def _codes(error: GazetteError) -> tuple[int, int]:
    """Return the gRPC code and the HTTP status of an error of the call."""
    return _GRPC_CODES.get(
        error.code if isinstance(error, CallError) else "UNKNOWN", _GRPC_CODES["UNKNOWN"]
    )


def _failure(error: GazetteError) -> tuple[int, bytes]:
    """HTTP status and JSON of an error of the call."""
    code, status = _codes(error)
    return status, _json(
        {
            "error": {
                "grpcCode": code,
                "httpCode": status,
                "message": str(error),
                "httpStatus": HTTPStatus(status).phrase,
                "details": [],
            }
        }
    )


def _refusal(status: int, code: int, text: str, cors: dict[str, str]) -> web.Response:
    """Return the answer to a request which is no call."""
    return _answer(status, _json({"code": code, "message": text, "details": []}), cors)


def _answer(status: int, body: bytes, cors: dict[str, str]) -> web.Response:
    return web.Response(
        status=status, body=body, headers={"Content-Type": "application/json", **cors}
    )


# ---------------------------------------------------------------------- JSON

_CACHED = frozenset(
    {
        "protocol.JournalSpec.Fragment",
        "protocol.ListResponse.Journal",
        "protocol.Route",
        "consumer.ListResponse.Shard",
    }
)
"""Messages whose JSON is kept: rows of lists, and what many rows have alike."""

_CACHED_BYTES_MAX = 32 << 20
"""Memory of the pieces, of 1.5 KiB for each journal that is listed. Beyond it they begin anew."""

SLICE_ROWS = 25
"""Rows of a unary answer that are encoded before other tasks of the event loop run."""

_FieldEncoder = Callable[[Message, Any], Any]
"""Returns the JSON of a field, given its message and its value."""


def message_json(
    message: Message, rows: Mapping[str, Sequence[Any]] | None = None
) -> dict[str, Any]:
    """Return a message in types of orjson: all fields, with the names of the JSON mapping.

    Rows of lists and parts of them are encoded already. Fields that only this implementation has
    are left out unless they are set, and so are optional fields of calls that only it has.

    Args:
        message: the message.
        rows: repeated fields that are encoded already, by their JSON names.
    """
    names, values, encoders = _plan(message.DESCRIPTOR)
    encoded = dict(zip(names, values(message), strict=True))
    for name, encode, is_ours in encoders:
        if rows and (known := rows.get(name)):
            encoded[name] = known
            continue
        found = encoded[name] = encode(message, encoded[name])
        if found is _ABSENT or (is_ours and not found):
            del encoded[name]
    return encoded


_ABSENT = object()
"""JSON of an optional field that is not set."""

_CLUSTER_PACKAGE = "gazette.cluster"
"""Package of the messages of calls that only this implementation has."""


_Plan = tuple[
    tuple[str, ...],
    Callable[[Message], tuple[Any, ...]],
    tuple[tuple[str, _FieldEncoder, bool], ...],
]
"""JSON names of fields; the getter of their values; encoders of those that are not JSON already,
with True for fields that only this implementation has."""


@cache
def _plan(kind: Descriptor) -> _Plan:
    names = tuple(field.name for field in kind.fields)
    encoders = ((field, _encoder(field)) for field in kind.fields)
    return (
        tuple(field.camelcase_name for field in kind.fields),
        # The getter of several names returns a tuple, and that of one name its value.
        attrgetter(*names) if len(names) > 1 else lambda m: tuple(getattr(m, n) for n in names),
        tuple(
            (field.camelcase_name, encode, field.number >= OWN_FIELDS_FROM)
            for field, encode in encoders
            if encode is not None
        ),
    )


def _encoder(field: Any) -> _FieldEncoder | None:
    if field.is_repeated:
        return _repeated_encoder(field)
    one = _value_encoder(field)
    if field.message_type is None:
        return _scalar_encoder(field, one)
    encode = one or _plain
    name = field.name
    if is_non_null(field):
        return lambda _, value: encode(value)
    return lambda message, value: encode(value) if message.HasField(name) else None


def _scalar_encoder(field: Any, one: Callable[[Any], Any] | None) -> _FieldEncoder | None:
    """Return the encoder of a field that is no message, given that of its values."""
    encode = one or _plain
    if field.number >= OWN_FIELDS_FROM:
        return lambda _, value: encode(value) if value else None
    if field.has_presence and field.file.package == _CLUSTER_PACKAGE:
        name = field.name
        return lambda message, value: encode(value) if message.HasField(name) else _ABSENT
    return None if one is None else lambda _, value: encode(value)


def _repeated_encoder(field: Any) -> _FieldEncoder:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of = _value_encoder(field.message_type.fields_by_name["value"]) or _plain
        return lambda _, value: {str(key): of(value[key]) for key in sorted(value)}
    one = _value_encoder(field)
    if one is None:
        return lambda _, value: list(value)
    return lambda _, value: list(map(one, value))


def _plain(value: Any) -> Any:
    return value


def _value_encoder(field: Any) -> Callable[[Any], Any] | None:
    """Return the encoder of a value; None if it is JSON already."""
    kind = field.message_type
    if kind is not None:
        if kind.full_name in _CACHED:
            return _piece_json
        return Duration.ToJsonString if kind is Duration.DESCRIPTOR else message_json
    if field.enum_type is not None:
        names = {number: of.name for number, of in field.enum_type.values_by_number.items()}
        return lambda number: names.get(number, number)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return lambda value: base64.b64encode(value).decode() if value else None
    is_long = field.cpp_type in {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}
    return str if is_long else None


class _Pieces:
    """JSON of messages, by their type and bytes."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, bytes], orjson.Fragment] = {}
        self._bytes = 0

    def encode(self, message: Message) -> orjson.Fragment:
        """Return the JSON of a message, which is kept for the next one that is equal."""
        key = (message.DESCRIPTOR.full_name, message.SerializeToString())
        piece = self._pieces.get(key)
        if piece is None:
            encoded = orjson.dumps(message_json(message))
            if self._bytes > _CACHED_BYTES_MAX:
                self._pieces.clear()
                self._bytes = 0
            self._bytes += len(key[1]) + len(encoded)
            piece = self._pieces[key] = orjson.Fragment(encoded)
        return piece


_piece_json = _Pieces().encode


async def _encode_rows(message: Message) -> dict[str, Sequence[Any]]:
    """Return the JSON of repeated messages in a message, by their JSON names.

    Other tasks run in between.
    """
    encoded: dict[str, Sequence[Any]] = {}
    for field in message.DESCRIPTOR.fields:
        kind = field.message_type
        if kind is None or not field.is_repeated or kind.GetOptions().map_entry:
            continue
        encode = _value_encoder(field) or _plain
        rows = encoded[field.camelcase_name] = []
        for number, row in enumerate(getattr(message, field.name), start=1):
            rows.append(encode(row))
            if number % SLICE_ROWS == 0:
                await asyncio.sleep(0)
    return encoded


def _json(value: Any) -> bytes:
    """JSON that is safe inside of HTML, as peers of other make write it."""
    return (
        orjson.dumps(value)
        .replace(b"<", b"\\u003c")
        .replace(b">", b"\\u003e")
        .replace(b"&", b"\\u0026")
    )
