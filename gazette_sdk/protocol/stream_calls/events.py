"""Events that the state machines of both ends make of the frames they receive."""

from __future__ import annotations

import enum
from typing import NamedTuple

from gazette_sdk.protocol.stream_frames.encoding import Frame, Kind
from gazette_sdk.protocol.stream_pb2 import CallHead, Hello

__all__ = [
    "NOT_RUN",
    "PIPELINE_MAX",
    "Aborted",
    "CallBegan",
    "CallRefused",
    "Code",
    "GoAway",
    "HalfClosed",
    "HelloReceived",
    "Item",
    "Ping",
    "Pong",
    "Status",
    "out_of_order",
]

PIPELINE_MAX = 64
"""Greatest number of open calls of a connection."""

NOT_RUN = "NotRun"
"""Kind of a STATUS that ends a call which the service never received."""


class Code(enum.IntEnum):
    """gRPC status codes that the state machines themselves send."""

    OK = 0
    ABORTED = 10
    UNIMPLEMENTED = 12
    UNAVAILABLE = 14


class CallBegan(NamedTuple):
    """Server: a call begins.

    Attributes:
        call: its number; numbers rise by one from 1.
        method: number of the method, one the server knows.
        head: metadata and bound. The same object for calls with the same head: not to be changed.
        request: the encoded request.
        sent: no further frame of the call will follow, except ABORT.
    """

    call: int
    method: int
    head: CallHead
    request: bytes
    sent: bool


class CallRefused(NamedTuple):
    """Server: a call that is not to be run. Answer it with this STATUS when it is the oldest."""

    call: int
    code: int
    text: str
    kind: str


class Item(NamedTuple):
    """Both: a further message or content of a call. ``kind`` is MESSAGE or CONTENT."""

    call: int
    kind: int
    payload: bytes


class HalfClosed(NamedTuple):
    """Server: END came. The call is whole; an append commits."""

    call: int


class Aborted(NamedTuple):
    """Server: the client gave the call up. It is still to be ended, with any status."""

    call: int


class HelloReceived(NamedTuple):
    """Client: the server said HELLO; calls can begin."""

    hello: Hello


class Status(NamedTuple):
    """Client: a call ended.

    Attributes:
        call: its number.
        code: gRPC status code; 0 is success.
        text: reason of the failure; empty for success.
        kind: name of the error's class, where the server sent it.
    """

    call: int
    code: int
    text: str
    kind: str

    @property
    def not_run(self) -> bool:
        """Return True if the service certainly never received the call."""
        return self.kind == NOT_RUN


class Ping(NamedTuple):
    """Both: a PING. Answer it with ``pong(payload)``."""

    payload: bytes


class Pong(NamedTuple):
    """Both: an answer to a PING."""

    payload: bytes


class GoAway(NamedTuple):
    """Both: the peer accepts or opens no new calls. It may be sent more than once."""

    reason: str


def out_of_order(frame: Frame, state: enum.IntEnum) -> str:
    """Return the message of the error for a frame that must not come in a state."""
    name = Kind(frame.kind).name
    return f"{name} frame out of order (state {state.name.lower()})"
