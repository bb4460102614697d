"""One append on a blocking connection, as its caller uses it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from gazette_sdk.errors import StreamProtocolError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import Status
from gazette_sdk.protocol.stream_liveness import Liveness, Verdict
from gazette_sdk.transport.target import Destination
from gazette_sdk.transport.wires.base import BlockingCall
from gazette_sdk.transport.wires.stream.blocking_connection import BlockingConnection
from gazette_sdk.transport.wires.stream.endings import malformed, no_response, raise_failure
from gazette_sdk.transport.wires.stream.open_call import Ended

if TYPE_CHECKING:
    from gazette_sdk.transport.wires.stream.blocking import BlockingClient

__all__ = ["StreamBlockingCall"]


class StreamBlockingCall(BlockingCall):
    """Append that was sent. See :class:`BlockingCall`.

    Args:
        client: gets the connection back.
        connection: its own until it is over.
        to: the broker.
        timeout_s: its time limit; 0 for none.

    Attributes:
        status: the STATUS that ended it.
        ended: why it ended otherwise.
        reason: the same in words.
    """

    __slots__ = (
        "_client",
        "_connection",
        "_expires_at",
        "_liveness",
        "_payload",
        "_timeout_s",
        "_to",
        "ended",
        "reason",
        "status",
    )

    def __init__(
        self,
        client: BlockingClient,
        connection: BlockingConnection,
        to: Destination,
        timeout_s: float,
    ) -> None:
        self.status: Status | None = None
        self.ended: Ended | None = None
        self.reason = ""
        self._client = client
        self._connection = connection
        self._to = to
        self._timeout_s = timeout_s
        self._payload: bytes | None = None
        now = time.monotonic()
        self._expires_at = now + timeout_s if timeout_s else 0.0
        self._liveness = Liveness(now)

    @property
    def over(self) -> bool:
        """See :class:`BlockingCall`."""
        return self.status is not None or self.ended is not None

    def send(self, data: bytes) -> None:
        """Send the append; if that fails, it is over."""
        self._liveness.sent(len(data))
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
                check_at = self._check_at()
                wait_s = (check_at if ends_at is None else min(ends_at, check_at)) - now
                self._receive(max(wait_s, 0.0))
                if self.status is not None:
                    break
                now = time.monotonic()
                self._check(now)
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
                    self._check(time.monotonic())
        except BaseException:
            self.give_up("it was given up")
            raise

    def response(self) -> pb.AppendResponse:
        """See :class:`BlockingCall`."""
        to = self._to
        if self.status is None or self.status.code:
            raise_failure(to, self)
        if self._payload is None:
            raise no_response(to)
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
        """Take what arrives within a time. Return True if anything did, if only an end."""
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
        if connection.status is None:
            self._liveness.heard(time.monotonic())
        else:
            self._payload = connection.payload
            self.status = connection.status
            self._client.give_back(connection)
        return True

    def _check_at(self) -> float:
        """Return when to check for silence and the time limit."""
        deadline = self._liveness.deadline
        return min(deadline, self._expires_at) if self._expires_at else deadline

    def _check(self, now: float) -> None:
        """If it is due: send PING to a silent server or give it up, and keep the time limit."""
        if now < self._check_at() or self.over:
            return
        if self._expires_at and now >= self._expires_at:
            self._fail(Ended.EXPIRED, f"no answer within {self._timeout_s:g} s")
            return
        match self._liveness.check(now):
            case Verdict.DROP:
                silent_s = self._liveness.silent_s(now)
                self._fail(Ended.LOST, f"the server said nothing for {silent_s:.0f} s")
            case Verdict.PING:
                try:
                    self._connection.send_soon(self._connection.calls.ping(b""))
                except OSError as error:
                    self._fail(Ended.LOST, str(error))

    async def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until something arrived, or a check is due."""
        ready = asyncio.Event()
        descriptor = self._connection.fileno()
        loop.add_reader(descriptor, ready.set)
        try:
            async with asyncio.timeout(max(0.0, self._check_at() - time.monotonic())):
                await ready.wait()
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(descriptor)

    def _fail(self, ended: Ended, reason: str) -> None:
        self.ended = Ended.CLOSED if self._client.is_closed else ended
        self.reason = reason
        self._client.discard(self._connection)
