"""What holds for both ends' calls, and both ends against each other.

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
from gazette_sdk.protocol import served_calls as server
from gazette_sdk.protocol import stream_calls as client
from gazette_sdk.protocol.served_calls import ServerCalls
from gazette_sdk.protocol.stream_calls import (
    NOT_RUN,
    PIPELINE_MAX,
    Aborted,
    CallBegan,
    CallRefused,
    ClientCalls,
    HalfClosed,
    HelloReceived,
    Item,
    Ping,
    Pong,
    Status,
)
from gazette_sdk.protocol.stream_frames import (
    HEADER_BYTES,
    METHODS,
    Frame,
    FrameBuffer,
    Kind,
    Method,
    decode_status,
    encode,
)
from support.frame_feed import FrameFeed
from support.stream_calls import AFTER_SUCCESS, FRAMES, client_in, server_in

CASES = int(os.environ.get("STREAM_CASES", "150"))
LAW = settings(max_examples=CASES, deadline=None)
LONG = pytest.mark.timeout(max(120, CASES // 5))


def test_the_tables_of_both_ends_are_whole():
    for table, states, effects in (
        (server.TABLE, server.ServedReceiveState, server.ServerEffect),
        (client.TABLE, client.ReceiveState, client.ClientEffect),
    ):
        assert len(table) == len(states)
        for row in table:
            assert len(row) == len(Kind) + 1
            assert all(effect in effects and after in states for effect, after in row)
            assert row[0][0] is effects.VIOLATION
    assert set(client.SENDING) == {(o, a) for o in client.SendState for a in client.SendAction}


def test_keepalive_frames_are_made():
    for calls in (server_in("idle"), client_in("idle")):
        assert calls.ping(b"1") == encode(Kind.PING, b"1")
        assert calls.pong(b"1") == encode(Kind.PONG, b"1")
        with pytest.raises(StreamProtocolError, match="exceeds 64"):
            calls.ping(bytes(65))


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
        self.up_decoder, self.down_decoder = FrameFeed(), FrameBuffer()
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
