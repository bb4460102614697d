"""An appender of one journal over a route that does as a test says, without sockets.

Its event loop runs in a thread of its own, so that the thread of the test is a plain one::

    with ScriptedJournal() as journal:
        append = journal.append(b"content")
        journal.route.calls[0].answer()
        append.wait(WAIT_S)
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.appender import AppendSender, AppendService, JournalAppender
from gazette_sdk.transport.append.queue import STREAMING_COUNT_MIN, PendingAppend
from gazette_sdk.transport.base import AppendRoute
from gazette_sdk.transport.wire import Answered, BlockingCall
from support.scripted_broker import append_ok

__all__ = [
    "JOURNAL",
    "NEVER_S",
    "WAIT_S",
    "LoopThread",
    "ScriptedCall",
    "ScriptedJournal",
    "ScriptedRoute",
    "Sent",
    "in_thread",
    "until",
]

JOURNAL = "a/journal"
WAIT_S = 10.0
NEVER_S = 600.0


def until(holds: Callable[[], Any]) -> None:
    """Wait for what has no event of its own."""
    ends_at = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends_at, "it does not come to hold"
        time.sleep(0.001)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    """Start a function in a thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


class ScriptedCall(BlockingCall):
    """Inline append that ends when the test answers it.

    Attributes:
        content: the content.
        thread: name of the thread that sent it.
        received_by: name of the thread that received the answer.
        given_up: reason with which it was given up.
        is_waited_for: a thread or coroutine waits for its answer.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.thread = threading.current_thread().name
        self.received_by = ""
        self.given_up = ""
        self._outcome: pb.AppendResponse | BaseException | None = None
        self._changed = threading.Condition()
        self._user = threading.Lock()

    def answer(self, outcome: pb.AppendResponse | BaseException | None = None) -> None:
        """End it; an error that is no :class:`Exception` is raised by whoever waits."""
        with self._changed:
            if self._outcome is None:
                self._outcome = append_ok() if outcome is None else outcome
            self._changed.notify_all()

    @property
    def is_waited_for(self) -> bool:
        return self._user.locked()

    @property
    def over(self) -> bool:
        return self._outcome is not None

    def wait(self, timeout_s: float | None) -> bool:
        assert self._user.acquire(blocking=False), "it has one user at a time"
        try:
            with self._changed:
                self._changed.wait_for(lambda: self.over, timeout_s)
            interrupt = self._outcome
            if interrupt is not None and not isinstance(interrupt, pb.AppendResponse | Exception):
                self._outcome = UnavailableError("its caller was interrupted")
                raise interrupt
            return self.over
        finally:
            self._user.release()

    async def finish(self) -> None:
        assert self._user.acquire(blocking=False), "it has one user at a time"
        try:
            while not self.over:  # noqa: ASYNC110 - other threads answer
                await asyncio.sleep(0.001)
        except BaseException:
            self.give_up("it was cancelled")
            raise
        finally:
            self._user.release()

    def response(self) -> pb.AppendResponse:
        self.received_by = threading.current_thread().name
        assert self._outcome is not None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def interrupt(self) -> None:
        self.answer(UnavailableError("it was interrupted"))

    def give_up(self, reason: str) -> None:
        assert not self.is_waited_for or asyncio.get_running_loop()
        self.given_up = reason
        self.answer(UnavailableError(reason))


class Sent(NamedTuple):
    """Append that the event loop sent."""

    request: pb.AppendRequest
    content: bytes
    answered: Answered


class ScriptedRoute(AppendRoute):
    """Route on which nothing is answered but by the test.

    Attributes:
        calls: all inline appends.
        sent: all appends of the event loop.
        in_flight: those of them that are not answered.
        capacity: of the latter.
        is_open: appends of the event loop can be sent.
        opened: number of calls of :meth:`open`.
        open_error: raised by :meth:`open`.
        has_connection: inline appends can be sent.
        inline_error: raised by :meth:`send_inline`.
        prepared: names of the threads that prepared a connection for inline appends.
        failures: errors that it was told.
        accepted: responses that it was told.
        accept_error: raised by :meth:`accept`.
        is_given_up: answers are dropped.
        wake: of the appender.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.calls: list[ScriptedCall] = []
        self.sent: list[Sent] = []
        self.in_flight: deque[Sent] = deque()
        self.capacity = 8
        self.is_open = True
        self.opened = 0
        self.open_error: Exception | None = None
        self.has_connection = True
        self.inline_error: BaseException | None = None
        self.prepared: list[str] = []
        self.failures: list[Exception] = []
        self.accepted: list[pb.AppendResponse] = []
        self.accept_error: Exception | None = None
        self.is_given_up = False
        self.wake: Callable[[], None] = lambda: None
        self._loop = loop

    def try_begin(
        self,
        request: pb.AppendRequest,
        content: Sequence[bytes],
        answered: Answered,
        traceparent: str = "",
    ) -> bool:
        assert asyncio.get_running_loop() is self._loop
        assert not self.calls or self.calls[-1].over, "inline appends are alone in flight"
        if not self.is_open or len(self.in_flight) >= self.capacity:
            return False
        sent = Sent(request, b"".join(content), answered)
        self.in_flight.append(sent)
        self.sent.append(sent)
        return True

    async def open(self, request: pb.AppendRequest) -> None:
        assert not self.in_flight
        self.opened += 1
        if self.open_error is not None:
            raise self.open_error
        self.is_open = True

    def give_up(self) -> None:
        self.is_given_up = True
        self.in_flight.clear()

    def send_inline(self, content: bytes, traceparent: str = "") -> BlockingCall | None:
        assert not self.in_flight
        assert not self.calls or self.calls[-1].over, "inline appends are alone in flight"
        error, self.inline_error = self.inline_error, None
        if error is not None:
            raise error
        if not self.has_connection:
            return None
        self.calls.append(ScriptedCall(content))
        return self.calls[-1]

    def prepare_inline(self) -> None:
        self.prepared.append(threading.current_thread().name)

    def accept(self, response: pb.AppendResponse) -> None:
        if self.accept_error is not None:
            raise self.accept_error
        self.accepted.append(response)

    def failed(self, error: Exception) -> None:
        self.failures.append(error)

    def contents(self) -> list[bytes]:
        """Return the content of all appends of the event loop."""
        return [sent.content for sent in self.sent]


class LoopThread:
    """Event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="the loop", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the loop; wait for its result, which may be a coroutine."""

        async def there() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(there(), self.loop).result(WAIT_S)

    def turn(self, count: int = 5) -> None:
        """Let the loop do what is ready."""
        for _ in range(count):
            self.call(lambda: None)

    def stop(self) -> None:
        """End the loop."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(WAIT_S)
            self.loop.close()


async def _no_pause(_attempt: int) -> None:
    await asyncio.sleep(0)


class ScriptedJournal:
    """A journal, its appender, and the loop of the latter.

    Args:
        options: of the service.
    """

    def __init__(self, **options: Any) -> None:
        self.thread = LoopThread()
        self.route = ScriptedRoute(self.thread.loop)
        transport: Any = SimpleNamespace(append_route=self._append_route)
        self.service = AppendService(
            transport, loop=self.thread.loop, **({"pause": _no_pause} | options)
        )
        self.appender: JournalAppender = self.service.appender(JOURNAL)
        self.thread.turn()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.thread.loop.is_closed():
            self.thread.call(self.service.aclose)
            assert self.service.pending_bytes == 0
        self.thread.stop()

    def _append_route(self, journal: str, wake: Callable[[], None]) -> ScriptedRoute:
        assert journal == JOURNAL
        self.route.wake = wake
        return self.route

    @property
    def sender(self) -> AppendSender:
        return self.appender._sender

    def append(self, content: bytes, **options: Any) -> PendingAppend:
        """Append from the calling thread."""
        return self.appender.append(content, **options)

    def append_on_loop(self, content: bytes, **options: Any) -> PendingAppend:
        """Append from the event loop."""
        append: PendingAppend = self.thread.call(lambda: self.append(content, **options))
        return append

    def stream(self, count: int = STREAMING_COUNT_MIN) -> None:
        """Append so many writes as one append of the event loop, which is in flight then."""

        def append() -> None:
            for _ in range(count):
                self.append(b".")

        self.thread.call(append)
        until(lambda: self.route.sent)
        assert self.route.contents() == [b"." * count]

    def answer(self, outcome: pb.AppendResponse | Exception | None = None) -> None:
        """Answer the oldest append of the event loop."""
        until(lambda: self.route.in_flight)

        def answer() -> None:
            sent = self.route.in_flight.popleft()
            sent.answered(append_ok() if outcome is None else outcome)

        self.thread.call(answer)

    def answer_all(self) -> None:
        """Answer all appends, whoever sent them, until nothing is pending."""

        def answered() -> bool:
            if self.route.calls:
                self.route.calls[-1].answer()
            if self.route.in_flight:
                self.answer()
            return not [append for append in self.service.pending() if not append.poll()]

        until(answered)
