"""HTTP endpoints of an application: queries of a shard's state, here or at its primary.

A request names its shard by ``?shard=``, or by the mapping that the endpoint declares: the journal
to which messages of these parameters are published has a shard. If another process is the primary,
the request goes there, once, with the resolution's header in ``X-ProxyHeader``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import aiohttp
import msgspec
from aiohttp import web
from google.protobuf import json_format

from gazette_sdk.errors import (
    ConfigurationError,
    DeadlineExceededError,
    GazetteError,
    MappingError,
    ShardStatusError,
    UnauthenticatedError,
    UnavailableError,
)
from gazette_sdk.message.mapping import SelectorMapping
from gazette_sdk.message.publishing.partitions import Watches
from gazette_sdk.message.publishing.sender import AnyMapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.shard_spec import ID
from gazette_sdk.server.authorization import Authorization
from gazette_sdk.server.call import Call
from gazette_sdk.server.http import Target
from gazette_sdk.server.peer_limits import peer_of
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.application.endpoints import Endpoint, Parameters, Query
from gazette_sdk.shard.consumer.resolver import Resolver
from gazette_sdk.shard.consumer.shard import LocalShard
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wires.tls import Tls

__all__ = ["PROXY_HEADER", "HttpEndpoints"]

PROXY_HEADER = "X-ProxyHeader"
"""HTTP header of a forwarded request: the resolution's header, as JSON."""

CALL_TIMEOUT_S = 30.0
"""Bound of a request, with the wait for a shard that recovers."""

BODY_BYTES_MAX = 1 << 20
"""Greatest body of a request."""

RESPONSE_BYTES_MAX = 64 << 20
"""Greatest body of a forwarded response."""

LISTING_TIMEOUT_S = 10.0
"""Bound of the wait for the first listing of an endpoint's journals."""

TOKEN_TTL_S = 60.0
"""Lifetime of the token of a forwarded request."""

_STATUSES: tuple[tuple[tuple[type[Exception], ...], int], ...] = (
    ((UnauthenticatedError,), 401),
    ((ConfigurationError, json_format.ParseError), 400),
    ((DeadlineExceededError,), 504),
    ((MappingError, UnavailableError, aiohttp.ClientError, OSError), 503),
)
"""HTTP statuses of errors; of others it is 500."""

_log = logging.getLogger(__name__)


class HttpEndpoints:
    """Endpoints of an application. Mount it at ``/``.

    Args:
        application: declares them.
        resolver: resolves shards.
        transport: to the journals, which mappings choose from.
        workers: threads that run ``def`` functions.
        authorization: verifies callers.
        tls: certificates toward other processes.
    """

    def __init__(
        self,
        application: Application[Any, Any],
        resolver: Resolver[LocalShard],
        *,
        transport: Transport,
        workers: Executor,
        authorization: Authorization,
        tls: Tls | None = None,
    ) -> None:
        self._endpoints = tuple(application.endpoints)
        self._resolver = resolver
        self._workers = workers
        self._authorization = authorization
        self._tls = tls or Tls()
        self._watches = Watches(transport, LISTING_TIMEOUT_S)
        self._client: aiohttp.ClientSession | None = None

    async def __call__(self, request: web.Request, target: Target) -> web.StreamResponse | None:
        """Answer a request, or return None if it is no endpoint's."""
        for endpoint in self._endpoints:
            parameters = endpoint.match(target.path)
            if parameters is not None and request.method == endpoint.method:
                return await self._answer(endpoint, parameters, request)
        return None

    async def aclose(self) -> None:
        """Close connections, and end watches of journals."""
        await self._watches.aclose()
        if self._client is not None:
            await self._client.close()

    async def _answer(
        self, endpoint: Endpoint, parameters: Mapping[str, str], request: web.Request
    ) -> web.StreamResponse:
        try:
            return await asyncio.wait_for(
                self._serve(endpoint, parameters, request), CALL_TIMEOUT_S
            )
        except TimeoutError:
            return _failure(504, "the shard has not answered in time; try again")
        except (GazetteError, json_format.ParseError, aiohttp.ClientError, OSError) as error:
            return _failure(_status_of(error), str(error))

    async def _serve(
        self, endpoint: Endpoint, parameters: Mapping[str, str], request: web.Request
    ) -> web.StreamResponse:
        call = Call(
            authorization=request.headers.get("Authorization"),
            peer=peer_of((request.remote or "",)),
        )
        claims = self._authorization.verify(call, Capability.READ)
        shard = request.query.get("shard") or await self._shard_of(endpoint, parameters)
        body = await _body(request)
        given = request.headers.get(PROXY_HEADER)
        header = None if given is None else json_format.Parse(given, pb.Header())
        async with (
            self._authorization.bound(claims, call),
            self._resolver.resolve(
                shard, claims, may_proxy=header is None, proxy_header=header
            ) as resolution,
        ):
            if resolution.status != cpb.OK:
                raise ShardStatusError(resolution.status, shard=shard)
            if resolution.shard is None:
                return await self._forward(request, body, shard, resolution.header)
            return await self._run(endpoint, parameters, request, body, resolution.shard)

    async def _shard_of(self, endpoint: Endpoint, parameters: Mapping[str, str]) -> str:
        """Return the shard that reads the journal of messages with these parameters.

        Raises:
            ConfigurationError: the endpoint has no mapping, and the request names no shard.
            MappingError: there is no journal or no shard for them.
        """
        mapping = cast("AnyMapping | None", endpoint.by)
        if mapping is None:
            raise ConfigurationError(f"name the shard of {endpoint.path} as ?shard=ID")
        message = Parameters(dict(parameters))
        if isinstance(mapping, SelectorMapping):
            journal = mapping.pick(message, await self._watches.partitions(mapping))
        else:
            journal = mapping(message)
        shards = self._resolver.shards_of(journal)
        if not shards:
            raise MappingError(f"no shard reads {journal} yet; try again", journal=journal)
        return shards[0].id

    # ---------------------------------------------------------------- here

    async def _run(
        self,
        endpoint: Endpoint,
        parameters: Mapping[str, str],
        request: web.Request,
        body: bytes,
        shard: LocalShard,
    ) -> web.StreamResponse:
        """Call the endpoint's function with a view of the shard's store."""
        assert shard.handle is not None, "its store is ready"
        query = (shard.handle, request, body)
        try:
            if inspect.iscoroutinefunction(endpoint.serve):
                with _view(shard.store) as store:
                    found = await endpoint.serve(_query(store, *query), **parameters)
            else:
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(
                    self._workers, _call, endpoint, dict(parameters), shard.store, query
                )
        except (GazetteError, asyncio.CancelledError, web.HTTPException):
            raise
        except Exception as error:  # noqa: BLE001 - any of the application's exceptions
            _log.exception("%s %s failed", endpoint.method, endpoint.path)
            return _failure(500, f"{type(error).__name__}: {error}")
        return _response(found)

    # ------------------------------------------------------------- elsewhere

    async def _forward(
        self, request: web.Request, body: bytes, shard: str, header: pb.Header
    ) -> web.StreamResponse:
        """Send the request to the primary, and its answer back."""
        endpoint = header.route.endpoints[header.route.primary]
        if not endpoint.startswith(("http://", "https://")):
            raise UnavailableError(f"the primary of {shard} is at {endpoint!r}; try again")
        headers = {
            PROXY_HEADER: json_format.MessageToJson(header, indent=None),
            "Content-Type": request.headers.get("Content-Type", "application/octet-stream"),
        }
        authority = self._authorization.authority
        if isinstance(authority, Authority):
            selector = pb.LabelSelector(include=label_set(((ID, shard),)))
            token = authority.header(Capability.READ, selector, TOKEN_TTL_S, time.time())
            headers |= {} if token is None else {"Authorization": token}
        if self._client is None:
            self._client = aiohttp.ClientSession(auto_decompress=False)
        async with self._client.request(
            request.method,
            endpoint + request.raw_path,
            data=body,
            headers=headers,
            allow_redirects=False,
            ssl=self._tls.context(["http/1.1"]) if endpoint.startswith("https:") else True,
        ) as answer:
            content = bytearray()
            async for chunk in answer.content.iter_any():
                content += chunk
                if len(content) > RESPONSE_BYTES_MAX:
                    raise GazetteError(
                        f"{shard}: the answer is longer than {RESPONSE_BYTES_MAX} bytes"
                    )
            kept = {
                name: answer.headers[name]
                for name in ("Content-Type", "Content-Encoding", "Location", "ETag")
                if name in answer.headers
            }
            return web.Response(status=answer.status, body=bytes(content), headers=kept)


def _call(
    endpoint: Endpoint, parameters: dict[str, str], store: Any, query: tuple[Any, Any, bytes]
) -> Any:
    """Call a ``def`` function, on a worker thread."""
    with _view(store) as view:
        return endpoint.serve(_query(view, *query), **parameters)


def _query(store: Any, shard: Any, request: web.Request, body: bytes) -> Query[Any]:
    return Query(store=store, shard=shard, request=request, body=body)


def _view(store: Any) -> AbstractContextManager[Any]:
    """Return a view of what the store has committed; the store itself if it has no such view."""
    committed = getattr(store, "committed", None)
    if committed is None:
        return nullcontext(store)
    view: AbstractContextManager[Any] = committed()
    return view


async def _body(request: web.Request) -> bytes:
    """Return the body of a request.

    Raises:
        web.HTTPRequestEntityTooLarge: it is too long.
    """
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(max_size=BODY_BYTES_MAX, actual_size=len(body))
    return bytes(body)


def _response(found: Any) -> web.StreamResponse:
    """Return a function's result as a response: JSON, unless it is text, bytes or a response."""
    if isinstance(found, web.StreamResponse):
        return found
    if isinstance(found, str):
        return web.Response(text=found)
    if isinstance(found, bytes):
        return web.Response(body=found, content_type="application/octet-stream")
    return web.Response(body=msgspec.json.encode(found), content_type="application/json")


def _status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, ShardStatusError):
        return 404 if error.code == cpb.SHARD_NOT_FOUND else 503
    for kinds, status in _STATUSES:
        if isinstance(error, kinds):
            return status
    return 500


def _failure(status: int, text: str) -> web.Response:
    body = msgspec.json.encode({"error": text})
    return web.Response(status=status, body=body, content_type="application/json")
