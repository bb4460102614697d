"""One connection of the stream transport, at the client.

An asyncio protocol over the pure machine ``ClientCalls``. It turns received bytes into items of
calls, and holds the bounds of time and memory. Every call is an :class:`OpenCall`. There is no task
per connection, call or message.

Back-pressure: reading stops while a call holds too many items that its caller has not taken. A
caller that sends much awaits :meth:`Connection.drained` between items.

A :class:`Head`, and a :class:`Call`, are also used by the blocking connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

from google.protobuf.message import DecodeError

from gazette_sdk.errors import (
    CallCancelledError,
    CallError,
    ClosedError,
    DeadlineExceededError,
    GazetteError,
    StreamProtocolError,
    UnavailableError,
)
from gazette_sdk.protocol.rules import CODE_NAMES
from gazette_sdk.protocol.stream_calls import (
    ClientCalls,
    ClientEvent,
    GoAway,
    HelloReceived,
    Item,
    Liveness,
    LivenessCheck,
    Ping,
    Status,
)
from gazette_sdk.protocol.stream_frames import PREFACE, Frame, FrameBuffer
from gazette_sdk.protocol.stream_pb2 import CallHead, Hello
from gazette_sdk.transport.wire import Destination, call_error

ALPN = "gzt/1"
"""This wire's name in TLS."""


class Head:
    """Head of calls of one kind, encoded once.

    Args:
        timeout_s: time limit of the call, for the server; 0 for none.
        after_success: True if the call is to run only if the one before it succeeded.
        metadata: of the call.
    """

    __slots__ = ("_encoded", "_head")

    def __init__(
        self,
        *,
        timeout_s: float = 0.0,
        after_success: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        timeout_ms = max(1, round(timeout_s * 1000)) if timeout_s else 0
        self._head = CallHead(
            timeout_ms=timeout_ms, after_success=after_success, metadata=metadata or {}
        )
        self._encoded = self._head.SerializeToString()

    def encoded(self, to: Destination) -> bytes:
        """Return the encoded head, with the token and the metadata of a call."""
        if to.authorization is None and not to.metadata:
            return self._encoded
        head = CallHead()
        head.CopyFrom(self._head)
        head.metadata.update(to.metadata)
        if to.authorization is not None:
            head.metadata["authorization"] = to.authorization
        return head.SerializeToString()


class EndReason(enum.Enum):
    """Reason for which a call ended without a STATUS."""

    LOST = "the connection was lost"
    CLOSED = "the transport was closed"
    EXPIRED = "its time ran out"
    FAILED = "its requests failed"


class Call:
    """Call on a connection. It ends by a STATUS, or otherwise.

    Attributes:
        status: the STATUS that ended it.
        ended: why it ended otherwise.
        reason: the same in words.
    """

    # Defaults of the class: most calls set the status only.
    status: Status | None = None
    ended: EndReason | None = None
    reason = ""

    @property
    def over(self) -> bool:
        """True if nothing more will come, and nothing more need be sent."""
        return self.status is not None or self.ended is not None

    def raise_failure(self, to: Destination) -> None:
        """Raise the error of a call that is over, if it has one."""
        status = self.status
        if self.ended is None and status is not None and not status.code:
            return
        where = f"{to.rpc.name} at {to.where}"
        match self.ended:
            case EndReason.LOST:
                raise UnavailableError(f"{where}: {self.reason}", journal=to.journal)
            case EndReason.CLOSED:
                raise ClosedError(
                    f"{to.rpc.name}: the transport was closed during the call", journal=to.journal
                )
            case EndReason.EXPIRED:
                raise DeadlineExceededError(f"{where}: {self.reason}", journal=to.journal)
            case EndReason.FAILED:
                raise CallCancelledError(f"{where}: its requests failed", journal=to.journal)
        assert status is not None
        raise call_error(
            CODE_NAMES[status.code],
            status.text,
            method=to.rpc.name,
            where=to.where,
            journal=to.journal,
            kind=status.kind,
        )


def too_long(to: Destination, error: StreamProtocolError) -> GazetteError:
    """Return the error of a request that is too long for the server."""
    return CallError(
        f"{to.rpc.name} at {to.where}: {error}", code="RESOURCE_EXHAUSTED", journal=to.journal
    )


def malformed(to: Destination, error: DecodeError) -> GazetteError:
    """Return the error of a response that is no message."""
    return CallError(
        f"{to.rpc.name} at {to.where}: a response is malformed: {error}",
        code="INTERNAL",
        journal=to.journal,
    )


def no_response(to: Destination) -> GazetteError:
    """Return the error of a call that succeeded without a response."""
    return CallError(f"{to.rpc.name} at {to.where}: ended without a response", journal=to.journal)


def check_alpn(agreed: str | None) -> None:
    """Check the protocol that TLS agreed on; None where there is none.

    Raises:
        StreamProtocolError: it is another one than ours.
    """
    if agreed not in {None, ALPN}:
        raise StreamProtocolError(f"it chose {agreed} in TLS")


HELD_BYTES_MAX = 1 << 20
"""More bytes than this that a caller has not taken yet stop the reading."""

HELD_BYTES_LOW = HELD_BYTES_MAX // 4
"""Reading continues when no more than this is left."""


class OpenCall(Call):
    """Call on an asyncio connection.

    Args:
        connection: carries it.
        number: of the call on the connection.
    """

    def __init__(self, connection: Connection, number: int) -> None:
        self.number = number
        self._connection = connection
        self._items: deque[Item] = deque()
        self._held_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._on_over: Callable[[OpenCall], None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------- receiving

    def take(self) -> Item | None:
        """Return the next item, if it is there."""
        if not self._items:
            return None
        item = self._items.popleft()
        self._held_bytes -= len(item.payload)
        if self._held_bytes <= HELD_BYTES_LOW:
            self._connection.resume_reading()
        return item

    async def more(self) -> bool:
        """Wait until :meth:`take` gives an item, or the call is over and all were taken.

        Returns:
            True if there is an item.
        """
        while not self._items:
            if self.over:
                return False
            await self._wait()
        return True

    async def end(self) -> None:
        """Wait until the call is over."""
        while not self.over:
            await self._wait()

    def when_over(self, callback: Callable[[OpenCall], None]) -> None:
        """Have a function called once by the event loop when the call is over."""
        self._on_over = callback

    async def _wait(self) -> None:
        waiter = self._waiter = self._connection.loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    # ------------------------------------------------------------------ sending

    def send_message(self, payload: bytes) -> None:
        """Send a further request; nothing is sent if the call is over.

        Raises:
            StreamProtocolError: the server does not take so long a message.
        """
        self._connection.write(self._connection.calls.message(self.number, payload))

    def send_content(self, content: bytes | memoryview) -> None:
        """Send content of any length; nothing is sent if the call is over."""
        connection = self._connection
        calls = connection.calls
        length = len(content)
        if length <= calls.content_bytes_max:
            connection.write_content(calls.content_header(self.number, length), content)
            return
        view = memoryview(content)
        for begin in range(0, length, calls.content_bytes_max):
            self.send_content(view[begin : begin + calls.content_bytes_max])

    def send_end(self) -> None:
        """Say that the call is whole. An append commits."""
        self._connection.write(self._connection.calls.end(self.number))

    async def drained(self) -> None:
        """Wait while too much is unsent, and the call is not over."""
        while self._connection.writing_paused and not self.over:
            await self._connection.drained()

    # ------------------------------------------------------------------- ending

    def give_up(self) -> None:
        """Abort it. The connection remains usable, or is dropped."""
        if not self.over:
            self._connection.give_up(self)
        if self._deadline is not None:
            self._deadline.cancel()

    def expire_after(self, timeout_s: float) -> None:
        """Bound its time: then it ends as expired."""
        self._deadline = self._connection.loop.call_later(timeout_s, self._expire, timeout_s)

    def _expire(self, timeout_s: float) -> None:
        if not self.over:
            self._connection.give_up(self)
            self.fail(EndReason.EXPIRED, f"no answer within {timeout_s:g} s")

    # -------------------------------------------------------- by its connection

    def add(self, item: Item) -> bool:
        """Add an item that arrived. Return True if too much is held now."""
        self._items.append(item)
        self._held_bytes += len(item.payload)
        # A single item is the only response, or is taken by a caller that is about to run.
        return self._held_bytes > HELD_BYTES_MAX and len(self._items) > 1

    def drop_items(self) -> None:
        """Drop what was not taken."""
        self._items.clear()
        self._held_bytes = 0

    def finish(self, status: Status) -> None:
        """End it by its STATUS. :meth:`wake` follows."""
        self.status = status
        if self._deadline is not None:
            self._deadline.cancel()

    def wake(self) -> None:
        """Wake the caller, if there is an item, or the call is over."""
        if self._on_over is not None:
            if self.over:
                self._call_back()
        elif self._waiter is not None and (self._items or self.over) and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, ended: EndReason, reason: str) -> None:
        """End it without a STATUS."""
        if self.ended is None:
            self.ended = ended
            self.reason = reason
        if self._deadline is not None:
            self._deadline.cancel()
        if self._on_over is not None:
            self._connection.loop.call_soon(self._call_back)
        else:
            self.wake()

    def _call_back(self) -> None:
        callback, self._on_over = self._on_over, None
        if callback is not None:
            callback(self)


LOW_WATER_BYTES = 64 << 10
"""Bytes that the kernel gathers before it wakes us, in the middle of much content. Each wake-up
costs as much as copying that."""

WRITE_BUFFER_BYTES = 64 << 10
"""More unsent bytes make senders wait until none is left. What the kernel does not take at once is
copied, and copied again whenever it takes some of it."""

JOINED_BYTES_MAX = 64 << 10
"""Up to this size a frame's header and payload are joined for one write. Copying more costs more
than the second write does."""

ABORT_TIMEOUT_S = 5.0
"""Time within which a call that was given up must end; else its connection is dropped."""


class Connection(asyncio.BufferedProtocol):
    """Connection to one server.

    Args:
        on_idle: called when no call is open any more.
        on_lost: called when the connection is closed.

    Attributes:
        calls: the state of its calls.
        greeted: resolves with the server's HELLO, or fails with ``ConnectionError`` (it went
            away), or :class:`StreamProtocolError` (it speaks something else).
        exclusive: True if no call may follow its calls before they ended.
        idle_since: monotonic seconds since which it has no open call.
        writing_paused: True while too much is unsent.
    """

    def __init__(
        self, on_idle: Callable[[Connection], None], on_lost: Callable[[Connection], None]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.calls = ClientCalls()
        self.greeted: asyncio.Future[Hello] = self.loop.create_future()
        self.exclusive = False
        self.idle_since = 0.0
        self.writing_paused = False
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._frames = FrameBuffer()
        self._open: deque[OpenCall] = deque()
        self._transport: asyncio.Transport
        self._socket: socket.socket | None = None  # None in TLS, which reads from it itself
        self._closed: asyncio.Future[None] = self.loop.create_future()
        self._ended = EndReason.LOST
        self._reason = ""
        self._reading_paused = False
        self._low_water = 1
        self._drain_waiter: asyncio.Future[None] | None = None
        self._liveness = Liveness(0.0)
        self._liveness_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None

    @property
    def open_count(self) -> int:
        """The number of calls without STATUS."""
        return len(self._open)

    @property
    def usable(self) -> bool:
        """True if a call can begin now."""
        return self.calls.may_begin and not self._transport.is_closing()

    def silent_s(self, now: float) -> float:
        """Return how long its open calls have received nothing; ``now`` is in monotonic seconds."""
        return self._liveness.silent_s(now) if self._open else 0.0

    # -------------------------------------------------------------------- calls

    def begin(self, method: int, request: bytes, head: bytes = b"") -> OpenCall:
        """Begin a call. Only when :attr:`usable`.

        Raises:
            StreamProtocolError: it is too long for the server.
        """
        return self._began(*self.calls.begin(method, request, head))

    def append(self, request: bytes, content: bytes, head: bytes = b"") -> OpenCall:
        """Make a whole append of one piece of content, by one write. Only when :attr:`usable`.

        Raises:
            StreamProtocolError: it is too long for the server.
        """
        return self._began(*self.calls.append(request, content, head))

    def _began(self, number: int, data: bytes) -> OpenCall:
        call = OpenCall(self, number)
        if not self._open:
            self._liveness.restart(time.monotonic())
            if self._liveness_timer is None:
                self._check_liveness()
        self._open.append(call)
        self.write(data)
        return call

    def give_up(self, call: OpenCall) -> None:
        """Abort a call: what still comes for it is dropped, up to its STATUS."""
        self.write(self.calls.abort(call.number))
        call.drop_items()
        self.resume_reading()
        if self.exclusive and self._abort_timer is None:
            self._abort_timer = self.loop.call_later(
                ABORT_TIMEOUT_S, self.drop, "a call that was given up did not end"
            )

    def unused(self) -> None:
        """Return a connection that was taken for a call, and on which none was begun."""
        if not self._open:
            self._became_idle()

    # ------------------------------------------------------------------ sending

    def write(self, data: bytes) -> None:
        """Send whole frames."""
        if data:
            self._liveness.sent(len(data))
            self._transport.write(data)

    def write_content(self, header: bytes, content: bytes | memoryview) -> None:
        """Send a header and its payload; nothing if there is no header."""
        if not header:
            return
        length = len(content)
        self._liveness.sent(length)
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
        """Read again, if that was stopped."""
        if self._reading_paused:
            self._reading_paused = False
            self._liveness.restart(time.monotonic())
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.BaseProtocol``."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES, low=0)
        tls = transport.get_extra_info("ssl_object")
        if tls is None:
            self._socket = transport.get_extra_info("socket")
        else:
            try:
                check_alpn(tls.selected_alpn_protocol())
            except StreamProtocolError as error:
                self._fail_greeting(error)
                return
        self._transport.write(PREFACE)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See ``asyncio.BufferedProtocol``."""
        return self._frames.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """See ``asyncio.BufferedProtocol``."""
        if self._frames.error is not None:
            return
        self._liveness.heard(time.monotonic())
        ended: list[OpenCall] = []
        try:
            self._receive(self._frames.updated(nbytes), ended)
            if self._frames.error is not None:
                raise self._frames.error
        except StreamProtocolError as error:
            self._break_off(error)
        else:
            if ended:
                self._wake_sender()
            if not self._open and (ended or self.calls.leaving):
                self._became_idle()
        self._set_low_water(nbytes)
        # Callbacks of calls may begin further calls here: that comes last.
        if self._open:
            self._open[0].wake()
        for call in ended:
            call.wake()

    def _set_low_water(self, arrived: int) -> None:
        """In the middle of much content, be woken for much of it, not for each packet."""
        low = LOW_WATER_BYTES
        if arrived < low or self._frames.missing < low:
            low = 1
        if low != self._low_water and self._socket is not None:
            self._low_water = low
            with contextlib.suppress(OSError):  # it has ended already
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)

    def _receive(self, frames: list[Frame], ended: list[OpenCall]) -> None:
        """Hand frames to their calls, and find those which ended."""
        receive = self.calls.receive
        for frame in frames:
            event = receive(frame)
            kind = type(event)
            if kind is Item:
                if self._open[0].add(cast("Item", event)) and not self._reading_paused:
                    self._reading_paused = True
                    self._transport.pause_reading()
            elif kind is Status:
                call = self._open.popleft()
                call.finish(cast("Status", event))
                ended.append(call)
            elif event is not None:
                self._receive_rare(event)

    def _receive_rare(self, event: ClientEvent) -> None:
        """Take an event that belongs to no call."""
        if isinstance(event, Ping):
            self.write(self.calls.pong(event.payload))
        elif isinstance(event, GoAway):
            self._reason = f"it went away: {event.reason}"
        elif isinstance(event, HelloReceived) and not self.greeted.done():
            self.greeted.set_result(event.hello)

    def _became_idle(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None
        self.resume_reading()
        if self.calls.leaving:
            self._transport.close()
            return
        self.idle_since = time.monotonic()
        self._on_idle(self)

    def _break_off(self, error: StreamProtocolError) -> None:
        """End the connection to a server that broke the rules."""
        if not self.greeted.done():
            self._fail_greeting(error)
            return
        self._transport.write(self.calls.goaway(str(error)))
        self.drop(f"the server broke the rules of the wire: {error}")

    def _fail_greeting(self, error: StreamProtocolError) -> None:
        self.greeted.set_exception(error)
        self._transport.abort()

    def eof_received(self) -> None:
        """See ``asyncio.BufferedProtocol``: the connection is closed."""

    # ------------------------------------------------------------------- ending

    def trim(self) -> None:
        """Release memory that an idle connection does not need."""
        self._frames.trim()

    def drop(self, reason: str) -> None:
        """End the connection; its calls fail as lost."""
        self._reason = reason
        if not self._closed.done():  # early releases of 3.11 fail to abort TLS that has ended
            self._transport.abort()

    def close(self) -> None:
        """End the connection, as it is not needed any more; calls under way end as closed."""
        self._ended = EndReason.CLOSED
        if self._closed.done():
            return
        if self._open:
            self._transport.abort()
        else:
            self._transport.close()

    async def closed(self) -> None:
        """Wait until it is closed."""
        await asyncio.shield(self._closed)

    def shut_down(self) -> None:
        """End a connection whose loop does not run any more. Any thread may call it."""
        with contextlib.suppress(OSError):  # it has ended already
            self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Release the socket in a forked child; the connection remains the parent's.

        The descriptor stays taken, by the null device: objects of the parent's loop, which the
        child inherited, may still close it.
        """
        sock = self._transport.get_extra_info("socket")
        if sock.fileno() >= 0:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, sock.fileno(), inheritable=False)
            os.close(null)

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.BaseProtocol``."""
        reason = self._reason or (f"{exc}" if exc else "the server closed the connection")
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionError(reason))
        self.greeted.exception()  # whoever waits for it has it
        for timer in (self._liveness_timer, self._abort_timer):
            if timer is not None:
                timer.cancel()
        for call in self._open:
            call.fail(self._ended, reason)
        self._open.clear()
        self._wake_sender()
        if not self._closed.done():
            self._closed.set_result(None)
        self._on_lost(self)

    def _check_liveness(self) -> None:
        """Send PING to a silent server, or drop it. A timer calls it while calls are open."""
        now = time.monotonic()
        match self._liveness.check(now, reading_paused=self._reading_paused):
            case LivenessCheck.DROP:
                self.drop(f"the server said nothing for {self._liveness.silent_s(now):.0f} s")
                return
            case LivenessCheck.PING:
                self.write(self.calls.ping(b""))
        wait_s = self._liveness.deadline - now + 0.001
        self._liveness_timer = self.loop.call_later(wait_s, self._liveness_due)

    def _liveness_due(self) -> None:
        self._liveness_timer = None
        if self._open:
            self._check_liveness()
