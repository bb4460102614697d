"""One connection of the stream transport, at the server.

The loop's callback decodes the received bytes (`FrameBuffer`), applies the frames to the state of
the calls (`ServerCalls`), and queues new calls for `stream_serving`. Reading stops while more than
2 MiB wait to be taken, or while the greatest number of calls is open.

A connection must earn its memory and its place. Until one of its calls had a good token, it may
send only small frames, and has 5 s. A frame that began must be completed in time. A connection
without calls is closed after some minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from typing import Protocol, cast

from gazette_sdk.errors import StreamProtocolError, UnauthenticatedError
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability
from gazette_sdk.protocol.served_calls import ServerCalls, ServerEvent
from gazette_sdk.protocol.stream_calls import (
    Aborted,
    CallBegan,
    CallRefused,
    GoAway,
    HalfClosed,
    Item,
    Ping,
)
from gazette_sdk.protocol.stream_frames import PREFACE, Frame, FrameBuffer, Kind, MethodTraits
from gazette_sdk.server.grpc_server import ActiveCall
from gazette_sdk.server.outcomes import Outcome
from gazette_sdk.server.peer_limits import UnknownCost, UnknownShare, peer_of
from gazette_sdk.server.stream_method import StreamMethod
from gazette_sdk.server.stream_output import StreamOutput
from gazette_sdk.server.stream_serving import Intake, StreamCall, StreamServing

__all__ = ["StreamConnection", "StreamHost"]

_log = logging.getLogger(__name__)

FIRST_CALL_TIMEOUT_S = 5.0
"""A connection is closed if none of its calls had a good token within this time."""

UNAUTHORIZED_FRAME_BYTES = 64 << 10
"""Greatest frame until a call of the connection had a good token. Unknown clients must not make
this process hold the 16 MiB of the greatest frame."""

UNAUTHORIZED_FRAMES_MAX = 256
"""Frames that a connection may send before a call with a good token: a flood of PINGs, or of calls
that are refused, must not occupy the event loop."""

FRAME_TICKS_MAX = 20
"""Seconds in which a small frame must be complete, once its first byte arrived."""

FRAME_BYTES_PER_TICK = 64 << 10
"""A greater frame has one more second for each of these: the least rate of appends."""

IDLE_TICKS_MAX = 300
"""Seconds without a call after which a connection is closed. Clients dial again at no great cost,
while each connection holds a descriptor and some memory."""

CLOSE_TIMEOUT_S = 1.0
"""Time a client may take to close a connection that we leave, or that broke the rules."""

INTAKE_HIGH_BYTES = 2 << 20
"""Bytes that may wait to be taken while the connection is read. Two frames of the greatest size
fit, so that a client of such frames isn't stopped after each."""

UNREAD_BYTES_MAX = 4 << 20
"""Bytes that may wait for a client that goes on sending PINGs. Calls stop far below."""

PING_TICKS = 10
"""Seconds of silence in a call after which we send a PING."""

SILENT_TICKS_MAX = 20
"""Seconds of silence in a call after which we drop the client."""

_CALL = int(Kind.CALL)

_ABORTED = Outcome("CANCELLED", "the client gave the call up")


class StreamHost(Protocol):
    """Server, as its connections see it."""

    methods: dict[int, StreamMethod]
    traits: dict[int, MethodTraits]
    authority: Authority | AllowAll
    unknown: UnknownShare
    zone: str
    suffix: str
    active: set[ActiveCall]

    def admits(self, connection: StreamConnection) -> str:
        """Admit a connection. Return the reason if it is refused, else the empty string."""

    def lost(self, connection: StreamConnection) -> None:
        """Forget a connection."""


class StreamConnection(asyncio.BufferedProtocol):
    """Protocol object of one connection.

    Args:
        host: its server.
    """

    def __init__(self, host: StreamHost) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._buffer = FrameBuffer(PREFACE)
        self._calls = ServerCalls(host.traits)
        self._intake = Intake(self._update_reading)
        self._output: StreamOutput
        self._transport: asyncio.Transport
        self.serving: StreamServing
        self._missing_preface = len(PREFACE)
        self._is_authorized = False  # a call had a good token
        self._unauthorized_frames = 0
        self._intake_high_bytes = UNAUTHORIZED_FRAME_BYTES
        self._is_over_limit = False  # a large frame began before that
        self._timer: asyncio.TimerHandle | None = None
        self._scratch: bytearray | None = None  # receives the bytes of a broken connection
        self._is_lost = False

        self._newest: StreamCall | None = None  # the client may still be sending it
        self._behind: list[Frame] = []  # held back while too many calls are open

        self._received_any = False
        self._silent_ticks = 0
        self._frame_ticks = 0
        self._idle_ticks = 0

    # --------------------------------------------------------------- connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, with a connection from the listener."""
        self._transport = cast("asyncio.Transport", transport)
        self._output = StreamOutput(self._transport)
        peer = peer_of(transport.get_extra_info("peername"))
        self.serving = StreamServing(self, self._calls, self._output, self._host.active, peer)
        self._transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
        )
        refusal = self._host.admits(self)
        if refusal:
            self._fail(refusal)
            return
        self._timer = self._loop.call_later(
            FIRST_CALL_TIMEOUT_S,
            lambda: self._fail(
                f"no call with a good token came within {FIRST_CALL_TIMEOUT_S:.0f} s"
            ),
        )

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        """Return the memory for the next bytes."""
        return self._buffer.get_buffer(sizehint) if self._scratch is None else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes that arrived."""
        self._received_any = True
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
        elif not self._is_authorized and not isinstance(self._host.authority, AllowAll):
            self._check_limits(len(frames))

    def eof_received(self) -> bool:
        """End all calls: the client has closed its side."""
        self._give_up()
        self._end_within(CLOSE_TIMEOUT_S)
        return False

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - its signature
        """End all calls: the connection is lost."""
        self._is_lost = True
        self._set_timer(None)
        self._give_up()
        self._output.resume()
        self._host.lost(self)

    def pause_writing(self) -> None:
        """Send no more for now: much waits for the client."""
        self._output.pause()

    def resume_writing(self) -> None:
        """Go on, since the client has received some of it."""
        self._output.resume()
        self.serving.serve()

    def abort(self) -> None:
        """Break it at once."""
        if not self._is_lost:  # early releases of 3.11 fail to abort TLS that has ended
            self._transport.abort()

    # ------------------------------------------------------------------ its end

    def leave(self, reason: str) -> None:
        """Take no new calls; finish those that began, then close."""
        if self._is_lost or self._scratch is not None:
            return
        self._output.write(self._calls.goaway(reason))
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._calls.drained and not self._is_lost:
            self._end_within(CLOSE_TIMEOUT_S)

    def _fail(self, reason: str) -> None:
        """End the connection, with a GOAWAY that gives the reason."""
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
            with contextlib.suppress(OSError):  # it is not connected any more
                self._transport.write_eof()
        self._end_within(CLOSE_TIMEOUT_S)
        self._update_reading()

    def _check_limits(self, frames: int) -> None:
        """Check what an unknown client has sent."""
        self._unauthorized_frames += frames
        self._host.unknown.spend(frames * UnknownCost.STREAM_FRAME)
        if self._unauthorized_frames > UNAUTHORIZED_FRAMES_MAX:
            self._fail(f"{UNAUTHORIZED_FRAMES_MAX} frames came before a call with a good token")
        elif self._buffer.frame_bytes > UNAUTHORIZED_FRAME_BYTES:
            self._is_over_limit = True
            self._update_reading()
            self._fail_if_over_limit()

    def _fail_if_over_limit(self) -> None:
        """End the connection for a large frame, after the calls before it are answered."""
        if not self._calls.open_calls:
            self._fail(
                f"a frame of {self._buffer.frame_bytes} bytes came before a call with a good "
                f"token; until then {UNAUTHORIZED_FRAME_BYTES} are allowed"
            )

    def _give_up(self) -> None:
        """Cancel all calls, and drop what was received."""
        self._buffer = FrameBuffer(PREFACE)  # tasks that end slowly must not hold 16 MiB
        self._behind.clear()
        self._newest = None
        self.serving.cancel()

    def _end_within(self, timeout_s: float) -> None:
        self._set_timer(self._loop.call_later(timeout_s, self.abort))

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def tick(self) -> None:
        """Check for silence, idleness and slow frames; called once a second."""
        if self._buffer.frame_bytes and (self._is_over_limit or self._transport.is_reading()):
            self._frame_ticks += 1
            allowed = FRAME_TICKS_MAX + self._buffer.frame_bytes // FRAME_BYTES_PER_TICK
            if self._frame_ticks > allowed:
                self._fail(f"a frame was not complete {allowed} s after it began; send faster")
        if not self._calls.open_calls:
            self._idle_ticks += 1
            if self._idle_ticks == IDLE_TICKS_MAX:
                self.leave(f"no call came within {IDLE_TICKS_MAX} s; dial again")
        if self._received_any or not self._calls.open_calls:
            self._received_any = False
            self._silent_ticks = 0
            return
        self._buffer.trim()
        if self._output.waiting_bytes:
            return  # a client that reads slowly is not silent
        self._silent_ticks += 1
        if self._silent_ticks >= SILENT_TICKS_MAX and self._transport.is_reading():
            _log.debug(
                "dropping a client that is silent in a call",
                extra={"peer": self._transport.get_extra_info("peername")},
            )
            self._transport.abort()
        elif self._silent_ticks % PING_TICKS == 0:
            self._output.write(self._calls.ping(b"%d" % self._silent_ticks))

    # ------------------------------------------------------------------ receiving

    def _take(self, frames: list[Frame]) -> None:
        """Take frames of the client."""
        self._frame_ticks = 0
        if self._behind:
            self._behind += frames
            return
        try:
            self._receive(frames)
        except StreamProtocolError as error:
            self._fail(error.reason)
            return
        self.serving.serve()
        if self._intake.waiting_bytes > self._intake_high_bytes or self._behind:
            self._update_reading()

    def _receive(self, frames: list[Frame]) -> None:
        """Apply frames to the calls.

        Raises:
            StreamProtocolError: the client broke the rules.
        """
        calls = self._calls
        coming = iter(frames)
        for frame in coming:
            if frame[0] == _CALL and calls.full:
                self._behind = [frame, *coming]
                return
            event = calls.receive(frame)
            if isinstance(event, CallBegan):
                self._begin(event)
            elif isinstance(event, Item):
                if self._newest is not None:
                    self._newest.put(event)
            elif isinstance(event, HalfClosed):
                if self._newest is not None:
                    self._newest.end()
            elif event is not None:
                self._receive_other(event)

    def _receive_other(self, event: ServerEvent) -> None:
        if isinstance(event, CallRefused):
            self._newest = None
            self.serving.add(event)
        elif isinstance(event, Aborted):
            if self._newest is not None:
                self._newest.end()
                self.serving.give_up(self._newest, _ABORTED)
        elif isinstance(event, Ping):
            self._output.write(self._calls.pong(event.payload))
            if self._output.waiting_bytes > UNREAD_BYTES_MAX:
                self._fail("the answers to its PINGs are not read")
        elif isinstance(event, GoAway):
            self._close_if_drained()

    def _begin(self, began: CallBegan) -> None:
        method = self._host.methods[began.method]
        call = StreamCall(began, method, self._calls, self._output, self._intake)
        if began.head.timeout_ms:
            call.deadline_s = self._loop.time() + began.head.timeout_ms / 1000
        self._newest = call
        self._idle_ticks = 0
        if not self._is_authorized:
            self._authorize(call)
        self.serving.add(call)

    def _authorize(self, call: StreamCall) -> None:
        """Lift the limits of unknown clients if a call has a good token.

        The service checks the token of each call itself, with the capability that it requires.
        """
        try:
            self._host.authority.verify(
                call.metadata.get("authorization"), Capability(0), time.time()
            )
        except UnauthenticatedError:
            return
        self._is_authorized = True
        cost_s = UnknownCost.CONNECTION + self._unauthorized_frames * UnknownCost.STREAM_FRAME
        self._host.unknown.spend(-cost_s)
        self._intake_high_bytes = INTAKE_HIGH_BYTES
        self._set_timer(None)

    # ---------------------------------------------------------------------- for serving

    @property
    def is_over(self) -> bool:
        """True if no answer can be sent any more."""
        return self._is_lost or self._scratch is not None or self._transport.is_closing()

    def ended(self, call: StreamCall | None) -> None:
        """Take the frames that were held back: a call was answered, or refused (``None``)."""
        if call is self._newest:
            self._newest = None
        if self._behind:
            behind, self._behind = self._behind, []
            self._take(behind)
        if self._intake.paused:
            self._update_reading()
        if self._calls.leaving:
            self._close_if_drained()
        if self._is_over_limit:
            self._fail_if_over_limit()

    def stopped(self) -> None:
        """Leave: the server stops, and has cancelled a call."""
        self.leave("the server stops")
        if not self._is_lost:
            self._end_within(CLOSE_TIMEOUT_S)

    def _update_reading(self) -> None:
        """Read from the socket only while there is room."""
        if self._transport.is_closing():
            return
        intake = self._intake
        # An unknown client that broke the rules is not read until the end: it may send a flood.
        reading = (self._scratch is not None and self._is_authorized) or not (
            self._scratch is not None
            or self._behind
            or self._is_over_limit
            or intake.waiting_bytes > self._intake_high_bytes
        )
        if reading == intake.paused:
            intake.paused = not reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
