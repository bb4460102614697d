"""Server's state of the calls on one connection."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.stream_calls import (
    NOT_RUN,
    PIPELINE_MAX,
    Aborted,
    CallBegan,
    CallRefused,
    Calls,
    Code,
    GoAway,
    HalfClosed,
    Item,
    Ping,
    Pong,
    out_of_order,
)
from gazette_sdk.protocol.stream_frames import (
    FRAME_HEADER,
    MESSAGE_BYTES_MAX,
    METHODS,
    STATUS_OK_FRAME,
    Frame,
    Kind,
    MethodTraits,
    complaint,
    decode_call,
    decode_head,
    decode_text,
    encode,
    encode_hello,
    encode_status,
    header,
)
from gazette_sdk.protocol.stream_pb2 import CallHead

ServerEvent = CallBegan | CallRefused | Item | HalfClosed | Aborted | Ping | Pong | GoAway
"""Meaning of a frame of the client."""


class ServedReceiveState(enum.IntEnum):
    """State of receiving: the progress of the newest call."""

    OPENING = 0
    """The server has not sent its HELLO."""
    IDLE = 1
    """There was no call yet, or the newest was aborted."""
    SENDING = 2
    """The client sends the newest call."""
    SENT = 3
    """The client has sent the newest call, and it is not answered."""
    EARLY = 4
    """The newest was answered or refused before the client had sent it: the rest is dropped."""
    ANSWERED = 5
    """The newest was sent and answered: only an ABORT may have crossed the answer."""


class ServerEffect(enum.IntEnum):
    """Effect of a frame that the server receives."""

    BEGIN = 0
    ITEM = 1
    HALF_CLOSE = 2
    ABORT = 3
    DROP = 4
    PING = 5
    PONG = 6
    GOAWAY = 7
    VIOLATION = 8


_S = ServedReceiveState
_E = ServerEffect
_VIOLATION = (_E.VIOLATION, _S.IDLE)

_CALLS: dict[tuple[ServedReceiveState, Kind], tuple[ServerEffect, ServedReceiveState]] = {
    # The state after a CALL depends on its method.
    (_S.IDLE, Kind.CALL): (_E.BEGIN, _S.IDLE),
    (_S.SENT, Kind.CALL): (_E.BEGIN, _S.IDLE),
    (_S.EARLY, Kind.CALL): (_E.BEGIN, _S.IDLE),
    (_S.ANSWERED, Kind.CALL): (_E.BEGIN, _S.IDLE),
    (_S.SENDING, Kind.MESSAGE): (_E.ITEM, _S.SENDING),
    (_S.SENDING, Kind.CONTENT): (_E.ITEM, _S.SENDING),
    (_S.SENDING, Kind.END): (_E.HALF_CLOSE, _S.SENT),
    (_S.SENDING, Kind.ABORT): (_E.ABORT, _S.IDLE),
    (_S.SENT, Kind.ABORT): (_E.ABORT, _S.IDLE),
    (_S.EARLY, Kind.MESSAGE): (_E.DROP, _S.EARLY),
    (_S.EARLY, Kind.CONTENT): (_E.DROP, _S.EARLY),
    (_S.EARLY, Kind.END): (_E.DROP, _S.ANSWERED),
    (_S.EARLY, Kind.ABORT): (_E.DROP, _S.IDLE),
    (_S.ANSWERED, Kind.ABORT): (_E.DROP, _S.IDLE),
}
_ANY_TIME = {Kind.PING: _E.PING, Kind.PONG: _E.PONG, Kind.GOAWAY: _E.GOAWAY}


def _entry(state: ServedReceiveState, kind: int) -> tuple[ServerEffect, ServedReceiveState]:
    if state is _S.OPENING or kind == 0:
        return _VIOLATION
    if Kind(kind) in _ANY_TIME:
        return _ANY_TIME[Kind(kind)], state
    return _CALLS.get((state, Kind(kind)), _VIOLATION)


TABLE = tuple(
    tuple(_entry(state, kind) for kind in range(len(Kind) + 1)) for state in ServedReceiveState
)
"""``TABLE[state][kind]`` is the effect of a frame, and the state after it."""

# The code that runs for every frame compares integers: comparing enum members costs several times
# as much.
_TABLE = tuple(tuple((int(effect), int(after)) for effect, after in row) for row in TABLE)
_BEGIN, _ITEM, _HALF_CLOSE = int(_E.BEGIN), int(_E.ITEM), int(_E.HALF_CLOSE)
_SENDING, _SENT = int(_S.SENDING), int(_S.SENT)
_MESSAGE = int(Kind.MESSAGE)
_pack_header = FRAME_HEADER.pack

_AFTER_STATUS = tuple(map(int, (_S.OPENING, _S.IDLE, _S.EARLY, _S.ANSWERED, _S.EARLY, _S.ANSWERED)))
"""The state after the newest call's STATUS, by that before."""

_NO_HEAD = CallHead()

_SKIPPED = "an earlier call of this connection failed, and this one was to run after its success"


class ServerCalls(Calls):
    """State of the calls of one connection, at the server.

    :meth:`receive` takes every frame, in order, and returns its meaning. Methods that return bytes
    return what the caller must write, in the order of those calls. Responses belong to the oldest
    open call: a server that runs several at once delays the answers of later ones.

    Args:
        methods: the methods that the server serves. Others are refused with UNIMPLEMENTED.
    """

    __slots__ = (
        "_before_succeeded",
        "_head",
        "_head_bytes",
        "_methods",
        "_open",
        "_peer_left",
        "_responses",
        "_state",
    )

    def __init__(self, methods: Mapping[int, MethodTraits] = METHODS) -> None:
        super().__init__()
        self._methods = methods
        self._state = int(ServedReceiveState.OPENING)
        self._open: deque[tuple[MethodTraits, bool]] = deque()
        self._responses = 0
        self._before_succeeded = True
        self._peer_left = False
        self._head_bytes = b""
        self._head = _NO_HEAD

    # ----------------------------------------------------------------------- state

    @property
    def full(self) -> bool:
        """Return True if the next CALL, and all frames after it, must wait."""
        return self._newest - self._oldest >= PIPELINE_MAX - 1

    @property
    def sending(self) -> int:
        """The call that the client is still sending, or 0."""
        return self._newest if self._state == ServedReceiveState.SENDING else 0

    # -------------------------------------------------------------------- receiving

    def receive(self, frame: Frame) -> ServerEvent | None:
        """Process the client's next frame.

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
        if effect == _BEGIN:
            return self._receive_call(payload)
        if effect == _ITEM:
            return Item(self._newest, kind, payload)
        if effect == _HALF_CLOSE:
            self._state = after
            return HalfClosed(self._newest)
        return self._receive_rare(frame, effect, after)

    def _receive_rare(self, frame: Frame, effect: int, after: int) -> ServerEvent | None:
        """Process a frame of the less frequent kinds."""
        event: ServerEvent | None = None
        if effect == ServerEffect.VIOLATION:
            self.failed = StreamProtocolError(out_of_order(frame, ServedReceiveState(self._state)))
            raise self.failed
        if effect == ServerEffect.ABORT:
            event = Aborted(self._newest)
        elif effect == ServerEffect.PING:
            event = Ping(frame.payload)
        elif effect == ServerEffect.PONG:
            event = Pong(frame.payload)
        elif effect == ServerEffect.GOAWAY:
            self.leaving = self._peer_left = True
            event = GoAway(decode_text(frame.payload))
        self._state = after
        return event

    def _receive_call(self, payload: bytes) -> ServerEvent:
        """Process a CALL."""
        if self._newest - self._oldest >= PIPELINE_MAX - 1:
            self.failed = StreamProtocolError(f"more than {PIPELINE_MAX} calls are open")
            raise self.failed
        if self._peer_left:
            self.failed = StreamProtocolError("CALL frame after GOAWAY")
            raise self.failed
        try:
            method, head_bytes, request = decode_call(payload)
            if not head_bytes:
                head = _NO_HEAD
            elif head_bytes == self._head_bytes:
                head = self._head
            else:
                head = self._head = decode_head(head_bytes)
                self._head_bytes = head_bytes
        except StreamProtocolError as error:
            self.failed = error
            raise
        traits = self._methods.get(method)
        if traits is None or self.leaving:
            return self._refuse_call(method, traits)
        call = self._newest = self._newest + 1
        self._open.append((traits, head.after_success))
        sent = not traits.client_streams
        self._state = _SENT if sent else _SENDING
        return CallBegan(call, method, head, request, sent)

    def _refuse_call(self, method: int, traits: MethodTraits | None) -> CallRefused:
        """Add a call that is not to be run, and drop its further frames."""
        call = self._newest = self._newest + 1
        self._state = int(ServedReceiveState.EARLY)
        if traits is None:
            self._open.append((MethodTraits(), False))
            return CallRefused(call, Code.UNIMPLEMENTED, f"no method {method}", NOT_RUN)
        if not traits.client_streams:
            self._state = int(ServedReceiveState.ANSWERED)
        self._open.append((traits, False))
        return CallRefused(call, Code.UNAVAILABLE, "the server is going away", NOT_RUN)

    # ---------------------------------------------------------------------- sending

    def hello(self, zone: str = "", suffix: str = "") -> bytes:
        """Return the connection's first frame. Write it as soon as the preface was received."""
        if self._state != ServedReceiveState.OPENING:
            raise StreamProtocolError("HELLO was sent already")
        self._state = int(ServedReceiveState.IDLE)
        return encode_hello(zone, suffix)

    def skips(self, call: int) -> bool:
        """Return True if a call must not run because the one before it didn't succeed.

        Call this before the oldest open call runs. If True, answer it with :meth:`skip`.
        """
        self._check_oldest(call)
        return self._open[0][1] and not self._before_succeeded

    def message(self, call: int, payload: bytes) -> bytes:
        """Return a response."""
        self._check_oldest(call)
        if self._responses and not self._open[0][0].server_streams:
            raise StreamProtocolError("a call of this method has only one response")
        frame = encode(_MESSAGE, payload)
        self._responses += 1
        return frame

    def content(self, call: int, payload: bytes) -> bytes:
        """Return content that continues where the last response or content ended."""
        return self.content_header(call, len(payload)) + payload

    def content_header(self, call: int, length: int) -> bytes:
        """Return the header of ``length`` bytes of content that the caller writes uncopied."""
        self._check_oldest(call)
        if not self._open[0][0].answers_content:
            raise StreamProtocolError("responses of this method carry no content")
        return header(Kind.CONTENT, length)

    def answer(self, call: int, response: bytes, *, success: bool = True) -> bytes:
        """Return the only response of a call, and its STATUS with the code 0, for one write.

        Args:
            call: the oldest open call.
            response: encoded.
            success: True if calls that depend on its success may run.
        """
        self._check_oldest(call)
        if self._responses:
            raise StreamProtocolError("the call was answered already")
        length = len(response)
        if length > MESSAGE_BYTES_MAX:
            raise StreamProtocolError(complaint(_MESSAGE, length))
        self._end_oldest(success)
        return b"%b%b%b" % (_pack_header(_MESSAGE, length), response, STATUS_OK_FRAME)

    def status(
        self,
        call: int,
        code: int = 0,
        text: str = "",
        kind: str = "",
        *,
        success: bool | None = None,
    ) -> bytes:
        """End a call.

        Args:
            call: the oldest open call.
            code: gRPC status code.
            text: reason of the failure.
            kind: name of the error's class, if the client needs it.
            success: True if calls that depend on its success may run; by default, if the code
                is 0.
        """
        self._check_oldest(call)
        if code == 0 and not self._responses and not self._open[0][0].server_streams:
            raise StreamProtocolError("a call of this method has a response before success")
        frame = encode_status(code, text, kind)
        self._end_oldest(code == 0 if success is None else success)
        return frame

    def skip(self, call: int) -> bytes:
        """End a call for which :meth:`skips` returned True."""
        return self.status(call, Code.ABORTED, _SKIPPED, NOT_RUN)

    def _check_oldest(self, call: int) -> None:
        if call != self._oldest or call > self._newest:
            raise StreamProtocolError(f"call {call} is not the oldest open one")

    def _end_oldest(self, success: bool) -> None:  # noqa: FBT001 - the hottest of calls
        if self._oldest == self._newest:
            self._state = _AFTER_STATUS[self._state]
        self._oldest += 1
        self._open.popleft()
        self._responses = 0
        self._before_succeeded = success
