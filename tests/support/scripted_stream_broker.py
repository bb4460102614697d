"""The scripted broker of `scripted_broker`, over the stream transport instead of gRPC.

It is served by the real server of the stream transport, on a real public port.
"""

from __future__ import annotations

import inspect
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from gazette_sdk.broker.stream_front import stream_methods
from gazette_sdk.errors import CallError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.server.call import Call
from gazette_sdk.server.process import Server
from gazette_sdk.transport.base import AppendItem
from gazette_sdk.transport.routed import CHUNK_BYTES_KEY
from support.scripted_broker import RefusalError, ScriptedBroker

__all__ = ["ScriptedStreamBroker"]


class ScriptedStreamBroker(ScriptedBroker):
    """The server. It differs in that an append that is given up has no half-close.

    Args:
        address: ``host:port`` to bind.
        tls: TLS to terminate.
    """

    def __init__(self, address: str = "127.0.0.1:0", tls: ssl.SSLContext | None = None) -> None:
        super().__init__(address)
        self._tls = tls
        self._server: Server

    @property
    def address(self) -> str:
        return f"{'https' if self._tls else 'http'}://localhost:{self.port}"

    async def __aenter__(self) -> Self:
        host, _, port = self._bind.rpartition(":")
        self._server = Server(host=host, port=port, tls=self._tls)
        self._server.stream.add(stream_methods(_Service(self)))
        endpoint = await self._server.start()
        self.port = int(endpoint.rpartition(":")[2])
        return self

    async def stop(self) -> None:
        await self._server.stop(0)


class _Service:
    """Answers as the broker's script says."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self._broker = broker

    async def list(self, request: pb.ListRequest, call: Call) -> AsyncIterator[pb.ListResponse]:
        self._note(request, call)
        async for response in _answers(self._broker.on_list, request):
            yield response

    async def apply(self, request: pb.ApplyRequest, call: Call) -> pb.ApplyResponse:
        self._note(request, call)
        return await _answer(self._broker.on_apply, request)

    async def read(self, request: pb.ReadRequest, call: Call) -> AsyncIterator[pb.ReadResponse]:
        self._note(request, call)
        async for response in _answers(self._broker.on_read, request):
            yield response

    async def append(self, requests: AsyncIterator[AppendItem], call: Call) -> pb.AppendResponse:
        return await _answer(self._broker.on_append, self._noted(requests, call))

    async def replicate(
        self, requests: AsyncIterator[pb.ReplicateRequest], call: Call
    ) -> AsyncIterator[pb.ReplicateResponse]:
        noted = self._noted(requests, call)
        async for response in _answers(self._broker.on_replicate, noted):
            yield response

    async def list_fragments(self, request: pb.FragmentsRequest, call: Call) -> Any:
        self._note(request, call)
        return await _answer(self._broker.on_fragments, request)

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, call: Call
    ) -> Any:
        self._note(request, call)
        return await _answer(self._broker.on_health, request)

    def _note(self, request: Any, call: Call) -> None:
        self._broker.metadata = {CHUNK_BYTES_KEY: str(call.chunk_bytes)}
        if call.authorization is not None:
            self._broker.metadata["authorization"] = call.authorization
        self._broker.received.append(request)

    async def _noted(self, requests: AsyncIterator[Any], call: Call) -> AsyncIterator[Any]:
        async for item in requests:
            request = pb.AppendRequest(content=item) if isinstance(item, bytes) else item
            self._note(request, call)
            yield request
        self._broker.half_closes += 1


async def _answer(handler: Callable[..., Any], request: Any) -> Any:
    try:
        answer = handler(request)
        return await answer if inspect.isawaitable(answer) else answer
    except RefusalError as refusal:
        raise CallError(refusal.details, code=refusal.code.name) from refusal


async def _answers(handler: Callable[..., Any], request: Any) -> AsyncIterator[Any]:
    try:
        answers = handler(request)
        if inspect.isasyncgen(answers):
            async for answer in answers:
                yield answer
        else:
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
    except RefusalError as refusal:
        raise CallError(refusal.details, code=refusal.code.name) from refusal
