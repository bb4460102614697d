"""The server's end of a connection's calls."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.stream_calls.events import (
    NOT_RUN,
    PIPELINE_MAX,
    Aborted,
    CallBegan,
    CallRefused,
    Code,
    GoAway,
    HalfClosed,
    Item,
    Ping,
    Pong,
    misplaced,
)
from gazette_sdk.protocol.stream_frames import (
    METHODS,
    STATUS_OK_FRAME,
    CallHead,
    Frame,
    Kind,
    MethodTraits,
    decode_call,
    decode_head,
    decode_text,
    encode,
    encode_goaway,
    encode_hello,
    encode_status,
    header,
)

__all__ = ["TABLE", "Effect", "Intake", "ServerCalls", "ServerEvent"]

ServerEvent = CallBegan | CallRefused | Item | HalfClosed | Aborted | Ping | Pong | GoAway
"""What a frame of the client means."""


class Intake(enum.IntEnum):
    """What may come from the client, by what became of the newest call."""

    OPENING = 0
    """Our HELLO wasn't made yet."""
    IDLE = 1
    """There was no call yet, or the newest was aborted."""
    SENDING = 2
    """The newest is being sent."""
    SENT = 3
    """The newest is sent, and not answered."""
    EARLY = 4
    """The newest was answered, or refused, before it was sent: the rest of it is dropped."""
    ANSWERED = 5
    """The newest is sent and answered: only an ABORT may have crossed the answer."""


class Effect(enum.IntEnum):
    """What a frame does."""

    BEGIN = 0
    ITEM = 1
    HALF_CLOSE = 2
    ABORT = 3
    DROP = 4
    PING = 5
    PONG = 6
    GOAWAY = 7
    VIOLATION = 8


_I = Intake
_E = Effect
_VIOLATION = (_E.VIOLATION, _I.IDLE)

_CALLS: dict[tuple[Intake, Kind], tuple[Effect, Intake]] = {
    # The state after a CALL depends on its method.
    (_I.IDLE, Kind.CALL): (_E.BEGIN, _I.IDLE),
    (_I.SENT, Kind.CALL): (_E.BEGIN, _I.IDLE),
    (_I.EARLY, Kind.CALL): (_E.BEGIN, _I.IDLE),
    (_I.ANSWERED, Kind.CALL): (_E.BEGIN, _I.IDLE),
    (_I.SENDING, Kind.MESSAGE): (_E.ITEM, _I.SENDING),
    (_I.SENDING, Kind.CONTENT): (_E.ITEM, _I.SENDING),
    (_I.SENDING, Kind.END): (_E.HALF_CLOSE, _I.SENT),
    (_I.SENDING, Kind.ABORT): (_E.ABORT, _I.IDLE),
    (_I.SENT, Kind.ABORT): (_E.ABORT, _I.IDLE),
    (_I.EARLY, Kind.MESSAGE): (_E.DROP, _I.EARLY),
    (_I.EARLY, Kind.CONTENT): (_E.DROP, _I.EARLY),
    (_I.EARLY, Kind.END): (_E.DROP, _I.ANSWERED),
    (_I.EARLY, Kind.ABORT): (_E.DROP, _I.IDLE),
    (_I.ANSWERED, Kind.ABORT): (_E.DROP, _I.IDLE),
}
_ANY_TIME = {Kind.PING: _E.PING, Kind.PONG: _E.PONG, Kind.GOAWAY: _E.GOAWAY}


def _entry(state: Intake, kind: int) -> tuple[Effect, Intake]:
    if state is _I.OPENING or kind == 0:
        return _VIOLATION
    if Kind(kind) in _ANY_TIME:
        return _ANY_TIME[Kind(kind)], state
    return _CALLS.get((state, Kind(kind)), _VIOLATION)


TABLE = tuple(tuple(_entry(state, kind) for kind in range(len(Kind) + 1)) for state in Intake)
"""``TABLE[state][kind]`` is the effect of a frame, and the state after it."""

# What runs for every frame compares plain numbers: members of an enum cost several times as much.
_TABLE = tuple(tuple((int(effect), int(after)) for effect, after in row) for row in TABLE)
_BEGIN, _ITEM, _HALF_CLOSE = int(_E.BEGIN), int(_E.ITEM), int(_E.HALF_CLOSE)
_SENDING, _SENT = int(_I.SENDING), int(_I.SENT)
_MESSAGE = int(Kind.MESSAGE)

_AFTER_STATUS = tuple(map(int, (_I.OPENING, _I.IDLE, _I.EARLY, _I.ANSWERED, _I.EARLY, _I.ANSWERED)))
"""The state after the newest call's STATUS, by that before."""

_NO_HEAD = CallHead()

_SKIPPED = "an earlier call of this connection failed, and this one was to run after its success"


class ServerCalls:
    """State of the calls of one connection, at the server.

    Frames go in with :meth:`receive`, in order; what they mean comes out. What the server
    sends goes through the methods that return bytes: they are to be written in the order of
    those calls. Responses belong to the oldest open call: a server that runs several at once
    holds back the answers of later ones.

    Args:
        methods: the methods that it serves. Others are refused with UNIMPLEMENTED.

    Attributes:
        leaving: GOAWAY was sent or received: no call begins any more.
        failed: the client broke the rules; nothing more is to be done but to say so and close.
    """

    __slots__ = (
        "_before_succeeded",
        "_head",
        "_head_bytes",
        "_methods",
        "_newest",
        "_oldest",
        "_open",
        "_peer_left",
        "_responses",
        "_state",
        "failed",
        "leaving",
    )

    def __init__(self, methods: Mapping[int, MethodTraits] = METHODS) -> None:
        self.leaving = False
        self.failed: StreamProtocolError | None = None
        self._methods = methods
        self._state = int(Intake.OPENING)
        self._newest = 0
        self._oldest = 1
        self._open: deque[tuple[MethodTraits, bool]] = deque()
        self._responses = 0
        self._before_succeeded = True
        self._peer_left = False
        self._head_bytes = b""
        self._head = _NO_HEAD

    # ------------------------------------------------------------- where it stands

    @property
    def open_calls(self) -> range:
        """Numbers of the calls without STATUS, the oldest first."""
        return range(self._oldest, self._newest + 1)

    @property
    def full(self) -> bool:
        """Whether the next CALL must be held back, and with it all frames after it."""
        return self._newest - self._oldest >= PIPELINE_MAX - 1

    @property
    def sending(self) -> int:
        """The call that the client is still sending, or 0."""
        return self._newest if self._state == Intake.SENDING else 0

    @property
    def drained(self) -> bool:
        """Whether no call is open and none will begin."""
        return self.leaving and self._newest < self._oldest

    # -------------------------------------------------------------------- receiving

    def receive(self, frame: Frame) -> ServerEvent | None:
        """Takes the client's next frame.

        Returns:
            What it means; None if nothing is to be done.

        Raises:
            StreamProtocolError: it broke the rules, or one before it did. Tell the client with
                :meth:`goaway`, and close.
        """
        if self.failed is not None:
            raise self.failed
        kind, payload = frame
        effect, after = _TABLE[self._state][kind]
        if effect == _BEGIN:
            return self._begin(payload)
        if effect == _ITEM:
            return Item(self._newest, kind, payload)
        if effect == _HALF_CLOSE:
            self._state = after
            return HalfClosed(self._newest)
        return self._rarer(frame, effect, after)

    def _rarer(self, frame: Frame, effect: int, after: int) -> ServerEvent | None:
        """Takes a frame of the less frequent kinds."""
        event: ServerEvent | None = None
        if effect == Effect.VIOLATION:
            self.failed = StreamProtocolError(misplaced(frame, Intake(self._state)))
            raise self.failed
        if effect == Effect.ABORT:
            event = Aborted(self._newest)
        elif effect == Effect.PING:
            event = Ping(frame.payload)
        elif effect == Effect.PONG:
            event = Pong(frame.payload)
        elif effect == Effect.GOAWAY:
            self.leaving = self._peer_left = True
            event = GoAway(decode_text(frame.payload))
        self._state = after
        return event

    def _begin(self, payload: bytes) -> ServerEvent:
        """Takes a CALL."""
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
            return self._refuse(method, traits)
        call = self._newest = self._newest + 1
        self._open.append((traits, head.after_success))
        sent = not traits.client_streams
        self._state = _SENT if sent else _SENDING
        return CallBegan(call, method, head, request, sent)

    def _refuse(self, method: int, traits: MethodTraits | None) -> CallRefused:
        """Takes a CALL that is not to be run, and drops what belongs to it."""
        call = self._newest = self._newest + 1
        self._state = int(Intake.EARLY)
        if traits is None:
            self._open.append((MethodTraits(), False))
            return CallRefused(call, Code.UNIMPLEMENTED, f"no method {method}", NOT_RUN)
        if not traits.client_streams:
            self._state = int(Intake.ANSWERED)
        self._open.append((traits, False))
        return CallRefused(call, Code.UNAVAILABLE, "the server is going away", NOT_RUN)

    # ---------------------------------------------------------------------- sending

    def hello(self, zone: str = "", suffix: str = "") -> bytes:
        """The connection's first frame, to be written as soon as the preface was seen."""
        if self._state != Intake.OPENING:
            raise StreamProtocolError("HELLO was sent already")
        self._state = int(Intake.IDLE)
        return encode_hello(zone, suffix)

    def skips(self, call: int) -> bool:
        """Whether a call is not to be run since the one before it didn't succeed.

        To be asked when the call is the oldest open one, before it is run. If so, answer
        with :meth:`skip`.
        """
        self._check_turn(call)
        return self._open[0][1] and not self._before_succeeded

    def message(self, call: int, payload: bytes) -> bytes:
        """A response."""
        self._check_turn(call)
        if self._responses and not self._open[0][0].server_streams:
            raise StreamProtocolError("a call of this method has only one response")
        frame = encode(_MESSAGE, payload)
        self._responses += 1
        return frame

    def content(self, call: int, payload: bytes) -> bytes:
        """Content that continues where the last response or content ended."""
        return self.content_header(call, len(payload)) + payload

    def content_header(self, call: int, length: int) -> bytes:
        """What precedes ``length`` bytes of content that are written without being copied."""
        self._check_turn(call)
        if not self._open[0][0].answers_content:
            raise StreamProtocolError("responses of this method carry no content")
        return header(Kind.CONTENT, length)

    def answer(self, call: int, response: bytes, *, success: bool = True) -> bytes:
        """The only response of a call, and its STATUS with the code 0, for one write.

        Args:
            call: the oldest open call.
            response: encoded.
            success: whether calls that were to run after its success may run.
        """
        self._check_turn(call)
        if self._responses:
            raise StreamProtocolError("the call was answered already")
        frame = encode(_MESSAGE, response)
        self._ended(success)
        return frame + STATUS_OK_FRAME

    def status(
        self,
        call: int,
        code: int = 0,
        text: str = "",
        kind: str = "",
        *,
        success: bool | None = None,
    ) -> bytes:
        """Ends a call.

        Args:
            call: the oldest open call.
            code: gRPC status code.
            text: why it failed.
            kind: name of the error's class, if the client should know.
            success: whether calls that were to run after its success may run; by default, if
                the code is 0.
        """
        self._check_turn(call)
        if code == 0 and not self._responses and not self._open[0][0].server_streams:
            raise StreamProtocolError("a call of this method has a response before success")
        frame = encode_status(code, text, kind)
        self._ended(code == 0 if success is None else success)
        return frame

    def skip(self, call: int) -> bytes:
        """Ends a call that :meth:`skips` said is not to be run."""
        return self.status(call, Code.ABORTED, _SKIPPED, NOT_RUN)

    def ping(self, payload: bytes) -> bytes:
        """A PING of up to 64 bytes; the client sends them back."""
        return encode(Kind.PING, payload)

    def pong(self, payload: bytes) -> bytes:
        """The answer to a :class:`Ping`."""
        return encode(Kind.PONG, payload)

    def goaway(self, reason: str) -> bytes:
        """Says that no new calls are taken; those open go on unless the rules were broken."""
        self.leaving = True
        return encode_goaway(reason)

    def _check_turn(self, call: int) -> None:
        if call != self._oldest or call > self._newest:
            raise StreamProtocolError(f"call {call} is not the oldest open one")

    def _ended(self, success: bool) -> None:  # noqa: FBT001 - the hottest of calls
        """The oldest call has its STATUS."""
        if self._oldest == self._newest:
            self._state = _AFTER_STATUS[self._state]
        self._oldest += 1
        self._open.popleft()
        self._responses = 0
        self._before_succeeded = success
