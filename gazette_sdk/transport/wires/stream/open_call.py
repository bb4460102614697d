"""One call on a connection of the stream transport, as its caller uses it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from gazette_sdk.protocol.stream_calls import Item, Status
from gazette_sdk.transport.wires.stream.call import Call, Ended

if TYPE_CHECKING:
    from gazette_sdk.transport.wires.stream.connection import Connection

__all__ = ["HELD_BYTES_MAX", "OpenCall"]

HELD_BYTES_MAX = 1 << 20
"""More bytes than this that a caller has not taken yet stop the reading."""

HELD_BYTES_LOW = HELD_BYTES_MAX // 4
"""Reading goes on when no more than this is left."""


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
            self.fail(Ended.EXPIRED, f"no answer within {timeout_s:g} s")

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

    def fail(self, ended: Ended, reason: str) -> None:
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
