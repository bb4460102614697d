"""Interface of the journal service for the broker's fronts, and the chunking of content.

The journal service is a plain async object (see `service`). gRPC, the stream transport, the HTTP
gateway and the JSON gateway are thin fronts over it, which differ only in how they encode its
responses. Before all of them stands a guard: limits of calls by peer, and the audit log.

On gRPC (protocol section 3) most messages carry content, in one length-delimited field, which an
offset precedes in reads. These messages are encoded and decoded here by hand; all others by
protobuf.

On the stream transport content is bytes, and never part of a message. Its place gives it its
meaning: content of an append follows the opening request, content of a read continues where the
read's last response or content ended, content of a replication follows the content sent since the
last proposal.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
)
from contextlib import aclosing, contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from aiohttp import web
from google.protobuf.message import DecodeError, Message

from gazette_sdk.broker.append.common_case import StartedAppend
from gazette_sdk.errors import (
    STATUS_NAMES,
    CallError,
    CorruptFragmentError,
    GazetteError,
    UnauthenticatedError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import AllowAll, Authority
from gazette_sdk.protocol.durations import decode_varint, encode_varint
from gazette_sdk.protocol.rules import RPCS, RPCS_BY_NAME, complete
from gazette_sdk.protocol.stream_frames import Kind
from gazette_sdk.server.authorization import AuditEvent, AuditLog, Call
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.server.http import HttpHandler, Target, text_error
from gazette_sdk.server.listener import PeerLimits
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

_APPEND_CONTENT_TAG = 0x22  # AppendRequest.content: field 4, length-delimited
_READ_OFFSET_TAG = b"\x18"  # ReadResponse.offset: field 3, varint
_READ_CONTENT_TAG = b"\x3a"  # ReadResponse.content: field 7, length-delimited


def journal_methods(service: Journals) -> Iterator[Method]:
    """Return the methods to register with a :class:`~gazette_sdk.server.grpc_server.GrpcServer`."""

    async def read(request: pb.ReadRequest, call: Call) -> AsyncGenerator[pb.ReadResponse | Chunk]:
        async for item in chunks(service.read(request, call), call.chunk_bytes):
            yield item

    serves: dict[str, Callable[[Any, Call], Any]] = {
        "List": service.list,
        "Apply": service.apply,
        "Read": read,
        "Append": service.append,
        "Replicate": service.replicate,
        "ListFragments": service.list_fragments,
        "FragmentStoreHealth": service.fragment_store_health,
    }
    for rpc in RPCS:
        yield Method(
            rpc,
            serves[rpc.name],
            decode=decode_append_item if rpc.name == "Append" else None,
            encode=encode_read_item if rpc.name == "Read" else _encode,
        )


def decode_append_item(wire: bytes, first: bool) -> AppendItem:  # noqa: FBT001 - a Method's decode
    """Decode an item of an append.

    Content becomes bytes. The opening request, the empty request that commits, and any other
    message stay requests, which the service judges.

    Raises:
        google.protobuf.message.DecodeError: the bytes are no message.
    """
    if not first:
        begin = _content_begin(wire)
        if begin:
            return wire[begin:] or pb.AppendRequest()
    request = pb.AppendRequest.FromString(wire)
    if not first and request.content and len(request.ListFields()) == 1:
        return request.content
    return request


def _content_begin(wire: bytes) -> int:
    """Return the position of the content, if it is the only field of the message; else 0."""
    if not wire or wire[0] != _APPEND_CONTENT_TAG:
        return 0
    length, begin = decode_varint(wire, 1)
    return begin if length >= 0 and begin + length == len(wire) else 0


def encode_read_item(item: pb.ReadResponse | Chunk) -> bytes:
    """Encode metadata of a read, or a chunk of its content."""
    if isinstance(item, Chunk):
        offset, content = item
        head = _READ_OFFSET_TAG + encode_varint(offset) if offset else b""
        return b"".join((head, _READ_CONTENT_TAG, encode_varint(len(content)), content))
    return _encode(item)


def _encode(message: Message) -> bytes:
    return complete(message).SerializeToString()


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
    def append_now(call: StreamCall, earlier: object | None) -> Answer | StartedCall | None:
        item = call.only_item
        if item is None or item.kind != _CONTENT:
            return None
        started = service.append_now(call.request, item.payload, call.context, earlier)
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


NAMES_MAX = 3
"""Greatest number of journals of one Apply that a record names."""


_TOO_MANY = "RESOURCE_EXHAUSTED"


class AuditedCalls(StrEnum):
    """Calls that are recorded in the audit log."""

    OFF = "off"
    REFUSALS = "refusals"
    ALL = "all"


class GuardedJournals:
    """Journal service whose calls are counted by peer, and recorded.

    Args:
        service: the service.
        authority: knows the identity of a token.
        limits: limits of each peer.
        audited: calls to record: refused ones, or writes, too.

    Attributes:
        append_now: the service's, which is not counted: it does not wait. It declines all appends
            if writes are recorded.
        append_acknowledged: the service's.
        audit: the log.
    """

    def __init__(
        self,
        service: Journals,
        authority: Authority | AllowAll,
        *,
        limits: PeerLimits,
        audited: AuditedCalls,
    ) -> None:
        self._service = service
        self._authority = authority
        self._limits = limits
        self._audited = audited
        self.audit = AuditLog()
        self.append_acknowledged = service.append_acknowledged
        self.append_now = _decline if audited is AuditedCalls.ALL else service.append_now

    async def list(self, request: pb.ListRequest, call: Call) -> AsyncGenerator[pb.ListResponse]:
        """See :class:`Journals`."""
        with self.guarded("List", call):
            async with aclosing(self._service.list(request, call)) as items:
                async for item in items:
                    yield item

    async def apply(self, request: pb.ApplyRequest, call: Call) -> pb.ApplyResponse:
        """See :class:`Journals`."""
        with self.guarded("Apply", call, _names_of(request)) as record:
            response = await self._service.apply(request, call)
            record.status = response.status
        return response

    async def read(self, request: pb.ReadRequest, call: Call) -> AsyncGenerator[ReadYield]:
        """See :class:`Journals`."""
        with self.guarded("Read", call, request.journal):
            async with aclosing(self._service.read(request, call)) as items:
                async for item in items:
                    yield item

    async def append(self, requests: AsyncIterator[AppendItem], call: Call) -> pb.AppendResponse:
        """See :class:`Journals`."""
        with self.guarded("Append", call) as record:
            if self._audited is AuditedCalls.ALL:
                requests = _Noted(requests, record)
            response = await self._service.append(requests, call)
            record.status = response.status
        return response

    async def replicate(
        self, requests: AsyncIterator[ReplicateItem], call: Call
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """See :class:`Journals`."""
        with self.guarded("Replicate", call):
            async with aclosing(self._service.replicate(requests, call)) as items:
                async for item in items:
                    yield item

    async def list_fragments(
        self, request: pb.FragmentsRequest, call: Call
    ) -> pb.FragmentsResponse:
        """See :class:`Journals`."""
        with self.guarded("ListFragments", call, request.journal):
            return await self._service.list_fragments(request, call)

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, call: Call
    ) -> pb.FragmentStoreHealthResponse:
        """See :class:`Journals`."""
        with self.guarded("FragmentStoreHealth", call):
            return await self._service.fragment_store_health(request, call)

    def note_refusal(self, method: str, call: Call, error: GazetteError) -> None:
        """Record a call that a gateway has refused."""
        self._record(method, call, "", str(error), is_refusal=True)

    @contextmanager
    def guarded(self, method: str, call: Call, journal: str = "") -> Iterator[_Record]:
        """Count a call of a peer, and record its outcome.

        Args:
            method: name of the call.
            call: metadata of the call.
            journal: its journal, as far as it is known.
        """
        record = _Record(journal)
        try:
            with self._limits.calling(call.peer):
                yield record
        except UnauthenticatedError as error:
            self._record(method, call, record.journal, str(error), is_refusal=True)
            raise
        except GazetteError as error:
            is_refusal = isinstance(error, CallError) and error.code == _TOO_MANY
            if is_refusal or method in _WRITES:
                self._record(method, call, record.journal, str(error), is_refusal=is_refusal)
            raise
        if method in _WRITES:
            self._record(method, call, record.journal, record.outcome, is_refusal=False)

    def _record(
        self, method: str, call: Call, journal: str, outcome: str, *, is_refusal: bool
    ) -> None:
        if self._audited is AuditedCalls.OFF:
            return
        if not is_refusal and self._audited is not AuditedCalls.ALL:
            return
        subject, token_id = self._authority.identity(call.authorization)
        self.audit.record(
            AuditEvent(method, outcome, call.peer, journal, subject, token_id, is_refusal)
        )


def guarded_methods(methods: Iterable[Method], guard: GuardedJournals | None) -> list[Method]:
    """Return methods whose calls are counted by peer, and recorded, as those of journals.

    Args:
        methods: the methods, each of one request.
        guard: counts and records; None for methods as they are.
    """
    if guard is None:
        return list(methods)
    return [_guarded_method(method, guard) for method in methods]


def _guarded_method(method: Method, guard: GuardedJournals) -> Method:
    async def serve_one(request: Message, call: Call) -> Message:
        with guard.guarded(method.rpc.name, call):
            response: Message = await method.serve(request, call)
            return response

    async def serve_stream(request: Message, call: Call) -> AsyncGenerator[Message]:
        with guard.guarded(method.rpc.name, call):
            async with aclosing(method.serve(request, call)) as responses:
                async for response in responses:
                    yield response

    return replace(method, serve=serve_stream if method.rpc.server_streams else serve_one)


_WRITES = frozenset({"Append", "Apply", "Drain"})


class _Record:
    """Record of one call, as far as it is known."""

    __slots__ = ("journal", "status")

    def __init__(self, journal: str) -> None:
        self.journal = journal
        self.status: pb.Status = pb.OK

    @property
    def outcome(self) -> str:
        return "OK" if self.status == pb.OK else STATUS_NAMES[self.status]


def _decline(
    opening: bytes,  # noqa: ARG001 - see Journals.append_now
    content: bytes,  # noqa: ARG001
    call: Call,  # noqa: ARG001
    earlier: object | None,  # noqa: ARG001
) -> StartedAppend | None:
    """Leave an append to :meth:`GuardedJournals.append`, which records it."""
    return None


class _Noted:
    """Messages of an append; the name of its journal is noted.

    Args:
        requests: the messages.
        record: gets the name.
    """

    def __init__(self, requests: AsyncIterator[AppendItem], record: _Record) -> None:
        self._requests = requests
        self._record = record

    def __aiter__(self) -> AsyncIterator[AppendItem]:
        return self

    async def __anext__(self) -> AppendItem:
        item = await anext(self._requests)
        if isinstance(item, pb.AppendRequest) and not self._record.journal:
            self._record.journal = item.journal
        return item


def _names_of(request: pb.ApplyRequest) -> str:
    names = [change.delete or change.upsert.name for change in request.changes[:NAMES_MAX]]
    more = len(request.changes) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def with_call_limit(handler: HttpHandler) -> HttpHandler:
    """Return an HTTP handler that answers calls beyond a peer's limit with status 429."""

    async def handle(request: web.BaseRequest, target: Target) -> web.StreamResponse | None:
        try:
            return await handler(request, target)
        except CallError as error:
            if error.code != _TOO_MANY:
                raise
            return text_error(429, str(error))

    return handle


class Span(Protocol):
    """Committed content of a local file: ``length`` bytes at ``position`` of ``fd``."""

    @property
    def fd(self) -> int:
        """An open file descriptor, valid until the next item is requested."""

    @property
    def position(self) -> int:
        """The position in the file at which the content begins."""

    @property
    def length(self) -> int:
        """The number of bytes."""

    @property
    def metadata(self) -> pb.ReadResponse | None:
        """The metadata that precedes the content, unless it was an item of its own."""


ReadYield: TypeAlias = pb.ReadResponse | Span | bytes
"""Item of a read: metadata, or content that continues where the item before it ended."""


class Journals(Protocol):
    """Journal service, as its fronts see it.

    Each method checks the caller's authorization and then the request, and raises a
    :class:`~gazette_sdk.errors.GazetteError` for a call that fails.
    """

    def list(self, request: pb.ListRequest, call: Call) -> AsyncGenerator[pb.ListResponse]:
        """Snapshots of matching journals."""

    async def apply(self, request: pb.ApplyRequest, call: Call) -> pb.ApplyResponse:
        """Create, change, delete journals."""

    def read(self, request: pb.ReadRequest, call: Call) -> AsyncGenerator[ReadYield]:
        """Metadata and content from an offset on."""

    async def append(self, requests: AsyncIterator[AppendItem], call: Call) -> pb.AppendResponse:
        """One append; ends without an empty ``AppendRequest`` roll it back."""

    @property
    def append_now(self) -> Callable[[bytes, bytes, Call, object | None], StartedAppend | None]:
        """Append content at hand without waiting for anything, or decline.

        See :meth:`~gazette_sdk.broker.append.common_case.InlineAppends.append_now`.
        """

    async def append_acknowledged(self, started: StartedAppend) -> bytes:
        """Wait for the acknowledgement of such an append. Return the encoded response."""

    def replicate(
        self, requests: AsyncIterator[ReplicateItem], call: Call
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """A stream of replication."""

    async def list_fragments(
        self, request: pb.FragmentsRequest, call: Call
    ) -> pb.FragmentsResponse:
        """One page of fragments."""

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, call: Call
    ) -> pb.FragmentStoreHealthResponse:
        """The health of a store."""


class Chunk(NamedTuple):
    """Content of a journal, never empty.

    Attributes:
        offset: where in the journal it begins.
        content: its bytes.
    """

    offset: int
    content: bytes


async def chunks(
    items: AsyncGenerator[ReadYield], chunk_bytes: int
) -> AsyncGenerator[pb.ReadResponse | Chunk]:
    """Yield the items of a read, with content cut into chunks that carry their offsets.

    Args:
        items: of the service; closed at the end.
        chunk_bytes: greatest size of a chunk.

    Raises:
        CorruptFragmentError: a local file ends before the content it should hold.
    """
    offset = 0
    async with aclosing(items):
        async for item in items:
            if isinstance(item, pb.ReadResponse):
                offset = item.offset
                if not item.content:
                    yield item
                    continue
                item = item.content  # noqa: PLW2901 - its content is treated as any other
            if isinstance(item, bytes):
                for begin in range(0, len(item), chunk_bytes):
                    content = item[begin : begin + chunk_bytes]
                    yield Chunk(offset, content)
                    offset += len(content)
                continue
            if item.metadata is not None:
                offset = item.metadata.offset
                yield item.metadata
            position, end = item.position, item.position + item.length
            while position < end:
                content = os.pread(item.fd, min(chunk_bytes, end - position), position)
                if not content:
                    raise CorruptFragmentError(
                        f"the local file of a fragment ends {end - position} bytes early; restart "
                        "the broker, which then recovers or replaces it",
                        offset=offset,
                    )
                yield Chunk(offset, content)
                position += len(content)
                offset += len(content)
