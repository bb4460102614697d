"""Client's state of the calls on one connection."""

from __future__ import annotations

import enum
from collections import deque

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.stream_calls.calls import Calls
from gazette_sdk.protocol.stream_calls.events import (
    PIPELINE_MAX,
    GoAway,
    HelloReceived,
    Item,
    Ping,
    Pong,
    Status,
    out_of_order,
)
from gazette_sdk.protocol.stream_frames.decoding import decode_hello, decode_status, decode_text
from gazette_sdk.protocol.stream_frames.encoding import (
    ABORT_FRAME,
    CONTENT_BYTES_MAX,
    END_FRAME,
    MESSAGE_BYTES_MAX,
    METHODS,
    Frame,
    Kind,
    Method,
    encode,
    encode_append,
    encode_call,
    header,
)

__all__ = [
    "SENDING",
    "TABLE",
    "ClientCalls",
    "ClientEffect",
    "ClientEvent",
    "ReceiveState",
    "SendAction",
    "SendState",
]

ClientEvent = HelloReceived | Item | Status | Ping | Pong | GoAway
"""Meaning of a frame of the server."""


class ReceiveState(enum.IntEnum):
    """State of receiving: the frames that the server may send for the oldest open call."""

    OPENING = 0
    """HELLO."""
    IDLE = 1
    """None: no call is open."""
    ONE = 2
    """The only response, or a STATUS of a failure."""
    ANSWERED = 3
    """The STATUS: the only response was received."""
    MANY = 4
    """Responses, then the STATUS."""
    CONTENT = 5
    """Responses and content, then the STATUS."""
    ABORTED = 6
    """The client aborted the call: frames are dropped up to its STATUS."""


class ClientEffect(enum.IntEnum):
    """Effect of a frame that the client receives."""

    ITEM = 0
    STATUS = 1
    FAILURE = 2
    HELLO = 3
    DROP = 4
    PING = 5
    PONG = 6
    GOAWAY = 7
    VIOLATION = 8


_X = ReceiveState
_E = ClientEffect
_VIOLATION = (_E.VIOLATION, _X.IDLE)

_CALLS: dict[tuple[ReceiveState, Kind], tuple[ClientEffect, ReceiveState]] = {
    (_X.OPENING, Kind.HELLO): (_E.HELLO, _X.IDLE),
    (_X.OPENING, Kind.GOAWAY): (_E.GOAWAY, _X.OPENING),
    # The state after a STATUS depends on the next call.
    (_X.ONE, Kind.MESSAGE): (_E.ITEM, _X.ANSWERED),
    (_X.ONE, Kind.STATUS): (_E.FAILURE, _X.IDLE),
    (_X.ANSWERED, Kind.STATUS): (_E.STATUS, _X.IDLE),
    (_X.MANY, Kind.MESSAGE): (_E.ITEM, _X.MANY),
    (_X.MANY, Kind.STATUS): (_E.STATUS, _X.IDLE),
    (_X.CONTENT, Kind.MESSAGE): (_E.ITEM, _X.CONTENT),
    (_X.CONTENT, Kind.CONTENT): (_E.ITEM, _X.CONTENT),
    (_X.CONTENT, Kind.STATUS): (_E.STATUS, _X.IDLE),
    (_X.ABORTED, Kind.MESSAGE): (_E.DROP, _X.ABORTED),
    (_X.ABORTED, Kind.CONTENT): (_E.DROP, _X.ABORTED),
    (_X.ABORTED, Kind.STATUS): (_E.STATUS, _X.IDLE),
}
_ANY_TIME = {Kind.PING: _E.PING, Kind.PONG: _E.PONG, Kind.GOAWAY: _E.GOAWAY}


def _entry(state: ReceiveState, kind: int) -> tuple[ClientEffect, ReceiveState]:
    if kind == 0:
        return _VIOLATION
    if state is not _X.OPENING and Kind(kind) in _ANY_TIME:
        return _ANY_TIME[Kind(kind)], state
    return _CALLS.get((state, Kind(kind)), _VIOLATION)


TABLE = tuple(tuple(_entry(state, kind) for kind in range(len(Kind) + 1)) for state in ReceiveState)
"""``TABLE[state][kind]`` is the effect of a frame, and the state after it."""

_EXPECTED = {
    method: (_X.CONTENT if traits.answers_content else _X.MANY if traits.server_streams else _X.ONE)
    for method, traits in METHODS.items()
}
_STREAMING = {method: traits.client_streams for method, traits in METHODS.items()}


class SendState(enum.IntEnum):
    """State of sending one call."""

    SENDING = 0
    """More frames may follow."""
    SENT = 1
    """The whole call was sent."""
    OVER = 2
    """The call was aborted, or its STATUS was received."""


class SendAction(enum.IntEnum):
    """Action of a client on a call that it began."""

    ITEM = 0
    END = 1
    ABORT = 2


SENDING: dict[tuple[SendState, SendAction], bool | None] = {
    (SendState.SENDING, SendAction.ITEM): True,
    (SendState.SENDING, SendAction.END): True,
    (SendState.SENDING, SendAction.ABORT): True,
    (SendState.SENT, SendAction.ITEM): None,
    (SendState.SENT, SendAction.END): None,
    (SendState.SENT, SendAction.ABORT): True,
    (SendState.OVER, SendAction.ITEM): False,
    (SendState.OVER, SendAction.END): False,
    (SendState.OVER, SendAction.ABORT): False,
}
"""True: the action needs a frame; False: it needs none any more; None: it is an error."""


# The code that runs for every frame compares integers: comparing enum members costs several times
# as much.
_TABLE = tuple(tuple((int(effect), int(after)) for effect, after in row) for row in TABLE)
_ITEM, _STATUS = int(_E.ITEM), int(_E.STATUS)
_OPENING, _IDLE, _ABORTED = int(_X.OPENING), int(_X.IDLE), int(_X.ABORTED)
_SENDING, _SENT, _OVER = int(SendState.SENDING), int(SendState.SENT), int(SendState.OVER)
_APPEND = int(Method.APPEND)


class ClientCalls(Calls):
    """State of the calls of one connection, at the client.

    :meth:`receive` takes every frame, in order, and returns its meaning. Methods that return bytes
    return what the caller must write, in the order of those calls.

    They return no bytes for a call that is over: one that was aborted, or whose STATUS was
    received meanwhile. The STATUS announces the end to the caller.

    Attributes:
        content_bytes_max: greatest content of a frame that the server takes.
        message_bytes_max: greatest message that it takes.
    """

    __slots__ = (
        "_open",
        "_send_state",
        "_state",
        "content_bytes_max",
        "message_bytes_max",
    )

    def __init__(self) -> None:
        super().__init__()
        self.content_bytes_max = CONTENT_BYTES_MAX
        self.message_bytes_max = MESSAGE_BYTES_MAX
        self._state = _OPENING
        self._send_state = _OVER
        self._open: deque[int] = deque()

    # ----------------------------------------------------------------------- state

    @property
    def may_begin(self) -> bool:
        """Return True if a call can begin now."""
        return self._reason_not_to_begin() == ""

    @property
    def sending(self) -> int:
        """The call of which more may be sent, or 0. The server drops it if the connection ends."""
        return self._newest if self._send_state == _SENDING else 0

    # -------------------------------------------------------------------- receiving

    def receive(self, frame: Frame) -> ClientEvent | None:
        """Process the server's next frame.

        Returns:
            Its meaning; None if the caller has nothing to do.

        Raises:
            StreamProtocolError: this frame or an earlier one broke the rules. Send
                :meth:`goaway`, and close the connection.
        """
        if self.failed is not None:
            raise self.failed
        kind, payload = frame
        effect, after = _TABLE[self._state][kind]
        if effect == _ITEM:
            self._state = after
            return Item(self._oldest, kind, payload)
        if effect == _STATUS:
            return self._receive_status(payload)
        return self._receive_rare(frame, effect)

    def _receive_rare(self, frame: Frame, effect: int) -> ClientEvent | None:
        """Process a frame of the less frequent kinds."""
        event: ClientEvent | None = None
        if effect == ClientEffect.VIOLATION:
            self.failed = StreamProtocolError(out_of_order(frame, ReceiveState(self._state)))
            raise self.failed
        if effect == ClientEffect.FAILURE:
            if frame.payload[:1] == b"\0":
                self.failed = StreamProtocolError("STATUS frame of a success without a response")
                raise self.failed
            event = self._receive_status(frame.payload)
        elif effect == ClientEffect.HELLO:
            event = self._receive_hello(frame.payload)
        elif effect == ClientEffect.PING:
            event = Ping(frame.payload)
        elif effect == ClientEffect.PONG:
            event = Pong(frame.payload)
        elif effect == ClientEffect.GOAWAY:
            self.leaving = True
            event = GoAway(decode_text(frame.payload))
        return event

    def _receive_hello(self, payload: bytes) -> HelloReceived:
        """Process HELLO."""
        try:
            hello = decode_hello(payload)
        except StreamProtocolError as error:
            self.failed = error
            raise
        self.content_bytes_max = min(CONTENT_BYTES_MAX, hello.content_bytes_max)
        self.message_bytes_max = min(MESSAGE_BYTES_MAX, hello.message_bytes_max)
        self._state = _IDLE
        return HelloReceived(hello)

    def _receive_status(self, payload: bytes) -> Status:
        """Process a STATUS, which ends the oldest open call."""
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
            self._send_state = _OVER
        return status

    # ---------------------------------------------------------------------- sending

    def begin(self, method: int, request: bytes, head: bytes = b"") -> tuple[int, bytes]:
        """Begin a call.

        Args:
            method: number of the method.
            request: the encoded request.
            head: an encoded ``CallHead``.

        Returns:
            The call's number, and the bytes to write.

        Raises:
            StreamProtocolError: no call can begin now, or this one is too long.
        """
        reason = self._reason_not_to_begin()
        if reason:
            raise StreamProtocolError(reason)
        if len(request) + len(head) + 3 > self.message_bytes_max:
            raise StreamProtocolError(f"the server takes calls of {self.message_bytes_max} bytes")
        data = encode_call(method, request, head)
        return self._add_call(method, sent=not _STREAMING[method]), data

    def append(self, request: bytes, content: bytes, head: bytes = b"") -> tuple[int, bytes]:
        """Begin and end an Append of one piece of content, in one write.

        Args:
            request: the encoded ``AppendRequest`` that names the journal.
            content: up to :attr:`content_bytes_max`.
            head: an encoded ``CallHead``.

        Returns:
            The call's number, and the bytes to write.

        Raises:
            StreamProtocolError: no call can begin now, or this one is too long.
        """
        reason = self._reason_not_to_begin()
        if reason:
            raise StreamProtocolError(reason)
        if len(content) > self.content_bytes_max:
            raise StreamProtocolError(f"the server takes content of {self.content_bytes_max} bytes")
        if len(request) + len(head) + 3 > self.message_bytes_max:
            raise StreamProtocolError(f"the server takes calls of {self.message_bytes_max} bytes")
        data = encode_append(request, content, head)
        return self._add_call(_APPEND, sent=True), data

    def message(self, call: int, payload: bytes) -> bytes:
        """Return a further request of a call that is being sent."""
        if not self._needs_frame(call, SendAction.ITEM):
            return b""
        if len(payload) > self.message_bytes_max:
            raise StreamProtocolError(
                f"the server takes messages of {self.message_bytes_max} bytes"
            )
        return encode(Kind.MESSAGE, payload)

    def content(self, call: int, payload: bytes) -> bytes:
        """Return content of a call that is being sent, up to :attr:`content_bytes_max`."""
        before = self.content_header(call, len(payload))
        return before + payload if before else b""

    def content_header(self, call: int, length: int) -> bytes:
        """Return the header of ``length`` bytes of content that the caller writes uncopied.

        Returns:
            The header; no bytes if the call is over. Then the content must not follow either.
        """
        if not self._needs_frame(call, SendAction.ITEM):
            return b""
        if length > self.content_bytes_max:
            raise StreamProtocolError(f"the server takes content of {self.content_bytes_max} bytes")
        return header(Kind.CONTENT, length)

    def end(self, call: int) -> bytes:
        """End the requests of a call. An append commits."""
        if not self._needs_frame(call, SendAction.END):
            return b""
        self._send_state = _SENT
        return END_FRAME

    def abort(self, call: int) -> bytes:
        """Abort a call: drop all further frames of it, except its STATUS.

        Only the newest call can be aborted at the server. For an older one no bytes are returned,
        and the server goes on with it.
        """
        if not self._needs_frame(call, SendAction.ABORT):
            return b""
        self._open[call - self._oldest] = _ABORTED
        if call == self._oldest:
            self._state = _ABORTED
        if call != self._newest:
            return b""
        self._send_state = _OVER
        return ABORT_FRAME

    def _reason_not_to_begin(self) -> str:
        """Return the reason why no call can begin now; empty if one can."""
        if self._send_state == _SENDING:
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

    def _add_call(self, method: int, *, sent: bool) -> int:
        call = self._newest = self._newest + 1
        expected = _EXPECTED[method]
        if not self._open:
            self._state = expected
        self._open.append(expected)
        self._send_state = _SENT if sent else _SENDING
        return call

    def _send_state_of(self, call: int) -> int:
        if not 0 < call <= self._newest:
            raise StreamProtocolError(f"call {call} never began")
        if call < self._oldest:
            return _OVER
        if call == self._newest:
            return self._send_state
        given_up = self._open[call - self._oldest] == _ABORTED
        return _OVER if given_up else _SENT

    def _needs_frame(self, call: int, action: SendAction) -> bool:
        """Return True if an action needs a frame.

        Raises:
            StreamProtocolError: the whole call was sent, so that nothing can follow.
        """
        needed = SENDING[SendState(self._send_state_of(call)), action]
        if needed is None:
            raise StreamProtocolError(f"call {call} is whole: nothing can follow")
        return needed
