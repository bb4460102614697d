"""A connection while it carries appends of one journal, several in flight.

Each append that is begun while another is in flight asks to be run only after the success of
the call before it on the connection, which is that append: nobody else uses the connection
meanwhile. When the last one was answered, the connection goes back to its pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from gazette_sdk.errors import CallError, GazetteError, StreamProtocolError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.service import RPCS_BY_NAME
from gazette_sdk.transport.append.lane import Answered, Content
from gazette_sdk.transport.target import Destination
from gazette_sdk.transport.wires.stream.connection import Connection
from gazette_sdk.transport.wires.stream.open_call import OpenCall
from gazette_sdk.transport.wires.stream.outcome import raise_failure, too_long

__all__ = ["JOINED_BYTES", "LINES_MAX", "StreamLine", "send_piece", "send_pieces"]

LINES_MAX = 16
"""Lines of one transport at once. Appends of further journals share connections, one in flight
each: a program that writes to thousands of journals needs no connection for each."""

JOINED_BYTES = 64 << 10
"""An append of up to so much content, all there, is one write."""

FRAME_BYTES = 512 << 10
"""Content of one frame, where there is more: fewer frames cost less, longer ones wait longer, and
are copied, where the server is slow."""

_APPEND = RPCS_BY_NAME["Append"].number


class StreamLine:
    """Appends of one journal on one connection.

    Args:
        connection: taken for this alone.
        head: the head of a call, and whether it is to be run only after the success of the one
            before it.
        bound: bounds a call's time.
        decode: the response of a call that succeeded.
        over: is called when none is in flight any more.
    """

    def __init__(
        self,
        connection: Connection,
        head: Callable[[Destination, bool], bytes],
        bound: Callable[[OpenCall], None],
        decode: Callable[[Destination, bytes], pb.AppendResponse],
        over: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._head = head
        self._bound = bound
        self._decode = decode
        self._over = over
        self._calls: deque[OpenCall] = deque()

    @property
    def in_flight(self) -> int:
        """See :class:`~gazette_sdk.transport.wires.base.Line`."""
        return len(self._calls)

    @property
    def usable(self) -> bool:
        """See :class:`~gazette_sdk.transport.wires.base.Line`."""
        return self._connection.usable

    async def begin(
        self, to: Destination, opening: bytes, content: Content, answered: Answered
    ) -> None:
        """See :class:`~gazette_sdk.transport.wires.base.Line`."""
        head = self._head(to, bool(self._calls))
        connection = self._connection
        is_small = isinstance(content, Sequence) and sum(map(len, content)) <= JOINED_BYTES
        try:
            if is_small:
                assert isinstance(content, Sequence)
                joined = content[0] if len(content) == 1 else b"".join(content)
                call = connection.append(opening, joined, head)
            else:
                call = connection.begin(_APPEND, opening, head)
        except StreamProtocolError as error:
            connection.unused()
            if not self._calls:
                self._over()
            raise too_long(to, error) from error
        self._calls.append(call)
        call.when_over(partial(self._answered, to, answered))
        self._bound(call)
        if is_small:
            return
        try:
            await send_pieces(call, content)
        except BaseException as error:
            if isinstance(error, Exception) and call not in self._calls:
                return  # it was answered before
            # The call's STATUS still comes, which nobody waits for; the append is rolled back.
            call.when_over(self._forgotten)
            call.give_up()
            raise

    def give_up(self) -> None:
        """See :class:`~gazette_sdk.transport.wires.base.Line`."""
        for call in reversed(tuple(self._calls)):
            call.when_over(self._forgotten)
            call.give_up()

    # ------------------------------------------------------------------- parts

    def _answered(self, to: Destination, answered: Answered, call: OpenCall) -> None:
        self._forgotten(call)
        result: pb.AppendResponse | Exception
        try:
            raise_failure(to, call)
            item = call.take()
            if item is None:
                result = CallError(
                    f"Append at {to.where}: ended without a response", journal=to.journal
                )
            else:
                result = self._decode(to, item.payload)
        except GazetteError as error:
            result = error
        answered(result)

    def _forgotten(self, call: OpenCall) -> None:
        self._calls.remove(call)
        if not self._calls:
            self._over()


async def send_pieces(call: OpenCall, content: Content) -> None:
    """Send the content of an append, and its end, unless it is answered before that."""
    if isinstance(content, AsyncIterator):
        async for piece in content:
            if not await send_piece(call, piece):
                return
    else:
        for piece in content:
            if not await send_piece(call, piece):
                return
    call.send_end()


async def send_piece(call: OpenCall, piece: bytes) -> bool:
    """Send a piece of content in frames, and wait while too much is unsent; false if it's over."""
    if len(piece) <= FRAME_BYTES:
        call.send_content(piece)
        await call.drained()
        return not call.over
    view = memoryview(piece)
    for begin in range(0, len(piece), FRAME_BYTES):
        call.send_content(view[begin : begin + FRAME_BYTES])
        await call.drained()
        if call.over:
            return False
    return True
