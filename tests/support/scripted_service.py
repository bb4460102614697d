"""The service of a scripted broker as an object, for the fronts that are thin over one."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

from gazette_sdk.errors import (
    CallCancelledError,
    CallError,
    DeadlineExceededError,
    UnauthenticatedError,
    UnavailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.authorization import Call
from gazette_sdk.transport.router import CHUNK_BYTES_KEY
from gazette_sdk.transport.wire import AppendItem
from support.scripted_broker import RefusalError, ScriptedBroker, answer_of, answers_of

__all__ = ["ScriptedService"]


class ScriptedService:
    """The journal service which answers as the script of a broker says.

    Args:
        broker: has the script, and keeps the requests.
    """

    def __init__(self, broker: ScriptedBroker) -> None:
        self._broker = broker

    async def list(self, request: pb.ListRequest, call: Call) -> AsyncIterator[pb.ListResponse]:
        request = self._note(request, call)
        async for response in _answers(self._broker.on_list, request):
            yield response

    async def apply(self, request: pb.ApplyRequest, call: Call) -> pb.ApplyResponse:
        request = self._note(request, call)
        return await _answer(self._broker.on_apply, request)

    async def read(self, request: pb.ReadRequest, call: Call) -> AsyncIterator[pb.ReadResponse]:
        request = self._note(request, call)
        async for response in _answers(self._broker.on_read, request):
            yield response

    async def append(self, requests: AsyncIterator[AppendItem], call: Call) -> pb.AppendResponse:
        return await _answer(self._broker.on_append, self._noted(requests, call))

    def append_now(self, *_: Any) -> None:
        """Every append is scripted as a stream."""

    async def append_acknowledged(self, _: Any) -> bytes:
        raise AssertionError("no append is started")

    async def replicate(
        self, requests: AsyncIterator[pb.ReplicateRequest], call: Call
    ) -> AsyncIterator[pb.ReplicateResponse]:
        noted = self._noted(requests, call)
        async for response in _answers(self._broker.on_replicate, noted):
            yield response

    async def list_fragments(self, request: pb.FragmentsRequest, call: Call) -> Any:
        request = self._note(request, call)
        return await _answer(self._broker.on_fragments, request)

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, call: Call
    ) -> Any:
        request = self._note(request, call)
        return await _answer(self._broker.on_health, request)

    def _note(self, request: Any, call: Call) -> Any:
        """Keep a request. Returns it as it is now, whatever its sender does with it later."""
        self._broker.metadata = {CHUNK_BYTES_KEY: str(call.chunk_bytes)}
        if call.authorization is not None:
            self._broker.metadata["authorization"] = call.authorization
        request = copy.copy(request)
        self._broker.received.append(request)
        return request

    async def _noted(self, requests: AsyncIterator[Any], call: Call) -> AsyncIterator[Any]:
        async for item in requests:
            request = pb.AppendRequest(content=item) if isinstance(item, bytes) else item
            yield self._note(request, call)
        self._broker.half_closes += 1


async def _answer(handler: Callable[..., Any], request: Any) -> Any:
    try:
        return await answer_of(handler, request)
    except RefusalError as refusal:
        raise _error(refusal) from refusal


async def _answers(handler: Callable[..., Any], request: Any) -> AsyncIterator[Any]:
    try:
        async for answer in answers_of(handler, request):
            yield answer
    except RefusalError as refusal:
        raise _error(refusal) from refusal


def _error(refusal: RefusalError) -> CallError:
    """What a broker raises, so that it becomes this status on a wire."""
    kind = _ERRORS.get(refusal.code.name)
    if kind is not None:
        return kind(refusal.details)
    return CallError(refusal.details, code=refusal.code.name)


_ERRORS = {
    "CANCELLED": CallCancelledError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "UNAVAILABLE": UnavailableError,
    "UNAUTHENTICATED": UnauthenticatedError,
}
