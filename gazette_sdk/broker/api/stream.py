"""The journal service on the stream transport.

Content is bytes on both sides here: it never becomes part of a message. What it stands for is
told by its place: content of an append follows its opening request, content of a read continues
where the read's last response or content ended, content of a replication follows what was sent
since the last proposal.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from gazette_sdk.broker.api.fronts import Journals, Span
from gazette_sdk.broker.append.content import ClientStream
from gazette_sdk.broker.replication.pipeline import Pipeline
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.non_null_fields import complete
from gazette_sdk.protocol.service import RPCS_BY_NAME
from gazette_sdk.protocol.stream_frames import Kind
from gazette_sdk.server.begun import Begun
from gazette_sdk.server.call import Call
from gazette_sdk.server.outcomes import malformed
from gazette_sdk.server.stream_call import Answer, StreamCall, StreamMethod
from gazette_sdk.transport.base import AppendItem

__all__ = ["stream_methods"]

M = TypeVar("M", bound=Message)

_Serve: TypeAlias = Callable[[StreamCall], Coroutine[Any, Any, Answer | None]]

_CONTENT = int(Kind.CONTENT)
_COMMIT = pb.AppendRequest()


def stream_methods(service: Journals) -> Iterator[StreamMethod]:
    """The methods to add to a :class:`~gazette_sdk.server.stream_server.StreamServer`."""
    for name, serve in (
        ("List", _pouring(pb.ListRequest, service.list)),
        ("Apply", _answering(pb.ApplyRequest, service.apply)),
        ("Read", _reading(service)),
        ("Append", _appending(service)),
        ("Replicate", _replicating(service)),
        ("ListFragments", _answering(pb.FragmentsRequest, service.list_fragments)),
        (
            "FragmentStoreHealth",
            _answering(pb.FragmentStoreHealthRequest, service.fragment_store_health),
        ),
    ):
        yield StreamMethod(RPCS_BY_NAME[name], serve, minds_its_turn=name == "Append")


def _appending(service: Journals) -> _Serve:
    async def append(call: StreamCall) -> Answer:
        items = _AppendItems(_parsed(pb.AppendRequest, call.request, call), call)
        answer = await service.answer_append(items, call.context)
        return Answer(answer.encoded(), answer.status == pb.OK)

    return append


def _reading(service: Journals) -> _Serve:
    async def read(call: StreamCall) -> None:
        request = _parsed(pb.ReadRequest, call.request, call)
        async with aclosing(service.read(request, call.context)) as items:
            while True:
                begun = Begun.next_of(items)
                if begun.done:
                    item = begun.result
                else:
                    call.flush()  # metadata goes together with its content, if that comes at once
                    try:
                        item = await begun
                    except StopAsyncIteration:
                        return
                if not isinstance(item, pb.ReadResponse):
                    await _send_content(call, item)
                elif item.content:  # treated as any other content
                    await _send_content(call, item.content)
                else:
                    call.hold(_encoded(item))

    return read


async def _send_content(call: StreamCall, content: Span | bytes) -> None:
    chunk_bytes = call.context.chunk_bytes
    if not isinstance(content, bytes):
        await call.send_file(content.fd, content.position, content.length, chunk_bytes)
        return
    for begin in range(0, len(content), chunk_bytes):
        await call.send_content(content[begin : begin + chunk_bytes])


def _replicating(service: Journals) -> _Serve:
    async def replicate(call: StreamCall) -> None:
        requests = _replicate_requests(call)
        async with aclosing(service.replicate(requests, call.context)) as responses:
            async for response in responses:
                await call.send(_encoded(response))

    return replicate


def _answering(request_type: type[M], method: Callable[[M, Call], Awaitable[Message]]) -> _Serve:
    """Serves a method with one request and one response."""

    async def serve(call: StreamCall) -> Answer:
        response: Any = await method(_parsed(request_type, call.request, call), call.context)
        return Answer(_encoded(response), response.status == pb.OK)

    return serve


def _pouring(request_type: type[M], method: Callable[[M, Call], AsyncGenerator[Message]]) -> _Serve:
    """Serves a method with one request and any number of responses."""

    async def serve(call: StreamCall) -> None:
        request = _parsed(request_type, call.request, call)
        async with aclosing(method(request, call.context)) as responses:
            async for response in responses:
                await call.send(_encoded(response))

    return serve


class _AppendItems(ClientStream):
    """What a client sends in an append, in the order and form that the service expects.

    END stands for the empty request that commits. Where it never comes, the service is cancelled.
    """

    __slots__ = ("_call", "_is_committed", "_opening")

    def __init__(self, opening: pb.AppendRequest, call: StreamCall) -> None:
        self._opening: pb.AppendRequest | None = opening
        self._call = call
        self._is_committed = False

    def __aiter__(self) -> AsyncIterator[AppendItem]:
        return self

    def take_opening(self) -> tuple[pb.AppendRequest, bytes]:
        """See :class:`ClientStream`."""
        opening, self._opening = self._opening, None
        assert opening is not None, "it is taken once"
        return opening, self._call.request

    def take_whole(self) -> bytes | None:
        """See :class:`ClientStream`."""
        call = self._call
        last = call.last()
        if self._opening is not None or last is None or last.kind != _CONTENT or not last.payload:
            return None
        call.take()
        call.received += 1
        self._is_committed = True
        return last.payload

    @property
    def follows(self) -> object | None:
        """See :class:`ClientStream`."""
        return self._call.follows

    async def turn(self) -> None:
        """See :class:`ClientStream`."""
        await self._call.turn()

    def pass_turn(self, pipeline: Pipeline) -> None:
        """See :class:`ClientStream`."""
        self._call.pass_turn(pipeline)

    async def __anext__(self) -> AppendItem:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            return opening
        call = self._call
        while not self._is_committed:
            item = call.take() or await call.receive()
            if item is None:
                self._is_committed = True
                call.received += 1
                return _COMMIT
            _, kind, payload = item
            if kind != _CONTENT:
                return _parsed(pb.AppendRequest, payload, call)
            if payload:
                return payload
        raise StopAsyncIteration


async def _replicate_requests(call: StreamCall) -> AsyncIterator[pb.ReplicateRequest]:
    """The requests of a replication; content knows how much came since the last proposal."""
    yield _parsed(pb.ReplicateRequest, call.request, call)
    delta = 0
    while (item := await call.receive()) is not None:
        if item.kind == _CONTENT:
            request = pb.ReplicateRequest(content=item.payload, content_delta=delta)
        else:
            request = _parsed(pb.ReplicateRequest, item.payload, call)
            delta = 0 if request.HasField("proposal") else request.content_delta
        delta += len(request.content)
        yield request


def _parsed(request_type: type[M], request: bytes, call: StreamCall) -> M:
    """A message of the client.

    Raises:
        CallError: the bytes are none.
    """
    try:
        return request_type.FromString(request)
    except DecodeError as error:
        raise malformed(call.method.path) from error


def _encoded(message: Message) -> bytes:
    return complete(message).SerializeToString()
