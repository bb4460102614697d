"""One append on a blocking connection, for the one who makes it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from google.protobuf.message import DecodeError

from gazette_sdk.errors import CallError, StreamProtocolError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import Status
from gazette_sdk.transport.target import Destination
from gazette_sdk.transport.wires.base import BlockingCall
from gazette_sdk.transport.wires.stream.blocking_connection import BlockingConnection
from gazette_sdk.transport.wires.stream.connection import (
    PING_AFTER_S,
    SILENCE_MAX_S,
    STALL_MAX_S,
    STALLED_BYTES,
)
from gazette_sdk.transport.wires.stream.open_call import Ended
from gazette_sdk.transport.wires.stream.outcome import malformed, raise_failure

__all__ = ["Keeper", "StreamBlockingCall"]


class Keeper(Protocol):
    """Who keeps the connections of calls.

    Attributes:
        is_closed: they were all closed on purpose.
    """

    is_closed: bool

    def give_back(self, connection: BlockingConnection) -> None:
        """A call has ended; another may follow on its connection."""

    def discard(self, connection: BlockingConnection) -> None:
        """A connection is of no use any more."""


class StreamBlockingCall(BlockingCall):
    """An append that was sent. See :class:`BlockingCall`.

    Args:
        keeper: gets the connection back.
        connection: its own until it is over.
        to: the broker.
        timeout_s: what it may take; 0 for any time.

    Attributes:
        status: the STATUS that ended it.
        ended: why it ended otherwise.
        reason: the same in words.
    """

    __slots__ = (
        "_connection",
        "_expires_at",
        "_heard_at",
        "_keeper",
        "_look_at",
        "_payload",
        "_timeout_s",
        "_to",
        "_unheard_bytes",
        "ended",
        "reason",
        "status",
    )

    def __init__(
        self, keeper: Keeper, connection: BlockingConnection, to: Destination, timeout_s: float
    ) -> None:
        self.status: Status | None = None
        self.ended: Ended | None = None
        self.reason = ""
        self._keeper = keeper
        self._connection = connection
        self._to = to
        self._unheard_bytes = 0
        self._timeout_s = timeout_s
        self._payload: bytes | None = None
        now = self._heard_at = time.monotonic()
        self._expires_at = now + timeout_s if timeout_s else 0.0
        self._look_at = now + PING_AFTER_S
        if timeout_s:
            self._plan(now, PING_AFTER_S)

    @property
    def over(self) -> bool:
        """See :class:`BlockingCall`."""
        return self.status is not None or self.ended is not None

    def send(self, data: bytes) -> None:
        """Send it; if that fails, it is over."""
        self._unheard_bytes = len(data)
        try:
            self._connection.send(data)
        except TimeoutError:
            self._fail(Ended.LOST, "the server does not read what is sent")
        except OSError as error:
            self._fail(Ended.LOST, str(error))

    def wait(self, timeout_s: float | None) -> bool:
        """See :class:`BlockingCall`."""
        now = time.monotonic()
        ends_at = None if timeout_s is None else now + timeout_s
        try:
            while not self.over:
                wait_s = self._look_at - now
                if ends_at is not None and ends_at < self._look_at:
                    wait_s = ends_at - now
                self._receive(max(wait_s, 0.0))
                if self.status is not None:
                    break
                now = time.monotonic()
                self._look(now)
                if ends_at is not None and now >= ends_at:
                    return self.over
        except BaseException:
            self.give_up("its caller was interrupted")
            raise
        return True

    async def finish(self) -> None:
        """See :class:`BlockingCall`."""
        loop = asyncio.get_running_loop()
        try:
            while not self.over:
                if not self._receive(0):
                    await self._readable(loop)
                    self._look(time.monotonic())
        except BaseException:
            self.give_up("it was given up")
            raise

    def response(self) -> pb.AppendResponse:
        """See :class:`BlockingCall`."""
        to = self._to
        if self.status is None or self.status.code:
            raise_failure(to, self)
        if self._payload is None:
            raise CallError(
                f"{to.rpc.name} at {to.where}: ended without a response", journal=to.journal
            )
        try:
            return pb.AppendResponse.FromString(self._payload)
        except DecodeError as error:
            raise malformed(to, error) from error

    def interrupt(self) -> None:
        """See :class:`BlockingCall`."""
        self._connection.interrupt()

    def give_up(self, reason: str) -> None:
        """See :class:`BlockingCall`."""
        if not self.over:
            self._fail(Ended.LOST, reason)

    # ------------------------------------------------------------------- parts

    def _receive(self, wait_s: float) -> bool:
        """Take what comes within a time; whether anything came, if only an end."""
        connection = self._connection
        try:
            connection.receive(wait_s)
        except (TimeoutError, BlockingIOError):
            return False
        except StreamProtocolError as error:
            if connection.status is None:
                self._fail(Ended.LOST, f"the server broke the rules of the wire: {error}")
                return True
            # It did so behind the answer, which is good; the connection takes no call any more.
        except OSError as error:
            self._fail(Ended.LOST, str(error))
            return True
        status = connection.status
        if status is None:
            self._unheard_bytes = 0
            now = self._heard_at = time.monotonic()
            self._plan(now, PING_AFTER_S)
        else:
            self._payload = connection.payload
            self.status = status
            self._keeper.give_back(connection)
        return True

    def _look(self, now: float) -> None:
        """If it is time: find out whether a silent server lives, and whether time ran out."""
        if now < self._look_at or self.over:
            return
        if self._expires_at and now >= self._expires_at:
            self._fail(Ended.EXPIRED, f"no answer within {self._timeout_s:g} s")
            return
        silent_s = now - self._heard_at
        bound_s = STALL_MAX_S if self._unheard_bytes > STALLED_BYTES else SILENCE_MAX_S
        if silent_s >= bound_s:
            self._fail(Ended.LOST, f"the server said nothing for {silent_s:.0f} s")
            return
        try:
            self._connection.say(self._connection.calls.ping(b""))
        except OSError as error:
            self._fail(Ended.LOST, str(error))
            return
        self._plan(now, min(bound_s - silent_s, PING_AFTER_S))

    def _plan(self, now: float, wait_s: float) -> None:
        """When to look the next time."""
        self._look_at = now + wait_s
        if self._expires_at:
            self._look_at = min(self._look_at, self._expires_at)

    async def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until something came, or it is time to look."""
        ready = loop.create_future()
        descriptor = self._connection.fileno()
        loop.add_reader(descriptor, _resolve, ready)
        try:
            await asyncio.wait([ready], timeout=max(0.0, self._look_at - time.monotonic()))
        finally:
            loop.remove_reader(descriptor)
            ready.cancel()

    def _fail(self, ended: Ended, reason: str) -> None:
        self.ended = Ended.CLOSED if self._keeper.is_closed else ended
        self.reason = reason
        self._keeper.discard(self._connection)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
