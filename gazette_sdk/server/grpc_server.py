"""Services on gRPC.

A service is a plain async object: messages in, messages out, typed errors. This server registers
its methods with grpc.aio as functions over raw bytes, so that a method may have its own encoding
(hand-built bytes for content). It adds to each of them the :class:`Call`, status codes for errors,
metrics, and an orderly end of streams.

**End of a refused stream.** If a server ends a call while the client is still sending, a grpcio
client may report ``Internal error from Core`` instead of the status. So a call that ends before
its client has half-closed first reads the remaining messages, within a bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol.service import ERROR_METADATA, Rpc
from gazette_sdk.server.call import FOREIGN_CHUNK_BYTES, Call, call_of
from gazette_sdk.server.metrics import meters_of
from gazette_sdk.server.outcomes import SUCCESS, Outcome, malformed, outcome_of
from gazette_sdk.server.peer_limits import peer_of_splice

__all__ = ["DEFAULT_MAX_RECEIVE_BYTES", "ActiveCall", "GrpcServer", "Method"]

DEFAULT_MAX_RECEIVE_BYTES = 4 * 1024 * 1024
"""Default of the greatest message accepted."""

DRAIN_QUIET_S = 0.1
"""Silence after which a refused stream is no longer read."""

DRAIN_TIMEOUT_S = 5.0
"""Greatest time for which a refused stream is read."""


@dataclass(frozen=True, slots=True)
class Method:
    """RPC with the function that serves it.

    Attributes:
        rpc: its name, path and shape.
        serve: called with the request (or the async iterator of requests) and the
            :class:`~gazette_sdk.server.call.Call`; returns an awaitable of the response, or an
            async generator of responses.
        decode: decodes a request; the second argument is True for the first one of a stream. By
            default it parses the RPC's request type.
        encode: encodes a response. By default it serializes a message.
    """

    rpc: Rpc
    serve: Callable[[Any, Call], Any]
    decode: Callable[[bytes, bool], Any] | None = None
    encode: Callable[[Any], bytes] | None = None


@dataclass(eq=False, slots=True)
class ActiveCall:
    """Running call, as the diagnostics show it."""

    path: str
    begun_s: float


class GrpcServer:
    """gRPC server on a Unix socket of this process; the public port forwards to it.

    Args:
        max_receive_bytes: greatest message accepted.
    """

    def __init__(self, *, max_receive_bytes: int = DEFAULT_MAX_RECEIVE_BYTES) -> None:
        self.active: set[ActiveCall] = set()
        self._max_receive_bytes = max_receive_bytes
        self._services: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        self._server: grpc.aio.Server | None = None

    def add(self, methods: Iterable[Method]) -> None:
        """Serve further RPCs. Call before :meth:`start`."""
        for method in methods:
            _, service, name = method.rpc.path.split("/")
            self._services.setdefault(service, {})[name] = _Handler(method, self.active).generic()

    async def start(self, path: Path) -> None:
        """Serve on a Unix socket, which must not exist yet."""
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", self._max_receive_bytes),
                ("grpc.max_send_message_length", -1),
                # Clients may ping at any rate.
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_permit_without_calls", 1),
            )
        )
        for service, handlers in self._services.items():
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers),)
            )
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._server = server

    async def stop(self, grace_s: float) -> None:
        """Accept no further calls. Wait ``grace_s`` for running ones, then cancel them."""
        if self._server is not None:
            await self._server.stop(grace_s or None)
            self._server = None


class _Requests:
    """Request stream of one call; one message is read at a time."""

    def __init__(
        self, context: grpc.aio.ServicerContext, decode: Callable[[bytes, bool], Any], path: str
    ) -> None:
        self.received = 0
        self.ended = False
        self._context = context
        self._decode = decode
        self._path = path

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self.ended:
            raise StopAsyncIteration
        try:
            wire = await self._context.read()
        except asyncio.CancelledError:
            self.ended = True  # its read is still pending in the core, which allows one at a time
            raise
        if wire is grpc.aio.EOF:
            self.ended = True
            raise StopAsyncIteration
        first = self.received == 0
        self.received += 1
        return _decoded(self._decode, wire, self._path, first=first)

    async def drain(self) -> None:
        """Read until the client half-closes, is silent, or the bound is reached."""
        until_s = time.monotonic() + DRAIN_TIMEOUT_S
        while not self.ended:
            read = asyncio.ensure_future(self._context.read())
            remaining_s = min(DRAIN_QUIET_S, until_s - time.monotonic())
            done, _ = await asyncio.wait((read,), timeout=max(remaining_s, 0))
            if not done:
                # The read ends together with the call.
                read.add_done_callback(lambda read: read.cancelled() or read.exception())
                return
            if read.exception() is not None or read.result() is grpc.aio.EOF:
                self.ended = True


class _Handler:
    """Functions of one method which grpc.aio calls."""

    def __init__(self, method: Method, active: set[ActiveCall]) -> None:
        self._path = method.rpc.path
        self._serve = method.serve
        self._streams = (method.rpc.client_streams, method.rpc.server_streams)
        parse = method.rpc.request_type.FromString
        self._decode = method.decode or (lambda wire, _first: parse(wire))
        self._encode = method.encode or (lambda message: bytes(message.SerializeToString()))
        self._meters = meters_of(method.rpc.path, *self._streams)
        self._active = active

    def generic(self) -> grpc.RpcMethodHandler:
        """Return the handler to register, over raw bytes in both directions."""
        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[self._streams]
        handler: grpc.RpcMethodHandler = make(
            self._serve_stream if self._streams[0] else self._serve_message
        )
        return handler

    async def _serve_message(self, wire: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self._meters.received += 1
        return await self._run(
            context, None, lambda call: self._respond(self._first(wire), call, context)
        )

    async def _serve_stream(self, _requests: object, context: grpc.aio.ServicerContext) -> bytes:
        requests = _Requests(context, self._decode, self._path)
        return await self._run(
            context, requests, lambda call: self._respond(requests, call, context)
        )

    async def _respond(self, request: Any, call: Call, context: grpc.aio.ServicerContext) -> bytes:
        """Send all responses of a stream, or return the only one."""
        encode, meters, write = self._encode, self._meters, context.write
        if not self._streams[1]:
            response = encode(await self._serve(request, call))
            meters.sent += 1
            return response
        async with aclosing(self._serve(request, call)) as responses:
            async for response in responses:
                await write(encode(response))
                meters.sent += 1
        return b""

    def _first(self, wire: bytes) -> Any:
        return _decoded(self._decode, wire, self._path, first=True)

    async def _run(
        self,
        context: grpc.aio.ServicerContext,
        requests: _Requests | None,
        serve: Callable[[Call], Awaitable[bytes]],
    ) -> bytes:
        """Serve one call: turn its error into a status, and end its stream."""
        active = ActiveCall(self._path, time.monotonic())
        self._active.add(active)
        self._meters.started += 1
        outcome, response = SUCCESS, b""
        try:
            response = await serve(
                call_of(
                    context.invocation_metadata(),
                    timeout_s=context.time_remaining(),
                    chunk_bytes=FOREIGN_CHUNK_BYTES,
                    peer=peer_of_splice(context.peer()),
                )
            )
        except asyncio.CancelledError:
            outcome = Outcome("CANCELLED")
            raise
        except Exception as error:  # noqa: BLE001 - the outermost boundary of a call
            outcome = outcome_of(error, self._path)
            if outcome.kind:
                context.set_trailing_metadata(((ERROR_METADATA, outcome.kind),))
        finally:
            self._active.discard(active)
            self._meters.handled(outcome.code, time.monotonic() - active.begun_s)
            if requests is not None:
                self._meters.received += requests.received
        if requests is not None and not requests.ended:
            await requests.drain()
        if outcome is not SUCCESS:
            await context.abort(grpc.StatusCode[outcome.code], outcome.text)
        return response


def _decoded(decode: Callable[[bytes, bool], Any], wire: bytes, path: str, *, first: bool) -> Any:
    try:
        return decode(wire, first)
    except GazetteError:
        raise
    except Exception as error:
        raise malformed(path) from error
