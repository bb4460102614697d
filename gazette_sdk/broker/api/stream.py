"""The journal service on the stream transport.

Content is bytes here, and never part of a message. Its place gives it its meaning: content of an
append follows the opening request, content of a read continues where the read's last response or
content ended, content of a replication follows the content sent since the last proposal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from gazette_sdk.broker.api.fronts import Journals
from gazette_sdk.broker.append.common_case import StartedAppend
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import RPCS_BY_NAME, complete
from gazette_sdk.protocol.stream_frames import Kind
from gazette_sdk.server.call import Call
from gazette_sdk.server.metrics import malformed
from gazette_sdk.server.stream import (
    Answer,
    AnswerNow,
    Serve,
    StartedCall,
    StreamCall,
    StreamMethod,
)
from gazette_sdk.transport.wire import AppendItem, ReplicateItem

__all__ = ["stream_methods"]

M = TypeVar("M", bound=Message)

_CONTENT = int(Kind.CONTENT)
_COMMIT = pb.AppendRequest()


def stream_methods(service: Journals) -> Iterator[StreamMethod]:
    """Return the methods to add to a :class:`~gazette_sdk.server.stream_server.StreamServer`."""
    for name, serve in (
        ("List", _serve_stream(pb.ListRequest, service.list)),
        ("Apply", _serve_one(pb.ApplyRequest, service.apply)),
        ("Read", _serve_read(service)),
        ("Replicate", _serve_replicate(service)),
        ("ListFragments", _serve_one(pb.FragmentsRequest, service.list_fragments)),
        (
            "FragmentStoreHealth",
            _serve_one(pb.FragmentStoreHealthRequest, service.fragment_store_health),
        ),
    ):
        yield StreamMethod(RPCS_BY_NAME[name], serve)
    yield StreamMethod(RPCS_BY_NAME["Append"], _serve_append(service), _append_now(service))


def _append_now(service: Journals) -> AnswerNow:
    def append_now(call: StreamCall, behind: object | None) -> Answer | StartedCall | None:
        item = call.only_item
        if item is None or item.kind != _CONTENT:
            return None
        started = service.append_now(call.request, item.payload, call.context, behind)
        if started is None:
            return None
        call.received += 2  # the chunk, and the end that commits it
        if not started.answers:
            return Answer(started.response)
        task = asyncio.get_running_loop().create_task(_acknowledged(service, started))
        return StartedCall(task, started.pipeline)

    return append_now


async def _acknowledged(service: Journals, started: StartedAppend) -> Answer:
    return Answer(await service.append_acknowledged(started))


def _serve_append(service: Journals) -> Serve:
    async def append(call: StreamCall) -> Answer:
        async with aclosing(_append_items(call)) as items:
            response = await service.append(items, call.context)
        return Answer(_encoded(response), response.status == pb.OK)

    return append


def _serve_read(service: Journals) -> Serve:
    async def read(call: StreamCall) -> None:
        request = _parsed(pb.ReadRequest, call.request, call)
        async with aclosing(service.read(request, call.context)) as items:
            async for item in items:
                if isinstance(item, bytes):
                    await _send_content(call, item)
                elif not isinstance(item, pb.ReadResponse):
                    if item.metadata is not None:
                        call.hold(item.metadata.SerializeToString())
                    chunk_bytes = call.context.chunk_bytes
                    await call.send_file(item.fd, item.position, item.length, chunk_bytes)
                elif item.content:  # treated as any other content
                    await _send_content(call, item.content)
                else:
                    await call.send(_encoded(item))

    return read


async def _send_content(call: StreamCall, content: bytes) -> None:
    chunk_bytes = call.context.chunk_bytes
    for begin in range(0, len(content), chunk_bytes):
        await call.send_content(content[begin : begin + chunk_bytes])


def _serve_replicate(service: Journals) -> Serve:
    async def replicate(call: StreamCall) -> None:
        requests = _replicate_items(call)
        async with aclosing(service.replicate(requests, call.context)) as responses:
            async for response in responses:
                await call.send(_encoded(response))

    return replicate


def _serve_one(request_type: type[M], method: Callable[[M, Call], Awaitable[Message]]) -> Serve:
    """Return a function that serves a method with one request and one response."""

    async def serve(call: StreamCall) -> Answer:
        response: Any = await method(_parsed(request_type, call.request, call), call.context)
        return Answer(_encoded(response), response.status == pb.OK)

    return serve


def _serve_stream(
    request_type: type[M], method: Callable[[M, Call], AsyncGenerator[Message]]
) -> Serve:
    """Return a function that serves a method with one request and a stream of responses."""

    async def serve(call: StreamCall) -> None:
        request = _parsed(request_type, call.request, call)
        async with aclosing(method(request, call.context)) as responses:
            async for response in responses:
                await call.send(_encoded(response))

    return serve


async def _append_items(call: StreamCall) -> AsyncGenerator[AppendItem]:
    """Yield an append's messages as the service expects them: END becomes the empty request."""
    yield _parsed(pb.AppendRequest, call.request, call)
    while (item := await call.receive()) is not None:
        if item.kind != _CONTENT:
            yield _parsed(pb.AppendRequest, item.payload, call)
        elif item.payload:
            yield item.payload
    call.received += 1
    yield _COMMIT


async def _replicate_items(call: StreamCall) -> AsyncIterator[ReplicateItem]:
    """Yield the items of a replication."""
    yield _parsed(pb.ReplicateRequest, call.request, call)
    while (item := await call.receive()) is not None:
        if item.kind == _CONTENT and item.payload:
            yield item.payload
        else:  # content without bytes is refused as a request without anything
            yield _parsed(pb.ReplicateRequest, item.payload, call)


def _parsed(request_type: type[M], request: bytes, call: StreamCall) -> M:
    """Return a message of the client.

    Raises:
        CallError: the bytes are no message.
    """
    try:
        return request_type.FromString(request)
    except DecodeError as error:
        raise malformed(call.method.path) from error


def _encoded(message: Message) -> bytes:
    return complete(message).SerializeToString()
