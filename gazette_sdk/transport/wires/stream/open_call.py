"""One call on a connection of the stream transport, for the one who makes it."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gazette_sdk.protocol.stream_calls import ClientCalls, Item, Status
from gazette_sdk.transport.rendezvous import Rendezvous

__all__ = ["HELD_BYTES_MAX", "Ended", "OpenCall"]

HELD_BYTES_MAX = 1 << 20
"""More than this of what a caller has not taken yet stops the reading."""

HELD_BYTES_LOW = HELD_BYTES_MAX // 4
"""Reading goes on when so much is left."""


class Ended(enum.Enum):
    """Why a call ended without a STATUS."""

    LOST = "the connection was lost"
    CLOSED = "the transport was closed"
    EXPIRED = "its time ran out"
    FAILED = "its requests failed"


class Carrier(Protocol):
    """The connection of a call.

    Attributes:
        loop: its event loop.
        calls: the state of its calls.
    """

    loop: asyncio.AbstractEventLoop
    calls: ClientCalls

    @property
    def writing_paused(self) -> bool:
        """Whether too much is unsent."""

    def write(self, data: bytes) -> None:
        """Send whole frames."""

    def write_content(self, header: bytes, content: bytes | memoryview) -> None:
        """Send a header and its payload; nothing if there is no header."""

    async def drained(self) -> None:
        """Wait while too much is unsent, and the connection lives. One at a time."""

    def resume_reading(self) -> None:
        """Go on reading, if that was stopped."""

    def give_up(self, call: OpenCall) -> None:
        """What still comes for a call is dropped, up to its STATUS."""


class OpenCall:
    """One call. It ends by a STATUS, or otherwise.

    Attributes:
        number: of the call on its connection.
        status: the STATUS that ended it.
        ended: why it ended otherwise.
        reason: the same in words.
    """

    __slots__ = (
        "_connection",
        "_deadline",
        "_held_bytes",
        "_items",
        "_waiter",
        "_when_over",
        "ended",
        "number",
        "reason",
        "status",
    )

    def __init__(self, connection: Carrier, number: int) -> None:
        self.number = number
        self.status: Status | None = None
        self.ended: Ended | None = None
        self.reason = ""
        self._connection = connection
        self._items: deque[Item] = deque()
        self._held_bytes = 0
        self._waiter: Rendezvous | None = None
        self._when_over: Callable[[OpenCall], None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will come, and nothing more need be sent."""
        return self.status is not None or self.ended is not None

    # ---------------------------------------------------------------- receiving

    def take(self) -> Item | None:
        """The next item, if it is there."""
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
            Whether there is an item.
        """
        while not self._items:
            if self.status is not None or self.ended is not None:
                return False
            await self._wait()
        return True

    async def end(self) -> None:
        """Wait until the call is over."""
        while self.status is None and self.ended is None:
            await self._wait()

    def when_over(self, told: Callable[[OpenCall], None]) -> None:
        """Have a callback of the event loop told once when it is over, instead of waiting."""
        self._when_over = told

    async def _wait(self) -> None:
        waiter = self._waiter = Rendezvous(self._connection.loop)
        try:
            await waiter
        finally:
            self._waiter = None

    # ------------------------------------------------------------------ sending

    def send_message(self, payload: bytes) -> None:
        """Send a further request; nothing is sent if the call is over.

        Raises:
            StreamProtocolError: the server doesn't take so long a message.
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
            piece = view[begin : begin + calls.content_bytes_max]
            connection.write_content(calls.content_header(self.number, len(piece)), piece)

    def send_end(self) -> None:
        """Say that the call is whole. An append commits."""
        self._connection.write(self._connection.calls.end(self.number))

    async def drained(self) -> None:
        """Wait while too much is unsent, and the call is not over."""
        while self._connection.writing_paused and self.status is None and self.ended is None:
            await self._connection.drained()

    # ------------------------------------------------------------------- ending

    def give_up(self) -> None:
        """The caller wants nothing more of it. The connection remains usable, or is dropped."""
        if self.status is None and self.ended is None:
            self._connection.give_up(self)
        if self._deadline is not None:
            self._deadline.cancel()

    def expire_after(self, timeout_s: float) -> None:
        """Bound it: then it ends as expired."""
        self._deadline = self._connection.loop.call_later(timeout_s, self._expire, timeout_s)

    def _expire(self, timeout_s: float) -> None:
        if self.status is None and self.ended is None:
            self._connection.give_up(self)
            self.fail(Ended.EXPIRED, f"no answer within {timeout_s:g} s")

    # -------------------------------------------------------- by its connection

    def took(self, item: Item) -> bool:
        """The server sent an item. Returns whether too much is held now."""
        self._items.append(item)
        self._held_bytes += len(item.payload)
        # A single item is the only response, or will be taken by someone who is about to run.
        return self._held_bytes > HELD_BYTES_MAX and len(self._items) > 1

    def forget(self) -> None:
        """Drop what was not taken."""
        self._items.clear()
        self._held_bytes = 0

    def finish(self, status: Status) -> None:
        """Its STATUS came."""
        self.status = status
        if self._deadline is not None:
            self._deadline.cancel()

    def tell(self) -> None:
        """What came was all that came at once: resume the caller. From the loop's callbacks."""
        is_over = self.status is not None or self.ended is not None
        if self._when_over is not None:
            if is_over:
                self._tell_over()
        elif self._waiter is not None and (is_over or self._items):
            self._waiter.meet()

    def fail(self, ended: Ended, reason: str) -> None:
        """It ends without a STATUS."""
        if self.ended is None:
            self.ended = ended
            self.reason = reason
        if self._deadline is not None:
            self._deadline.cancel()
        if self._when_over is not None:
            self._connection.loop.call_soon(self._tell_over)
        elif self._waiter is not None:
            self._waiter.meet_soon()

    def _tell_over(self) -> None:
        told, self._when_over = self._when_over, None
        if told is not None:
            told(self)
