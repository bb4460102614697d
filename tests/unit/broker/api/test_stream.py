"""A client's append, as the stream transport brings it to the service."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gazette_sdk.broker.api.fronts import stream_methods
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.served_calls import ServerCalls
from gazette_sdk.protocol.stream_calls import CallBegan, Item
from gazette_sdk.protocol.stream_frames import Kind, Method
from gazette_sdk.protocol.stream_pb2 import CallHead
from gazette_sdk.server.authorization import Call
from gazette_sdk.server.stream import Intake, StreamCall, StreamMethod
from support.scripted_journals import HEADER, ScriptedJournals

OPENING = pb.AppendRequest(journal="a/journal")
COMMIT = pb.AppendRequest()


class Setting:
    """A service that keeps what it is asked to append."""

    def __init__(self) -> None:
        self.service = ScriptedJournals()
        self.service.on_append = self._append
        self.items: list[Any] = []
        self.at_hand: list[tuple[bytes, bytes, object]] = []
        methods = {method.rpc.name: method for method in stream_methods(self.service)}
        self.method: StreamMethod = methods["Append"]

    async def _append(self, requests: Any, _: Call) -> pb.AppendResponse:
        self.items = [item async for item in requests]
        return pb.AppendResponse(header=HEADER)

    def call(self, *contents: bytes, request: bytes = OPENING.SerializeToString()) -> StreamCall:
        nothing: Any = None
        began = CallBegan(1, Method.APPEND, CallHead(), request, False)
        call = StreamCall(began, self.method, ServerCalls(), nothing, Intake(lambda: None))
        call.context = Call()
        for content in contents:
            call.put(Item(1, Kind.CONTENT, content))
        call.end()
        return call

    def append_now(self, call: StreamCall) -> Any:
        def keep(opening: bytes, content: bytes, _: Call, behind: object) -> None:
            self.at_hand.append((opening, content, behind))

        self.service.append_now = keep  # type: ignore[method-assign]
        assert self.method.answer_now is not None
        return self.method.answer_now(call, self)


@pytest.mark.parametrize("contents", [(b"x", b"y"), (b"", b"x"), (b"x",), ()])
def test_the_service_gets_the_opening_then_content_then_the_commit(contents):
    setting = Setting()
    call = setting.call(*contents)
    answer = asyncio.run(setting.method.serve(call))
    assert setting.items == [OPENING, *[content for content in contents if content], COMMIT]
    assert call.received == len(contents) + 2
    assert answer is not None
    assert pb.AppendResponse.FromString(answer.response).header == HEADER
    assert answer.success


@pytest.mark.parametrize("contents", [(b"x",), (b"x", b"y"), ()])
def test_an_append_of_one_chunk_is_offered_as_a_whole(contents):
    setting = Setting()
    call = setting.call(*contents)
    assert setting.append_now(call) is None
    assert setting.at_hand == (
        [(OPENING.SerializeToString(), b"x", setting)] if contents == (b"x",) else []
    )
    asyncio.run(setting.method.serve(call))  # nothing of it was taken
    assert setting.items == [OPENING, *contents, COMMIT]
