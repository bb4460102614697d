"""A server's calls: every frame in every state, and what the server itself may send."""

from __future__ import annotations

import pytest

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.served_calls import ServerCalls
from gazette_sdk.protocol.stream_calls import (
    NOT_RUN,
    PIPELINE_MAX,
    Aborted,
    CallBegan,
    CallRefused,
    GoAway,
    HalfClosed,
    Item,
    Ping,
    Pong,
)
from gazette_sdk.protocol.stream_frames import (
    HEADER_BYTES,
    METHODS,
    STATUS_OK_FRAME,
    Frame,
    Kind,
    Method,
    decode_status,
    encode,
    encode_goaway,
    encode_hello,
)
from gazette_sdk.protocol.stream_pb2 import CallHead
from support.frame_feed import FrameFeed
from support.stream_calls import AFTER_SUCCESS, FRAMES, call_frame, cells, client_in, server_in

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
        for frame in FrameFeed().feed(sends[step]()):
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
