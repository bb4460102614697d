"""Calls of one connection of the stream transport, served in their order.

A method may answer a whole call synchronously, or start it and answer later
(``StreamMethod.answer_now``). Calls that arrived together then share one write. Any other call is
served by a task of its own, and alone: it begins when all calls before it are answered.

A call that was started may be followed by others of its group, since they fail if it fails. Answers
leave in the order of the calls.

:class:`StreamOutput`: few writes, bounded buffers, files. Each frame is written whole in one
synchronous step, so that a cancellation always leaves the peer at the begin of a frame. Content of
a file goes from the page cache to the socket inside the kernel, as far as the socket takes it at
once. The rest of the frame is read and queued, so that the loop also notices when there is room
again.

:class:`StreamConnection`: the loop's callback decodes the received bytes (`FrameBuffer`), applies
the frames to the state of the calls (`ServerCalls`), and queues new calls for `StreamServing`.
Reading stops while more than 2 MiB wait to be taken, or while the greatest number of calls is open.

A connection must earn its memory and its place. Until one of its calls had a good token, it may
send only small frames, and has 5 s. A frame that began must be completed in time. A connection
without calls is closed after some minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from gazette_sdk.errors import (
    CallError,
    CorruptFragmentError,
    StreamProtocolError,
    UnauthenticatedError,
)
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability
from gazette_sdk.protocol.rules import Rpc
from gazette_sdk.protocol.served_calls import ServerCalls, ServerEvent
from gazette_sdk.protocol.stream_calls import (
    NOT_RUN,
    Aborted,
    CallBegan,
    CallRefused,
    GoAway,
    HalfClosed,
    Item,
    Ping,
)
from gazette_sdk.protocol.stream_frames import (
    MESSAGE_BYTES_MAX,
    PREFACE,
    Frame,
    FrameBuffer,
    Kind,
    MethodTraits,
)
from gazette_sdk.server.authorization import MAX_CHUNK_BYTES, Call, call_of
from gazette_sdk.server.grpc_server import ActiveCall
from gazette_sdk.server.listener import UnknownCost, UnknownShare, peer_of
from gazette_sdk.server.metrics import SUCCESS, CallStatus, meters_of, outcome_of


class Answer(NamedTuple):
    """The only response of a call.

    Attributes:
        response: encoded.
        success: True if calls that run only after its success may run.
    """

    response: bytes
    success: bool = True


class StartedCall(NamedTuple):
    """Call that was started synchronously, and is answered later.

    Attributes:
        answer: task of its answer.
        group: shared by calls of which the later ones fail if an earlier one fails.
    """

    answer: asyncio.Task[Answer]
    group: object


Serve: TypeAlias = Callable[["StreamCall"], Coroutine[Any, Any, Answer | None]]

AnswerNow: TypeAlias = Callable[["StreamCall", object | None], Answer | StartedCall | None]


class StreamMethod:
    """A method, and the functions that serve it.

    Args:
        rpc: its name, number and shape.
        serve: serves one call. It returns the answer of a method that has one response, and
            nothing where the responses were sent. A
            :class:`~gazette_sdk.errors.GazetteError` fails the call.
        answer_now: answers or starts a call that is whole, without waiting for anything. It gets
            the group of the calls in flight before it, if there are any: it must then start a
            call of that group, or decline. It declines by returning ``None``, without any effect,
            and :attr:`serve` serves the call then.
    """

    def __init__(self, rpc: Rpc, serve: Serve, answer_now: AnswerNow | None = None) -> None:
        self.rpc = rpc
        self.path = rpc.path
        self.serve = serve
        self.answer_now = answer_now
        self.meters = meters_of(rpc.path, rpc.client_streams, rpc.server_streams)


WRITE_HIGH_BYTES = 1 << 20
"""Bytes that may wait for a peer before no more are produced."""

JOIN_BYTES = 64 << 10
"""Content up to here is copied after its header, for one write; more of it is written apart."""

LEAD_BYTES = 16 << 10
"""Content of a file that is written together with its header: a packet of five bytes would wake
the peer for nothing."""


class StreamOutput:
    """Writing side of one connection.

    Args:
        transport: of the connection.

    Attributes:
        paused: True if so much waits for the peer that no more should be produced.
    """

    __slots__ = ("_held", "_loop", "_room", "_socket", "_transport", "paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []
        self.paused = False
        self._room: asyncio.Future[None] | None = None
        self._socket: socket.socket | None = None
        if transport.get_extra_info("ssl_object") is None and hasattr(os, "sendfile"):
            self._socket = transport.get_extra_info("socket")
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        return self._transport.get_write_buffer_size()

    # ------------------------------------------------------------------ frames

    def write(self, frames: bytes) -> None:
        """Write whole frames, at once."""
        if self._held:
            frames = self._take_held() + frames
        if not self._transport.is_closing():
            self._transport.write(frames)

    def hold(self, frame: bytes) -> None:
        """Write a frame together with the next one, or when :meth:`flush` says so."""
        self._held.append(frame)

    def flush(self) -> None:
        """Write the frames that are held."""
        if self._held:
            self.write(b"")

    def write_content(self, header: bytes, content: bytes) -> None:
        """Write a frame of which the header and the content are not together yet."""
        if len(content) <= JOIN_BYTES:
            self.write(header + content)
            return
        self.write(header)
        if not self._transport.is_closing():
            self._transport.write(content)

    def write_file(self, header: bytes, fd: int, position: int, length: int) -> None:
        """Write a frame whose content stands in a file.

        Args:
            header: of the frame.
            fd: of the file.
            position: where in the file the content begins.
            length: of the content.

        Raises:
            CorruptFragmentError: the file ends early. The connection is broken, as the peer was
                promised more; unless that was known before the frame began.
        """
        end = position + length
        if length > LEAD_BYTES and os.fstat(fd).st_size < end:
            raise _ends_early(end - os.fstat(fd).st_size)
        lead = os.pread(fd, min(length, LEAD_BYTES), position)
        position += len(lead)
        if position < end and length <= LEAD_BYTES:
            raise _ends_early(end - position)
        self.write(header + lead)
        if position == end:
            return
        position = self._send_file(fd, position, end)
        while position < end and not self._transport.is_closing():
            rest = os.pread(fd, end - position, position)
            if not rest:
                self._transport.abort()
                raise _ends_early(end - position)
            self._transport.write(rest)
            position += len(rest)

    def _send_file(self, fd: int, position: int, end: int) -> int:
        """Send the part of a file that the socket takes now. Return the position after it."""
        if self._socket is None or self._transport.get_write_buffer_size():
            return position
        while position < end and not self._transport.is_closing():
            try:
                sent = os.sendfile(self._socket.fileno(), fd, position, end - position)
            except BlockingIOError:
                break
            except OSError:
                # A file that can't be sent so is read; a peer that is gone is found by writing.
                self._socket = None
                break
            if not sent:
                break
            position += sent
        return position

    def _take_held(self) -> bytes:
        frames = b"".join(self._held)
        self._held.clear()
        return frames

    # ------------------------------------------------------------ back-pressure

    def pause(self) -> None:
        """As ``pause_writing`` of a protocol."""
        self.paused = True

    def resume(self) -> None:
        """As ``resume_writing`` of a protocol."""
        self.paused = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def room(self) -> None:
        """Return when there is room for more. For one waiter at a time."""
        while self.paused:
            self._room = self._loop.create_future()
            try:
                await self._room
            finally:
                self._room = None

    async def file_room(self) -> None:
        """Return when the next :meth:`write_file` is worth it.

        Where files are sent by the kernel that is when nothing waits before them.
        """
        if self._socket is None:
            await self.room()
        elif self._transport.get_write_buffer_size():
            self._transport.set_write_buffer_limits(high=0)
            try:
                await self.room()
            finally:
                self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        else:
            await asyncio.sleep(0)  # a fast peer must not keep the loop from everybody else


def _ends_early(missing: int) -> CorruptFragmentError:
    return CorruptFragmentError(
        f"the local file of a fragment ends {missing} bytes early; restart the broker, which then "
        "recovers or replaces it"
    )


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
"""Bytes that may wait for a client that continues sending PINGs. Calls stop far below."""

PING_TICKS = 10
"""Seconds of silence in a call after which we send a PING."""

SILENT_TICKS_MAX = 20
"""Seconds of silence in a call after which we drop the client."""

_CALL = int(Kind.CALL)

_ABORTED = CallStatus("CANCELLED", "the client gave the call up")


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
        """Continue, since the client has received some of it."""
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


INTAKE_LOW_BYTES = 256 << 10
"""A connection that is not read, since too much waits, is read again when only this much waits."""

_EXPIRED = CallStatus("DEADLINE_EXCEEDED", "the call's time is over")
_NOT_BEGUN = CallStatus(
    "DEADLINE_EXCEEDED", "the call's time was over before its turn came", NOT_RUN
)
_STOPPED = CallStatus("CANCELLED", "the server gave the call up, since it stops")

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
            return  # called while a call was ended: the loop below continues
        self._is_serving = True
        try:
            while self._waiting and not self._output.paused and self._serve_next():
                pass
        finally:
            self._is_serving = False
        self._output.flush()

    def give_up(self, call: StreamCall, outcome: CallStatus) -> None:
        """End the newest call with this outcome."""
        if call.given_up is None:
            call.given_up = outcome
            if self._in_flight and call is self._in_flight[-1][0]:
                self._group = None  # later calls do not fail with it
                self._in_flight[-1][1].cancel()

    def cancel(self) -> None:
        """Cancel all calls: there is no one to answer."""
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

    def _answer(self, call: StreamCall, outcome: CallStatus, answer: Answer | None) -> None:
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

    def _count(self, call: StreamCall, outcome: CallStatus, began_s: float) -> None:
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
        self.given_up: CallStatus | None = None
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


def _outcome(call: StreamCall, task: _Task) -> tuple[CallStatus, Answer | None]:
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
