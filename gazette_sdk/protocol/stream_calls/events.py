"""What the machines of both ends tell of the frames they receive."""

from __future__ import annotations

import enum
from typing import NamedTuple

from gazette_sdk.protocol.stream_frames import Frame, Kind
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
    "misplaced",
]

PIPELINE_MAX = 64
"""How many calls of a connection may be open."""

NOT_RUN = "NotRun"
"""Kind of a STATUS that ends a call which the service never saw."""


class Code(enum.IntEnum):
    """Those gRPC status codes that the machines themselves send."""

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
        sent: nothing more of the call will come, unless it is aborted.
    """

    call: int
    method: int
    head: CallHead
    request: bytes
    sent: bool


class CallRefused(NamedTuple):
    """Server: a call came that is not to be run, only answered so when it is its turn."""

    call: int
    code: int
    text: str
    kind: str


class Item(NamedTuple):
    """Both: a further message of a call, or content. ``kind`` is MESSAGE or CONTENT."""

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
        call: which.
        code: gRPC status code; 0 is success.
        text: why, empty for success.
        kind: name of the error's class, where the server told.
    """

    call: int
    code: int
    text: str
    kind: str

    @property
    def not_run(self) -> bool:
        """Whether the service certainly never saw the call."""
        return self.kind == NOT_RUN


class Ping(NamedTuple):
    """Both: to be answered with ``pong(payload)``."""

    payload: bytes


class Pong(NamedTuple):
    """Both: an answer to a PING."""

    payload: bytes


class GoAway(NamedTuple):
    """Both: the peer takes or opens no new calls. It may come more than once."""

    reason: str


def misplaced(frame: Frame, state: enum.IntEnum) -> str:
    """Says that a frame has no meaning in a state."""
    name = Kind(frame.kind).name
    return f"{name} frame out of order (state {state.name.lower()})"
