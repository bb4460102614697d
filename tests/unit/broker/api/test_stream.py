"""A client's stream of an append, as the stream transport brings it to the service."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gazette_sdk.broker.api.stream import _AppendItems
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.service import RPCS_BY_NAME
from gazette_sdk.protocol.stream_calls import CallBegan, Item, ServerCalls
from gazette_sdk.protocol.stream_frames import CallHead, Kind, Method
from gazette_sdk.server.stream_call import ConnectionParts, Intake, StreamCall, StreamMethod

OPENING = pb.AppendRequest(journal="a/journal")
# The same with its field twice, which is valid, but not how we would write it.
ENCODED = pb.AppendRequest(journal="b").SerializeToString() + OPENING.SerializeToString()
COMMIT = pb.AppendRequest()


def items_of(*contents: bytes) -> _AppendItems:
    async def serve(_: StreamCall) -> None:
        raise AssertionError("it is not served")

    nothing: Any = None
    parts = ConnectionParts(ServerCalls(), nothing, Intake(lambda: None), lambda _: None)
    began = CallBegan(1, Method.APPEND, CallHead(), ENCODED, False)
    call = StreamCall(began, StreamMethod(RPCS_BY_NAME["Append"], serve), parts)
    for content in contents:
        call.put(Item(1, Kind.CONTENT, content))
    call.end()
    return _AppendItems(OPENING, call)


async def rest_of(items: _AppendItems) -> list[Any]:
    return [item async for item in items]


def test_the_opening_is_the_first_item_unless_it_was_taken():
    assert asyncio.run(rest_of(items_of(b"x", b"y"))) == [OPENING, b"x", b"y", COMMIT]
    items = items_of(b"x", b"y")
    assert items.take_opening() == (OPENING, ENCODED)
    assert asyncio.run(rest_of(items)) == [b"x", b"y", COMMIT]


def test_the_opening_is_taken_once():
    items = items_of(b"x")
    items.take_opening()
    with pytest.raises(AssertionError, match="once"):
        items.take_opening()


@pytest.mark.parametrize("contents", [(b"x",), (b"x", b"y"), (b"",), ()])
def test_one_chunk_with_its_commit_is_taken_whole_behind_the_opening(contents):
    items = items_of(*contents)
    assert items.take_whole() is None
    items.take_opening()
    is_whole = contents == (b"x",)
    assert items.take_whole() == (b"x" if is_whole else None)
    assert asyncio.run(rest_of(items)) == (
        [] if is_whole else [content for content in contents if content] + [COMMIT]
    )
