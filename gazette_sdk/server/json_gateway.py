"""Gateway of RPCs as JSON over HTTP, under ``/v1/`` (protocol section 15, shard section 2).

A streaming RPC answers with one JSON object per message, each on its own line; a unary RPC with the
one message. Which RPCs there are is a table, given by the service.
"""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import orjson
from aiohttp import web
from google.protobuf import json_format
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gazette_sdk.errors import CallError, GazetteError, UnauthenticatedError
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability
from gazette_sdk.protocol.non_null_fields import complete, json_fields
from gazette_sdk.server.call import Call
from gazette_sdk.server.http import Target
from gazette_sdk.server.peer_limits import peer_of

__all__ = ["JsonGateway", "JsonStream", "JsonUnary", "message_json"]

BODY_BYTES_MAX = 16 << 10
"""Greatest body of a request. A request is parsed on the event loop, for about a millisecond per
KiB, and the longest of them is a selector."""

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
    """

    capability: Capability
    request: type[Message]
    serve: Callable[[Any, Call], AsyncGenerator[Message]]


@dataclass(frozen=True, slots=True)
class JsonUnary:
    """RPC that answers with one message.

    Attributes:
        capability: that a caller needs.
        request: type of the request.
        serve: serves a request.
    """

    capability: Capability
    request: type[Message]
    serve: Callable[[Any, Call], Awaitable[Message]]


class JsonGateway:
    """Answers ``/v1/…``. Mount it at ``/v1/``.

    Args:
        methods: the RPCs, by path.
        authority: verifies tokens before a request is parsed. The service checks them again.
        allow_origins: origins whose pages may call from a browser.
    """

    def __init__(
        self,
        methods: Mapping[str, JsonStream | JsonUnary],
        *,
        authority: Authority | AllowAll | None = None,
        allow_origins: Iterable[str] = (),
    ) -> None:
        self._methods = dict(methods)
        self._authority = authority or AllowAll()
        self._allow_origins = frozenset(allow_origins)

    async def __call__(self, request: web.Request, target: Target) -> web.StreamResponse:
        """Answer a request."""
        cors = self._cors(request.headers.get("Origin", ""))
        if request.method == "OPTIONS":
            return web.Response(headers=cors)
        call = Call(
            authorization=request.headers.get("Authorization"),
            peer=peer_of((request.remote or "",)),
        )
        method = self._methods.get(target.path)
        if request.method != "POST" or method is None:
            return _refusal(501, 12, "Not Implemented", cors)
        try:
            self._authority.verify(call.authorization, method.capability, time.time())
            parsed = await _parsed(request, method.request())
        except json_format.ParseError as error:
            return _refusal(400, 3, str(error), cors)
        except UnauthenticatedError as error:
            return await _refuse(request, method, error, cors)
        if isinstance(method, JsonUnary):
            return await _unary(method, parsed, call, cors)
        async with aclosing(method.serve(parsed, call)) as messages:
            return await _stream(request, messages, cors)

    def _cors(self, origin: str) -> dict[str, str]:
        if origin not in self._allow_origins:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": _CORS_METHODS,
            "Access-Control-Allow-Headers": _CORS_HEADERS,
        }


M = TypeVar("M", bound=Message)


async def _parsed(request: web.Request, message: M) -> M:
    """The request's body; an empty one is the default request.

    Raises:
        json_format.ParseError: it is not the JSON of such a message.
        web.HTTPRequestEntityTooLarge: it is too long.
    """
    body = b""
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(
                max_size=BODY_BYTES_MAX,
                actual_size=len(body),
                text=f"the body is longer than {BODY_BYTES_MAX} bytes; use a shorter selector",
            )
    if not body.strip():
        return message
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise json_format.ParseError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise json_format.ParseError("the body must be a JSON object")
    json_format.ParseDict(value, message, ignore_unknown_fields=True)
    return message


async def _refuse(
    request: web.Request,
    method: JsonStream | JsonUnary,
    error: GazetteError,
    cors: dict[str, str],
) -> web.StreamResponse:
    """Answer with an error, in the form of a call that has failed."""
    if isinstance(method, JsonUnary):
        return _unary_failure(error, cors)
    status, body = _failure(error)
    headers = {"Content-Type": "application/json", **cors}
    response = web.StreamResponse(status=status, headers=headers)
    await response.prepare(request)
    await response.write_eof(body)
    return response


async def _stream(
    request: web.Request, messages: AsyncGenerator[Message], cors: dict[str, str]
) -> web.StreamResponse:
    """Answer with a line per message; an error before the first one is the whole answer."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", **cors})
    failed = b""
    try:
        async for message in messages:
            if not response.prepared:
                response.headers["Grpc-Metadata-Content-Type"] = "application/grpc"
                await response.prepare(request)
            await response.write(_json({"result": message_json(complete(message))}) + b"\n")
    except GazetteError as error:
        status, failed = _failure(error)
        if not response.prepared:
            response.set_status(status)
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof(failed)
    return response


async def _unary(
    method: JsonUnary, request: Message, call: Call, cors: dict[str, str]
) -> web.Response:
    """Answer with the one message of a call, or with its error."""
    try:
        message = await method.serve(request, call)
    except GazetteError as error:
        return _unary_failure(error, cors)
    headers = {"Grpc-Metadata-Content-Type": "application/grpc", **cors}
    return _answer(200, _json(message_json(complete(message))), headers)


def _unary_failure(error: GazetteError, cors: dict[str, str]) -> web.Response:
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


def message_json(message: Message) -> dict[str, Any]:
    """Return a message in JSON's types: all fields, with the names of the JSON mapping."""
    return {field.camelcase_name: _field_json(message, field) for field in json_fields(message)}


def _field_json(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of = field.message_type.fields_by_name["value"]
        return {str(key): _value_json(of, value[key]) for key in sorted(value)}
    if field.is_repeated:
        return [_value_json(field, item) for item in value]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _value_json(field, value)


def _value_json(field: Any, value: Any) -> Any:
    if isinstance(value, Duration):
        return value.ToJsonString()
    if isinstance(value, Message):
        return message_json(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode() if value else None
    if field.enum_type is not None:
        return _enum_json(field.enum_type, value)
    if field.cpp_type in {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}:
        return str(value)
    return value


def _enum_json(kind: EnumDescriptor, number: int) -> str | int:
    value = kind.values_by_number.get(number)
    return value.name if value is not None else number


def _json(value: Any) -> bytes:
    """JSON that is safe inside of HTML, as peers of other make write it."""
    return (
        orjson.dumps(value)
        .replace(b"<", b"\\u003c")
        .replace(b">", b"\\u003e")
        .replace(b"&", b"\\u0026")
    )
