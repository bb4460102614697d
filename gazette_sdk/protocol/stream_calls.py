"""Calls on the stream transport: which frame may come when, and what it means. Pure.

A connection carries calls. The client opens them with CALL frames; each gets exactly one STATUS,
and STATUSes come in the order of the CALLs. No frame names its call, so both ends count:

**What a client sends belongs to the newest call**, the one whose CALL it sent last. For a method
whose client streams, MESSAGE and CONTENT follow the CALL until END. A call *is sent* when its END
or ABORT was sent, or its STATUS was received; a call of any other method is sent with its CALL.
Only then may the next CALL follow. ABORT may come for the newest call at any time, also after END;
older calls can't be aborted, so a client that may stop a call early opens no other after it.

**What a server sends belongs to the oldest open call**, the oldest without STATUS. Every call gets
its STATUS, also one that was aborted: this keeps both ends in step.

**Frames cross.** A server may send STATUS before it has read the whole call (an append refused at
once). The client, which doesn't know yet, continues sending MESSAGE and CONTENT, and may end with
END or ABORT: the server drops these, up to the next CALL. When the STATUS arrives, the client stops
sending: neither END nor ABORT is needed any more. So a server that sees a CALL while the newest
call is neither sent nor answered sees a client that is out of step: it ends the connection. An
ABORT that crosses the STATUS of a call already sent is dropped, too.

**Pipelining.** Up to 64 calls may be open. A client's count is never less than its server's, so a
client that keeps the bound is never refused; the server holds back a 65th CALL, and with it
everything after, until a STATUS makes room (``ServerCalls.full``).

**After success.** A call whose head says ``after_success`` is run only if the call before it on the
connection ended with success; the first call has none before it, and runs. What success is, the
service says when it ends a call: for an append, that the journal took it, which is more than the
code 0. A call that isn't run for this reason ends with the code ABORTED, and isn't a success
itself, so that a chain of such calls stops at its first failure.

**Leaving.** After GOAWAY neither end opens new calls; those already begun continue. A CALL that
crosses the server's GOAWAY is answered with UNAVAILABLE. The client closes the connection when its
last call has ended; a server without open calls waits for that, for a bounded time.

**Not run.** A STATUS whose kind is :data:`NOT_RUN` says that the service never received the call:
its method is unknown here, it came after GOAWAY, or it followed a failure. It can be repeated
without the risk that it runs twice.

**Rules broken.** The end that receives a frame out of order raises
:class:`~gazette_sdk.errors.StreamProtocolError`, for this frame and every later one. The connection
ends then, with a GOAWAY that gives the reason. The methods for sending raise the same error for a
frame that the peer would refuse; the connection stays usable.

Each end is a table of (state, kind of frame) → (effect, next state): :class:`ClientCalls` here,
``ServerCalls`` in `served_calls`; :class:`Calls` is what both have. They make events of the frames
they receive.

**Liveness** (:class:`Liveness`): when to send PING, and when to drop the peer. A peer that sends
nothing for 2.5 s during a call gets a PING. One that sends nothing for 5 s is dropped: so a client
gives up a frozen broker when a short lease ends. It has 60 s while more than 64 KiB of our data is
unread: it may be slow, and yet alive. The caller passes monotonic seconds as ``now``.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import NamedTuple

from gazette_sdk.errors import StreamProtocolError
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
from gazette_sdk.protocol.stream_pb2 import CallHead, Hello

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


class Calls:
    """Calls of one connection, at either end: their numbers, and how the connection ends.

    Attributes:
        leaving: GOAWAY was sent or received: no call can begin any more.
        failed: the peer broke the rules; send :meth:`goaway` and close the connection.
    """

    __slots__ = ("_newest", "_oldest", "failed", "leaving")

    def __init__(self) -> None:
        self.leaving = False
        self.failed: StreamProtocolError | None = None
        self._newest = 0
        self._oldest = 1

    @property
    def open_calls(self) -> range:
        """Numbers of the calls without STATUS, the oldest first."""
        return range(self._oldest, self._newest + 1)

    @property
    def drained(self) -> bool:
        """Return True if no call is open and none can begin. The client closes the connection."""
        return self.leaving and self._newest < self._oldest

    def ping(self, payload: bytes) -> bytes:
        """Return a PING of up to 64 bytes; the peer sends them back."""
        return encode(Kind.PING, payload)

    def pong(self, payload: bytes) -> bytes:
        """Return the answer to a :class:`Ping`."""
        return encode(Kind.PONG, payload)

    def goaway(self, reason: str) -> bytes:
        """Return a GOAWAY: no new calls begin. Open ones continue unless the rules were broken."""
        self.leaving = True
        return encode_goaway(reason)


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
        and the server continues with it.
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


PING_AFTER_S = 2.5
"""A PING is sent after so much silence during a call, and each time as much passes again."""

SILENCE_MAX_S = 5.0
"""A peer is dropped after so much silence during a call."""

STALL_MAX_S = 60.0
"""The same, while more than :data:`STALLED_BYTES` that we sent may be unread."""

STALLED_BYTES = 64 << 10


class LivenessCheck(enum.Enum):
    """Result of a check."""

    WAIT = "check again at the deadline"
    PING = "send PING, and check again at the deadline"
    DROP = "the peer is dead: drop the connection"


class Liveness:
    """Clock of one connection's silence. It runs while calls are open.

    Args:
        now: the time at which the first call begins.

    Attributes:
        deadline: when to call :meth:`check` next. Hearing from the peer does not move it: a check
            that comes early says WAIT.
        heard_at: when the peer was last heard.
        unread_bytes: what was sent since.
    """

    __slots__ = ("deadline", "heard_at", "unread_bytes")

    def __init__(self, now: float) -> None:
        self.begin(now)

    def begin(self, now: float) -> None:
        """Begin anew: the first call begins, and everything sent before it was read."""
        self.heard_at = now
        self.unread_bytes = 0
        self.deadline = now + PING_AFTER_S

    def heard(self, now: float) -> None:
        """Note that data of the peer arrived."""
        self.heard_at = now
        self.unread_bytes = 0

    def restart(self, now: float) -> None:
        """Count the silence from now on: a call begins, or we read again."""
        self.heard_at = now

    def sent(self, length_bytes: int) -> None:
        """Note data sent to the peer."""
        self.unread_bytes += length_bytes

    def check(self, now: float, *, reading_paused: bool = False) -> LivenessCheck:
        """Decide what to do, and set the next deadline.

        Args:
            now: monotonic seconds.
            reading_paused: True if we do not read what the peer sends. The silence is ours then:
                a PING is sent, so that the peer hears from us, and the silence starts again.
        """
        if reading_paused:
            self.restart(now)
            self.deadline = now + PING_AFTER_S
            return LivenessCheck.PING
        silent_s = now - self.heard_at
        bound_s = STALL_MAX_S if self.unread_bytes > STALLED_BYTES else SILENCE_MAX_S
        if silent_s >= bound_s:
            return LivenessCheck.DROP
        if silent_s >= PING_AFTER_S:
            self.deadline = now + min(bound_s - silent_s, PING_AFTER_S)
            return LivenessCheck.PING
        self.deadline = self.heard_at + PING_AFTER_S
        return LivenessCheck.WAIT

    def silent_s(self, now: float) -> float:
        """Return the seconds since the peer was last heard."""
        return now - self.heard_at
