"""The client's end of a connection's calls."""

from __future__ import annotations

import enum
from collections import deque

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.stream_calls.events import (
    PIPELINE_MAX,
    GoAway,
    HelloReceived,
    Item,
    Ping,
    Pong,
    Status,
    misplaced,
)
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    CONTENT_BYTES_MAX,
    END_FRAME,
    MESSAGE_BYTES_MAX,
    METHODS,
    Frame,
    Kind,
    Method,
    decode_hello,
    decode_status,
    decode_text,
    encode,
    encode_append,
    encode_call,
    encode_goaway,
    header,
)

__all__ = [
    "SENDING",
    "TABLE",
    "Action",
    "ClientCalls",
    "ClientEvent",
    "Effect",
    "Expected",
    "Outgo",
]

ClientEvent = HelloReceived | Item | Status | Ping | Pong | GoAway
"""What a frame of the server means."""


class Expected(enum.IntEnum):
    """What may come from the server, by the oldest open call."""

    OPENING = 0
    """HELLO."""
    IDLE = 1
    """Nothing: no call is open."""
    ONE = 2
    """The only response, or a STATUS that tells a failure."""
    GOOD = 3
    """The STATUS, the only response having come."""
    MANY = 4
    """Responses, then the STATUS."""
    CONTENT = 5
    """Responses and content, then the STATUS."""
    GIVEN_UP = 6
    """The call was given up: all is dropped up to its STATUS."""


class Effect(enum.IntEnum):
    """What a frame does."""

    ITEM = 0
    STATUS = 1
    FAILURE = 2
    HELLO = 3
    DROP = 4
    PING = 5
    PONG = 6
    GOAWAY = 7
    VIOLATION = 8


_X = Expected
_E = Effect
_VIOLATION = (_E.VIOLATION, _X.IDLE)

_CALLS: dict[tuple[Expected, Kind], tuple[Effect, Expected]] = {
    (_X.OPENING, Kind.HELLO): (_E.HELLO, _X.IDLE),
    (_X.OPENING, Kind.GOAWAY): (_E.GOAWAY, _X.OPENING),
    # The state after a STATUS depends on the next call.
    (_X.ONE, Kind.MESSAGE): (_E.ITEM, _X.GOOD),
    (_X.ONE, Kind.STATUS): (_E.FAILURE, _X.IDLE),
    (_X.GOOD, Kind.STATUS): (_E.STATUS, _X.IDLE),
    (_X.MANY, Kind.MESSAGE): (_E.ITEM, _X.MANY),
    (_X.MANY, Kind.STATUS): (_E.STATUS, _X.IDLE),
    (_X.CONTENT, Kind.MESSAGE): (_E.ITEM, _X.CONTENT),
    (_X.CONTENT, Kind.CONTENT): (_E.ITEM, _X.CONTENT),
    (_X.CONTENT, Kind.STATUS): (_E.STATUS, _X.IDLE),
    (_X.GIVEN_UP, Kind.MESSAGE): (_E.DROP, _X.GIVEN_UP),
    (_X.GIVEN_UP, Kind.CONTENT): (_E.DROP, _X.GIVEN_UP),
    (_X.GIVEN_UP, Kind.STATUS): (_E.STATUS, _X.IDLE),
}
_ANY_TIME = {Kind.PING: _E.PING, Kind.PONG: _E.PONG, Kind.GOAWAY: _E.GOAWAY}


def _entry(state: Expected, kind: int) -> tuple[Effect, Expected]:
    if kind == 0:
        return _VIOLATION
    if state is not _X.OPENING and Kind(kind) in _ANY_TIME:
        return _ANY_TIME[Kind(kind)], state
    return _CALLS.get((state, Kind(kind)), _VIOLATION)


TABLE = tuple(tuple(_entry(state, kind) for kind in range(len(Kind) + 1)) for state in Expected)
"""``TABLE[state][kind]`` is the effect of a frame, and the state after it."""

_EXPECTED = {
    method: (_X.CONTENT if traits.answers_content else _X.MANY if traits.server_streams else _X.ONE)
    for method, traits in METHODS.items()
}
_STREAMING = {method: traits.client_streams for method, traits in METHODS.items()}


class Outgo(enum.IntEnum):
    """How far a call is sent."""

    SENDING = 0
    """More of it may follow."""
    SENT = 1
    """It is whole."""
    OVER = 2
    """It was given up, or its STATUS came."""


class Action(enum.IntEnum):
    """What a client may do with a call that it began."""

    ITEM = 0
    END = 1
    ABORT = 2


SENDING: dict[tuple[Outgo, Action], bool | None] = {
    (Outgo.SENDING, Action.ITEM): True,
    (Outgo.SENDING, Action.END): True,
    (Outgo.SENDING, Action.ABORT): True,
    (Outgo.SENT, Action.ITEM): None,
    (Outgo.SENT, Action.END): None,
    (Outgo.SENT, Action.ABORT): True,
    (Outgo.OVER, Action.ITEM): False,
    (Outgo.OVER, Action.END): False,
    (Outgo.OVER, Action.ABORT): False,
}
"""Whether an action is written (True), needs no frame any more (False) or is an error (None)."""


# What runs for every frame compares plain numbers: members of an enum cost several times as much.
_TABLE = tuple(tuple((int(effect), int(after)) for effect, after in row) for row in TABLE)
_ITEM, _STATUS = int(_E.ITEM), int(_E.STATUS)
_OPENING, _IDLE, _GIVEN_UP = int(_X.OPENING), int(_X.IDLE), int(_X.GIVEN_UP)
_SENDING, _SENT, _OVER = int(Outgo.SENDING), int(Outgo.SENT), int(Outgo.OVER)
_APPEND = int(Method.APPEND)


class ClientCalls:
    """State of the calls of one connection, at the client.

    Frames go in with :meth:`receive`, in order; what they mean comes out. Methods that return
    bytes give what is to be written, in the order of those calls.

    What is sent for a call that is over already, since its STATUS came meanwhile or it was
    given up, comes out as no bytes: the caller learns of the end from the STATUS.

    Attributes:
        leaving: GOAWAY was sent or received: no call can begin any more.
        failed: the server broke the rules; nothing more is to be done but to say so and close.
        content_bytes_max: greatest content of a frame that the server takes.
        message_bytes_max: greatest message that it takes.
    """

    __slots__ = (
        "_newest",
        "_oldest",
        "_open",
        "_outgo",
        "_state",
        "content_bytes_max",
        "failed",
        "leaving",
        "message_bytes_max",
    )

    def __init__(self) -> None:
        self.leaving = False
        self.failed: StreamProtocolError | None = None
        self.content_bytes_max = CONTENT_BYTES_MAX
        self.message_bytes_max = MESSAGE_BYTES_MAX
        self._state = _OPENING
        self._newest = 0
        self._oldest = 1
        self._outgo = _OVER
        self._open: deque[int] = deque()

    # ------------------------------------------------------------- where it stands

    @property
    def open_calls(self) -> range:
        """Numbers of the calls without STATUS, the oldest first."""
        return range(self._oldest, self._newest + 1)

    @property
    def may_begin(self) -> bool:
        """Whether a call can begin now."""
        return self._obstacle() == ""

    @property
    def sending(self) -> int:
        """The call of which more may be sent, or 0. A lost connection has rolled it back."""
        return self._newest if self._outgo == _SENDING else 0

    @property
    def drained(self) -> bool:
        """Whether no call is open and none can begin: the connection is to be closed."""
        return self.leaving and self._newest < self._oldest

    # -------------------------------------------------------------------- receiving

    def receive(self, frame: Frame) -> ClientEvent | None:
        """Takes the server's next frame.

        Returns:
            What it means; None if nothing is to be done.

        Raises:
            StreamProtocolError: it broke the rules, or one before it did. Tell the server with
                :meth:`goaway`, and close.
        """
        if self.failed is not None:
            raise self.failed
        kind, payload = frame
        effect, after = _TABLE[self._state][kind]
        if effect == _ITEM:
            self._state = after
            return Item(self._oldest, kind, payload)
        if effect == _STATUS:
            return self._ended(payload)
        return self._rarer(frame, effect)

    def _rarer(self, frame: Frame, effect: int) -> ClientEvent | None:
        """Takes a frame of the less frequent kinds."""
        event: ClientEvent | None = None
        if effect == Effect.VIOLATION:
            self.failed = StreamProtocolError(misplaced(frame, Expected(self._state)))
            raise self.failed
        if effect == Effect.FAILURE:
            if frame.payload[:1] == b"\0":
                self.failed = StreamProtocolError("STATUS frame tells success without a response")
                raise self.failed
            event = self._ended(frame.payload)
        elif effect == Effect.HELLO:
            event = self._greeted(frame.payload)
        elif effect == Effect.PING:
            event = Ping(frame.payload)
        elif effect == Effect.PONG:
            event = Pong(frame.payload)
        elif effect == Effect.GOAWAY:
            self.leaving = True
            event = GoAway(decode_text(frame.payload))
        return event

    def _greeted(self, payload: bytes) -> HelloReceived:
        """Takes HELLO."""
        try:
            hello = decode_hello(payload)
        except StreamProtocolError as error:
            self.failed = error
            raise
        self.content_bytes_max = min(CONTENT_BYTES_MAX, hello.content_bytes_max)
        self.message_bytes_max = min(MESSAGE_BYTES_MAX, hello.message_bytes_max)
        self._state = _IDLE
        return HelloReceived(hello)

    def _ended(self, payload: bytes) -> Status:
        """Takes a STATUS."""
        call = self._oldest
        if payload == b"\0":
            status = Status(call, 0, "", "")
        else:
            try:
                status = Status(call, *decode_status(payload))
            except StreamProtocolError as error:
                self.failed = error
                raise
        self._oldest = call + 1
        self._open.popleft()
        self._state = self._open[0] if self._open else _IDLE
        if call == self._newest:
            self._outgo = _OVER
        return status

    # ---------------------------------------------------------------------- sending

    def begin(self, method: int, request: bytes, head: bytes = b"") -> tuple[int, bytes]:
        """Begins a call.

        Args:
            method: number of the method.
            request: the encoded request.
            head: an encoded ``CallHead``.

        Returns:
            The call's number, and the bytes to write.

        Raises:
            StreamProtocolError: no call can begin now, or this one is too long.
        """
        obstacle = self._obstacle()
        if obstacle:
            raise StreamProtocolError(obstacle)
        if len(request) + len(head) + 3 > self.message_bytes_max:
            raise StreamProtocolError(f"the server takes calls of {self.message_bytes_max} bytes")
        data = encode_call(method, request, head)
        return self._began(method, sent=not _STREAMING[method]), data

    def append(self, request: bytes, content: bytes, head: bytes = b"") -> tuple[int, bytes]:
        """A whole Append of one piece of content, for one write.

        Args:
            request: the encoded ``AppendRequest`` that names the journal.
            content: up to :attr:`content_bytes_max`.
            head: an encoded ``CallHead``.

        Returns:
            The call's number, and the bytes to write.

        Raises:
            StreamProtocolError: no call can begin now, or this one is too long.
        """
        obstacle = self._obstacle()
        if obstacle:
            raise StreamProtocolError(obstacle)
        if len(content) > self.content_bytes_max:
            raise StreamProtocolError(f"the server takes content of {self.content_bytes_max} bytes")
        if len(request) + len(head) + 3 > self.message_bytes_max:
            raise StreamProtocolError(f"the server takes calls of {self.message_bytes_max} bytes")
        data = encode_append(request, content, head)
        return self._began(_APPEND, sent=True), data

    def message(self, call: int, payload: bytes) -> bytes:
        """A further request of a call that is being sent."""
        if not self._written(call, Action.ITEM):
            return b""
        if len(payload) > self.message_bytes_max:
            raise StreamProtocolError(
                f"the server takes messages of {self.message_bytes_max} bytes"
            )
        return encode(Kind.MESSAGE, payload)

    def content(self, call: int, payload: bytes) -> bytes:
        """Content of a call that is being sent, up to :attr:`content_bytes_max`."""
        before = self.content_header(call, len(payload))
        return before + payload if before else b""

    def content_header(self, call: int, length: int) -> bytes:
        """What precedes ``length`` bytes of content that are written without being copied.

        Returns:
            The header; no bytes if the call is over, when the content must not follow either.
        """
        if not self._written(call, Action.ITEM):
            return b""
        if length > self.content_bytes_max:
            raise StreamProtocolError(f"the server takes content of {self.content_bytes_max} bytes")
        return header(Kind.CONTENT, length)

    def end(self, call: int) -> bytes:
        """Says that a call is whole. An append commits."""
        if not self._written(call, Action.END):
            return b""
        self._outgo = _SENT
        return END_FRAME

    def abort(self, call: int) -> bytes:
        """Gives a call up: what still comes for it is dropped, except its STATUS.

        Only the newest call can be given up on the wire; for an older one no bytes come out,
        and the server goes on with it.
        """
        if not self._written(call, Action.ABORT):
            return b""
        self._open[call - self._oldest] = _GIVEN_UP
        if call == self._oldest:
            self._state = _GIVEN_UP
        if call != self._newest:
            return b""
        self._outgo = _OVER
        return ABORT_FRAME

    def ping(self, payload: bytes) -> bytes:
        """A PING of up to 64 bytes; the server sends them back."""
        return encode(Kind.PING, payload)

    def pong(self, payload: bytes) -> bytes:
        """The answer to a :class:`Ping`."""
        return encode(Kind.PONG, payload)

    def goaway(self, reason: str) -> bytes:
        """Says that no new calls will come."""
        self.leaving = True
        return encode_goaway(reason)

    def _obstacle(self) -> str:
        """Why no call can begin now; empty if one can."""
        if self._outgo == _SENDING:
            return f"call {self._newest} is still being sent"
        if self._newest - self._oldest >= PIPELINE_MAX - 1:
            return f"{PIPELINE_MAX} calls are open"
        if self.leaving:
            return "the connection takes no new calls"
        if self._state == _OPENING:
            return "the server has not said HELLO"
        if self.failed is not None:
            return f"the connection failed: {self.failed.reason}"
        return ""

    def _began(self, method: int, *, sent: bool) -> int:
        call = self._newest = self._newest + 1
        expected = _EXPECTED[method]
        if not self._open:
            self._state = expected
        self._open.append(expected)
        self._outgo = _SENT if sent else _SENDING
        return call

    def _outgo_of(self, call: int) -> int:
        if not 0 < call <= self._newest:
            raise StreamProtocolError(f"call {call} never began")
        if call < self._oldest:
            return _OVER
        if call == self._newest:
            return self._outgo
        given_up = self._open[call - self._oldest] == _GIVEN_UP
        return _OVER if given_up else _SENT

    def _written(self, call: int, action: Action) -> bool:
        """Whether an action needs a frame.

        Raises:
            StreamProtocolError: the call is whole, so that nothing can follow.
        """
        written = SENDING[Outgo(self._outgo_of(call)), action]
        if written is None:
            raise StreamProtocolError(f"call {call} is whole: nothing can follow")
        return written
