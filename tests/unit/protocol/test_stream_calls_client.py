"""A client's calls: every frame and every action in every state."""

from __future__ import annotations

import pytest

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.stream_calls import (
    NOT_RUN,
    PIPELINE_MAX,
    ClientCalls,
    GoAway,
    HelloReceived,
    Item,
    Ping,
    Pong,
    Status,
)
from gazette_sdk.protocol.stream_frames import (
    ABORT_FRAME,
    END_FRAME,
    Frame,
    Kind,
    Method,
    encode,
    encode_goaway,
    encode_hello,
)
from gazette_sdk.protocol.stream_pb2 import Hello
from support.frame_feed import FrameFeed
from support.stream_calls import FRAMES, cells, client_in, frame_of

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
            assert FrameFeed().feed(data)[0].kind == Kind.CALL
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
