"""One call of the stream transport, as the method that serves it sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from gazette_sdk.errors import CallError
from gazette_sdk.protocol.service import Rpc
from gazette_sdk.protocol.stream_calls import CallBegan, Item, ServerCalls
from gazette_sdk.protocol.stream_frames import MESSAGE_BYTES_MAX
from gazette_sdk.server.call import Call
from gazette_sdk.server.grpc_server import ActiveCall
from gazette_sdk.server.metrics import meters_of
from gazette_sdk.server.outcomes import Outcome
from gazette_sdk.server.stream_output import StreamOutput

__all__ = [
    "Answer",
    "AnswerNow",
    "ConnectionParts",
    "Intake",
    "Serve",
    "StartedCall",
    "StreamCall",
    "StreamMethod",
    "check_length",
]


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


INTAKE_LOW_BYTES = 256 << 10
"""A connection that is not read, since too much waits, is read again when only this much waits."""


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


@dataclass(frozen=True, slots=True)
class ConnectionParts:
    """The parts of a connection that its calls use.

    Attributes:
        calls: state machine of its calls.
        output: what is sent goes there.
        intake: what it received.
    """

    calls: ServerCalls
    output: StreamOutput
    intake: Intake


class StreamCall:
    """A call in progress, or waiting for those before it.

    Attributes:
        number: of the call, on its connection.
        method: the method called.
        request: the encoded request.
        context: what is known of the call beside its request.
        given_up: reason for which the call ends early; set before it is cancelled.
        deadline_s: time at which its caller gives up, on the loop's clock; ``None`` for none.
        metadata: as sent.
        received: messages taken, the request and the end of its stream included.
        active: entry of the call in the diagnostics.
    """

    __slots__ = (
        "_calls",
        "_ended",
        "_intake",
        "_items",
        "_output",
        "_waiter",
        "active",
        "context",
        "deadline_s",
        "given_up",
        "metadata",
        "method",
        "number",
        "received",
        "request",
    )

    active: ActiveCall
    context: Call

    def __init__(self, began: CallBegan, method: StreamMethod, connection: ConnectionParts) -> None:
        self.number = began.call
        self.method = method
        self.request = began.request
        self.metadata = began.head.metadata
        self.given_up: Outcome | None = None
        self.deadline_s: float | None = None
        self.received = 1
        self._calls = connection.calls
        self._output = connection.output
        self._intake = connection.intake
        self._items: deque[Item] = deque()
        self._ended = began.sent
        self._waiter: asyncio.Future[None] | None = None
        connection.intake.waiting_bytes += len(began.request)

    # --------------------------------------------------------------- the client's side

    def put(self, item: Item) -> None:
        """Add a message or content that arrived."""
        self._items.append(item)
        self._intake.waiting_bytes += len(item.payload)
        self._wake()

    def end(self) -> None:
        """Note that the client has sent everything."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> Item | None:
        """Return the client's next message or content; ``None`` when it has sent everything.

        Cancellation loses nothing.
        """
        while (item := self.take()) is None and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return item

    def take(self) -> Item | None:
        """Return the client's next message or content; ``None`` if it has not arrived."""
        if not self._items:
            return None
        item = self._items.popleft()
        self.received += 1
        self._intake.waiting_bytes -= len(item.payload)
        if self._intake.paused and self._intake.waiting_bytes <= INTAKE_LOW_BYTES:
            self._intake.resume()
        return item

    @property
    def is_whole(self) -> bool:
        """True if all of it was received, and it was not given up."""
        return self._ended and self.given_up is None

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
        check_length(response)
        frame = self._calls.message(self.number, response)
        self.method.meters.sent += 1
        return frame


def check_length(response: bytes) -> None:
    """Refuse a response that no frame can carry.

    Raises:
        CallError: it is too long.
    """
    if len(response) > MESSAGE_BYTES_MAX:
        raise CallError(
            f"a response of {len(response)} bytes exceeds {MESSAGE_BYTES_MAX}; ask for less",
            code="RESOURCE_EXHAUSTED",
        )
