"""Appends on one connection of the stream transport, several in flight.

Each append that is begun while another is in flight asks to run only after the success of the call
before it on the connection. That call is the append begun before: nobody else uses the connection
meanwhile. A pipeline on a shared connection has one append in flight and asks for nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gazette_sdk.errors import GazetteError, StreamProtocolError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import PIPELINE_MAX
from gazette_sdk.transport.target import Destination, Peer
from gazette_sdk.transport.wires.base import Answered, AppendPipeline, PreparedAppend
from gazette_sdk.transport.wires.stream.call import too_long
from gazette_sdk.transport.wires.stream.connection import Connection
from gazette_sdk.transport.wires.stream.open_call import OpenCall
from gazette_sdk.transport.wires.stream.pool import Pool

if TYPE_CHECKING:
    from gazette_sdk.transport.wires.stream.transport import StreamWire

__all__ = ["JOINED_BYTES", "PIPELINES_MAX", "StreamPipeline", "send_piece"]

PIPELINES_MAX = 16
"""Pipelines on one event loop with a connection of their own. Further ones share connections: a
program that writes to thousands of journals needs no connection for each."""

JOINED_BYTES = 64 << 10
"""An append of up to so much content is one write."""

FRAME_BYTES = 512 << 10
"""Content of one frame, where there is more. Fewer frames cost less. Longer frames wait longer, and
are copied where the server is slow."""


class StreamPipeline(AppendPipeline):
    """Appends to one broker on one connection.

    Args:
        wire: makes heads of calls, and decodes responses.
        peer: the broker.
        pool: counts the pipelines that have a connection of their own.
        connection: taken for this pipeline.
    """

    __slots__ = (
        "_calls",
        "_capacity",
        "_connection",
        "_is_exclusive",
        "_pool",
        "_ready",
        "_sending",
        "_wire",
        "peer",
    )

    def __init__(self, wire: StreamWire, peer: Peer, pool: Pool, connection: Connection) -> None:
        self.peer = peer
        self._wire = wire
        self._pool = pool
        self._connection = connection
        self._is_exclusive = connection.exclusive
        self._capacity = PIPELINE_MAX if self._is_exclusive else 1
        self._calls: deque[OpenCall] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._ready: Callable[[], None] | None = None
        pool.pipelines += self._is_exclusive

    @property
    def in_flight(self) -> int:
        """See :class:`AppendPipeline`."""
        return len(self._calls)

    @property
    def can_begin(self) -> bool:
        """See :class:`AppendPipeline`."""
        connection = self._connection
        if self._calls and not connection.open_count:
            return False  # all were answered at once: the connection went back to its pool
        return self._sending is None and len(self._calls) < self._capacity and connection.usable

    def begin(self, append: PreparedAppend, content: Sequence[bytes], answered: Answered) -> None:
        """See :meth:`AppendPipeline.begin`."""
        to, connection, wire = append.to, self._connection, self._wire
        head = wire.append_head(to, after_success=bool(self._calls))
        is_small = sum(map(len, content)) <= JOINED_BYTES
        try:
            if is_small:
                joined = content[0] if len(content) == 1 else b"".join(content)
                call = connection.append(append.encoded, joined, head)
            else:
                call = connection.begin(to.rpc.number, append.encoded, head)
        except StreamProtocolError as error:
            if not self._calls:
                self.close()
            raise too_long(to, error) from error
        self._calls.append(call)
        call.when_over(partial(self._answered, to, answered))
        wire.bound(call)
        if not is_small:
            self._sending = asyncio.create_task(_send_content(call, content))
            self._sending.add_done_callback(self._sent)

    def when_ready(self, callback: Callable[[], None]) -> None:
        """See :meth:`AppendPipeline.when_ready`."""
        self._ready = callback

    def give_up(self) -> None:
        """See :meth:`AppendPipeline.give_up`."""
        self._ready = None
        if self._sending is not None:
            self._sending.cancel()
        for call in reversed(tuple(self._calls)):
            call.when_over(self._remove)
            call.give_up()

    def close(self) -> None:
        """See :meth:`AppendPipeline.close`."""
        assert not self._calls
        self._connection.unused()
        self._end()

    # ------------------------------------------------------------------- parts

    def _sent(self, sending: asyncio.Task[None]) -> None:
        self._sending = None
        if not sending.cancelled():
            sending.result()
        callback, self._ready = self._ready, None
        if callback is not None:
            callback()

    def _answered(self, to: Destination, answered: Answered, call: OpenCall) -> None:
        self._remove(call)
        result: pb.AppendResponse | Exception
        try:
            result = self._wire.only_response(to, call)
        except GazetteError as error:
            result = error
        answered(result)

    def _remove(self, call: OpenCall) -> None:
        self._calls.remove(call)
        if not self._calls:
            self._end()

    def _end(self) -> None:
        self._pool.pipelines -= self._is_exclusive


async def _send_content(call: OpenCall, content: Sequence[bytes]) -> None:
    """Send the content of an append, and its end, unless it is answered before that."""
    for piece in content:
        if not await send_piece(call, piece):
            return
    call.send_end()


async def send_piece(call: OpenCall, piece: bytes) -> bool:
    """Send a piece of content in frames, and wait while too much is unsent.

    Returns:
        False if the call is over.
    """
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
