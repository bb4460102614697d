"""Calls of one connection of the stream transport, served in their order.

A method may answer a whole call synchronously, or start it and answer later
(``StreamMethod.answer_now``). Calls that arrived together then share one write. Any other
call is served by a task of its own, and alone: it begins when all calls before it are answered.

A call that was started may be followed by others of its group, since they fail if it fails.
Answers leave in the order of the calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from gazette_sdk.errors import CallError
from gazette_sdk.protocol.served_calls import ServerCalls
from gazette_sdk.protocol.stream_calls import NOT_RUN, CallBegan, CallRefused, Item
from gazette_sdk.protocol.stream_frames import MESSAGE_BYTES_MAX
from gazette_sdk.server.call import MAX_CHUNK_BYTES, Call, call_of
from gazette_sdk.server.grpc_server import ActiveCall
from gazette_sdk.server.outcomes import SUCCESS, Outcome, outcome_of
from gazette_sdk.server.stream_method import Answer, StreamMethod
from gazette_sdk.server.stream_output import StreamOutput

if TYPE_CHECKING:
    from gazette_sdk.server.stream_connection import StreamConnection

__all__ = ["Intake", "StreamCall", "StreamServing"]

INTAKE_LOW_BYTES = 256 << 10
"""A connection that is not read, since too much waits, is read again when only this much waits."""

_EXPIRED = Outcome("DEADLINE_EXCEEDED", "the call's time is over")
_NOT_BEGUN = Outcome("DEADLINE_EXCEEDED", "the call's time was over before its turn came", NOT_RUN)
_STOPPED = Outcome("CANCELLED", "the server gave the call up, since it stops")

_Task: TypeAlias = asyncio.Task[Answer] | asyncio.Task[Answer | None]


class StreamServing:
    """Queue of the calls of one connection, oldest first.

    Args:
        connection: they came over.
        calls: state machine of the connection's calls.
        output: what is sent goes there.
        active: calls in progress on all connections, for the diagnostics.
        peer: IP address of the client; empty if it is unknown.
    """

    def __init__(
        self,
        connection: StreamConnection,
        calls: ServerCalls,
        output: StreamOutput,
        active: set[ActiveCall],
        peer: str = "",
    ) -> None:
        self._connection = connection
        self._calls = calls
        self._output = output
        self._active = active
        self._without_metadata = Call(chunk_bytes=MAX_CHUNK_BYTES, peer=peer)
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[StreamCall | CallRefused] = deque()
        self._in_flight: deque[tuple[StreamCall, _Task]] = deque()
        self._group: object | None = None  # of the calls in flight, if more of it may follow
        self._is_serving = False
        self._is_stopped = False

    @property
    def tasks(self) -> list[_Task]:
        """Tasks of the calls in flight."""
        return [task for _, task in self._in_flight]

    # --------------------------------------------------------------- for the connection

    def add(self, call: StreamCall | CallRefused) -> None:
        """Queue a call. :meth:`serve` begins it."""
        self._waiting.append(call)

    def serve(self) -> None:
        """Answer or begin calls, until one has to wait for those before it."""
        if self._is_serving or self._is_stopped:
            return  # called while a call was ended: the loop below goes on
        self._is_serving = True
        try:
            while self._waiting and not self._output.paused and self._serve_next():
                pass
        finally:
            self._is_serving = False
        self._output.flush()

    def give_up(self, call: StreamCall, outcome: Outcome) -> None:
        """End the newest call with this outcome."""
        if call.given_up is None:
            call.given_up = outcome
            if self._in_flight and call is self._in_flight[-1][0]:
                self._group = None  # later calls do not fail with it
                self._in_flight[-1][1].cancel()

    def cancel(self) -> None:
        """Cancel all calls: there is nobody to answer."""
        self._is_stopped = True
        self._waiting.clear()
        for _, task in self._in_flight:
            if not task.cancelling():  # a roll-back must not be interrupted
                task.cancel()

    # ----------------------------------------------------------------------- the begin

    def _serve_next(self) -> bool:
        """Answer or begin the oldest call that waits. Return False if it has to wait on."""
        call = self._waiting[0]
        if isinstance(call, StreamCall) and self._answers_now(call):
            return True
        if self._in_flight:
            return False
        self._waiting.popleft()
        if isinstance(call, CallRefused):
            self._output.hold(self._calls.status(call.call, call.code, call.text, call.kind))
            self._connection.ended(None)
        elif self._calls.skips(call.number):
            self._output.hold(self._calls.skip(call.number))
            self._end(call)
        else:
            self._begin(call)
        return True

    def _answers_now(self, call: StreamCall) -> bool:
        """Answer or start a whole call synchronously. Return False if that is not possible."""
        answer_now = call.method.answer_now
        if answer_now is None or not call.ended or call.given_up is not None:
            return False
        if self._in_flight:
            if self._group is None or call.deadline_s is not None:
                return False
        elif self._calls.skips(call.number) or self._is_late(call):
            return False
        began_s = time.monotonic()
        try:
            call.context = self._context(call)
        except CallError:
            return False
        answer = answer_now(call, self._group)
        if answer is None:
            return False
        self._waiting.popleft()
        call.method.meters.started += 1
        if isinstance(answer, Answer):
            assert not self._in_flight, "answers leave in the order of the calls"
            self._answer(call, SUCCESS, answer)
            self._count(call, SUCCESS, began_s)
            self._end(call)
        else:
            self._group = answer.group
            self._await(call, answer.answer, began_s)
        return True

    def _context(self, call: StreamCall) -> Call:
        """Return what is known of a call beside its request.

        Raises:
            CallError: its metadata are malformed.
        """
        if call.deadline_s is None and not call.metadata:
            return self._without_metadata
        timeout_s = None if call.deadline_s is None else call.deadline_s - self._loop.time()
        metadata = call.metadata.items()
        return call_of(
            metadata,
            timeout_s=timeout_s,
            chunk_bytes=MAX_CHUNK_BYTES,
            peer=self._without_metadata.peer,
        )

    def _is_late(self, call: StreamCall) -> bool:
        return call.deadline_s is not None and call.deadline_s <= self._loop.time()

    def _begin(self, call: StreamCall) -> None:
        """Serve a call by a task. No other is in flight."""
        call.method.meters.started += 1
        began_s = time.monotonic()
        outcome = call.given_up
        if outcome is None and self._is_late(call):
            outcome = _NOT_BEGUN
        if outcome is None:
            try:
                call.context = self._context(call)
            except CallError as error:
                outcome = outcome_of(error, call.method.path)
        if outcome is not None:
            self._answer(call, outcome, None)
            self._count(call, outcome, began_s)
            self._end(call)
            return
        task = self._loop.create_task(call.method.serve(call), name=f"stream {call.method.path}")
        self._await(call, task, began_s)

    def _await(self, call: StreamCall, task: _Task, began_s: float) -> None:
        """Answer a call when its task has ended."""
        if call.deadline_s is not None:
            self._group = None  # only the newest call can be given up
            expiry = self._loop.call_at(call.deadline_s, self.give_up, call, _EXPIRED)
            task.add_done_callback(lambda _: expiry.cancel())
        call.active = ActiveCall(call.method.path, began_s)
        self._active.add(call.active)
        self._in_flight.append((call, task))
        task.add_done_callback(self._answer_in_flight)

    # ------------------------------------------------------------------------- the end

    def _answer_in_flight(self, _: _Task) -> None:
        """Answer the oldest calls in flight, up to the first whose task has not ended."""
        while self._in_flight and self._in_flight[0][1].done():
            call, task = self._in_flight.popleft()
            outcome, answer = _outcome(call, task)
            if self._connection.is_over:
                self._is_stopped = True  # later calls must not begin: this one stays the oldest
            if not self._is_stopped:
                self._answer(call, outcome, answer)
            self._active.discard(call.active)
            self._count(call, outcome, call.active.begun_s)
            self._end(call)
        if not self._in_flight:
            self._group = None
        self.serve()

    def _answer(self, call: StreamCall, outcome: Outcome, answer: Answer | None) -> None:
        """Queue a call's answer or its status for the next write."""
        calls, output = self._calls, self._output
        if answer is not None:
            output.hold(calls.answer(call.number, answer.response, success=answer.success))
            call.method.meters.sent += 1
            return
        output.hold(calls.status(call.number, outcome.number, outcome.text, outcome.kind))
        if outcome is _STOPPED:
            output.flush()
            self.cancel()
            self._connection.stopped()

    def _count(self, call: StreamCall, outcome: Outcome, began_s: float) -> None:
        meters = call.method.meters
        meters.received += call.received
        meters.handled(outcome.code, time.monotonic() - began_s)

    def _end(self, call: StreamCall) -> None:
        """Drop what is left of a call, and make room for others."""
        call.drop()
        self._connection.ended(call)


@dataclass(slots=True)
class Intake:
    """Bytes that a connection has received, and no call has taken yet.

    Attributes:
        resume: reads the connection again, unless something else forbids it.
        waiting_bytes: their number.
        paused: True while the connection is not read.
    """

    resume: Callable[[], None]
    waiting_bytes: int = 0
    paused: bool = False


class StreamCall:
    """A call in progress, or waiting for those before it, as its method sees it.

    Args:
        began: its begin.
        method: the method called.
        calls: state machine of the connection's calls.
        output: what is sent goes there.
        intake: what the connection received.

    Attributes:
        number: of the call, on its connection.
        method: the same.
        request: the encoded request.
        context: what is known of the call beside its request.
        ended: True if all of it was received.
        given_up: reason for which the call ends early; set before it is cancelled.
        deadline_s: time at which its caller gives up, on the loop's clock; ``None`` for none.
        metadata: as sent.
        received: messages taken, the request and the end of its stream included.
        active: entry of the call in the diagnostics.
    """

    __slots__ = (
        "_calls",
        "_intake",
        "_items",
        "_output",
        "_waiter",
        "active",
        "context",
        "deadline_s",
        "ended",
        "given_up",
        "metadata",
        "method",
        "number",
        "received",
        "request",
    )

    active: ActiveCall
    context: Call

    def __init__(
        self,
        began: CallBegan,
        method: StreamMethod,
        calls: ServerCalls,
        output: StreamOutput,
        intake: Intake,
    ) -> None:
        self.number = began.call
        self.method = method
        self.request = began.request
        self.metadata = began.head.metadata
        self.given_up: Outcome | None = None
        self.deadline_s: float | None = None
        self.received = 1
        self._calls = calls
        self._output = output
        self._intake = intake
        self._items: deque[Item] = deque()
        self.ended = began.sent
        self._waiter: asyncio.Future[None] | None = None
        intake.waiting_bytes += len(began.request)

    # --------------------------------------------------------------- the client's side

    def put(self, item: Item) -> None:
        """Add a message or content that arrived."""
        self._items.append(item)
        self._intake.waiting_bytes += len(item.payload)
        self._wake()

    def end(self) -> None:
        """Note that the client has sent everything."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> Item | None:
        """Return the client's next message or content; ``None`` when it has sent everything.

        Cancellation loses nothing.
        """
        while not self._items:
            if self.ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        self.received += 1
        self._intake.waiting_bytes -= len(item.payload)
        if self._intake.paused and self._intake.waiting_bytes <= INTAKE_LOW_BYTES:
            self._intake.resume()
        return item

    @property
    def only_item(self) -> Item | None:
        """The only message or content that waits; ``None`` if there are none or several."""
        return self._items[0] if len(self._items) == 1 else None

    def drop(self) -> None:
        """Drop the request, and items that were not taken."""
        self._intake.waiting_bytes -= len(self.request)
        self.request = b""
        while self._items:
            self._intake.waiting_bytes -= len(self._items.popleft().payload)

    # -------------------------------------------------------------------- our side

    async def send(self, response: bytes) -> None:
        """Send a response, and wait while too much waits for the client.

        Raises:
            CallError: it is too long.
        """
        self._output.write(self._message(response))
        if self._output.paused:
            await self._output.room()

    def hold(self, response: bytes) -> None:
        """Send a response together with what follows it: content, or the status.

        Raises:
            CallError: it is too long.
        """
        self._output.hold(self._message(response))

    async def send_content(self, content: bytes) -> None:
        """Send up to 1 MiB of content, and wait while too much waits for the client."""
        header = self._calls.content_header(self.number, len(content))
        self._output.write_content(header, content)
        self.method.meters.sent += 1
        if self._output.paused:
            await self._output.room()

    async def send_file(self, fd: int, position: int, length: int, chunk_bytes: int) -> None:
        """Send content of a file.

        Args:
            fd: of the file.
            position: where the content begins.
            length: of the content, in bytes.
            chunk_bytes: greatest content of one frame.

        Raises:
            CorruptFragmentError: the file ends early.
        """
        end = position + length
        while position < end:
            count = min(chunk_bytes, end - position)
            header = self._calls.content_header(self.number, count)
            self._output.write_file(header, fd, position, count)
            self.method.meters.sent += 1
            position += count
            if position < end or self._output.paused:
                await self._output.file_room()

    def _message(self, response: bytes) -> bytes:
        _check_length(response)
        frame = self._calls.message(self.number, response)
        self.method.meters.sent += 1
        return frame


def _outcome(call: StreamCall, task: _Task) -> tuple[Outcome, Answer | None]:
    """Return the outcome of a call whose task has ended, and its answer if it succeeded."""
    if task.cancelled():
        return call.given_up or _STOPPED, None
    error = task.exception()
    if error is None:
        answer = task.result()
        try:
            if answer is not None:
                _check_length(answer.response)
        except CallError as too_long:
            return outcome_of(too_long, call.method.path), None
        return SUCCESS, answer
    assert isinstance(error, Exception), "others have ended the event loop"
    return outcome_of(error, call.method.path), None


def _check_length(response: bytes) -> None:
    """Refuse a response that no frame can carry.

    Raises:
        CallError: it is too long.
    """
    if len(response) > MESSAGE_BYTES_MAX:
        raise CallError(
            f"a response of {len(response)} bytes exceeds {MESSAGE_BYTES_MAX} bytes; ask for less",
            code="RESOURCE_EXHAUSTED",
        )
