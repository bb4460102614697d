"""Calls of both ends: every frame in every state, and both ends against each other.

``STREAM_CASES=100000`` runs the law for so many cases.
"""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.stream_calls import (
    NOT_RUN,
    PIPELINE_MAX,
    Aborted,
    CallBegan,
    CallRefused,
    ClientCalls,
    GoAway,
    HalfClosed,
    HelloReceived,
    Item,
    Ping,
    Pong,
    ServerCalls,
    Status,
    client,
    server,
)
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    END_FRAME,
    HEADER_BYTES,
    METHODS,
    STATUS_OK_FRAME,
    CallHead,
    Frame,
    FrameBuffer,
    FrameDecoder,
    Hello,
    Kind,
    Method,
    decode_status,
    encode,
    encode_call,
    encode_goaway,
    encode_hello,
    encode_status,
)

CASES = int(os.environ.get("STREAM_CASES", "300"))
LAW = settings(max_examples=CASES, deadline=None)
LONG = pytest.mark.timeout(max(120, CASES // 5))

AFTER_SUCCESS = CallHead(after_success=True).SerializeToString()


def frame_of(data: bytes) -> Frame:
    (frame,) = FrameDecoder().feed(data)
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


# -------------------------------------------------------------------- server

SERVER_TABLE = """
          HELLO CALL  MESSAGE CONTENT END    ABORT    STATUS PING PONG GOAWAY
opening   !     !     !       !       !      !        !      !    !    !
idle      !     began !       !       !      !        !      ping pong goaway
given_up  !     began !       !       !      !        !      ping pong goaway
sending   !     !     item    item    closed aborted  !      ping pong goaway
sent      !     began !       !       !      aborted  !      ping pong goaway
ended     !     began !       !       !      aborted  !      ping pong goaway
early     !     began drop    drop    drop   drop     !      ping pong goaway
unknown   !     began drop    drop    drop   drop     !      ping pong goaway
answered  !     began !       !       !      drop     !      ping pong goaway
early_end !     began !       !       !      drop     !      ping pong goaway
crossed   !     began !       !       !      !        !      ping pong goaway
"""


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


@pytest.mark.parametrize(("state", "kind", "expected"), cells(SERVER_TABLE))
def test_the_server_decides_every_frame_in_every_state(state, kind, expected):
    calls = server_in(state)
    frame = FRAMES[kind]
    number = calls.open_calls.stop
    if expected == "!":
        for _ in range(2):
            with pytest.raises(StreamProtocolError, match=f"{kind} frame out of order"):
                calls.receive(frame)
        assert calls.failed is not None
        return
    events = {
        "began": CallBegan(number, 1, CallHead(), b"", sent=True),
        "item": Item(1, frame.kind, frame.payload),
        "closed": HalfClosed(1),
        "aborted": Aborted(1),
        "drop": None,
        "ping": Ping(b"p"),
        "pong": Pong(b"p"),
        "goaway": GoAway("bye"),
    }
    event = calls.receive(frame)
    assert event == events[expected]
    assert type(event) is type(events[expected])
    assert calls.failed is None


def test_the_tables_of_both_ends_are_whole():
    for table, states, effects in (
        (server.TABLE, server.Intake, server.Effect),
        (client.TABLE, client.Expected, client.Effect),
    ):
        assert len(table) == len(states)
        for row in table:
            assert len(row) == len(Kind) + 1
            assert all(effect in effects and after in states for effect, after in row)
            assert row[0][0] is effects.VIOLATION
    assert set(client.SENDING) == {(o, a) for o in client.Outgo for a in client.Action}


def test_the_server_goes_on_after_frames_that_crossed_an_early_answer():
    calls = server_in("early")
    for name in ("MESSAGE", "CONTENT", "PING", "END", "ABORT"):
        calls.receive(FRAMES[name])
    assert calls.receive(call_frame(Method.APPEND)) == CallBegan(2, 4, CallHead(), b"", sent=False)
    assert calls.sending == 2
    assert calls.receive(FRAMES["CONTENT"]) == Item(2, Kind.CONTENT, b"c")


def test_an_older_call_that_is_answered_leaves_the_newest_alone():
    calls = server_in("sent")
    calls.receive(call_frame(Method.APPEND))
    calls.answer(1, b"r") if not METHODS[1].server_streams else calls.status(1)
    assert calls.receive(FRAMES["CONTENT"]) == Item(2, Kind.CONTENT, b"c")
    assert calls.open_calls == range(2, 3)


def test_the_server_holds_sixty_four_calls_and_no_more():
    calls = ServerCalls()
    calls.hello()
    for _ in range(PIPELINE_MAX):
        assert not calls.full
        calls.receive(FRAMES["CALL"])
    assert calls.full
    assert calls.receive(FRAMES["PING"]) == Ping(b"p")
    calls.status(1)
    assert not calls.full
    calls.receive(FRAMES["CALL"])
    with pytest.raises(StreamProtocolError, match="more than 64 calls are open"):
        calls.receive(FRAMES["CALL"])


@pytest.mark.parametrize("state", ["idle", "given_up", "sent", "early", "answered"])
def test_a_client_that_left_begins_no_call(state):
    calls = server_in(state)
    calls.receive(FRAMES["GOAWAY"])
    assert calls.leaving
    with pytest.raises(StreamProtocolError, match="CALL frame after GOAWAY"):
        calls.receive(FRAMES["CALL"])


@pytest.mark.parametrize("method", [Method.LIST, Method.APPEND, 99])
def test_a_call_that_crosses_the_servers_goaway_is_refused_in_its_turn(method):
    calls = server_in("sent")
    assert calls.goaway("draining") == encode_goaway("draining")
    refused = calls.receive(call_frame(method))
    assert isinstance(refused, CallRefused)
    assert (refused.call, refused.kind) == (2, NOT_RUN)
    assert refused.code == (12 if method == 99 else 14)
    if method != Method.LIST:
        assert calls.receive(FRAMES["CONTENT"]) is None
        assert calls.receive(FRAMES["END"]) is None
    with pytest.raises(StreamProtocolError, match="call 2 is not the oldest"):
        calls.status(*refused)
    assert not calls.drained
    calls.status(1)
    line = decode_status(calls.status(*refused)[HEADER_BYTES:])
    assert line == (refused.code, refused.text, NOT_RUN)
    assert calls.drained
    assert calls.receive(FRAMES["ABORT"]) is None


def test_a_method_that_is_not_served_is_refused():
    calls = ServerCalls({1: METHODS[1]})
    calls.hello()
    expected = CallRefused(1, 12, "no method 4", NOT_RUN)
    assert calls.receive(call_frame(Method.APPEND)) == expected
    assert calls.receive(FRAMES["CONTENT"]) is None


@pytest.mark.parametrize("payload", [b"", b"\1\0\5a", b"\1\0\2\xff\xff"])
def test_a_malformed_call_ends_the_connection(payload):
    calls = server_in("idle")
    for _ in range(2):
        with pytest.raises(StreamProtocolError, match=r"CALL frame|head"):
            calls.receive(Frame(Kind.CALL, payload))
    assert calls.failed is not None


def test_calls_with_the_same_head_share_it():
    calls = server_in("idle")
    one, two = CallHead(timeout_ms=1).SerializeToString(), CallHead(timeout_ms=2)
    events = [calls.receive(call_frame(1, head=head)) for head in (one, one, b"", one)]
    events.append(calls.receive(call_frame(1, head=two.SerializeToString())))
    heads = [event.head for event in events if isinstance(event, CallBegan)]
    assert [head.timeout_ms for head in heads] == [1, 1, 0, 1, 2]
    assert heads[0] is heads[1] is heads[3]


def test_hello_is_sent_once():
    calls = ServerCalls()
    assert calls.hello("z", "s") == encode_hello("z", "s")
    with pytest.raises(StreamProtocolError, match="HELLO was sent already"):
        calls.hello()


RESPONDING = [
    # method, what the server sends, which of it is refused
    (Method.LIST, ["message", "message", "status"], None),
    (Method.LIST, ["status"], None),
    (Method.LIST, ["content"], "carry no content"),
    (Method.READ, ["message", "content", "content", "message", "status"], None),
    (Method.APPLY, ["message", "status"], None),
    (Method.APPLY, ["answer"], None),
    (Method.APPLY, ["failure"], None),
    (Method.APPLY, ["message", "failure"], None),
    (Method.APPLY, ["status"], "has a response before success"),
    (Method.APPLY, ["message", "message"], "only one response"),
    (Method.APPLY, ["message", "answer"], "answered already"),
    (Method.APPEND, ["content"], "carry no content"),
    (Method.REPLICATE, ["message", "message", "failure"], None),
]


@pytest.mark.parametrize(("method", "steps", "refusal"), RESPONDING)
def test_the_server_sends_only_what_its_client_takes(method, steps, refusal):
    ours, theirs = server_in("idle"), client_in("idle")
    ours.receive(call_frame(method))
    theirs.begin(method, b"")
    sends = {
        "message": lambda: ours.message(1, b"m"),
        "content": lambda: ours.content(1, b"c"),
        "answer": lambda: ours.answer(1, b"m"),
        "status": lambda: ours.status(1),
        "failure": lambda: ours.status(1, 2, "why"),
    }
    for step in steps[:-1] if refusal else steps:
        for frame in FrameDecoder().feed(sends[step]()):
            assert theirs.receive(frame) is not None
    if refusal:
        with pytest.raises(StreamProtocolError, match=refusal):
            sends[steps[-1]]()
        ours.status(1, 2, "why")
    else:
        assert len(theirs.open_calls) == 0
    assert len(ours.open_calls) == 0


def test_responses_are_those_of_the_oldest_open_call():
    calls = server_in("sent")
    calls.receive(call_frame(Method.READ))
    for send in (calls.message, calls.content, calls.answer):
        with pytest.raises(StreamProtocolError, match="call 2 is not the oldest"):
            send(2, b"")
    for number in (0, 3):
        with pytest.raises(StreamProtocolError, match="is not the oldest"):
            calls.skips(number)
    calls.status(1)
    with pytest.raises(StreamProtocolError, match="call 1 is not the oldest"):
        calls.status(1)
    assert calls.content_header(2, 70_000) == b"\4\0\1\x11\x70"
    assert calls.content(2, b"ab") == encode(Kind.CONTENT, b"ab")
    with pytest.raises(StreamProtocolError, match="exceeds"):
        calls.content_header(2, 1 << 21)


def test_an_answer_is_a_message_and_a_status_for_one_write():
    calls = server_in("ended")
    assert calls.answer(1, b"resp") == encode(Kind.MESSAGE, b"resp") + STATUS_OK_FRAME


@pytest.mark.parametrize("how", ["status", "answer", "skip", "refused", "aborted"])
def test_calls_after_a_failure_are_skipped_until_one_that_does_not_ask(how):
    calls = server_in("idle")
    calls.receive(call_frame(99 if how == "refused" else Method.APPLY, head=AFTER_SUCCESS))
    for head in (AFTER_SUCCESS, AFTER_SUCCESS, b"", AFTER_SUCCESS):
        calls.receive(call_frame(Method.APPLY, head=head))
    assert not calls.skips(1)
    if how == "answer":
        calls.answer(1, b"status is not OK", success=False)
    elif how == "skip":
        calls.skip(1)
    else:
        calls.status(1, 1, how)
    for number in (2, 3):
        assert calls.skips(number)
        line = decode_status(calls.skip(number)[HEADER_BYTES:])
        assert (line.code, line.kind) == (10, NOT_RUN)
        assert "an earlier call of this connection failed" in line.text
    assert not calls.skips(4)
    calls.answer(4, b"")
    assert not calls.skips(5)


def test_keepalive_frames_are_made():
    for calls in (server_in("idle"), client_in("idle")):
        assert calls.ping(b"1") == encode(Kind.PING, b"1")
        assert calls.pong(b"1") == encode(Kind.PONG, b"1")
        with pytest.raises(StreamProtocolError, match="exceeds 64"):
            calls.ping(bytes(65))


# -------------------------------------------------------------------- client

CLIENT_TABLE = """
          HELLO CALL  MESSAGE CONTENT END    ABORT    STATUS PING PONG GOAWAY
opening   hello !     !       !       !      !        !      !    !    goaway
idle      !     !     !       !       !      !        !      ping pong goaway
one       !     !     item    !       !      !        status ping pong goaway
sending   !     !     item    !       !      !        status ping pong goaway
good      !     !     !       !       !      !        status ping pong goaway
many      !     !     item    !       !      !        status ping pong goaway
reading   !     !     item    item    !      !        status ping pong goaway
given_up  !     !     drop    drop    !      !        status ping pong goaway
over      !     !     !       !       !      !        !      ping pong goaway
"""


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


@pytest.mark.parametrize(("state", "kind", "expected"), cells(CLIENT_TABLE))
def test_the_client_decides_every_frame_in_every_state(state, kind, expected):
    calls = client_in(state)
    frame = FRAMES[kind]
    if expected == "!":
        for _ in range(2):
            with pytest.raises(StreamProtocolError, match=f"{kind} frame out of order"):
                calls.receive(frame)
        assert not calls.may_begin
        return
    events = {
        "hello": HelloReceived(Hello(zone="z", suffix="s", wire_version=1)),
        "item": Item(1, frame.kind, frame.payload),
        "status": Status(1, 5, "no", ""),
        "drop": None,
        "ping": Ping(b"p"),
        "pong": Pong(b"p"),
        "goaway": GoAway("bye"),
    }
    event = calls.receive(frame)
    if isinstance(event, HelloReceived):
        assert (event.hello.zone, event.hello.suffix) == ("z", "s")
    else:
        assert event == events[expected]
    assert type(event) is type(events[expected])
    assert calls.failed is None


@pytest.mark.parametrize("state", ["one", "sending"])
def test_success_without_the_response_is_refused(state):
    calls = client_in(state)
    for _ in range(2):
        with pytest.raises(StreamProtocolError, match="success without a response"):
            calls.receive(Frame(Kind.STATUS, b"\0"))


@pytest.mark.parametrize("state", ["good", "many", "reading", "given_up"])
def test_success_is_told(state):
    calls = client_in(state)
    status = calls.receive(Frame(Kind.STATUS, b"\0"))
    assert status == Status(1, 0, "", "")
    assert isinstance(status, Status)
    assert not status.not_run
    assert Status(1, 14, "", NOT_RUN).not_run


@pytest.mark.parametrize(
    ("state", "frame"),
    [
        ("good", Frame(7, b"")),
        ("good", Frame(7, b"\x20")),
        ("one", Frame(7, b"")),
        ("opening", Frame(1, b"\xff")),
        ("opening", Frame(1, b"")),
    ],
)
def test_malformed_payloads_end_the_connection(state, frame):
    calls = client_in(state)
    for _ in range(2):
        with pytest.raises(StreamProtocolError):
            calls.receive(frame)
    assert calls.failed is not None


CLIENT_SENDING = """
          message content end   abort
sending   frame   frame   frame frame
sent      !       !       !     frame
ended     !       !       !     frame
older     !       !       !     none
given_up  none    none    none  none
older_gu  none    none    none  none
over      none    none    none  none
answered  none    none    none  none
"""


@pytest.mark.parametrize(("state", "action", "expected"), cells(CLIENT_SENDING))
def test_the_client_decides_every_action_in_every_state(state, action, expected):
    calls = client_in("idle")
    calls.begin(Method.LIST if state in ("sent", "older", "older_gu") else Method.APPEND, b"")
    if state == "ended":
        calls.end(1)
    elif state == "older_gu":
        calls.begin(Method.LIST, b"")
        assert calls.abort(1) == b""
    elif state == "older":
        calls.begin(Method.LIST, b"")
    elif state == "given_up":
        calls.abort(1)
    elif state in ("over", "answered"):
        calls.receive(FRAMES["STATUS"])
        if state == "over":
            calls.begin(Method.APPEND, b"")
    actions = {
        "message": (lambda: calls.message(1, b"m"), encode(Kind.MESSAGE, b"m")),
        "content": (lambda: calls.content(1, b"c"), encode(Kind.CONTENT, b"c")),
        "end": (lambda: calls.end(1), END_FRAME),
        "abort": (lambda: calls.abort(1), ABORT_FRAME),
    }
    act, frame = actions[action]
    if expected == "!":
        with pytest.raises(StreamProtocolError, match="call 1 is whole"):
            act()
    else:
        assert act() == (frame if expected == "frame" else b"")


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("opening", "has not said HELLO"),
        ("sending", "call 1 is still being sent"),
        ("idle", None),
        ("one", None),
        ("good", None),
        ("given_up", None),
        ("over", None),
    ],
)
def test_a_call_begins_only_when_the_one_before_is_sent(state, why):
    calls = client_in(state)
    assert calls.may_begin == (why is None)
    for begin in (lambda: calls.begin(Method.LIST, b"r"), lambda: calls.append(b"r", b"c")):
        if why is None:
            number, data = begin()
            assert FrameDecoder().feed(data)[0].kind == Kind.CALL
            assert calls.open_calls[-1] == number
        else:
            with pytest.raises(StreamProtocolError, match=why):
                begin()


@pytest.mark.parametrize("leave", ["goaway", "receive", "fail"])
def test_no_call_begins_after_goaway_or_a_failure(leave):
    calls = client_in("many")
    if leave == "goaway":
        assert calls.goaway("done") == encode_goaway("done")
    elif leave == "receive":
        calls.receive(FRAMES["GOAWAY"])
    else:
        with pytest.raises(StreamProtocolError):
            calls.receive(FRAMES["CALL"])
    with pytest.raises(StreamProtocolError, match=r"no new calls|failed: CALL frame"):
        calls.begin(Method.LIST, b"")
    assert not calls.may_begin
    if leave != "fail":
        assert not calls.drained
        calls.receive(FRAMES["STATUS"])
        assert calls.drained


def test_the_client_opens_sixty_four_calls_and_no_more():
    calls = client_in("idle")
    for number in range(1, PIPELINE_MAX + 1):
        assert calls.begin(Method.LIST, b"")[0] == number
    with pytest.raises(StreamProtocolError, match="64 calls are open"):
        calls.append(b"", b"")
    calls.receive(FRAMES["STATUS"])
    assert calls.append(b"", b"")[0] == 65
    assert calls.open_calls == range(2, 66)


def test_the_client_keeps_the_bounds_that_the_server_told():
    calls = ClientCalls()
    calls.receive(frame_of(encode_hello(content_bytes_max=10, message_bytes_max=20)))
    calls.begin(Method.LIST, bytes(10), bytes(7))
    for begin in (
        lambda: calls.begin(Method.LIST, bytes(11), bytes(7)),
        lambda: calls.append(bytes(11), b"", bytes(7)),
    ):
        with pytest.raises(StreamProtocolError, match="calls of 20 bytes"):
            begin()
    with pytest.raises(StreamProtocolError, match="content of 10 bytes"):
        calls.append(b"", bytes(11))
    number, _ = calls.begin(Method.APPEND, b"")
    assert calls.content(number, bytes(10))
    assert calls.message(number, bytes(20))
    with pytest.raises(StreamProtocolError, match="content of 10 bytes"):
        calls.content_header(number, 11)
    with pytest.raises(StreamProtocolError, match="messages of 20 bytes"):
        calls.message(number, bytes(21))


def test_a_call_that_never_began_is_an_error():
    calls = client_in("sending")
    for number in (0, 2):
        with pytest.raises(StreamProtocolError, match="never began"):
            calls.end(number)
    assert calls.sending == 1
    calls.end(1)
    assert calls.sending == 0


def test_a_call_given_up_behind_others_is_dropped_when_its_responses_come():
    calls = client_in("many")
    calls.begin(Method.LIST, b"")
    calls.begin(Method.LIST, b"")
    assert calls.abort(2) == b""
    assert calls.receive(FRAMES["MESSAGE"]) == Item(1, Kind.MESSAGE, b"m")
    calls.receive(FRAMES["STATUS"])
    assert calls.receive(FRAMES["MESSAGE"]) is None
    assert calls.receive(FRAMES["STATUS"]) == Status(2, 5, "no", "")
    assert calls.receive(FRAMES["MESSAGE"]) == Item(3, Kind.MESSAGE, b"m")


# ----------------------------------------------------------- end against end


@dataclass
class Plan:
    """What both ends do with a call."""

    method: int
    after_success: bool
    items: list[int]
    """Lengths of what the client sends after the CALL: content, or a message if odd."""
    closing: str
    """end, abort, or end and then abort."""
    responses: list[int]
    answers_after: int
    """The server answers when it has seen so many items, or the call is sent."""
    code: int
    success: bool


@dataclass
class Record:
    """What an end saw of a call."""

    sent: list[tuple[int, bytes]] = field(default_factory=list)
    got: list[tuple[int, bytes]] = field(default_factory=list)
    request: bytes = b""
    closed: bool = False
    aborted: bool = False
    given_up: bool = False
    ran: bool = False
    status: tuple[int, str, str] | None = None
    success: bool = False


plans = st.builds(
    Plan,
    method=st.sampled_from([1, 2, 3, 4, 4, 4, 5, 5, 16, 20]),
    after_success=st.booleans(),
    items=st.lists(st.integers(0, 30), max_size=4),
    closing=st.sampled_from(["end", "end", "end", "abort", "both"]),
    responses=st.lists(st.integers(0, 30), max_size=3),
    answers_after=st.sampled_from([0, 1, 2, 9, 9, 9]),
    code=st.sampled_from([0, 0, 0, 5]),
    success=st.sampled_from([True, True, False]),
)


class Run:
    """A client and a server joined by two pipes, in an order of steps that a seed decides."""

    def __init__(self, plans: list[Plan], seed: int) -> None:
        self.source = random.Random(seed)
        self.plans = plans
        unserved = self.source.choice([{20}, {20}, {20}, {4}, {5}])
        served = {number: how for number, how in METHODS.items() if number not in unserved}
        self.client, self.server = ClientCalls(), ServerCalls(served)
        self.up, self.down = bytearray(), bytearray(self.server.hello("z", "s"))
        self.up_decoder, self.down_decoder = FrameDecoder(), FrameBuffer()
        self.held: list[Frame] = []
        self.begun: list[tuple[Plan, Record]] = []
        self.taken: dict[int, Record] = {}
        self.refused: dict[int, CallRefused] = {}
        self.step = 0
        self.pings = [0, 0]
        self.greeted = False
        self.deepest = 0
        self.leaves = self.source.random() < 0.2
        self.speed = self.source.choice([1, 1, 5, 40])

    def run(self) -> None:
        steps = [self.client_sends, self.server_sends, self.up_arrives, self.down_arrives]
        for _ in range(500_000):
            weights = [self.speed, 1, self.speed, self.source.choice((1, 3))]
            self.source.choices(steps, weights)[0]()
            if self.source.random() < 0.02:
                self.extras()
            if self.over():
                return
        raise AssertionError("the run does not end")

    def over(self) -> bool:
        done = self.client.leaving or len(self.begun) == len(self.plans)
        sent = self.client.sending == 0
        quiet = not (self.up or self.down or self.held)
        return (
            self.greeted
            and done
            and sent
            and quiet
            and not self.client.open_calls
            and not self.server.open_calls
        )

    def extras(self) -> None:
        end = self.source.choice(("client", "server"))
        if end == "client":
            self.up += self.client.ping(b"up")
            self.pings[0] += 1
        else:
            self.down += self.server.ping(b"down")
            self.pings[1] += 1
        older = self.client.open_calls[:-1]
        if older and self.source.random() < 0.3:
            number = self.source.choice(older)
            assert self.client.abort(number) == b""
            self.begun[number - 1][1].given_up = True
        if self.leaves and self.begun and self.source.random() < 0.2:
            if end == "server":
                self.down += self.server.goaway("draining")
            elif not self.client.sending:
                self.up += self.client.goaway("done")

    def client_sends(self) -> None:
        if self.client.sending or (self.begun and self.step >= 0):
            self.client_continues()
        elif self.client.may_begin and len(self.begun) < len(self.plans):
            plan = self.plans[len(self.begun)]
            request = b"request %d" % len(self.begun)
            head = AFTER_SUCCESS if plan.after_success else b""
            whole = plan.method == Method.APPEND and plan.closing == "end" and len(plan.items) == 1
            if whole:
                content = bytes(plan.items[0])
                number, data = self.client.append(request, content, head)
                record = Record(request=request, sent=[(4, content)], closed=True)
                self.step = -1
            else:
                number, data = self.client.begin(plan.method, request, head)
                record = Record(request=request)
                self.step = 0
            assert number == len(self.begun) + 1
            self.deepest = max(self.deepest, len(self.client.open_calls))
            self.begun.append((plan, record))
            self.up += data

    def client_continues(self) -> None:
        """The next step of the newest call, whether or not its STATUS has come meanwhile."""
        plan, record = self.begun[-1]
        number = len(self.begun)
        streams = METHODS[plan.method].client_streams
        steps = [*plan.items, "end", "abort"] if streams else ["abort"]
        if plan.closing == "end":
            steps.remove("abort")
        elif plan.closing == "abort" and streams:
            steps.remove("end")
        if self.step >= len(steps):
            self.step = -1
            return
        step = steps[self.step]
        self.step += 1
        if step == "end":
            data = self.client.end(number)
            record.closed = record.closed or data != b""
        elif step == "abort":
            data = self.client.abort(number)
            record.aborted = record.given_up = record.given_up or data != b""
        elif isinstance(step, int) and step % 2:
            data = self.client.message(number, bytes(step))
            record.sent += [(3, bytes(step))] if data else []
        else:
            assert isinstance(step, int)
            data = self.client.content(number, bytes(step))
            record.sent += [(4, bytes(step))] if data else []
        self.up += data

    def server_sends(self) -> None:
        if not self.server.open_calls:
            return
        number = self.server.open_calls[0]
        record = self.taken[number]
        plan = self.begun[number - 1][0]
        if number in self.refused:
            refused = self.refused[number]
            self.down += self.server.status(*refused)
            record.status = refused[1:]
            return
        if self.server.skips(number):
            assert plan.after_success
            data = self.server.skip(number)
            line = decode_status(data[HEADER_BYTES:])
            record.status = (line.code, line.text, line.kind)
            self.down += data
            return
        record.ran = True
        traits = METHODS[plan.method]
        whole = record.closed or record.aborted
        if len(record.sent) < len(plan.responses) and (traits.server_streams or not record.sent):
            if traits.server_streams or whole or len(record.got) >= plan.answers_after:
                self.respond(number, plan, record)
            return
        if not (whole or len(record.got) >= plan.answers_after):
            return
        record.success = plan.code == 0 and plan.success
        if plan.code:
            record.status = (plan.code, "failed", "Kind")
            self.down += self.server.status(number, plan.code, "failed", "Kind")
        elif traits.server_streams or record.sent:
            record.status = (0, "", "")
            self.down += self.server.status(number, success=record.success)
        else:
            record.status = (0, "", "")
            record.sent.append((3, b"the answer"))
            self.down += self.server.answer(number, b"the answer", success=record.success)

    def respond(self, number: int, plan: Plan, record: Record) -> None:
        length = plan.responses[len(record.sent)]
        if METHODS[plan.method].answers_content and length % 2:
            record.sent.append((4, bytes(length)))
            self.down += self.server.content(number, bytes(length))
        else:
            record.sent.append((3, bytes(length)))
            self.down += self.server.message(number, bytes(length))

    def up_arrives(self) -> None:
        length = self.source.choice((1, 5, 40, 5000))
        frames = self.held + self.up_decoder.feed(bytes(self.up[:length]))
        del self.up[:length]
        assert self.up_decoder.error is None
        while frames:
            assert not (frames[0].kind == Kind.CALL and self.server.full), "the client keeps to 64"
            self.server_takes(self.server.receive(frames.pop(0)))

    def server_takes(self, event: object) -> None:
        match event:
            case CallBegan(call, method, _head, request, sent):
                assert method == self.begun[call - 1][0].method
                self.taken[call] = Record(request=request, closed=sent)
            case CallRefused(call):
                self.taken[call] = Record()
                self.refused[call] = event
            case Item(call, kind, payload):
                self.taken[call].got.append((kind, payload))
            case HalfClosed(call):
                self.taken[call].closed = True
            case Aborted(call):
                self.taken[call].aborted = True
            case Ping(payload):
                self.down += self.server.pong(payload)
            case Pong(payload):
                assert payload == b"down"
                self.pings[1] -= 1

    def down_arrives(self) -> None:
        room = self.down_decoder.get_buffer()
        length = min(len(room), len(self.down), self.source.choice((1, 5, 40, 5000)))
        room[:length] = self.down[:length]
        del self.down[:length]
        for frame in self.down_decoder.updated(length):
            self.client_takes(self.client.receive(frame))
        assert self.down_decoder.error is None

    def client_takes(self, event: object) -> None:
        match event:
            case Item(call, kind, payload):
                assert not self.begun[call - 1][1].given_up
                self.begun[call - 1][1].got.append((kind, payload))
            case Status(call, code, text, kind):
                record = self.begun[call - 1][1]
                assert record.status is None
                record.status = (code, text, kind)
            case Ping(payload):
                self.up += self.client.pong(payload)
            case Pong(payload):
                assert payload == b"up"
                self.pings[0] -= 1
            case HelloReceived():
                self.greeted = True

    def agree(self) -> None:
        """Both ends saw the same calls."""
        assert self.pings == [0, 0]
        assert len(self.taken) == len(self.begun)
        before = True
        for number, (plan, ours) in enumerate(self.begun, start=1):
            theirs = self.taken[number]
            assert ours.status is not None
            assert ours.status == theirs.status
            if number in self.refused:
                assert not theirs.ran
                assert ours.status[2] == NOT_RUN
            else:
                assert theirs.request == ours.request
                assert theirs.ran == (before or not plan.after_success)
                assert theirs.got == ours.sent[: len(theirs.got)]
                if theirs.closed and METHODS[plan.method].client_streams:
                    assert theirs.got == ours.sent
                    assert ours.closed
                assert ours.aborted or not theirs.aborted
            assert ours.got == theirs.sent[: len(ours.got)]
            if not ours.given_up:
                assert ours.got == theirs.sent
            before = theirs.success
        if self.client.leaving and self.server.leaving:
            assert self.client.drained
            assert self.server.drained


@LONG
@LAW
@given(st.lists(plans, max_size=12), st.integers(1, 12), st.integers(0, 2**64))
def test_both_ends_agree_on_every_call_whatever_crosses(some, times, seed):
    run = Run(some * times, seed)
    run.run()
    run.agree()


@pytest.mark.parametrize("seed", range(5))
def test_both_ends_agree_when_as_many_calls_are_open_as_may_be(seed):
    plan = Plan(
        method=Method.APPEND,
        after_success=False,
        items=[8],
        closing="end",
        responses=[],
        answers_after=9,
        code=0,
        success=True,
    )
    run = Run([plan] * 300, seed)
    run.speed, run.leaves = 40, False
    run.run()
    run.agree()
    assert run.deepest == PIPELINE_MAX


@LONG
@LAW
@given(st.lists(st.sampled_from(sorted(FRAMES)), max_size=30), st.integers(0, 2**32))
def test_any_frames_raise_only_our_error_and_nothing_follows_it(names, seed):
    source = random.Random(seed)
    ours, theirs = server_in("idle"), client_in("opening")
    for name in names:
        for end in (ours, theirs):
            failed = end.failed
            with contextlib.suppress(StreamProtocolError):
                end.receive(FRAMES[name])
                assert failed is None
            assert failed is None or end.failed is failed
        if ours.open_calls and source.random() < 0.3:
            ours.status(ours.open_calls[0], 5)
        if theirs.may_begin and source.random() < 0.5:
            theirs.begin(source.choice(sorted(METHODS)), b"")
