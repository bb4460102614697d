"""One connection of the stream transport, at the server.

What arrives goes through the pure machines (`FrameBuffer`, `ServerCalls`) as it comes, in the
loop's callback. Calls are served by one task of the connection, in their order: the next begins
when the one before it has ended, which is what keeps the appends of a client in order, and their
answers too. A task per call, or per message, would cost more than a whole append.

Even to wake that task costs a turn of the loop. So calls that find it idle are begun in the
callback itself, in its name; it goes on with them where they wait for something. Most don't.

Reading stops while more than 2 MiB wait to be taken, or when as many calls are open as may be.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from typing import Protocol, cast

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.stream_calls import (
    NOT_RUN,
    Aborted,
    CallBegan,
    CallRefused,
    GoAway,
    HalfClosed,
    Item,
    Ping,
    ServerCalls,
    ServerEvent,
)
from gazette_sdk.protocol.stream_frames import PREFACE, Frame, FrameBuffer, Kind, MethodTraits
from gazette_sdk.server.begun import Begun
from gazette_sdk.server.call import MAX_CHUNK_BYTES, Call, call_of
from gazette_sdk.server.grpc_server import ActiveCall
from gazette_sdk.server.outcomes import SUCCESS, Outcome, outcome_of
from gazette_sdk.server.stream_call import (
    Answer,
    Intake,
    StreamCall,
    StreamMethod,
    check_length,
)
from gazette_sdk.server.stream_output import StreamOutput

__all__ = ["StreamConnection", "StreamHost"]

_log = logging.getLogger(__name__)

FIRST_CALL_TIMEOUT_S = 5.0
"""A connection whose first call doesn't come within so long is closed."""

CLOSE_TIMEOUT_S = 1.0
"""How long a client may take to close a connection that we leave, or that broke the rules."""

INTAKE_HIGH_BYTES = 2 << 20
"""Bytes that may wait to be taken before the connection is read no more: two of the greatest
frames, so that a client which sends such ones isn't stopped after each."""

UNREAD_BYTES_MAX = 4 << 20
"""Bytes that may wait for a client which goes on sending PINGs. Calls stop far below."""

PING_TICKS = 10
"""Seconds of silence in a call after which the client is asked for a sign of life."""

SILENT_TICKS_MAX = 20
"""Seconds of silence in a call after which the client is given up."""

_CALL = int(Kind.CALL)

_PLAIN = Call(chunk_bytes=MAX_CHUNK_BYTES)

_ABORTED = Outcome("CANCELLED", "the client gave the call up")
_EXPIRED = Outcome("DEADLINE_EXCEEDED", "the call's time is over")
_NOT_BEGUN = Outcome("DEADLINE_EXCEEDED", "the call's time was over before its turn came", NOT_RUN)
_STOPPED = Outcome("CANCELLED", "the server gave the call up, since it stops")


class StreamHost(Protocol):
    """What a connection knows of its server."""

    methods: dict[int, StreamMethod]
    traits: dict[int, MethodTraits]
    zone: str
    suffix: str
    active: set[ActiveCall]

    def admits(self, connection: StreamConnection) -> str:
        """Take a connection in; or why not."""

    def lost(self, connection: StreamConnection) -> None:
        """A connection is gone."""


class StreamConnection(asyncio.BufferedProtocol):
    """The protocol object of one connection.

    Args:
        host: its server.
    """

    def __init__(self, host: StreamHost) -> None:
        self.task: asyncio.Task[None] | None = None
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._buffer = FrameBuffer(PREFACE)
        self._calls = ServerCalls(host.traits)
        self._intake = Intake(self._update_reading)
        self._output: StreamOutput
        self._transport: asyncio.Transport
        self._missing_preface = len(PREFACE)
        self._timer: asyncio.TimerHandle | None = None
        self._scratch: bytearray | None = None  # where the bytes of a broken connection go
        self._is_lost = False

        self._pending: deque[StreamCall | CallRefused] = deque()
        self._newest: StreamCall | None = None  # that the client may still be sending
        self._current: StreamCall | None = None  # that is served
        self._behind: list[Frame] = []  # held back while as many calls are open as may be
        self._idle: asyncio.Future[None] | None = None  # what the task waits for
        self._begun: Begun[None] | None = None  # calls that it has to go on with

        self._heard = False
        self._silent_ticks = 0

    # --------------------------------------------------------------- connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The listener hands the connection over."""
        self._transport = cast("asyncio.Transport", transport)
        self._output = StreamOutput(self._transport)
        self._transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
        )
        refusal = self._host.admits(self)
        if refusal:
            self._fail(refusal)
            return
        self._timer = self._loop.call_later(
            FIRST_CALL_TIMEOUT_S,
            lambda: self._fail(f"no call came within {FIRST_CALL_TIMEOUT_S:.0f} s"),
        )

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        """Where the next bytes go."""
        return self._buffer.get_buffer(sizehint) if self._scratch is None else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes arrived."""
        self._heard = True
        if self._scratch is not None:
            return
        frames = self._buffer.updated(nbytes)
        error = self._buffer.error
        if self._missing_preface and (error is None or frames):
            self._missing_preface = max(0, self._missing_preface - nbytes)
            if not self._missing_preface:
                self._output.write(self._calls.hello(self._host.zone, self._host.suffix))
        if frames:
            self._take(frames)
        if error is not None:
            self._fail(error.reason)

    def eof_received(self) -> bool:
        """The client is gone, or wants nothing more: its calls end."""
        self._give_up()
        self._end_within(CLOSE_TIMEOUT_S)
        return False

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - its signature
        """It is gone."""
        self._is_lost = True
        self._set_timer(None)
        self._give_up()
        self._output.resume()
        self._host.lost(self)

    def pause_writing(self) -> None:
        """Much waits for the client."""
        self._output.pause()

    def resume_writing(self) -> None:
        """The client took some of it."""
        self._output.resume()

    def abort(self) -> None:
        """Break it at once."""
        if not self._is_lost:  # early releases of 3.11 fail to abort TLS that has ended
            self._transport.abort()

    # ------------------------------------------------------------------ its end

    def leave(self, reason: str) -> None:
        """Take no new calls; those begun are finished, then it is closed."""
        if self._is_lost or self._scratch is not None:
            return
        self._output.write(self._calls.goaway(reason))
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._calls.drained and not self._is_lost:
            self._end_within(CLOSE_TIMEOUT_S)

    def _fail(self, reason: str) -> None:
        """The connection is over; the client is told why, as far as it listens."""
        if self._is_lost or self._scratch is not None:
            return
        _log.debug(
            "closing a connection: %s",
            reason,
            extra={"peer": self._transport.get_extra_info("peername")},
        )
        self._scratch = bytearray(4096)
        self._give_up()
        self._output.write(self._calls.goaway(reason))
        # Closing while bytes arrive would reset the connection, and take the GOAWAY with it.
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        self._end_within(CLOSE_TIMEOUT_S)
        self._update_reading()

    def _give_up(self) -> None:
        """Cancel what is served, and all that waits."""
        self._pending.clear()
        self._behind.clear()
        self._newest = None
        if self.task is not None:
            self.task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The task that serves calls has ended."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a stream connection failed", exc_info=error)
            self.abort()

    def _end_within(self, timeout_s: float) -> None:
        self._set_timer(self._loop.call_later(timeout_s, self.abort))

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def tick(self) -> None:
        """A second has passed: look for silence."""
        if self._heard or not self._calls.open_calls:
            self._heard = False
            self._silent_ticks = 0
            return
        self._buffer.trim()
        if self._output.waiting_bytes:
            return  # it doesn't read as fast as we write, which is no silence
        self._silent_ticks += 1
        if self._silent_ticks >= SILENT_TICKS_MAX and self._transport.is_reading():
            _log.debug("dropping a client that went silent in a call")
            self._transport.abort()
        elif self._silent_ticks % PING_TICKS == 0:
            self._output.write(self._calls.ping(b"%d" % self._silent_ticks))

    # ------------------------------------------------------------------ receiving

    def _take(self, frames: list[Frame]) -> None:
        """Take what the client sent."""
        if self._behind:
            self._behind += frames
            return
        try:
            self._receive(frames)
        except StreamProtocolError as error:
            self._fail(error.reason)
            return
        if self._idle is not None and self._pending:
            self._serve_now(self._idle)
        if self._intake.waiting_bytes > INTAKE_HIGH_BYTES or self._behind:
            self._update_reading()

    def _receive(self, frames: list[Frame]) -> None:
        """Act upon what frames mean.

        Raises:
            StreamProtocolError: the client broke the rules.
        """
        calls, receive = self._calls, self._calls.receive
        for position, frame in enumerate(frames):
            if frame[0] == _CALL and calls.full:
                self._behind = frames[position:]
                return
            event = receive(frame)
            kind, newest = type(event), self._newest
            if kind is CallBegan:
                self._begin(cast("CallBegan", event))
            elif kind is Item:
                if newest is not None:
                    newest.put(cast("Item", event))
            elif kind is HalfClosed:
                if newest is not None:
                    newest.end()
            elif event is not None:
                self._rarer(event)

    def _rarer(self, event: ServerEvent) -> None:
        if isinstance(event, CallRefused):
            self._newest = None
            self._enqueue(event)
        elif isinstance(event, Aborted):
            if self._newest is not None:
                self._newest.end()
                self._cancel(self._newest, _ABORTED)
        elif isinstance(event, Ping):
            self._output.write(self._calls.pong(event.payload))
            if self._output.waiting_bytes > UNREAD_BYTES_MAX:
                self._fail("the answers to its PINGs are not read")
        elif isinstance(event, GoAway):
            self._close_if_drained()

    def _begin(self, began: CallBegan) -> None:
        call = StreamCall(
            began, self._host.methods[began.method], self._calls, self._output, self._intake
        )
        if began.head.timeout_ms:
            call.deadline_s = self._loop.time() + began.head.timeout_ms / 1000
        self._newest = call
        self._enqueue(call)

    def _enqueue(self, call: StreamCall | CallRefused) -> None:
        self._pending.append(call)
        if self.task is None:
            self._set_timer(None)
            self.task = self._loop.create_task(self._run(), name="stream connection")
            self.task.add_done_callback(self._ended)

    def _cancel(self, call: StreamCall, outcome: Outcome) -> None:
        if call.given_up is None:
            call.given_up = outcome
            if call is self._current and self.task is not None:
                self.task.cancel()

    def _update_reading(self) -> None:
        """Read, or don't, as there is room."""
        if self._transport.is_closing():
            return
        intake = self._intake
        reading = self._scratch is not None or not (
            self._behind or intake.waiting_bytes > INTAKE_HIGH_BYTES
        )
        if reading == intake.paused:
            intake.paused = not reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # ------------------------------------------------------------------- serving

    async def _run(self) -> None:
        """Serve calls, in their order, for as long as the connection lasts."""
        while True:
            await self._serve_pending()
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

    def _serve_now(self, idle: asyncio.Future[None]) -> None:
        """Serve calls here, as the task which waits for ``idle``, until they are to wait."""
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

    async def _serve_pending(self) -> None:
        """Serve the calls that wait for their turn."""
        output, calls, pending = self._output, self._calls, self._pending
        while pending:
            call = pending.popleft()
            if isinstance(call, CallRefused):
                output.write(calls.status(call.call, call.code, call.text, call.kind))
            else:
                if calls.skips(call.number):
                    output.write(calls.skip(call.number))
                else:
                    await self._serve(call)
                call.forget()
                if call is self._newest:
                    self._newest = None
            if self._behind:
                behind, self._behind = self._behind, []
                self._take(behind)
            if self._intake.paused:
                self._update_reading()
            if calls.leaving:
                self._close_if_drained()
            if output.paused:
                await output.room()

    async def _serve(self, call: StreamCall) -> None:
        """Serve one call, and end it.

        Raises:
            asyncio.CancelledError: the connection is over.
        """
        method = call.method
        active = ActiveCall(method.path, time.monotonic())
        self._host.active.add(active)
        meters = method.meters
        meters.started += 1
        outcome, answer = _STOPPED, None
        try:
            try:
                if self._may_run(call):
                    serving = method.serve(call)
                    if call.deadline_s is None:
                        answer = await serving
                    else:
                        answer = await self._until(call.deadline_s, call, Begun(serving))
                    if answer is not None:
                        check_length(answer.response)
                    outcome = SUCCESS
                else:
                    outcome = call.given_up or _STOPPED
            except asyncio.CancelledError:
                if self._is_over:
                    raise
                outcome, answer = call.given_up or _STOPPED, None
            except Exception as error:  # noqa: BLE001 - the outermost boundary of a call
                outcome, answer = outcome_of(error, method.path), None
            finally:
                self._current = None
            self._answer(call, outcome, answer)
        finally:
            # After the answer, which is waited for.
            self._host.active.discard(active)
            meters.received += call.received
            meters.handled(outcome.code, time.monotonic() - active.begun_s)

    def _may_run(self, call: StreamCall) -> bool:
        """Make a call the one that is served, unless it was given up, or its time is over.

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
        self._current = call
        call.context = _context(call, remaining_s)
        return True

    async def _until(
        self, deadline_s: float, call: StreamCall, begun: Begun[Answer | None]
    ) -> Answer | None:
        """Have a call that was begun served to its end, or up to its deadline."""
        if begun.done:
            return begun.result
        expiry = self._loop.call_at(deadline_s, self._cancel, call, _EXPIRED)
        try:
            return await begun
        finally:
            expiry.cancel()

    @property
    def _is_over(self) -> bool:
        return self._is_lost or self._scratch is not None or self._transport.is_closing()

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
        if not task.cancelling():
            return
        if self._is_over or outcome is _STOPPED:
            self.leave("the server stops")
            if not self._is_lost:
                self._end_within(CLOSE_TIMEOUT_S)
            raise asyncio.CancelledError
        while task.cancelling():
            task.uncancel()


def _context(call: StreamCall, remaining_s: float | None) -> Call:
    """What is known of a call beside its request.

    Raises:
        CallError: its metadata are malformed.
    """
    if remaining_s is None and not call.metadata:
        return _PLAIN
    return call_of(call.metadata.items(), timeout_s=remaining_s, chunk_bytes=MAX_CHUNK_BYTES)
