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
    "ConnectionParts",
    "Intake",
    "Served",
    "StreamCall",
    "StreamMethod",
    "TurnLostError",
    "check_length",
]


class Answer(NamedTuple):
    """The only response of a call.

    Attributes:
        response: encoded.
        success: whether calls which were to run after its success may run.
    """

    response: bytes
    success: bool = True


Served: TypeAlias = tuple[Outcome, Answer | None]
"""What came of a call."""

Serve: TypeAlias = Callable[["StreamCall"], Coroutine[Any, Any, Answer | None]]


class TurnLostError(CallError):
    """A call was begun ahead, waited for its turn, and is not to run now that it came."""

    def __init__(self) -> None:
        super().__init__(
            "an earlier call of this connection failed, and this one was to run after its success",
            code="ABORTED",
        )


class StreamMethod:
    """A method and who serves it.

    Args:
        rpc: its name, number and shape.
        serve: serves one call. It returns the answer of a method that has one response, and
            nothing where the responses were sent. A
            :class:`~gazette_sdk.errors.GazetteError` fails the call.
        minds_its_turn: ``serve`` heeds :attr:`StreamCall.follows`, so that a call may be begun
            before those before it have ended.
    """

    def __init__(self, rpc: Rpc, serve: Serve, *, minds_its_turn: bool = False) -> None:
        self.rpc = rpc
        self.path = rpc.path
        self.serve = serve
        self.minds_its_turn = minds_its_turn
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


@dataclass(frozen=True, slots=True)
class ConnectionParts:
    """What calls need of their connection.

    Attributes:
        calls: its state of calls.
        output: what is sent goes there.
        intake: what it received.
        pass_turn: see :meth:`StreamCall.pass_turn`.
    """

    calls: ServerCalls
    output: StreamOutput
    intake: Intake
    pass_turn: Callable[[object], None]


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
        active: how the diagnostics show it.
        task: that serves it ahead of its turn; none where it is served in turn.
        follows: of a call whose turn has not come, what the call before it passed its turn on
            with: see :meth:`pass_turn`. It must do nothing but wait for :meth:`turn`, unless it
            is bound by the very same.
    """

    __slots__ = (
        "_calls",
        "_connection",
        "_ended",
        "_intake",
        "_is_turn_lost",
        "_items",
        "_output",
        "_turn",
        "_waiter",
        "active",
        "context",
        "deadline_s",
        "follows",
        "given_up",
        "metadata",
        "method",
        "number",
        "received",
        "request",
        "task",
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
        self.task: asyncio.Task[Served] | None = None
        self.follows: object | None = None
        self._connection = connection
        self._turn: asyncio.Future[None] | None = None
        self._is_turn_lost = False
        self._calls = connection.calls
        self._output = connection.output
        self._intake = connection.intake
        self._items: deque[Item] = deque()
        self._ended = began.sent
        self._waiter: asyncio.Future[None] | None = None
        connection.intake.waiting_bytes += len(began.request)

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

    # -------------------------------------------------------------------- its turn

    @property
    def may_begin_ahead(self) -> bool:
        """Whether it can be begun before those before it have ended.

        One that may be given up in the middle is not: who follows it would not learn of that.
        """
        return self.method.minds_its_turn and self.deadline_s is None and self.given_up is None

    def pass_turn(self, bond: object) -> None:
        """Let the next call begin: this one has nothing left to do but to wait.

        Args:
            bond: a call that is bound by the very same object fails if this one does.
        """
        if self.may_begin_ahead:
            self._connection.pass_turn(bond)

    async def turn(self) -> None:
        """Wait until the calls before it have ended.

        Raises:
            TurnLostError: it was to run after success, and the one before it failed.
        """
        while self.follows is not None:
            if self._is_turn_lost:
                raise TurnLostError
            self._turn = asyncio.get_running_loop().create_future()
            try:
                await self._turn
            finally:
                self._turn = None

    def take_turn(self, *, is_lost: bool) -> None:
        """The calls before it have ended; ``is_lost`` where it may not run therefore."""
        self._is_turn_lost = is_lost
        self.follows = self if is_lost else None  # nobody is bound by that
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

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
