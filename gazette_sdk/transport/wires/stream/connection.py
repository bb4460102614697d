"""One connection of the stream transport, at the client.

An asyncio protocol over the pure machine `ClientCalls`: it turns what a socket receives into
what callers wait for, and holds the bounds of time and memory. Every call is an
:class:`OpenCall`; there is no task per connection, call or message.

Back-pressure: a call whose items nobody takes stops the reading of its socket; whoever sends
much awaits :meth:`Connection.drained` between items.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from typing import Protocol, cast

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol.stream_calls import (
    ClientCalls,
    ClientEvent,
    GoAway,
    HelloReceived,
    Item,
    Ping,
    Status,
)
from gazette_sdk.protocol.stream_frames import PREFACE, Frame, FrameBuffer, Hello
from gazette_sdk.transport.wires.stream.open_call import Ended, OpenCall

__all__ = [
    "ALPN",
    "Connection",
    "Owner",
]

ALPN = "gzt/1"
"""This wire's name in TLS."""

LOW_WATER_BYTES = 64 << 10
"""Of content that comes so much at a time, and goes on, the kernel gathers as much before it wakes
us. Each wake-up costs as much as copying that."""

WRITE_BUFFER_BYTES = 64 << 10
"""More than this of unsent bytes makes senders wait, until none is left: what the kernel doesn't
take at once is copied, and copied again whenever it takes some of it."""

JOINED_BYTES_MAX = 64 << 10
"""Up to this size a frame's header and payload are joined for one write; copying more costs more
than the second write does."""

PING_AFTER_S = 10.0
"""A peer that says nothing for so long during a call is asked whether it lives."""

SILENCE_MAX_S = 20.0
"""A peer that says nothing for so long during a call is given up."""

STALL_MAX_S = 60.0
"""The same, while it has more than :data:`STALLED_BYTES` of ours to read before our question:
it may be slow, and yet alive."""

STALLED_BYTES = 64 << 10

ABORT_TIMEOUT_S = 5.0
"""What a call that was given up may take to end, before its connection is dropped."""


class Owner(Protocol):
    """Who keeps a connection."""

    def freed(self, connection: Connection) -> None:
        """It has no open call any more, and can take one."""

    def lost(self, connection: Connection) -> None:
        """It is closed."""


class Connection(asyncio.BufferedProtocol):
    """A connection to one server.

    Args:
        owner: is told when it is free, and when it is gone.

    Attributes:
        calls: the state of its calls.
        greeted: resolves with the server's HELLO, or fails with ``ConnectionError`` (it went
            away), or :class:`StreamProtocolError` (it speaks something else).
        exclusive: whether its calls may not be followed by others before they ended.
        freed_at: monotonic seconds since which it has no open call.
        writing_paused: whether too much is unsent.
    """

    def __init__(self, owner: Owner) -> None:
        self.loop = asyncio.get_running_loop()
        self.calls = ClientCalls()
        self.greeted: asyncio.Future[Hello] = self.loop.create_future()
        self.exclusive = False
        self.freed_at = 0.0
        self._owner = owner
        self._frames = FrameBuffer()
        self._open: deque[OpenCall] = deque()
        self._transport: asyncio.Transport
        self._gone: asyncio.Future[None] = self.loop.create_future()
        self._reason = ""
        self._ended = Ended.LOST
        self._reading_paused = False
        self._socket: socket.socket | None = None  # where it is not TLS that reads from it
        self._low_water = 1
        self.writing_paused = False
        self._drain_waiter: asyncio.Future[None] | None = None
        self._heard_at = 0.0
        self._unheard_bytes = 0
        self._watch: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None

    @property
    def open_count(self) -> int:
        """How many calls have no STATUS yet."""
        return len(self._open)

    @property
    def usable(self) -> bool:
        """Whether a call can begin now."""
        return self.calls.may_begin and not self._transport.is_closing()

    def silent_s(self, now: float) -> float:
        """How long its open calls have heard nothing; ``now`` is in monotonic seconds."""
        return now - self._heard_at if self._open else 0.0

    # -------------------------------------------------------------------- calls

    def begin(self, method: int, request: bytes, head: bytes = b"") -> OpenCall:
        """Begin a call. Only when :attr:`usable`.

        Raises:
            StreamProtocolError: it is too long for the server.
        """
        number, data = self.calls.begin(method, request, head)
        return self._began(number, data)

    def append(self, request: bytes, content: bytes, head: bytes = b"") -> OpenCall:
        """Make a whole append of one piece of content, by one write. Only when :attr:`usable`.

        Raises:
            StreamProtocolError: it is too long for the server.
        """
        number, data = self.calls.append(request, content, head)
        return self._began(number, data)

    def _began(self, number: int, data: bytes) -> OpenCall:
        call = OpenCall(self, number)
        if not self._open:
            self._heard_at = time.monotonic()
            if self._watch is None:
                self._watch = self.loop.call_later(PING_AFTER_S, self._look_after)
        self._open.append(call)
        self.write(data)
        return call

    def give_up(self, call: OpenCall) -> None:
        """What still comes for a call is dropped, up to its STATUS."""
        self.write(self.calls.abort(call.number))
        call.forget()
        self.resume_reading()
        if self.exclusive and self._abort_timer is None:
            self._abort_timer = self.loop.call_later(
                ABORT_TIMEOUT_S, self.drop, "a call that was given up did not end"
            )

    def unused(self) -> None:
        """Whoever took it for a call made none."""
        if not self._open:
            self._freed()

    # ------------------------------------------------------------------ sending

    def write(self, data: bytes) -> None:
        """Send whole frames."""
        if data:
            self._unheard_bytes += len(data)
            self._transport.write(data)

    def write_content(self, header: bytes, content: bytes | memoryview) -> None:
        """Send a header and its payload; nothing if there is no header."""
        if not header:
            return
        length = len(content)
        self._unheard_bytes += length
        if length <= JOINED_BYTES_MAX:
            self._transport.write(header + content)
        else:
            self._transport.write(header)
            self._transport.write(content)

    async def drained(self) -> None:
        """Wait while too much is unsent, and the connection lives. One at a time."""
        if not self.writing_paused:
            return
        assert self._drain_waiter is None
        waiter = self._drain_waiter = self.loop.create_future()
        try:
            await waiter
        finally:
            self._drain_waiter = None

    def pause_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        self.writing_paused = True

    def resume_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        self.writing_paused = False
        self._wake_sender()

    def _wake_sender(self) -> None:
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)

    # ---------------------------------------------------------------- receiving

    def resume_reading(self) -> None:
        """Go on reading, if that was stopped."""
        if self._reading_paused:
            self._reading_paused = False
            self._heard_at = time.monotonic()
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.BaseProtocol``."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES, low=0)
        tls = transport.get_extra_info("ssl_object")
        if tls is None:
            self._socket = transport.get_extra_info("socket")
        agreed = tls.selected_alpn_protocol() if tls is not None else None
        if agreed not in {None, ALPN}:
            self.greeted.set_exception(StreamProtocolError(f"it chose {agreed} in TLS"))
            self._transport.abort()
            return
        self._transport.write(PREFACE)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See ``asyncio.BufferedProtocol``."""
        return self._frames.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """See ``asyncio.BufferedProtocol``."""
        if self._frames.error is not None:
            return
        self._heard_at = time.monotonic()
        self._unheard_bytes = 0
        ended: list[OpenCall] = []
        try:
            self._take(self._frames.updated(nbytes), ended)
            if self._frames.error is not None:
                raise self._frames.error
        except StreamProtocolError as error:
            self._violated(error)
        else:
            if ended:
                self._wake_sender()
            if not self._open and (ended or self.calls.leaving):
                self._freed()
        self._expect(nbytes)
        # Callers go on from here, and may well make their next calls: that comes last.
        if self._open:
            self._open[0].tell()
        for call in ended:
            call.tell()

    def _expect(self, arrived: int) -> None:
        """In the middle of masses of content: be woken for much of it, not for each packet."""
        low = LOW_WATER_BYTES
        if arrived < low or self._frames.missing < low:
            low = 1
        if low != self._low_water and self._socket is not None:
            self._low_water = low
            with contextlib.suppress(OSError):  # it has ended already
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)

    def _take(self, frames: list[Frame], ended: list[OpenCall]) -> None:
        """Hand frames to their calls, and find those which ended."""
        receive = self.calls.receive
        for frame in frames:
            event = receive(frame)
            kind = type(event)
            if kind is Item:
                if self._open[0].took(cast("Item", event)) and not self._reading_paused:
                    self._reading_paused = True
                    self._transport.pause_reading()
            elif kind is Status:
                call = self._open.popleft()
                call.finish(cast("Status", event))
                ended.append(call)
            elif event is not None:
                self._told(event)

    def _told(self, event: ClientEvent) -> None:
        """The server said something that belongs to no call."""
        if isinstance(event, Ping):
            self.write(self.calls.pong(event.payload))
        elif isinstance(event, GoAway):
            self._reason = f"it went away: {event.reason}"
        elif isinstance(event, HelloReceived) and not self.greeted.done():
            self.greeted.set_result(event.hello)

    def _freed(self) -> None:
        """No call is open."""
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None
        self.resume_reading()
        if self.calls.leaving:
            self._transport.close()
            return
        self.freed_at = time.monotonic()
        self._owner.freed(self)

    def _violated(self, error: StreamProtocolError) -> None:
        """The server broke the rules."""
        if not self.greeted.done():
            self.greeted.set_exception(error)
            self._transport.abort()
            return
        self._transport.write(self.calls.goaway(str(error)))
        self.drop(f"the server broke the rules of the wire: {error}")

    def eof_received(self) -> None:
        """See ``asyncio.BufferedProtocol``: the connection is closed."""

    # ------------------------------------------------------------------- ending

    def trim(self) -> None:
        """Give memory back that an idle connection doesn't need."""
        self._frames.trim()

    def drop(self, reason: str) -> None:
        """End it; its calls fail as lost."""
        self._reason = reason
        if not self._gone.done():  # early releases of 3.11 fail to abort TLS that has ended
            self._transport.abort()

    def close(self) -> None:
        """End it, as it is not needed any more; calls under way end as closed."""
        self._ended = Ended.CLOSED
        if self._gone.done():
            return
        if self._open:
            self._transport.abort()
        else:
            self._transport.close()

    async def closed(self) -> None:
        """Wait until it is closed."""
        await asyncio.shield(self._gone)

    def abandon(self) -> None:
        """In a forked child: let go of the socket, which remains the parent's."""
        sock = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_RDWR)
            # The number stays taken, by something harmless: objects of the parent's loop, which
            # the child inherited, may still close it.
            os.dup2(nothing, sock.fileno(), inheritable=False)
            os.close(nothing)

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.BaseProtocol``."""
        reason = self._reason or (f"{exc}" if exc else "the server closed the connection")
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionError(reason))
        self.greeted.exception()  # it was told to whoever waits for it
        for timer in (self._watch, self._abort_timer):
            if timer is not None:
                timer.cancel()
        for call in self._open:
            call.fail(self._ended, reason)
        self._open.clear()
        self._wake_sender()
        if not self._gone.done():
            self._gone.set_result(None)
        self._owner.lost(self)

    def _look_after(self) -> None:
        """Find out whether a silent peer lives."""
        self._watch = None
        if not self._open:
            return
        now = time.monotonic()
        if self._reading_paused:
            # The silence is ours: a PING behind what we don't read yet waits for its answer.
            self._heard_at = now
            self.write(self.calls.ping(b""))
        silent_s = now - self._heard_at
        bound_s = STALL_MAX_S if self._unheard_bytes > STALLED_BYTES else SILENCE_MAX_S
        if silent_s >= bound_s:
            self.drop(f"the server said nothing for {silent_s:.0f} s")
            return
        wait_s = PING_AFTER_S - silent_s
        if wait_s <= 0:
            self.write(self.calls.ping(b""))
            wait_s = min(bound_s - silent_s, PING_AFTER_S)
        self._watch = self.loop.call_later(wait_s + 0.001, self._look_after)
