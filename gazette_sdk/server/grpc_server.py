"""Services on gRPC.

A service is a plain async object: messages in, messages out, typed errors. This server registers
its methods with grpc.aio as functions over raw bytes, so that a method may have its own encoding
(hand-built bytes for content). It adds to each of them the :class:`Call`, status codes for errors,
metrics, and an orderly end of streams.

**End of a refused stream.** If a server ends a call while the client is still sending, a grpcio
client may report ``Internal error from Core`` instead of the status. So a call that ends before
its client has half-closed first reads the remaining messages, within a bound.

**Begin of a call.** All methods are registered as ones of streams, because grpc.aio calls the
function of a unary method only once the whole request is there. The token is seen before: a call
with a good one lifts the limits of its connection (:mod:`~gazette_sdk.server.splice`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from gazette_sdk.errors import CallError, GazetteError, UnauthenticatedError
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability
from gazette_sdk.protocol.rules import ERROR_METADATA, Rpc
from gazette_sdk.server.authorization import FOREIGN_CHUNK_BYTES, Call, call_of
from gazette_sdk.server.metrics import SUCCESS, CallStatus, malformed, meters_of, outcome_of
from gazette_sdk.server.splice import Splicer

DEFAULT_MAX_RECEIVE_BYTES = 4 * 1024 * 1024
"""Default of the greatest message accepted."""

DRAIN_QUIET_S = 0.1
"""Silence after which a refused stream is no longer read."""

DRAIN_TIMEOUT_S = 5.0
"""Greatest time for which a refused stream is read."""

REQUEST_TIMEOUT_S = 30.0
"""Seconds in which the request of a unary call must be complete."""

UNKNOWN_REQUEST_TIMEOUT_S = 1.0
"""The same for a client without a good token."""

INCOMPLETE_BYTES_MAX = 64 << 20
"""Memory of requests that are not complete. So many greatest requests may be incomplete for longer
than :data:`INCOMPLETE_AGE_S`; beyond it the oldest ones are refused."""

INCOMPLETE_AGE_S = 0.25
"""Age from which an incomplete request may be refused, so that a burst of complete ones is not."""


@dataclass(frozen=True, slots=True)
class Method:
    """RPC with the function that serves it.

    Attributes:
        rpc: its name, path and shape.
        serve: called with the request (or the async iterator of requests) and the
            :class:`~gazette_sdk.server.authorization.Call`; returns an awaitable of the response,
            or an async generator of responses.
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

    Attributes:
        active: running calls.
        authority: verifies the token of a connection's first calls.
        incomplete: unary requests that are being received.
    """

    def __init__(self, *, max_receive_bytes: int = DEFAULT_MAX_RECEIVE_BYTES) -> None:
        self.active: set[ActiveCall] = set()
        self.authority: Authority | AllowAll = AllowAll()
        self.incomplete = _IncompleteRequests(INCOMPLETE_BYTES_MAX // max_receive_bytes)
        self._splicer: Splicer | None = None
        self._max_receive_bytes = max_receive_bytes
        self._services: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        self._server: grpc.aio.Server | None = None

    def add(self, methods: Iterable[Method]) -> None:
        """Serve further RPCs. Call before :meth:`start`."""
        for method in methods:
            _, service, name = method.rpc.path.split("/")
            self._services.setdefault(service, {})[name] = _Handler(self, method).generic()

    async def start(self, splicer: Splicer) -> None:
        """Serve on the Unix socket of a splicer, which must not exist yet."""
        self._splicer = splicer
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
        server.add_insecure_port(f"unix:{splicer.path}")
        await server.start()
        self._server = server

    def admit(self, context: grpc.aio.ServicerContext) -> tuple[str, UnauthenticatedError | None]:
        """Lift the limits of a call's connection if the call has a good token.

        The service checks the token of each call itself, with the capability that it requires.

        Returns:
            the IP address of the caller, and the error of its token if the limits stay.
        """
        assert self._splicer is not None, "calls come after the start"
        connection = self._splicer.find(context.peer())
        if connection is None:
            return "", None
        if not connection.is_known:
            token = dict(context.invocation_metadata()).get("authorization")
            try:
                self.authority.verify(token, Capability(0), time.time())
            except UnauthenticatedError as error:
                return connection.peer, error
            connection.admit()
        return connection.peer, None

    async def stop(self, grace_s: float) -> None:
        """Accept no further calls. Wait ``grace_s`` for running ones, then cancel them."""
        if self._server is not None:
            await self._server.stop(grace_s or None)
            self._server = None


class _IncompleteRequests:
    """Unary requests that are being received, oldest first.

    Args:
        count_max: number of them that may stand still.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = max(1, count_max)
        self._receiving: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def receiving(self, bound: asyncio.Timeout) -> Iterator[None]:
        """Count a request while the context is open."""
        self._receiving[bound] = time.monotonic()
        self._check_later()
        try:
            yield
        finally:
            del self._receiving[bound]

    def _check_later(self) -> None:
        if len(self._receiving) > self._count_max and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INCOMPLETE_AGE_S, self._check)

    def _check(self) -> None:
        """End the waits for the oldest requests, as far as there are too many."""
        self._timer = None
        many = len(self._receiving) - self._count_max
        until_s = time.monotonic() - INCOMPLETE_AGE_S
        for bound, begun_s in itertools.islice(self._receiving.items(), max(0, many)):
            if begun_s > until_s:
                break
            if not bound.expired():
                bound.reschedule(0.0)
        self._check_later()


async def _request_of(
    context: grpc.aio.ServicerContext,
    incomplete: _IncompleteRequests,
    refusal: UnauthenticatedError | None,
) -> bytes:
    """Return the request of a unary call.

    Args:
        context: of the call.
        incomplete: counts it until it is complete. Those of unknown clients are not counted: their
            connections have a bound of their own.
        refusal: error of the token of an unknown client.

    Raises:
        CallError: it is not complete in time, or others need its place, or there is none.
        UnauthenticatedError: the same for an unknown client. The connection lets few of its bytes
            through, so that a large request is never complete.
    """
    timeout_s = REQUEST_TIMEOUT_S if refusal is None else UNKNOWN_REQUEST_TIMEOUT_S
    try:
        async with asyncio.timeout(timeout_s) as bound:
            with incomplete.receiving(bound) if refusal is None else contextlib.nullcontext():
                wire = await context.read()
    except TimeoutError:
        raise refusal or CallError(
            f"the request was not complete within {timeout_s:g} s, or others needed its place: "
            "send it faster",
            code="DEADLINE_EXCEEDED",
        ) from None
    if wire is grpc.aio.EOF:
        raise CallError("the call has no request: send one", code="INTERNAL")
    return bytes(wire)


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

    def __init__(self, server: GrpcServer, method: Method) -> None:
        self._server = server
        self._path = method.rpc.path
        self._serve = method.serve
        self._streams = (method.rpc.client_streams, method.rpc.server_streams)
        parse = method.rpc.request_type.FromString
        self._decode = method.decode or (lambda wire, _first: parse(wire))
        self._encode = method.encode or (lambda message: bytes(message.SerializeToString()))
        self._meters = meters_of(method.rpc.path, *self._streams)
        self._active = server.active

    def generic(self) -> grpc.RpcMethodHandler:
        """Return the handler to register, over raw bytes in both directions."""
        make: Any = (
            grpc.stream_stream_rpc_method_handler
            if self._streams[1]
            else grpc.stream_unary_rpc_method_handler
        )
        handler: grpc.RpcMethodHandler = make(
            self._serve_stream if self._streams[0] else self._serve_message
        )
        return handler

    async def _serve_message(self, _requests: object, context: grpc.aio.ServicerContext) -> bytes:
        peer, refusal = self._server.admit(context)

        async def respond(call: Call) -> bytes:
            wire = await _request_of(context, self._server.incomplete, refusal)
            self._meters.received += 1
            request = _decoded(self._decode, wire, self._path, first=True)
            return await self._respond(request, call, context)

        return await self._run(context, peer, None, respond)

    async def _serve_stream(self, _requests: object, context: grpc.aio.ServicerContext) -> bytes:
        requests = _Requests(context, self._decode, self._path)
        return await self._run(
            context,
            self._server.admit(context)[0],
            requests,
            lambda call: self._respond(requests, call, context),
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

    async def _run(
        self,
        context: grpc.aio.ServicerContext,
        peer: str,
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
                    peer=peer,
                )
            )
        except asyncio.CancelledError:
            outcome = CallStatus("CANCELLED")
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
