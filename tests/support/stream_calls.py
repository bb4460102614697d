"""Frames of every kind, and both ends of a connection in every state of their calls."""

from __future__ import annotations

from gazette_sdk.protocol.served_calls import ServerCalls
from gazette_sdk.protocol.stream_calls import ClientCalls
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    Frame,
    Method,
    encode_call,
    encode_goaway,
    encode_hello,
    encode_status,
)
from gazette_sdk.protocol.stream_pb2 import CallHead
from support.frame_feed import FrameFeed

__all__ = [
    "AFTER_SUCCESS",
    "FRAMES",
    "HELLO",
    "call_frame",
    "cells",
    "client_in",
    "frame_of",
    "server_in",
]

AFTER_SUCCESS = CallHead(after_success=True).SerializeToString()


def frame_of(data: bytes) -> Frame:
    (frame,) = FrameFeed().feed(data)
    return frame


def call_frame(method: int, request: bytes = b"", head: bytes = b"") -> Frame:
    return frame_of(encode_call(method, request, head))


HELLO = frame_of(encode_hello("z", "s"))
FRAMES = {
    "HELLO": HELLO,
    "CALL": call_frame(Method.LIST),
    "MESSAGE": Frame(3, b"m"),
    "CONTENT": Frame(4, b"c"),
    "END": Frame(5, b""),
    "ABORT": Frame(6, b""),
    "STATUS": frame_of(encode_status(5, "no")),
    "PING": Frame(8, b"p"),
    "PONG": Frame(9, b"p"),
    "GOAWAY": frame_of(encode_goaway("bye")),
}


def cells(text: str) -> list[tuple[str, str, str]]:
    """(state, kind, expected) of each cell of a table in words."""
    heads, *rows = [line.split() for line in text.strip().splitlines()]
    return [(row[0], kind, word) for row in rows for kind, word in zip(heads, row[1:], strict=True)]


def server_in(state: str) -> ServerCalls:
    """A server whose newest call, number 1, is in a state."""
    calls = ServerCalls()
    if state == "opening":
        return calls
    calls.hello()
    if state == "idle":
        return calls
    method = {"sent": 1, "answered": 1, "crossed": 1, "unknown": 99}.get(state, Method.APPEND)
    calls.receive(call_frame(method))
    if state == "ended":
        calls.receive(FRAMES["END"])
    elif state == "given_up":
        calls.receive(FRAMES["ABORT"])
    elif state in ("early", "answered", "early_end", "crossed"):
        calls.status(1, 5)
        if state in ("early_end", "crossed"):
            assert calls.receive(FRAMES["END" if state == "early_end" else "ABORT"]) is None
    return calls


def client_in(state: str) -> ClientCalls:
    """A client whose oldest open call, number 1, is in a state."""
    calls = ClientCalls()
    if state == "opening":
        return calls
    calls.receive(HELLO)
    if state == "idle":
        return calls
    methods = {"sending": 4, "many": 1, "reading": 3, "given_up": 3}
    assert calls.begin(methods.get(state, Method.APPLY), b"")[0] == 1
    if state == "good":
        calls.receive(FRAMES["MESSAGE"])
    elif state == "given_up":
        assert calls.abort(1) == ABORT_FRAME
    elif state == "over":
        calls.receive(FRAMES["STATUS"])
    return calls
