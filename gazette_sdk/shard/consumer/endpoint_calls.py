"""Calls of an application's endpoints, over HTTP and gRPC: the shard, and the function here.

A call names its shard, or the endpoint declares the mapping that finds it: the journal to which
messages of these parameters are published has a shard. If another process is its primary, the call
goes there, once, with the resolution's header.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    asynccontextmanager,
    contextmanager,
)
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import aiohttp
from google.protobuf import json_format

from gazette_sdk.errors import (
    CallError,
    ConfigurationError,
    DeadlineExceededError,
    MappingError,
    ShardStatusError,
    UnauthenticatedError,
    UnavailableError,
    UserCodeError,
)
from gazette_sdk.message.mapping import Mapping, SelectorMapping, Watches
from gazette_sdk.message.sender import AnyMapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Capability, Claims, RequestedClaims
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.shard_spec import ID
from gazette_sdk.server.authorization import Authorization
from gazette_sdk.server.call import Call
from gazette_sdk.shard.application.endpoints import Handler, Query
from gazette_sdk.shard.consumer.queries import Queries, view_of
from gazette_sdk.shard.consumer.resolver import Resolution, Resolver
from gazette_sdk.shard.consumer.shard import LocalShard
from gazette_sdk.transport.base import Transport
from gazette_sdk.user_code import acontained, contained, exit_within

__all__ = ["EndpointCalls", "EndpointStatus", "forwarded_claims", "status_of"]

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
    """

    def __init__(
        self,
        resolver: Resolver[LocalShard],
        *,
        transport: Transport,
        queries: Queries,
        authorization: Authorization,
        exits: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._resolver = resolver
        self._queries = queries
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
        mapping = cast("AnyMapping | None", by)
        if mapping is None:
            raise ConfigurationError(remedy)
        if isinstance(mapping, SelectorMapping):
            partitions = await self._watches.partitions(mapping)
            journal = self._contained(mapping.pick, message, partitions)
        else:
            journal = self._contained(mapping, message)
        shards = self._resolver.shards_of(journal)
        if not shards:
            raise MappingError(f"no shard reads {journal} yet; try again", journal=journal)
        return shards[0].id

    @asynccontextmanager
    async def resolve(
        self, shard: str, claims: Claims, call: Call, header: pb.Header | None = None
    ) -> AsyncIterator[Resolution[LocalShard]]:
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
        query = partial(Query, shard=shard.handle, request=request, body=body)
        with self._ending():
            if inspect.iscoroutinefunction(serve):
                return await _acall(serve, shard.store, query, parameters)
            # It needs the store until it returns, also if the caller gives up.
            return await self._queries.run_over(shard.store, _call, serve, query, parameters)

    async def run_alone(self, serve: Handler, request: object) -> Any:
        """Call a function of a request that is about no shard."""
        with self._ending():
            if inspect.iscoroutinefunction(serve):
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
