"""HTTP endpoints of an application: queries of a shard's state, here or at its primary."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from google.protobuf import json_format

from gazette_sdk.errors import ConfigurationError, GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.server.call import PROXY_HEADER_METADATA, Call
from gazette_sdk.server.http import CONTENT_HEADERS, Target, origin_form
from gazette_sdk.server.listener import peer_of
from gazette_sdk.shard.application.endpoints import Endpoint, Parameters
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.endpoint_calls import EndpointCalls, forwarded_claims, status_of
from gazette_sdk.shard.consumer.resolver import primary_of
from gazette_sdk.shard.consumer.shard import LocalShard
from gazette_sdk.transport.wire import Tls
from gazette_sdk.user_code import described, text_of

__all__ = ["HttpEndpoints"]

BODY_BYTES_MAX = 1 << 20
"""Greatest body of a request."""

RESPONSE_BYTES_MAX = 64 << 20
"""Greatest body of a forwarded response."""

_FORWARDED = ("Content-Type", "Content-Encoding", "Location", "ETag", *CONTENT_HEADERS)
"""Headers of a forwarded response."""

_log = logging.getLogger(__name__)


class HttpEndpoints:
    """HTTP endpoints of an application. Mount it at ``/``.

    Args:
        endpoints: the endpoints.
        calls: resolves and runs calls.
        peers: signs calls to other processes.
        tls: certificates toward other processes.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        calls: EndpointCalls,
        peers: ShardClient,
        *,
        tls: Tls | None = None,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._calls = calls
        self._peers = peers
        self._tls = tls or Tls()
        self._client: aiohttp.ClientSession | None = None

    async def __call__(self, request: web.Request, target: Target) -> web.StreamResponse | None:
        """Answer a request, or return None if it is no endpoint's."""
        for endpoint in self._endpoints:
            parameters = endpoint.match(target.path)
            if parameters is not None and request.method == endpoint.method:
                try:
                    return await self._serve(endpoint, parameters, request)
                except (
                    GazetteError,
                    json_format.ParseError,
                    aiohttp.ClientError,
                    OSError,
                ) as error:
                    return _failure(status_of(error).http, text_of(error))
        return None

    async def aclose(self) -> None:
        """Close connections to other processes."""
        if self._client is not None:
            await self._client.close()

    async def _serve(
        self, endpoint: Endpoint, parameters: dict[str, str], request: web.Request
    ) -> web.StreamResponse:
        call = Call(
            authorization=request.headers.get("Authorization"),
            peer=peer_of((request.remote or "",)),
            proxy_header=request.headers.get(PROXY_HEADER_METADATA),
        )
        async with self._calls.admit(call, Capability.READ) as claims:
            shard = request.query.get("shard") or await self._calls.shard_of(
                endpoint.by,
                Parameters(parameters),
                f"name the shard of {endpoint.path} as ?shard=ID",
            )
            body = await _body(request)
            async with self._calls.resolve(shard, claims, call) as resolution:
                if resolution.shard is None:
                    try:
                        return await self._forward(request, body, shard, resolution.header)
                    except (aiohttp.ClientError, OSError) as error:
                        # Its text names the primary's endpoint, which is for this process only.
                        _log.warning("cannot forward a request about %s: %s", shard, error)
                        raise UnavailableError(
                            f"the primary of {shard} does not answer ({type(error).__name__}); try"
                            " again"
                        ) from error
                return await self._run(endpoint, parameters, request, body, resolution.shard)

    async def _run(
        self,
        endpoint: Endpoint,
        parameters: dict[str, str],
        request: web.Request,
        body: bytes,
        shard: LocalShard,
    ) -> web.StreamResponse:
        """Answer by the endpoint's function."""
        try:
            found = await self._calls.run(
                endpoint.serve, shard, parameters, request=request, body=body
            )
            return _response(found)
        except (GazetteError, asyncio.CancelledError, web.HTTPException):
            raise
        except Exception as error:  # noqa: BLE001 - any of the application's exceptions
            _log.exception("%s %s failed", endpoint.method, endpoint.path)
            return _failure(500, described(error))

    # ------------------------------------------------------------- elsewhere

    async def _forward(
        self, request: web.Request, body: bytes, shard: str, header: pb.Header
    ) -> web.StreamResponse:
        """Send the request to the primary, and its answer back."""
        peer = primary_of(shard, header)
        endpoint = peer.endpoint
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"requests are not forwarded to the primary of {shard}, which has no port: give the"
                " processes ports"
            )
        headers = {
            PROXY_HEADER_METADATA: json_format.MessageToJson(header, indent=None),
            "Content-Type": request.headers.get("Content-Type", "application/octet-stream"),
        }
        token = self._peers.authorization(forwarded_claims(Capability.READ, shard), peer)
        headers |= {} if token is None else {"Authorization": token}
        if self._client is None:
            self._client = aiohttp.ClientSession(auto_decompress=False)
        async with self._client.request(
            request.method,
            endpoint + origin_form(request.raw_path),
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
            kept = {name: answer.headers[name] for name in _FORWARDED if name in answer.headers}
            return web.Response(status=answer.status, body=bytes(content), headers=kept)


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
    """Return a function's result as a response: JSON, unless it is text, bytes or a response.

    A response of the application's own is left as it is.
    """
    if isinstance(found, web.StreamResponse):
        return found
    if isinstance(found, str):
        return web.Response(text=found, headers=CONTENT_HEADERS)
    if isinstance(found, bytes):
        kind, body = "application/octet-stream", found
    else:
        kind, body = "application/json", msgspec.json.encode(found)
    return web.Response(body=body, content_type=kind, headers=CONTENT_HEADERS)


def _failure(status: int, text: str) -> web.Response:
    body = msgspec.json.encode({"error": text})
    return web.Response(status=status, body=body, content_type="application/json")
