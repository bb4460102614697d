"""Serves the calls of one connection of the stream transport.

Calls are served by one task of the connection, in their order: mostly the next begins when the
one before it has ended, which is what keeps the appends of a client in order, and their answers
too. A task per call, or per message, would cost more than a whole append.

Even to wake that task costs a turn of the loop. So calls that find it idle are begun in the
callback itself, in its name; it goes on with them where they wait for something. Most don't.

A call that has nothing left to do but to wait for others, as an append does that waits for its
replicas, passes its turn on: the next is begun ahead, in a task of its own. It is told a *bond*
(:attr:`StreamCall.follows`): it may go on if it is bound by that to fail where the one before it
fails, and else waits for its turn. Answers are sent in turn nevertheless.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Protocol

from gazette_sdk.protocol.stream_calls import NOT_RUN, CallRefused, ServerCalls
from gazette_sdk.server.begun import Begun
from gazette_sdk.server.call import MAX_CHUNK_BYTES, Call, call_of
from gazette_sdk.server.grpc_server import ActiveCall
from gazette_sdk.server.outcomes import SUCCESS, Outcome, outcome_of
from gazette_sdk.server.stream_call import Answer, Served, StreamCall, TurnLostError, check_length
from gazette_sdk.server.stream_output import StreamOutput

__all__ = ["StreamServing"]

_log = logging.getLogger(__name__)

_PLAIN = Call(chunk_bytes=MAX_CHUNK_BYTES)

_EXPIRED = Outcome("DEADLINE_EXCEEDED", "the call's time is over")
_NOT_BEGUN = Outcome("DEADLINE_EXCEEDED", "the call's time was over before its turn came", NOT_RUN)
_STOPPED = Outcome("CANCELLED", "the server gave the call up, since it stops")


class Connection(Protocol):
    """What serving knows of its connection."""

    @property
    def is_over(self) -> bool:
        """Whether nobody listens any more."""

    def begun(self) -> None:
        """The first call was taken."""

    def ended(self, call: StreamCall | None) -> None:
        """A call was answered; none, if it was refused before it became one."""

    def stopped(self) -> None:
        """The server stops, and has cancelled a call."""

    def abort(self) -> None:
        """Break the connection at once."""


class StreamServing:
    """The calls of one connection that are served, and those that wait for it.

    Args:
        connection: they came over.
        calls: its state of calls.
        output: what is sent goes there.
        active: calls under way, of all connections.

    Attributes:
        task: serves them; made for the first.
    """

    def __init__(
        self,
        connection: Connection,
        calls: ServerCalls,
        output: StreamOutput,
        active: set[ActiveCall],
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._calls = calls
        self._output = output
        self._active = active
        self._loop = asyncio.get_running_loop()
        self._pending: deque[StreamCall | CallRefused] = deque()
        self._current: StreamCall | None = None  # that the task serves
        self._idle: asyncio.Future[None] | None = None  # what the task waits for
        self._begun: Begun[None] | None = None  # calls that it has to go on with
        self._ahead = 0  # the oldest of those pending are begun already: so many
        self._tasks_ahead: set[asyncio.Task[Served]] = set()
        self._bond: object | None = None  # with which the newest that is begun passed its turn on

    # --------------------------------------------------------------- for the connection

    def add(self, call: StreamCall | CallRefused) -> None:
        """A call came in."""
        self._pending.append(call)
        if self.task is None:
            self._connection.begun()
            self.task = self._loop.create_task(self._run(), name="stream connection")
            self.task.add_done_callback(self._ended)
        elif self._bond is not None:
            self._begin_ahead()

    def serve_now(self) -> None:
        """Serve calls here, as the task which waits for some, until they are to wait."""
        idle = self._idle
        if idle is None or not self._pending:
            return
        task = self.task
        assert task is not None, "it waits"
        if idle.done():
            return
        if asyncio.current_task(self._loop) is not None:  # no loop's callback, but a task's step
            idle.set_result(None)
            return
        self._idle = None
        asyncio.tasks._enter_task(self._loop, task)  # noqa: SLF001 - documented for such use
        try:
            begun = Begun(self._serve_pending())
        finally:
            asyncio.tasks._leave_task(self._loop, task)  # noqa: SLF001 - as above
        if begun.done:
            self._idle = idle
            return
        self._begun = begun
        if not idle.done():
            idle.set_result(None)

    def give_up(self, call: StreamCall, outcome: Outcome) -> None:
        """End a call, wherever it is, with this outcome."""
        if call.given_up is None:
            call.given_up = outcome
            self._bond = None  # the newest alone is given up: who comes next is not bound by it
            task = self.task if call is self._current else call.task
            if task is not None:
                task.cancel()

    def cancel(self) -> None:
        """Cancel what is served, and all that waits: there is nobody to answer."""
        for call in islice(self._pending, self._ahead):
            assert isinstance(call, StreamCall), "others are not begun"
            assert call.task is not None, "it was begun ahead"
            _cancel(call.task)
            self._close(call, _STOPPED)
        self._pending.clear()
        self._ahead = 0
        self._bond = None
        if self.task is not None:
            self.task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The task that serves calls has ended."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a stream connection failed", exc_info=error)
            self._connection.abort()

    # ------------------------------------------------------------------- in turn

    async def _run(self) -> None:
        """Serve calls, in their order, for as long as the connection lasts."""
        try:
            while True:
                await self._serve_pending()
                await self._more()
        finally:
            await self._end_ahead()

    async def _end_ahead(self) -> None:
        """Return when nothing is served ahead any more, however often we are cancelled."""
        for task in self._tasks_ahead:
            _cancel(task)
        while self._tasks_ahead:
            with suppress(asyncio.CancelledError):
                await asyncio.wait(self._tasks_ahead)

    async def _more(self) -> None:
        """Wait until there are calls, and go on with those that were begun meanwhile."""
        self._idle = idle = self._loop.create_future()
        interrupt: asyncio.CancelledError | None = None
        try:
            await idle
        except asyncio.CancelledError as cancelled:
            if self._begun is None:
                raise
            interrupt = cancelled
        finally:
            self._idle = None
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.interrupt = interrupt
            await begun

    async def _serve_pending(self) -> None:
        """Serve the calls that wait for their turn."""
        output, calls, pending = self._output, self._calls, self._pending
        while pending:
            call = pending.popleft()
            if isinstance(call, CallRefused):
                output.write(calls.status(call.call, call.code, call.text, call.kind))
                self._connection.ended(None)
            else:
                is_skipped = calls.skips(call.number)
                if call.task is not None:
                    self._ahead -= 1
                    call.take_turn(is_lost=is_skipped)
                    await self._serve(call)
                elif is_skipped:
                    output.write(calls.skip(call.number))
                else:
                    await self._serve(call)
                if not self._ahead:
                    self._bond = None
                call.forget()
                self._connection.ended(call)
            if output.paused:
                await output.room()

    async def _serve(self, call: StreamCall) -> None:
        """Serve one call, or what is left of it, and end it.

        Raises:
            asyncio.CancelledError: the connection is over.
        """
        outcome = _STOPPED
        try:
            if call.task is not None:
                outcome, answer = await self._served_ahead(call, call.task)
            else:
                self._open(call)
                self._current = call
                try:
                    outcome, answer = await self._outcome(call)
                finally:
                    self._current = None
            self._answer(call, outcome, answer)
        finally:
            # After the answer, which is waited for.
            self._close(call, outcome)

    async def _served_ahead(self, call: StreamCall, task: asyncio.Task[Served]) -> Served:
        """What came of a call that was begun ahead.

        Raises:
            asyncio.CancelledError: the connection is over.
        """
        try:
            return await task
        except asyncio.CancelledError:
            if call.given_up is None or self._connection.is_over:
                raise
            return call.given_up, None  # before it took its first step

    async def _outcome(self, call: StreamCall) -> Served:
        """Have a call served.

        Raises:
            asyncio.CancelledError: the connection is over.
        """
        try:
            if not self._may_run(call):
                return call.given_up or _STOPPED, None
            serving = call.method.serve(call)
            if call.deadline_s is None:
                answer = await serving
            else:
                answer = await self._until(call.deadline_s, call, Begun(serving))
            if answer is not None:
                check_length(answer.response)
        except asyncio.CancelledError:
            if self._connection.is_over:
                raise
            return call.given_up or _STOPPED, None
        except TurnLostError as lost:
            return Outcome("ABORTED", str(lost), NOT_RUN), None
        except Exception as error:  # noqa: BLE001 - the outermost boundary of a call
            return outcome_of(error, call.method.path), None
        return SUCCESS, answer

    def _may_run(self, call: StreamCall) -> bool:
        """Make its context known to a call, unless it was given up, or its time is over.

        Raises:
            CallError: its metadata are malformed.
        """
        remaining_s = None
        if call.deadline_s is not None:
            remaining_s = call.deadline_s - self._loop.time()
            if remaining_s <= 0:
                call.given_up = call.given_up or _NOT_BEGUN
        if call.given_up is not None:
            return False
        call.context = _context(call, remaining_s)
        return True

    async def _until(
        self, deadline_s: float, call: StreamCall, begun: Begun[Answer | None]
    ) -> Answer | None:
        """Have a call that was begun served to its end, or up to its deadline."""
        if begun.done:
            return begun.result
        expiry = self._loop.call_at(deadline_s, self.give_up, call, _EXPIRED)
        try:
            return await begun
        finally:
            expiry.cancel()

    def _answer(self, call: StreamCall, outcome: Outcome, answer: Answer | None) -> None:
        """End a call with its answer or its status.

        Raises:
            asyncio.CancelledError: it was not the client that ended it.
        """
        calls, output = self._calls, self._output
        if outcome is SUCCESS and answer is not None:
            output.write(calls.answer(call.number, answer.response, success=answer.success))
            call.method.meters.sent += 1
        else:
            output.write(calls.status(call.number, outcome.number, outcome.text, outcome.kind))
        task = self.task
        assert task is not None, "it is what runs here"
        if outcome is not _STOPPED and not task.cancelling():
            return
        if self._connection.is_over or outcome is _STOPPED:
            self._connection.stopped()
            raise asyncio.CancelledError
        while task.cancelling():
            task.uncancel()

    def _open(self, call: StreamCall) -> None:
        """Count a call as one under way."""
        call.active = ActiveCall(call.method.path, time.monotonic())
        self._active.add(call.active)
        call.method.meters.started += 1

    def _close(self, call: StreamCall, outcome: Outcome) -> None:
        """Count it as one that has ended."""
        active, meters = call.active, call.method.meters
        self._active.discard(active)
        meters.received += call.received
        meters.handled(outcome.code, time.monotonic() - active.begun_s)

    # -------------------------------------------------------------------- ahead

    def pass_turn(self, bond: object) -> None:
        """The newest call that was begun has nothing left to do but to wait."""
        self._bond = bond
        self._begin_ahead()

    def _begin_ahead(self) -> None:
        """Begin the next call, if it can make something of that."""
        if len(self._pending) <= self._ahead:
            return
        call = self._pending[self._ahead]
        if isinstance(call, CallRefused) or not call.may_begin_ahead:
            return
        call.follows, self._bond = self._bond, None
        self._ahead += 1
        self._open(call)
        call.task = task = self._loop.create_task(self._outcome(call), name="stream call")
        self._tasks_ahead.add(task)
        task.add_done_callback(self._tasks_ahead.discard)


def _cancel(task: asyncio.Task[Served]) -> None:
    """Cancel a task once: what it does because of that is not to be interrupted."""
    if not task.cancelling():
        task.cancel()


def _context(call: StreamCall, remaining_s: float | None) -> Call:
    """What is known of a call beside its request.

    Raises:
        CallError: its metadata are malformed.
    """
    if remaining_s is None and not call.metadata:
        return _PLAIN
    return call_of(call.metadata.items(), timeout_s=remaining_s, chunk_bytes=MAX_CHUNK_BYTES)
