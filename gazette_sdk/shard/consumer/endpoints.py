"""HTTP endpoints of an application: queries of a shard's state, here or at its primary.

A query (:class:`Queries`) never takes a thread that shards consume on. A peer, and all peers
together, have a bounded number of queries in progress; one more is refused at once. A query whose
caller leaves, or whose time is over, is interrupted: its store is made to give up what it computes,
as SQLite can, and its thread gets an exception between two steps of Python code. It keeps its place
until it has returned.

A call, over HTTP or gRPC (:class:`EndpointCalls`), names its shard, or the endpoint declares the
mapping that finds it: the journal to which messages of these parameters are published has a shard.
If another process is its primary, the call goes there, once, with the resolution's header.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as AbstractMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from google.protobuf import json_format

from gazette_sdk.errors import (
    CallCancelledError,
    CallError,
    ConfigurationError,
    DeadlineExceededError,
    GazetteError,
    MappingError,
    ShardStatusError,
    UnauthenticatedError,
    UnavailableError,
    UserCodeError,
)
from gazette_sdk.message.mapping import Mapping, SelectorMapping, Watches
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Capability, Claims, RequestedClaims
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.shard_spec import ID
from gazette_sdk.server.authorization import PROXY_HEADER_METADATA, Authorization, Call
from gazette_sdk.server.http import CONTENT_HEADERS, Target, origin_form
from gazette_sdk.server.listener import PeerLimits, peer_of
from gazette_sdk.shard.application.application import Endpoint, Handler, Parameters, Query
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.resolver import ShardResolution, ShardResolver, primary_of
from gazette_sdk.shard.consumer.shard import LocalShard
from gazette_sdk.shard.transaction.tables import Table
from gazette_sdk.shard.transaction.windows import Declared
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import Tls
from gazette_sdk.user_code import (
    acontained,
    contained,
    described,
    exit_within,
    is_async,
    on_worker,
    text_of,
)

T = TypeVar("T")

QUERIES_MAX = 64
"""Queries in progress in a process, and threads for those of ``def`` functions."""

QUERIES_OF_PEER_MAX = 16
"""Queries in progress of one client, at the process that it asked."""


class Queries:
    """Queries in progress in a process.

    Args:
        count_max: bound of all.
        of_peer_max: bound of those of one IP address.
    """

    def __init__(
        self, *, count_max: int = QUERIES_MAX, of_peer_max: int = QUERIES_OF_PEER_MAX
    ) -> None:
        self._count_max = count_max
        self._count = 0
        self._peers = PeerLimits(
            calls_max=of_peer_max, calls_remedy="or ask other processes of the application"
        )
        self._threads = ThreadPoolExecutor(count_max, thread_name_prefix="query")

    @contextlib.contextmanager
    def counted(self, call: Call) -> Iterator[None]:
        """Count a query while the context is open.

        One that another process forwards was counted for its peer there.

        Raises:
            CallError: RESOURCE_EXHAUSTED: too many are in progress.
        """
        if self._count >= self._count_max:
            raise CallError(
                f"{self._count_max} queries are in progress in this process already; try again"
                " later, or start more processes",
                code="RESOURCE_EXHAUSTED",
            )
        with self._peers.calling("" if call.proxy_header is not None else call.peer):
            self._count += 1
            try:
                yield
            finally:
                self._count -= 1

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function of a request on a thread, until it returns or is interrupted."""
        return await self._run(_Running(function, arguments, None))

    async def run_over(
        self, store: object, function: Callable[..., T], *arguments: object, **named: object
    ) -> T:
        """Call a function of a view of a store, as :meth:`run`.

        Args:
            store: the store, which must stay open until this has ended.
            function: called with the view.
            arguments: its further arguments.
            named: those by name.
        """
        return await self._run(_Running(function, arguments, store, named))

    async def _run(self, running: _Running[T]) -> T:
        return await on_worker(self._threads, running, on_cancelled=running.interrupt)

    def shut_down(self) -> None:
        """Start no further query. Those in progress are interrupted with their calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _InterruptedQueryError(BaseException):
    """Interruption of a query: no failure that its function is to handle."""


class _Running(Generic[T]):
    """Call of one query's function, on a thread of its own.

    Args:
        function: called with the view of the store, if there is one, and the arguments.
        arguments: arguments of the function.
        store: its store; None of a function that is about no shard.
        named: arguments by name.
    """

    def __init__(
        self,
        function: Callable[..., T],
        arguments: Sequence[object],
        store: object,
        named: AbstractMapping[str, object] | None = None,
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._store = store
        self._named = named or {}
        self._lock = threading.Lock()  # held where the fields below change
        self._thread = 0
        self._view: Any = None
        self._is_interrupted = False

    def __call__(self) -> T:
        """Call the function.

        Raises:
            CallCancelledError: it was interrupted.
            Exception: whatever the function raises.
        """
        try:
            with contextlib.nullcontext() if self._store is None else view_of(self._store) as view:
                self._begin(view)
                try:
                    first = () if self._store is None else (view,)
                    return contained(self._function, *first, *self._arguments, **self._named)
                finally:
                    self._end()
        except _InterruptedQueryError as error:
            self._end()  # it may have come within the first call
            raise CallCancelledError("the query was interrupted: its caller has left") from error

    def interrupt(self) -> None:
        """Interrupt the function, from another thread. Repeated while it runs.

        A statement of SQLite that only begins now would miss the first call, for example.
        """
        with self._lock:
            self._is_interrupted = True
            if not self._thread:
                return
            interrupt = getattr(self._view, "interrupt", None)
            if interrupt is not None:
                interrupt()
            _raise_in(self._thread, _InterruptedQueryError)

    def _begin(self, view: object) -> None:
        with self._lock:
            if self._is_interrupted:
                raise _InterruptedQueryError
            self._thread = threading.get_ident()
            self._view = view

    def _end(self) -> None:
        """Note that the function has returned: from now on its thread is not interrupted."""
        with self._lock:
            thread, self._thread, self._view = self._thread, 0, None
        if self._is_interrupted:
            _raise_in(thread, None)  # what was not raised yet


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread between two steps of its code; None takes it back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


def view_of(store: Any) -> AbstractContextManager[Any]:
    """Return a view of what the store has committed; the store itself if it has no such view."""
    committed = getattr(store, "committed", None)
    if committed is None:
        return nullcontext(store)
    view: AbstractContextManager[Any] = contained(committed)
    return view


CALL_TIMEOUT_S = 30.0
"""Greatest duration of a call, with the wait for a shard that recovers."""

LISTING_TIMEOUT_S = 10.0
"""Bound of the wait for the first listing of an endpoint's journals."""

TOKEN_TTL_S = 60.0
"""Lifetime of the token of a forwarded call."""


class EndpointStatus(NamedTuple):
    """Status of a call that failed.

    Attributes:
        http: status of HTTP.
        grpc: name of the status code of gRPC.
    """

    http: int
    grpc: str


_STATUSES: tuple[tuple[tuple[type[Exception], ...], EndpointStatus], ...] = (
    ((UnauthenticatedError,), EndpointStatus(401, "UNAUTHENTICATED")),
    ((ConfigurationError, json_format.ParseError), EndpointStatus(400, "INVALID_ARGUMENT")),
    ((DeadlineExceededError,), EndpointStatus(504, "DEADLINE_EXCEEDED")),
    (
        (MappingError, ShardStatusError, UnavailableError, aiohttp.ClientError, OSError),
        EndpointStatus(503, "UNAVAILABLE"),
    ),
)
"""Statuses of errors, of subclasses first."""

_NOT_FOUND = EndpointStatus(404, "NOT_FOUND")
_EXHAUSTED = EndpointStatus(429, "RESOURCE_EXHAUSTED")
_FAILED = EndpointStatus(500, "UNKNOWN")


def status_of(error: Exception) -> EndpointStatus:
    """Return the status of an error."""
    if isinstance(error, ShardStatusError) and error.code == cpb.SHARD_NOT_FOUND:
        return _NOT_FOUND
    if isinstance(error, CallError) and error.code == _EXHAUSTED.grpc:
        return _EXHAUSTED
    for kinds, status in _STATUSES:
        if isinstance(error, kinds):
            return status
    return _FAILED._replace(grpc=error.code) if isinstance(error, CallError) else _FAILED


def forwarded_claims(capability: Capability, shard: str) -> RequestedClaims:
    """Return the claims of a forwarded call: what the caller needed, for this shard alone."""
    selector = pb.LabelSelector(include=label_set(((ID, shard),)))
    return RequestedClaims(capability, selector, TOKEN_TTL_S)


class EndpointCalls:
    """Resolver and runner of the calls of an application's endpoints.

    Args:
        resolver: resolves shards.
        transport: to the journals, which mappings choose from.
        queries: bounds of calls, and the threads of ``def`` functions.
        authorization: verifies callers.
        exits: called with the error of a function that raised KeyboardInterrupt or SystemExit.
        windows: windows of the application.
        tables: its tables.
    """

    def __init__(
        self,
        resolver: ShardResolver[LocalShard],
        *,
        transport: Transport,
        queries: Queries,
        authorization: Authorization,
        exits: Callable[[BaseException], None] = lambda _: None,
        windows: Declared | None = None,
        tables: Sequence[Table[Any]] = (),
    ) -> None:
        self._resolver = resolver
        self._queries = queries
        self._declared = windows
        self._tables = tables
        self._authorization = authorization
        self._exits = exits
        self._watches = Watches(transport, LISTING_TIMEOUT_S)

    async def aclose(self) -> None:
        """End watches of journals."""
        await self._watches.aclose()

    @asynccontextmanager
    async def admit(self, call: Call, capability: Capability) -> AsyncIterator[Claims]:
        """Verify the caller, and bound the body of the context in time.

        Raises:
            UnauthenticatedError: the token is missing or bad, or lacks the capability.
            CallError: RESOURCE_EXHAUSTED: too many calls are in progress.
            DeadlineExceededError: the time is over.
        """
        timeout_s = CALL_TIMEOUT_S if call.timeout_s is None else call.timeout_s
        call = replace(call, timeout_s=min(timeout_s, CALL_TIMEOUT_S))
        claims = self._authorization.verify(call, capability)
        with self._queries.counted(call):
            async with self._authorization.bound(claims, call):
                yield claims

    async def shard_of(self, by: Mapping | None, message: object, remedy: str) -> str:
        """Return the shard that reads the journal of messages like this one.

        Args:
            by: chooses the journal.
            message: what the key function sees.
            remedy: text that says how a call names its shard.

        Raises:
            ConfigurationError: there is no mapping.
            MappingError: there is no journal or no shard for the message.
        """
        if by is None:
            raise ConfigurationError(remedy)
        if isinstance(by, SelectorMapping):
            partitions = await self._watches.partitions(by)
            journal = self._contained(by.pick, message, partitions)
        else:
            journal = self._contained(by, message)
        shards = self._resolver.shards_of(journal)
        if not shards:
            raise MappingError(f"no shard reads {journal} yet; try again", journal=journal)
        return shards[0].id

    @asynccontextmanager
    async def resolve(
        self, shard: str, claims: Claims, call: Call, header: pb.Header | None = None
    ) -> AsyncIterator[ShardResolution[LocalShard]]:
        """Resolve the shard of a call, here or elsewhere; its store stays open meanwhile.

        Args:
            shard: its id.
            claims: the caller's.
            call: the call. One that was forwarded is not forwarded again.
            header: header of the process that forwarded it, if the call does not have it.

        Raises:
            ShardStatusError: no process serves the shard now, or the caller may not see it.
            GazetteError: this process stops, or the call was forwarded to another one.
            json_format.ParseError: the header is malformed.
        """
        if call.proxy_header is not None:
            header = json_format.Parse(call.proxy_header, pb.Header())
        async with self._resolver.resolve(
            shard, claims, may_proxy=header is None, proxy_header=header
        ) as resolution:
            if resolution.status != cpb.OK:
                raise ShardStatusError(resolution.status, shard=shard)
            yield resolution

    async def run(
        self,
        serve: Handler,
        shard: LocalShard,
        parameters: dict[str, str],
        *,
        request: object,
        body: bytes = b"",
    ) -> Any:
        """Call a function with a query of a shard's store.

        Args:
            serve: the function.
            shard: the shard, of which this process is the primary.
            parameters: further arguments of the function.
            request: the request.
            body: its body.

        Returns:
            What the function returns.
        """
        assert shard.handle is not None, "its store is ready"
        query = partial(
            Query,
            shard=shard.handle,
            request=request,
            body=body,
            declared=self._declared,
            tables=self._tables,
        )
        with self._ending():
            if is_async(serve):
                return await _acall(serve, shard.store, query, parameters)
            # It needs the store until it returns, also if the caller gives up.
            return await self._queries.run_over(shard.store, _call, serve, query, parameters)

    async def run_alone(self, serve: Handler, request: object) -> Any:
        """Call a function of a request that is about no shard."""
        with self._ending():
            if is_async(serve):
                return await acontained(serve, request)
            return await self._queries.run(serve, request)

    def named_shard(self, shard_of: Callable[[Any], str] | None, request: object) -> str:
        """Return the id of the shard that a request names; empty if it names none."""
        return "" if shard_of is None else self._contained(shard_of, request)

    def _contained(self, function: Callable[..., str], *arguments: object) -> str:
        with self._ending():
            return contained(function, *arguments)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End the process in order after a call whose function raised what ends it."""
        try:
            yield
        except UserCodeError as error:
            if exit_within(error) is not None:
                self._exits(error)
            raise


async def _acall(
    serve: Handler, store: Any, query: Callable[..., Query[Any]], parameters: dict[str, str]
) -> Any:
    """Call an ``async def`` function, on the event loop."""
    with view_of(store) as view:
        return await acontained(serve, query(store=view), **parameters)


def _call(
    view: Any, serve: Handler, query: Callable[..., Query[Any]], parameters: dict[str, str]
) -> Any:
    """Call a ``def`` function, on a thread."""
    return contained(serve, query(store=view), **parameters)


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

    async def __call__(self, request: web.BaseRequest, target: Target) -> web.StreamResponse | None:
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
        self, endpoint: Endpoint, parameters: dict[str, str], request: web.BaseRequest
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
        request: web.BaseRequest,
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
        self, request: web.BaseRequest, body: bytes, shard: str, header: pb.Header
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


async def _body(request: web.BaseRequest) -> bytes:
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
