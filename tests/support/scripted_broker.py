"""A journal service on a loopback port which answers as a test says.

It is a real gRPC server, so that what a test sees went over the wire. Each call is answered by
an attribute that the test sets; requests are kept in ``received``.

    async with ScriptedBroker() as broker:
        broker.on_apply = lambda request: pb.ApplyResponse(header=header())
        transport = GrpcTransport(broker.address)
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc
import grpc.aio

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import sum_of
from gazette_sdk.protocol.rules import complete

__all__ = [
    "RefusalError",
    "ScriptedBroker",
    "answer_of",
    "answers_of",
    "append_ok",
    "append_status",
    "drain",
    "header",
    "in_loop",
    "no_pause",
    "read_metadata",
    "route_to",
    "until",
]

TEST_TIMEOUT_S = 30.0


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Makes a coroutine function a test: it runs on a loop of its own, within a bound."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


async def no_pause(attempt: int) -> None:
    """A back-off without waits."""
    del attempt
    await asyncio.sleep(0)


async def until(holds: Callable[[], Any]) -> None:
    """Wait for what has no event of its own; the test's own bound ends it."""
    while not holds():  # noqa: ASYNC110 - there is nothing to wait on
        await asyncio.sleep(0.005)


def header(route: pb.Route | None = None, revision: int = 7) -> pb.Header:
    """A valid header."""
    return pb.Header(
        process_id=pb.ProcessSpec.ID(zone="zone-a", suffix="broker-1"),
        route=route or pb.Route(primary=-1),
        etcd=pb.Header.Etcd(cluster_id=1, member_id=2, revision=revision, raft_term=3),
    )


def route_to(*endpoints: str, primary: int = 0, zone: str = "zone-a") -> pb.Route:
    """A route of one member per endpoint."""
    return pb.Route(
        members=[
            pb.ProcessSpec.ID(zone=zone, suffix=f"broker-{index}")
            for index in range(len(endpoints))
        ],
        primary=primary,
        endpoints=endpoints,
    )


def append_ok(begin: int = 0, end: int = 0, route: pb.Route | None = None) -> pb.AppendResponse:
    """A valid response of status OK."""
    response = pb.AppendResponse(
        header=header(route),
        commit=pb.Fragment(
            journal="a/journal",
            begin=begin,
            end=end,
            compression_codec=pb.NONE,
            sum=sum_of(b"\x01" * 20),
        ),
    )
    response.registers.SetInParent()
    return response


def append_status(status: int, route: pb.Route | None = None) -> pb.AppendResponse:
    """A valid response of another status."""
    response = pb.AppendResponse(status=status, header=header(route))
    if status == pb.REGISTER_MISMATCH:
        response.registers.SetInParent()
    return response


def read_metadata(
    offset: int, begin: int, end: int, *, url: str = "", codec: int = pb.NONE, first: bool = True
) -> pb.ReadResponse:
    """Valid metadata of a fragment."""
    response = pb.ReadResponse(
        offset=offset,
        write_head=end,
        fragment_url=url,
        fragment=pb.Fragment(journal="a/journal", begin=begin, end=end, compression_codec=codec),
    )
    if first:
        response.header.CopyFrom(header())
    return complete(response)


class RefusalError(Exception):
    """Ends a call with a gRPC status instead of a response."""

    def __init__(self, code: grpc.StatusCode, details: str = "scripted") -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class ScriptedBroker:
    """The server. Handlers may be functions, coroutine functions or async generators.

    Attributes:
        received: requests in order; those of a stream as they came.
        metadata: metadata of the last call.
    """

    def __init__(self, address: str = "127.0.0.1:0", credentials: Any = None) -> None:
        self.on_list: Callable[..., Any] = _unscripted
        self.on_apply: Callable[..., Any] = _unscripted
        self.on_read: Callable[..., Any] = _unscripted
        self.on_append: Callable[..., Any] = _unscripted
        self.on_replicate: Callable[..., Any] = _unscripted
        self.on_fragments: Callable[..., Any] = _unscripted
        self.on_health: Callable[..., Any] = _unscripted
        self.received: list[Any] = []
        self.half_closes = 0
        self.metadata: dict[str, str] = {}
        self._bind = address
        self._credentials = credentials
        self._server: Any = None
        self.port = 0

    @property
    def address(self) -> str:
        scheme = "https" if self._credentials else "http"
        return f"{scheme}://localhost:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", 4 << 20), ("grpc.so_reuseport", 0)]
        )
        stream_stream = grpc.stream_stream_rpc_method_handler
        unary_stream = grpc.unary_stream_rpc_method_handler
        unary_unary = grpc.unary_unary_rpc_method_handler
        handlers = {
            "List": (unary_stream, self._list, pb.ListRequest),
            "Apply": (unary_unary, self._apply, pb.ApplyRequest),
            "Read": (unary_stream, self._read, pb.ReadRequest),
            "Append": (grpc.stream_unary_rpc_method_handler, self._append, pb.AppendRequest),
            "Replicate": (stream_stream, self._replicate, pb.ReplicateRequest),
            "ListFragments": (unary_unary, self._fragments, pb.FragmentsRequest),
            "FragmentStoreHealth": (unary_unary, self._health, pb.FragmentStoreHealthRequest),
        }
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "protocol.Journal",
                    {
                        name: kind(handler, request.FromString, lambda m: m.SerializeToString())
                        for name, (kind, handler, request) in handlers.items()
                    },
                ),
            )
        )
        if self._credentials is None:
            self.port = self._server.add_insecure_port(self._bind)
        else:
            self.port = self._server.add_secure_port(self._bind, self._credentials)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._server.stop(None)

    # ----------------------------------------------------------------- handlers

    async def _unary(self, handler: Callable[..., Any], request: Any, context: Any) -> Any:
        self._note(request, context)
        return await _answer(handler, context, request)

    async def _apply(self, request: Any, context: Any) -> Any:
        return await self._unary(self.on_apply, request, context)

    async def _fragments(self, request: Any, context: Any) -> Any:
        return await self._unary(self.on_fragments, request, context)

    async def _health(self, request: Any, context: Any) -> Any:
        return await self._unary(self.on_health, request, context)

    async def _append(self, requests: Any, context: Any) -> Any:
        return await _answer(self.on_append, context, self._noted(requests, context))

    async def _list(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self._note(request, context)
        async for response in _answers(self.on_list, context, request):
            yield response

    async def _read(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self._note(request, context)
        async for response in _answers(self.on_read, context, request):
            yield response

    async def _replicate(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for response in _answers(self.on_replicate, context, self._noted(requests, context)):
            yield response

    def _note(self, request: Any, context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        self.received.append(request)

    async def _noted(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            self._note(request, context)
            yield request
        self.half_closes += 1


async def drain(requests: AsyncIterator[pb.AppendRequest]) -> list[pb.AppendRequest]:
    """All requests of an append, up to the half-close."""
    return [request async for request in requests]


async def answer_of(handler: Callable[..., Any], request: Any) -> Any:
    """What a script answers to a call of one response."""
    answer = handler(request)
    return await answer if inspect.isawaitable(answer) else answer


async def answers_of(handler: Callable[..., Any], request: Any) -> AsyncIterator[Any]:
    """What a script answers to a call of any number of responses; an error among them is raised."""
    answers = handler(request)
    if inspect.isasyncgen(answers):
        async for answer in answers:
            yield answer
        return
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        yield answer


async def _answer(handler: Callable[..., Any], context: Any, request: Any) -> Any:
    try:
        return await answer_of(handler, request)
    except RefusalError as refusal:
        await context.abort(refusal.code, refusal.details)


async def _answers(handler: Callable[..., Any], context: Any, request: Any) -> AsyncIterator[Any]:
    try:
        async for answer in answers_of(handler, request):
            yield answer
    except RefusalError as refusal:
        await context.abort(refusal.code, refusal.details)


def _unscripted(request: Any) -> Any:
    raise RefusalError(grpc.StatusCode.UNIMPLEMENTED, "the test has no script for this call")
