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
from gazette_sdk.server.metrics import meters_of
from gazette_sdk.server.outcomes import Outcome
from gazette_sdk.server.stream_output import StreamOutput

__all__ = ["Answer", "Intake", "StreamCall", "StreamMethod", "check_length"]


class Answer(NamedTuple):
    """The only response of a call.

    Attributes:
        response: encoded.
        success: whether calls which were to run after its success may run.
    """

    response: bytes
    success: bool = True


Serve: TypeAlias = Callable[["StreamCall"], Coroutine[Any, Any, Answer | None]]


class StreamMethod:
    """A method and who serves it.

    Args:
        rpc: its name, number and shape.
        serve: serves one call. It returns the answer of a method that has one response, and
            nothing where the responses were sent. A
            :class:`~gazette_sdk.errors.GazetteError` fails the call.
    """

    def __init__(self, rpc: Rpc, serve: Serve) -> None:
        self.rpc = rpc
        self.path = rpc.path
        self.serve = serve
        self.meters = meters_of(rpc.path, rpc.client_streams, rpc.server_streams)


INTAKE_LOW_BYTES = 256 << 10
"""A connection which is not read, since too much waits, is read again when so little waits."""


@dataclass(slots=True)
class Intake:
    """What a connection received and nobody took yet.

    Attributes:
        resume: makes the connection be read again, if nothing else is against it.
        waiting_bytes: what waits.
        paused: whether the connection is not read meanwhile.
    """

    resume: Callable[[], None]
    waiting_bytes: int = 0
    paused: bool = False


class StreamCall:
    """A call under way, or waiting for its turn.

    Attributes:
        number: of the call, on its connection.
        method: what is called.
        request: the encoded request.
        context: what is known of the call beside its request.
        given_up: why the call is not to go on; set before it is cancelled.
        deadline_s: when its caller's patience ends, on the loop's clock; none if it doesn't.
        metadata: as sent.
        received: messages taken, the request and the end of its stream included.
    """

    __slots__ = (
        "_calls",
        "_ended",
        "_intake",
        "_items",
        "_output",
        "_waiter",
        "context",
        "deadline_s",
        "given_up",
        "metadata",
        "method",
        "number",
        "received",
        "request",
    )

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
        self.given_up: Outcome | None = None
        self.deadline_s: float | None = None
        self.received = 1
        self._calls = calls
        self._output = output
        self._intake = intake
        self._items: deque[Item] = deque()
        self._ended = began.sent
        self._waiter: asyncio.Future[None] | None = None
        intake.waiting_bytes += len(began.request)

    # --------------------------------------------------------------- the client's side

    def put(self, item: Item) -> None:
        """A further message or content arrived."""
        self._items.append(item)
        self._intake.waiting_bytes += len(item.payload)
        self._wake()

    def end(self) -> None:
        """The client has sent everything."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> Item | None:
        """The client's next message or content, or nothing when it has sent everything.

        Being cancelled loses nothing.
        """
        while (item := self.take()) is None and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return item

    def take(self) -> Item | None:
        """The client's next message or content, if it is there."""
        if not self._items:
            return None
        item = self._items.popleft()
        self.received += 1
        self._intake.waiting_bytes -= len(item.payload)
        if self._intake.paused and self._intake.waiting_bytes <= INTAKE_LOW_BYTES:
            self._intake.resume()
        return item

    def last(self) -> Item | None:
        """The client's last message or content, if it is there and its end, too; not taken."""
        whole = self._ended and len(self._items) == 1 and self.given_up is None
        return self._items[0] if whole else None

    def forget(self) -> None:
        """Drop what nobody will take any more."""
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
        """Send a response together with what follows it, or with :meth:`flush`.

        Raises:
            CallError: it is too long.
        """
        self._output.hold(self._message(response))

    def flush(self) -> None:
        """Send what is held."""
        self._output.flush()

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
