"""gRPC methods of an application: calls of a shard's state, here or at its primary.

A forwarded request has the resolution's header in its metadata, as over HTTP, and in its field
``header`` where it has one of that type: consumers of other implementations look there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from gazette_sdk.errors import CallError, ConfigurationError, MappingError, ShardStatusError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import Rpc
from gazette_sdk.server import grpc_server
from gazette_sdk.server.call import Call
from gazette_sdk.shard.application.endpoints import Method
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.endpoint_calls import EndpointCalls, forwarded_claims, status_of
from gazette_sdk.shard.consumer.resolver import primary_of

__all__ = ["application_methods"]

_HEADER = "header"


def application_methods(
    methods: Iterable[Method], calls: EndpointCalls, peers: ShardClient
) -> Iterator[grpc_server.Method]:
    """Return the methods to register with a :class:`~gazette_sdk.server.grpc_server.GrpcServer`.

    Args:
        methods: the application's methods.
        calls: resolves and runs calls.
        peers: other processes of the application.

    Raises:
        ConfigurationError: a method is declared twice.
    """
    paths: set[str] = set()
    for method in methods:
        if method.rpc in paths:
            raise ConfigurationError(f"{method.rpc} is declared twice; declare it once")
        paths.add(method.rpc)
        served = _ServedMethod(method, calls, peers)
        yield grpc_server.Method(served.rpc, served)


class _ServedMethod:
    """Method of an application, as the gRPC server calls it."""

    def __init__(self, method: Method, calls: EndpointCalls, peers: ShardClient) -> None:
        _, service, name = method.rpc.split("/")
        self.rpc = Rpc(name, 0, method.request_type, method.response_type, service=service)
        self._method = method
        self._calls = calls
        self._peers = peers
        field = method.request_type.DESCRIPTOR.fields_by_name.get(_HEADER)
        self._has_header = field is not None and field.message_type is pb.Header.DESCRIPTOR

    async def __call__(self, request: Any, call: Call) -> Message:
        """Return the response to a request.

        Raises:
            CallError: there is none; it has a status code.
            Exception: the application's function raised it.
        """
        try:
            return await self._serve(request, call)
        except (
            ConfigurationError,
            MappingError,
            ShardStatusError,
            json_format.ParseError,
        ) as error:
            raise CallError(str(error), code=status_of(error).grpc) from error

    async def _serve(self, request: Any, call: Call) -> Message:
        method, calls = self._method, self._calls
        async with calls.admit(call, method.capability) as claims:
            if method.is_about_no_shard:
                return self._checked(await calls.run_alone(method.serve, request))
            shard = calls.named_shard(method.shard_of, request)
            if not shard:
                remedy = f"name the shard in the request of {method.rpc}"
                shard = await calls.shard_of(method.by, request, remedy)
            given = self._has_header and request.HasField(_HEADER)
            header = request.header if given else None
            async with calls.resolve(shard, claims, call, header) as resolution:
                if resolution.shard is None:
                    return await self._forward(request, shard, resolution.header)
                found = await calls.run(method.serve, resolution.shard, {}, request=request)
                return self._checked(found)

    async def _forward(self, request: Any, shard: str, header: pb.Header) -> Message:
        """Return the primary's response."""
        if self._has_header:
            forwarded = type(request)()
            forwarded.CopyFrom(request)
            forwarded.header.CopyFrom(header)
            request = forwarded
        response: Message = await self._peers.call(
            self.rpc,
            request,
            forwarded_claims(self._method.capability, shard),
            primary_of(shard, header),
            proxy_header=json_format.MessageToJson(header, indent=None),
        )
        return response

    def _checked(self, response: object) -> Message:
        """Return what the application's function returned, if it is a response.

        Raises:
            TypeError: it is something else.
        """
        if not isinstance(response, Message) or type(response) is not self._method.response_type:
            raise TypeError(
                f"{self._method.rpc} returned {type(response).__name__}, and not "
                f"{self._method.response_type.__name__}: correct the application"
            )
        return response
