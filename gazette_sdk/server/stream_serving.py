"""The calls of one connection of the stream transport, served in their order.

A method may answer a whole call synchronously, or start it and answer later
(:attr:`StreamMethod.answer_now`). Calls that arrived together then share one write. Any other
call is served by a task of its own, and alone: it begins when all calls before it are answered.

A call that was started may be followed by others of its group, since they fail if it fails.
Answers leave in the order of the calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol, TypeAlias

from gazette_sdk.errors import CallError
from gazette_sdk.protocol.stream_calls import NOT_RUN, CallRefused, ServerCalls
from gazette_sdk.server.call import MAX_CHUNK_BYTES, Call, call_of
from gazette_sdk.server.grpc_server import ActiveCall
from gazette_sdk.server.outcomes import SUCCESS, Outcome, outcome_of
from gazette_sdk.server.stream_call import Answer, StreamCall, check_length
from gazette_sdk.server.stream_output import StreamOutput

__all__ = ["StreamServing"]

_EXPIRED = Outcome("DEADLINE_EXCEEDED", "the call's time is over")
_NOT_BEGUN = Outcome("DEADLINE_EXCEEDED", "the call's time was over before its turn came", NOT_RUN)
_STOPPED = Outcome("CANCELLED", "the server gave the call up, since it stops")

_Task: TypeAlias = asyncio.Task[Answer] | asyncio.Task[Answer | None]


class Connection(Protocol):
    """Connection, as the serving of its calls sees it."""

    @property
    def is_over(self) -> bool:
        """True if no answer can be sent any more."""

    def ended(self, call: StreamCall | None) -> None:
        """Make room: a call was answered. ``None`` stands for one that was refused."""

    def stopped(self) -> None:
        """Leave: the server stops, and has cancelled a call."""


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
        connection: Connection,
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
        if self._is_serving:
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
        if answer_now is None or not call.is_whole:
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
            if not self._connection.is_over and not self._is_stopped:
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


def _outcome(call: StreamCall, task: _Task) -> tuple[Outcome, Answer | None]:
    """Return the outcome of a call whose task has ended, and its answer if it succeeded."""
    if task.cancelled():
        return call.given_up or _STOPPED, None
    error = task.exception()
    if error is None:
        answer = task.result()
        try:
            if answer is not None:
                check_length(answer.response)
        except CallError as too_long:
            return outcome_of(too_long, call.method.path), None
        return SUCCESS, answer
    assert isinstance(error, Exception), "others have ended the event loop"
    return outcome_of(error, call.method.path), None
